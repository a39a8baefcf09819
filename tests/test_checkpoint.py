"""Checkpoints that do not fit their configuration are refused at start, with the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import versions
from support.models import architectures, damaged_checkpoints, tiny_models
from support.models.damaged_checkpoints import (
    FILE,
    Tensors,
    added,
    converted,
    cut,
    damaged,
    save,
    transposed,
    without,
)
from support.process import drivers, scripts
from support.process.inspection import error_line

pytestmark = pytest.mark.engine

SCRIPT = "tests/support/sglang_scripts/checkpoint_loading.py"
Change = Callable[[Tensors], object]


def refusal(snapshot: Path, folder: Path, **driver: Any) -> str:
    """The one line that a start ends with."""
    drivers.start_fork_server()
    config = drivers.write_config(folder, snapshot, **driver)
    with pytest.raises(drivers.StartFailedError) as caught, drivers.fork(config):
        pass
    return error_line(caught.value.stderr)


def starts(snapshot: Path, folder: Path) -> None:
    """The driver serves a snapshot."""
    drivers.start_fork_server()
    with drivers.fork(drivers.write_config(folder, snapshot)) as driver:
        pass
    assert driver.stop() == 0


CHANGES = 24
"""Tensors of each architecture that are changed."""
CHANGES_OF_RANKS = 6
"""The same on two ranks."""
MLP = "model.layers.1.mlp."
ATTENTION = "model.layers.1.self_attn."
# The tiny Llama has 2 layers, 64 wide, 4 heads of 16 with 2 for keys, MLPs of 96, 300 tokens.
LLAMA: dict[str, tuple[dict[str, Any], Change | None, list[str]]] = {
    "no up_proj": ({}, without(f"{MLP}up_proj"), [f"{MLP}up_proj.weight is missing, (96, 64)"]),
    "no lm_head": ({}, without("lm_head"), ["lm_head.weight is missing, (300, 64)"]),
    "no layer": ({}, without("layers.1."), ["model.layers.1.", "is missing", "more)"]),
    "fewer layers": (
        {"num_hidden_layers": 1},
        None,
        [FILE, "model.layers.1.", "the model has none (and 8 more)"],
    ),
    "more layers": ({"num_hidden_layers": 3}, None, ["model.layers.2.", "is missing"]),
    "narrower MLP": ({"intermediate_size": 80}, None, [FILE, "_proj.weight", "(64, 96)", "80)"]),
    "wider MLP": ({"intermediate_size": 112}, None, [FILE, "_proj.weight", "(64, 96)", "112)"]),
    "fewer heads of keys": (
        {"num_key_value_heads": 1},
        None,
        [FILE, "k_proj.weight", "(32, 64)", "(16, 64)"],
    ),
    "more heads of keys": (
        {"num_key_value_heads": 4},
        None,
        [FILE, "k_proj.weight", "(32, 64)", "(64, 64)"],
    ),
    "fewer heads": ({"num_attention_heads": 2}, None, [FILE, "_proj.weight", "(64, 64)", "32"]),
    "more heads": ({"num_attention_heads": 8}, None, [FILE, "_proj.weight", "(64, 64)", "128"]),
    "biases asked for": ({"attention_bias": True}, None, ["_proj.bias is missing", "(128,)"]),
    "smaller vocabulary": ({"vocab_size": 299}, None, [FILE, "(300, 64)", "(299, 64)"]),
    "padded vocabulary": (
        {},
        cut("lm_head.weight", 320, 64),
        [FILE, "lm_head.weight", "(320, 64)", "(300, 64)"],
    ),
    "tied, with another head": (
        {"tie_word_embeddings": True},
        None,
        [FILE, "lm_head.weight", "(300, 64)", "model.embed_tokens.weight"],
    ),
    "transposed": (
        {},
        transposed(f"{MLP}down_proj.weight"),
        [FILE, f"{MLP}down_proj.weight", "(96, 64)", "(64, 96)"],
    ),
    "a bias too many": (
        {},
        added(f"{ATTENTION}q_proj.bias", 64),
        [FILE, f"{ATTENTION}q_proj.bias", "(64,)", "the model has none"],
    ),
    "scales without quantization": (
        {},
        added(f"{MLP}up_proj.weight_scale_inv", 1, 1),
        [FILE, f"{MLP}up_proj.weight_scale_inv", "(1, 1)", "the model has none"],
    ),
    "integers": (
        {},
        converted(f"{MLP}up_proj.weight", "int64"),
        [FILE, f"{MLP}up_proj.weight", "torch.int64", "torch.float32"],
    ),
}


@pytest.mark.parametrize("case", LLAMA)
def test_what_does_not_fit_is_refused(case: str, llama_snapshot: Path, tmp_path: Path) -> None:
    config, change, named = LLAMA[case]
    snapshot = damaged(llama_snapshot, tmp_path, change or (lambda _: None), **config)
    line = refusal(snapshot, tmp_path)
    assert "do not fit" in line
    assert all(text in line for text in named), line


EXPERTS = "model.layers.1.mlp.experts"
OTHERS: dict[str, tuple[str, dict[str, Any], Change | None, list[str]]] = {
    "all norms of queries": ("Qwen3", {}, without("q_norm"), ["q_norm.weight is missing"]),
    "an expert": ("Qwen3-MoE", {}, without(f"{EXPERTS}.2."), [f"{EXPERTS}.2.", "is missing"]),
    "an expert too many": (
        "Qwen3-MoE",
        {"num_local_experts": 3},
        None,
        [FILE, ".mlp.gate.weight", "(4, 64)", "(3, 64)"],
    ),
    "experts cut": (
        "Qwen3-MoE",
        {"moe_intermediate_size": 32},
        None,
        [FILE, "mlp.experts.", "(64, 64)", "32"],
    ),
    "a head of its own": (
        "Gemma",
        {"tie_word_embeddings": False},
        added("lm_head.weight", 300, 64),
        [FILE, "lm_head.weight", "(300, 64)", "none"],
    ),
    "next tokens that nobody announced": (
        "GLM-4.5",
        {"num_nextn_predict_layers": 0},
        added("model.layers.2.eh_proj.weight", 64, 128),
        [FILE, "model.layers.2.eh_proj.weight", "(64, 128)"],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_architectures(case: str, models_folder: Path, tmp_path: Path) -> None:
    name, config, change, named = OTHERS[case]
    sound = architectures.build(name, models_folder)
    line = refusal(damaged(sound, tmp_path, change or (lambda _: None), **config), tmp_path)
    assert "do not fit" in line
    assert all(text in line for text in named), line


class TestSound:
    """What is there on purpose, or by SGLang's leave, is no fault."""

    def test_extra_tensors(self, models_folder: Path, tmp_path: Path) -> None:
        import torch

        def change(tensors: Tensors) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            for name in (
                "model.layers.0.self_attn.rotary_emb.inv_freq",
                "model.layers.0.self_attn.k_scale",
                "mtp.layers.0.input_layernorm.weight",
                "vision_tower.layers.0.weight",
                "score.weight",
            ):
                tensors[name] = torch.ones(8)

        starts(damaged(tiny_models.build("llama-tied", models_folder), tmp_path, change), tmp_path)

    def test_layers_of_next_tokens(self, models_folder: Path, tmp_path: Path) -> None:
        sound = architectures.build("GLM-4.5", models_folder)
        extra = added("model.layers.2.eh_proj.weight", 64, 128)
        starts(damaged(sound, tmp_path, extra, num_nextn_predict_layers=1), tmp_path)

    def test_files_of_torch(self, llama_snapshot: Path, tmp_path: Path) -> None:
        starts(of_torch(llama_snapshot, tmp_path), tmp_path)


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_every_architecture(name: str, models_folder: Path) -> None:
    """Its checkpoint fits as it is, and any change to one of its tensors is found, by name.

    Also of those that a driver refuses on a CPU.
    """
    snapshot = architectures.build(name, models_folder)
    out = scripts.run(SCRIPT, str(snapshot), "1", str(CHANGES))
    sound, changes = json.loads(out.splitlines()[-1])
    assert sound is None
    assert len(changes) == CHANGES
    for what, tensor, line in changes:
        assert line is not None, f"{what} {tensor} is served"
        # Of a layer that has no like another name than the model's cannot be known.
        assert tensor in line or what == "without" or "proj" in tensor, (what, tensor, line)


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_every_architecture_on_two_ranks(name: str, models_folder: Path) -> None:
    """Each reads a part of it, experts and heads among them: together they find the same."""
    snapshot = architectures.build(name, models_folder)
    out = scripts.run(
        SCRIPT,
        str(snapshot),
        "2",
        str(CHANGES_OF_RANKS),
    )
    sound, changes = json.loads(out.splitlines()[-1])
    assert sound is None
    assert len(changes) == CHANGES_OF_RANKS
    for what, tensor, line in changes:
        assert line is not None, f"{what} {tensor} is served"


@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
@pytest.mark.parametrize(
    ("method", "architecture"),
    [
        ("fp8", "Qwen3"),
        ("fp8", "Qwen3Moe"),
        pytest.param(
            *("gptq", "Qwen3"),
            marks=versions.of_the_oldest("reads GPTQ with Marlin's kernels or Intel's AMX alone"),
        ),
    ],
)
def test_quantized_checkpoints(method: str, architecture: str, ranks: int, tmp_path: Path) -> None:
    """They fit as they are, with what a method keeps beside weights, and nothing may be missing."""
    snapshot = damaged_checkpoints.quantized(tmp_path, method, architecture)
    arguments = (str(snapshot), str(ranks), str(CHANGES), "without")
    out = scripts.run(SCRIPT, *arguments)
    sound, changes = json.loads(out.splitlines()[-1])
    assert sound is None
    # Layers that are fused have one `g_idx`, which each of theirs fills.
    named = [tensor in (line or "") or "g_idx" in tensor for _, tensor, line in changes]
    assert all(named), changes


def test_scales_that_sglang_does_not_load(tmp_path: Path) -> None:
    """Its Llama looks for those of blocks under another name than it gives them."""
    snapshot = damaged_checkpoints.quantized(tmp_path, "fp8", "Llama")
    out = scripts.run(SCRIPT, str(snapshot), "1", "0")
    sound, _ = json.loads(out.splitlines()[-1])
    assert "k_proj.weight_scale_inv in model.safetensors is (2, 1), but SGLang leaves" in sound


class TestFiles:
    def test_a_shard_is_missing(self, llama_snapshot: Path, tmp_path: Path) -> None:
        """There is no index that could say so."""
        snapshot = sharded(llama_snapshot, tmp_path)
        (snapshot / "model-00002-of-00002.safetensors").unlink()
        line = refusal(snapshot, tmp_path)
        assert "do not fit" in line
        assert "model.layers.0." in line

    def test_the_shard_is_named(self, llama_snapshot: Path, tmp_path: Path) -> None:
        snapshot = sharded(llama_snapshot, tmp_path, cut("model.norm.weight", 65))
        line = refusal(snapshot, tmp_path)
        assert "model.norm.weight in model-00002-of-00002.safetensors is (65,)" in line

    @pytest.mark.parametrize("kept", [1000, -1])
    def test_a_shard_is_truncated(self, kept: int, llama_snapshot: Path, tmp_path: Path) -> None:
        snapshot = sharded(llama_snapshot, tmp_path)
        path = snapshot / "model-00002-of-00002.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:kept])
        assert path.name in refusal(snapshot, tmp_path)

    def test_a_tensor_has_two_values(self, llama_snapshot: Path, tmp_path: Path) -> None:
        import torch

        snapshot = sharded(llama_snapshot, tmp_path)
        save({"model.norm.weight": torch.ones(64)}, snapshot / "model.safetensors")
        line = refusal(snapshot, tmp_path)
        assert "model-00002-of-00002.safetensors and model.safetensors have different" in line
        assert "model.norm.weight" in line

    def test_a_file_of_torch_lacks_a_tensor(self, llama_snapshot: Path, tmp_path: Path) -> None:
        snapshot = of_torch(llama_snapshot, tmp_path, cut("model.norm.weight", 65))
        line = refusal(snapshot, tmp_path)
        assert "model.norm.weight in pytorch_model.bin is (65,), but the model's (64,)" in line

    def test_a_file_of_torch_is_truncated(self, llama_snapshot: Path, tmp_path: Path) -> None:
        snapshot = of_torch(llama_snapshot, tmp_path)
        path = snapshot / "pytorch_model.bin"
        path.write_bytes(path.read_bytes()[:-1000])
        assert "pytorch_model.bin is damaged" in refusal(snapshot, tmp_path)


def sharded(snapshot: Path, folder: Path, change: Change = lambda _: None) -> Path:
    """Two files without an index."""
    import safetensors.torch

    target = damaged(snapshot, folder, change)
    tensors = safetensors.torch.load_file(target / FILE)
    (target / FILE).unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        shard = {name: tensors[name] for name in part}
        save(shard, target / f"model-0000{number}-of-00002.safetensors")
    return target


def of_torch(snapshot: Path, folder: Path, change: Change = lambda _: None) -> Path:
    """The weights as torch saves them."""
    import safetensors.torch
    import torch

    target = damaged(snapshot, folder, change)
    torch.save(safetensors.torch.load_file(target / FILE), target / "pytorch_model.bin")
    (target / FILE).unlink()
    return target
