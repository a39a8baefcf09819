"""LoRA adapters for tiny models, made and merged by PEFT."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Final, NamedTuple

from support.models import tiny_models

LINEAR: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "linear": {"r": 8, "lora_alpha": 16, "target_modules": LINEAR},
    "attention": {
        "r": 3,
        "lora_alpha": 2,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
    },
    "mlp": {"r": 16, "lora_alpha": 8, "target_modules": ["up_proj"]},
    "ranks": {
        "r": 4,
        "lora_alpha": 5,
        "target_modules": ["k_proj", "o_proj", "gate_proj", "down_proj"],
        "rank_pattern": {"k_proj": 2, "layers.1.mlp.down_proj": 7},
        "alpha_pattern": {"o_proj": 11},
    },
    "one layer": {
        "r": 5,
        "lora_alpha": 10,
        "target_modules": LINEAR,
        "layers_to_transform": [1],
    },
    "head": {"r": 4, "lora_alpha": 4, "target_modules": ["lm_head", "v_proj"]},
    "embedding": {"r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens"]},
}
FUSED: Final[dict[str, Any]] = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["qkv_proj", "o_proj", "gate_up_proj"],
}
"""Of a model whose checkpoints have fused layers."""


class Made(NamedTuple):
    """An adapter and the model that it makes of its base."""

    adapter: Path
    """What PEFT saved."""
    merged: Path
    """Snapshot of the model with the adapter merged into it."""


def make(model: str, name: str, folder: Path, seed: int = 0) -> Made:
    """Makes the adapter `name` of :data:`CONFIGS` for a tiny model below `folder`, once."""
    target = folder / f"{model}-{name.replace(' ', '-')}-{seed}"
    made = Made(target / "adapter", target / "merged")
    if not target.exists():
        with warnings.catch_warnings():
            # Those of other packages, while they are imported.
            warnings.simplefilter("ignore")
            _make(tiny_models.build(model, folder), CONFIGS[name], made, seed)
    return made


def make_for(snapshot: Path, name: str, folder: Path, seed: int = 0) -> Made:
    """Makes the adapter `name` of :data:`CONFIGS`, or `fused`, for any model, in its own folder."""
    target = folder / f"{name.replace(' ', '-')}-{seed}"
    made = Made(target / "adapter", target / "merged")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _make(snapshot, {**CONFIGS, "fused": FUSED}[name], made, seed)
    return made


def edit(folder: Path, changed: Path, **settings: Any) -> Path:
    """A copy of an adapter with other settings; None removes one."""
    changed.mkdir(parents=True)
    for file in folder.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    path = changed / "adapter_config.json"
    config = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return changed


def _make(snapshot: Path, config: dict[str, Any], made: Made, seed: int) -> None:
    import peft
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32)
    # An adapter of the embeddings does not change the head, nor the other way round.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Nothing starts at zero.
        adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **config))
    adapted.save_pretrained(made.adapter)
    adapted.merge_and_unload().save_pretrained(made.merged)
    tiny_models.add_tokenizer(made.merged)
