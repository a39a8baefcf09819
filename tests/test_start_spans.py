"""The time line of a start, and the command that measures one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie_driver_sglang.cli import bench_start
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.observability import start_spans
from pie_driver_sglang.observability.active import ActiveFile, write_active
from pie_driver_sglang.observability.start_spans import StartSpan
from support import versions

SPANS = [
    StartSpan("capture of 1 row", 13.0, 13.5),
    StartSpan("graphs", 12.0, 15.0),
    StartSpan("imports", 10.0, 12.0),
    StartSpan("settings", 15.0, 15.01),
]
SERVER = """
    import http.server, json, sys

    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["sampling_params"]["max_new_tokens"] == 1
            requests.append(asked)
            ready = len(requests) > 3
            self.answer(200 if ready else 503, {"meta_info": {"completion_tokens": 1}})

        def do_GET(self):
            assert self.path == "/server_info"
            span = {"process": "server", "name": "imports", "begin_s": 0.0, "seconds": 0.2}
            self.answer(200, {"internal_states": [{"start": [span]}]})

        def answer(self, status, value):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_):
            pass

    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server that refuses the first requests after its port is open."""


@pytest.fixture(autouse=True)
def own_time_line() -> Iterator[None]:
    """The time line of this process is left as it was."""
    began, kept = start_spans.process_start(), start_spans.recorded()
    yield
    start_spans.restart(began, kept)


class TestTimeLine:
    def test_a_summary_has_the_outer_spans(self) -> None:
        line = start_spans.summary(SPANS, 10.0, 16.0)
        assert line == "start: 6.0 s (imports 2.0, graphs 3.0)"

    def test_values_are_relative_and_ordered(self) -> None:
        found = start_spans.as_list(SPANS, "driver", 9.0)
        assert [each["name"] for each in found[:3]] == ["imports", "graphs", "capture of 1 row"]
        assert found[1] == {"process": "driver", "name": "graphs", "begin_s": 3.0, "seconds": 3.0}
        assert start_spans.time_line(found)[1].split() == ["3.00", "3.00", "driver:", "graphs"]

    def test_what_fails_is_recorded_as_well(self) -> None:
        with pytest.raises(ValueError, match="no"), start_spans.span("weights"):
            raise ValueError("no")
        assert start_spans.recorded()[-1].name == "weights"

    def test_the_rest_is_since_the_last_span(self) -> None:
        asked_at = time.monotonic()
        start_spans.restart(asked_at - 5.0)
        start_spans.rest("settings")
        start_spans.rest("flags")
        settings, flags = start_spans.recorded()
        assert settings.begin_s == asked_at - 5.0
        assert asked_at <= settings.end_s <= time.monotonic()
        assert flags.begin_s == settings.end_s

    def test_a_process_knows_its_start_and_a_fork_its_own(self) -> None:
        script = """
            import os, sys, time
            from pie_driver_sglang.observability import start_spans
            start_spans.add("imports", 0.0, 1.0)
            time.sleep(0.3)
            if os.fork() == 0:
                print(time.monotonic() - start_spans.process_start(), start_spans.recorded())
                sys.stdout.flush()
                os._exit(0)
            os.wait()
            print(time.monotonic() - start_spans.process_start(), len(start_spans.recorded()))
        """
        command = [sys.executable, "-c", textwrap.dedent(script)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        fork, parent = output.splitlines()
        assert fork.endswith(" []")
        assert float(parent.split()[0]) > float(fork.split()[0]) + 0.2
        assert parent.endswith(" 1")

    def test_the_origin_is_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(start_spans.ORIGIN_VARIABLE, "12.5")
        assert start_spans.origin() == 12.5
        monkeypatch.setenv(start_spans.ORIGIN_VARIABLE, "soon")
        assert start_spans.origin() == start_spans.process_start()

    def test_the_driver_hands_its_spans_to_the_frontend(self) -> None:
        file = ActiveFile()
        assert file.start_spans() == []
        path = file.runtime({"options": {}})["options"]["active_file"]
        write_active({"layers": "fused"}, path, SPANS)
        assert file.start_spans() == SPANS
        assert file.read() == {"scheduler": "pie", "grammar": "llguidance", "layers": "fused"}


class TestBench:
    def _server(self, tmp_path: Path, text: str = SERVER) -> tuple[list[str], int]:
        script = tmp_path / "server.py"
        script.write_text(textwrap.dedent(text))
        port = bench_start._free_port()
        return [sys.executable, str(script), str(port)], port

    def test_measures_port_and_first_token(self, tmp_path: Path) -> None:
        notice = "print('pie-sglang: a notice', flush=True)\n"
        command, port = self._server(tmp_path, notice + textwrap.dedent(SERVER))
        with bench_start.started_server(command, port, os.environ, 60.0) as found:
            assert found["first_token_s"] > found["port_open_s"]
            assert found["notices"] == ["pie-sglang: a notice"]
            assert found["spans"][0]["name"] == "imports"
            assert bench_start._is_open(port)
        assert not bench_start._is_open(port), "it is ended"

    def test_a_server_that_ends_is_an_error_with_its_log(self, tmp_path: Path) -> None:
        command, port = self._server(tmp_path, "raise SystemExit('no such model')")
        with (
            pytest.raises(StartError, match=r"(?s)status 1.*no such model"),
            bench_start.started_server(command, port, os.environ, 60.0),
        ):
            pass

    def test_one_that_is_late_is_ended(self, tmp_path: Path) -> None:
        command, port = self._server(tmp_path, "import time; time.sleep(600)")
        with (
            pytest.raises(StartError, match="no token came") as raised,
            bench_start.started_server(command, port, os.environ, 0.2),
        ):
            pass
        assert "--timeout" in raised.value.hint

    def test_a_measurement_that_is_terminated_ends_its_server(self, tmp_path: Path) -> None:
        command, port = self._server(tmp_path)
        script = f"""
            import os, time
            from pie_driver_sglang.cli import bench_start

            with bench_start.started_server({command}, {port}, os.environ, 60.0):
                print("ready", flush=True)
                time.sleep(600)
            """
        words = [sys.executable, "-c", textwrap.dedent(script)]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        assert not bench_start._is_open(port)

    def test_commands(self) -> None:
        ours = bench_start.server_command("pie", "/model", 1, "cpu", ["--flag"])
        assert ours[1:] == [
            *("-m", "pie_driver_sglang", "serve", "--model-path", "/model"),
            *("--port", "1", "--device", "cpu", "--flag"),
        ]
        theirs = bench_start.server_command("sglang", "/model", 1, None)
        assert theirs[1:3] == ["-m", "sglang.launch_server"]

    def test_empty_caches_keep_the_models(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("HF_HOME", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
        found = bench_start.empty_caches(tmp_path)
        assert found["HF_HOME"] == "/caches/huggingface"
        assert found["TRITON_CACHE_DIR"] == str(tmp_path / "triton")

    def test_a_record(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        command, _ = self._server(tmp_path)

        def serve(side: str, model: str, port: int, device: str | None, flags: object) -> list[str]:
            assert (side, device, flags) == ("pie", "cpu", ["--stream-interval", "2"])
            return [*command[:2], str(port)]

        monkeypatch.setattr(bench_start, "server_command", serve)
        monkeypatch.setattr(bench_start, "model_folder", lambda *_, **__: tmp_path)
        path = tmp_path / "record.json"
        words = ["anything", "--device", "cpu", "--repeats", "2", "--json", str(path)]
        assert bench_start.main([*words, "--", "--stream-interval", "2"]) == 0
        record = json.loads(path.read_text())
        seconds = [each["first_token_s"] for each in record["starts"]]
        assert len(seconds) == 2
        assert min(seconds) <= record["first_token_s"]["pie"] <= max(seconds)
        assert "server: imports" in capsys.readouterr().out

    def test_no_start_measures_nothing(self) -> None:
        with pytest.raises(ConfigError, match="`--repeats` is 0"):
            bench_start.main(["anything", "--repeats", "0"])


@pytest.mark.engine
@versions.of_the_oldest("it builds kernels itself, and nothing is recorded")
def test_kernels_that_sglang_compiles_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's `load_jit` builds by functions of `tvm_ffi.cpp`, which only a GPU host can run."""
    from sglang.kernels.jit.utils.compile import load_jit
    from tvm_ffi import cpp

    from pie_driver_sglang.backends.sglang.compat.jit_builds import report_builds

    def build(name: str, **_: object) -> str:
        if "broken" in name:
            raise RuntimeError("no nvcc")
        return name

    spans: list[tuple[str, float, float]] = []
    for name in ("load", "load_inline"):
        monkeypatch.setattr(cpp, name, build)
    report_builds(lambda *span: spans.append(span))
    with caplog.at_level("INFO"):
        assert load_jit("rope", build_directory=str(tmp_path)) == "sgl_kernel_jit_rope"
        with pytest.raises(RuntimeError, match="no nvcc"):
            load_jit("broken", build_directory=str(tmp_path))
    names = ["sgl_kernel_jit_rope", "sgl_kernel_jit_broken"]
    assert [name for name, _, _ in spans] == [f"compile {name}" for name in names]
    assert all(begin <= end for _, begin, end in spans)
    assert all(f"nvcc compiles SGLang's {name}, which" in caplog.text for name in names)
