"""`_core.SglangFrontend` without a driver, and requests of SGLang's installed classes."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest

from pie_driver_sglang import _core
from support.models.tiny_models import POCKET


@contextlib.contextmanager
def compat_messages() -> Iterator[Any]:
    """The compat module of messages, which imports SGLang; no variable of it is kept."""
    from pie_driver_sglang.frontends.sglang_server.compat import server_environment

    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import messages
        yield messages


@contextlib.contextmanager
def ended_runtime() -> Iterator[_core.Runtime]:
    """A runtime whose driver has ended at once."""
    runtime = _core.Runtime(str(POCKET), python="/bin/false", devices=["cpu"], max_restarts=0)
    with pytest.raises(Exception, match=r"ended|exit"):
        runtime.wait_ready(60)
    yield runtime
    runtime.shutdown()


def make(runtime: _core.Runtime, compat: Any, **changed: Any) -> _core.SglangFrontend:
    """A frontend."""
    values: dict[str, Any] = {
        "eos_token_ids": [1],
        "think_end_ids": [],
        "stream_interval": 1,
        "other_interval": 50,
        "max_prompt_tokens": 100,
        "context_length": 106,
        "truncate": False,
        "vocab_size": 1000,
        "speculate": False,
        "probe_prefix": compat.PROBE_PREFIX,
    }
    return _core.SglangFrontend(runtime, compat.message_table(), **{**values, **changed})


def generation(**changed: Any) -> Any:
    """A ``TokenizedGenerateReqInput``; `params` and `fields` change its values."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**changed.pop("params", {}))
    params.normalize(None)
    values = {
        "input_text": "text",
        "input_ids": array("q", [5, 6, 7]),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": params,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    made = TokenizedGenerateReqInput(**{**values, **changed.pop("fields", {})})
    made.rid = changed.pop("rid", "r")
    made.http_worker_ipc = changed.pop("worker", None)
    assert not changed
    return made


def embedding(**fields: Any) -> Any:
    """A ``TokenizedEmbeddingReqInput``."""
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    known = msgspec.structs.fields(TokenizedEmbeddingReqInput)
    values = {field.name: None for field in known if field.required}
    values |= {"rid": "r", "input_ids": array("q", [1, 2]), "sampling_params": SamplingParams()}
    return TokenizedEmbeddingReqInput(**{**values, **fields})


def answer(front: _core.SglangFrontend, compat: Any, *messages: Any) -> Any:
    """What SGLang's detokenizer decodes of the one message that comes back."""
    [data], _, _, _ = front.receive([compat.encode_message(message) for message in messages])
    return compat.decode_message(data)
