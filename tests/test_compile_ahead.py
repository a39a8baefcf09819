"""Kernels that are compiled ahead of their launches, for a GPU that is not there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pie_driver_sglang.backends.sglang import compile_ahead, compile_shapes
from pie_driver_sglang.backends.sglang.compile_ahead import (
    CompileAhead,
    CompileReport,
    CompileRequest,
)
from pie_driver_sglang.cli import warm
from pie_driver_sglang.compilation.dry_model import DryModel
from pie_driver_sglang.config.config_file import SGLANG_RULES
from pie_driver_sglang.config.driver_config import DriverConfig, DriverSection, ModelSection
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.memory.gpus import Cuda, Gpu
from pie_driver_sglang.observability import start_spans
from pie_driver_sglang.ranks.types import ALONE
from support import REPOSITORY
from support.models import architectures, tiny_models
from support.process import drivers, scripts
from support.process.inspection import is_running

POCKET = REPOSITORY / "models" / "pocket"
H200 = dict(warm.GPUS["h200"])
SCRIPTS = REPOSITORY / "tests" / "support" / "kernels"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "triton"


def kernels(how: str, model: DryModel) -> Any:
    arguments = [SCRIPTS / "asked_kernels.py", how, msgspec.json.encode(model).decode()]
    # In a new interpreter, which has not imported SGLang.
    printed = subprocess.run(
        [sys.executable, *arguments], capture_output=True, check=True, text=True
    ).stdout
    return json.loads(printed.splitlines()[-1])


def model_of(
    changes: dict[str, object] | None = None, ranks: int = 1, **options: object
) -> DryModel:
    """A model whose layers the driver runs, on GPUs that are not there."""
    made = compile_shapes.dry_model(
        {**load_hf_config(POCKET), **(changes or {})},
        SGLANG_RULES.parse_options(options, "cuda:0"), "bfloat16",
        major=9, memory=H200["total_memory"], ranks=ranks,
    )  # fmt: skip
    assert made.layers is not None
    return made


@pytest.mark.engine
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_compiled_is_what_launches_ask_for(ranks: int) -> None:
    """By the keys of Triton's own launch code, with SGLang imported."""
    model = model_of(ranks=ranks)
    recorded = kernels("recorded", model)
    assert list(recorded) == kernels("asked", model)
    assert len(recorded) > 60
    # Each rank has one of its own.
    names = list(recorded.values())
    assert names.count("_all_reduce_rms_norm") == (0 if ranks == 1 else ranks)


def test_no_step_of_other_layers_is_left_out() -> None:
    """Such a step would fail the script that records it."""
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
    }  # fmt: skip
    for model in (model_of(mixture), model_of(ranks=2, enable_deterministic_inference=True)):
        assert len(kernels("recorded", model)) > 60


def test_a_rank_has_its_part_of_a_model() -> None:
    config = {**load_hf_config(POCKET), "vocab_size": 1000, "num_key_value_heads": 2}
    options = SGLANG_RULES.parse_options({}, "cuda:0")
    shapes = []
    for ranks in (1, 2, 4):
        model = compile_shapes.dry_model(
            config, options, "bfloat16", major=9, memory=141 << 30, ranks=ranks
        )
        assert model.layers is not None
        layers = model.layers
        shapes.append((layers.heads, layers.kv_heads, layers.inner, model.head_rows))
    heads, inner = config["num_attention_heads"], config["intermediate_size"]
    # The LM head is padded to a multiple of 64. Of more ranks than KV heads each has one.
    assert shapes == [
        (heads, 2, inner, 1024),
        (heads // 2, 1, inner // 2, 512),
        (heads // 4, 1, inner // 4, 256),
    ]


@pytest.mark.engine
@pytest.mark.parametrize("name", ["llama-of-3b", "qwen2-of-7b", "qwen3", "Qwen3-MoE", "Mixtral"])
def test_the_stand_in_has_the_layers_that_sglang_loads(
    name: str, models_folder: Path, tmp_path: Path
) -> None:
    builder = architectures if name in architectures.ARCHITECTURES else tiny_models
    snapshot = builder.build(name, models_folder)
    config = drivers.write_config(tmp_path, snapshot, options={"page_size": 16})
    assert "alike" in scripts.run("tests/support/kernels/dry_weights.py", str(config))


@pytest.mark.engine
def test_kernels_are_compiled_once_also_after_a_kill() -> None:
    """What a killed process has compiled is kept, and the processes that it has begun end."""
    command = [sys.executable, SCRIPTS / "compile_few.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(" compiled\n")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        process.kill()
    while any(is_running(int(each)) for each in children):
        time.sleep(0.05)
    after, again = (
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert any(line.endswith(" found") for line in after)
    assert any(line.endswith(" compiled") for line in after)
    assert sorted(line.split()[0] for line in again) == sorted(line.split()[0] for line in after)
    assert all(line.endswith(" found") for line in again)


def config_of(device: str = "cuda:0", **options: object) -> DriverConfig:
    parsed = SGLANG_RULES.parse_options(options, device)
    section = DriverSection(group_id=0, device=(device,), options=parsed)
    model = ModelSection(snapshot_dir=POCKET, hf_config=load_hf_config(POCKET))
    return DriverConfig(model=model, driver=section)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes NVML show GPUs, and has drivers compile ahead."""
    monkeypatch.setenv(compile_ahead.COMPILE_AHEAD, "1")

    def show(*names: str) -> None:
        gpus = [Gpu(n, name, 141 << 30, 140 << 30, (9, 0)) for n, name in enumerate(names)]
        monkeypatch.setattr(compile_ahead, "query_cuda", lambda _: Cuda(gpus=tuple(gpus)))

    return show


def test_a_driver_compiles_what_was_not_compiled_for_its_gpu(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[CompileRequest] = []

    def start(request: CompileRequest) -> subprocess.Popen[bytes]:
        started.append(request)
        failed, spans = [("_gemm", "too large")], [("dry run", 1.0, 2.0)]
        report = CompileReport(5, 2, 1, failed, 8, spans, left=1)
        text = msgspec.json.encode(report).decode()
        return subprocess.Popen(["echo", text], stdout=subprocess.PIPE)

    monkeypatch.setattr(compile_ahead, "_start", start)
    gpu("NVIDIA H200", "NVIDIA H200")
    with caplog.at_level("INFO"), CompileAhead.begin(config_of(), ALONE) as kernels:
        kernels.wait()
    assert "kernels: 2 compiled, 1 in the cache, by 8 processes" in caplog.text
    assert "a process was killed: 1 kernels compile at their launch" in caplog.text
    [request] = started
    assert (request.gpu, request.model.vocab_size) == ("NVIDIA H200", 4096)
    names = [span.name for span in start_spans.recorded()[-2:]]
    assert names == ["wait for kernels", "kernels: dry run"]
    # Paths of a start change nothing.
    CompileAhead.begin(config_of(log_level="debug"), ALONE).wait()
    assert started == [request, request]
    compile_ahead._note(request, CompileReport())
    CompileAhead.begin(config_of(), ALONE).wait()
    assert started == [request, request]
    CompileAhead.begin(config_of(page_size=64), ALONE).close()
    assert started[2].model.page_size == 64


def test_a_driver_starts_without_kernels_that_are_not_known(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(compile_ahead, "_start")
    gpu()
    CompileAhead.begin(config_of(), ALONE).wait()
    gpu("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    CompileAhead.begin(config_of(), ALONE).wait()
    gpu("NVIDIA H200")
    CompileAhead.begin(config_of("cpu"), ALONE).wait()
    CompileAhead.begin(config_of(disable_cuda_graph=True), ALONE).wait()
    CompileAhead.begin(config_of(), ALONE._replace(size=2)).wait()
    monkeypatch.delenv(compile_ahead.COMPILE_AHEAD)
    CompileAhead.begin(config_of(), ALONE).wait()
    monkeypatch.setenv(compile_ahead.COMPILE_AHEAD, "no")
    with pytest.raises(ConfigError, match="PIE_COMPILE_AHEAD` is 'no'"):
        CompileAhead.begin(config_of(), ALONE)


@pytest.mark.parametrize("program", ["import sys; sys.exit(3)", "print('no report')"])
def test_a_driver_starts_when_the_process_fails(
    program: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with CompileAhead(process) as kernels:
        kernels.wait()
    assert "compiled when it is first launched" in caplog.text
    assert process.returncode is not None


def test_a_process_ends_with_a_start_that_fails() -> None:
    process = subprocess.Popen(["sleep", "100"], stdout=subprocess.PIPE)
    with pytest.raises(RuntimeError), CompileAhead(process):
        raise RuntimeError
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"sliding_window": 512, "use_sliding_window": True}, {}),
        ({"quantization_config": {"quant_method": "fp8"}}, {}),
        ({"attention_bias": True}, {}),
        ({"architectures": ["Gemma3ForCausalLM"]}, {}),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({}, {"attention_backend": "triton"}),
    ],
)
def test_other_layers_are_left_to_the_library(
    changes: dict[str, object], options: dict[str, object]
) -> None:
    config = {**load_hf_config(POCKET), **changes}
    parsed = SGLANG_RULES.parse_options(options, "cuda:0")
    model = compile_shapes.dry_model(config, parsed, "bfloat16", major=9, memory=141 << 30)
    assert model.layers is None


def test_warm_needs_a_gpu_or_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "read_properties", list)
    with pytest.raises(ConfigError, match="no GPU to compile kernels for"):
        warm.main([str(POCKET)])


@pytest.mark.parametrize(
    ("given", "ranks"),
    [([], 1), (["--tp-size", "2"], 2), (["--tp", "2"], 2), (["--option", "tp_size=4"], 4)],
)
def test_warm_compiles_for_the_ranks_of_the_command_line(given: list[str], ranks: int) -> None:
    command = [str(POCKET), "--gpu", "h200"]
    model = warm._request(warm._parser().parse_args([*command, *given])).model
    assert model.layers is not None
    assert (model.ranks, model.layers.heads) == (ranks, 4 // ranks)
    with pytest.raises(ConfigError, match="4 attention heads"):
        warm._request(warm._parser().parse_args([*command, "--tp-size", "3"]))


def test_a_report_names_an_error() -> None:
    """The process is that of a start, for a GPU that lacks properties."""
    model = DryModel(None, "bfloat16", 512, 512, 256, 16, 1, 64)
    process = compile_ahead._start(CompileRequest(model, "", {"major": 9}))
    report = msgspec.json.decode(process.communicate()[0], type=CompileReport)
    assert process.returncode == 0
    [(name, error)] = report.failed
    assert name == "the dry run"
    assert "has no attribute 'minor'" in error


def test_warm_says_what_it_has_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[CompileRequest] = []
    reports = [
        CompileReport(70, 30, 40, processes=8),
        CompileReport(70, 0, 69, [("_gemm", "too large")], 8),
        CompileReport(70, 5, processes=8, left=65),
    ]

    def compile_kernels(request: CompileRequest, _: object) -> CompileReport:
        requests.append(request)
        return reports[len(requests) - 1]

    monkeypatch.setattr(warm, "compile_kernels", compile_kernels)
    command = [str(POCKET), "--gpu", "h200", "--page-size", "32"]
    assert [warm.main(command) for _ in reports] == [0, 1, 1]
    assert requests[0].model.page_size == 32
    printed = capsys.readouterr()
    assert "NVIDIA H200: 30 of 70 kernels compiled in 8 processes, " in printed.out
    assert "run the command again" in printed.out.splitlines()[2]
    assert printed.err == "_gemm does not compile: too large\n"
    compile_ahead._note(requests[0], reports[0])
    assert warm.main(command) == 0
    assert capsys.readouterr().out == "NVIDIA H200: all kernels are compiled already\n"
    assert len(requests) == 3
