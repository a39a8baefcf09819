"""Small random embedding, classification and reward models, and what transformers makes of them."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from support.models import tiny_models
from support.models.tiny_models import POCKET, WINDOW, randomize

VOCABULARY: Final = 4096
"""Of the embedded model's tokenizer."""
COMMON: Final = {**tiny_models.COMMON, "vocab_size": VOCABULARY}
_NO_HEAD_DIM: Final = {key: value for key, value in COMMON.items() if key != "head_dim"}
_GEMMA: Final = {
    **COMMON,
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 16,
    # The CPU's attention does not compute it.
    "attn_logit_softcapping": None,
}


class EmbeddingModel(NamedTuple):
    """A class of transformers, and the shape of a published checkpoint."""

    config: str
    model: str
    options: Mapping[str, Any]
    architecture: str
    """In `config.json`."""
    published: Mapping[str, Any] = MappingProxyType({})
    """What it says besides."""
    is_embedding: bool = False
    """Whether the option is needed."""

    @property
    def has_head(self) -> bool:
        """Whether a head makes classes or a reward of the last token's row."""
        return self.model.endswith("ForSequenceClassification")


MODELS: Final[dict[str, EmbeddingModel]] = {
    "LlamaEmbeddingModel": EmbeddingModel(
        "LlamaConfig", "LlamaModel", COMMON, "LlamaEmbeddingModel"
    ),
    "e5-mistral": EmbeddingModel(
        "MistralConfig", "MistralModel", {**COMMON, "sliding_window": None}, "MistralModel"
    ),
    "gte-Qwen2": EmbeddingModel(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**_NO_HEAD_DIM, "tie_word_embeddings": False},
        "Qwen2ForCausalLM",
        is_embedding=True,
    ),
    # Without an LM head, and without the prefix of a causal model's tensors.
    "Qwen3-Embedding": EmbeddingModel(
        "Qwen3Config",
        "Qwen3Model",
        {**COMMON, "tie_word_embeddings": False},
        "Qwen3ForCausalLM",
        MappingProxyType({"is_matryoshka": True}),
        is_embedding=True,
    ),
    "Qwen3Model": EmbeddingModel("Qwen3Config", "Qwen3Model", COMMON, "Qwen3Model"),
    "Skywork-Reward-Llama": EmbeddingModel(
        "LlamaConfig",
        "LlamaForSequenceClassification",
        {**COMMON, "num_labels": 1},
        "LlamaForSequenceClassification",
    ),
    "Skywork-Reward-Gemma": EmbeddingModel(
        "Gemma2Config",
        "Gemma2ForSequenceClassification",
        {**_GEMMA, "num_labels": 1},
        "Gemma2ForSequenceClassification",
    ),
    "Qwen2-classes": EmbeddingModel(
        "Qwen2Config",
        "Qwen2ForSequenceClassification",
        {**_NO_HEAD_DIM, "num_labels": 3},
        "Qwen2ForSequenceClassification",
    ),
    "Qwen3-classes": EmbeddingModel(
        "Qwen3Config",
        "Qwen3ForSequenceClassification",
        {**COMMON, "num_labels": 2},
        "Qwen3ForSequenceClassification",
    ),
}


def build(name: str, folder: Path) -> Path:
    """Makes a model of :data:`MODELS` in a subfolder of `folder`, once, and returns it."""
    import torch
    import transformers

    target, kind = folder / name, MODELS[name]
    if target.exists():
        return target
    unfinished = folder / f".{name}"
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(sum(name.encode()))
        config = getattr(transformers, kind.config)(**kind.options)
        model = getattr(transformers, kind.model)(config)
        randomize(model)
        model.save_pretrained(unfinished)
    path = unfinished / "config.json"
    written = {**json.loads(path.read_text()), "architectures": [kind.architecture]}
    path.write_text(json.dumps({**written, **kind.published}))
    for file in POCKET.glob("*token*"):
        shutil.copy(file, unfinished)
    unfinished.rename(target)
    return target


def write_modules(snapshot: Path, mode: str, *, dense: int = 0, normalize: bool) -> list[Any]:
    """Writes files of sentence-transformers beside a model of 64 numbers.

    Args:
        snapshot: The model's folder.
        mode: Of pooling, as `pooling_mode_` names it.
        dense: Numbers that a Dense module makes of it; 0 for none.
        normalize: Whether rows are scaled to length 1.

    Returns:
        Weight and bias of the Dense module.
    """
    import torch
    from safetensors.torch import save_file

    kinds = ["Transformer", "Pooling", *["Dense"] * bool(dense), *["Normalize"] * normalize]
    modules = [
        {
            "idx": index,
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (snapshot / "modules.json").write_text(json.dumps(modules))
    (snapshot / "1_Pooling").mkdir()
    others = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}
    pooling = {"word_embedding_dimension": 64, **others, f"pooling_mode_{mode}": True}
    (snapshot / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if not dense:
        return []
    generator = torch.Generator().manual_seed(dense)
    weight, bias = (torch.randn(*size, generator=generator) for size in ((dense, 64), (dense,)))
    folder = snapshot / "2_Dense"
    folder.mkdir()
    activation = "torch.nn.modules.activation.Tanh"
    config = {"in_features": 64, "out_features": dense, "bias": True}
    text = json.dumps({**config, "activation_function": activation})
    (folder / "config.json").write_text(text)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "model.safetensors")
    return [weight, bias]


class EmbeddingReference:
    """A model of :data:`MODELS` in transformers, in float32."""

    def __init__(self, name: str, snapshot: Path) -> None:
        import transformers

        self._has_head = MODELS[name].has_head
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = getattr(transformers, MODELS[name].model)
            self._model = loader.from_pretrained(snapshot, dtype="float32").eval()

    def row(self, tokens: Sequence[int], *, scaled: bool = True) -> list[float]:
        """The embedding, by default of length 1, or the logits of the head."""
        import torch

        if self._has_head:
            with torch.inference_mode():
                return list(map(float, self._model(torch.tensor([list(tokens)])).logits[0]))
        last = self.states(tokens)[-1]
        return list(map(float, torch.nn.functional.normalize(last, dim=-1) if scaled else last))

    def states(self, tokens: Sequence[int]) -> Any:
        """``[tokens, hidden]`` after the final norm."""
        import torch

        base = getattr(self._model, "model", self._model)
        with torch.inference_mode():
            return base(torch.tensor([list(tokens)])).last_hidden_state[0]


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths, without the tokens that pad, begin or end a text."""
    import random

    rng = random.Random(repr(lengths))
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]
