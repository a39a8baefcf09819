"""What SGLang gets wrong without an error, corrected on its objects.

Each has a probe in `tests/test_compat.py` that fails once SGLang is right; by then the correction
is wrong by as much, also without an error. What SGLang does on a CPU is in `model.py`.
"""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.activation import XIELU, GeluAndMul
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.model_runner import ModelRunner

from pie_driver_sglang.backends.sglang.compat import selection
from pie_driver_sglang.backends.sglang.compat.attention import attention_layers


def correct_rope(model_config: ModelConfig) -> None:
    """Gives a configuration the `rope_theta` that a model class of SGLang (EXAONE 4) looks for.

    transformers 5 keeps it in `rope_parameters` only, and such a class takes a default of its own.
    """
    for config in (model_config.hf_config, model_config.hf_text_config):
        parameters = getattr(config, "rope_parameters", None)
        theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
        if isinstance(theta, int | float) and getattr(config, "rope_theta", None) is None:
            config.rope_theta = theta


def correct_windows(runner: ModelRunner, window: int) -> None:
    """Narrows windows that a model class of SGLang (Cohere 2) takes for one token too many.

    Args:
        runner: With its model.
        window: Of its configuration, which counts a row's own token. That of a layer does not.
    """
    for layer in attention_layers(runner):
        if layer.sliding_window_size == window:
            layer.sliding_window_size = window - 1
            # Attention backends plan for this one; such a class does not set it.
            runner.sliding_window_size = window - 1


def correct_decode_windows(runner: ModelRunner) -> None:
    """Widens what SGLang's triton backend lists for a row that decodes in a windowed layer.

    It lists as many tokens as a window has besides the row's own, but counts the row's own, so that
    the oldest is missing. Rows of extends are masked by their layer's window, whatever is listed.
    """
    backend = runner.attn_backend
    parts = [getattr(backend, f"{part}_backend", None) for part in ("prefill", "decode")]
    for part in {id(part): part for part in (backend, *parts)}.values():
        if isinstance(part, TritonAttnBackend) and (part.sliding_window_size or 0) > 0:
            part.sliding_window_size += 1


def correct_layers(runner: ModelRunner) -> None:
    """Corrects modules of a loaded model.

    - The layers of Granite 4 return their output and the residual that it contains already; the
      final norm of SGLang's class adds both.
    - xIELU (Apertus) has its parameters in bfloat16, whatever the type of the model. float16
      activations would become float32 ones, and those of a float32 model are rounded.
    - Gemma 1 has the exact GELU, whatever its configuration names: transformers after 5.12 read its
      `gelu` as the tanh approximation that the model was trained with.
    """
    model = runner.model
    is_gemma = type(model).__name__ == "GemmaForCausalLM"
    takes_tanh = is_gemma and model.config.hidden_act == "gelu_pytorch_tanh"
    if selection.layers().adds_last_residual_again(model):
        norm = model.model.norm.forward
        model.model.norm.forward = lambda states, residual: (norm(states), residual)
    for module in model.modules():
        if isinstance(module, XIELU):
            module.to(runner.dtype)
        if takes_tanh and isinstance(module, GeluAndMul):
            module.approximate = "tanh"
