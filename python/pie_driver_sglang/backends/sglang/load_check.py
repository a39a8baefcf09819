"""Refuses checkpoints that do not fit the model that SGLang makes of their configuration.

SGLang leaves as it is what a checkpoint lacks, skips what it has no parameter for, and cuts or pads
what has another size, all without a word. So a load is watched (`load_trace.py`): every element of
every parameter must have been written, and every element of every tensor read, by some rank.
"""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import transformers
from torch.nn.parameter import UninitializedParameter

from pie_driver_sglang.backends.load_trace import (
    LoadTrace,
    PartialReads,
    Unwritten,
    find_region,
    unread_parts,
)
from pie_driver_sglang.backends.sglang.compat.loading import (
    Initialize,
    LoadConfig,
    ReadFile,
    load_instead,
    load_itself,
    loads_as_stored,
    watched_loader,
)
from pie_driver_sglang.backends.sglang.compat.pooling import drop_absent_bias
from pie_driver_sglang.checkpoint.regions import is_covered
from pie_driver_sglang.checkpoint.tensors import CheckpointModel, FileRange
from pie_driver_sglang.checkpoint.unread_tensors import (
    is_cache_scale,
    is_media,
    is_other_file,
    required_tensors,
)
from pie_driver_sglang.checkpoint.weights import have_equal_bytes, read_tensor_ranges, torch_file
from pie_driver_sglang.config.arch import takes_images
from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.progress import progress_type
from pie_driver_sglang.errors import DriverError, StartError, quoted

if TYPE_CHECKING:
    from pie_driver_sglang.backends.sglang.compat.model import ModelConfig

_MOST_NAMED: Final = 3
"""Tensors of a message."""
_DOWNLOAD: Final = "download the snapshot again"
_NUMBERS: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_EMBEDDINGS: Final = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embeddings)\.weight$")
_WEIGHTS: Final = re.compile(r"(^|_)(q?weight|weight_packed|bias)$")


Sources = Mapping[str, Mapping[str, None]]
"""The tensors of the checkpoint that parameters were filled from, by the parameters' names."""


class Report(NamedTuple):
    """What a rank has found."""

    problems: list[str]
    """What is wrong whatever the other ranks do."""
    unread: dict[str, tuple[int, ...]]
    """Tensors that it has not read, and their shapes."""
    partly: PartialReads
    """Those that it has not read to the end."""


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Within it what SGLang loads of a snapshot must fit the model; all ranks load it together.

    Raises:
        StartError: It does not. It names the first tensor, both shapes and the file.
    """

    def initialize_watched(
        initialize: Initialize,
        model_config: ModelConfig,
        load_config: LoadConfig,
        quant_config: Any,
    ) -> torch.nn.Module:
        if not loads_as_stored(load_config):
            return initialize(model_config, load_config, quant_config)
        with Unwritten() if quant_config else contextlib.nullcontext() as unwritten:
            model = initialize(model_config, load_config, quant_config)
        # Empty for files of torch.
        if not model_config.is_generation and (stored := read_tensor_ranges(folder)):
            drop_absent_bias(model, stored)
        LoadCheck(folder, model, model_config, unwritten)
        return model

    def read_named_file(read_file: ReadFile, path: str) -> dict[str, Any]:
        try:
            return read_file(path)
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise StartError(f"{Path(path).name} is damaged: {text}", _DOWNLOAD) from error

    with watched_loader(initialize_watched, read_named_file, progress_type()):
        yield


class LoadCheck:
    """The load of a model, and what is found out about it."""

    def __init__(
        self,
        folder: Path,
        model: torch.nn.Module,
        model_config: ModelConfig,
        unwritten: Unwritten | None,
    ) -> None:
        """Takes the place of the model's `load_weights`.

        Args:
            folder: The snapshot.
            model: Just made.
            model_config: Its configuration.
            unwritten: Which memory has no value yet, of a quantized model.
        """
        self._folder = folder
        self._model = model
        self._config = model_config
        self._unwritten = unwritten
        stored = getattr(model_config.hf_config, "quantization_config", None)
        self._method: str | None = model_config.quantization or ("unknown" if stored else None)
        """How the checkpoint, or the model, is quantized."""
        self._trace = LoadTrace(tensor for _, tensor in self._parameters())
        self._load = load_instead(model, self.load)

    def load(self, weights: Any, *args: Any, **kwargs: Any) -> Any:
        """As the model's `load_weights`, and holds what has happened against the checkpoint.

        Raises:
            StartError: They do not fit.
        """
        load_itself(self._model)
        try:
            with self._trace.running():
                result = self._load(self._trace.take(weights), *args, **kwargs)
        except Exception as error:
            # It ends the line of its progress bar.
            getattr(weights, "close", lambda: None)()
            self._explain(error)
            raise
        problems = self._merged(process_groups.gathered(self._report()))
        if problems:
            raise self._refusal(problems)
        return result

    def _refusal(self, problems: list[str]) -> StartError:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return StartError(
            f"the weights in {quoted(str(self._folder))} do not fit its `config.json`: "
            f"{problems[0]}{more}",
            "use the `config.json` that belongs to these weights, or download the snapshot again",
        )

    def _explain(self, error: Exception) -> None:
        """Names the tensor that SGLang could not load, if it was at one.

        Raises:
            StartError: It was.
        """
        if isinstance(error, DriverError | torch.OutOfMemoryError) or "CUDA" in str(error):
            return
        operation, names = self._trace.failed
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
        if operation is not error:
            names = next(filter(None, map(self._names, frames)), ())
        if not names:
            return
        theirs = " and ".join(self._stored(name) for name in names[:_MOST_NAMED])
        shape = next(filter(None, map(_model_shape, frames)), None)
        if isinstance(error, KeyError):
            what = "but the model has none"
        elif shape is None or shape == self._trace.stored[names[0]].shape:
            text = str(error).partition("\n")[0] or type(error).__name__
            what = f"which SGLang cannot load: {text}"
        else:
            what = f"but the model's {shape}"
        raise self._refusal([f"{theirs}, {what}"]) from error

    def _names(self, frame: FrameType) -> tuple[str, ...]:
        """The tensors of the checkpoint that a function was about."""
        values = frame.f_locals
        others = (value for value in values.values() if isinstance(value, torch.Tensor))
        for value in (values.get("loaded_weight"), *others):
            if isinstance(value, torch.Tensor) and (names := self._trace.names(value)):
                return names
        return ()

    def _stored(self, name: str) -> str:
        """A tensor of the checkpoint, its file and its shape."""
        file, shape = self._file(name), self._trace.stored[name].shape
        return f"{name}{f' in {file}' if file else ''} is {shape}"

    @functools.cached_property
    def _file_ranges(self) -> dict[str, FileRange]:
        return read_tensor_ranges(self._folder)

    def _file(self, name: str) -> str | None:
        file_range = self._file_ranges.get(name)
        return file_range.path.name if file_range else torch_file(self._folder, name)

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [
            (name, tensor)
            for name, tensor in self._model.named_parameters()
            if not isinstance(tensor, UninitializedParameter)
            and not tensor.is_meta
            # Embeddings do not need it, and their checkpoints may lack it.
            and (self._config.is_generation or not name.startswith("lm_head."))
        ]

    def _report(self) -> Report:
        trace = self._trace
        images = takes_images(self._config.hf_config.to_dict())
        problems = [*self._unfilled()]
        if not self._method:
            problems += [
                f"{self._stored(name)} of {stored}, but the model's {loaded}"
                for name, stored, loaded in trace.mixed
            ]
            problems += [
                f"{self._stored(name)}, but the model's {shape}"
                for name, shape in trace.padded
                if (images or not is_media(name)) and not self._is_rounded(name, shape)
            ]
        return Report(
            problems=problems,
            unread={
                name: source.shape
                for name, source in trace.stored.items()
                if source.whole and not source.reads
            },
            partly=trace.partial_reads(),
        )

    def _is_rounded(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether SGLang has made an odd width of a vision encoder's MLP a multiple of 8.

        It adds zeros, which change nothing (Qwen2.5-VL).
        """
        vision = getattr(self._config.hf_config, "vision_config", None)
        inner = int(getattr(vision, "intermediate_size", None) or 0)
        expected = tuple(
            -(-size // 8) * 8 if size == inner else size for size in self._trace.stored[name].shape
        )
        return is_media(name) and inner % 8 > 0 and shape == expected

    def _merged(self, reports: list[Report]) -> list[str]:
        """What is wrong, of all ranks: each reads a part of what they have to read together."""
        problems = [problem for report in reports for problem in report.problems]
        problems += [
            f"{self._stored(name)}, but the model's {reads.taken}"
            for name, reads in unread_parts([report.partly for report in reports])
        ]
        unread = [name for name in reports[0].unread if all(name in x.unread for x in reports)]
        problems += [f"{self._stored(x)}, but the model has none" for x in self._harmful(unread)]
        problems += [
            f"{self._stored(x)}, but the model takes {table} for it, which has other values"
            for x in unread
            if (table := self._other_table(x))
        ]
        return list(dict.fromkeys(problems))

    def _harmful(self, unread: list[str]) -> list[str]:
        """Of the tensors that no rank has read those that the model is wrong without."""
        whole, text = self._config.hf_config, self._config.hf_text_config
        read = self._trace.stored.keys() - set(unread)
        model = CheckpointModel(
            layers=self._config.num_hidden_layers,
            next_layers=int(getattr(text, "num_nextn_predict_layers", None) or 0),
            tied=any(getattr(x, "tie_word_embeddings", False) for x in (whole, text)),
            quantization=self._method,
        )
        found = required_tensors(unread, read, model)
        if not found:
            return []
        # Importing transformers' class takes a second, so only now.
        made = getattr(transformers, whole.architectures[0], None)
        ignored = getattr(made, "_keys_to_ignore_on_load_unexpected", None) or ()
        found = required_tensors(found, read, model._replace(ignored=ignored))
        return [name for name in found if not is_other_file(self._file(name) or "")]

    def _other_table(self, head: str) -> str | None:
        """The embedding table that serves as an LM head that differs from it."""
        file_range = self._file_ranges.get(head) if head.endswith("lm_head.weight") else None
        if file_range is None:
            return None
        for name, source in self._trace.stored.items():
            if _EMBEDDINGS.search(name) and source.shape == self._trace.stored[head].shape:
                table = self._file_ranges.get(name)
                return name if table and not have_equal_bytes(table, file_range) else None
        return None

    def _unfilled(self) -> Iterator[str]:
        """Parameters that have not been written, or only in part."""
        parameters = self._parameters()
        sources = {name: self._sources(tensor) for name, tensor in parameters}
        written = {_kind(name) for name, names in sources.items() if names}
        for name, tensor in parameters:
            writes, region = self._trace.writes(tensor), find_region(tensor)
            if writes is None or region is None:
                continue
            module = self._model.get_submodule(name.rpartition(".")[0])
            # On a CPU SGLang fills with zeros what a tensor lacks; of a vocabulary that is padding.
            padded = self._unwritten is not None or hasattr(module, "org_vocab_size")
            if is_covered(region, (write.region for write in writes if write.names or padded)):
                continue
            if self._may_lack(name, tensor, sources, written):
                continue
            # Vocabularies are rounded up.
            rows = getattr(module, "org_vocab_size", tensor.shape[0])
            yield self._lacking(name, (rows, *tensor.shape[1:]), sources)

    def _may_lack(
        self, name: str, tensor: torch.Tensor, sources: Sources, written: set[str]
    ) -> bool:
        """Whether a parameter of a quantized model is right without what has not been written."""
        if self._unwritten is None:
            return False
        if _WEIGHTS.search(leaf := _kind(name)):
            # Weights are padded in memory that was made of zeros.
            return bool(sources[name]) and tensor not in self._unwritten
        if sources[name]:
            # One scale may be that of several layers.
            lacking = self._expected(name, sources).keys() - self._trace.stored.keys()
            return "input" in leaf or not lacking
        # Some checkpoints have none of a kind, such as scales of activations or of KV.
        stored = {_kind(other) for other in self._trace.stored}
        return is_cache_scale(name) or leaf not in (written | stored)

    def _usual_shape(self, name: str) -> tuple[int, ...]:
        """The shape that tensors of a kind have in most layers and experts."""
        stored, kind = self._trace.stored, unnumbered(name)
        shapes = Counter(x.shape for other, x in stored.items() if unnumbered(other) == kind)
        return shapes.most_common(1)[0][0]

    def _sources(self, tensor: torch.Tensor) -> dict[str, None]:
        """Tensors that a parameter was filled from."""
        region = find_region(tensor)
        return {
            name: None
            for write in self._trace.writes(tensor) or ()
            if region and region.offset <= write.region.offset < region.end
            for name in write.names
        }

    def _expected(self, name: str, sources: Sources) -> dict[str, tuple[int, ...]]:
        """What fills parameters like this one in other layers or experts, and its shape."""
        stored = self._trace.stored
        return {
            _renumbered(source, other, name): stored[source].shape
            for other, names in sources.items()
            if other != name and unnumbered(other) == unnumbered(name)
            for source in names
        } or {
            expert: stored[source].shape
            for source in sources[name]
            for expert in _experts(source, sources[name])
        }

    def _lacking(self, name: str, shape: tuple[int, ...], sources: Sources) -> str:
        """What a parameter lacks, by what fills those like it."""
        stored, expected = self._trace.stored, self._expected(name, sources)
        for missing in (x for x in expected if x not in stored):
            return f"{missing} is missing, {expected[missing]} in the model"
        fills = list(sources[name])
        for source in fills:
            usual = self._usual_shape(source)
            if usual != stored[source].shape:
                return f"{self._stored(source)}, but the model's {usual}"
        # This rank may have read nothing of one that is too short.
        for source in (x for x in expected if stored[x].shape != expected[x]):
            return f"{self._stored(source)}, but the model's {expected[source]}"
        if fills:
            what = " and ".join(self._stored(source) for source in fills[:_MOST_NAMED])
            return f"{what}, which is not all of the model's {name} {shape}"
        # Nothing like it is filled: what fills the same layer's other parameters has its names.
        module, _, leaf = name.rpartition(".")
        for other, names in sources.items():
            for source in names:
                like = f"{source.rpartition('.')[0]}.{leaf}"
                if other.rpartition(".")[0] != module or like == name:
                    continue
                if like in stored:
                    return f"{self._stored(like)}, but SGLang leaves the model's {shape} empty"
                return f"{like} is missing, for the model's {name} {shape}"
        return f"{name} is missing, {shape} in the model"


def _model_shape(frame: FrameType) -> tuple[int, ...] | None:
    """The shape of the parameter, or of its part, that a function of SGLang was to fill."""
    for name in ("param_data", "expert_data", "target", "param"):
        value = frame.f_locals.get(name)
        if isinstance(value, torch.Tensor):
            rows = getattr(frame.f_locals.get("self"), "org_vocab_size", value.shape[0])
            return (rows, *value.shape[1:])
    return None


def unnumbered(name: str) -> str:
    """What layers and experts have in common."""
    return _NUMBERS.sub("#", name)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _experts(source: str, names: Iterable[str]) -> Iterator[str]:
    """What a tensor of one expert is called in the others, by those that are there."""
    last = [match for match in _NUMBERS.finditer(source)][1:]
    if last:
        match = last[-1]
        numbers = [int(found[-1]) for name in names if (found := _NUMBERS.findall(name))]
        for number in range(max(numbers) + 1):
            yield source[: match.start()] + str(number) + source[match.end() :]


def _renumbered(source: str, other: str, name: str) -> str:
    """What fills `name` as `source` fills `other`, a parameter of another layer."""
    [theirs, ours] = [_NUMBERS.search(x) for x in (other, name)]
    found = _NUMBERS.search(source)
    if not (theirs and ours and found and found[0] == theirs[0]):
        return source
    return source[: found.start()] + ours[0] + source[found.end() :]
