"""What a small random model of an architecture is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from support.models import hub_layouts, tiny_models

WINDOW: Final = tiny_models.WINDOW
PLAIN: Final = {
    **tiny_models.COMMON,
    "tie_word_embeddings": False,
}
NO_HEAD_DIM: Final = {key: value for key, value in PLAIN.items() if key != "head_dim"}
ALL_HEADS: Final = {**NO_HEAD_DIM, "num_key_value_heads": 4}
EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# GPU kernels for latent attention know these sizes only.
LATENT: Final = {
    **ALL_HEADS,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}


class Architecture(NamedTuple):
    """A class of transformers and the configuration of a small model of it."""

    config: str
    model: str
    options: Mapping[str, Any]
    published: Mapping[str, Any] = MappingProxyType({})
    """What the `config.json` of published checkpoints says otherwise than transformers does."""
    layout: hub_layouts.Layout | None = None
    """The names of the weights in published checkpoints, and `published` is all of `config.json`;
    None if both are those of transformers."""
    adjust: Callable[[Any], None] | None = None
    """Changes the model of transformers, so that it computes what the architecture does."""

    @property
    def name(self) -> str:
        """The entry in a checkpoint's `architectures`."""
        names: list[str] = self.published.get("architectures", [self.model])
        return names[0]
