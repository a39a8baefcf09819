"""`Engine(engine="vllm")` and servers whose drivers run vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from pie_driver_sglang import Engine
from pie_driver_sglang.cli import vllm
from pie_driver_sglang.config.engine_args import ENGINE_ARGS
from pie_driver_sglang.config.vllm_options import parse_vllm_options
from pie_driver_sglang.errors import ConfigError, StartError, Unsupported, WeightsError
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.common.vllm_arguments import (
    ENGINE_NAMES,
    LIBRARY_FOLDER,
    vllm_served,
)
from support.models.tiny_models import POCKET
from support.process import fork_server, vllm_drivers
from support.process.inspection import command_line
from support.servers.pie_server import running

needs_vllm = pytest.mark.skipif(bool(vllm_drivers.missing()), reason=vllm_drivers.missing())
PROMPTS = ["The capital of France is", "def fibonacci(n):"]
GREEDY = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def engine(vllm_python: str) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIBRARY_FOLDER, str(vllm_drivers.site()))
        patch.setattr("sys.executable", vllm_python)
        with Engine(model=POCKET, engine="vllm", device="cpu", max_model_len=512) as engine:
            yield engine


@pytest.fixture(scope="module")
def spread(vllm_python: str) -> Iterator[Engine]:
    """With two ranks, and drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIBRARY_FOLDER, str(vllm_drivers.site()))
        patch.setattr("sys.executable", vllm_python)
        arguments = {"max_model_len": 512, "speculative_algorithm": "NGRAM"}
        engine = Engine(model=POCKET, engine="vllm", device="cpu", tp_size=2, **arguments)
    with engine:
        yield engine


@pytest.fixture(scope="module")
def on_sglang(forked_python: str) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", forked_python)
        with Engine(model_path=POCKET, device="cpu", context_length=512) as engine:
            yield engine


def is_worker(process: psutil.Process) -> bool:
    """Whether it stands for a rank that a driver has started."""
    return fork_server.WORKER in command_line(process)


def texts(answers: list[Mapping[str, Any]]) -> list[str]:
    return [answer["text"] for answer in answers]


@needs_vllm
@pytest.mark.engine
@pytest.mark.timeout(600)
class TestEngine:
    def test_its_tokens_are_those_of_sglangs_models(
        self, engine: Engine, on_sglang: Engine
    ) -> None:
        assert engine.context_length == on_sglang.context_length == 512
        assert engine.get_server_info()["active"]["attention"].startswith("CPU_ATTN")
        found = texts(engine.generate(PROMPTS, GREEDY))
        assert found == texts(on_sglang.generate(PROMPTS, GREEDY))
        # Each alone, streamed, and with a prefix that is in the cache.
        for prompt, text in zip(PROMPTS, found, strict=True):
            *_, last = engine.generate(prompt, GREEDY, stream=True)
            assert last["text"] == text
            again = engine.generate(prompt + text, GREEDY)
            assert again["meta_info"]["cached_tokens"] > 0

    def test_grammars_and_logprobs(self, engine: Engine) -> None:
        sampling = {**GREEDY, "max_new_tokens": 40, "regex": "[a-c]{3}-(yes|no)"}
        answer = engine.generate(PROMPTS[0], sampling, return_logprob=True)
        assert re.fullmatch("[a-c]{3}-(yes|no)", answer["text"])
        logprobs = answer["meta_info"]["output_token_logprobs"]
        assert len(logprobs) == answer["meta_info"]["completion_tokens"]

    def test_a_driver_that_is_killed_is_replaced(self, engine: Engine) -> None:
        [expected] = texts(engine.generate(PROMPTS[:1], {**GREEDY, "max_new_tokens": 100}))
        parts = engine.generate(PROMPTS[0], {**GREEDY, "max_new_tokens": 100}, stream=True)
        next(parts)
        [pid] = engine.get_server_info()["internal_states"][0]["driver_pids"]
        os.kill(pid, signal.SIGKILL)
        *_, last = parts
        assert last["text"] == expected

    def test_two_ranks_answer_as_one(self, engine: Engine, spread: Engine) -> None:
        """Also with drafts, whose tokens are verified."""
        sampling = [
            {**GREEDY, "max_new_tokens": 60},
            {**GREEDY, "temperature": 0.9, "sampling_seed": 5},
        ]
        for each in sampling:
            answers = [
                one.generate(PROMPTS, each, return_logprob=True, top_logprobs_num=3)
                for one in (engine, spread)
            ]
            assert texts(answers[0]) == texts(answers[1])
            for ours, theirs in zip(*answers, strict=True):
                logprobs = [
                    [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
                    for answer in (ours, theirs)
                ]
                assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)

    def test_a_rank_that_is_killed_is_replaced_with_its_driver(
        self, engine: Engine, spread: Engine
    ) -> None:
        sampling = {**GREEDY, "max_new_tokens": 100}
        [expected] = texts(engine.generate(PROMPTS[:1], sampling))
        parts = spread.generate(PROMPTS[0], sampling, stream=True)
        next(parts)
        [pid] = spread.get_server_info()["internal_states"][0]["driver_pids"]
        [worker] = [each for each in fork_server.family(pid) if is_worker(each)]
        worker.kill()
        *_, last = parts
        assert last["text"] == expected
        [other] = spread.get_server_info()["internal_states"][0]["driver_pids"]
        assert other != pid
        assert any(is_worker(each) for each in fork_server.family(other))

    def test_weights_stay(self, engine: Engine) -> None:
        with pytest.raises(WeightsError, match="keeps the weights"):
            engine.release_memory_occupation()
        result = engine.update_weights_from_disk(str(POCKET))
        assert "keeps the weights" in str(result)


@needs_vllm
@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [("--tp-size", "2"), ("--front", "gateway")])
def test_a_server(
    flags: tuple[str, ...],
    engine: Engine,
    forked_python: str,
    vllm_python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "gateway" in flags:
        pytest.importorskip("smg")
    monkeypatch.setenv(LIBRARY_FOLDER, str(vllm_drivers.site()))
    [expected] = texts(engine.generate(PROMPTS[:1], GREEDY))
    body = {"model": str(POCKET), "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    pythons = {"python": forked_python, "driver_python": vllm_python}
    with running(tmp_path, "--engine", "vllm", *flags, **pythons) as (server, _):
        answer = json.loads(server.fetch("/v1/completions", body))
        assert answer["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"engine": "trtllm"}, ConfigError, "`engine` is 'trtllm', expected one of sglang, vllm"),
        ({"max_num_sequences": 4}, ConfigError, "there is no argument 'max_num_sequences'"),
        ({"seed": 1, "random_seed": 2}, ConfigError, "`seed` and `random_seed` are the same"),
        ({"page_size": 24}, ConfigError, "no multiple of 16"),
        ({"lora_paths": ["x=/x"]}, ConfigError, "adapter 'x' is not at '/x'"),
        ({"max_loras_per_batch": 1}, ConfigError, "is 1, and the base model counts as one"),
        ({"max_loras_per_batch": 3, "max_loras": 2}, ConfigError, "are the same argument"),
        ({"max_loras": 4, "max_cpu_loras": 2}, ConfigError, "`max_cpu_loras` is 2, less than"),
        ({"lora_backend": "triton"}, Unsupported, "a setting of SGLang"),
        ({"enable_return_hidden_states": True}, Unsupported, "no hidden states"),
        ({"fully_sharded_loras": True}, Unsupported, "keeps adapters and their slots itself"),
        ({"lora_paths": ["a=/"], "lora_modules": ["a=/"]}, ConfigError, "the same argument"),
        ({"attention_backend": "triton"}, ConfigError, "none of its values"),
        ({"sampling_backend": "pytorch"}, Unsupported, "a setting of SGLang"),
        ({"tensor_parallel_size": 3}, ConfigError, "the model has 4 attention heads over 2"),
        ({"pipeline_parallel_size": 2}, Unsupported, "shards a model over its devices itself"),
        ({"speculative_algorithm": "EAGLE"}, Unsupported, "drafts by n-grams only"),
        ({"speculative_algorithm": "SUFFIX"}, Unsupported, "drafts by n-grams only"),
        ({"device": "cuda", "attention_backend": "CPU_ATTN"}, Unsupported, "not run on `cuda`"),
        ({"engine": ["vllm"]}, ConfigError, "`engine` is ['vllm']"),
        ({"speculative_config": {"method": "ngram"}}, Unsupported, "`speculative_algorithm`"),
        ({"json_model_override_args": "{}"}, Unsupported, "`hf_overrides`"),
    ],
)
def test_what_is_refused(
    arguments: Mapping[str, Any], error: type[ConfigError], words: str
) -> None:
    given = {"model_path": POCKET, "engine": "vllm", "device": "cpu", **arguments}
    with pytest.raises(error) as caught:
        parse_arguments(given)
    assert words in str(caught.value), caught.value


def test_hints_are_for_users_of_servers() -> None:
    """They have no `driver.toml`."""
    refused = 0
    for name, field in ENGINE_ARGS.items():
        if field.owner is None or name in ENGINE_NAMES:
            continue
        try:
            vllm_served({name: "1"})
        except Unsupported as error:
            refused += 1
            assert not re.search(r"\[model|hf_repo|the key", error.with_hint), error
    assert refused > 50


def test_names_of_both_libraries() -> None:
    of_vllm = {"model": POCKET, "max_model_len": 256, "max_num_batched_tokens": 128, "seed": 7}
    of_vllm |= {"max_cpu_loras": 5, "max_loras": 3}
    of_sglang = {
        "max_loaded_loras": 5,
        # The base model counts as one.
        "max_loras_per_batch": 4,
        "model_path": POCKET,
        "context_length": 256,
        "chunked_prefill_size": 128,
        "random_seed": 7,
    }
    for given in (of_vllm, of_sglang):
        plan = parse_arguments({**given, "engine": "vllm", "device": "cpu"})
        assert plan.runtime["driver_package"] == "pie_driver_vllm"
        assert plan.runtime["options"] == {
            "max_cpu_loras": 5,
            "max_loras": 3,
            "max_model_len": 256,
            "max_num_batched_tokens": 128,
        }
        assert (plan.runtime["seed"], plan.runtime["chunked_prefill_size"]) == (7, 128)


@pytest.mark.parametrize(("given", "most"), [(2, 2), (9, 9), (None, 32)])
def test_an_engine_loads_as_many_adapters_as_it_is_told(given: int | None, most: int) -> None:
    """A driver keeps one more than `max_loras`, for passes without the base model."""
    limit = {} if given is None else {"max_cpu_loras": given}
    plan = parse_arguments(
        {"model": POCKET, "engine": "vllm", "device": "cpu", "enable_lora": True, "max_loras": 2}
        | limit
    )
    assert plan.max_adapters == most


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("M --max-model-len 512", "M --context-length 512"),
        ("M --max-model-len=512 -tp 2", "M --context-length 512 --tp-size 2"),
        ("M --max_model_len 8K --seed 1", "M --context-length 8192 --random-seed 1"),
        ("M --max-model-len=25.6k", "M --context-length 25600"),
        ("M --max-model-len auto --max-model-len=-1", "M"),
        ("M --max-num-batched-tokens 2k", "M --option max_num_batched_tokens=2000"),
        ("--model=M --seed 7 -tp 1", "--model-path=M --random-seed 7 --tp-size 1"),
        ("M --enforce-eager", "M --option enforce_eager=true"),
        ("M --no-enforce-eager", "M --option enforce_eager=false"),
        (
            "M --load-format=dummy --quantization fp8",
            "M --option load_format=dummy --option quantization=fp8",
        ),
        ("M -q fp8 -pp 2", "M --option quantization=fp8 --option pipeline_parallel_size=2"),
        ("M --ignore-patterns a --seed 7", 'M --option ignore_patterns=["a"] --random-seed 7'),
        # SGLang's frontend reads this one, too.
        ("M --trust-remote-code", "M --trust-remote-code"),
        ("M --mm-attention-backend x", "M --mm-attention-backend x"),
        ("M --enable-prefix-caching --no-trust-remote-code", "M"),
        ("M --no-enable-prefix-caching", "M --disable-radix-cache"),
        ("M --dtype half --served-model-name N", "M --dtype half --served-model-name N"),
        ("M --tool-call-parser hermes", "M --tool-call-parser hermes"),
        ("M --what-is-this 1", "M --what-is-this 1"),
        ("M --no-enable-lora --max-loras 2", "M --option max_loras=2"),
        (
            "M --enable-lora --max-cpu-loras=4",
            "M --enable-lora --option max_cpu_loras=4 --max-lora-rank 16 --lora-target-modules all",
        ),
        ("M --lora-modules a=/a b=/b", "M --lora-paths a=/a b=/b"),
        ('M --lora-modules {"name":"a","path":"/a"}', "M --lora-paths a=/a"),
        ('M --lora-modules={"name":"a","path":"/a"}', "M --lora-paths a=/a"),
    ],
)
def test_the_command_of_vllm(given: str, made: str) -> None:
    front = [*given.split(), "--front", "sglang", "--port", "1"]
    rest = ["--front", "sglang", "--port", "1", "--engine", "vllm"]
    expected, adapters, more = made.partition(" --max-lora-rank")
    assert vllm.translated(front) == [*expected.split(), *rest, *f"{adapters}{more}".split()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("M --enforce-eager=false", "`--enforce-eager` takes no value"),
        ("M --no-enforce-eager=x", "`--no-enforce-eager` takes no value"),
        ("M --enable-chunked-prefill=False", "`--enable-chunked-prefill` takes no value"),
        ("M --config f.yaml", "does not read `--config`"),
        ("M --max-model-len 1.5K", "`--max-model-len` is '1.5K', expected a whole number"),
        ("M --max-model-len=8kb", "`--max-model-len` is '8kb'"),
        ("M --max-num-batched-tokens auto", "`--max-num-batched-tokens` is 'auto'"),
        ("M --max-num-batched-tokens 1.0005k", "is '1.0005k', expected a whole number"),
        ("M --engine sglang", "takes no `--engine`"),
        ('M --lora-modules {"name":"a"}', "which has no `name` and `path`"),
        ('M --lora-modules={"name":"a"}', "which has no `name` and `path`"),
        ('M --lora-modules {"name":1,"path":null}', "which has no `name` and `path`"),
        ("M --lora-modules", "`--lora-modules` names no adapter"),
        ("M --no-enable-lora --lora-modules a=/a", "`--no-enable-lora` contradicts"),
        ("M --lora-modules --seed 1", "`--lora-modules` names no adapter"),
        ("M --served-model-name a b --seed 1", "`--served-model-name` has 2 names (a, b)"),
    ],
)
def test_what_the_command_of_vllm_refuses(given: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        vllm.translated(given.split())
    assert words in str(caught.value)


def test_the_command_of_vllm_keeps_a_port_that_is_abbreviated() -> None:
    assert "8000" not in vllm.translated(["M", "--por", "9000"])


@pytest.mark.parametrize("overrides", ['{"rope_theta": 5.0}', {"rope_theta": 5.0}])
def test_tables_may_be_json(overrides: str | Mapping[str, float]) -> None:
    """As flags of vLLM have them."""
    options = parse_vllm_options({"hf_overrides": overrides}, "cpu")
    assert options.server_args["hf_overrides"] == {"rope_theta": 5.0}
    with pytest.raises(ConfigError, match="expected a table"):
        parse_vllm_options({"hf_overrides": "{rope_theta}"}, "cpu")


def test_defaults_of_the_command_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    words = vllm.translated(["M"])
    assert words[words.index("--port") + 1] == "8000"
    assert vllm.main(["serve", "M", "--max-model-len"]) == 1
    assert "`--max-model-len` has no value" in capsys.readouterr().err
    assert "--front" not in vllm.translated(["M", "--lora-modules", "a=/a"])
    lora = ["--enable-lora", "--front=gateway"]
    assert vllm.main(["serve", str(POCKET), "--device=cpu", "--port=0", *lora]) == 1
    error = capsys.readouterr().err
    assert error.startswith("pie-vllm: ")
    assert "the gateway passes no adapter's name on" in error


@pytest.mark.engine
def test_without_vllm(forks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for a user who has SGLang's environment alone."""
    monkeypatch.setenv(LIBRARY_FOLDER, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", _without_vllm())
    with pytest.raises(StartError, match=r"vLLM 0.26.0 cannot be found"):
        Engine(model_path=POCKET, engine="vllm", device="cpu")


def _without_vllm() -> str:
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(each for each in folders if not Path(each, "vllm").exists())
