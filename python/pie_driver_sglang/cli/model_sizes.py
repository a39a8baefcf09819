"""The sizes of a model by its `config.json`, and what they mean for the memory plan.

It is what a plan without SGLang knows of a model. `srt/measure.py` finds the same sizes in SGLang's
`ModelConfig` when a driver starts; a test holds the two to each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.checkpoint.weights import (
    ONLINE_BYTES,
    DamagedError,
    Loading,
    Tensor,
    read_tensors,
    weight_parts,
)
from pie_driver_sglang.config.arch import context_length, takes_images, text_config, vocab_size
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.memory.limits import MAX_SLOTS, chunk_tokens
from pie_driver_sglang.memory.types import (
    ANY_RANKS,
    EVERYWHERE,
    Device,
    MemorySettings,
    ModelSizes,
    Part,
)

ITEMSIZES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of a number, by torch's names."""
_FLASHINFER_BYTES: Final = 512 << 20
"""SGLang's workspace for flashinfer."""
_ROTARY_ROOM: Final = 256
"""Rows that SGLang's rotary tables have beyond the context."""
_ENCODER_COPIES: Final = 12
"""Hidden states' worth of what a layer of a vision encoder holds for a patch. A guess."""

_LATENT_HEAD: Final = 256
"""What SGLang takes for the width of a head where attention is latent."""
_RECURRENT_KEYS: Final = (
    "conv_L_cache",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "ssm_state_size",
)
_ATTENDING: Final = frozenset(
    {"attention", "chunked_attention", "full_attention", "sliding_attention"}
)
_ADAPTED: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FUSED_ADAPTERS: Final = (
    ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    ("gate_proj", "up_proj", "gate_up_proj"),
)


class Shape(NamedTuple):
    """Numbers of a model's `config.json`."""

    hidden_size: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    latent: int
    """Numbers of a token and layer where attention is latent; 0 where it is not."""
    inner: int
    """Width of the widest dense MLP."""
    experts: int
    chosen_experts: int
    """Of a token."""
    expert_inner: int
    tied: bool
    """Whether the LM head is the embedding table."""
    positions: int
    """That the rotary tables have rows for."""
    rotary_dim: int
    rotary_tables: int


class WeightSizes(NamedTuple):
    """What weights take, and how that is known."""

    parts: tuple[Part, ...]
    source: str
    """For people: the files, an index, or the shape."""


def read_shape(hf_config: Mapping[str, Any]) -> Shape:
    """The sizes in a checked `config.json`.

    Raises:
        ConfigError: A size is missing, or the model keeps recurrent state, whose size is only known
            to SGLang.
    """
    text = text_config(hf_config)
    _refuse_recurrent(text, hf_config)
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head", "n_heads")
    latent = text.get("kv_lora_rank")
    head_dim = text.get("head_dim") or hidden // heads
    v_head_dim = text.get("v_head_dim") or head_dim
    rotary_dim = int(head_dim * float(text.get("partial_rotary_factor") or 1))
    inner = _most(text, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    return Shape(
        hidden_size=hidden,
        layers=_number(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        vocabulary=vocab_size(hf_config) or _number(text, "vocab_size"),
        heads=heads,
        kv_heads=_kv_heads(text, heads),
        head_dim=_LATENT_HEAD if latent else head_dim,
        v_head_dim=v_head_dim,
        latent=latent + text.get("qk_rope_head_dim", 0) if latent else 0,
        inner=inner,
        experts=_most(text, "num_experts", "num_local_experts", "n_routed_experts"),
        chosen_experts=_most(text, "num_experts_per_tok"),
        expert_inner=_most(text, "moe_intermediate_size") or inner,
        tied=bool(text.get("tie_word_embeddings", hf_config.get("tie_word_embeddings", False))),
        positions=_most(text, "max_position_embeddings", "n_positions"),
        rotary_dim=_LATENT_HEAD if latent else rotary_dim,
        rotary_tables=_rotary_tables(text),
    )


def model_of(
    shape: Shape,
    weights: Sequence[Part],
    options: DriverOptions,
    hf_config: Mapping[str, Any],
    dtype: str,
    on_host: bool,
) -> ModelSizes:
    """What the plan needs of a model.

    Args:
        shape: Of :func:`read_shape`.
        weights: Of :func:`read_weights`.
        options: The driver's.
        hf_config: The model's `config.json`.
        dtype: The activations', a key of `ITEMSIZES`.
        on_host: Whether the model runs on the CPU.
    """
    itemsize = ITEMSIZES[dtype]
    context = options.context_length or context_length(hf_config)
    # SGLang's GPU kernels take these in float32.
    rotary_itemsize = itemsize if on_host else ITEMSIZES["float32"]
    return ModelSizes(
        weights=(*weights, Part(rotary_bytes(shape, context, rotary_itemsize), EVERYWHERE)),
        token_bytes=token_bytes(shape, kv_itemsize(options.kv_cache_dtype, itemsize)),
        row_numbers=row_numbers(shape),
        itemsize=itemsize,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        vocabulary=shape.vocabulary,
        heads=shape.heads,
        head_dim=shape.head_dim,
        adapter_bytes=adapter_bytes(shape, options.lora_target_modules, itemsize)
        if options.enable_lora
        else 0,
        image_bytes=image_bytes(hf_config, itemsize),
    )


def settings_for(
    options: DriverOptions, hf_config: Mapping[str, Any], device: Device, ranks: int
) -> MemorySettings:
    """What the configuration of a driver means for the plan."""
    prefill, decode = (
        options.server_args.get(f"{kind}_attention_backend", options.attention_backend)
        for kind in ("prefill", "decode")
    )
    own = options.paged_decode is not False
    kind = "cpu" if device.is_host else "cuda"
    return MemorySettings(
        context_length=options.context_length or context_length(hf_config),
        page_size=options.page_size,
        requests=options.max_forward_requests,
        chunk_tokens=chunk_tokens(kind, device.total, options.chunked_prefill_size),
        slots=MAX_SLOTS,
        ranks=ranks,
        fraction=options.mem_fraction_static,
        captures=not options.disable_cuda_graph and (own or decode == "triton"),
        prompts=own and ranks == 1,
        triton_tables="triton" in (prefill, decode) and not own,
        workspace_bytes=_FLASHINFER_BYTES if "flashinfer" in (prefill, decode) else 0,
        swap_bytes=(options.cpu_mem_budget_in_gb << 30) // ranks,
        adapter_slots=options.max_loras_per_batch if options.enable_lora else 0,
        adapter_rank=options.max_lora_rank,
        image_tokens=options.max_image_tokens,
    )


def read_weights(
    folder: Path, shape: Shape, hf_config: Mapping[str, Any], options: DriverOptions, dtype: str
) -> WeightSizes:
    """What the weights of a snapshot take, from headers, from the index, or from the shape.

    Args:
        folder: The snapshot; it needs no weights.
        shape: Of :func:`read_shape`.
        hf_config: The model's `config.json`.
        options: The driver's.
        dtype: The activations', a key of `ITEMSIZES`.

    Raises:
        ConfigError: A file is damaged; or there is none, and the shape is not enough.
    """
    method = options.server_args.get("quantization")
    loading = Loading(
        itemsize=ITEMSIZES[dtype],
        layers=shape.layers,
        kv_heads=max(1, shape.kv_heads),
        vocabulary=shape.vocabulary,
        tied=shape.tied,
        quantized=bool(hf_config.get("quantization_config")),
        online=method if method in ONLINE_BYTES else None,
    )
    stored = hf_config.get("dtype") or hf_config.get("torch_dtype") or dtype
    try:
        tensors = read_tensors(folder, ITEMSIZES.get(str(stored), ITEMSIZES[dtype]))
    except (DamagedError, OSError) as error:
        raise ConfigError(str(error), "download the snapshot again") from error
    if tensors:
        return WeightSizes(weight_parts(tensors, loading), "the headers of its files")
    size = _indexed_bytes(folder)
    if size:
        return WeightSizes((Part(size, ANY_RANKS),), "the index of its files")
    tensors = list(_tensors_of(shape, loading))
    return WeightSizes(weight_parts(tensors, loading), "the shape in config.json: an estimate")


def token_bytes(shape: Shape, itemsize: int) -> Part:
    """Keys and values of a token in all layers."""
    if shape.latent:
        return Part(shape.layers * shape.latent * itemsize, EVERYWHERE)
    width = shape.head_dim + shape.v_head_dim
    return Part(shape.layers * shape.kv_heads * width * itemsize, shape.kv_heads)


def kv_itemsize(kv_cache_dtype: str, activation: int) -> int:
    """Bytes of a number in the KV pool."""
    if kv_cache_dtype == "auto":
        return activation
    return 2 if kv_cache_dtype in ("bf16", "bfloat16") else 1


def row_numbers(shape: Shape) -> tuple[Part, ...]:
    """What attention or an MLP holds for a row, whichever is more; experts count with copies."""
    attention = 2 * shape.heads * shape.head_dim
    attention += shape.kv_heads * (shape.head_dim + shape.v_head_dim)
    # Gate, up and their product.
    dense, expert = 3 * shape.inner, 3 * shape.expert_inner
    divided = max(attention, dense, shape.chosen_experts * expert)
    copied = shape.chosen_experts * shape.hidden_size
    return (Part(divided, ANY_RANKS), Part(copied, EVERYWHERE))


def rotary_bytes(shape: Shape, context: int, itemsize: int) -> int:
    """SGLang's tables of sines and cosines, one for each kind of layer."""
    rows = max(shape.positions, context) + _ROTARY_ROOM
    return shape.rotary_tables * rows * shape.rotary_dim * itemsize


def adapter_bytes(shape: Shape, named: Sequence[str], itemsize: int) -> int:
    """A slot for rank 1: an input and an output for each layer that adapters may change.

    Args:
        shape: The model's.
        named: The option `lora_target_modules`.
        itemsize: Bytes of an activation.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = (queries, keys, keys, queries, shape.inner, shape.inner, shape.inner)
    outputs = dict(zip(_ADAPTED, sizes, strict=True))
    # SGLang keeps adapters of fused layers together, whichever of them is named.
    groups = (next((x for x in _FUSED_ADAPTERS if name in x), (name,)) for name in named)
    targets = {part for group in groups for part in group}
    everything = "all" in targets
    if shape.chosen_experts:
        # Experts take no adapters.
        outputs = {name: outputs[name] for name in _ADAPTED[:4]}
    layer = sum(
        shape.hidden_size + size for name, size in outputs.items() if everything or name in targets
    )
    # Where both are named SGLang keeps both twice.
    ends = sum(everything or name in targets for name in ("embed_tokens", "lm_head")) ** 2
    return (layer * shape.layers + ends * (shape.hidden_size + shape.vocabulary)) * itemsize


def image_bytes(hf_config: Mapping[str, Any], itemsize: int) -> int:
    """Activations of a vision encoder for one token of an image, and its pixels."""
    vision = hf_config.get("vision_config")
    if not takes_images(hf_config) or not isinstance(vision, Mapping):
        return 0
    merge = int(vision.get("spatial_merge_size") or 2)
    width = int(vision.get("hidden_size") or 1152)
    inner = int(vision.get("intermediate_size") or 4 * width)
    pixels = 4 * 3 * 2 * int(vision.get("patch_size") or 16) ** 2
    return merge**2 * ((_ENCODER_COPIES * width + 2 * inner) * itemsize + pixels)


def _refuse_recurrent(text: Mapping[str, Any], hf_config: Mapping[str, Any]) -> None:
    kinds = text.get("layer_types")
    others = set(kinds) - _ATTENDING if isinstance(kinds, list) else set()
    found = sorted(others) or [key for key in _RECURRENT_KEYS if text.get(key)]
    if found:
        raise ConfigError(
            f"{hf_config['architectures'][0]} keeps recurrent state ({quoted(found[0])} in its "
            "config.json), whose size only SGLang knows",
            "start the driver: it plans such a model before it loads it",
        )


def _number(config: Mapping[str, Any], *names: str) -> int:
    value = next((config[name] for name in names if config.get(name)), None)
    if type(value) is not int:
        raise ConfigError(
            f"the model's config.json has no usable `{names[0]}`: {quoted(value)}",
            "start the driver: SGLang may know the size from the model's class",
        )
    return value


def _most(config: Mapping[str, Any], *names: str) -> int:
    """A size, the largest where layers have different ones; 0 where it is missing."""
    value = next((config[name] for name in names if config.get(name)), 0)
    return int(max(value) if isinstance(value, list) else value)


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    """As SGLang counts them."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    names = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
    return next((int(text[name]) for name in names if text.get(name)), heads)


def _rotary_tables(text: Mapping[str, Any]) -> int:
    given = text.get("rope_parameters") or {}
    kinds = sum(isinstance(kind, Mapping) for kind in given.values())
    # Older files of the models with two kinds say so in another way.
    return max(kinds, 2 if text.get("rope_local_base_freq") else 1)


def _indexed_bytes(folder: Path) -> int:
    """The size that the index of safetensors files gives; 0 without one."""
    path = folder / "model.safetensors.index.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["metadata"]["total_size"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def _tensors_of(shape: Shape, loading: Loading) -> Iterator[Tensor]:
    """The matrices that a model of this shape usually has; vectors are too small to count."""
    if shape.latent:
        raise ConfigError(
            "there are no weights, and the shape of latent attention does not give their size",
            "download the index of the weights: `hf download <repository> --include '*.json'`",
        )

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        size = rows * columns * loading.itemsize
        return Tensor(name, (rows, columns), size, floating=True)

    hidden = shape.hidden_size
    yield matrix("model.embed_tokens.weight", shape.vocabulary, hidden)
    yield matrix("lm_head.weight", shape.vocabulary, hidden)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    count, inner = (shape.experts, shape.expert_inner) if shape.experts else (1, shape.inner)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield matrix(f"{prefix}.self_attn.q_proj.weight", queries, hidden)
        yield matrix(f"{prefix}.self_attn.k_proj.weight", keys, hidden)
        yield matrix(f"{prefix}.self_attn.v_proj.weight", keys, hidden)
        yield matrix(f"{prefix}.self_attn.o_proj.weight", hidden, queries)
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield matrix(f"{prefix}.mlp.{name}.weight", count * inner, hidden)
