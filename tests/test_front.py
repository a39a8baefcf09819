"""`_core.SglangFrontend` against SGLang's installed message classes and `msgspec`."""

from __future__ import annotations

import asyncio
import atexit
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang import _core
from pie_driver_sglang.config.sglang_versions import adapter_version
from pie_driver_sglang.errors import FrontEndError
from pie_driver_sglang.fork_server.starter import ENABLED
from support import versions
from support.models.tiny_models import POCKET
from support.process import scripts
from support.servers.sglang_frontend import (
    answer,
    compat_messages,
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
def compat() -> Iterator[Any]:
    """The compat module of messages."""
    with compat_messages() as found:
        yield found


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
    aside = (ServerAdapters(idle, idle), updates, Profiler(Profiles(idle, socket), None))
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


class TestProcesses:
    """The processes that SGLang's server starts."""

    def test_they_are_forked(self, compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.entrypoints import engine

        from pie_driver_sglang.frontends.sglang_server.compat import forking

        own = multiprocessing.get_start_method()
        monkeypatch.delenv(ENABLED, raising=False)
        with forking.forks("cuda"):
            assert engine.mp is multiprocessing
        monkeypatch.setenv(ENABLED, "1")
        halted = threading.Event()
        thread = threading.Thread(target=halted.wait)
        thread.start()
        with forking.forks("cpu"):
            assert engine.mp is multiprocessing, "a thread may hold a lock"
        halted.set()
        thread.join()
        with mock.patch("threading.active_count", return_value=1), forking.forks("cuda"):
            assert engine.mp.get_start_method() == "fork"
            # As SGLang does, for everything else that it starts.
            engine.mp.set_start_method("spawn", force=True)
            assert multiprocessing.get_start_method() == "spawn"
        multiprocessing.set_start_method(own, force=True)
        assert engine.mp is multiprocessing

    def test_they_have_signals_of_their_own(self, compat: Any) -> None:
        from pie_driver_sglang.frontends.sglang_server.compat import forking

        numbers = (signal.SIGCHLD, signal.SIGQUIT, signal.SIGTERM, signal.SIGINT)
        before = {number: signal.getsignal(number) for number in numbers}
        found: list[Any] = []
        try:
            for number in numbers:
                signal.signal(number, lambda *_: None)
            forking.run_with_default_signals(found.extend, map(signal.getsignal, numbers))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        assert found == [signal.SIG_DFL] * 3 + [signal.default_int_handler]

    def test_a_scheduler_ends_without_unloading_what_is_imported(
        self, compat: Any, tmp_path: Path
    ) -> None:
        from pie_driver_sglang.frontends.sglang_server.compat import forking

        file = tmp_path / "written"

        def write(text: str) -> None:
            atexit.register(file.write_text, "unloaded")
            file.write_text(text)

        if not (pid := os.fork()):
            try:
                forking.run_and_exit(write, "done")
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert file.read_text() == "done"

    def test_sigterm_is_seen_soon(self, compat: Any) -> None:
        """And the rest of an end is SGLang's."""
        from pie_driver_sglang.frontends.sglang_server.compat import server_environment

        with mock.patch.dict(os.environ), server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import tokenizer_managers
        manager = object.__new__(tokenizer_managers.MsgpackManager)
        manager.gracefully_exit = False
        waits: list[float] = []
        ends: list[int] = []

        async def sleep(seconds: float) -> None:
            waits.append(seconds)
            manager.gracefully_exit = len(waits) == 3

        async def end(_: Any) -> None:
            ends.append(len(waits))

        with (
            mock.patch.object(tokenizer_managers.asyncio, "sleep", sleep),
            mock.patch.object(tokenizer_managers.TokenizerManager, "sigterm_watchdog", end),
        ):
            asyncio.run(manager.sigterm_watchdog())
        assert ends == [3]
        assert max(waits) <= 0.1

    @pytest.mark.parametrize(
        ("workers", "rid", "aborted"),
        [
            (1, "a", ["a_0", "a_1"]),
            (1, "b", ["b"]),
            (1, "c", []),
            (2, "a", ["a_0", "a_1", "a"]),
            (2, "c", ["c"]),
        ],
    )
    def test_an_abort_reaches_all_prompts_of_a_request(
        self, workers: int, rid: str, aborted: list[str], compat: Any
    ) -> None:
        """With SGLang's scheduler, too."""
        from pie_driver_sglang.frontends.sglang_server.compat import server_environment

        with mock.patch.dict(os.environ), server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import tokenizer_managers
        manager = object.__new__(tokenizer_managers.MsgpackManager)
        names = ("a_0", "a_1", "b")
        manager.rid_to_state = {
            name: SimpleNamespace(abort_requested=False, abort_sent=False, obj=SimpleNamespace())
            for name in names
        }
        manager.child_rid_to_logical_rid = {}
        manager.logical_rid_to_child_rids = {}
        manager.server_args = SimpleNamespace(tokenizer_worker_num=workers)
        manager.enable_metrics = False
        sent: list[str] = []
        manager._dispatch_to_scheduler = lambda request: sent.append(request.rid)
        # Where newer versions look for the settings.
        serving = mock.Mock(return_value=manager.server_args)
        where = "sglang.srt.managers.tokenizer_manager.get_serving"
        with mock.patch(where, serving, create=versions.IS_OLDEST):
            manager.abort_request(rid)
        assert sent == aborted


@pytest.mark.parametrize("key", [None, "", "team"])
def test_a_salt_keeps_prompts_apart(compat: Any, key: str | None) -> None:
    from pie_driver_sglang.frontends.sglang_server.compat.selection import endpoints_seam

    if adapter_version().sglang == "0.5.17":
        pytest.skip("SGLang itself puts the salt into the key")
    requests = [SimpleNamespace(cache_salt=s, extra_key=key) for s in ("a", "ab", None, "")]
    for each in requests:
        endpoints_seam().fold_salt(each)
    assert not any(each.cache_salt for each in requests)
    assert [each.extra_key for each in requests[2:]] == [key, key]
    assert len({each.extra_key for each in requests[:3]}) == 3


@versions.of_the_oldest("each token of a chunk has its own")
def test_each_token_of_a_chunk_has_its_own_alternatives() -> None:
    """A stream's chunk may have several tokens."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.utils import to_openai_style_logprobs

    from pie_driver_sglang.frontends.sglang_server.compat.selection import endpoints_seam

    tokens = [(-0.5, 7, "a"), (-0.25, 8, "b")]
    chunk = to_openai_style_logprobs(
        output_token_logprobs=tokens, output_top_logprobs=[[token] for token in tokens]
    )
    endpoints_seam().correct_top_logprobs()
    chat = object.__new__(OpenAIServingChat)
    found = chat._process_logprobs_tokens(chunk, use_token_index=False)
    assert [(one.token, one.top_logprobs[0].token) for one in found] == [("a", "a"), ("b", "b")]


def test_a_model_may_name_an_adapter_alone() -> None:
    """As vLLM's clients do; SGLang itself would answer by the base model."""
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

    from pie_driver_sglang.frontends.sglang_server.compat import openai_endpoints

    serving = object.__new__(OpenAIServingCompletion)
    serving.tokenizer_manager = SimpleNamespace(
        lora_ref_cache={"law": None, "base": None},
        served_model_name="base",
        server_args=SimpleNamespace(enable_lora=True),
    )
    assert openai_endpoints._RESOLVE(serving, "law", None) is None
    openai_endpoints.accept_adapter_names()
    named = {"law": "law", "base:law": "law", "base": None, "other": None}
    for model, adapter in named.items():
        assert serving._resolve_lora_path(model, None) == adapter
        assert serving._resolve_lora_path(model, "med") == (adapter or "med")
    serving.tokenizer_manager.server_args.enable_lora = False
    assert serving._resolve_lora_path("law", None) is None


@pytest.mark.parametrize("parameters", [None, {"properties": {"a": {"type": "string"}}}])
def test_the_call_of_a_named_tool_is_an_object(parameters: dict[str, Any] | None) -> None:
    """Nothing else, whatever its schema leaves open."""
    from sglang.srt.entrypoints.openai.protocol import Tool, ToolChoice
    from sglang.srt.function_call.utils import get_json_schema_constraint

    from pie_driver_sglang.frontends.sglang_server.compat.openai_endpoints import (
        correct_tool_schemas,
    )

    function = {"name": "f", "parameters": parameters}
    tool = Tool.model_validate({"type": "function", "function": function})
    choice = ToolChoice.model_validate({"type": "function", "function": {"name": "f"}})
    correct_tool_schemas()
    schema = get_json_schema_constraint([tool], choice)
    calls = jsonschema.Draft202012Validator(schema)
    assert calls.is_valid([{"name": "f", "parameters": {"a": "x"}}])
    assert not any(map(calls.is_valid, (["name"], [{"name": "f", "parameters": "a"}])))


def test_requests_wait_for_an_update_and_aborts_do_not(compat: Any) -> None:
    from sglang.srt.managers.io_struct import (
        AbortReq,
        BatchTokenizedGenerateReqInput,
        FlushCacheReqInput,
    )

    from pie_driver_sglang.frontends.sglang_server.held_requests import HeldRequests

    is_held = False
    held = HeldRequests(lambda: is_held)
    batch = BatchTokenizedGenerateReqInput(batch=[request(rid="b")])
    named = {
        "a": request(rid="a"),
        "b": batch,
        "probe": request(rid=f"{compat.PROBE_PREFIX}1"),
        "abort": AbortReq(rid="a"),
        "flush": FlushCacheReqInput(),
    }
    encoded = {name: compat.encode_message(message) for name, message in named.items()}
    encoded["broken"] = b"\xc1"
    names = {data: name for name, data in encoded.items()}

    def admitted(*asked: str) -> list[str]:
        return [names[data] for data in held.admit([encoded[name] for name in asked])]

    assert admitted("a", "flush") == ["a", "flush"]
    is_held = True
    assert admitted("a", "flush", "probe", "broken") == ["flush", "probe", "broken"]
    # It ends a request that runs, and the one that is held.
    assert admitted("abort", "b") == ["abort"]
    is_held = False
    assert admitted("a") == ["a", "abort", "b", "a"]
    assert admitted() == []


def test_the_vectors_are_of_the_installed_classes() -> None:
    """Those of the unit tests in Rust; `message_vectors.py --write` makes them anew."""
    out = scripts.run("tests/support/sglang_scripts/message_vectors.py")
    found = json.loads(out.splitlines()[-1])
    assert found == {"file": f"sglang_{adapter_version().sglang}.msgpack", "is_current": True}
