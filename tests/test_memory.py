"""Planned and used memory of models that start, and the errors of those that do not fit."""

from __future__ import annotations

import json
import multiprocessing
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from pie_driver_sglang.checkpoint.tensors import Tensor
from pie_driver_sglang.checkpoint.weights import dense_mlps
from pie_driver_sglang.cli.model_sizes import model_of, read_shape, read_weights
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.config.option_checks import parse_options
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.memory.plan_types import ModelSizes
from pie_driver_sglang.memory.sizes import Shape, adapter_bytes
from support import versions
from support.models import architectures, tiny_models
from support.process import drivers
from support.process.drivers import StartFailedError, write_config
from support.sglang_scripts import memory_planning

PAGE = 16
GPU_FREE = 1536 << 20
"""Free bytes of the GPU that the planner and SGLang are made to see."""
TINY = ("llama", "llama-tied", "qwen3", "gemma3", "qwen3-vl", "pocket")
ERRORS = {"gemma3": 0.01, "qwen3-vl": 0.3}
"""Relative errors of weights: a scale for each norm, and the rotary table of a vision encoder,
which has 8,192 rows however small the encoder is."""

# Random weights: little of them, and much KV.
WIDE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
WIDE_TOKEN = 4 * 32 * 2 * 64 * 4

pytestmark = pytest.mark.engine


def load(config: Path, log: Path, free: int | None = None, lost: int = 0) -> Any:
    """What `memory_planning.load` sends."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = drivers.fork_call(memory_planning.load, (str(config), free, sender, str(log), lost))
    return _received(receiver, sender, process, log)


def _received(receiver: Any, sender: Any, process: drivers.Process, log: Path) -> Any:
    sender.close()
    with receiver:
        assert receiver.poll(90.0), log.read_text()
        try:
            found = receiver.recv()
        except EOFError:
            pytest.fail(log.read_text())
    assert process.wait(20.0) == 0
    return found


def wide_model(folder: Path, **changes: Any) -> Path:
    """The shape of a model whose weights are made up."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WIDE | changes))
    return folder


def refused(config: Path) -> tuple[str, str]:
    """The line and the hint with which a start ends, without a traceback."""
    with pytest.raises(StartFailedError) as caught:
        drivers.fork(config)
    log = caught.value.stderr
    assert "Traceback" not in log
    line, _, hint = log.strip().rpartition("\n\nhint: ")
    return line.splitlines()[-1], hint


@pytest.mark.parametrize("name", TINY)
def test_the_plan_is_what_is_loaded(name: str, models_folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_models.snapshot(name, models_folder))
    plan, loaded, _ = load(config, tmp_path / "log")
    assert loaded.tokens == plan.tokens >= 65_536
    assert loaded.kv == plan.kv
    assert loaded.weights == pytest.approx(plan.weights, rel=ERRORS.get(name, 0.002))


@pytest.mark.parametrize("targets", [["all"], ["q_proj", "down_proj"], ["qkv_proj", "lm_head"]])
def test_adapters_take_what_was_planned(
    targets: list[str], models_folder: Path, tmp_path: Path
) -> None:
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 3}
    options |= {"max_loaded_loras": 3, "lora_target_modules": targets}
    config = write_config(tmp_path, tiny_models.snapshot("llama", models_folder), options=options)
    plan, loaded, _ = load(config, tmp_path / "log")
    assert loaded.adapters == plan.adapters > 0


@pytest.mark.parametrize("ratio", [None, 0.05, 0.2])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_sglang_divides_a_gpu_as_planned(
    name: str, ratio: float | None, models_folder: Path, tmp_path: Path
) -> None:
    options = {} if ratio is None else {"mem_fraction_static": ratio}
    config = write_config(tmp_path, tiny_models.snapshot(name, models_folder), options=options)
    plan, loaded, _ = load(config, tmp_path / "log", GPU_FREE)
    assert plan.device.name == "cuda:0"
    assert ratio is None or plan.fraction == ratio
    assert plan.tokens > 10_000
    assert loaded.tokens == pytest.approx(plan.tokens, rel=0.01)


def test_a_gpu_that_others_fill_meanwhile_ends_the_start(
    models_folder: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, tiny_models.snapshot("llama", models_folder))
    error = load(config, tmp_path / "log", GPU_FREE, lost=GPU_FREE)
    assert isinstance(error, StartError)
    assert str(error).startswith("cuda:0 has room for 0 tokens of KV, less than one context of 512")
    assert "another process took memory" in str(error)


def test_there_is_one_pool(models_folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_models.snapshot("llama", models_folder))
    plan, loaded, storages = load(config, tmp_path / "log")
    # Of two layers, with a page for padding. Newer versions keep keys and values of a layer in one.
    buffers = 4 if versions.IS_OLDEST else 2
    page = PAGE * plan.token_bytes // buffers
    assert storages == [loaded.kv // buffers + page] * buffers


def test_tokens_take_what_sglang_counts(models_folder: Path, tmp_path: Path) -> None:
    names = list(architectures.ARCHITECTURES)
    snapshots = [str(architectures.build(name, models_folder)) for name in names]
    receiver, sender = multiprocessing.Pipe(duplex=False)
    log = tmp_path / "log"
    process = drivers.fork_call(memory_planning.count_tokens, (snapshots, sender, str(log)))
    found = _received(receiver, sender, process, log)
    for name, counts in zip(names, found, strict=True):
        for ours, theirs, state in counts:
            assert ours == theirs, name
            assert (state > 0) == (name == "Qwen3-Next"), name


def test_a_plan_without_sglang_finds_the_same_sizes(models_folder: Path, tmp_path: Path) -> None:
    folders = [architectures.build(name, models_folder) for name in architectures.ARCHITECTURES]
    receiver, sender = multiprocessing.Pipe(duplex=False)
    log = tmp_path / "log"
    arguments = ([str(folder) for folder in folders], sender, str(log))
    process = drivers.fork_call(memory_planning.send_sizes, arguments)
    found = _received(receiver, sender, process, log)
    planned, wrong = 0, []
    for folder, theirs in zip(folders, found, strict=True):
        hf_config = load_hf_config(folder)
        if theirs.state_bytes:
            with pytest.raises(ConfigError, match="recurrent state"):
                read_shape(hf_config)
            continue
        options = parse_options({}, "cpu")
        shape = read_shape(hf_config)
        weights = read_weights(folder, shape, hf_config, options, "bfloat16")
        ours = model_of(shape, weights, options, hf_config, "bfloat16", on_host=True)
        pairs = zip(ModelSizes._fields, ours, theirs, strict=True)
        wrong += [(folder.name, *pair) for pair in pairs if pair[1] != pair[2]]
        planned += 1
    assert not wrong
    assert planned >= 30


def test_a_start_prints_its_plan_and_what_became_of_it(llama_driver: drivers.Driver) -> None:
    log = llama_driver.logged("memory planned for cpu", "memory as it is (as planned)")
    tokens = llama_driver.caps["total_pages"] * PAGE
    assert log.index("memory planned for cpu") < log.index("memory as it is (as planned)")
    for row in ("total", "weights", "activations", "tables", "reserve", "KV"):
        assert re.search(rf"^  {row} +[\d.,]+ [MG]iB", log, flags=re.MULTILINE), row
    assert f"{tokens:,} tokens of 1,024 bytes in {tokens // PAGE:,} pages of {PAGE}" in log
    assert f"{tokens:,} tokens ({tokens:,})" in log


def test_a_driver_that_replaces_another_has_as_many_pages(tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_models.POCKET, activation_dtype="float32", kept_pages=777)
    with drivers.fork(config) as driver:
        assert driver.caps["total_pages"] == 777
        driver.logged("777 pages of 16")
    assert driver.stop() == 0


def test_a_pool_has_no_more_pages_than_it_may(tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_models.POCKET, activation_dtype="float32", max_pages=600)
    with drivers.fork(config) as driver:
        assert driver.caps["total_pages"] == 600
    assert driver.stop() == 0


def test_ranks_take_what_was_planned_for_each(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, tiny_models.POCKET, activation_dtype="bfloat16", **drivers.spread(2)
    )
    with drivers.fork(config) as driver:
        log = driver.logged("memory as it is (as planned)")
    assert driver.stop() == 0
    assert re.search(r"weights +[\d.]+ MiB  of which every rank has 0\.\d MiB", log)
    found = re.search(r"planned\): weights ([\d.]+) MiB \(([\d.]+) MiB\), KV (\S+) MiB", log)
    assert found is not None
    real, planned, _ = map(float, found.groups())
    assert real == pytest.approx(planned, abs=0.11)
    whole = (tiny_models.POCKET / "model.safetensors").stat().st_size / 2**20
    assert whole / 2 < real < whole / 2 * 1.1


def test_a_fraction_too_small_for_a_context_names_one_that_fits(tmp_path: Path) -> None:
    # About three hundredths of the memory.
    context = int(psutil.virtual_memory().available * 0.03) // WIDE_TOKEN // PAGE * PAGE
    model = wide_model(tmp_path / "wide", max_position_embeddings=context)
    options: dict[str, Any] = {"load_format": "dummy", "mem_fraction_static": 0.01}
    config = write_config(tmp_path, model, options=options)
    line, hint = refused(config)
    assert "option `mem_fraction_static` is 0.01" in line
    assert f"{context:,} tokens of KV" in line
    found = re.fullmatch(r"set `mem_fraction_static = (0\.\d+)` in the options", hint)
    assert found is not None
    # Less may be free by now: other tests run.
    options["mem_fraction_static"] = float(found[1]) * 1.5
    with drivers.fork(write_config(tmp_path, model, options=options)) as driver:
        assert driver.caps["total_pages"] * PAGE >= context
    assert driver.stop() == 0


def test_a_context_that_is_too_long_names_one_that_fits(tmp_path: Path) -> None:
    # Twice the memory, in few tokens: requests, too, must have room for a context.
    token = 16 * WIDE_TOKEN
    context = psutil.virtual_memory().total * 2 // token // PAGE * PAGE
    model = wide_model(tmp_path / "wide", max_position_embeddings=context, num_hidden_layers=64)
    config = write_config(tmp_path, model, options={"load_format": "dummy"})
    line, hint = refused(config)
    assert "the model needs more than the" in line
    found = re.fullmatch(r"set `context_length = (\d+)` in the options", hint)
    assert found is not None
    assert 0 < int(found[1]) * token < psutil.virtual_memory().total


def test_weights_that_are_too_large_are_refused_before_they_are_read(tmp_path: Path) -> None:
    layers = psutil.virtual_memory().total // (4 * 3 * 8192 * 8192) + 1
    model = wide_model(
        tmp_path / "large",
        hidden_size=8192,
        intermediate_size=8192,
        num_hidden_layers=layers,
        max_position_embeddings=64,
    )
    line, hint = refused(write_config(tmp_path, model, options={"load_format": "dummy"}))
    assert "the model needs more than the" in line
    assert re.search(r"weights [\d.,]+ GiB", line)
    assert hint == "free memory, or choose a smaller or a quantized model"


@pytest.mark.parametrize(
    ("named", "numbers"),
    [
        (["q_proj"], 3 * 64 + 64 + 2 * 32),
        (["qkv_proj"], 3 * 64 + 64 + 2 * 32),
        (["gate_up_proj"], 2 * (64 + 256)),
        # OPT's, at least as large as they are.
        (["fc1"], 64 + 256),
        (["fc1", "out_proj"], 2 * (64 + 256)),
        (["embed_tokens"], 0),
    ],
)
def test_slots_of_layers_by_any_name(named: list[str], numbers: int) -> None:
    shape = Shape(
        hidden_size=64, layers=3, kv_layers=3, vocabulary=1000, heads=4, kv_heads=2, head_dim=16,
        v_head_dim=16, latent=0, inner=256, experts=0, chosen_experts=0, expert_inner=0, tied=False,
        positions=128, rotary_dim=16, rotary_tables=1,
    )  # fmt: skip
    ends = (64 + 1000) * ("embed_tokens" in named)
    assert adapter_bytes(shape, named, 2) == 2 * (3 * numbers + ends)


def test_slots_of_a_mixture() -> None:
    """Experts have none; of dense MLPs and of embeddings as many as the library adapts."""
    shape = Shape(
        hidden_size=64, layers=3, kv_layers=3, vocabulary=1000, heads=4, kv_heads=2, head_dim=16,
        v_head_dim=16, latent=0, inner=256, experts=8, chosen_experts=2, expert_inner=32,
        tied=False, positions=128, rotary_dim=16, rotary_tables=1,
    )  # fmt: skip
    attention = 3 * (2 * (64 + 64) + 2 * (64 + 32))
    mlp, table = 3 * (64 + 256), 64 + 1000
    assert adapter_bytes(shape, ["all"], 1) == attention + 4 * table
    assert adapter_bytes(shape, ["all"], 1, 1, 1) == attention + mlp + 2 * table
    assert adapter_bytes(shape, ["all"], 1, 2, 0) == attention + 2 * mlp
    assert adapter_bytes(shape, ["up_proj", "lm_head"], 1, 2, 1) == 2 * (2 * mlp // 3) + table


def test_layers_with_a_dense_mlp_are_told_from_those_with_experts() -> None:
    names = [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.down_proj.qweight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.2.block_sparse_moe.experts.gate_up_proj",
        "model.layers.3.feed_forward.gate_up_proj.weight",
    ]
    tensors = [Tensor(name, (2, 2), 8, floating=True) for name in names]
    assert dense_mlps(tensors) == 2
    assert dense_mlps(tensors[3:7]) == 0
