"""`Engine` with real drivers: greedy tokens in any order, streams, aborts, commands."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.offline import prompts as prompts_module
from pie_driver_sglang.frontends.offline.engine import Engine
from pie_driver_sglang.observability.batch_log import start_batch_log
from support.models.pocket_prompts import GREEDY, TOKENS, WORDS, prompts
from support.models.reference import Reference
from support.models.tiny_models import POCKET
from support.servers.pie_server import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


def check(reference: Reference, found: Sequence[dict[str, Any]], texts: Sequence[str]) -> None:
    """Each answer has the tokens that transformers gives."""
    decided = 0
    for answer, text in zip(found, texts, strict=True):
        (prompt,) = engine_tokens([text])
        tokens = answer["output_ids"]
        assert len(tokens) == TOKENS
        decided += reference.check([*prompt, *tokens[:-1]], tokens)
    assert decided > 0.9 * TOKENS * len(texts)


def engine_tokens(texts: Sequence[str]) -> list[list[int]]:
    from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer

    return ModelTokenizer(POCKET).encode(texts)


def test_a_batch_has_the_tokens_of_transformers(engine: Engine, reference: Reference) -> None:
    texts = prompts(100, seed=1)
    found = engine.generate(texts, GREEDY)
    check(reference, found, texts)
    counts = idle_counters(engine)
    # Prefixes were found, and the pool was too small for all.
    assert counts["cached_tokens"] > 0
    assert counts["retractions"] > 0


def test_any_order_of_arrival_gives_the_same(engine: Engine, reference: Reference) -> None:
    # Those of the batch, so that the reference computes them once.
    texts = prompts(100, seed=1)
    order = list(range(len(texts)))
    random.Random(3).shuffle(order)
    found: dict[int, dict[str, Any]] = {}

    def request(mine: Sequence[int]) -> None:
        for index in mine:
            time.sleep(random.Random(index).random() / 50)
            found[index] = engine.generate(texts[index], GREEDY)

    threads = [threading.Thread(target=request, args=(order[first::8],)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(reference, [found[index] for index in range(len(texts))], texts)


def test_the_tokenizer_is_reached_as_in_sglang(engine: Engine) -> None:
    """As its example of tools does."""
    tokenizer = engine.tokenizer_manager.tokenizer
    assert tokenizer is engine.tokenizer is not None
    messages = [{"role": "user", "content": "def f(x):"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    ids = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, tools=tools
    )
    text = tokenizer.chat(messages, tools=tools)
    assert ids == tokenizer.encode_plain(text)
    params = {"temperature": 0, "max_new_tokens": 4}
    found = engine.generate(input_ids=ids, sampling_params=params)
    assert found["meta_info"]["prompt_tokens"] == len(ids)


def test_one_prompt_has_sglangs_form(engine: Engine) -> None:
    found = engine.generate("def main():", {**GREEDY, "max_new_tokens": 5}, rid="mine")
    (prompt,) = engine_tokens(["def main():"])
    assert set(found) == {"text", "output_ids", "meta_info"}
    assert len(found["output_ids"]) == 5
    meta = found["meta_info"]
    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == len(prompt)
    assert meta["completion_tokens"] == 5
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert found["text"] == engine_text(found["output_ids"])
    by_tokens = engine.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 5})
    assert by_tokens["output_ids"] == found["output_ids"]
    several = engine.generate(input_ids=[prompt, prompt], sampling_params=GREEDY, rid="mine")
    assert [each["meta_info"]["id"] for each in several] == ["mine_0", "mine_1"]


def engine_text(tokens: Sequence[int]) -> str:
    from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer

    return ModelTokenizer(POCKET).decode(tokens)


def test_streams_grow_to_the_same_answer(engine: Engine) -> None:
    texts = prompts(4, seed=4)
    whole = engine.generate(texts, GREEDY)
    last: dict[int, dict[str, Any]] = {}
    steps = 0
    for found in engine.generate(texts, GREEDY, stream=True):
        before = last.get(found["index"])
        if before is not None:
            assert found["text"].startswith(before["text"])
            assert found["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last[found["index"]] = found
        steps += 1
    assert steps > len(texts)
    for index, expected in enumerate(whole):
        assert last[index]["text"] == expected["text"]
        assert last[index]["output_ids"] == expected["output_ids"]


def test_coroutines_wait_side_by_side(engine: Engine) -> None:
    texts = prompts(6, seed=5)
    whole = engine.generate(texts, GREEDY)

    async def stream(text: str) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for found in await engine.async_generate(text, GREEDY, stream=True):
            last = found
        return last

    async def request() -> list[dict[str, Any]]:
        requested = [engine.async_generate(text, GREEDY) for text in texts[:3]]
        return list(await asyncio.gather(*requested, *map(stream, texts[3:])))

    found = asyncio.run(request())
    assert [answer["text"] for answer in found] == [answer["text"] for answer in whole]


def test_texts_are_tokenized_and_handed_in_part_by_part(
    engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = prompts(12, seed=8)
    assert engine.tokenizer is not None
    encode, parts = engine.tokenizer.encode, []

    def recorded(part: Sequence[str]) -> list[list[int]]:
        parts.append((len(part), engine._runtime.stats()["running"]))
        return encode(part)

    monkeypatch.setattr(prompts_module, "BATCH_CHARACTERS", max(len(text) for text in texts))
    monkeypatch.setattr(engine.tokenizer, "encode", recorded)
    check(reference, engine.generate(texts, GREEDY), texts)
    assert sum(count for count, _ in parts) == len(texts)
    assert len(parts) > 3
    # What cannot be served is found in the last part, and nothing of the others is left.
    long = "word " * 3000
    with pytest.raises(ConfigError, match="shorten the prompt"):
        engine.generate([*texts, long], GREEDY)
    wait_until(
        lambda: engine.get_server_info()["internal_states"][0]["running"] == 0, 120, "it is idle"
    )


def test_a_coroutine_that_is_cancelled_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.tokenizer is not None
    encode = engine.tokenizer.encode

    def slow(part: Sequence[str]) -> list[list[int]]:
        time.sleep(0.3)
        return encode(part)

    monkeypatch.setattr(engine.tokenizer, "encode", slow)

    async def leave() -> None:
        requested = asyncio.ensure_future(
            engine.async_generate("a", {**GREEDY, "max_new_tokens": 900})
        )
        await asyncio.sleep(0.1)
        requested.cancel()
        with pytest.raises(asyncio.CancelledError):
            await requested
        # Its thread hands the request in all the same.
        await asyncio.sleep(0.5)

    asyncio.run(leave())
    wait_until(
        lambda: engine.get_server_info()["internal_states"][0]["running"] == 0, 120, "it is idle"
    )
    assert not engine._requests._queues
    assert engine.flush_cache()


def test_a_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    text = "def read_config(path):\n"
    whole = engine.generate(text, GREEDY)["text"]
    stop = whole[len(whole) // 2 :][:4]
    for stream in (False, True):
        answer = engine.generate(text, {**GREEDY, "stop": [stop]}, stream=stream)
        found = list(answer)[-1] if stream else answer
        assert found["text"] == whole[: whole.find(stop)]
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert found["meta_info"]["completion_tokens"] < TOKENS


def test_a_stop_token_ends_it(engine: Engine) -> None:
    whole = engine.generate("import socket\n", GREEDY)["output_ids"]
    stop = whole[7]
    found = engine.generate("import socket\n", {**GREEDY, "stop_token_ids": [stop]})
    assert found["output_ids"] == whole[: whole.index(stop) + 1]
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert found["text"] == engine_text(whole[: whole.index(stop)])


def test_samples_and_seeds(engine: Engine) -> None:
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "n": 3}
    found = engine.generate(["class A:", "class B:"], sampling)
    assert len(found) == 6
    assert len({tuple(answer["output_ids"]) for answer in found[:3]}) > 1
    seeded = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 77}
    first, second = engine.generate(["class A:"] * 2, seeded)
    assert first["output_ids"] == second["output_ids"]


def test_all_that_changes_the_distribution(engine: Engine) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0},
        {"logit_bias": {"65": 100}},
        {"logit_bias": {"65": 100, "66": 100}, "frequency_penalty": 2.0},
    ]
    prompts = ["the cat sat on the cat sat on the"] * len(kinds)
    found = engine.generate(prompts, [{**greedy, **kind} for kind in kinds])
    plain, spread, biased, turned = (answer["output_ids"] for answer in found)
    assert len(set(spread)) > len(set(plain))
    assert set(biased) == {65}
    # Each one comes until it has come too often.
    assert set(turned) == {65, 66}
    drawn = {"max_new_tokens": 16, "ignore_eos": True, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    seeded = [{**drawn, "sampling_seed": seed, "frequency_penalty": 0.5} for seed in (0, 0, 1, 2)]
    first, second, *others = engine.generate(["class A:"] * 4, seeded)
    assert first["output_ids"] == second["output_ids"]
    assert any(other["output_ids"] != first["output_ids"] for other in others)


def test_a_caller_that_leaves_costs_nothing(engine: Engine) -> None:
    stream = engine.generate("for line in", {**GREEDY, "max_new_tokens": 900}, stream=True)
    next(stream)
    stream.close()
    wait_until(
        lambda: engine.get_server_info()["internal_states"][0]["running"] == 0, 120, "it is idle"
    )
    assert engine.flush_cache()
    assert idle_counters(engine)["pages_cached"] == 0


def idle_counters(engine: Engine) -> dict[str, Any]:
    """The counts of an idle engine, which it notes some milliseconds after it has become idle."""
    found: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    while True:
        time.sleep(0.3)
        before, found = found, engine.get_server_info()["internal_states"][0]
        if found["running"] == 0 and found["steps"] == before["steps"]:
            return found


def test_what_is_wrong_is_refused_before_anything_runs(engine: Engine) -> None:
    steps = idle_counters(engine)["steps"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "needs `prompt` or `input_ids`"),
        ({"prompt": "a", "input_ids": [1]}, "needs `prompt` or `input_ids`"),
        ({"prompt": ""}, "a prompt has no tokens"),
        ({"input_ids": [1] * 2048}, "a prompt has 2,048 tokens"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "has 1 entries for 2 prompts"),
        (
            {"prompt": "a", "image_data": "x.png"},
            "`image_data` is given, and this model takes text and tokens",
        ),
        ({"prompt": "a", "return_logprob": 1}, "`return_logprob` is 1, expected True or False"),
        (
            {"prompt": "a", "return_logprob": True, "logprob_start_len": 9},
            "logprob_start_len is 9",
        ),
        (
            {"prompt": ["a", "b"], "return_logprob": True, "top_logprobs_num": [1]},
            "`top_logprobs_num` has 1 entries for 2 prompts",
        ),
        (
            {"prompt": "a", "return_logprob": True, "token_ids_logprob": [10**6]},
            "token 1000000 of `token_ids_logprob` is not in the vocabulary",
        ),
        ({"prompt": "a", "colour": "red"}, "no argument 'colour'"),
        ({"prompt": "a", "sampling_params": {"stop_regex": "("}}, "unclosed group"),
    ]
    for arguments, text in wrong:
        with pytest.raises(ConfigError) as refusal:
            engine.generate(**arguments)
        assert text in str(refusal.value)
    with pytest.raises(ConfigError, match="returns no embeddings"):
        engine.encode("a")
    assert idle_counters(engine)["steps"] == steps
    # Empty values of SGLang's other arguments change nothing.
    engine.generate("a", {"max_new_tokens": 1}, image_data=None, return_logprob=False)


def test_thinking_needs_its_end(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="how the model ends its thinking is not known"):
        engine.generate("x", {"regex": "a"}, require_reasoning=True)


def test_a_token_outside_of_the_vocabulary_is_refused_before_anything_runs(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="token 1000000 of `input_ids` is not in the vocabulary"):
        engine.generate(input_ids=[[5, 6], [10**6]], sampling_params=GREEDY)
    answer = engine.generate(input_ids=[5, 6], sampling_params=GREEDY)
    assert len(answer["output_ids"]) == TOKENS


def test_a_killed_driver_loses_nothing(engine: Engine, reference: Reference) -> None:
    texts = prompts(32, seed=6)
    answers = engine.as_completed(texts, GREEDY)
    found = [next(answers)]
    (pid,) = engine.get_server_info()["internal_states"][0]["driver_pids"]
    os.kill(pid, signal.SIGKILL)
    found += list(answers)
    by_index = {answer["index"]: answer for answer in found}
    check(reference, [by_index[index] for index in range(len(texts))], texts)
    assert idle_counters(engine)["restarts"] == 1


def test_batches_are_logged_as_by_sglang(engine: Engine) -> None:
    """The lines of many requests add up to what was computed, retracted requests included."""
    lines: list[str] = []
    before = idle_counters(engine)
    log = start_batch_log(
        engine._runtime,
        engine.get_server_info()["active"],
        lines.append,
        interval=5,
        device="cpu",
        speculates=False,
    )
    assert log is not None
    try:
        engine.generate(prompts(60, seed=9), GREEDY)
        after = idle_counters(engine)
        grown = {name: after[name] - before[name] for name in ("admissions", "prefill_tokens")}

        def added(field: str) -> int:
            found = [re.search(rf"^Prefill batch, .*{field}: (\d+), ", line) for line in lines]
            return sum(int(each[1]) for each in found if each is not None)

        deadline = time.monotonic() + 60
        while added("#new-token") < grown["prefill_tokens"]:
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
    finally:
        log.close()
    assert grown["admissions"] >= 60
    assert added("#new-seq") == grown["admissions"]
    assert added("#new-token") == grown["prefill_tokens"]
    decodes = [line for line in lines if line.startswith("Decode batch, #running-req: ")]
    assert any(float(line.split("gen throughput (token/s): ")[1].split(",")[0]) for line in decodes)
    assert sum(line.startswith("Retract requests. ") for line in lines) > 0


def test_prefills_are_counted(engine: Engine) -> None:
    (prompt,) = engine_tokens([" ".join(WORDS[:90])])
    names = ("admissions", "prefill_tokens", "matched_tokens")
    assert engine.flush_cache()
    for _ in range(2):
        before = idle_counters(engine)
        found = engine.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 3})
        after = idle_counters(engine)
        cached = found["meta_info"]["cached_tokens"]
        grown = [after[name] - before[name] for name in names]
        assert grown == [1, len(prompt) - cached, cached]
        assert after["pending_tokens"] == 0
    assert cached > 0
