"""What the `config.json` of an EAGLE head says, and whether the head can draft for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.config.arch import takes_images, text_config
from pie_driver_sglang.errors import ConfigError, Unsupported, quoted

EAGLE3: Final = "LlamaForCausalLMEagle3"
EAGLE2: Final = "LlamaForCausalLMEagle"
_SIZES: Final = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Of the head's layer; they must be the model's, because both have one block table and one pool."""


class DraftHead(NamedTuple):
    """An EAGLE head: one decoder layer that predicts the token after the next one."""

    folder: Path
    is_eagle3: bool
    """Whether it takes hidden states of three layers; an EAGLE-2 head takes the last ones."""
    aux_layers: tuple[int, ...] | None
    """The layers whose outputs an EAGLE-3 head takes; None for SGLang's default."""
    sizes: tuple[int, int, int, int]
    """`hidden_size`, `num_attention_heads`, `num_key_value_heads` and `head_dim`."""
    vocab_size: int
    """Of the model that it was trained for."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its files, which are at least those of its weights."""
        files = (*self.folder.glob("*.safetensors"), *self.folder.glob("*.bin"))
        return sum(path.stat().st_size for path in files)

    def token_bytes(self, itemsize: int, kv_itemsize: int) -> int:
        """Bytes of a token in the KV pool: its keys and values, and a hidden state of the model."""
        hidden, _, kv_heads, head_dim = self.sizes
        return 2 * kv_heads * head_dim * kv_itemsize + hidden * itemsize


def read_draft_head(folder: str) -> DraftHead:
    """Reads the `config.json` of a head.

    Raises:
        ConfigError: It cannot be read.
        Unsupported: It is none of EAGLE-3 or EAGLE-2 for SGLang, or has several layers.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architecture = config["architectures"][0]
        sizes, vocab_size = _sizes_of(config), int(config["vocab_size"])
        layers = int(config.get("num_hidden_layers", 1))
        eagle = config.get("eagle_config") or {}
        aux = eagle.get("eagle_aux_hidden_state_layer_ids")
        aux_layers = None if aux is None else tuple(map(int, aux))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not the configuration of an EAGLE head: {error!r}",
            "name the folder of a head in SGLang's format",
        ) from error
    if architecture not in (EAGLE3, EAGLE2):
        raise Unsupported(
            f"the draft model {quoted(folder)} is a {architecture}, and the driver drafts by "
            f"{EAGLE3} or {EAGLE2}",
            "use an EAGLE-3 or EAGLE-2 head in SGLang's format",
        )
    if layers != 1 or eagle.get("use_aux_hidden_state") is False:
        found = f"{layers} layers" if layers != 1 else "`use_aux_hidden_state` = false"
        raise Unsupported(
            f"the EAGLE head {quoted(folder)} has {found}, and the driver drafts by heads of one "
            "layer with hidden states of the model",
            "use such a head",
        )
    return DraftHead(Path(folder), architecture == EAGLE3, aux_layers, sizes, vocab_size)


def check_draft_head(folder: str, hf_config: Mapping[str, Any], ranks: int) -> None:
    """Checks that a head can draft for a model.

    Args:
        folder: The head's.
        hf_config: The model's `config.json`.
        ranks: Devices that share the model.

    Raises:
        ConfigError: It is of another model.
        Unsupported: It cannot be served.
    """
    head, text = read_draft_head(folder), text_config(hf_config)
    if ranks > 1:
        raise Unsupported(
            f"an EAGLE head drafts on one device, and the model has {ranks}",
            "remove the head, or set `tp_size` to 1",
        )
    if takes_images(hf_config):
        raise Unsupported(
            "an EAGLE head drafts for models of text, and the model takes images",
            "remove the head, or use a model without images",
        )
    own = _sizes_of(text)
    if head.sizes != own:
        listed = [f"`{name}`" for name, a, b in zip(_SIZES, head.sizes, own, strict=True) if a != b]
        raise Unsupported(
            f"the EAGLE head {quoted(folder)} has another {' and '.join(listed)} than the model",
            "use a head that was trained for this model, with attention of the same shape",
        )
    vocabulary = int(text.get("vocab_size", head.vocab_size))
    if head.vocab_size > vocabulary:
        raise Unsupported(
            f"the EAGLE head {quoted(folder)} has a vocabulary of {head.vocab_size} tokens, and "
            f"the model one of {vocabulary}",
            "use a head that was trained for this model",
        )
    layers = int(text.get("num_hidden_layers", 0))
    chosen = (1, layers // 2 - 1, layers - 4) if head.aux_layers is None else head.aux_layers
    if head.is_eagle3 and not (
        len(set(chosen)) == len(chosen) and all(0 <= layer < layers - 1 for layer in chosen)
    ):
        raise ConfigError(
            f"the EAGLE-3 head takes outputs of layers {list(chosen)} of {layers}; they must "
            f"differ, and be from 0 to {layers - 2}",
            "set `eagle_aux_hidden_state_layer_ids` in the `eagle_config` of its config.json",
        )


def _sizes_of(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return hidden, heads, kv_heads, int(config.get("head_dim") or hidden // heads)
