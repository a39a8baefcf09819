"""The CPU table of docs/supported-models.md, cell by cell."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Final

import pytest

import pie_driver_sglang
from support import REPOSITORY, versions
from support.models import architectures, model_checks
from support.models.reference import Context, Pages, Reference, random_tokens
from support.process import drivers, scripts

pytestmark = pytest.mark.engine

DOCUMENT: Final = REPOSITORY / "docs" / "supported-models.md"
GPU_TABLES: Final = sorted((REPOSITORY / "benches/gpu/output").glob("*-models.txt"))
TOLERANCE: Final = 1e-4
PAGE: Final = 16
WINDOW: Final = 4
LENGTHS: Final = (1, 3, 4, 5, 9)
"""What `window_lists.py` asks for."""
OPTIONS: Final = {
    "page_size": PAGE,
    "chunked_prefill_size": model_checks.CHUNK,
    "cpu_mem_budget_in_gb": model_checks.SWAP_GIB,
}


def rows(section: str) -> dict[str, list[str]]:
    """The rows of a section's table by their first cell."""
    text = DOCUMENT.read_text().partition(f"\n## {section}")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    return {name: rest for name, *rest in cells}


CPU: Final = rows("On the CPU")
FAMILIES: Final = rows("Families")
FUSED_ON_A_GPU: Final = "the fused layers need a GPU"


def test_the_table_has_every_architecture() -> None:
    assert list(CPU) == list(architectures.all_architectures())


@pytest.mark.parametrize("name", architectures.all_architectures())
def test_the_models_page_lists_what_works(name: str, models_folder: Path, tmp_path: Path) -> None:
    drivers.start_fork_server()
    *cells, reason = CPU[name]
    snapshot = architectures.build(name, models_folder)
    active = tmp_path / "active"
    options = {**OPTIONS, "active_file": str(active)}
    config = drivers.write_config(tmp_path, snapshot, options=options)
    try:
        driver = drivers.fork(config)
    except drivers.StartFailedError as error:
        assert cells == [model_checks.REFUSED, *["—"] * 4], error.stderr
        # What a reason quotes is from the message; without a quote all of it is.
        if name == "Gemma 4" and not versions.IS_OLDEST:
            # It does not get as far: SGLang cannot read the configuration of the text model alone.
            reason = "'head_dim' is a per-layer attribute"
        for said in re.findall(r"`([^`]+)`", reason) or [reason]:
            assert said in error.stderr
        assert "\nhint: " in error.stderr
        return
    original = architectures.reference_folder(snapshot)
    with driver:
        found = model_checks.find_out(model_checks.served_on_cpu(driver, original, TOLERANCE))
    assert driver.stop() == 0
    assert found == dict(zip(model_checks.SUBJECTS, cells, strict=False))
    assert reason == ""
    why = json.loads(active.read_text())["reasons"]["layers"]
    assert (why == f"not fused: {FUSED_ON_A_GPU}") == (FAMILIES[name][1] == "yes"), why


def test_what_needs_a_gpu_is_not_fused() -> None:
    """The driver does not load these here: their files must not name what can be fused."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    [sglang] = spec.submodule_search_locations or ()
    files = [path.read_text() for path in Path(sglang, "srt", "models").glob("*.py")]
    table = (
        Path(pie_driver_sglang.__file__).parent / "backends/sglang/compat/layers.py"
    ).read_text()
    builds = re.findall(r"^    \w+\.(\w+): \(", table, re.MULTILINE)
    assert "LlamaModel" in builds
    for name, cells in CPU.items():
        if cells[0] != model_checks.REFUSED:
            continue
        kind = architectures.all_architectures()[name].name
        [text] = [text for text in files if re.search(rf"^class {kind}\b", text, re.MULTILINE)]
        assert not re.search(rf"\b({'|'.join(builds)})\b", text), name
        assert FAMILIES[name][1] == "no", name


def test_experts_of_any_size(tmp_path: Path) -> None:
    """Left to itself, SGLang pads them on a CPU, and leaves what it adds uninitialised."""
    mixtral = architectures.ARCHITECTURES["Mixtral"]
    odd = mixtral._replace(options={**mixtral.options, "intermediate_size": 80})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(architectures.ARCHITECTURES, "odd", odd)
        snapshot = architectures.build("odd", tmp_path)
    reference = Reference(snapshot)
    prompt = random_tokens(reference.vocab_size, 40, "odd")
    config = drivers.write_config(tmp_path, snapshot)
    with drivers.fork(config) as driver:
        context = Context(Pages(driver.caps["total_pages"], PAGE))
        rows = range(len(prompt))
        reply = driver.client().forward([context.append(prompt, rows=rows)])
        assert reference.check(prompt, reply.tokens[0]) > len(prompt) // 2
    assert driver.stop() == 0


@pytest.mark.interpreted("tests/support/sglang_scripts/window_lists.py")
def test_decodes_see_the_whole_window(interpreted: str) -> None:
    """Triton's interpreter runs what lists a decode's tokens in windowed layers on a GPU."""
    windows = [[*range(max(length - WINDOW, 0), length)] for length in LENGTHS]
    uncorrected, *corrected = json.loads(interpreted.splitlines()[-1])
    assert corrected == [windows, windows]
    # SGLang leaves the oldest out. Where it does not any more, remove `correct_decode_windows`.
    assert uncorrected == [window[-(WINDOW - 1) :] for window in windows]


def test_the_rope_theta_of_a_configuration_is_found(models_folder: Path) -> None:
    """Gemma 3 has one for each kind of layer, GPT-2 none."""
    names = ("EXAONE 4", "Qwen3", "Gemma 3", "GPT-2")
    snapshots = [str(architectures.build(name, models_folder)) for name in names]
    out = scripts.run("tests/support/sglang_scripts/rope_theta.py", *snapshots)
    assert json.loads(out.splitlines()[-1]) == [10000.0, 10000.0, None, None]


def test_the_table_of_the_gpu_is_that_of_the_last_run() -> None:
    lines = GPU_TABLES[-1].read_text().splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert table
    assert "\n".join(table[1:]) in DOCUMENT.read_text()


class TestOptions:
    """Settings that reach SGLang, on a tiny Llama."""

    LENGTH: Final = 40

    @pytest.mark.parametrize(
        ("options", "dtype", "gap"),
        [
            ({"kv_cache_dtype": "bf16"}, "float32", 0.1),
            ({"kv_cache_dtype": "fp8_e4m3"}, "float32", 0.6),
            ({"kv_cache_dtype": "fp8_e5m2"}, "float32", 1.2),
            ({}, "float16", 0.05),
            ({}, "bfloat16", 0.25),
            ({"enable_fp32_lm_head": True}, "float32", 1e-3),
        ],
        ids=str,
    )
    def test_numbers(
        self,
        options: dict[str, str | bool],
        dtype: str,
        gap: float,
        llama_snapshot: Path,
        tmp_path: Path,
    ) -> None:
        """The tokens that logits leave no choice about are those of float32."""
        drivers.start_fork_server()
        config = drivers.write_config(
            tmp_path, llama_snapshot, options=options, activation_dtype=dtype
        )
        reference = Reference(llama_snapshot)
        prompt = random_tokens(reference.vocab_size, self.LENGTH, "options")
        with drivers.fork(config) as driver:
            context = Context(Pages(driver.caps["total_pages"], driver.caps["kv_page_size"]))
            request = context.append(prompt, rows=range(self.LENGTH))
            [found] = driver.client().forward([request]).tokens
        rows = list(zip(reference.rows(prompt), found, strict=True))
        decided = [(best, token) for (best, behind), token in rows if behind > gap]
        assert len(decided) > self.LENGTH // 4
        assert all(best == token for best, token in decided)

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"quantization": "awq"}, ["config file for awq", "`quantization` = 'awq'"]),
            ({"quantization": "w8a8_int8"}, ["'w8a8_int8' reads quantized checkpoints"]),
            ({"quantization": "fp8"}, ["method fp8", "`activation_dtype` = 'float32'"]),
            ({"kv_cache_dtype": "nvfp4"}, ["`kv_cache_dtype` is 'nvfp4'", "no KV pool"]),
            (
                {"enable_deterministic_inference": True, "enable_fp32_lm_head": True},
                ["on the CPU it does not support LlamaForCausalLM: `enable_fp32_lm_head`"],
            ),
            ({"model_impl": "transformers"}, ["`model_impl` is 'transformers'"]),
        ],
        ids=str,
    )
    def test_what_cannot_be(
        self, options: dict[str, str | bool], named: list[str], llama_snapshot: Path, tmp_path: Path
    ) -> None:
        config = drivers.write_config(tmp_path, llama_snapshot, options=options)
        with pytest.raises(drivers.StartFailedError) as caught, drivers.fork(config):
            pass
        _, _, failure = caught.value.stderr.rpartition("pie_driver_sglang: ")
        assert all(text in failure for text in named), failure
