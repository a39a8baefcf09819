"""What `serve` checks before it imports, downloads or loads anything."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.cli import plan, serve, serve_arguments, serve_checks
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.fork_server import starter
from pie_driver_sglang.fork_server.client import ADDRESS_VARIABLE
from pie_driver_sglang.fork_server.starter import ENABLED
from pie_driver_sglang.frontends.common import arguments
from pie_driver_sglang.frontends.common.argument_names import other_engines_flag
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.offline.engine import Engine
from pie_driver_sglang.frontends.sglang_server import server_process
from pie_driver_sglang.frontends.sglang_server.server_process import ServeArguments
from support.models.tiny_models import POCKET
from support.servers.flags_file import as_file

MISSING = "missing/model"
"""A repository that would be looked for on the network."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([MISSING, "--no-such-flag"], "there is no flag `--no-such-flag`"),
        ([MISSING, "--disable-log-requests"], "there is no flag `--disable-log-requests`"),
        ([MISSING, "--option", "foo=1"], "there is no argument 'foo'"),
        ([MISSING, "--engine", "vllm", "--option", "foo=1"], "there is no argument 'foo'"),
        ([MISSING, "--front", "gateway", "--option", "foo=1"], "there is no argument 'foo'"),
        ([MISSING, "--port", "65536"], "`--port` is '65536'"),
        ([MISSING, "--port", "-1"], "`--port` is '-1'"),
        ([MISSING, "--port", "http"], "`--port` is 'http'"),
        ([MISSING, "--host", "192.0.2.1"], "192.0.2.1:30000 is no address of this host"),
        ([MISSING, "--host", "2001:db8::1"], "[2001:db8::1]:30000 is no address"),
        ([MISSING, "--engine", "trtllm"], "`engine` is 'trtllm'"),
        ([MISSING, "-O3"], "there is no flag `-O3`"),
        (["--config", "/missing.yaml"], "names '/missing.yaml': there is no such file"),
        (["--conf=/missing.yaml"], "names '/missing.yaml': there is no such file"),
        (["--config", __file__], "no YAML file by its name"),
        (["--config", "a.yaml", "--config", "b.yaml"], "`--config` is given 2 times"),
    ],
)
def test_a_wrong_command_line_is_refused_at_once(arguments: list[str], message: str) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        serve.main(arguments)
    assert message in str(caught.value)
    assert caught.value.hint
    assert not {name for name in set(sys.modules) - before if name.startswith("sglang")}


@pytest.mark.parametrize("front", [[], ["--front", "gateway"]])
@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_port_in_use_is_refused_at_once(
    front: list[str], family: socket.AddressFamily, host: str
) -> None:
    with socket.socket(family) as other:
        try:
            other.bind((host, 0))
        except OSError:
            pytest.skip(f"this host has no {host}")
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf":{port} is in use"):
            serve.main([MISSING, "--host", host, "--port", str(port), *front])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of servers, which are not started."""
    found: list[list[str]] = []

    def start(arguments: list[str]) -> int:
        found.append(arguments)
        return 0

    monkeypatch.setattr(serve, "run_server", start)
    monkeypatch.setattr(serve.gateway, "main", start)
    return found


def taken(family: socket.AddressFamily, host: str) -> socket.socket:
    other = socket.socket(family)
    other.bind((host, 0))
    other.listen()
    return other


def test_the_port_that_is_checked_is_the_one_that_is_served(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with taken(socket.AF_INET, "127.0.0.1") as other:
        port = str(other.getsockname()[1])
        monkeypatch.setattr(serve_checks, "DEFAULT_PORT", port)
        # Abbreviated flags, and gRPC servers without the gateway.
        assert serve.main([MISSING, "--por", "0"]) == 0
        assert serve.main([MISSING, "--front", "gateway", "--no-gateway"]) == 0
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use"):
            serve.main([MISSING])
    assert [len(each) for each in started] == [4, 3]


def test_every_address_of_a_name_is_checked(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        # The first is of no host.
        addresses = [("192.0.2.1", port), ("127.0.0.1", port)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with taken(socket.AF_INET, "127.0.0.1") as other:
        port = str(other.getsockname()[1])
        with pytest.raises(ConfigError, match=f"localhost:{port} is in use"):
            serve.main([MISSING, "--host", "localhost", "--port", port])
    assert serve.main([MISSING, "--host", "localhost", "--port", port]) == 0


def test_a_server_for_ipv6_may_have_the_port_of_one_for_ipv4(started: list[list[str]]) -> None:
    try:
        taken(socket.AF_INET6, "::1").close()
    except OSError:
        pytest.skip("this host has no IPv6")
    with taken(socket.AF_INET, "0.0.0.0") as other:
        port = str(other.getsockname()[1])
        assert serve.main([MISSING, "--host", "::", "--port", port]) == 0


def test_a_name_that_cannot_be_resolved_is_left_to_the_server(started: list[list[str]]) -> None:
    assert serve.main([MISSING, "--host", "a..b"]) == 0


def test_flags_of_smg_are_passed_on(started: list[list[str]]) -> None:
    words = ["--gateway-arg", "--policy", "--gateway-arg", "random", "--port", "0"]
    assert serve.main([MISSING, "--front", "gateway", *words]) == 0
    assert started == [["--model-path", MISSING, *words]]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--disable-log-requests", "`--log-requests` alone"),
        ("--no-enable-log-requests", "`--log-requests` alone"),
        ("--enable-log-requests", "set `--log-requests`"),
        ("--max-cpu-loras", "`--max-loaded-loras`"),
        ("--guided-decoding-backend", "llguidance"),
        ("--generation-config", "`--sampling-defaults`"),
        ("--override-generation-config", "`--preferred-sampling-params`"),
        ("--enable-sleep-mode", "/release_memory_occupation"),
    ],
)
def test_flags_of_vllm_have_a_hint(flag: str, words: str) -> None:
    assert words in other_engines_flag(flag)


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    assert plan.main([str(POCKET), "--device-gib", "8", "--json", *flags]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)["plan"]
    return found


def test_plan_takes_the_flags_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    same = ["--reasoning-parser", "qwen3", "--enable-metrics", "--host", "0.0.0.0"]
    same += ["--max-running-requests", "512", "--speculative-algorithm", "NGRAM"]
    same += ["--scheduler", "pie", "--front", "gateway", "--no-gateway", "--max-connections", "5"]
    same += ["--api-key-file", "/missing"]
    usual = planned(capsys)
    assert planned(capsys, *same) == usual
    # The name of today and that of older versions.
    wider = planned(capsys, "--cuda-graph-max-bs-decode", "512")
    assert wider == planned(capsys, "--cuda-graph-max-bs", "512") != usual
    assert planned(capsys, "--kv-cache-dtype", "fp8_e4m3") != usual


def test_plan_finds_its_model_behind_flags(capsys: pytest.CaptureFixture[str]) -> None:
    usual = planned(capsys)
    flags = ["--device-gib", "8", "--json", "--host", "0.0.0.0", "--enable-metrics", str(POCKET)]
    assert plan.main(flags) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == usual
    sizes = planned(capsys, "--cuda-graph-bs-decode", "1", "2", "512")
    assert sizes == planned(capsys, "--option", "cuda_graph_bs_decode=[1, 2, 512]") != usual


@pytest.mark.parametrize("flag", ["--max-total-tokens", "--lora-paths", "--no-such-flag"])
def test_plan_refuses_what_it_would_be_wrong_with(flag: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        plan.main([str(POCKET), "--device-gib", "8", flag, "4"])


#: Wrong values, and what the error names. SGLang's parser would find most of them later.
WRONG_VALUES = [
    (["--tp-size", "0"], "`tp_size` is 0"),
    (["--tp", "two"], "`--tp-size` is 'two'"),
    (["--chunked-prefill-size=7.5"], "`--chunked-prefill-size` is '7.5'"),
    (["--kv-cache-dtype", "fp3"], "`--kv-cache-dtype` is 'fp3'"),
    (["--context-length", "100000000"], "option `context_length` is 100000000"),
    (["--dtype", "fp16x"], "`--dtype` is 'fp16x'"),
    (["--dtype"], "`--dtype` has no value"),
    (["--cuda-graph-bs-decode"], "`--cuda-graph-bs-decode` has no value"),
    (["--api-key", "--enable-metrics"], "`--api-key` has no value"),
    (["--scheduler", "--enable-metrics"], "`--scheduler` has no value"),
    (["--max-file-bytes", "--enable-metrics"], "`--max-file-bytes` has no value"),
    (["--enable-metrics=true"], "`--enable-metrics` takes no value"),
    (["--disaggregation-mode", "both"], "`--disaggregation-mode` is 'both'"),
    (["--schedule-policy", "best"], "`--schedule-policy` is 'best'"),
    (["--max-running-requests", "0"], "`max_running_requests` is 0"),
    (["--max-running-requests", "99999999999"], "`max_running_requests` is 99999999999"),
    (["--max-queued-requests", "-1"], "`max_queued_requests` is -1"),
    (["--stream-interval", "0"], "`stream_interval` is 0"),
    (["--watchdog-timeout", "0"], "`watchdog_timeout` is 0.0"),
    (["--schedule-conservativeness", "nan"], "`schedule_conservativeness` is nan"),
    (["--grpc-mode"], "`--grpc-mode` is not served"),
    (["--encoder-only"], "`--encoder-only` is not served"),
    (["--use-ray"], "`--use-ray` is not served"),
    (["--node-rank", "1"], "`--node-rank` is 1, and `--nnodes` is 1"),
    (["--nnodes", "2", "--node-rank", "2"], "`--node-rank` is 2, and `--nnodes` is 2"),
    (["--detokenizer-worker-num", "2"], "`--tokenizer-worker-num` is 1: the outputs of one"),
    (["--random-seed", str(2**63)], f"`random_seed` is {2**63}"),
    (
        ["--enable-priority-scheduling", "--schedule-policy", "lpm"],
        "`schedule_policy` is 'lpm', and `enable_priority_scheduling` is set",
    ),
    (["--json-model-override-args", "{"], "`json_model_override_args` is '{'"),
    (["--model-loader-extra-config", "[]"], "`model_loader_extra_config` is '[]'"),
    (["--model-path", "http://host/model"], "'http://host/model' is a URL"),
    (["--enable-http2"], "`--enable-http2` is not served"),
    (["--scheduler", "pie", "--pp-size", "2"], "--pp-size: a model is sharded"),
    (["--scheduler", "pie", "--no-dllm-fdfo"], "does not serve this"),
    (["--mem-fraction-static", "1.5"], "option `mem_fraction_static` is 1.5"),
    (["--option", "page_size=banana"], "option `page_size` is 'banana'"),
    (["--device", "gpu"], "`device` is 'gpu'"),
    (["--reasoning-parser", "zzz"], "there is no reasoning parser 'zzz'"),
    (["--log-level", "loud"], "option `log_level` is 'loud'"),
    (["--lora-paths", "a=/missing/adapter"], "adapter 'a' is not at '/missing/adapter'"),
    (["--attention-backend", "foo"], "option `attention_backend` is 'foo'"),
    ([str(POCKET)], "belongs to no flag"),
    (["--scheduler", "pie", "--speculative-algorithm", "EAGLE"], "does not serve this"),
    (["--device", "cuda"], "device cuda:0 does not exist: no CUDA device is visible"),
]


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No import of torch and SGLang, and no GPU."""
    for name in ("torch", "sglang"):
        # Python's sign for a module that must not be imported.
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(server_process, "check_versions", lambda: None)
    monkeypatch.setattr(server_process, "fork_server", lambda *_, **_named: nullcontext())


def check_refused(words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model-path", str(POCKET), "--device", "cpu"]
    assert server_process.run([*model, *words]) == 1
    error, _, hint = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("pie-sglang: ")
    assert message in error
    assert hint.startswith("hint: ")


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(("words", "message"), WRONG_VALUES)
def test_a_wrong_value_is_refused_before_the_imports(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(words, message, capsys)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("words", "message"),
    [row for row in WRONG_VALUES if not re.search("(has|takes) no value|belongs to", row[1])],
)
def test_a_wrong_value_in_a_file_is_refused_before_the_imports(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = as_file(words, tmp_path / "flags.yaml")
    check_refused(serve_arguments.expand_arguments(written), message, capsys)


@pytest.mark.usefixtures("without_torch")
def test_a_model_without_weights_is_refused_before_the_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(POCKET / name)
    words = ["--model-path", str(tmp_path), "--device", "cpu"]
    assert server_process.run(words) == 1
    assert f"'{tmp_path}' has no weights" in capsys.readouterr().err


@pytest.mark.usefixtures("without_torch")
def test_a_missing_gpu_is_refused_before_the_imports(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where no device is named; by `Engine` and the gateway, too."""
    model = ["--model-path", str(POCKET)]
    assert server_process.run(model) == 1
    assert "cuda:0 does not exist: no CUDA device" in capsys.readouterr().err
    with pytest.raises(StartError, match="cuda:0 does not exist"):
        Engine(model_path=str(POCKET), device="cuda")
    with pytest.raises(StartError, match="cuda:0 does not exist"):
        serve.main([*model, "--device", "cuda", "--port", "0", "--front", "gateway"])


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--disable-radix-cache", "--cuda-graph-bs", "1", "2", "--option", "page_size=32"],
        ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"],
        ["--scheduler", "sglang", "--ep-size", "2"],
        ["--priority-scheduling-preemption-threshold", "-1", "--stream-interval=2"],
        ["--schedule-policy", "priority"],
    ],
)
def test_right_values_reach_the_imports(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[ServeArguments] = []

    def launch(own: ServeArguments, *_: object, **_named: object) -> int:
        launched.append(own)
        return 0

    # What imports; in place of it, because tests before may have imported parts of SGLang.
    monkeypatch.setattr(server_process, "_launch", launch)
    assert server_process.run(["--model-path", str(POCKET), "--device", "cpu", *words]) == 0
    assert len(launched) == 1


class Recorded(subprocess.Popen[bytes]):
    """Records what would be started, and its end."""

    events: ClassVar[list[str]] = []

    def __init__(self, command: Sequence[str], **_named: object) -> None:
        module, options = command[3], command[8:]
        self.events.append(" ".join([module, *options]))

    def kill(self) -> None:
        self.events.append("killed")

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def __del__(self) -> None:
        """There is no process."""


@pytest.mark.parametrize(
    ("words", "value", "ranks"),
    [
        (["--device", "cpu"], None, 1),
        (["--device", "cpu", "--tp-size", "2"], None, 2),
        (["--device", "cpu"], "0", 0),
        (["--device", "cuda"], None, 0),
        (["--device", "cuda"], "1", 1),
        (["--device", "cuda", "--dp-size", "8"], "1", 1),
        (["--device", "cuda", "--tp-size", "2"], "1", 2),
        (["--device", "cuda", "--scheduler", "sglang"], "1", 0),
    ],
)
def test_a_process_imports_for_drivers_before_the_server_does(
    words: list[str], value: str | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for all replicas; where the server's imports fail, it ends."""

    class ImportsError(Exception):
        """In place of the imports."""

    def import_server(**_named: object) -> None:
        events.append("imports")
        raise ImportsError

    events = Recorded.events = []
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.delenv(ENABLED)
    if value is not None:
        monkeypatch.setenv(ENABLED, value)
    monkeypatch.setattr(starter.subprocess, "Popen", Recorded)
    for name in ("check_versions", "check_gpus"):
        monkeypatch.setattr(server_process, name, lambda *_: None)
    monkeypatch.setattr(server_process, "read_properties", list)
    environment = server_process.server_environment
    monkeypatch.setattr(environment, "prepare_server", lambda *_, **_named: None)
    monkeypatch.setattr(environment, "importing_server", import_server)
    with pytest.raises(ImportsError):
        server_process.run(["--model-path", str(POCKET), *words])
    started = (
        "pie_driver_sglang.fork_server.server "
        f"--device {words[1]} --ranks {ranks} --architectures Qwen3ForCausalLM"
    )
    assert events == ([started, "imports", "killed"] if ranks else ["imports"])


@pytest.mark.parametrize("flags", [["--pp-size", "1"], ["--nnodes", "1", "--node-rank", "0"]])
def test_a_default_of_an_unserved_flag_is_no_wrong_value(flags: list[str]) -> None:
    own = ServeArguments("pie", {}, ["--model-path", str(POCKET), "--device", "cpu", *flags])
    server_process._check_values(own, ["Qwen3ForCausalLM"])


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("words", "variable"),
    [
        (["--model-p", str(POCKET), "--devic", "cpu"], "0"),
        ([str(POCKET), "--devic=cpu"], "0"),
        ([str(POCKET)], "1"),
        ([str(POCKET), "--option", "page_size=32"], "1"),
    ],
)
def test_the_cpu_may_be_named_in_every_way_of_sglang(
    words: list[str], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host without a GPU, which this fixture makes of any."""
    launched: list[ServeArguments] = []

    def launch(own: ServeArguments, *_: object, on_cpu: bool) -> int:
        assert on_cpu
        launched.append(own)
        return 0

    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", variable)
    monkeypatch.setattr(server_process, "_launch", launch)
    monkeypatch.setattr(serve, "run_server", server_process.run)
    assert serve.main([*words, "--port", "0"]) == 0
    assert server_process.flag_value(launched[0].sglang, "device") == "cpu"
    assert parse_arguments({"model_path": str(POCKET)}).runtime["devices"] == ["cpu"]


def test_sglang_imports_no_other_kernels_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variable, its import fails where its kernels are those of GPUs."""
    for device, kept in (("cuda", True), ("cpu", False)):
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        with environment.importing_sglang(device, is_driver=True):
            assert ("SGLANG_USE_CPU_ENGINE" in os.environ) == kept


@pytest.mark.parametrize("is_in_file", [False, True])
def test_the_environment_does_not_overrule_a_device(
    is_in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--devic", "cuda"]
    given = as_file(words, tmp_path / "flags.yaml") if is_in_file else words
    expanded = serve_arguments.expand_arguments(given)
    assert expanded == ["--device", "cuda"]
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert server_process.with_device(expanded) == expanded


def test_warnings_of_a_download_are_logged_and_those_of_flags_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flags are read twice: before the imports, and by SGLang's parser."""
    found = arguments.model_folder

    def download(values: dict[str, Any], *, with_weights: bool) -> Path:
        logging.getLogger("huggingface_hub").warning("the hub is slow")
        return found(values, with_weights=with_weights)

    monkeypatch.setattr(arguments, "model_folder", download)
    flags = ["--model-path", str(POCKET), "--device", "cpu", "--grammar-backend", "xgrammar"]
    server_process._check_values(ServeArguments("pie", {}, flags), ["Qwen3ForCausalLM"])
    assert "the hub is slow" in caplog.text
    assert "llguidance" not in caplog.text
    given = {"model_path": str(POCKET), "device": "cpu", "grammar_backend": "xgrammar"}
    server_process.choose_scheduler(ServeArguments("pie", {}, []), given)
    assert caplog.text.count("llguidance compiles") == 1
