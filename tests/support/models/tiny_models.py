"""Small random models in Hugging Face layout whose attention decides the next token."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from support import REPOSITORY

POCKET: Final = REPOSITORY / "models" / "pocket"
"""The trained model that the repository brings along."""
ALLOW_NO_POCKET: Final = "PIE_ALLOW_NO_POCKET"
"""Set to 1 to leave `pocket` out of the parity matrix while its folder does not exist."""

VOCABULARY: Final = 300
CONTEXT: Final = 512
WINDOW: Final = 24
"""Sliding window of the Gemma models, in tokens."""

PATCH_VALUES: Final = 3 * 2 * 4 * 4
"""Numbers of one patch of `qwen3-vl`: channels, frames, height and width."""
WIDE_PATCH_VALUES: Final = 3 * 2 * 14 * 14
"""Those of `qwen2-vl` and `qwen2.5-vl`, whose classes in SGLang know this number."""

COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_IMAGE_TOKENS: Final = {
    "image_token_id": VOCABULARY - 4,
    "video_token_id": VOCABULARY - 3,
    "vision_start_token_id": VOCABULARY - 2,
    "vision_end_token_id": VOCABULARY - 1,
}
_QWEN2_TEXT: Final = {
    **{key: value for key, value in COMMON.items() if key != "head_dim"},
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [2, 3, 3],
    },
}


def build(name: str, folder: Path) -> Path:
    """Makes a model below `folder`, once, and returns its subfolder.

    Args:
        name: Of :data:`TINY` or `_BUILDERS`, such as `llama-32` and `qwen2-vl`.
        folder: Where to put it.
    """
    target = folder / name
    if not target.exists():
        unfinished = folder / f".{name}"
        with warnings.catch_warnings():
            # Those of other packages, while they are imported.
            warnings.simplefilter("ignore")
            _make(name).save_pretrained(unfinished)
        add_tokenizer(unfinished)
        unfinished.rename(target)
    return target


def build_llama(folder: Path, vocabulary: int) -> Path:
    """Makes a random Llama with a vocabulary of so many tokens in `folder`, and returns it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**COMMON, "vocab_size": vocabulary}, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(vocabulary)
        model = LlamaForCausalLM(config)
        randomize(model)
        model.save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """Adds the file for which a driver looks; nothing here reads it."""
    (folder / "tokenizer.json").write_text("{}")


def model_names() -> list[str]:
    """The models of the parity matrix; `pocket` only as :data:`ALLOW_NO_POCKET` says."""
    excused = os.environ.get(ALLOW_NO_POCKET) == "1" and not POCKET.is_dir()
    return [*TINY] if excused else ["pocket", *TINY]


def snapshot(name: str, folder: Path) -> Path:
    """The folder of a model of :func:`model_names`; tiny models are built below `folder`.

    Raises:
        FileNotFoundError: `pocket` is missing.
    """
    if name != "pocket":
        return build(name, folder)
    if not POCKET.is_dir():
        raise FileNotFoundError(
            f"{POCKET.relative_to(REPOSITORY)} is missing: train it, "
            f"or set {ALLOW_NO_POCKET}=1 to test without it"
        )
    return POCKET


def _make(name: str) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(name.encode()))
        model = _BUILDERS[name]()
        randomize(model)
    return model


def _llama(*, tied: bool, head_dim: int = COMMON["head_dim"]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {**COMMON, "head_dim": head_dim}
    return LlamaForCausalLM(LlamaConfig(**options, tie_word_embeddings=tied))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    changed = {**COMMON, "head_dim": 32, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(**changed, tie_word_embeddings=True))


def _qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    changed = {key: value for key, value in COMMON.items() if key != "head_dim"}
    return Qwen2ForCausalLM(Qwen2Config(**changed, tie_word_embeddings=False))


def _llama_of_3b() -> Any:
    """Llama-3.2-3B's proportions: three query heads a KV head, tied, no width a power of two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 160}
    return LlamaForCausalLM(LlamaConfig(**{**COMMON, **sizes}, tie_word_embeddings=True))


def _qwen2_of_7b() -> Any:
    """Qwen2.5-7B's proportions: seven query heads a KV head, and biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1}
    changed = {**{key: value for key, value in COMMON.items() if key != "head_dim"}, **sizes}
    return Qwen2ForCausalLM(Qwen2Config(**changed, tie_word_embeddings=False))


def _qwen3_of_4b() -> Any:
    """Qwen3-4B's proportions: queries wider than hidden states, tied."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 96, "num_attention_heads": 8}
    return Qwen3ForCausalLM(Qwen3Config(**{**COMMON, **sizes}, tie_word_embeddings=True))


def _mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(**COMMON, sliding_window=None, tie_word_embeddings=False)
    )


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True}
    text = {
        **COMMON,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "rope_parameters": {**rope, "mrope_section": [6, 5, 5]},
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        # SGLang loads no weights of odd sizes.
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": COMMON["hidden_size"],
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **_IMAGE_TOKENS
    )
    return Qwen3VLForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": COMMON["hidden_size"],
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 14,
        # By this name in published checkpoints; transformers has another default for it.
        "in_chans": 3,
    }
    config = Qwen2VLConfig(
        text_config=_QWEN2_TEXT, vision_config=vision, tie_word_embeddings=False, **_IMAGE_TOKENS
    )
    return Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 3,
        "hidden_size": 32,
        # SGLang pads it to a multiple of 8, as that of the published models.
        "intermediate_size": 60,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": COMMON["hidden_size"],
        # Two by two tokens, in all blocks but one.
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=_QWEN2_TEXT, vision_config=vision, tie_word_embeddings=False, **_IMAGE_TOKENS
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **{**COMMON, "head_dim": 32, "num_hidden_layers": 3},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=WINDOW,
        query_pre_attn_scalar=32,
        tie_word_embeddings=True,
    )
    return Gemma3ForCausalLM(config)


def _gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **COMMON,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        # The CPU's attention does not compute it.
        attn_logit_softcapping=None,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    )
    return Gemma2ForCausalLM(config)


TINY: Final[dict[str, Callable[[], Any]]] = {
    "llama": functools.partial(_llama, tied=False),
    "llama-tied": functools.partial(_llama, tied=True),
    "qwen3": _qwen3,
    "qwen2": _qwen2,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gemma2": _gemma2,
}
"""Builders of the random models of the parity matrix."""

_BUILDERS: Final[dict[str, Callable[[], Any]]] = {
    **TINY,
    # vLLM's CPU attention has no narrower heads.
    "llama-32": functools.partial(_llama, tied=False, head_dim=32),
    "llama-of-3b": _llama_of_3b,
    "qwen2-of-7b": _qwen2_of_7b,
    "qwen3-of-4b": _qwen3_of_4b,
    "qwen2-vl": _qwen2_vl,
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl": _qwen3_vl,
}


def randomize(model: Any) -> None:
    """Fresh weights: distinct logits, attention that is far from uniform, norms that are not 1.

    Blocks outweigh the embeddings, else a tied model would repeat its last token for ever.
    """
    import torch

    gemma = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" in name or ".ln_" in name:
                centre = 0.0 if gemma else 1.0
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    centre += 0.5
                if name.endswith(("model.norm.weight", "language_model.norm.weight")):
                    centre += 6.0 if gemma else 1.5
                weight.normal_(centre, 0.1)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.3)
            elif "embed_tokens" in name:
                # Gemma multiplies its embeddings by sqrt(hidden_size).
                weight.normal_(0.0, 0.03 if gemma else 0.1)
            elif weight.dim() > 1:
                # Vectors with a meaning of their own, such as decay rates, stay as they are.
                attends = name.endswith(("q_proj.weight", "k_proj.weight"))
                mixes = name.endswith(("v_proj.weight", "o_proj.weight"))
                gain = 1.3 if attends else 1.5 if mixes else 1.0
                weight.normal_(0.0, gain / math.sqrt(weight.shape[1]))
