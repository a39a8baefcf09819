"""Decides by name whether a tensor of a checkpoint may stay unread."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from pie_driver_sglang.checkpoint.tensors import CheckpointModel

_REMADE: Final = re.compile(
    r"(^|\.)(rotary_(pos_)?emb|rope)\.\w+$"  # Tables of sines, cosines and frequencies.
    r"|(^|\.)inv_freq$"
    r"|(^|\.)(attn|attention)\.(masked_)?bias$"  # GPT's triangles of ones.
    r"|\.position_ids$"
)
"""Tensors that SGLang computes from the configuration."""
_HEADS: Final = re.compile(r"^(model\.)?(score|classifier|v_head|value_head|reward_head)\.")
"""Heads for tasks other than text generation."""
_NEXT_TOKENS: Final = re.compile(r"^(model\.|language_model\.)*mtp(\.|_)")
_LAYER: Final = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")
_MEDIA: Final = re.compile(
    r"^(?:model\.)*(?:vis(?:ion|ual)|image|img|video|audio|speech|sound|mm_|multi_modal_|talker"
    r"|code2wav|token2wav)\w*\."
)
"""Encoders and generators of media, separate from the language model."""
_CACHE_SCALE: Final = re.compile(r"\.(k|v|kv|q|prob)_scale$")
"""Scales of an FP8 KV pool; pools of other dtypes have none."""
_QUANTIZER: Final = re.compile(r"scal(e|ing)|zero|_zp$|g_idx$|_shape$|_amax$|azp_adj$|pre_quant")
_OTHER_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")


def required_tensors(
    names: Collection[str], read: Collection[str], model: CheckpointModel
) -> list[str]:
    """Return the unread tensors that the model needs.

    Args:
        names: Tensors that were not read.
        read: Tensors that were read.
        model: Settings of the model.
    """
    kept = _prefixes(read)
    return [name for name in names if not _is_harmless(name, kept, model)]


def is_head(name: str) -> bool:
    """Whether a tensor belongs to a head for another task than text generation."""
    return _HEADS.match(name) is not None


def is_media(name: str) -> bool:
    """Whether a tensor belongs to a media encoder."""
    return _MEDIA.match(name) is not None


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of an FP8 KV pool."""
    return _CACHE_SCALE.search(name) is not None


def is_other_file(name: str) -> bool:
    """Whether a file that SGLang reads holds no weights of the model."""
    return name in _OTHER_FILES


def _prefixes(names: Collection[str]) -> frozenset[str]:
    found = (_MEDIA.match(name) for name in names)
    return frozenset(match[0] for match in found if match)


def _is_harmless(name: str, media: Collection[str], model: CheckpointModel) -> bool:
    apart = _MEDIA.match(name)
    layer = _LAYER.match(name)
    leaf = name.rpartition(".")[2]
    return (
        _REMADE.search(name) is not None
        or _HEADS.match(name) is not None
        or _NEXT_TOKENS.match(name) is not None
        or _CACHE_SCALE.search(name) is not None
        # An encoder that is used must be complete.
        or (apart is not None and apart[0] not in media)
        or (layer is not None and 0 <= int(layer[1]) - model.layers < model.next_layers)
        or (model.tied and name.endswith("lm_head.weight"))
        or (model.quantization is not None and _QUANTIZER.search(leaf) is not None)
        # GPTQ writes zero biases.
        or (leaf == "bias" and "gptq" in (model.quantization or ""))
        or any(re.search(pattern, name) for pattern in model.ignored)
    )
