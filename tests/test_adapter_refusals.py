"""LoRA adapters that a running driver refuses, each with its reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pie_driver_sglang._core import Request, Sampler
from support.models import lora_adapters, tiny_models
from support.models.lora_adapters import edit
from support.models.reference import Context, random_tokens
from support.process import drivers
from support.process.adapter_driver import (
    FAILED,
    MALFORMED,
    MODEL,
    OK,
    OPTIONS,
    UNSUPPORTED,
    DriverHarness,
    Library,
    bound_logits,
)
from support.process.adapter_driver import fresh as fresh
from support.process.adapter_driver import library as library
from support.process.adapter_driver import made as made
from support.sglang_scripts import lora_manager

pytestmark = pytest.mark.engine


def _with_tensors(
    change: Callable[[dict[str, torch.Tensor]], object],
) -> Callable[[Path, Path], Path]:
    def build(adapter: Path, folder: Path) -> Path:
        changed = edit(adapter, folder)
        file = changed / "adapter_model.safetensors"
        tensors = safetensors.torch.load_file(file)
        change(tensors)
        safetensors.torch.save_file({k: v.clone() for k, v in tensors.items()}, file)
        return changed

    return build


def _with_settings(**settings: Any) -> Callable[[Path, Path], Path]:
    return lambda adapter, folder: edit(adapter, folder, **settings)


def _without(name: str) -> Callable[[Path, Path], Path]:
    def build(adapter: Path, folder: Path) -> Path:
        changed = edit(adapter, folder)
        (changed / name).unlink()
        return changed

    return build


def _with_file(name: str, content: bytes) -> Callable[[Path, Path], Path]:
    def build(adapter: Path, folder: Path) -> Path:
        changed = edit(adapter, folder)
        (changed / name).write_bytes(content)
        return changed

    return build


def _link(name: str, target: str) -> Callable[[Path, Path], Path]:
    def build(adapter: Path, folder: Path) -> Path:
        changed = edit(adapter, folder)
        (changed / name).unlink()
        (changed / name).symlink_to(target)
        return changed

    return build


def _pipe(_: Path, folder: Path) -> Path:
    folder.mkdir()
    os.mkfifo(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    return folder


Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = Q0.replace("lora_A", "lora_B")


def _wide(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q0] = torch.zeros(8, 65)


def _long(tensors: dict[str, torch.Tensor]) -> None:
    tensors[B0] = torch.zeros(80, 8)


def _ranks(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in list(tensors.items()):
        double = torch.cat([tensor] * 4, dim=0 if "lora_A" in name else 1)
        tensors[name] = double


BROKEN: Mapping[str, tuple[Callable[[Path, Path], Path], tuple[str, ...]]] = {
    "no configuration": (_without("adapter_config.json"), ("adapter_config.json is missing",)),
    "no weights": (
        _without("adapter_model.safetensors"),
        ("adapter_model.safetensors is missing",),
    ),
    "a file that is none": (
        lambda adapter, folder: adapter / "nothing.safetensors",
        ("cannot be read",),
    ),
    "a pipe": (_pipe, ("cannot be read",)),
    "a text": (_with_file("adapter_model.safetensors", b"hello"), ("not a safetensors file",)),
    "an empty file": (_with_file("adapter_model.safetensors", b""), ("is empty",)),
    "no JSON": (_with_file("adapter_config.json", b"\xff{"), ("not what PEFT writes",)),
    "a list": (_with_file("adapter_config.json", b"[]"), ("not what PEFT writes",)),
    "no rank": (_with_settings(r=None), ("missing required field `r`",)),
    "a rank of zero": (_with_settings(r=0), ("r = 0",)),
    "a text for a rank": (_with_settings(r="8"), ("$.r",)),
    "DoRA": (_with_settings(use_dora=True), ("use_dora = True", "plain LoRA")),
    "a bias": (_with_settings(bias="all"), ("bias = 'all'",)),
    "whole modules": (_with_settings(modules_to_save=["lm_head"]), ("modules_to_save",)),
    "another method": (_with_settings(peft_type="IA3"), ("peft_type = 'IA3'",)),
    "another rank": (_with_settings(r=4), ("rank 8", "says 4")),
    "a broken pattern": (_with_settings(alpha_pattern={"(": 3}), ("pattern", "'('")),
    "a pattern without end": (
        _with_settings(rank_pattern={"(?=q)q_proj": 8}),
        ("rank_pattern", "look-around", "name the layers in full"),
    ),
    "a file without end": (_link("adapter_model.safetensors", "/proc/kmsg"), ("is empty",)),
    "a configuration without end": (_link("adapter_config.json", "/dev/zero"), ("regular file",)),
    "a large rank": (_with_tensors(_ranks), ("rank 32", "max_lora_rank = 32")),
    "wide weights": (_with_tensors(_wide), ("[8, 65]", "[rank, 64]")),
    "long weights": (_with_tensors(_long), ("[80, 8]", "[128, rank]")),
    "half a pair": (_with_tensors(lambda tensors: tensors.pop(B0)), ("lacks lora_B",)),
    "no tensors": (_with_tensors(lambda tensors: tensors.clear()), ("no LoRA weights",)),
    "integers": (
        _with_tensors(lambda tensors: tensors.update({Q0: torch.zeros(8, 64).int()})),
        ("not floats",),
    ),
    "a scalar": (_with_tensors(lambda tensors: tensors.update({Q0: torch.zeros(())})), ("[]",)),
    "no numbers": (
        _with_tensors(lambda tensors: tensors[Q0].fill_(float("nan"))),
        ("not all finite",),
    ),
    "a layer too many": (
        _with_tensors(lambda tensors: tensors.update({Q0.replace(".0.", ".2."): tensors[Q0]})),
        ("layers.2", "targets", "down_proj"),
    ),
    "another layer": (
        _with_tensors(
            lambda tensors: tensors.update({Q0.replace("q_proj", "c_attn"): tensors[Q0]})
        ),
        ("c_attn",),
    ),
    "an image's layer": (
        _with_tensors(
            lambda tensors: tensors.update({Q0.replace(".layers", ".vision.layers"): tensors[Q0]})
        ),
        ("vision",),
    ),
    "a magnitude": (
        _with_tensors(
            lambda tensors: tensors.update(
                {Q0.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(64)}
            )
        ),
        ("lora_magnitude_vector",),
    ),
}


@pytest.fixture(scope="module")
def loader(
    library: Library, models_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DriverHarness]:
    """A driver for loads that fail; adapter 1 is loaded."""
    snapshot = tiny_models.build(MODEL, models_folder)
    folder, options = tmp_path_factory.mktemp("loader"), library.options()
    with library.fork(drivers.write_config(folder, snapshot, options=options)) as driver:
        harness = DriverHarness(driver, MODEL, models_folder)
        made = lora_adapters.make(MODEL, "linear", models_folder)
        assert harness.client.adapter("Load", 1, str(made.adapter)) == OK
        yield harness
    assert driver.stop() == 0


class TestRefusals:
    """What cannot be loaded or bound."""

    def test_operations(self, loader: DriverHarness) -> None:
        call = loader.client.adapter
        for number in (0, 2**63 - 1, 2**63, 2**64 - 1):
            assert call("Load", number, "/a") == MALFORMED
        loader.driver.logged("adapter id 0 is outside 1 to 9223372036854775806")
        for operation in ("Save", "ZoInit", "ZoUpdate"):
            assert call(operation, 1) == UNSUPPORTED
        assert call("GenerateAudio", 0, "{}") == -1
        assert call("Load", 2, "") == MALFORMED
        assert call("Load", 2, "a\0b") == MALFORMED
        assert call("Load", 2, "x" * 5000) == FAILED
        loader.driver.logged("adapter 2 cannot be loaded from 'xxx", "File name too long")
        assert len(loader.driver.stderr()) < 20_000

    def test_only_loaded_adapters_can_be_used(self, loader: DriverHarness) -> None:
        numbers = [-1, 0, 1, -2, 2, 2**63 - 1, -(2**63), 1]
        tokens = random_tokens(tiny_models.VOCABULARY, 20, "bindings")
        contexts = [Context(loader.allocator, adapter_id=number) for number in numbers]
        replies = loader.client.forward([context.append(tokens) for context in contexts]).tokens
        assert [len(found) for found in replies] == [1, 0, 1, 0, 0, 0, 0, 1]
        loader.references[0].check(tokens, replies[0])

    def test_reasons(self, fresh: DriverHarness) -> None:
        for number in (0, -2, 5):
            assert bound_logits(fresh, number) is None
        fresh.driver.logged("adapter id 0 names nothing", "id -2 names", "adapter 5 is not loaded")

    def test_an_adapter_of_a_request_without_tokens(self, loader: DriverHarness) -> None:
        """A request without tokens may name anything."""
        reply = loader.client.forward([Request([], [], [], 1, adapter_id=99)])
        assert reply.tokens == [[]]

    def test_adapters_are_off_by_default(self, either_driver: drivers.Driver) -> None:
        client = either_driver.client()
        assert client.adapter("Load", 1, "/anything") == UNSUPPORTED
        request = Request([5], [0], [0], 1, [(0, Sampler.greedy())], adapter_id=1)
        assert client.forward([request]).tokens == [[]]
        either_driver.logged(
            "adapters are off; set `enable_lora = true` in the options",
            "rejected: adapters are off, so 1 cannot be bound; set `enable_lora = true`",
        )

    def test_layers_that_the_options_leave_out(
        self, library: Library, models_folder: Path, made: lora_adapters.Made, tmp_path: Path
    ) -> None:
        options = library.options(lora_target_modules=["q_proj", "k_proj", "v_proj"])
        snapshot = tiny_models.build(MODEL, models_folder)
        with library.fork(drivers.write_config(tmp_path, snapshot, options=options)) as driver:
            harness = DriverHarness(driver, MODEL, models_folder)
            assert harness.client.adapter("Load", 1, str(made.adapter)) == FAILED
            harness.driver.logged("only targets k_proj, q_proj, v_proj", "lora_target_modules")
            attention = lora_adapters.make(MODEL, "attention", models_folder)
            assert harness.client.adapter("Load", 1, str(attention.adapter)) == OK


def test_failed_loads_leave_nothing_behind(
    models_folder: Path, made: lora_adapters.Made, tmp_path: Path
) -> None:
    """Each with its reason; SGLang's manager knows afterwards what it knew before."""
    paths = {}
    for number, (name, (build, _)) in enumerate(BROKEN.items()):
        paths[name] = str(build(made.adapter, tmp_path / f"broken-{number}"))
    snapshot = tiny_models.build(MODEL, models_folder)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS)
    good = str(made.adapter)
    results: dict[str, tuple[str, str, bool]] = drivers.call(
        lora_manager.load_broken, tmp_path, str(config), good, paths
    )
    assert results.keys() == BROKEN.keys() | {"SGLang's own"}
    for name, (error, text, unchanged) in results.items():
        assert error == "AdapterError", (name, error, text)
        assert unchanged, f"{name} left something behind"
        for part in BROKEN.get(name, (None, ("SGLang does not take it",)))[1]:
            assert part in text, (name, text)
