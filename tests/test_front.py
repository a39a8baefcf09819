"""`_core.SglangFrontend` against SGLang's installed message classes and `msgspec`."""

from __future__ import annotations

import json
import pickle
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang import _core
from pie_driver_sglang.config.sglang_versions import adapter_version
from pie_driver_sglang.errors import FrontEndError
from support import versions
from support.models.tiny_models import POCKET
from support.process import scripts
from support.servers.sglang_frontend import (
    answer,
    embedding,
    ended_runtime,
    make,
)
from support.servers.sglang_frontend import (
    generation as request,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    # Of SGLang's own modules.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def gone() -> Iterator[_core.Runtime]:
    """A runtime whose driver has ended at once."""
    with ended_runtime() as runtime:
        yield runtime


@pytest.fixture(scope="module")
def front(gone: _core.Runtime, compat: Any) -> _core.SglangFrontend:
    """Its requests: every one is answered with an error."""
    return make(gone, compat)


TEXTS = st.text(max_size=20)


@settings(max_examples=60)
@given(
    rid=TEXTS.map(lambda text: f"r{text}"),
    worker=st.none() | TEXTS,
    prompt=st.lists(st.integers(0, 999), min_size=1, max_size=100),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_outputs_are_messages_of_sglang(
    front: _core.SglangFrontend,
    compat: Any,
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
    found = answer(front, compat, sent)
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
        (
            {"params": {"stop_token_ids": list(range(5000))}},
            "`stop_token_ids` has 5000 tokens, 4096 is the most: send fewer, or raise the request "
            "limit `stop_token_ids`",
        ),
        (
            {"fields": {"extra_key": "x" * 2000}},
            "`extra_key` has 2000 bytes, 1024 is the most: send fewer, or raise the request limit "
            "`name_bytes`",
        ),
        ({"fields": {"return_hidden_states": "last"}}, "--enable-return-hidden-states"),
        ({"fields": {"return_routed_experts": True}}, "`return_routed_experts`"),
        ({"fields": {"custom_logit_processor": "x"}}, "--enable-custom-logit-processor"),
        ({"fields": {"lora_id": "ab"}}, "the adapter `ab` is not loaded"),
        ({"fields": {"input_ids": None, "input_embeds": [[0.5]]}}, "`input_embeds`"),
        ({"fields": {"input_ids": array("q", [1000])}}, "token 1000"),
        ({"fields": {"input_ids": array("q", range(101))}}, "101 tokens"),
    ],
)
def test_refusals(
    front: _core.SglangFrontend, compat: Any, changed: dict[str, Any], words: str
) -> None:
    [reason] = answer(front, compat, request(**changed)).finished_reasons
    assert (reason["status_code"], reason["err_type"]) == (400, "BadRequestError")
    assert words in reason["message"]


def test_one_message_answers_a_batch(front: _core.SglangFrontend, compat: Any) -> None:
    from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput

    batch = BatchTokenizedGenerateReqInput(batch=[request(rid="a"), request(rid="b", worker="w")])
    found = answer(front, compat, batch, request(rid="c"))
    assert (found.rids, found.http_worker_ipcs) == (["a", "b", "c"], [None, "w", None])


def test_times_are_objects_of_sglang(
    gone: _core.Runtime, compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.observability import req_time_stats

    from pie_driver_sglang.frontends.sglang_server.compat.prometheus import clock_s, times_template

    req_time_stats.calibrate_time_diff()
    with monkeypatch.context() as patch:
        # Since then the time of day was set back by a minute.
        lead = req_time_stats.global_diff_realtime_monotonic
        patch.setattr(req_time_stats, "global_diff_realtime_monotonic", lead + 60)
        template, offsets = times_template()
    began = clock_s()
    timed = make(gone, compat, times=(began, template, offsets))
    found = answer(timed, compat, request(rid="a"), request(rid="b", params={"min_p": 2.0}))
    stats = pickle.loads(found.time_stats.data)
    assert [type(each).__name__ for each in stats] == ["SchedulerReqTimeStats"] * 2
    for each in stats:
        # On the clock of the process that reads them; nothing was computed.
        assert began - 1 < each.wait_queue_entry_time < clock_s() + 1
        assert each.get_queueing_time() == 0
        assert "prefill_finished_time" not in each.convert_to_output_meta_info()
    assert timed.take_waits() == []
    with pytest.raises(ValueError, match="not all inside of the pickle"):
        make(gone, compat, times=(began, template, (0, 0, 0, len(template) - 7)))


def test_messages_about_other_things_come_back(front: _core.SglangFrontend, compat: Any) -> None:
    from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput, GetInternalStateReq

    others = [
        compat.encode_message(FlushCacheReqInput()),
        compat.encode_message(GetInternalStateReq()),
    ]
    abort = compat.encode_message(AbortReq(rid="unknown"))
    assert front.receive([others[0], abort, others[1]]) == ([], [], others, [])
    # What cannot be read is for the log, and fails nothing that came with it.
    *taken, [line] = front.receive([b"\xdc", others[0]])
    assert taken == [[], [], others[:1]]
    assert line.startswith("a message of 1 bytes cannot be read")


def test_classes_of_another_version_are_refused(front: _core.SglangFrontend, compat: Any) -> None:
    runtime = _core.Runtime(str(POCKET), python=sys.executable, devices=["cpu"])
    try:
        table = [entry for entry in compat.message_table() if entry[0] != "AbortReq"]
        with pytest.raises(FrontEndError, match="no message class `AbortReq`"):
            _core.SglangFrontend(
                runtime,
                table,
                eos_token_ids=[],
                think_end_ids=[],
                stream_interval=1,
                other_interval=50,
                max_prompt_tokens=1,
                context_length=7,
                truncate=False,
                vocab_size=1,
                speculate=False,
                probe_prefix="",
            )
    finally:
        runtime.shutdown()


#: Messages that are served, each with what must be in it here.
SERVED = {
    "UpdateWeightFromDiskReqInput": {"model_path": str(POCKET)},
    "UpdateWeightsFromTensorReqInput": {
        "serialized_named_tensors": [b""],
        "load_format": "safetensors",
    },
    "FlushCacheReqInput": {},
    "GetInternalStateReq": {},
    "LoadLoRAAdapterReqInput": {"lora_name": "a", "lora_path": "/nowhere", "lora_id": "x"},
    "LoadLoRAAdapterFromTensorsReqInput": {
        "lora_name": "a",
        "lora_id": "x",
        "config_dict": {},
        "serialized_named_tensors": [b""],
    },
    "OpenSessionReqInput": {"session_id": "s", "capacity_of_str_len": 1},
    "ProfileReq": {"profile_id": "p"},
    "UnloadLoRAAdapterReqInput": {"lora_name": "a", "lora_id": "x"},
    "UpdateWeightVersionReqInput": {"new_version": "v2"},
    "BeginWeightUpdateReqInput": {},
    "EndWeightUpdateReqInput": {},
}
#: Messages that 0.5.17 does not have, or without a reply.
NEWER = {
    "BeginWeightUpdateReqInput",
    "EndWeightUpdateReqInput",
    "GetHiCacheL3LayoutReq",
    "PdRoleSwitchReqInput",
    "UpdateWeightVersionReqInput",
}


def test_every_message_has_an_answer(compat: Any, tmp_path: Path) -> None:
    """SGLang waits for answers without a limit."""
    from sglang.srt.managers import io_struct

    from pie_driver_sglang.frontends.common.control_socket import ControlSocket
    from pie_driver_sglang.frontends.common.model_updates import ModelUpdates
    from pie_driver_sglang.frontends.common.profiles import Profiles
    from pie_driver_sglang.frontends.sglang_server.control_messages import ControlHandler
    from pie_driver_sglang.frontends.sglang_server.flow_control import SendWindow
    from pie_driver_sglang.frontends.sglang_server.profile import Profiler
    from pie_driver_sglang.frontends.sglang_server.server_adapters import ServerAdapters
    from pie_driver_sglang.frontends.sglang_server.unsupported import MESSAGES
    from pie_driver_sglang.frontends.sglang_server.weight_messages import handlers

    idle: Any = Idle()
    info = {"page_size": 16, "max_running_requests": 4}
    socket = ControlSocket()
    updates = ModelUpdates(idle, socket, Path())
    aside = (ServerAdapters(idle, socket, idle), updates, Profiler(Profiles(idle, socket), None))
    control = ControlHandler(idle, idle, info, *aside, SendWindow(None))
    updating = handlers(updates).keys()
    requested = set()
    for cls in io_struct.BaseReq.__subclasses__():
        name = cls.__name__
        wanted = compat._reply_class(name)
        if wanted is None or name.endswith("Output"):
            continue
        requested.add(name)
        required = [field.name for field in msgspec.structs.fields(cls) if field.required]
        message = cls(**{**dict.fromkeys(required), **SERVED.get(name, {})})
        answers = control.answer(message)
        until = time.monotonic() + 10
        while not answers and time.monotonic() < until:
            time.sleep(0.01)
            answers = control.pending_replies()
        [data] = answers
        found = compat.decode_message(data)
        assert type(found) is wanted, name
        if name in SERVED or name in updating:
            assert name not in MESSAGES
            # No driver is connected.
            reason = getattr(found, "message", None) or found.rid or ""
            assert name in SERVED or "no driver serves" in reason or "`load_format`" in reason
            continue
        assert getattr(found, "success", False) is False, name
        reason = getattr(found, "message", MESSAGES[name])
        assert MESSAGES[name] in reason, name
    # A row for a message that there is not is a mistake.
    known = requested | {"RpcReqInput"}
    assert {*MESSAGES, *SERVED} - known == (NEWER if versions.IS_OLDEST else set())


def test_calls_that_are_refused_are_methods_of_sglang(compat: Any) -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from pie_driver_sglang.frontends.sglang_server.unsupported import CALLS

    missing = {name for name in CALLS if not hasattr(TokenizerManager, name)}
    assert missing == ({"get_hicache_l3_cache_layout"} if versions.IS_OLDEST else set())


def test_embeddings_are_messages_of_sglang(gone: _core.Runtime, compat: Any) -> None:
    """Requests in a batch, which the classes of SGLang write, are answered in their class."""
    from sglang.srt.managers.io_struct import (
        BatchEmbeddingOutput,
        BatchTokenizedEmbeddingReqInput,
    )

    request = embedding(http_worker_ipc="w")
    batch = BatchTokenizedEmbeddingReqInput(batch=[request, request])
    front = make(gone, compat)
    for message, count in ((request, 1), (batch, 2)):
        to_detokenizer, _, others, unreadable = front.receive([compat.encode_message(message)])
        assert (others, unreadable) == ([], [])
        [answer] = map(compat.decode_message, to_detokenizer)
        assert isinstance(answer, BatchEmbeddingOutput)
        assert (answer.rids, answer.http_worker_ipcs) == (["r"] * count, ["w"] * count)
        assert answer.embeddings == [[]] * count
        assert answer.finished_reasons[0]["status_code"] == 400
        assert "start it with `--is-embedding`" in answer.finished_reasons[0]["message"]


class Idle:
    """A runtime without requests, its front end and its log."""

    open_requests = 0

    def flush_cache(self) -> bool:
        return True

    def open_session(self, *_: Any, **__: Any) -> bool:
        return True

    def pause(self, *, retract: bool = False) -> bool:
        return True

    def resume(self) -> None:
        pass

    def set_weight_version(self, name: str) -> None:
        pass

    def wait_ready(self, timeout_s: float) -> bool:
        return True

    def start_trace(self, *_: Any, **__: Any) -> None:
        pass

    def end_trace(self) -> list[Any]:
        return []

    def lines(self) -> list[str]:
        return []

    def stats(self) -> dict[str, Any]:
        names = ("running", "waiting", "pages_total", "pages_free", "pages_cached", "steps")
        more = ("prompt_tokens", "cached_tokens", "output_tokens")
        return dict.fromkeys((*names, *more), 0)


def test_the_vectors_are_of_the_installed_classes() -> None:
    """Those of the unit tests in Rust; `message_vectors.py --write` makes them anew."""
    out = scripts.run("tests/support/sglang_scripts/message_vectors.py")
    found = json.loads(out.splitlines()[-1])
    assert found == {"file": f"sglang_{adapter_version().sglang}.msgpack", "is_current": True}
