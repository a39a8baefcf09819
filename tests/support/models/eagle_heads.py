"""EAGLE heads for the model in the repository: trained in seconds, and computed by plain torch.

A head is trained on the model's own greedy answers, so that some of its drafts are accepted. It is
stored as SGLang reads published heads. `HeadReference.drafts` computes the drafts of a context from
all of its tokens at once: the pair at position `j` is the token there and the hidden state before.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from support.models.tiny_models import POCKET

AUX_LAYERS: Final = (0, 2, 4)
"""Whose outputs an EAGLE-3 head takes; the default ones need more layers."""
DRAFT_VOCAB: Final = 1000
"""Most frequent tokens, which an EAGLE-3 head can draft."""
STEPS: Final = 24
"""Of training."""
_LENGTH: Final = 56


class HeadModule(nn.Module):
    """The layer of a head, with the names of published checkpoints."""

    def __init__(self, config: Any, eagle3: bool, vocabulary: int) -> None:
        super().__init__()
        self.eagle3, self.config = eagle3, config
        hidden, inner = config.hidden_size, config.intermediate_size
        dim = config.head_dim
        width = (2 if eagle3 else 1) * hidden
        self.fc = nn.Linear((3 if eagle3 else 2) * hidden, hidden, bias=not eagle3)
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.norms = nn.ParameterDict({name: torch.ones(hidden) for name in names})
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False) if eagle3 else None

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Of the model's hidden states, of all layers that it takes."""
        return self.fc(states) if self.eagle3 else states

    def forward(
        self, embeds: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, tokens, hidden]`` each: states for the LM head, and features."""
        if self.eagle3:
            residual = before
            normed = [self._norm("input_layernorm", embeds), self._norm("hidden_norm", before)]
            inputs = torch.cat(normed, dim=-1)
        else:
            residual = inputs = self.fc(torch.cat([embeds, before], dim=-1))
        residual = residual + self._attend(inputs)
        normed = self._norm("post_attention_layernorm", residual)
        gated = F.silu(self.gate_proj(normed)) * self.up_proj(normed)
        features = residual + self.down_proj(gated)
        return (self._norm("norm", features) if self.eagle3 else features), features

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.norms[name], self.config.rms_norm_eps)

    def _attend(self, inputs: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = inputs.shape

        def heads(projection: nn.Linear) -> torch.Tensor:
            return projection(inputs).view(batch, tokens, -1, self.config.head_dim).transpose(1, 2)

        queries, keys, values = heads(self.q_proj), heads(self.k_proj), heads(self.v_proj)
        queries, keys = (self._rotate(x) for x in (queries, keys))
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.config.head_dim // 2
        rates = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[2])[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class HeadReference:
    """A model with a head, whose drafts are computed from whole contexts."""

    def __init__(self, *, eagle3: bool) -> None:
        """Trains the head, with one thread: the same each time."""
        torch.set_num_threads(1)
        self.model, texts = _teacher()
        self.config = self.model.config
        self.eagle3 = eagle3
        counts = torch.bincount(texts.flatten(), minlength=self.config.vocab_size)
        kept = counts.argsort(descending=True, stable=True)[:DRAFT_VOCAB].sort().values
        self.ids = kept if eagle3 else torch.arange(self.config.vocab_size)
        """The token of each logit."""
        torch.manual_seed(7)
        self.head = HeadModule(self.config, eagle3, len(self.ids))
        self.texts = texts
        """Greedy answers, with their prompts: ``[texts, tokens]``."""
        self._train(texts)

    @property
    def embed_tokens(self) -> nn.Embedding:
        table: nn.Embedding = self.model.get_input_embeddings()
        return table

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """What a head takes of the model, ``[batch, tokens, width]``."""
        with torch.inference_mode():
            found = self.model(tokens, use_cache=False, output_hidden_states=True).hidden_states
        if not self.eagle3:
            return found[-1].clone()
        return torch.cat([found[layer + 1] for layer in AUX_LAYERS], dim=-1).clone()

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        lm_head = self.model.lm_head if self.head.lm_head is None else self.head.lm_head
        logits: torch.Tensor = lm_head(states)
        return logits

    def drafts(self, context: Sequence[int], count: int) -> tuple[list[int], float]:
        """The chain of drafts after a context, whose last token the model has not seen.

        Returns:
            The drafts, and the smallest distance of the best two logits.
        """
        tokens = torch.tensor([context])
        found: list[int] = []
        gaps: list[float] = []
        with torch.inference_mode():
            before = F.pad(self.head.features(self.states(tokens[:, :-1])), (0, 0, 1, 0))
            for _ in range(count):
                states, features = self.head(self.embed_tokens(tokens), before)
                best = self.logits(states[0, -1]).topk(2)
                found.append(int(self.ids[best.indices[0]]))
                gaps.append(float(best.values[0] - best.values[1]))
                tokens = F.pad(tokens, (0, 1), value=found[-1])
                before = torch.cat([before, features[:, -1:]], dim=1)
        return found, min(gaps)

    def save(self, folder: Path) -> Path:
        """Stores the head as SGLang reads one."""
        folder.mkdir(parents=True, exist_ok=True)
        head, tensors = self.head, {}
        layer = "midlayer" if self.eagle3 else "layers.0"
        for name, parameter in head.named_parameters():
            part, _, _ = name.partition(".")
            if part == "norms":
                own = name.removeprefix("norms.")
                if not self.eagle3 and own != "post_attention_layernorm":
                    continue
                key = f"{layer}.{own}.weight" if own != "norm" else "norm.weight"
            elif part in ("fc", "lm_head"):
                key = name
            else:
                kind = "mlp" if part in ("gate_proj", "up_proj", "down_proj") else "self_attn"
                key = f"{layer}.{kind}.{name}"
            tensors[key] = parameter.detach().clone().contiguous()
        config = {
            **json.loads((POCKET / "config.json").read_text()),
            "architectures": ["LlamaForCausalLMEagle3" if self.eagle3 else "LlamaForCausalLMEagle"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "torch_dtype": "float32",
            "tie_word_embeddings": False,
        }
        if self.eagle3:
            tensors["d2t"] = self.ids - torch.arange(len(self.ids))
            config |= {
                "draft_vocab_size": len(self.ids),
                # Fewer than the model has: rotary tables must be as long as the model's.
                "max_position_embeddings": 64,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)},
            }
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def _train(self, texts: torch.Tensor) -> None:
        """Teaches the head what the model says next, and a second draft from its own features."""
        states = self.states(texts)
        with torch.inference_mode():
            best = self.model(texts, use_cache=False).logits.argmax(-1).clone()
        known = torch.full((self.config.vocab_size,), -100)
        known[self.ids] = torch.arange(len(self.ids))
        labels, embeds = known[best], self.embed_tokens(texts)
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=2e-3, weight_decay=0.0)
        chooser = torch.Generator().manual_seed(3)
        for _ in range(STEPS):
            rows = torch.randint(len(texts), (4,), generator=chooser)
            before = F.pad(self.head.features(states[rows]), (0, 0, 1, 0))[:, :-1]
            loss = torch.zeros(())
            for _ in range(2):
                out, features = self.head(embeds[rows], before)
                loss = loss + F.cross_entropy(
                    self.logits(out).flatten(0, 1), labels[rows].flatten(), ignore_index=-100
                )
                before = F.pad(features, (0, 0, 1, 0))[:, :-1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@functools.cache
def _teacher() -> tuple[Any, torch.Tensor]:
    """The model in float32, and greedy answers to beginnings of a text: ``[texts, tokens]``."""
    import transformers
    from tokenizers import Tokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            POCKET, attn_implementation="eager", dtype="float32"
        ).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    text = (POCKET / "README.md").read_text()
    ids = Tokenizer.from_file(str(POCKET / "tokenizer.json")).encode(text).ids
    prompts = torch.stack([torch.tensor(ids[at : at + 16]) for at in range(0, 24 * 24, 24)])
    with torch.inference_mode():
        texts: torch.Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=_LENGTH - prompts.shape[1],
            min_new_tokens=_LENGTH - prompts.shape[1],
            do_sample=False,
        )
    return model, texts.clone()
