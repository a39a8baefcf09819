"""Starts that fail: one line with the reason, a hint, status 1, and nothing left over."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.models import tiny_models
from support.process import drivers
from support.process import runtime_client as rc
from support.process.inspection import failure_line, hf_config, leftover_regions

pytestmark = pytest.mark.engine


def missing_snapshot(_: Path) -> dict[str, Any]:
    return {"snapshot": Path("/nonexistent/snapshot")}


def without_weights(snapshot: Path) -> dict[str, Any]:
    (snapshot / "model.safetensors").unlink()
    return {}


def without_config(snapshot: Path) -> dict[str, Any]:
    (snapshot / "config.json").unlink()
    return {}


def with_unknown_option(_: Path) -> dict[str, Any]:
    return {"options": {"page_sise": 16}}


def with_cuda_attention(_: Path) -> dict[str, Any]:
    return {"options": {"attention_backend": "flashinfer"}}


def with_trace_nowhere(_: Path) -> dict[str, Any]:
    return {"options": {"trace_file": "/nonexistent/trace.json"}}


def with_a_pipe_as_trace(snapshot: Path) -> dict[str, Any]:
    os.mkfifo(snapshot / "trace")
    return {"options": {"trace_file": str(snapshot / "trace")}}


def with_unknown_attention(_: Path) -> dict[str, Any]:
    return {"options": {"attention_backend": "flashfoo"}}


def with_too_long_a_context(_: Path) -> dict[str, Any]:
    return {"options": {"context_length": tiny_models.CONTEXT + 1}}


def without_a_tokenizer(snapshot: Path) -> dict[str, Any]:
    (snapshot / "tokenizer.json").unlink()
    return {}


def with_negative_heads(snapshot: Path) -> dict[str, Any]:
    hf_config(snapshot, head_dim=-16)
    return {}


def with_unknown_architecture(snapshot: Path) -> dict[str, Any]:
    hf_config(snapshot, architectures=["UnheardOfForCausalLM"])
    return {}


def with_an_architecture_of_transformers(snapshot: Path) -> dict[str, Any]:
    hf_config(snapshot, model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"])
    return {}


def with_two_devices(_: Path) -> dict[str, Any]:
    return {"device": ["cpu", "cpu"]}


EARLY = {
    "the snapshot is missing": (missing_snapshot, "/nonexistent/snapshot"),
    "the weights are missing": (without_weights, "no weights"),
    "config.json is missing": (without_config, "no config.json"),
    "an option is unknown": (with_unknown_option, "page_sise"),
    "the attention backend needs CUDA": (with_cuda_attention, "flashinfer"),
    "the trace cannot be written": (with_trace_nowhere, "/nonexistent/trace.json"),
    "the trace is a pipe that nobody reads": (with_a_pipe_as_trace, "cannot write"),
    "there are two devices": (with_two_devices, "device"),
    "the attention backend is unknown": (with_unknown_attention, "flashfoo"),
    "the context is too long": (with_too_long_a_context, f"has {tiny_models.CONTEXT} positions"),
    "there is no tokenizer": (without_a_tokenizer, "no tokenizer"),
    "a size is nonsense": (with_negative_heads, "`head_dim` = -16"),
    "the architecture is unknown": (with_unknown_architecture, "UnheardOfForCausalLM"),
    "only transformers has it": (with_an_architecture_of_transformers, "GPTNeoXForCausalLM"),
}
"""Failures that show before SGLang is imported: how to cause them, and what the line names."""


def chosen_by_sglang(cause: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    """As `cause`, with an option by which SGLang may take other classes than its own."""
    return lambda snapshot: {**cause(snapshot), "options": {"model_impl": "auto"}}


def with_an_encoder(snapshot: Path) -> dict[str, Any]:
    hf_config(snapshot, architectures=["LlamaForCausalLM", "WhisperForConditionalGeneration"])
    return {}


def without_a_head(snapshot: Path) -> dict[str, Any]:
    hf_config(snapshot, architectures=["LlamaForSequenceClassification"])
    return {}


def without_a_gpu(_: Path) -> dict[str, Any]:
    return {"device": ["cuda:0"], "options": {"attention_backend": "flashinfer"}}


def with_corrupt_weights(snapshot: Path) -> dict[str, Any]:
    path = snapshot / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])
    return {}


def with_half_of_the_weights(snapshot: Path) -> dict[str, Any]:
    path = snapshot / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return {}


def with_an_index_that_is_no_json(snapshot: Path) -> dict[str, Any]:
    """The plan does not go on without the weights' sizes."""
    (snapshot / "model.safetensors.index.json").write_text("{")
    return {}


def with_a_window_that_is_ignored(snapshot: Path) -> dict[str, Any]:
    hf_config(
        snapshot, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64
    )
    return {}


def with_soft_capped_attention(snapshot: Path) -> dict[str, Any]:
    hf_config(snapshot, attn_logit_softcapping=50.0)
    return {}


LATE = {
    "the architecture is unknown": (
        "llama",
        chosen_by_sglang(with_unknown_architecture),
        "UnheardOfForCausalLM",
    ),
    "only transformers has it": (
        "llama",
        chosen_by_sglang(with_an_architecture_of_transformers),
        "would take GPTNeoXForCausalLM from transformers",
    ),
    "it has an encoder": ("llama", with_an_encoder, "has an encoder"),
    "its head is missing": ("llama", without_a_head, "score.weight is missing"),
    "there is no GPU": ("llama", without_a_gpu, "cuda:0"),
    "the weights are corrupt": ("llama", with_corrupt_weights, ""),
    "the weights are cut off": ("llama", with_half_of_the_weights, ""),
    "the index is no JSON": (
        "llama",
        with_an_index_that_is_no_json,
        "cannot read the sizes of the weights",
    ),
    "a sliding window is ignored": ("mistral", with_a_window_that_is_ignored, "64 tokens"),
    "the attention is soft-capped": ("gemma2", with_soft_capped_attention, "soft-caps"),
}
"""Failures that only show with SGLang loaded."""


class TestFailedStart:
    """One clear line, a hint, a status, and nothing left over."""

    @pytest.fixture
    def snapshot(self, request: pytest.FixtureRequest, models_folder: Path, tmp_path: Path) -> Path:
        model = getattr(request, "param", "llama")
        return Path(shutil.copytree(tiny_models.build(model, models_folder), tmp_path / model))

    @pytest.mark.parametrize("name", EARLY)
    def test_before_sglang_is_imported(self, name: str, snapshot: Path, tmp_path: Path) -> None:
        cause, expected = EARLY[name]
        changed = cause(snapshot)
        config = drivers.write_config(tmp_path, changed.pop("snapshot", snapshot), **changed)
        with rc.started(config, PYTHONPROFILEIMPORTTIME="1") as start:
            assert start.process.wait(30.0) == 1
            self.check_remains(start)
            log = start.log()
            assert expected in failure_line(log)
            assert "import time:" in log
            assert not re.search(r"\| +(sglang|torch|transformers)(\.|$)", log, re.MULTILINE)

    def test_an_unknown_option_gets_a_suggestion(self, snapshot: Path, tmp_path: Path) -> None:
        config = drivers.write_config(tmp_path, snapshot, options={"page_sise": 16})
        with rc.started(config) as start:
            assert start.process.wait(30.0) == 1
            assert "page_size" in start.log()

    def test_a_context_that_no_region_can_hold(self, snapshot: Path, tmp_path: Path) -> None:
        hf_config(snapshot, max_position_embeddings=2**31 - 1)
        config = drivers.write_config(tmp_path, snapshot, options={"context_length": 2**31 - 1})
        with rc.started(config, PYTHONPROFILEIMPORTTIME="1") as start:
            assert start.process.wait(30.0) == 1
            self.check_remains(start)
            failure_line(start.log())
            assert "context_length" in start.log().partition("hint: ")[2]
            assert not re.search(r"\| +(sglang|torch)(\.|$)", start.log(), re.MULTILINE)

    @pytest.mark.parametrize(
        ("snapshot", "name"), [(LATE[name][0], name) for name in LATE], indirect=["snapshot"]
    )
    def test_with_sglang(self, name: str, snapshot: Path, tmp_path: Path) -> None:
        _, cause, expected = LATE[name]
        config = drivers.write_config(tmp_path, snapshot, **cause(snapshot))
        with rc.forked(config) as start:
            assert start.process.wait(60.0) == 1
            self.check_remains(start)
            assert expected in failure_line(start.log())

    def test_a_context_beyond_what_the_models_class_says(
        self, snapshot: Path, tmp_path: Path
    ) -> None:
        path = snapshot / "config.json"
        written = json.loads(path.read_text())
        del written["max_position_embeddings"]
        path.write_text(json.dumps(written))
        options = {"context_length": 1_000_000}
        with rc.forked(drivers.write_config(tmp_path, snapshot, options=options)) as start:
            assert start.process.wait(60.0) == 1
            self.check_remains(start)
            assert "context_length" in failure_line(start.log())
            assert "`context_length` = 1000000" in start.log().partition("hint: ")[2]

    @staticmethod
    def check_remains(start: rc.Start) -> None:
        assert start.handshake.read_bytes() == b""
        assert start.stdout.read_bytes() == b""
        assert not start.region.exists()

    def test_a_handshake_that_nobody_reads(self, llama_snapshot: Path, tmp_path: Path) -> None:
        config = drivers.write_config(tmp_path, llama_snapshot)
        command = [sys.executable, "-m", "pie_driver_sglang", "--config", str(config)]
        ended = subprocess.run(
            [*command, "--handshake-fd", "77"], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 1
        assert "--handshake-fd 77" in failure_line(ended.stderr)
        assert ended.stdout == ""


def test_the_end_of_a_failed_start_closes_the_pipe(llama_snapshot: Path, tmp_path: Path) -> None:
    config = drivers.write_config(tmp_path, llama_snapshot, device=["cuda:0"])
    with pytest.raises(drivers.StartFailedError) as caught:
        drivers.fork(config)  # Returns at the end of the pipe, not at the harness's time-out.
    assert caught.value.returncode == 1


def test_no_failed_start_leaves_a_region() -> None:
    assert not leftover_regions()
