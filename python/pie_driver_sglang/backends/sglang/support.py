"""Which models a configuration computes right; the others are refused at start, with the reason."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang.backends.sglang.compat.attention import (
    attention_layers,
    has_fa3,
    is_plain,
)
from pie_driver_sglang.backends.sglang.compat.layers import has_plain_gemms, runs_plain_torch
from pie_driver_sglang.backends.sglang.compat.model import (
    is_from_transformers,
    resolved,
    uses_latent_attention,
)
from pie_driver_sglang.backends.sglang.compat.pooling import (
    PassPooler,
    ends_with_pooler,
    find_head,
    leave_unscaled,
    pools_last_token,
    takes_embeddings,
)
from pie_driver_sglang.backends.sglang.compat.pools import (
    has_known_pages,
    keeps_heads,
    keeps_state,
    lies_by_token,
    paged,
)
from pie_driver_sglang.backends.sglang.compat.ranks import rank_of
from pie_driver_sglang.backends.sglang.compat.settings import Resolved, change_settings
from pie_driver_sglang.backends.sglang.prompt_pooling import PromptPooling, dense_layers
from pie_driver_sglang.checkpoint.pooling import (
    MODULES,
    PoolingFiles,
    UnsupportedPoolingError,
    may_attend_ahead,
    read_pooling,
)
from pie_driver_sglang.config.options import PAGED_DECODE
from pie_driver_sglang.config.sglang_versions import adapter_version
from pie_driver_sglang.engine.layers.batch_invariant import MAX_INVARIANT_RANKS
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.kernels.attention.batch_invariant import supports_batch_invariant
from pie_driver_sglang.memory.batch_sizes import GRAPH_BACKENDS

if TYPE_CHECKING:
    from pathlib import Path

    from pie_driver_sglang.backends.sglang.compat.model import ModelConfig, ModelRunner
    from pie_driver_sglang.backends.sglang.compat.settings import ServerArgs
    from pie_driver_sglang.config.driver_config import ModelSection
    from pie_driver_sglang.engine.block_table import BlockTable

logger = logging.getLogger(__name__)

QUANTIZED_CHECKPOINTS = frozenset({"w8a8_int8", "auto-round-int8", "blockwise_int8", "w4afp8"})
"""Methods that take a checkpoint's numbers for quantized ones, whatever they are."""


EXPERTS_ON_A_GPU = frozenset(
    {"AfmoeForCausalLM", "DbrxForCausalLM", "DeepseekForCausalLM", "XverseMoeForCausalLM"}
)
"""Architectures whose experts SGLang computes by a kernel of triton alone."""
MODELS_ON_A_GPU = frozenset({"Grok1ForCausalLM", "Grok1ModelForCausalLM"})
"""Architectures of which SGLang makes CUDA streams, and soft-caps the attention scores."""
PAGED_DTYPES = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
)
"""KV that the backend `pie` reads."""
_HOPPER = 9
_FA3_WIDTHS = frozenset({64, 128, 256})
PAGED_WIDEST = 256
"""Heads up to which that backend is chosen where none is named."""


def check_config(model_config: ModelConfig, attention_backend: str | None) -> None:
    """Refuses what is known before the weights are read.

    Raises:
        StartError: The driver, or the attention backend, cannot serve the model.
    """
    architecture = model_config.hf_config.architectures[0]
    if is_from_transformers(model_config):
        raise StartError(
            f"SGLang would take {architecture} from transformers, where it need not attend as the "
            "model does",
            hint=f"use an architecture that SGLang {adapter_version().sglang} has itself, and "
            "leave `model_impl` alone",
        )
    if model_config.is_encoder_decoder:
        raise StartError(
            f"{architecture} has an encoder whose output its decoder attends to, for which the "
            "runtime has no pages",
            hint="use a decoder-only language model",
        )
    if attention_backend == "torch_native" and uses_latent_attention(model_config):
        raise StartError(
            f"{architecture} uses multi-head latent attention, which the CPU backend lacks",
            hint='set `device = ["cuda:0"]`',
        )
    if attention_backend == "torch_native" and architecture in EXPERTS_ON_A_GPU:
        raise StartError(
            f"SGLang's experts of {architecture} need a GPU", hint='set `device = ["cuda:0"]`'
        )
    if attention_backend == "torch_native" and architecture in MODELS_ON_A_GPU:
        raise StartError(
            f"SGLang runs {architecture} on a GPU only: it uses CUDA streams, and soft-caps its "
            "attention scores",
            hint='set `device = ["cuda:0"]`',
        )
    method = model_config.quantization
    quantized = getattr(model_config.hf_config, "quantization_config", None)
    if method in QUANTIZED_CHECKPOINTS and not quantized:
        raise StartError(
            f"`quantization` = {method!r} reads quantized checkpoints, and the `config.json` of "
            "this one has no `quantization_config`",
            hint="quantize the checkpoint, or choose a method that quantizes what it reads (fp8)",
        )


def check_model(runner: ModelRunner) -> None:
    """Refuses what SGLang would compute wrongly without an error.

    Raises:
        StartError: SGLang serves the model without what its configuration or checkpoint asks for.
    """
    _check_windows(runner)
    if ends_with_pooler(runner):
        _check_pooling(runner)
    if getattr(getattr(runner.model, "lm_head", None), "bias", None) is not None:
        raise StartError(
            f"the output layer of {type(runner.model).__name__} has a bias, which SGLang ignores",
            hint="choose a model without one",
        )
    if resolved(runner).device == "cpu":
        _check_cpu(runner)


def read_pooling_files(snapshot: Path) -> PoolingFiles:
    """How a checkpoint's files of sentence-transformers say that it pools.

    Raises:
        StartError: They ask for something that is not computed, or cannot be read.
    """
    try:
        return read_pooling(snapshot)
    except UnsupportedPoolingError as error:
        raise StartError(
            f"the embeddings of this model cannot be computed: {error}",
            hint="use a model that pools the last token, the mean or the first token, as "
            "Qwen3-Embedding",
        ) from error
    except (OSError, ValueError, AttributeError) as error:
        raise StartError(
            f"{snapshot / MODULES} cannot be read: {error}", hint="download the snapshot again"
        ) from error


def follow_pooling_files(
    runner: ModelRunner, config: ModelSection, block_table: BlockTable
) -> None:
    """Has embeddings pooled and scaled as a checkpoint's files say, and warns of another attention.

    Args:
        runner: Of a loaded model that returns embeddings.
        config: The model's part of the driver's configuration.
        block_table: The one of its requests.

    Raises:
        StartError: The model has a head, which takes the last token's state; or Dense modules that
            do not fit it.
    """
    files, model = read_pooling_files(config.snapshot_dir), runner.model
    if files.needs_all_states or files.dense:
        if find_head(model) is not None:
            raise StartError(
                f"{type(model).__name__} has a head on its last token, and `{MODULES}` asks for "
                f"{files.mode} pooling or Dense modules",
                hint="remove the file to have the head's output",
            )
        hidden, device = runner.model_config.hidden_size, torch.device(runner.device)
        layers = dense_layers(files.dense, hidden, device)
        pooling = PromptPooling(files, block_table, layers)
        normalize = bool(files.normalize)
        model.pooler = PassPooler(pooling.pool, pooling.end, layers, normalize=normalize)
        logger.info(
            "pooling: %s, with %d Dense modules, as `%s` says",
            files.mode,
            len(files.dense),
            MODULES,
        )
    elif files.normalize is False:
        leave_unscaled(model)
    if files.normalize is False:
        logger.info("embeddings are not scaled to length 1: `%s` has no Normalize module", MODULES)
    if (why := may_attend_ahead(config.hf_config)) is not None:
        logger.warning(
            "%s in `config.json`, so the model may attend to later tokens; here its attention is "
            "causal, as in SGLang, and embeddings may differ from those of its own code",
            why,
        )


def _check_pooling(runner: ModelRunner) -> None:
    name = type(runner.model).__name__
    if not takes_embeddings(runner.model):
        raise StartError(
            f"`is_embedding` is set, and SGLang's {name} returns no embeddings",
            hint="remove `is_embedding`, or use a Llama, Mistral, Qwen2 or Qwen3 model",
        )
    if not pools_last_token(runner.model):
        raise StartError(
            f"SGLang's {name} does not pool the last token, and prompts are computed in parts",
            hint="use an embedding model that pools its last token, as Qwen3-Embedding",
        )


def _check_windows(runner: ModelRunner) -> None:
    config = runner.model_config.hf_text_config
    window = sliding_window(config)
    if window is None or window >= runner.model_config.context_len:
        return
    windowed = [layer for layer in attention_layers(runner) if layer.sliding_window_size > -1]
    kinds = getattr(config, "layer_types", None) or ()
    expected = list(kinds).count("sliding_attention")
    if not windowed or (expected and len(windowed) != expected):
        ignores = f"in {expected - len(windowed)} layers " if windowed else ""
        raise StartError(
            f"the model attends to a sliding window of {window} tokens, which SGLang's "
            f"{type(runner.model).__name__} {ignores}ignores",
            hint=f"set `context_length = {window}` or choose a model without a window",
        )


def _check_cpu(runner: ModelRunner) -> None:
    """Refuses what SGLang's code for CPUs ignores.

    Raises:
        StartError: Attention that is not plain.
    """
    remedy = 'set `device = ["cuda:0"]` or choose another model'
    layers = attention_layers(runner)
    if any((layer.logit_cap or 0) > 0 for layer in layers):
        raise StartError(
            "the model soft-caps its attention scores, which the CPU backend ignores", hint=remedy
        )
    if not all(is_plain(layer) for layer in layers):
        raise StartError(
            "some of the model's layers have custom attention, which the CPU backend lacks",
            hint=remedy,
        )


def check_pool(runner: ModelRunner) -> None:
    """Refuses KV pools that the planner's single slot space cannot describe.

    Raises:
        StartError: The model needs another pool, or keeps recurrent state on a CPU.
    """
    architecture = runner.model_config.hf_config.architectures[0]
    pool = runner.token_to_kv_pool
    if keeps_state(pool) and runner.device == "cpu":
        raise StartError(
            f"{architecture} keeps recurrent state, for which SGLang has no code on a CPU",
            hint='set `device = ["cuda:0"]`',
        )
    if not has_known_pages(paged(pool)):
        raise StartError(
            f"{architecture} needs a {type(pool).__name__}, which this driver does not support",
            hint="use a model with one pool of keys and values",
        )


def mask_unsupported_reason(runner: ModelRunner) -> str | None:
    """Why the driver cannot apply attention masks to this model; None when it can."""
    pool = runner.token_to_kv_pool
    if not keeps_heads(pool):
        return f"the model's KV pool is a {type(pool).__name__}"
    if pool.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the model's KV pool keeps {pool.dtype}"
    if not all(is_plain(layer) for layer in attention_layers(runner)):
        return "some of the model's layers have custom attention"
    return None


def paged_decode_refusal(runner: ModelRunner, asked: bool | None) -> str | None:
    """Why the backend `pie` does not compute a model's decodes; None where it does.

    Args:
        runner: with its pools.
        asked: as `DriverOptions.paged_decode`.

    Raises:
        StartError: It is asked for and cannot.
    """
    if asked is False:
        return f"{PAGED_DECODE} needs a GPU" if runner.device == "cpu" else "another is set"
    reason = paged_decode_unsupported_reason(runner)
    if asked and reason is not None:
        raise StartError(
            f"the attention backend {PAGED_DECODE} cannot decode "
            f"{type(runner.model).__name__}: {reason}",
            hint='set `attention_backend = "triton"`, or remove it',
        )
    if not asked:
        reason = reason or _paged_decode_warning(runner)
    return f"not {PAGED_DECODE}: {reason}" if reason else None


def prefills_by_fa3(runner: ModelRunner) -> bool:
    """Whether FlashAttention-3 computes prefills where no backend is named.

    It is faster than triton on the GPUs that it is made for (benches/notebook/gpu.md); layers with
    windows or caps of their own are left to triton.
    """
    if runner.device != "cuda" or torch.cuda.get_device_capability(runner.gpu_id)[0] != _HOPPER:
        return False
    pool = paged(runner.token_to_kv_pool)
    plain = all(
        is_plain(layer)
        and layer.sliding_window_size < 0
        and not layer.logit_cap
        and layer.qk_head_dim == layer.v_head_dim
        and layer.qk_head_dim in _FA3_WIDTHS
        for layer in attention_layers(runner)
    )
    fits = pool.dtype == runner.dtype and pool.dtype in (torch.float16, torch.bfloat16)
    return fits and plain and has_fa3()


def choose_vision_backend(args: ServerArgs, model_config: ModelConfig, gpu_id: int) -> None:
    """Has images encoded by triton where SGLang would take FlashAttention-3 and it is not there."""
    settings = Resolved(args)
    if settings.device != "cuda" or not model_config.is_multimodal or settings.vision_backend:
        return
    if torch.cuda.get_device_capability(gpu_id)[0] == _HOPPER and not has_fa3():
        change_settings(args, mm_attention_backend="triton_attn")


def paged_decode_unsupported_reason(runner: ModelRunner) -> str | None:
    """Why the backend `pie` cannot decode this model, whose pools are there; None when it can."""
    pool = paged(runner.token_to_kv_pool)
    if not keeps_heads(pool):
        return f"its KV pool is a {type(pool).__name__}"
    if pool.dtype not in PAGED_DTYPES:
        return f"its KV pool keeps {pool.dtype}"
    if not lies_by_token(pool):
        return "its KV pool is laid out by heads"
    if not all(is_plain(layer) for layer in attention_layers(runner)):
        return "some of its layers have custom attention"
    if resolved(runner).enable_deterministic_inference:
        reason = _batch_invariant_unsupported_reason(runner)
        if reason is not None:
            return f"`enable_deterministic_inference` is set, and {reason}"
    return None


def _batch_invariant_unsupported_reason(runner: ModelRunner) -> str | None:
    """Why a model's answers would depend on their batch with the backend `pie`; None if not.

    Attention is `BatchInvariantAttention`. GEMMs are those of `BatchInvariantLayers`, or SGLang's
    batch-invariant ones, which cover ``aten::mm`` only. SGLang's deterministic mode with another
    attention backend serves what is refused here.
    """
    layers = attention_layers(runner)
    kv_dtype = paged(runner.token_to_kv_pool).dtype
    if runner.device != "cuda" or torch.cuda.get_device_capability(runner.gpu_id)[0] != _HOPPER:
        return "the batch-invariant kernels need a Hopper GPU"
    ranks = rank_of(runner).size
    if ranks > MAX_INVARIANT_RANKS:
        return (
            f"it has {ranks} ranks: only sums of at most {MAX_INVARIANT_RANKS} are batch-invariant"
        )
    for dtype in (runner.dtype, kv_dtype):
        if dtype != torch.bfloat16:
            return f"the batch-invariant kernels do not run {dtype}"
    reason = _not_dense_reason(runner)
    if reason is not None:
        return reason
    for layer in layers:
        sizes = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
        if not supports_batch_invariant(*sizes, runner.dtype):
            return "its attention has {} query heads, {} KV heads and a head size of {}".format(
                *sizes
            )
    if len({layer.tp_k_head_num for layer in layers}) > 1:
        return "its layers have different numbers of KV heads"
    return None


def check_deterministic_on_cpu(runner: ModelRunner) -> None:
    """Refuses a model whose answers would depend on their batch on the CPU.

    Attention is `CpuBatchInvariantAttention`, and GEMMs are `CpuBatchInvariantGemm`.

    Raises:
        StartError: It is one, with the reason.
    """
    pool = runner.token_to_kv_pool
    ranks = rank_of(runner).size
    if ranks > MAX_INVARIANT_RANKS:
        raise StartError(
            f"`enable_deterministic_inference` is set, and on the CPU it does not support {ranks} "
            f"ranks: only sums of at most {MAX_INVARIANT_RANKS} are batch-invariant",
            hint=f"start at most {MAX_INVARIANT_RANKS} ranks, or unset it",
        )
    reason: str | None
    if not keeps_heads(pool) or pool.dtype != runner.dtype:
        reason = f"its KV pool is a {type(pool).__name__} of {pool.dtype}"
    elif not runs_plain_torch(runner.model):
        reason = "some of its matrices are not multiplied by SGLang's linear layers in torch"
    elif getattr(runner.model_config.hf_text_config, "final_logit_softcapping", None):
        reason = "it soft-caps its logits"
    else:
        reason = _not_dense_reason(runner)
    if reason is not None:
        raise StartError(
            "`enable_deterministic_inference` is set, and on the CPU it does not support "
            f"{type(runner.model).__name__}: {reason}",
            hint="unset it, or choose a dense model without adapters",
        )


def _not_dense_reason(runner: ModelRunner) -> str | None:
    """Why a model's layers are not plain attention and dense GEMMs; None if they are."""
    settings = resolved(runner)
    if settings.enable_lora:
        return "LoRA is not batch-invariant"
    if settings.enable_fp32_lm_head:
        return "`enable_fp32_lm_head` is set, too"
    if not has_plain_gemms(runner.model) or keeps_state(runner.token_to_kv_pool):
        return "its weights are quantized or a mixture of experts, or it keeps recurrent state"
    for layer in attention_layers(runner):
        if not is_plain(layer) or layer.logit_cap or layer.qk_head_dim != layer.v_head_dim:
            return "some of its layers have soft caps or custom attention"
    return None


def _paged_decode_warning(runner: ModelRunner) -> str | None:
    """Why the backend `pie` is for this model only if asked for: what it was never tried with."""
    if keeps_state(runner.token_to_kv_pool):
        return "the model keeps recurrent state"
    layers = attention_layers(runner)
    widest = max((max(layer.qk_head_dim, layer.v_head_dim) for layer in layers), default=0)
    if widest > PAGED_WIDEST:
        return f"the model's heads are {widest} wide"
    return None


def graph_path_unsupported_reason(runner: ModelRunner) -> str | None:
    """Why short batches cannot run as one captured step; None when they can."""
    settings = resolved(runner)
    backend = settings.decode_attention_backend or settings.attention_backend
    if runner.device != "cpu" and backend not in GRAPH_BACKENDS:
        return (
            f"the attention backend {backend} plans decodes on the host; "
            f"set `decode_attention_backend` to one of {', '.join(sorted(GRAPH_BACKENDS))}"
        )
    return None


def takes_prompts(runner: ModelRunner) -> bool:
    """Whether a captured step may have more rows than there are requests.

    The tables of SGLang's triton backend have one row for each request.
    """
    backend = resolved(runner).decode_attention_backend
    return runner.device == "cpu" or backend == PAGED_DECODE


def sliding_window(config: Any) -> int | None:
    """The window in tokens, where the configuration switches one on for some layer."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types and "sliding_attention" not in layer_types:
        return None
    return int(window)
