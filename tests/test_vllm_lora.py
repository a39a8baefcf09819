"""What is vLLM's own about LoRA adapters: its layers, their slots, and models that have none.

What both libraries have in common is in `test_adapters.py` and its neighbours.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import REPOSITORY
from support.models import architectures, lora_adapters, tiny_models
from support.models.reference import Reference
from support.process import drivers, vllm_drivers
from support.process.adapter_driver import MODEL, DriverHarness

pytestmark = pytest.mark.engine

SCRIPT = REPOSITORY / "tests" / "support" / "kernels" / "vllm_lora.py"
OPTIONS = {"enable_lora": True, "max_num_batched_tokens": 32, "max_num_seqs": 32}
ATTENTION = "attention"
"""An adapter of attention alone, as mixtures of experts take them."""


def test_slots_and_kernels(models_folder: Path, tmp_path: Path, vllm_python: str) -> None:
    snapshot = tiny_models.build(MODEL, models_folder)
    made = [lora_adapters.make(MODEL, name, models_folder) for name in ("linear", "head", "mlp")]
    config = drivers.write_config(tmp_path, snapshot, options={**OPTIONS, "max_loras": 1})
    result = subprocess.run(
        [vllm_python, str(SCRIPT), str(config), *(str(each.adapter) for each in made)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-3000:]}"


@pytest.mark.parametrize(
    "name", ["Qwen2", "Mistral", "Gemma 2", "Gemma 3", "Phi-3", "Qwen3-MoE", "GLM-4.5"]
)
def test_other_models(name: str, models_folder: Path, tmp_path: Path, vllm_python: str) -> None:
    """Biases, windows, soft caps, layers that checkpoints have fused, and experts beside them.

    The slots of all of them take the memory that is planned: those of models without slots for
    embeddings and LM head, and with a dense MLP before those with experts.
    """
    folder = models_folder / "wide"
    snapshot = architectures.build(name, folder, wide=True)
    adapter = {"Phi-3": "fused", "Qwen3-MoE": ATTENTION, "GLM-4.5": ATTENTION}.get(name, "linear")
    made = lora_adapters.make_for(snapshot, adapter, tmp_path)
    config = drivers.write_config(tmp_path, snapshot, options={**OPTIONS, "max_loras": 31})
    with vllm_drivers.fork(config, vllm_python) as driver:
        log = driver.logged("memory as it is (as planned)")
        sizes = re.search(r"adapters (\S+ MiB) \((\S+ MiB)\)", log)
        assert sizes is not None
        assert sizes[1] == sizes[2]
        harness = DriverHarness(driver, MODEL, models_folder)
        harness.references = [Reference(snapshot), Reference(made.merged)]
        assert harness.client.adapter("Load", 1, str(made.adapter)) == 0
        harness.check_logits([0, 1, 0, 1], 40)
        harness.check_greedy([harness.start(number, 20) for number in (1, 0, 1)], 6)
    assert driver.stop() == 0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Llama", {"lora_target_modules": ["c_attn"]}, "asks for c_attn, but adapters of Llama"),
        ("Qwen3-MoE", {"lora_target_modules": ["down_proj"]}, "asks for down_proj, but adapters"),
        (
            "Gemma 2",
            {"lora_target_modules": ["lm_head"]},
            "asks for lm_head, but adapters",
        ),
        ("StableLM", {}, "adapters of StablelmForCausalLM can change nothing"),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_the_weights_are_read(
    name: str,
    options: dict[str, Any],
    words: str,
    models_folder: Path,
    tmp_path: Path,
    vllm_python: str,
) -> None:
    built = architectures.build(name, models_folder / "wide", wide=True)
    snapshot = shutil.copytree(built, tmp_path / "model")
    for file in snapshot.glob("*.safetensors"):
        content = file.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        # All numbers are NaN: loaded, they would be refused.
        file.write_bytes(content[:header] + b"\xff" * (len(content) - header))
    config = drivers.write_config(tmp_path, snapshot, options={**OPTIONS, **options})
    with pytest.raises(drivers.StartFailedError) as caught:
        vllm_drivers.fork(config, vllm_python)
    assert words in caught.value.stderr
    assert "\nhint: remove `lora_target_modules`, or `enable_lora`" in caught.value.stderr
    assert "Traceback" not in caught.value.stderr
