"""LoRA adapters of `Engine`, against models that PEFT has merged them into."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.common.control_socket import ControlSocket
from pie_driver_sglang.frontends.common.lora_adapters import (
    AS_TENSORS,
    AdapterPath,
    EngineAdapters,
    parse_paths,
)
from pie_driver_sglang.frontends.common.vllm_arguments import LIBRARY_FOLDER, vllm_options
from pie_driver_sglang.frontends.offline.engine import Engine
from support.models import lora_adapters, tiny_models
from support.models.reference import Reference, random_tokens
from support.process import vllm_drivers
from support.servers.pie_server import wait_until

pytestmark = pytest.mark.timeout(1500)

TOKENS = 12
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}


class Served:
    """An engine with two adapters, and the models that they make."""

    def __init__(self, engine: Engine, references: Mapping[str | None, Reference]) -> None:
        self.engine = engine
        self.references = references

    def check(self, prompts: Sequence[list[int]], names: Sequence[str | None]) -> list[Any]:
        """Every prompt gets the tokens of its own model."""
        answers: list[Any] = self.engine.generate(input_ids=prompts, lora_path=names, **SAMPLING)
        self.compare(prompts, names, answers)
        return answers

    def compare(
        self, prompts: Sequence[list[int]], names: Sequence[str | None], answers: Sequence[Any]
    ) -> None:
        decided = 0
        for prompt, name, answer in zip(prompts, names, answers, strict=True):
            tokens = answer["output_ids"]
            assert len(tokens) == TOKENS, answer["meta_info"]
            decided += self.references[name].check([*prompt, *tokens[:-1]], tokens)
        assert decided > 0.8 * TOKENS * len(prompts)


SAMPLING: dict[str, Any] = {"sampling_params": GREEDY}


@pytest.fixture(scope="module")
def made(models_folder: Path) -> dict[str, lora_adapters.Made]:
    return {
        name: lora_adapters.make("llama-32", name, models_folder)
        for name in ("linear", "ranks", "mlp", "attention")
    }


ON: dict[str, dict[str, Any]] = {
    "sglang": {"max_loras_per_batch": 3, "max_loaded_loras": 3},
    "vllm": {"max_loras": 2, "max_cpu_loras": 3},
}
"""Arguments of engines on either library."""
LIMITS = {"sglang": "max_loaded_loras", "vllm": "max_cpu_loras"}
"""The argument that limits loaded adapters."""


@pytest.fixture(scope="module", params=ON)
def served(
    request: pytest.FixtureRequest, models_folder: Path, made: dict[str, lora_adapters.Made]
) -> Iterator[Served]:
    snapshot, library = tiny_models.build("llama-32", models_folder), request.param
    linear, ranks = made["linear"], made["ranks"]
    found = {"sglang": "forked_python", "vllm": "vllm_python"}[library]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", request.getfixturevalue(found))
        patch.setenv(LIBRARY_FOLDER, str(vllm_drivers.site()))
        engine = Engine(
            engine=library,
            model_path=str(snapshot),
            device="cpu",
            skip_tokenizer_init=True,
            lora_paths=[f"first={linear.adapter}", {"lora_name": "b", "lora_path": ranks.adapter}],
            max_lora_rank=16,
            **ON[library],
        )
    with engine:
        references = {
            None: Reference(snapshot),
            "first": Reference(linear.merged),
            "b": Reference(ranks.merged),
        }
        yield Served(engine, references)


def prompts(count: int, vocabulary: int = 250) -> list[list[int]]:
    """They begin alike, so that prefixes could be shared."""
    shared = random_tokens(vocabulary, 40, 1)
    return [[*shared, *random_tokens(vocabulary, 3 + index % 5, index)] for index in range(count)]


@pytest.mark.engine
def test_prompts_of_one_call_have_different_adapters(served: Served) -> None:
    names = [(None, "first", "b")[index % 3] for index in range(18)]
    served.check(prompts(18), names)
    again = served.check(prompts(18), names)
    assert all(answer["meta_info"]["cached_tokens"] >= 32 for answer in again)
    # The first request of another key finds nothing of these.
    one = served.engine.generate(
        input_ids=prompts(1)[0], lora_path="first", extra_key="other", **SAMPLING
    )
    assert one["meta_info"]["cached_tokens"] == 0
    served.compare(prompts(1), ["first"], [one])


@pytest.mark.engine
def test_a_driver_that_is_killed_gets_its_adapters_again(served: Served) -> None:
    names = [(None, "first", "b")[index % 3] for index in range(18)]
    stream = served.engine.generate(input_ids=prompts(18), lora_path=names, stream=True, **SAMPLING)
    found: dict[int, Any] = {}
    killed = False
    for answer in stream:
        found[answer["index"]] = answer
        if not killed:
            [state] = served.engine.get_server_info()["internal_states"]
            os.kill(state["driver_pids"][0], signal.SIGKILL)
            killed = True
    served.compare(prompts(18), names, [found[index] for index in range(18)])
    assert served.engine.get_server_info()["internal_states"][0]["restarts"] == 1


@pytest.mark.engine
def test_adapters_are_loaded_while_it_serves(
    served: Served,
    made: dict[str, lora_adapters.Made],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    broken = lora_adapters.edit(made["mlp"].adapter, tmp_path / "broken", r=3)
    refused = served.engine.load_lora_adapter("broken", str(broken))
    assert not refused.success
    assert "rank" in refused.error_message or "shape" in refused.error_message
    assert served.engine.load_lora_adapter("mlp", str(made["mlp"].adapter)).success
    served.references = {**served.references, "mlp": Reference(made["mlp"].merged)}
    served.check(prompts(4), ["mlp", None, "first", "b"])
    full = served.engine.load_lora_adapter("one more", str(made["attention"].adapter))
    limit = LIMITS[request.node.callspec.params["served"]]
    assert f"3 adapters are loaded, as many as `{limit}` allows" in full.error_message
    assert set(full.loaded_adapters) == {"first", "b", "mlp"}
    with pytest.raises(ConfigError, match="no adapter 'frist' is loaded") as unknown:
        served.engine.generate(input_ids=[1, 2], lora_path="frist")
    assert unknown.value.hint == "did you mean `first`?"
    with pytest.raises(ConfigError, match="`lora_path` has 1 entries for 2 prompts"):
        served.engine.generate(input_ids=[[1], [2]], lora_path=["b"])
    assert served.engine.unload_lora_adapter("mlp").success


@pytest.mark.engine
def test_tensors_are_loaded_and_unloaded(
    served: Served, made: dict[str, lora_adapters.Made]
) -> None:
    """With the answers of their files; a restarted driver reads them again."""
    engine, folder = served.engine, made["mlp"].adapter
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    assert engine.load_lora_adapter_from_tensors("mlp", tensors, config).success
    served.references = {**served.references, "mlp": Reference(made["mlp"].merged)}
    served.check(prompts(4), ["mlp", None, "first", "b"])
    [state] = engine.get_server_info()["internal_states"]
    os.kill(state["driver_pids"][0], signal.SIGKILL)
    served.check(prompts(4), ["mlp", None, "first", "b"])
    unloaded = asyncio.run(engine.async_unload_lora_adapter("mlp"))
    assert (unloaded.success, set(unloaded.loaded_adapters)) == (True, {"first", "b"})
    with pytest.raises(ConfigError, match="no adapter 'mlp' is loaded"):
        engine.generate(input_ids=[1, 2], lora_path="mlp")
    again = engine.unload_lora_adapter("mlp")
    assert "no adapter 'mlp' is loaded" in again.error_message
    # The name is free.
    assert engine.load_lora_adapter("mlp", str(made["attention"].adapter)).success
    served.references = {**served.references, "mlp": Reference(made["attention"].merged)}
    served.check(prompts(2), ["mlp", "b"])
    assert engine.unload_lora_adapter("mlp").success


@pytest.mark.engine
def test_an_unload_waits_for_the_requests_that_use_the_adapter(
    served: Served, made: dict[str, lora_adapters.Made]
) -> None:
    engine = served.engine
    assert engine.load_lora_adapter("mlp", str(made["mlp"].adapter)).success
    served.references = {**served.references, "mlp": Reference(made["mlp"].merged)}
    stream = engine.generate(
        input_ids=prompts(1), lora_path=["mlp"], stream=True, sampling_params=GREEDY
    )
    answers = [next(stream)]
    with ThreadPoolExecutor(1) as pool:
        unloading = pool.submit(engine.unload_lora_adapter, "mlp")
        # A request that was read before, and is submitted now.
        wait_until(lambda: bool(engine._requests._unloaded), 60.0, "the adapter is not unloaded")
        with pytest.raises(ConfigError, match="the LoRA adapter was unloaded"):
            engine.generate(input_ids=[1, 2], lora_path="mlp")
        served.check(prompts(2), ["first", None])
        assert not unloading.done()
        answers += stream
        assert unloading.result(60).success
    served.compare(prompts(1), ["mlp"], answers[-1:])
    # A stream that is closed early holds up no unload.
    assert engine.load_lora_adapter("mlp", str(made["mlp"].adapter)).success
    stream = engine.generate(
        input_ids=prompts(1), lora_path=["mlp"], stream=True, sampling_params=GREEDY
    )
    next(stream)
    stream.close()
    assert engine.unload_lora_adapter("mlp").success


@pytest.mark.engine
def test_the_memory_of_an_unloaded_adapter_is_used_before_that_of_others(
    served: Served,
    made: dict[str, lora_adapters.Made],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Drivers keep three; here the files of one are gone, so that it could not be read again."""
    if request.node.callspec.params["served"] == "vllm":
        pytest.skip("its driver takes no commands")
    engine = served.engine
    folder = shutil.copytree(made["mlp"].adapter, tmp_path / "mlp")
    assert engine.load_lora_adapter("mlp", str(folder)).success
    served.references = {**served.references, "mlp": Reference(made["mlp"].merged)}
    served.check(prompts(2), ["mlp", "first"])
    shutil.rmtree(folder)
    # It is used last, and unloaded.
    served.check(prompts(2), ["b", "b"])
    assert engine.unload_lora_adapter("b").success
    assert engine.load_lora_adapter("b", str(made["ranks"].adapter)).success
    served.check(prompts(3), ["mlp", "first", "b"])
    assert engine.unload_lora_adapter("mlp").success


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "tensors", "config", "load_format", "text"),
    [
        ("", {}, {}, None, "an adapter's name is ''"),
        ("t", {"a": 1}, {}, None, "a is a int"),
        ("t", {}, {"r": object()}, None, "`config_dict` cannot be written as JSON"),
        ("t", {}, {}, "flattened_bucket", "`load_format` is 'flattened_bucket'"),
        ("b", {}, {"r": 8}, None, "there is an adapter 'b' already"),
    ],
)
def test_tensors_of_anything_are_refused(
    served: Served, name: str, tensors: Any, config: Any, load_format: str | None, text: str
) -> None:
    found = served.engine.load_lora_adapter_from_tensors(name, tensors, config, load_format)
    assert text in found.error_message
    assert (found.success, set(found.loaded_adapters)) == (False, {"first", "b"})


class TestPaths:
    def test_the_forms_of_sglang(self, tmp_path: Path) -> None:
        path = str(tmp_path)
        expected = (AdapterPath("a", path), AdapterPath(path, path), AdapterPath("c", path))
        entries = [f"a={path}", path, {"lora_name": "c", "lora_path": path, "pinned": True}]
        assert parse_paths(entries) == expected
        assert parse_paths([*entries[:2], {"name": "c", "path": path}]) == expected
        assert parse_paths({"a": tmp_path}) == expected[:1]
        assert parse_paths([]) == ()

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ("a=b", "`lora_paths` is 'a=b'"),
            ([7], "`lora_paths` has 7"),
            ([{"lora_name": "a"}], "`lora_paths` has "),
            (["=/"], "an adapter's name is ''"),
            (["a="], "the path of adapter 'a' is ''"),
            (["a=/nowhere"], "adapter 'a' is not at '/nowhere'"),
            (["a=/", "a=/tmp"], "`lora_paths` has 'a' twice"),
        ],
    )
    def test_others_are_refused(self, given: Any, text: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            parse_paths(given)
        assert text in str(refusal.value)
        assert refusal.value.hint

    @pytest.mark.parametrize("path", ["/nowhere", "./nowhere", "../nowhere", "~/nowhere/a"])
    def test_a_missing_path_is_not_taken_for_a_repository(self, path: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            parse_paths([f"a={path}"])
        assert str(refusal.value) == f"adapter 'a' is not at '{path}'"
        assert refusal.value.hint == "correct the path: there is no such file or folder"

    def test_a_name_that_the_hub_could_have_is_downloaded(self) -> None:
        with pytest.raises(ConfigError) as refusal:
            parse_paths(["a=nobody/nowhere"])
        assert "no such repository is in the Hugging Face cache" in str(refusal.value)
        assert refusal.value.hint == "name its folder, or run `hf download nobody/nowhere`"

    @pytest.mark.parametrize(("rank", "slots"), [(3, None), (40, 64), (600, 600)])
    def test_slots_of_vllm_hold_the_largest_rank(
        self, rank: int, slots: int | None, tmp_path: Path
    ) -> None:
        """It has some sizes only, of which the default is 16; 600 is refused with its name."""
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
        options = vllm_options({"lora_paths": [f"a={tmp_path}"]})
        assert options == {"enable_lora": True} | (
            {} if slots is None else {"max_lora_rank": slots}
        )

    def test_paths_turn_adapters_on(self, tmp_path: Path) -> None:
        def parse(**given: Any) -> Any:
            return parse_arguments({"model_path": tiny_models.POCKET, "device": "cpu", **given})

        found = parse(lora_paths=[str(tmp_path)], max_loaded_loras=9)
        assert found.runtime["options"]["enable_lora"] is True
        assert (len(found.adapters), found.max_adapters) == (1, 9)
        assert (parse().max_adapters, parse(enable_lora=True).max_adapters) == (0, 32)


def test_adapters_that_are_off_are_not_loaded() -> None:
    runtime = SimpleNamespace()
    with pytest.raises(ConfigError, match="adapters are off"):
        EngineAdapters(runtime, ControlSocket("vllm"), 0, "sglang").load(AdapterPath("a", "/a"))


def test_a_load_that_waits_keeps_no_other_out() -> None:
    begun, ends, unloaded = threading.Event(), threading.Event(), []

    def load(number: int, path: str) -> None:
        if path == "/slow":
            begun.set()
            assert ends.wait(60)
            raise StartError("the adapter /slow cannot be loaded: it has bias", "save it without")

    runtime = SimpleNamespace(load_adapter=load, unload_adapter=unloaded.append)
    adapters = EngineAdapters(runtime, ControlSocket("vllm"), 2, "vllm")
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(adapters.load, AdapterPath("slow", "/slow"))
        assert begun.wait(60)
        adapters.load(AdapterPath("quick", "/quick"))
        # What is being loaded counts, and has its name.
        with pytest.raises(ConfigError, match="there is an adapter 'slow' already"):
            adapters.load(AdapterPath("slow", "/other"))
        with pytest.raises(ConfigError, match=r"2 adapters .* as `max_cpu_loras` allows") as full:
            adapters.load(AdapterPath("third", "/third"))
        assert full.value.hint == "raise `max_cpu_loras`, or unload one by `unload_lora_adapter`"
        ends.set()
        with pytest.raises(StartError, match="it has bias"):
            slow.result(60)
    assert adapters.paths == {"quick": "/quick"}
    adapters.load(AdapterPath("slow", "/quick"))


def test_files_of_tensors_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def load(number: int, path: str) -> None:
        if (Path(path) / "wrong").exists():
            raise StartError("it has bias", "save it without")

    runtime = SimpleNamespace(load_adapter=load, unload_adapter=lambda number: None)
    adapters = EngineAdapters(runtime, ControlSocket("vllm"), 3, "sglang")
    ids = [adapters.load_tensors(name, lambda folder: None) for name in ("a", "b")]
    assert adapters.paths == {"a": AS_TENSORS, "b": AS_TENSORS}
    with pytest.raises(StartError):
        adapters.load_tensors("c", lambda folder: (folder / "wrong").touch())
    assert len([*tmp_path.iterdir()]) == 2
    adapters.unload(ids[0])
    assert len([*tmp_path.iterdir()]) == 1
    with pytest.raises(ConfigError, match="unloaded before"):
        adapters.unload(ids[0])
    if not (child := os.fork()):
        try:
            adapters.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len([*tmp_path.iterdir()]) == 1
    adapters.close()
    assert not [*tmp_path.iterdir()]
    # A folder that cannot be made is a result, as in SGLang.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    full = adapters.result(lambda: adapters.load_tensors("c", lambda folder: None))
    assert full.error_message.startswith("FileNotFoundError: ")
    assert not full.success
