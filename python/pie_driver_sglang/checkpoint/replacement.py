"""Whether a checkpoint can take the place of the one that is served; reads headers only.

A load into a model that serves cannot be undone cheaply, so all that can be wrong with it is looked
for before the first byte is written: names, shapes and kinds of all tensors, the lengths of the
files, and the settings in `config.json` that change what a model computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.checkpoint.pooling import has_head
from pie_driver_sglang.checkpoint.tensors import CheckpointModel, DamagedError, Tensor
from pie_driver_sglang.checkpoint.unread_tensors import is_head, required_tensors
from pie_driver_sglang.checkpoint.weights import (
    checkpoint_files,
    have_equal_bytes,
    read_tensor_ranges,
    read_tensors,
)
from pie_driver_sglang.errors import WeightsError, quoted

_SAME: Final = (
    "architectures",
    "hidden_act",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts_per_tok",
    "norm_topk_prob",
    "quantization_config",
    "rms_norm_eps",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
)
"""Settings of a model that its tensors do not show."""
_INDEX: Final = "model.safetensors.index.json"
_MOST_NAMED: Final = 3
_HEAD: Final = "lm_head.weight"
_TABLES: Final = ("model.embed_tokens.weight", "transformer.wte.weight")


class ServedCheckpoint(NamedTuple):
    """The tensors that fill the served model, by the headers of the checkpoint it started with."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    model: CheckpointModel

    @staticmethod
    def read(folder: Path) -> ServedCheckpoint:
        """Read the headers of a folder; no tensors where it has no safetensors files."""
        config = _config(folder)
        text = config.get("text_config") or config
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        model = CheckpointModel(layers=int(text.get("num_hidden_layers", 0)), tied=tied)
        found = read_tensors(folder, 2) if checkpoint_files(folder) else []
        return ServedCheckpoint({tensor.name: tensor for tensor in found}, config, model)

    def check_folder(self, folder: Path) -> None:
        """Check that a folder has weights for the same model.

        Raises:
            WeightsError: It does not, with what is wrong.
        """
        self._require_known()
        if not folder.is_dir():
            raise WeightsError(f"{folder} is no folder", "name a folder with safetensors files")
        _require_plain_files(folder)
        try:
            if not checkpoint_files(folder):
                raise WeightsError(
                    f"{folder} has no safetensors files", "save the weights as safetensors"
                )
            tensors = {tensor.name: tensor for tensor in read_tensors(folder, 2)}
            self._check_head(folder, tensors)
        except (DamagedError, OSError, ValueError) as error:
            raise WeightsError(f"the weights in {folder} cannot be read: {error}") from error
        except (AttributeError, LookupError, TypeError) as error:
            raise WeightsError(
                f"{folder}/{_INDEX} lists no tensors: {type(error).__name__}", "write it again"
            ) from error
        self._check_config(folder)
        self._check_complete(tensors)
        self.check_tensors(tensors.values())

    def check_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Check that tensors are some of the model's.

        Raises:
            WeightsError: One is not, with its name.
        """
        self._require_known()
        found = {tensor.name: tensor for tensor in tensors}
        unknown = [name for name in found if name not in self.tensors]
        wrong = [
            f"{name} is not a tensor of the model"
            for name in required_tensors(unknown, self.tensors.keys(), self.model)
        ]
        for name, tensor in found.items():
            own = self.tensors.get(name)
            if own is None:
                continue
            if own.shape != tensor.shape:
                wrong.append(f"{name} is {tensor.shape}, but the model's {own.shape}")
            elif own.floating != tensor.floating:
                wrong.append(f"{name} has another dtype than the model's")
        _raise_for(wrong)

    def check_sizes(self, tensors: Iterable[Tensor]) -> None:
        """Check that what the model does not read takes no more memory than the model.

        Raises:
            WeightsError: A tensor has more values than the model's largest, with its name; or all
                that the model has not, as the head of one that ties it, have more than the model.
        """
        own = [math.prod(tensor.shape) for tensor in self.tensors.values()]
        most, listed = max(own, default=0), list(tensors)
        _raise_for(
            [
                f"{tensor.name} is {tensor.shape}, but the model's largest tensor has {most} values"
                for tensor in listed
                if math.prod(tensor.shape) > most
            ]
        )
        unread = [tensor for tensor in listed if tensor.name not in self.tensors]
        found = sum(math.prod(tensor.shape) for tensor in unread)
        if found > sum(own):
            raise WeightsError(
                f"{len(unread)} tensors that the model has not have {found} values, and the model "
                f"has {sum(own)}",
                "leave them out, or send them in several updates",
            )

    def needed(self) -> frozenset[str]:
        """The tensors that the model cannot do without."""
        return frozenset(self._required(self.tensors.keys(), self.tensors.keys()))

    def _required(self, names: Collection[str], read: Collection[str]) -> list[str]:
        """Those of the model's tensors that an update must have."""
        required = set(required_tensors(names, read, self.model))
        if has_head(self.config.get("architectures") or ()):
            required.update(filter(is_head, names))
        return [name for name in names if name in required]

    def _require_known(self) -> None:
        if not self.tensors:
            raise WeightsError(
                "the model was not loaded from safetensors files, so new weights cannot be checked",
                "start with a folder that has them",
            )

    def _check_complete(self, tensors: Mapping[str, Tensor]) -> None:
        missing = [name for name in self.tensors if name not in tensors]
        _raise_for(
            [
                f"{name} is missing, {self.tensors[name].shape} in the model"
                for name in self._required(missing, tensors.keys())
            ]
        )

    def _check_head(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """A model whose LM head is the embedding table takes no other head."""
        if not self.model.tied or _HEAD not in tensors:
            return
        ranges = read_tensor_ranges(folder)
        for table in _TABLES:
            if table in ranges and not have_equal_bytes(ranges[table], ranges[_HEAD]):
                raise WeightsError(
                    f"{_HEAD} differs from {table}, which the model takes for both",
                    "restart the server with a `config.json` whose `tie_word_embeddings` is false",
                )

    def _check_config(self, folder: Path) -> None:
        config = _config(folder)
        if not config:
            return
        for name in _SAME:
            served, new = self.config.get(name), config.get(name)
            if served != new and None not in (served, new):
                raise WeightsError(
                    f"`{name}` of {folder}/config.json is {quoted(new)}, but {quoted(served)} is "
                    "served",
                    "restart the server with this model",
                )


def _require_plain_files(folder: Path) -> None:
    """Raise for devices and pipes, which never end."""
    for path in [folder / "config.json", folder / _INDEX, *folder.glob("*.safetensors")]:
        if path.exists() and not path.is_file():
            raise WeightsError(f"{path} is no file", "name a folder with safetensors files")


def _raise_for(wrong: list[str]) -> None:
    if wrong:
        more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise WeightsError(
            "; ".join(wrong[:_MOST_NAMED]) + more, "send the weights of the model that is served"
        )


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise WeightsError(f"{folder}/config.json cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
