"""`pie-sglang serve`: SGLang's HTTP frontend on our scheduler, with real clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang import Engine
from pie_driver_sglang.frontends.sglang_server.flow_control import MOST_IN_FLIGHT
from support import versions
from support.models.tiny_models import POCKET
from support.process import fork_server
from support.process.inspection import command_line
from support.servers.pie_server import PROMPT, generate, refusal, running, state, wait_until
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_our_scheduler_serves(server: Server) -> None:
    info = json.loads(server.fetch("/server_info"))
    assert info["scheduler"] == info["internal_states"][0]["scheduler"] == "pie"
    assert info["max_req_input_len"] == 2042
    server.fetch("/health")
    server.fetch("/health_generate")
    [load] = json.loads(server.fetch("/v1/loads"))["loads"]
    assert load["gen_throughput"] == 0
    assert (load["num_running_reqs"], load["max_total_num_tokens"]) == (
        0,
        info["max_total_num_tokens"],
    )


class TestOpenai:
    def test_completion(self, client: Any, server: Server) -> None:
        answer = client.completions.create(
            model="m", prompt=PROMPT, temperature=0, max_tokens=12, n=1
        )
        assert answer.choices[0].text == generate(server)["text"]
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)

    def test_chat(self, client: Any) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        options: dict[str, Any] = {
            "model": "m",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 10,
        }
        whole = client.chat.completions.create(**options)
        chunks = list(
            client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        # A front end that is behind gets several tokens at once.
        assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 1
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 10

    def test_many_samples(self, client: Any) -> None:
        answer = client.completions.create(
            model="m", prompt=[PROMPT, "import os"], temperature=0, max_tokens=4, n=3
        )
        texts = [choice.text for choice in answer.choices]
        assert len(texts) == 6
        assert (len(set(texts[:3])), len(set(texts[3:]))) == (1, 1)
        sampled = client.completions.create(
            model="m", prompt=PROMPT, temperature=5, max_tokens=8, n=4
        )
        assert len({choice.text for choice in sampled.choices}) > 1

    def test_a_seed_fixes_the_samples(self, client: Any) -> None:
        def sample(seed: int) -> str:
            answer = client.completions.create(
                model="m", prompt=PROMPT, temperature=3, top_p=1, max_tokens=8, seed=seed
            )
            return str(answer.choices[0].text)

        assert sample(1) == sample(1)
        assert len({sample(seed) for seed in (0, 1, 2, 2**40)}) > 1

    @pytest.mark.parametrize("stream", [False, True])
    def test_stop(self, client: Any, server: Server, stream: bool) -> None:
        whole = generate(server)["text"]
        stop = whole[4:7]
        answer = client.completions.create(
            model="m",
            prompt=PROMPT,
            temperature=0,
            max_tokens=12,
            stop=[stop, "zzz"],
            stream=stream,
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
        assert (choices[-1].finish_reason, choices[-1].matched_stop) == ("stop", stop)


class TestGenerate:
    def test_a_stop_token(self, server: Server) -> None:
        whole = generate(server)
        token = whole["output_ids"][3]
        first = whole["output_ids"].index(token)
        found = generate(server, stop_token_ids=[token])
        assert found["output_ids"] == whole["output_ids"][: first + 1]
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
        ignored = generate(server, stop_token_ids=[token], ignore_eos=True)
        assert ignored["output_ids"] == whole["output_ids"]
        later = generate(server, stop_token_ids=[token], min_new_tokens=8)
        assert later["meta_info"]["completion_tokens"] >= 8

    def test_a_bias_decides(self, server: Server) -> None:
        plain = generate(server)["output_ids"]
        found = generate(server, logit_bias={"77": 100.0})["output_ids"]
        assert set(found) == {77} != set(plain)
        penalized = generate(server, frequency_penalty=2.0, logit_bias={"77": 3.0})["output_ids"]
        assert penalized not in (plain, found)

    def test_a_batch_of_tokens(self, server: Server) -> None:
        params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
        prompts = [[5, 9, 77], [8], list(range(40, 80))]
        batch = json.loads(
            server.fetch("/generate", {"input_ids": prompts, "sampling_params": params})
        )
        alone = [server.generate(prompt, 5)[0] for prompt in prompts]
        assert [answer["output_ids"] for answer in batch] == alone

    def test_a_prefix_is_reused_until_it_is_flushed(self, server: Server) -> None:
        server.flush()
        prompt = list(range(100, 164))
        assert server.generate(prompt, 2)[1] == 0
        assert server.generate(prompt, 2)[1] >= 48
        server.flush()
        assert server.generate(prompt, 2)[1] == 0

    def test_no_tokens(self, server: Server) -> None:
        found = generate(server, max_new_tokens=0)
        assert (found["text"], found["meta_info"]["completion_tokens"]) == ("", 0)

    def test_whole_floats_are_integers(self, server: Server) -> None:
        found = generate(server, max_new_tokens=3.0, top_k=5.0)
        assert found["meta_info"]["completion_tokens"] == 3

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"text": PROMPT, "return_sampling_mask": True}, "`return_sampling_mask`"),
            (
                {"text": PROMPT, "return_logprob": True, "logprob_start_len": 9},
                "logprob_start_len is 9",
            ),
            ({"input_ids": [5, 999_999]}, "token 999999 of `input_ids` is not in"),
            ({"text": PROMPT, "sampling_params": {"min_p": 1.5, "top_k": 3}}, "min_p"),
            # What SGLang's front end passes on as it is.
            (
                {"text": PROMPT, "sampling_params": {"json_schema": {"type": "object"}}},
                "`json_schema` is a map of 1, it must be a text",
            ),
            (
                {"text": PROMPT, "sampling_params": {"sampling_seed": 2**70}},
                "`sampling_seed` is 1180591620717411300000, it must be an integer"
                if versions.IS_OLDEST
                # SGLang's own check comes first.
                else "sampling_seed must be an integer",
            ),
            ({"text": PROMPT, "sampling_params": {"ignore_eos": 1}}, "must be true or false"),
            ({"text": PROMPT, "sampling_params": {"stop": {"a": 1}}}, "`stop` is a map of 1"),
            ({"text": PROMPT, "session_params": {"id": 5}}, "`session_params.id` is 5"),
            # What SGLang's front end has no answer for: the connection broke.
            ({"text": PROMPT, "sampling_params": {"stop_regex": "("}}, "unterminated subpattern"),
            ({"text": PROMPT, "sampling_params": []}, "`sampling_params` is a list of 0"),
            ({"text": PROMPT, "sampling_params": [{}]}, "`sampling_params` is a list of 1"),
            ({"text": [PROMPT] * 3, "sampling_params": [{}, {}]}, "for each of 3 prompts"),
            ({"text": PROMPT, "sampling_params": {"n": 1.5}}, "`n` is 1.5, it must be an integer"),
            ({"text": PROMPT, "sampling_params": {"n": 1e30}}, "it must be an integer"),
            ({"text": PROMPT, "sampling_params": {"n": 1025}}, "`n` is 1025, and one request has"),
            ({"text": [PROMPT], "sampling_params": [{"n": 1e9}]}, "has up to 1024 answers"),
            ({"text": PROMPT, "sampling_params": {"n": "2"}}, "`n` is '2', it must be an integer"),
            (
                {"text": PROMPT, "sampling_params": {"n": None}},
                "`n` is None, it must be an integer",
            ),
            ({"text": PROMPT, "rid": ["a"]}, "`rid` is a list"),
            ({"text": PROMPT, "sampling_params": {"max_new_tokens": "5"}}, "cannot be read"),
            ({"text": PROMPT, "sampling_params": {"min_p": "a"}}, "`sampling_params` cannot be"),
            # It had ended the server.
            ({"text": PROMPT, "custom_labels": {"team": "a"}}, "`custom_labels` has `team`"),
        ],
    )
    def test_a_refusal_names_the_parameter(
        self, server: Server, body: dict[str, Any], words: str
    ) -> None:
        status, text = refusal(server, body)
        assert status == 400
        assert words in json.loads(text)["error"]["message"]


class TestEnds:
    @pytest.mark.parametrize("beginning", ["job", "jo"])
    def test_request_ids_with_one_prefix_are_aborted_together(
        self, server: Server, beginning: str
    ) -> None:
        """With a request of that very name, and without."""
        with ThreadPoolExecutor(3) as pool:
            answers = [
                pool.submit(server.fetch, "/generate", {**server.body([7], 1900), "rid": rid})
                for rid in ("job", "job-2")
            ]
            wait_until(lambda: state(server)["running"] == 2, 60, "both run")
            server.fetch("/abort_request", {"rid": beginning})
            for answer in answers:
                meta = json.loads(answer.result(60))["meta_info"]
                assert meta["finish_reason"]["type"] == "abort"
                assert meta["completion_tokens"] < 1900
        wait_until(lambda: state(server)["running"] == 0, 60, "nothing runs")

    def test_a_client_that_goes_leaves_nothing_behind(self, server: Server) -> None:
        before = state(server)
        with requested(server, server.body([11], 2000, stream=True)) as connection:
            assert b"200 OK" in connection.recv(4096)
            assert connection.recv(4096)
        wait_until(lambda: state(server)["finished"] > before["finished"], 60, "it was ended")
        wait_until(lambda: state(server)["running"] == 0, 60, "nothing runs")
        after = state(server)
        assert after["finished"] == before["finished"] + 1
        assert after["output_tokens"] - before["output_tokens"] < 2000
        assert after["pages_free"] + after["pages_cached"] == after["pages_total"]


@contextlib.contextmanager
def requested(server: Server, body: dict[str, Any]) -> Iterator[socket.socket]:
    """The connection of a client that asked `/generate`, and goes at the end of the block."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


def test_a_client_that_goes_while_its_request_waits(forked_python: str, tmp_path: Path) -> None:
    """The front end forgets such a request at once, and would call an output of it an error."""
    flags = ("--scheduler", "pie", "--max-running-requests", "1")
    with running(tmp_path, *flags, python=forked_python) as (server, _):
        with contextlib.ExitStack() as others:
            # Enough to compute that the last one never begins.
            for number in range(3):
                body = server.body([11, number], 2000, stream=True)
                others.enter_context(requested(server, body))
            wait_until(lambda: state(server)["open_requests"] == 3, 60, "they are there")
            with requested(server, server.body([12], 50, stream=True, rid="given-up")):
                wait_until(lambda: state(server)["open_requests"] == 4, 60, "it waits")
            ended = "rid=given-up not found in rid_to_state"
            if versions.IS_OLDEST:
                wait_until(lambda: ended in server.log.read_text(), 60, "its end is known")
            wait_until(lambda: state(server)["open_requests"] == 3, 60, "it has ended")
            assert state(server)["running"] == 1
        wait_until(lambda: state(server)["open_requests"] == 0, 60, "nothing is left")
        assert not re.search("Received output for rid='?given-up", server.log.read_text())


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_holds_up_and_loses_nothing(server: Server, mode: str) -> None:
    expected, _ = server.generate([21, 22], 400)
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.extend(server.stream([21, 22], 400)))
    reader.start()
    wait_until(lambda: len(found) > 5, 60, "it streams")
    server.fetch("/pause_generation", {"mode": mode})

    def is_paused() -> bool:
        steps = state(server)["steps"]
        time.sleep(0.5)
        return bool(state(server)["steps"] == steps)

    wait_until(is_paused, 60, "it is paused")
    assert is_paused()
    # It has not ended, which would look the same.
    assert reader.is_alive()
    server.fetch("/continue_generation", {})
    reader.join(120)
    assert len(found[-1]) == 400
    assert found[-1] == expected


def test_a_front_end_that_is_behind_loses_nothing(
    server: Server, started: tuple[Server, subprocess.Popen[bytes]]
) -> None:
    """It gets many tokens in one output then; see `test_flow.py`."""
    expected, _ = server.generate([41, 42, 43], 600)
    family = fork_server.family(started[1].pid)
    [detokenizer] = [each for each in family if "detokenizer" in " ".join(command_line(each)[:1])]
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.extend(server.stream([41, 42, 43], 600)))
    reader.start()
    wait_until(lambda: len(found) > 5, 60, "it streams")
    detokenizer.suspend()
    try:
        steps, since = state(server)["steps"], time.monotonic()
        more = steps + MOST_IN_FLIGHT + 100
        wait_until(lambda: state(server)["steps"] > more, 60, "it goes on")
        steps_per_s = (more - steps) / (time.monotonic() - since)
        # No more than that, and not none: they are counted.
        assert all(state(server)["outputs_in_flight"] <= MOST_IN_FLIGHT for _ in range(10))
        wait_until(
            lambda: state(server)["outputs_in_flight"] == MOST_IN_FLIGHT,
            10,
            "it waits for an acknowledgement",
        )
    finally:
        detokenizer.resume()
    reader.join(120)
    assert found[-1] == expected
    # One is sent every half second all the same, on a busy machine with the tokens of few steps.
    sizes = [len(tokens) for tokens in found]
    largest = max(after - before for before, after in itertools.pairwise(sizes))
    assert largest > min(50, steps_per_s / 4)
    wait_until(lambda: state(server)["outputs_in_flight"] == 0, 60, "all are acknowledged")


@pytest.mark.usefixtures("forks")
def test_streams_at_once_have_the_tokens_of_the_offline_engine(server: Server) -> None:
    prompts = [[20 + number, 7, 300 + 11 * number] for number in range(32)]
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    with ThreadPoolExecutor(32) as pool:
        streams = list(pool.map(lambda prompt: list(server.stream(prompt, 24)), prompts))
    with Engine(model_path=str(POCKET), device="cpu", skip_tokenizer_init=True) as engine:
        expected = engine.generate(input_ids=prompts, sampling_params=params)
    assert [stream[-1] for stream in streams] == [answer["output_ids"] for answer in expected]
    # A front end that is behind gets several tokens at once.
    assert max(map(len, streams)) > 3


def test_many_openai_streams(server: Server) -> None:
    openai = pytest.importorskip("openai")

    async def one(client: Any, number: int) -> str:
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": f"Say {number % 4}"}],
            max_tokens=12,
            temperature=0,
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def request_all() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    texts = asyncio.run(request_all())
    assert all(texts)
    assert [texts[number % 4] for number in range(16)] == texts


def test_a_driver_that_is_killed_loses_nothing(server: Server) -> None:
    expected, _ = server.generate([31, 32, 33], 200)
    before = state(server)
    [driver] = before["driver_pids"]
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.extend(server.stream([31, 32, 33], 200)))
    reader.start()
    wait_until(lambda: len(found) > 10, 60, "it streams")
    os.kill(driver, signal.SIGKILL)
    reader.join(400)
    assert found[-1] == expected
    after = state(server)
    assert after["restarts"] >= 1
    assert after["driver_pids"] != [driver]
    assert after["active"] == before["active"]
