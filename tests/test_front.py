"""`_core.Front` against SGLang's message classes, as they are installed, and `msgspec`."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang import _core
from pie_driver_sglang.errors import FrontEndError
from tiny_models import POCKET

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    # Of SGLang's own modules.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def seams() -> Iterator[Any]:
    """The messages' seam, whose import is SGLang's; the process keeps none of its variables."""
    from pie_driver_sglang.server.seams import environment

    with mock.patch.dict(os.environ):
        environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with environment.importing_server():
            from pie_driver_sglang.server.seams import messages
        yield messages


@pytest.fixture(scope="module")
def front(seams: Any) -> Iterator[_core.Front]:
    """A front end whose driver has ended at once: it answers every request with an error."""
    runtime = _core.Runtime(str(POCKET), python="/bin/false", devices=["cpu"], max_restarts=0)
    with pytest.raises(Exception, match=r"ended|exit"):
        runtime.wait_ready(60)
    yield make(runtime, seams)
    runtime.shutdown()


def make(runtime: _core.Runtime, seams: Any, **changed: Any) -> _core.Front:
    values: dict[str, Any] = {
        "eos_token_ids": [1],
        "think_end_ids": [],
        "stream_interval": 1,
        "other_interval": 50,
        "max_prompt_tokens": 100,
        "truncate": False,
        "vocab_size": 1000,
        "speculate": False,
        "probe_prefix": seams.PROBE_PREFIX,
    }
    return _core.Front(runtime, seams.message_table(), **{**values, **changed})


def request(**changed: Any) -> Any:
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


def answer(front: _core.Front, seams: Any, *messages: Any) -> Any:
    """What SGLang's detokenizer decodes of the one message that comes back."""
    [data], _, _ = front.receive([seams.encode_message(message) for message in messages])
    return seams.decode_message(data)


TEXTS = st.text(max_size=20)


@settings(max_examples=60)
@given(
    rid=TEXTS.map(lambda text: f"r{text}"),
    worker=st.none() | TEXTS,
    prompt=st.lists(st.integers(0, 999), min_size=1, max_size=100),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_outputs_are_messages_of_sglang(
    front: _core.Front,
    seams: Any,
    rid: str,
    worker: str | None,
    prompt: list[int],
    flags: tuple[bool, bool, bool],
) -> None:
    skip, spaces, no_trim = flags
    params = {
        "skip_special_tokens": skip,
        "spaces_between_special_tokens": spaces,
        "no_stop_trim": no_trim,
    }
    fields = {"input_ids": array("q", prompt)}
    sent = request(rid=rid, worker=worker, params=params, fields=fields)
    sent.sampling_params.stop_strs = ["a", "b"]
    found = answer(front, seams, sent)
    assert type(found).__name__ == "BatchTokenIDOutput"
    assert (found.rids, found.http_worker_ipcs) == ([rid], [worker])
    assert found.decode_ids == [array("q", prompt[-5:])]
    assert (found.read_offsets, found.output_ids) == ([min(5, len(prompt))], [array("q")])
    assert found.skip_special_tokens == [skip]
    assert found.spaces_between_special_tokens == [spaces]
    assert found.no_stop_trim == [no_trim]
    assert (found.prompt_tokens, found.completion_tokens) == ([len(prompt)], [0])
    assert (found.retraction_counts, found.cached_tokens) == ([0], [0])
    [reason] = found.finished_reasons
    assert (reason["type"], reason["status_code"]) == ("abort", 503)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"params": {"repetition_penalty": 2.25}}, "repetition_penalty is 2.25"),
        ({"params": {"logit_bias": {"1000": 1.0}}}, "token 1000 of `logit_bias`"),
        ({"params": {"min_p": 1.5, "top_k": 5}}, "min_p"),
        ({"fields": {"return_logprob": True}}, "`return_logprob`"),
        ({"fields": {"return_hidden_states": "last"}}, "`return_hidden_states`"),
        ({"fields": {"lora_id": "ab"}}, "`lora_id`"),
        ({"fields": {"input_ids": None, "input_embeds": [[0.5]]}}, "`input_embeds`"),
        ({"fields": {"input_ids": array("q", [1000])}}, "token 1000"),
        ({"fields": {"input_ids": array("q", range(101))}}, "101 tokens"),
    ],
)
def test_refusals(front: _core.Front, seams: Any, changed: dict[str, Any], words: str) -> None:
    [reason] = answer(front, seams, request(**changed)).finished_reasons
    assert (reason["status_code"], reason["err_type"]) == (400, "BadRequestError")
    assert words in reason["message"]


def test_one_message_answers_a_batch(front: _core.Front, seams: Any) -> None:
    from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput

    batch = BatchTokenizedGenerateReqInput(batch=[request(rid="a"), request(rid="b", worker="w")])
    found = answer(front, seams, batch, request(rid="c"))
    assert (found.rids, found.http_worker_ipcs) == (["a", "b", "c"], [None, "w", None])


def test_messages_about_other_things_come_back(front: _core.Front, seams: Any) -> None:
    from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput, GetInternalStateReq

    others = [
        seams.encode_message(FlushCacheReqInput()),
        seams.encode_message(GetInternalStateReq()),
    ]
    abort = seams.encode_message(AbortReq(rid="unknown"))
    assert front.receive([others[0], abort, others[1]]) == ([], [], others)
    with pytest.raises(FrontEndError, match="cannot be read"):
        front.receive([b"\xdc"])


def test_classes_of_another_version_are_refused(front: _core.Front, seams: Any) -> None:
    runtime = _core.Runtime(str(POCKET), python=sys.executable, devices=["cpu"])
    try:
        table = [entry for entry in seams.message_table() if entry[0] != "AbortReq"]
        with pytest.raises(FrontEndError, match="no message class `AbortReq`"):
            _core.Front(
                runtime,
                table,
                eos_token_ids=[],
                think_end_ids=[],
                stream_interval=1,
                other_interval=50,
                max_prompt_tokens=1,
                truncate=False,
                vocab_size=1,
                speculate=False,
                probe_prefix="",
            )
    finally:
        runtime.shutdown()


def test_every_message_has_an_answer(seams: Any) -> None:
    """SGLang waits for answers without a limit."""
    from sglang.srt.managers import io_struct

    from pie_driver_sglang.server.control import Control

    control = Control(Idle(), Idle(), {"page_size": 16, "max_running_requests": 4})
    for cls in io_struct.BaseReq.__subclasses__():
        wanted = seams._answer_class(cls.__name__)
        if wanted is None or cls.__name__.endswith("Output"):
            continue
        required = [field.name for field in msgspec.structs.fields(cls) if field.required]
        [data] = control.answer(cls(**dict.fromkeys(required)))
        found = seams.decode_message(data)
        assert type(found) is wanted, cls.__name__
        if cls.__name__ != "FlushCacheReqInput":
            assert getattr(found, "success", False) is False, cls.__name__


class Idle:
    """A runtime without requests."""

    def flush_cache(self) -> bool:
        return True

    def stats(self) -> dict[str, Any]:
        names = ("running", "waiting", "pages_total", "pages_free", "pages_cached")
        more = ("prompt_tokens", "cached_tokens", "output_tokens")
        return dict.fromkeys((*names, *more), 0)
