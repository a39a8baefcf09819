"""Processes of SGLang's frontend, and what is corrected in its classes."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jsonschema
import pytest

from pie_driver_sglang.config.sglang_versions import adapter_version
from pie_driver_sglang.fork_server.starter import ENABLED
from support import versions
from support.servers.sglang_frontend import (
    generation as request,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    # Of SGLang's own modules.
    pytest.mark.filterwarnings("ignore"),
]


class TestProcesses:
    """The processes that SGLang's server starts."""

    def test_they_are_forked(self, compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.entrypoints import engine

        from pie_driver_sglang.frontends.sglang_server.compat import forking
        from pie_driver_sglang.frontends.sglang_server.compat.front_forks import ForkingContext

        own = multiprocessing.get_start_method()
        early = ForkingContext()
        monkeypatch.delenv(ENABLED, raising=False)
        with forking.forks("cuda", early):
            assert engine.mp is multiprocessing
        monkeypatch.setenv(ENABLED, "1")
        halted = threading.Event()
        thread = threading.Thread(target=halted.wait)
        thread.start()
        with forking.forks("cpu"):
            assert engine.mp is multiprocessing, "a thread may hold a lock"
        with forking.forks("cuda", early):
            assert engine.mp is early
            engine.mp.set_start_method("spawn", force=True)
        halted.set()
        thread.join()
        # This process may have others.
        alone = mock.patch.object(forking, "_threads", return_value=1)
        with alone, forking.forks("cuda", early):
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
    from pie_driver_sglang.frontends.sglang_server.compat.selection import endpoints_compat

    if adapter_version().sglang == "0.5.17":
        pytest.skip("SGLang itself puts the salt into the key")
    requests = [SimpleNamespace(cache_salt=s, extra_key=key) for s in ("a", "ab", None, "")]
    for each in requests:
        endpoints_compat().fold_salt(each)
    assert not any(each.cache_salt for each in requests)
    assert [each.extra_key for each in requests[2:]] == [key, key]
    assert len({each.extra_key for each in requests[:3]}) == 3


@versions.of_the_oldest("each token of a chunk has its own")
def test_each_token_of_a_chunk_has_its_own_alternatives() -> None:
    """A stream's chunk may have several tokens."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.utils import to_openai_style_logprobs

    from pie_driver_sglang.frontends.sglang_server.compat.selection import endpoints_compat

    tokens = [(-0.5, 7, "a"), (-0.25, 8, "b")]
    chunk = to_openai_style_logprobs(
        output_token_logprobs=tokens, output_top_logprobs=[[token] for token in tokens]
    )
    endpoints_compat().correct_top_logprobs()
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


def test_prompts_of_an_embedding_request_have_its_name_and_priority() -> None:
    """SGLang itself fails an assertion on the name, and 0.5.17 drops the priority."""
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    from pie_driver_sglang.frontends.sglang_server.compat import prompt_lists

    def named(**prompts: Any) -> list[tuple[Any, Any]]:
        request = EmbeddingReqInput(rid="a", priority=-7, **prompts)
        request.normalize_batch_and_arguments()
        each = [request] if request.is_single else [request[i] for i in range(request.batch_size)]
        return [(one.rid, one.priority) for one in each]

    with pytest.raises(AssertionError, match="rid should be a list"):
        prompt_lists._NORMALIZE(EmbeddingReqInput(rid="a", text=["x", "y"]))
    prompt_lists.correct_embedding_lists()
    assert named(text=["x", "y"]) == named(input_ids=[[5], [6]]) == [("a_0", -7), ("a_1", -7)]
    assert named(text=["x"]) == named(text="x") == named(input_ids=[5]) == [("a", -7)]


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
