"""The memory plan of a model that SGLang is about to load, and what became of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import psutil
import torch
import transformers

from pie_driver_sglang.checkpoint.weights import (
    ONLINE_BYTES,
    DamagedError,
    Loading,
    Tensor,
    read_tensors,
    weight_parts,
)
from pie_driver_sglang.config.arch import takes_images
from pie_driver_sglang.config.file import DriverConfig
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.memory.host import available_bytes
from pie_driver_sglang.memory.limits import MAX_SLOTS, chunk_tokens
from pie_driver_sglang.memory.types import (
    ANY_RANKS,
    EVERYWHERE,
    Device,
    MemorySettings,
    ModelSizes,
    Part,
)
from pie_driver_sglang.srt import support
from pie_driver_sglang.srt.seams.model import (
    attention_layer_count,
    kv_dtype,
    recurrent_config,
    state_bytes,
    uses_latent_attention,
)
from pie_driver_sglang.srt.seams.settings import Resolved

if TYPE_CHECKING:
    from pie_driver_sglang.srt.seams.model import ModelConfig, ModelRunner
    from pie_driver_sglang.srt.seams.settings import ServerArgs

logger = logging.getLogger(__name__)

FLASHINFER_BYTES: Final = 512 << 20
"""SGLang's workspace for flashinfer: some models take less."""
DETERMINISTIC_BYTES: Final = 2 << 30
"""The same with `enable_deterministic_inference`."""
ROTARY_ROOM: Final = 256
"""Rows that SGLang's rotary tables have beyond the context."""
RECURRENT_COPIES: Final = 12
"""Hidden states' worth of what a recurrent layer holds at once. A guess."""
ENCODER_COPIES: Final = 12
"""The same of a vision encoder's layer, for each patch. A guess."""
_ADAPTED: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FUSED_INPUTS: Final = (
    ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    ("gate_proj", "up_proj", "gate_up_proj"),
)
"""Layers whose adapters SGLang keeps together, whichever of them is named."""


def measure(name: str, gpu_id: int, ranks: int) -> Device:
    """What a device has now. Ranks on a CPU share the host's memory evenly."""
    if name == "cpu":
        total = psutil.virtual_memory().total
        return Device("cpu", total, min(available_bytes(), total) // ranks)
    free, total = torch.cuda.mem_get_info(gpu_id)
    return Device(name, total, free)


def weight_bytes(runner: ModelRunner) -> int:
    """What the parameters and buffers of a loaded model take."""
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def free_bytes(runner: ModelRunner) -> int | None:
    """What a GPU has left for passes; None for a host, where that is others' too."""
    if runner.device == "cpu":
        return None
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(runner.gpu_id)[0])


def settings_of(
    config: DriverConfig, model_config: ModelConfig, args: ServerArgs, device: Device
) -> MemorySettings:
    """What a configuration means for the memory."""
    options, settings = config.driver.options, Resolved(args)
    backends = settings.attention_backends
    own = options.paged_decode is not False
    deterministic = settings.enable_deterministic_inference
    workspace = DETERMINISTIC_BYTES if deterministic else FLASHINFER_BYTES
    return MemorySettings(
        context_length=model_config.context_len,
        page_size=settings.page_size,
        requests=options.max_forward_requests,
        chunk_tokens=chunk_tokens(settings.device, device.total, options.chunked_prefill_size),
        slots=MAX_SLOTS,
        ranks=config.driver.tensor_parallel_size,
        fraction=options.mem_fraction_static,
        captures=not options.disable_cuda_graph and (own or backends[1] in support.GRAPH_BACKENDS),
        prompts=own and config.driver.tensor_parallel_size == 1,
        triton_tables="triton" in backends and not own,
        workspace_bytes=workspace if "flashinfer" in backends else 0,
        swap_bytes=(options.cpu_mem_budget_in_gb << 30) // config.driver.tensor_parallel_size,
        adapter_slots=options.max_loras_per_batch if options.enable_lora else 0,
        adapter_rank=options.max_lora_rank,
        image_tokens=options.max_image_tokens,
    )


def sizes_of(config: DriverConfig, model_config: ModelConfig, args: ServerArgs) -> ModelSizes:
    """The sizes of a model before its weights are read.

    Weights that cannot be known count as none.
    """
    settings, recurrent = Resolved(args), recurrent_config(model_config)
    return ModelSizes(
        weights=_weights(config, model_config, args),
        token_bytes=_token_bytes(model_config, args, recurrent),
        row_numbers=_row_numbers(model_config, recurrent is not None),
        itemsize=model_config.dtype.itemsize,
        hidden_size=model_config.hidden_size,
        layers=model_config.num_hidden_layers,
        vocabulary=model_config.vocab_size,
        heads=model_config.num_attention_heads,
        head_dim=model_config.head_dim,
        state_bytes=0 if recurrent is None else state_bytes(recurrent, settings.tp_size),
        adapter_bytes=_adapter_bytes(config, model_config) if settings.enable_lora else 0,
        image_bytes=_image_bytes(config.model.hf_config, model_config.dtype.itemsize),
    )


def _weights(config: DriverConfig, model_config: ModelConfig, args: ServerArgs) -> tuple[Part, ...]:
    text = model_config.hf_text_config
    checkpoint_is_quantized = getattr(model_config.hf_config, "quantization_config", None)
    method = model_config.quantization
    loading = Loading(
        itemsize=model_config.dtype.itemsize,
        layers=model_config.num_hidden_layers,
        kv_heads=max(1, model_config.get_total_num_kv_heads()),
        vocabulary=model_config.vocab_size,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        quantized=bool(checkpoint_is_quantized),
        online=method if method in ONLINE_BYTES else None,
    )
    try:
        tensors = _tensors(config, model_config, args)
    except DamagedError as error:
        raise StartError(str(error), "download the snapshot again") from error
    except Exception as error:
        # The loader will say what is wrong, if anything is.
        logger.debug("the weights' sizes are not known", exc_info=True)
        logger.warning("the memory plan does not know the weights: %s", error)
        return ()
    rotary = _rotary_bytes(model_config, Resolved(args).device)
    return (*weight_parts(tensors, loading), Part(rotary, EVERYWHERE))


def _tensors(config: DriverConfig, model_config: ModelConfig, args: ServerArgs) -> list[Tensor]:
    """Those of the snapshot, or of the shape where the weights are made up."""
    if Resolved(args).load_format == "dummy":
        return _made_up(model_config)
    stored = getattr(model_config.hf_config, "dtype", None) or model_config.dtype
    if isinstance(stored, str):
        stored = getattr(torch, stored, model_config.dtype)
    return read_tensors(config.model.snapshot_dir, stored.itemsize)


def _rotary_bytes(model_config: ModelConfig, device_type: str) -> int:
    """SGLang's tables of sines and cosines: one for each kind of layer, in float32 on a GPU."""
    text = model_config.hf_text_config
    longest = int(getattr(text, "max_position_embeddings", None) or 0)
    rows = max(longest, model_config.context_len) + ROTARY_ROOM
    width = int(model_config.head_dim * float(getattr(text, "partial_rotary_factor", None) or 1))
    kinds = getattr(text, "rope_parameters", None) or {}
    tables = max(1, sum(isinstance(kind, dict) for kind in kinds.values()))
    itemsize = model_config.dtype.itemsize if device_type == "cpu" else 4
    return int(tables * rows * width * itemsize)


def _made_up(model_config: ModelConfig) -> list[Tensor]:
    """The tensors that a checkpoint of this shape would have, by transformers' model class."""
    hf_config = model_config.hf_config
    make: Any = getattr(transformers, hf_config.architectures[0])
    itemsize = model_config.dtype.itemsize
    with torch.device("meta"):
        parameters = make(hf_config).named_parameters()
    return [
        Tensor(name, tuple(value.shape), value.numel() * itemsize, floating=True)
        for name, value in parameters
    ]


def _token_bytes(model_config: ModelConfig, args: ServerArgs, recurrent: Any) -> Part:
    """As SGLang's `DefaultPoolConfigurator` counts a token, over all ranks."""
    layers, dtype = attention_layer_count(model_config, recurrent), kv_dtype(args, model_config)
    if uses_latent_attention(model_config):
        width = model_config.kv_lora_rank + model_config.qk_rope_head_dim
        return Part(layers * width * dtype.itemsize, EVERYWHERE)
    heads = model_config.get_total_num_kv_heads()
    width = model_config.head_dim + model_config.v_head_dim
    return Part(layers * heads * width * dtype.itemsize, heads)


def _row_numbers(model_config: ModelConfig, recurrent: bool) -> tuple[Part, ...]:
    """What attention or an MLP holds for a row, whichever is more; experts count with copies."""
    text = model_config.hf_text_config
    heads = model_config.num_attention_heads
    kv_heads = model_config.get_total_num_kv_heads()
    attention = 2 * heads * model_config.head_dim
    attention += kv_heads * (model_config.head_dim + model_config.v_head_dim)
    # Gate, up and their product.
    dense = 3 * _most(text, "intermediate_size", 4 * model_config.hidden_size)
    chosen = _most(text, "num_experts_per_tok", 0)
    expert = _most(text, "moe_intermediate_size", dense // 3)
    divided = max(attention, dense, chosen * 3 * expert)
    copied = chosen * model_config.hidden_size
    copied += RECURRENT_COPIES * model_config.hidden_size if recurrent else 0
    return (Part(divided, ANY_RANKS), Part(copied, EVERYWHERE))


def _most(config: Any, name: str, default: int) -> int:
    """A size in a model's configuration, the largest where layers have different ones."""
    value = getattr(config, name, None) or default
    return int(max(value) if isinstance(value, list | tuple) else value)


def _adapter_bytes(config: DriverConfig, model_config: ModelConfig) -> int:
    """A slot for rank 1: an input and an output for each layer that adapters may change."""
    text, hidden = model_config.hf_text_config, model_config.hidden_size
    queries = model_config.num_attention_heads * model_config.head_dim
    keys = model_config.get_total_num_kv_heads() * model_config.head_dim
    inner = _most(text, "intermediate_size", 4 * hidden)
    outputs = dict(zip(_ADAPTED, (queries, keys, keys, queries, inner, inner, inner), strict=True))
    named = config.driver.options.lora_target_modules
    targets = {
        part for name in named for part in next((x for x in _FUSED_INPUTS if name in x), (name,))
    }
    everything = "all" in targets
    if _most(text, "num_experts_per_tok", 0):
        # Experts take no adapters.
        outputs = {name: outputs[name] for name in _ADAPTED[:4]}
    layer = sum(hidden + size for name, size in outputs.items() if everything or name in targets)
    # Where both are named SGLang keeps both twice.
    ends = sum(everything or name in targets for name in ("embed_tokens", "lm_head")) ** 2
    numbers = layer * model_config.num_hidden_layers + ends * (hidden + model_config.vocab_size)
    return int(numbers * model_config.dtype.itemsize)


def _image_bytes(hf_config: dict[str, Any], itemsize: int) -> int:
    """Activations of a vision encoder for one token of an image, and its pixels."""
    vision = hf_config.get("vision_config")
    if not takes_images(hf_config) or not isinstance(vision, dict):
        return 0
    merge = int(vision.get("spatial_merge_size") or 2)
    width = int(vision.get("hidden_size") or 1152)
    inner = int(vision.get("intermediate_size") or 4 * width)
    pixels = 4 * 3 * 2 * int(vision.get("patch_size") or 16) ** 2
    return merge**2 * ((ENCODER_COPIES * width + 2 * inner) * itemsize + pixels)
