"""Control endpoints of the server: profile, server info, loads, refusals."""

from __future__ import annotations

import functools
import gzip
import json
import re
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.cli import main
from support import versions
from support.servers.pie_server import generate, refusal, state, wait_until
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class TestProfile:
    def test_a_profile_has_the_requested_steps(self, server: Server, tmp_path: Path) -> None:
        requested = {"output_dir": str(tmp_path), "profile_prefix": "mine", "profile_id": "p"}
        server.fetch("/start_profile", requested)
        status, text = refusal(server, requested, "/start_profile")
        assert (status, "under way already" in text) == (400, True)
        generate(server, max_new_tokens=6, ignore_eos=True)
        server.fetch("/stop_profile", {})
        [file] = tmp_path.iterdir()
        assert file.name == "mine-p-TP-0.trace.json.gz"
        steps = _steps(file)
        assert any(event.get("cat") == "cpu_op" for event in _events(file))
        assert [step["name"] for step in steps] == ["prompt", *["decode"] * 5]
        assert steps[0]["args"]["tokens"] == 4
        assert all(step["dur"] > 0 for step in steps)
        status, text = refusal(server, {}, "/stop_profile")
        assert (status, "no profile is under way" in text) == (400, True)

    def test_a_number_of_steps_ends_it(self, server: Server, tmp_path: Path) -> None:
        server.fetch("/start_profile", {"output_dir": str(tmp_path), "num_steps": 3})
        generate(server, max_new_tokens=8, ignore_eos=True)
        server.fetch("/start_profile", {"output_dir": str(tmp_path / "next"), "num_steps": 1})
        server.fetch("/stop_profile", {})
        [file] = [path for path in tmp_path.iterdir() if path.is_file()]
        assert len(_steps(file)) == 3

    def test_what_steps_do_not_show_is_refused(self, server: Server, tmp_path: Path) -> None:
        requested = {"output_dir": str(tmp_path), "activities": ["MEM"]}
        status, text = refusal(server, requested, "/start_profile")
        assert (status, "activity 'MEM'" in text) == (400, True)
        requested = {"output_dir": str(tmp_path), "activities": ["GPU"]}
        status, text = refusal(server, requested, "/start_profile")
        assert (status, "the device is cpu" in text) == (400, True)

    @pytest.mark.parametrize(
        ("requested", "words"),
        [
            ({"output_dir": "\0"}, "null byte"),
            ({"output_dir": "~nobody-at-all/x"}, "home directory"),
            ({"num_steps": -1}, "negative"),
            ({"profile_by_stage": True}, "`profile_by_stage`"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, server: Server, requested: dict[str, Any], words: str
    ) -> None:
        status, text = refusal(server, requested, "/start_profile")
        assert (status, words in text) == (400, True)


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "words"),
        [
            ("/set_internal_state", {"server_args": {}}, "settings do not change"),
            ("/slow_down", {"forward_sleep_time": 0.1}, "as fast as it can be"),
            ("/start_expert_distribution_record", {}, "experts"),
            pytest.param(
                "/clear_hicache_storage_backend",
                {},
                "no storage after the host",
                marks=versions.of_the_oldest("the endpoint is gone"),
            ),
            ("/hicache/storage-backend/clear", {}, "no storage after the host"),
            ("/v1/embeddings", {"model": "m", "input": "x"}, "embedding"),
        ],
    )
    def test_an_unsupported_endpoint_names_the_reason(
        self, server: Server, path: str, body: dict[str, Any], words: str
    ) -> None:
        status, text = refusal(server, body, path)
        assert (status, words in text) == (400, True), text

    def test_a_storage_backend_is_refused_by_its_reason(self, server: Server) -> None:
        """SGLang's answer says that the server has no admin key, which is kept elsewhere here."""
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.fetch("/hicache/storage-backend")
        assert refused.value.code == 400
        text = refused.value.read().decode()
        assert "--hicache-storage-backend" in text
        assert "admin" not in text

    def test_what_the_operator_has_to_allow(self, server: Server) -> None:
        params = {"custom_params": {"a": 1}}
        status, text = refusal(server, {"text": "x", "sampling_params": params})
        assert (status, "`custom_params`" in text) == (400, True)
        body = {"text": "x", "custom_logit_processor": '{"callable": "80"}'}
        status, text = refusal(server, body)
        assert (status, "--enable-custom-logit-processor" in text) == (400, True), text
        status, text = refusal(server, {"text": "x", "return_hidden_states": True})
        assert (status, "--enable-return-hidden-states" in text) == (400, True), text

    def test_a_text_model_is_shown_nothing(self, server: Server) -> None:
        url = "data:image/png;base64,AAAA"
        content = [{"type": "image_url", "image_url": {"url": url}}]
        chat = {"model": "m", "messages": [{"role": "user", "content": content}]}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/generate", {"text": "x", "image_data": [url]}),
        ):
            status, text = refusal(server, body, path)
            assert (status, "Model only supports text input" in text) == (400, True), text


def test_server_info_has_the_resolved_arguments(server: Server) -> None:
    found = state(server)
    assert found["resolved"]["devices"] == ["cpu"]
    assert found["capabilities"]["kv_page_size"] == found["page_size"]


def test_batches_are_logged_as_by_sglang(server: Server) -> None:
    found = generate(server, max_new_tokens=60, ignore_eos=True)
    assert found["meta_info"]["completion_tokens"] == 60
    time = r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] "
    prefill = time + r"Prefill batch, #new-seq: \d+, #new-token: [1-9]\d*, #cached-token: \d+, "
    decode = time + r"Decode batch, #running-req: \d+, #token: \d+, token usage: \d\.\d\d, "
    decode += r"cpu graph: False, gen throughput \(token/s\): [1-9][\d.]*, #queue-req: \d+$"
    for pattern in (prefill, decode):
        is_logged = functools.partial(_is_logged, server, pattern)
        wait_until(is_logged, 60, f"no {pattern}")


def _is_logged(server: Server, pattern: str) -> bool:
    log = server.log.read_text(errors="replace")
    return re.search(pattern, log, re.MULTILINE) is not None


def test_what_is_active_is_shown_with_reasons(server: Server) -> None:
    info = json.loads(server.fetch("/server_info"))
    active = info["active"]
    assert active == info["internal_states"][0]["active"]
    assert active == {
        "scheduler": "pie",
        "grammar": "llguidance",
        "attention": "torch_native",
        "layers": "sglang",
        "steps": "graph path",
        "drafts": "off",
        "reasons": {
            "attention": "pie needs a GPU",
            "layers": "not fused: the fused layers need a GPU",
        },
    }
    log = server.log.read_text(errors="replace")
    [line] = re.findall(r"^pie-sglang: scheduler: (.*)$", log, re.MULTILINE)
    assert line == (
        "pie; grammar: llguidance; attention: torch_native (pie needs a GPU); "
        "layers: sglang (not fused: the fused layers need a GPU); steps: graph path; drafts: off"
    )


def test_a_running_server_is_measured(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIE_API_KEY", str(server.key))
    words = ["bench", "--serve", server.url, "--concurrency", "3", "--requests", "6"]
    assert main.main([*words, "--input-len", "48", "--output-len", "12"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["streams", "requests", "output", "tok/s"]
    assert line.split()[:2] == ["3", "6"]
    assert all(float(cell.replace(",", "")) > 0 for cell in line.split())
    assert main.main([*words, "--input-len", "5000"]) == 1
    assert "longer than the model's context length" in capsys.readouterr().err


def _events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as opened:
        events: list[dict[str, Any]] = json.load(opened)["traceEvents"]
    return events


def _steps(file: Path) -> list[dict[str, Any]]:
    return [event for event in _events(file) if event["name"] in ("prompt", "decode")]
