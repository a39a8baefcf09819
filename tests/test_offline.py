"""The offline engine without drivers: text, tokens, parameters, arguments, outputs."""

from __future__ import annotations

import ast
import asyncio
import gc
import importlib.util
import itertools
import json
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pie_driver_sglang
from engine_hostile import JUNK
from pie_driver_sglang import _core
from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.frontends.common import arguments as engine_arguments
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer, StopFilter, overlap, render
from pie_driver_sglang.frontends.offline.outputs import SequenceOutput
from pie_driver_sglang.frontends.offline.requests import (
    Call,
    NewRequest,
    OpenRequests,
    OutputQueue,
    batched_by_size,
)
from pie_driver_sglang.frontends.offline.sampling import (
    REFUSED_PARAMETERS,
    SERVED_PARAMETERS,
    SamplingParameters,
    parse_sampling,
)
from pie_driver_sglang.observability.active import ActiveFile
from tiny_models import POCKET


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(POCKET)


class TestTokenizer:
    @given(text=st.text(max_size=60))
    def test_a_text_comes_back(self, tokenizer: ModelTokenizer, text: str) -> None:
        (tokens,) = tokenizer.encode([text])
        assert tokenizer.decode(tokens) == text

    @given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 4), max_size=40))
    def test_a_stream_is_the_text_and_has_no_cut_characters(
        self, tokenizer: ModelTokenizer, text: str, cuts: list[int]
    ) -> None:
        (tokens,) = tokenizer.encode([text])
        stream = tokenizer.stream([1, 2, 3])
        pieces = []
        for size in [*cuts, *[1] * len(tokens)]:
            pieces.append(stream.push(tokens[:size]))
            tokens = tokens[size:]
        # U+FFFD itself cannot be told from a character that is not complete.
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.push([], is_last=True) == text

    def test_what_is_incomplete_at_the_end_is_shown(self, tokenizer: ModelTokenizer) -> None:
        (tokens,) = tokenizer.encode(["\N{GRINNING FACE}"])
        assert len(tokens) > 1
        stream = tokenizer.stream([])
        assert stream.push(tokens[:1]) == ""
        assert "\ufffd" in stream.push([], is_last=True)

    def test_special_tokens_are_left_out_unless_they_are_wanted(
        self, tokenizer: ModelTokenizer
    ) -> None:
        end = tokenizer.token("<|im_end|>")
        assert end is not None
        assert end in tokenizer.end_tokens
        assert tokenizer.stream([]).push([end], is_last=True) == ""
        assert tokenizer.stream([], skip_special=False).push([end], is_last=True) == "<|im_end|>"

    @given(text=st.text(max_size=60))
    def test_the_vocabulary_adds_up_to_the_text(self, tokenizer: ModelTokenizer, text: str) -> None:
        (tokens,) = tokenizer.encode([text])
        vocabulary = _vocabulary(tokenizer)
        assert b"".join(vocabulary[token] for token in tokens) == text.encode()

    def test_special_tokens_add_nothing(self, tokenizer: ModelTokenizer) -> None:
        vocabulary = _vocabulary(tokenizer)
        assert {vocabulary[token] for token in tokenizer.end_tokens} == {b""}

    def test_a_conversation_follows_the_template(self, tokenizer: ModelTokenizer) -> None:
        text = tokenizer.chat([{"role": "user", "content": "hi"}])
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        tokens = tokenizer.encode_plain(text)
        assert tokens[0] == tokenizer.token("<|im_start|>")
        assert tokenizer.decode(tokens, skip_special=False) == text

    def test_other_ways_to_keep_a_template(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").symlink_to(POCKET / "tokenizer.json")
        assert not ModelTokenizer(tmp_path).can_chat
        with pytest.raises(ConfigError, match="no chat template"):
            ModelTokenizer(tmp_path).chat([])
        listed = [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}]
        config = {"chat_template": listed, "eos_token": {"content": "<|im_end|>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        found = ModelTokenizer(tmp_path)
        assert found.chat([{"role": "user", "content": "hi"}]) == "hi<|im_end|>"
        assert found.end_tokens == {found.token("<|im_end|>")}
        (tmp_path / "chat_template.jinja").write_text("file")
        assert ModelTokenizer(tmp_path).chat([]) == "file"

    def test_templates_run_in_a_sandbox(self) -> None:
        with pytest.raises(ConfigError, match="chat template refuses"):
            render("{{ ''.__class__.__mro__ }}")
        with pytest.raises(ConfigError, match="roles must alternate"):
            render("{{ raise_exception('roles must alternate') }}")
        assert render("{{ {'ä': 1} | tojson }}") == '{"ä": 1}'

    @pytest.mark.parametrize("text", [None, "{", "[]"])
    def test_a_folder_without_a_tokenizer_is_refused(
        self, tmp_path: Path, text: str | None
    ) -> None:
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer\.json") as refusal:
            ModelTokenizer(tmp_path)
        assert refusal.value.hint


_VOCABULARIES: dict[int, list[bytes]] = {}


def _vocabulary(tokenizer: ModelTokenizer) -> list[bytes]:
    return _VOCABULARIES.setdefault(id(tokenizer), tokenizer.vocabulary())


class TestStops:
    @given(
        text=st.text("abc", max_size=30),
        stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
        cuts=st.lists(st.integers(1, 5), max_size=30),
    )
    def test_nothing_of_a_stop_string_is_shown_before_the_end(
        self, text: str, stops: list[str], cuts: list[int]
    ) -> None:
        # As a runtime does it: the text ends with the piece in which a stop string is complete.
        held, shown, rest = StopFilter(stops), "", text
        seen, matched = "", None
        for size in [*cuts, *[1] * len(text)]:
            piece, rest = rest[:size], rest[size:]
            seen += piece
            shown += held.push(piece)
            assert text.startswith(shown)
            found = [(seen.find(stop), stop) for stop in stops if stop in seen]
            if found:
                _, matched = min(found)
                break
        shown += held.finish(matched)
        if matched is None:
            assert shown == text
        else:
            assert shown == seen[: seen.find(matched)]
            assert not any(stop in shown for stop in stops)

    @pytest.mark.parametrize(
        ("text", "stop", "length"),
        [("abc", "cd", 1), ("abc", "x", 0), ("abcd", "cd", 2), ("acdb", "cd", 3), ("aa", "aab", 2)],
    )
    def test_the_overlap(self, text: str, stop: str, length: int) -> None:
        assert overlap(text, stop) == length


class TestSampling:
    def test_the_defaults_are_sglangs(self) -> None:
        assert parse_sampling(None) == SamplingParameters()
        assert (
            parse_sampling({name: None for name in SERVED_PARAMETERS - {"max_new_tokens"}})
            == SamplingParameters()
        )
        assert SamplingParameters().runtime_arguments(1000)["max_new_tokens"] == 128
        assert SamplingParameters().runtime_arguments(100)["max_new_tokens"] == 100

    def test_every_parameter_of_sglang_is_known(self) -> None:
        spec = importlib.util.find_spec("sglang")
        assert spec is not None and spec.submodule_search_locations
        folder = Path(next(iter(spec.submodule_search_locations)))
        tree = ast.parse((folder / "srt" / "sampling" / "sampling_params.py").read_text())
        (found,) = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
        ]
        fields = {
            node.target.id
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        internal = {
            "is_normalized",
            "stop_regex_max_len",
            "stop_regex_strs",
            "stop_str_max_len",
            "stop_strs",
        }
        assert fields == SERVED_PARAMETERS | REFUSED_PARAMETERS.keys() | internal
        assert not SERVED_PARAMETERS & REFUSED_PARAMETERS.keys()

    def test_no_limit_is_the_room_of_the_context(self) -> None:
        assert (
            parse_sampling({"max_new_tokens": None}).runtime_arguments(77)["max_new_tokens"] == 77
        )

    def test_all_samplers_go_together(self) -> None:
        given = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "sampling_seed": 0}
        penalties = {"frequency_penalty": -2, "presence_penalty": 0.5, "repetition_penalty": 2}
        found = parse_sampling({**given, **penalties, "logit_bias": {"7": 1, 8: -2.5}})
        submitted = found.runtime_arguments(100)
        assert submitted["seed"] == 0
        assert submitted["logit_bias"] == [(7, 1.0), (8, -2.5)]
        assert [submitted[name] for name in penalties] == [-2.0, 0.5, 2.0]

    def test_stops_may_be_one_or_several(self) -> None:
        assert parse_sampling({"stop": "x"}).stop == ("x",)
        assert parse_sampling({"stop": ["x", "", "y"]}).stop == ("x", "y")
        assert parse_sampling({"stop_token_ids": {7}}).stop_token_ids == (7,)

    @pytest.mark.parametrize("name", sorted(REFUSED_PARAMETERS))
    def test_what_is_not_served_is_refused_by_name(self, name: str) -> None:
        neutral, _ = REFUSED_PARAMETERS[name]
        assert parse_sampling({name: neutral}) == SamplingParameters()
        assert parse_sampling({name: None}) == SamplingParameters()
        with pytest.raises(ConfigError, match=f"`{name}` is not served: ") as refusal:
            parse_sampling({name: 0.5})
        assert f"remove `{name}`" in refusal.value.hint

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"max_tokens": 3}, "no sampling parameter 'max_tokens'"),
            ({"temperature": "hot"}, "`temperature` is 'hot'"),
            ({"top_k": True}, "`top_k` is True"),
            ({"min_new_tokens": 2**63}, "`min_new_tokens` is 9223372036854775808"),
            ({"temperature": 10**400}, "`temperature` is 1000"),
            ({"stop_token_ids": [2**70]}, "`stop_token_ids` is"),
            ({"sampling_seed": -1}, "`sampling_seed` is -1"),
            ({"logit_bias": [3]}, "`logit_bias` is [3]"),
            ({"logit_bias": {"x": 1}}, "`logit_bias` is {'x': 1}"),
            ({"ignore_eos": 1}, "`ignore_eos` is 1"),
            ({"stop": 3}, "`stop` is 3"),
            ({"stop_token_ids": ["a"]}, "`stop_token_ids` is"),
        ],
    )
    def test_wrong_values_are_named(self, given: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            parse_sampling(given)
        assert text in str(refusal.value)
        assert refusal.value.hint


class TestArguments:
    def parse(self, **given: Any) -> engine_arguments.EngineArguments:
        return parse_arguments({"model_path": str(POCKET), "device": "cpu", **given})

    def test_the_defaults(self) -> None:
        found = self.parse()
        assert found.runtime["devices"] == ["cpu"]
        assert found.runtime["dtype"] == "float32"
        assert found.runtime["options"] == {"trust_remote_code": False}
        assert found.tokenizer == POCKET

    def test_names_of_sglang_reach_their_places(self) -> None:
        found = self.parse(
            tp_size=2,
            dp_size=2,
            random_seed=7,
            page_size=32,
            schedule_policy="lpm",
            chunked_prefill_size=512,
            max_total_tokens=3200,
            disable_cuda_graph=None,
            quantization="fp8",
            speculative_algorithm="NGRAM",
            speculative_num_draft_tokens=6,
            skip_tokenizer_init=True,
        )
        runtime = found.runtime
        assert runtime["devices"] == ["cpu", "cpu:1", "cpu:2", "cpu:3"]
        assert (runtime["replicas"], runtime["tensor_parallel_size"]) == (2, 2)
        assert runtime["seed"] == 7
        assert runtime["schedule_policy"] == "lpm"
        assert runtime["chunked_prefill_size"] == 512
        assert runtime["max_total_pages"] == 100
        assert runtime["options"] == {
            "page_size": 32,
            "chunked_prefill_size": 512,
            "quantization": "fp8",
            "spec_ngram_enabled": True,
            "spec_ngram_num_drafts": 6,
            "trust_remote_code": False,
        }
        assert found.speculates
        assert found.tokenizer is None

    def test_steps_are_as_long_as_a_pass_of_the_driver(self) -> None:
        assert "chunked_prefill_size" not in self.parse().runtime
        found = self.parse(chunked_prefill_size=-1)
        assert "chunked_prefill_size" not in found.runtime
        assert found.runtime["options"]["chunked_prefill_size"] == -1
        on_cuda = self.parse(devices=["cuda:0"])
        assert on_cuda.runtime["chunked_prefill_size"] == 16_384
        assert "chunked_prefill_size" not in on_cuda.runtime["options"]

    @pytest.mark.parametrize("given", [{}, {"trust_remote_code": True}])
    def test_a_repositorys_code_runs_only_if_the_caller_says_so(
        self, given: dict[str, Any]
    ) -> None:
        assert self.parse(**given).runtime["options"]["trust_remote_code"] is bool(given)

    def test_gpus_are_numbered_as_sglang_does(self) -> None:
        found = self.parse(device="cuda", tp_size=2, base_gpu_id=4, gpu_id_step=2)
        assert found.runtime["devices"] == ["cuda:4", "cuda:6"]
        assert found.runtime["dtype"] == "bfloat16"
        assert self.parse(device=None, devices=["cuda:3"]).runtime["devices"] == ["cuda:3"]

    @pytest.mark.parametrize("has_gpu", [False, True])
    def test_the_device_is_a_gpu_where_there_is_one(
        self, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_arguments, "has_gpu", lambda: has_gpu)
        assert self.parse(device=None).runtime["devices"] == (["cuda:0"] if has_gpu else ["cpu"])

    @pytest.mark.parametrize("name", sorted(SERVER_ARGS))
    def test_every_argument_of_sglang_is_served_or_refused_with_a_reason(self, name: str) -> None:
        known = {*engine_arguments.SCHEDULER, *engine_arguments.READ}
        owner = SERVER_ARGS[name].owner
        if name in known or owner in (None, "key"):
            return
        with pytest.raises(ConfigError, match=f"`{name}` = ") as refusal:
            self.parse(**{name: "x"})
        assert "is not served: " in str(refusal.value)
        assert "the driver decides it" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"modelpath": "x"}, "no argument 'modelpath'"),
            ({"max_model_len": 4}, "no argument 'max_model_len'"),
            ({"tp_size": 0}, "`tp_size` is 0"),
            ({"device": "tpu"}, "`device` is 'tpu'"),
            ({"devices": ["cpu", "cpu:1"]}, "`tp_size` times `dp_size` is 1"),
            ({"dtype": "int8"}, "`dtype` is 'int8'"),
            ({"page_size": 0}, "option `page_size` is 0"),
            ({"context_length": 10**6}, "option `context_length` is 1000000"),
            ({"speculative_algorithm": "EAGLE"}, "`speculative_algorithm` is 'EAGLE'"),
            ({"preferred_sampling_params": "{"}, "`preferred_sampling_params` is '{'"),
            ({"model_path": "/nowhere"}, "the model '/nowhere' is neither"),
            ({"model_path": None}, "`model_path` is missing"),
            ({"tp_size": 3}, "attention heads"),
        ],
    )
    def test_wrong_arguments_are_named(self, given: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            self.parse(**given)
        assert text in str(refusal.value)
        assert refusal.value.hint

    @given(
        name=st.sampled_from(
            sorted({*engine_arguments.READ, *engine_arguments.SCHEDULER, *engine_arguments.OWN})
        ),
        value=JUNK,
    )
    def test_any_value_of_an_argument_is_taken_or_refused_in_a_line(
        self, name: str, value: Any
    ) -> None:
        away = ConfigError("there is no such repository", "name another")
        with mock.patch.object(engine_arguments, "fetch_snapshot", side_effect=away):
            try:
                self.parse(**{name: value})
            except ConfigError as error:
                assert len(str(error).splitlines()) == 1
                assert str(error)

    def test_the_native_runtime_knows_every_name(self) -> None:
        names = {*engine_arguments.SCHEDULER, *engine_arguments.OWN}
        assert names <= set(_core.Runtime.setting_names())


def output(request: int, tokens: Sequence[int], finish: str | None = None, **more: Any) -> Any:
    """An output of the native runtime."""
    values = {
        "request": request,
        "sample": 0,
        "token_ids": list(tokens),
        "finish_reason": finish,
        "stop_token": None,
        "stop_string": None,
        "stop_regex": None,
        "error": None,
        "cached_tokens": 0,
    }
    return SimpleNamespace(**{**values, **more})


class TestAnswer:
    PROMPT = (5, 6)

    def answer(
        self, tokenizer: ModelTokenizer, streams: bool = False, **sampling: Any
    ) -> SequenceOutput:
        return SequenceOutput("name", self.PROMPT, parse_sampling(sampling), tokenizer, streams)

    @pytest.mark.parametrize("streams", [False, True])
    def test_an_end_by_length(self, tokenizer: ModelTokenizer, streams: bool) -> None:
        (tokens,) = tokenizer.encode(["def main"])
        answer = self.answer(tokenizer, streams)
        answer.add(output(1, tokens[:1]))
        assert not answer.is_finished
        answer.add(output(1, tokens[1:], "length", cached_tokens=1))
        answer.finish_text()
        found = answer.as_dict()
        assert found["text"] == "def main"
        assert found["output_ids"] == tokens
        meta = found["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": len(tokens)}
        assert (meta["id"], meta["prompt_tokens"], meta["cached_tokens"]) == ("name", 2, 1)
        assert meta["completion_tokens"] == len(tokens)
        assert meta["e2e_latency"] > 0

    @pytest.mark.parametrize("streams", [False, True])
    @pytest.mark.parametrize("no_stop_trim", [False, True])
    def test_an_end_by_a_token(
        self, tokenizer: ModelTokenizer, streams: bool, no_stop_trim: bool
    ) -> None:
        tokens = tokenizer.encode(["a b"])[0]
        answer = self.answer(tokenizer, streams, no_stop_trim=no_stop_trim)
        answer.add(output(1, tokens, "stop", stop_token=tokens[-1]))
        answer.finish_text()
        found = answer.as_dict()
        expected = tokenizer.decode(tokens if no_stop_trim else tokens[:-1])
        assert found["text"] == expected
        assert found["output_ids"] == tokens
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[-1]}

    @pytest.mark.parametrize("streams", [False, True])
    @pytest.mark.parametrize("no_stop_trim", [False, True])
    def test_an_end_by_a_text(
        self, tokenizer: ModelTokenizer, streams: bool, no_stop_trim: bool
    ) -> None:
        (tokens,) = tokenizer.encode(["return self.value"])
        stops = {"stop": ["never", "lf.v"], "no_stop_trim": no_stop_trim}
        answer = self.answer(tokenizer, streams, **stops)
        for token in tokens[:-1]:
            answer.add(output(1, [token]))
            if streams and not no_stop_trim:
                assert "return self".startswith(answer.as_dict()["text"])
        answer.add(output(1, tokens[-1:], "stop", stop_string=1))
        answer.finish_text()
        found = answer.as_dict()
        assert found["text"] == ("return self.v" if no_stop_trim else "return se")
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "lf.v"}

    def test_an_error_is_told(self, tokenizer: ModelTokenizer) -> None:
        answer = self.answer(tokenizer)
        answer.add(output(1, [], "error", error="the queue is full"))
        finish = answer.as_dict()["meta_info"]["finish_reason"]
        assert finish == {"type": "abort", "message": "the queue is full"}

    def test_without_a_tokenizer_there_is_no_text(self) -> None:
        answer = SequenceOutput("name", self.PROMPT, SamplingParameters(), None, False)
        answer.add(output(1, [3], "length"))
        answer.finish_text()
        assert "text" not in answer.as_dict()


class FakeRuntime:
    """Requests and outputs by hand."""

    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self.submitted: list[Any] = []
        self.aborted: list[int] = []
        self.is_shut = threading.Event()

    def submit(self, tokens: Any, **parameters: Any) -> int:
        self.submitted.append((tokens, parameters))
        return 0

    def submit_all(self, requests: Any) -> list[int]:
        placed = [parameters["into"] is requests for _, parameters in self.submitted]
        return [number for number, here in enumerate(placed, 1) if here]

    def abort(self, number: int) -> None:
        self.aborted.append(number)

    def poll(self, timeout_s: float) -> list[Any]:
        try:
            return self.outputs.get(timeout=0.05)
        except queue.Empty:
            return []

    def shutdown(self) -> None:
        self.is_shut.set()


class TestRequests:
    ONE = NewRequest([1], 1, {"n": 1})
    TWO = NewRequest([2], 2, {"n": 2})

    def test_outputs_reach_their_calls(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        one, other = Call(requests), Call(requests)
        one.submit([self.ONE])
        other.submit([self.TWO])
        runtime.outputs.put(
            [
                output(2, [7], "length", sample=1),
                output(1, [8], "length"),
                output(99, [9], "length"),
                output(2, [6], "length"),
            ]
        )
        assert [event.output.token_ids for event in other.events()] == [[7], [6]]
        assert [event.output.token_ids for event in one.events()] == [[8]]
        assert one.is_over
        assert other.is_over
        requests.close()
        assert runtime.is_shut.is_set()
        assert not runtime.aborted

    def test_what_a_caller_leaves_is_aborted(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        with Call(requests) as call:
            call.submit([self.ONE, self.ONE])
            runtime.outputs.put([output(1, [5], "length")])
            next(call.events())
        assert runtime.aborted == [2]
        requests.close()

    def test_requests_are_numbered_through_over_several_parts(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        call = Call(requests)
        call.submit([self.ONE, self.TWO])
        call.submit([self.ONE])
        runtime.outputs.put([output(3, [7], "length"), output(2, [8])])
        events = call.events()
        assert [next(events).request for _ in range(2)] == [2, 1]
        call.abort()
        assert runtime.aborted == [1, 2]
        requests.close()

    def test_a_shutdown_ends_calls_with_an_error(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        call = Call(requests)
        call.submit([self.ONE])
        threading.Timer(0.1, requests.close).start()
        with pytest.raises(StartError, match="the engine has ended"):
            next(call.events())
        with pytest.raises(StartError, match="is shut down"):
            call.submit([self.ONE])
        requests.close()

    def test_a_loop_that_closes_harms_no_other_call(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        left, other = Call(requests), Call(requests)
        left.submit([self.ONE])
        other.submit([self.TWO])
        loop = asyncio.new_event_loop()
        notified: list[int] = []

        def wake() -> None:
            # As where the loop is closed between a look and a call.
            notified.append(1)
            loop.close()
            loop.call_soon_threadsafe(lambda: None)

        with pytest.raises(RuntimeError, match="closed"):
            left._outputs.notify(wake)
        runtime.outputs.put([output(1, [8]), output(2, [6], "length")])
        runtime.outputs.put([output(1, [9]), output(2, [7], "length", sample=1)])
        assert [event.output.token_ids for event in other.events()] == [[6], [7]]
        assert len(notified) == 2, "it is not called again"
        later = Call(requests)
        later.submit([self.ONE])
        runtime.outputs.put([output(3, [5], "length")])
        assert [event.output.token_ids for event in later.events()] == [[5]]
        requests.close()

    def test_a_call_that_nobody_refers_to_is_aborted(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        call = Call(requests)
        call.submit([self.ONE, self.TWO])
        events = call.events()
        runtime.outputs.put([output(2, [5])])
        next(events)
        del call, events
        gc.collect()
        assert runtime.aborted == [1, 2]
        assert not requests._queues
        requests.close()

    def test_a_poll_that_fails_ends_all_calls_and_the_drivers(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        call = Call(requests)
        call.submit([self.ONE])
        runtime.outputs.put(cast(Any, None))
        with pytest.raises(StartError, match="the engine has ended"):
            next(call.events())
        with pytest.raises(StartError, match="is shut down"):
            Call(requests).submit([self.ONE])
        assert "all calls end" in caplog.text
        assert not runtime.is_shut.is_set()
        requests.close()
        assert runtime.is_shut.is_set()

    def test_a_shutdown_within_a_submission_does_not_wait_for_it(self) -> None:
        """As of a signal handler, which interrupts the thread that hands requests in."""

        class Interrupted(FakeRuntime):
            def submit_all(self, requests: Any) -> list[int]:
                found = super().submit_all(requests)
                # Its thread waits for the lock that this one holds.
                self.outputs.put([output(99, [1])])
                ours.close()
                return found

        runtime = Interrupted()
        ours = OpenRequests(runtime)
        with pytest.raises(StartError, match="is shut down"):
            Call(ours).submit([self.ONE])
        assert not ours._queues
        ours.close()
        assert not ours._thread.is_alive()

    def test_ctrl_c_in_a_submission_leaves_no_request(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)

        def register(numbers: Iterable[int]) -> None:
            assert list(numbers) == [1]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            requests.submit([self.ONE], OutputQueue(), register, streams=False)
        assert runtime.aborted == [1]
        assert not requests._queues
        requests.close()

    def test_a_fork_cannot_use_it_and_ends_nothing(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        call = Call(requests)
        call.submit([self.ONE])
        with mock.patch.object(os, "getpid", return_value=os.getpid() + 1):
            with pytest.raises(StartError, match="this is a fork of it") as refusal:
                next(call.events())
            assert "spawn" in refusal.value.hint
            with pytest.raises(StartError, match="this is a fork of it"):
                Call(requests).submit([self.ONE])
            call.abort()
            requests.close()
        assert not runtime.aborted
        assert not runtime.is_shut.is_set()
        requests.close()


@given(sizes=st.lists(st.integers(0, 9), max_size=30), most=st.integers(1, 20))
def test_parts_are_as_large_as_can_be_and_keep_the_order(sizes: list[int], most: int) -> None:
    parts = list(batched_by_size(sizes, int, most))
    assert [size for part in parts for size in part] == sizes
    assert all(part and (sum(part) <= most or len(part) == 1) for part in parts)
    assert all(sum(part) + later[0] > most for part, later in itertools.pairwise(parts))


def test_an_engine_that_nobody_refers_to_is_shut_down() -> None:
    """With a runtime by hand: as a notebook's cell that is run again leaves it."""
    runtime = FakeRuntime()
    engine = object.__new__(pie_driver_sglang.Engine)
    engine._attach(runtime, OpenRequests(runtime), ActiveFile())
    thread = engine._requests._thread
    # A cycle, as tracebacks and notebooks make them.
    engine.self = engine  # type: ignore[attr-defined]
    del engine
    gc.collect()
    assert runtime.is_shut.is_set()
    assert not thread.is_alive()


def test_the_engine_is_the_packages_own() -> None:
    assert pie_driver_sglang.Engine.__module__ == "pie_driver_sglang.frontends.offline.engine"
