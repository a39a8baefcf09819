"""The driver on vLLM, as the Pie runtime starts it: its tokens, its imports, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang.memory.host import available_bytes
from support import REPOSITORY
from support.models import published_models, tiny_models
from support.models.damaged_checkpoints import added, damaged, without
from support.models.reference import Reference
from support.process import drivers, vllm_drivers
from support.process import runtime_client as rc

pytestmark = pytest.mark.engine

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Water boils at 100 degrees. " * 9)
STEPS = 12
TRAP = "SGLang was imported"
ACTIVATION_BYTES = 14_400
"""Of a token of the model in the repository, in float32, as the memory plan counts them."""


def tokens_of(snapshot: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(snapshot / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def continued(client: _core.Client, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy continuations of prompts that share their frames."""
    contexts = [
        rc.Context(list(prompt), list(range(16 * number, 16 * number + 16)), context_id=number + 1)
        for number, prompt in enumerate(prompts)
    ]
    for _ in range(STEPS):
        reply = client.forward([context.request() for context in contexts])
        assert reply.status is None
        for context, [token] in zip(contexts, reply.tokens, strict=True):
            context.take(token)
    return [c.tokens[len(prompt) :] for c, prompt in zip(contexts, prompts, strict=True)]


@pytest.fixture
def without_sglang(tmp_path: Path) -> Path:
    """A folder whose `sglang` ends whatever imports it."""
    folder = tmp_path / "trap"
    folder.mkdir()
    trap = f"import os; os.write(2, {TRAP.encode()!r}); os._exit(99)"
    (folder / "sglang.py").write_text(trap)
    return folder


def test_a_start_as_pies_runtime_does_it(tmp_path: Path, without_sglang: Path) -> None:
    """In a new interpreter, in which nothing may import SGLang."""
    if reason := vllm_drivers.missing():
        pytest.skip(reason)
    active = tmp_path / "active"
    options = {"active_file": str(active), "max_model_len": 1024, "max_num_seqs": 16}
    config = drivers.write_config(tmp_path, tiny_models.POCKET, options=options)
    with vllm_drivers.spawn(config, before=without_sglang) as driver:
        assert driver.caps["max_model_len"] == 1024
        assert driver.caps["max_forward_requests"] == 16
        assert driver.caps["kv_page_size"] == 16
        prompts = tokens_of(tiny_models.POCKET)
        found = continued(driver.client(), prompts)
    assert driver.stop() == 0
    assert not driver.region.exists()
    assert TRAP not in driver.stderr()
    parts = json.loads(active.read_text())
    assert (parts["attention"], parts["layers"], parts["steps"]) == (
        "CPU_ATTN", "vllm", "graph path")  # fmt: skip
    # What SGLang's backend says on the same ring.
    config = drivers.write_config(tmp_path, tiny_models.POCKET)
    with drivers.running(config) as other:
        assert continued(other.client(), prompts) == found
    assert [Reference(tiny_models.POCKET).greedy(prompt, STEPS)[0] for prompt in prompts] == found


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, list[list[int]]]:
    """Its folder, and what transformers says."""
    snapshot = published_models.smollm2()
    reference = Reference(snapshot)
    return snapshot, [reference.greedy(prompt, STEPS)[0] for prompt in tokens_of(snapshot)]


@pytest.mark.parametrize(
    ("enforce_eager", "ranks"),
    [(False, 1), (True, 1), (False, 3)],
    ids=["graph path", "eager", "three ranks"],
)
def test_smollm2_says_what_transformers_does(
    enforce_eager: bool,
    ranks: int,
    tmp_path: Path,
    vllm_python: str,
    smollm2: tuple[Path, list[list[int]]],
) -> None:
    """Nine heads over three of keys and values."""
    snapshot, expected = smollm2
    options = {"enforce_eager": enforce_eager, "max_num_batched_tokens": 32, "max_model_len": 512}
    config = drivers.write_config(tmp_path, snapshot, options=options, **drivers.spread(ranks))
    with vllm_drivers.fork(config, vllm_python) as driver:
        found = continued(driver.client(), tokens_of(snapshot))
    assert driver.stop() == 0
    assert found == expected


def test_smollm2_cannot_be_divided_by_two(
    tmp_path: Path, vllm_python: str, smollm2: tuple[Path, list[list[int]]]
) -> None:
    log = refusal_of(drivers.write_config(tmp_path, smollm2[0], **drivers.spread(2)), vllm_python)
    assert "is 2, but the model has 9 attention heads over 3 of keys and values" in log
    assert "hint: use 1 or 3 devices" in log
    assert "importing vLLM" not in log


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graph path", "eager"])
def test_two_ranks_say_what_one_does(enforce_eager: bool, tmp_path: Path, vllm_python: str) -> None:
    """Each of them has half of the weights, and as much of the KV as was planned for it."""
    options = {"enforce_eager": enforce_eager, "max_num_batched_tokens": 32}
    prompts = tokens_of(tiny_models.POCKET)
    config = drivers.write_config(
        tmp_path, tiny_models.POCKET, options=options, **drivers.spread(2)
    )
    with vllm_drivers.fork(config, vllm_python) as driver:
        found = continued(driver.client(), prompts)
        log = driver.logged("memory as it is (as planned)")
    assert driver.stop() == 0
    assert found == [Reference(tiny_models.POCKET).greedy(prompt, STEPS)[0] for prompt in prompts]
    assert re.search(r"weights +[\d.]+ MiB  of which every rank has 0\.\d MiB", log)
    sizes = re.search(r"planned\): weights ([\d.]+) MiB \(([\d.]+) MiB\), KV (\S+) MiB", log)
    assert sizes is not None
    real, planned, _ = map(float, sizes.groups())
    assert real == pytest.approx(planned, abs=0.11)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ngram_drafts_are_offered(ranks: int, tmp_path: Path, vllm_python: str) -> None:
    options = {"spec_ngram_enabled": True}
    config = drivers.write_config(
        tmp_path, tiny_models.POCKET, options=options, **drivers.spread(ranks)
    )
    with vllm_drivers.fork(config, vllm_python) as driver:
        assert driver.caps["enable_system_speculation"]
        prompt = [5, 6, 7, 8] * 8
        context = rc.Context(prompt, list(range(8)))
        request = context.request(wants_drafts=True)
        reply = driver.client().forward([request])
        assert reply.status is None
        driver.logged("drafts: ngram")
    assert driver.stop() == 0


def test_the_list_of_engine_args_is_that_of_the_installed_vllm() -> None:
    if reason := vllm_drivers.missing():
        pytest.skip(reason)
    script = REPOSITORY / "tools" / "generate_engine_args.py"
    command = [sys.executable, str(script), "--check"]
    found = {**os.environ, **vllm_drivers.environment()}
    result = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def refusal_of(config: Path, program: str) -> str:
    with pytest.raises(drivers.StartFailedError) as caught:
        vllm_drivers.fork(config, program)
    assert caught.value.returncode == 1
    assert drivers.CLOSED_EARLY not in caught.value.stderr
    assert "Traceback" not in caught.value.stderr
    return caught.value.stderr


@pytest.mark.parametrize(
    ("driver", "options", "message"),
    [
        ({}, {"max_num_seq": 4}, "unknown option 'max_num_seq'"),
        ({"device": ["cuda:0"]}, {}, "is built for CPUs, and the device is cuda:0"),
        (
            drivers.spread(3),
            {},
            "`driver.tensor_parallel_size` is 3, but the model has 4 attention heads over 2",
        ),
        (
            drivers.spread(2),
            {"hf_overrides": {"intermediate_size": 767}},
            "`driver.tensor_parallel_size` is 2, but the model's `intermediate_size` is 767",
        ),
        ({}, {"max_lora_rank": 24}, "`max_lora_rank` is 24, and vLLM's LoRA kernels take 1, 8"),
    ],
)
def test_what_is_wrong_is_said_before_vllm_is_imported(
    driver: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path, vllm_python: str
) -> None:
    config = drivers.write_config(tmp_path, tiny_models.POCKET, options=options, **driver)
    log = refusal_of(config, vllm_python)
    assert message in log
    assert "importing vLLM" not in log


def test_passes_that_do_not_fit_name_vllms_option(tmp_path: Path, vllm_python: str) -> None:
    """Passes of some 30 % of the memory, of which the driver may take 1 %."""
    tokens = int(0.3 * available_bytes()) // ACTIVATION_BYTES
    options = {"gpu_memory_utilization": 0.01, "max_num_batched_tokens": tokens}
    config = drivers.write_config(tmp_path, tiny_models.POCKET, options=options)
    log = refusal_of(config, vllm_python)
    hint = log.rpartition("hint: ")[2]
    assert re.match(r"set `gpu_memory_utilization = 0\.[3-9]` in the options", hint), log


def test_weights_that_no_file_lists_are_estimated(tmp_path: Path, vllm_python: str) -> None:
    """Made up ones, of a class that transformers lacks: a Llama's, by another name."""
    changes = {"architectures": ["InternLM3ForCausalLM"], "max_position_embeddings": 256}
    options = {"load_format": "dummy", "hf_overrides": changes}
    config = drivers.write_config(tmp_path, tiny_models.POCKET, options=options)
    with vllm_drivers.fork(config, vllm_python) as driver:
        assert driver.caps["max_model_len"] == 256
        log = driver.logged("the memory plan estimates the weights", "memory as it is")
    found = re.search(r"\): weights ([\d.]+) MiB \(([\d.]+) MiB\)", log)
    assert found is not None, log
    assert float(found[1]) == pytest.approx(float(found[2]), rel=0.1)


def test_an_unreadable_index_of_weights_is_refused(tmp_path: Path, vllm_python: str) -> None:
    snapshot = tmp_path / "model"
    shutil.copytree(tiny_models.POCKET, snapshot)
    (snapshot / "model.safetensors.index.json").write_text("{")
    log = refusal_of(drivers.write_config(tmp_path, snapshot), vllm_python)
    assert f"cannot read the sizes of the weights in {snapshot}" in log


FIRST = "model.layers.0"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        ({}, without(f"{FIRST}.self_attn.k_proj"), f"`{FIRST}.self_attn.qkv_proj.weight`"),
        ({}, added(f"{FIRST}.self_attn.z_proj.weight", 32, 64), "z_proj"),
        (
            {"intermediate_size": 80},
            None,
            "mlp.down_proj.weight is (64, 96), but the model's (64, 80)",
        ),
        (
            {"num_key_value_heads": 1},
            None,
            "self_attn.k_proj.weight is (64, 64), but the model's (32, 64)",
        ),
    ],
    ids=["missing", "surplus", "width", "heads-of-keys"],
)
def test_a_checkpoint_that_does_not_fit_the_model_is_refused(
    ranks: int,
    config: dict[str, Any],
    change: Any,
    named: str,
    served_snapshot: Path,
    tmp_path: Path,
    vllm_python: str,
) -> None:
    """vLLM itself serves all but the second, with what memory held or with a part."""
    folder = damaged(served_snapshot, tmp_path, change or (lambda _: None), **config)
    path = drivers.write_config(tmp_path, folder, **drivers.spread(ranks))
    assert named in refusal_of(path, vllm_python)


def test_masks_and_adapters_are_refused_by_name(vllm_driver: drivers.Driver) -> None:
    """And neighbours are served."""
    client = vllm_driver.client()
    good = rc.Context([5, 6, 7], [0])
    masked = rc.Context([5, 6, 7], [1], context_id=2)
    reply = client.forward([good.request(), masked.request(masks=[[0, 1], [0, 2], [1, 2]])])
    assert [len(tokens) for tokens in reply.tokens] == [1, 0]
    vllm_driver.logged("mask")
    bound = rc.Context([5, 6, 7], [2], context_id=3)
    reply = client.forward([good.request(), bound.request(adapter_id=3)])
    assert [len(tokens) for tokens in reply.tokens] == [1, 0]
    vllm_driver.logged("adapter")
