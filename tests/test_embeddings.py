"""Embedding, classification and reward models on our own driver, against transformers."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from pie_driver_sglang import Engine
from pie_driver_sglang.backends.sglang.prompt_pooling import _MOST_PROMPTS, PromptPooling
from pie_driver_sglang.checkpoint.pooling import (
    PoolingFiles,
    UnsupportedPoolingError,
    has_head,
    may_attend_ahead,
    read_pooling,
)
from pie_driver_sglang.checkpoint.replacement import ServedCheckpoint
from pie_driver_sglang.engine.backend import Extends
from pie_driver_sglang.engine.graph_runner import CPU_ROWS_PER_REQUEST, prompt_rows
from pie_driver_sglang.errors import ConfigError, DriverError, StartError, WeightsError
from pie_driver_sglang.frontends.gateway import supervisor
from support.models.embedding_models import (
    MODELS,
    EmbeddingReference,
    build,
    random_prompts,
    write_modules,
)
from support.models.tiny_models import POCKET
from support.process import drivers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOLERANCE = 5e-6
CHUNK = 48
LENGTHS = (1, 2, 16, 17, 40, 96, 200)
"""Of prompts that are computed together; the last two in several parts."""
SHORT = (1, 2, 5, CPU_ROWS_PER_REQUEST)
"""Of prompts that the CPU, too, computes as it does decodes."""


@contextmanager
def serving(python: str, snapshot: Path, **arguments: Any) -> Iterator[Engine]:
    with mock.patch.object(sys, "executable", python):
        engine = Engine(
            model_path=str(snapshot),
            device="cpu",
            chunked_prefill_size=CHUNK,
            # No step is larger.
            max_step_ms=0,
            **arguments,
        )
    with engine:
        yield engine


def assert_close(found: Sequence[float], expected: Sequence[float]) -> None:
    assert found == pytest.approx(expected, rel=0, abs=TOLERANCE * max(1, *map(abs, expected)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embeddings")


@pytest.fixture(scope="module")
def qwen3(forked_python: str, folder: Path) -> Iterator[Engine]:
    snapshot = build("Qwen3-Embedding", folder)
    with serving(forked_python, snapshot, is_embedding=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def qwen3_reference(folder: Path) -> EmbeddingReference:
    return EmbeddingReference("Qwen3-Embedding", build("Qwen3-Embedding", folder))


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_transformers(name: str, forked_python: str, folder: Path) -> None:
    kind, snapshot = MODELS[name], build(name, folder)
    reference = EmbeddingReference(name, snapshot)
    given = {"is_embedding": True} if kind.is_embedding else {}
    prompts = random_prompts(LENGTHS)
    with serving(forked_python, snapshot, **given) as engine:
        answers = engine.encode(input_ids=prompts)
        # With the prefixes that are cached now.
        again = engine.encode(input_ids=prompts)
        short = [*random_prompts(SHORT), *random_prompts([CHUNK + 2])]
        answers += [*engine.encode(input_ids=short[:-1]), engine.encode(input_ids=short[-1])]
        prompts, again = prompts + short, again + answers[-len(short) :]
        assert engine.get_server_info()["active"]["steps"] == "prompt graphs"
        sizes = {len(answer["embedding"]) for answer in answers}
        assert sizes == {kind.options.get("num_labels", 64)}
        assert engine.get_server_info()["capabilities"]["embedding_size"] == max(sizes)
    for prompt, *found in zip(prompts, answers, again, strict=True):
        expected = reference.row(prompt)
        for answer in found:
            assert_close(answer["embedding"], expected)
            assert answer["meta_info"]["prompt_tokens"] == len(prompt)
    if not kind.has_head:
        norms = [math.hypot(*answer["embedding"]) for answer in answers]
        assert norms == pytest.approx([1.0] * len(norms))


def test_rows_of_an_extend_are_those_of_a_decode() -> None:
    """Each token is a row that sees the KV before it, of the block-table row of its request."""
    none, lens, before = torch.empty(0), [3, 1, 2], [0, 7, 48]
    staged = {
        "input_ids": torch.arange(100, 110),
        "positions": torch.tensor([0, 1, 2, 7, 48, 49, 0, 0, 0, 0]),
        "out_cache_loc": torch.arange(200, 210),
        "req_pool_indices": torch.tensor([4, 2, 9, 0]),
    }
    rows = prompt_rows(staged, Extends(none, none, none, lens, before))
    assert rows["input_ids"].tolist() == [100, 101, 102, 103, 104, 105]
    assert rows["out_cache_loc"].tolist() == [200, 201, 202, 203, 204, 205]
    assert rows["req_pool_indices"].tolist() == [4, 4, 4, 2, 9, 9]
    assert rows["seq_lens"].tolist() == (rows["positions"] + 1).tolist() == [1, 2, 3, 8, 49, 50]


def test_released_memory_and_an_update(
    qwen3: Engine, qwen3_reference: EmbeddingReference, folder: Path
) -> None:
    [prompt] = random_prompts([9])
    qwen3.release_memory_occupation()
    with pytest.raises(DriverError, match="is released"):
        qwen3.encode(input_ids=prompt)
    qwen3.resume_memory_occupation()
    success, message = qwen3.update_weights_from_disk(str(build("Qwen3-Embedding", folder)))
    assert success, message
    assert_close(qwen3.encode(input_ids=prompt)["embedding"], qwen3_reference.row(prompt))


@pytest.mark.parametrize("name", [name for name, kind in MODELS.items() if kind.has_head])
def test_an_update_without_the_head(name: str, folder: Path, tmp_path: Path) -> None:
    """It would leave the former head on other layers."""
    from safetensors.torch import load_file, save_file

    served = build(name, folder)
    tensors = load_file(served / "model.safetensors")
    found = ServedCheckpoint.read(served)
    found.check_folder(served)
    assert "score.weight" in found.needed()
    headless = tmp_path / "headless"
    shutil.copytree(served, headless)
    del tensors["score.weight"]
    save_file(tensors, headless / "model.safetensors")
    with pytest.raises(WeightsError, match=r"score\.weight is missing"):
        found.check_folder(headless)


def test_more_prompts_than_fit_a_step(qwen3: Engine, qwen3_reference: EmbeddingReference) -> None:
    prompts = random_prompts([5 + number % 37 for number in range(300)])
    before = qwen3.get_server_info()["internal_states"][0]
    answers = qwen3.encode(input_ids=prompts)
    after = qwen3.get_server_info()["internal_states"][0]
    for prompt, answer in list(zip(prompts, answers, strict=True))[::23]:
        assert_close(answer["embedding"], qwen3_reference.row(prompt))
    # Prompts share steps: fewer than one each.
    tokens = sum(map(len, prompts))
    assert tokens // CHUNK <= after["steps"] - before["steps"] < len(prompts)
    assert after["running"] == after["waiting"] == 0
    assert after["pages_free"] + after["pages_cached"] == after["pages_total"]


def test_dimensions_cut_and_normalize(qwen3: Engine, qwen3_reference: EmbeddingReference) -> None:
    [prompt] = random_prompts([30])
    whole = qwen3_reference.row(prompt)
    for size in (1, 7, 64):
        cut = whole[:size]
        norm = math.hypot(*cut)
        found = qwen3.encode(input_ids=prompt, dimensions=size)["embedding"]
        assert_close(found, [value / norm for value in cut])


def test_texts_are_tokenized(qwen3: Engine) -> None:
    texts = ["def f(x):", "return x", "a"]
    answers = qwen3.encode(texts, rid=["1", "2", "3"])
    assert [answer["meta_info"]["id"] for answer in answers] == ["1", "2", "3"]
    assert qwen3.tokenizer is not None
    tokens = qwen3.tokenizer.encode(texts)
    for answer, one in zip(answers, qwen3.encode(input_ids=tokens), strict=True):
        assert_close(answer["embedding"], one["embedding"])
    assert isinstance(qwen3.encode("a"), dict)


def test_pairs_are_scored(forked_python: str, folder: Path) -> None:
    name = "Qwen3-classes"
    reference = EmbeddingReference(name, build(name, folder))
    pairs = [["return x", "def f(x):"], ["a", "b"]]
    with serving(forked_python, build(name, folder)) as engine:
        assert engine.tokenizer is not None
        tokens = engine.tokenizer.encode_pairs([(first, second) for first, second in pairs])
        for answer, ids in zip(engine.rerank(pairs), tokens, strict=True):
            assert_close(answer["embedding"], reference.row(ids))
        for wrong in (["a"], [["a"]], [["a", 1]], [["a", "b", "c"]], "ab"):
            with pytest.raises(ConfigError, match="a list of pairs of texts"):
                engine.rerank(wrong)
        first, second = random_prompts((16, 40))
        scored = engine.score(first, [second])
        assert scored.prompt_tokens == 56
        assert_close(scored.scores[0], reference.row(first + second))
        expected = torch.softmax(torch.tensor(reference.row(first + second)), -1).tolist()
        assert_close(engine.score(first, [second], apply_softmax=True).scores[0], expected)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"input_ids": [4096]}, "token 4096 of `input_ids` is not in the vocabulary, which has"),
        ({"input_ids": []}, "a prompt has no tokens"),
        ({"input_ids": [[5], []]}, "a prompt has no tokens"),
        ({"input_ids": [5] * 600}, "a prompt has 600 tokens, and a context of this model 512"),
        ({"input_ids": [5], "dimensions": 65}, "dimensions is 65, it must be from 1 to 64"),
        ({"input_ids": [5], "dimensions": 0}, "dimensions is 0, it must be from 1 to 64"),
        ({"input_ids": [5], "dimensions": "a"}, "dimensions"),
        ({"input_ids": [5], "image_data": "x.png"}, "`image_data` is not served"),
        ({"input_ids": [5], "nothing": 1}, "`encode` has no argument 'nothing'"),
        ({}, "a call needs `prompt` or `input_ids`"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(qwen3: Engine, arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        qwen3.encode(**arguments)
    assert line in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    # The next one is served.
    assert qwen3.encode(input_ids=[5])["embedding"]


def test_an_empty_batch_has_no_embeddings(qwen3: Engine) -> None:
    assert qwen3.encode([]) == []


def test_texts_are_not_generated(qwen3: Engine) -> None:
    with pytest.raises(ConfigError, match="returns embeddings and generates no text"):
        qwen3.generate(input_ids=[5, 6])


def test_a_killed_driver_changes_no_row(qwen3: Engine, qwen3_reference: EmbeddingReference) -> None:
    [pid] = qwen3.get_server_info()["internal_states"][0]["driver_pids"]
    os.kill(pid, signal.SIGKILL)
    prompts = random_prompts([100, 3, 60])
    for prompt, answer in zip(prompts, qwen3.encode(input_ids=prompts), strict=True):
        assert_close(answer["embedding"], qwen3_reference.row(prompt))


def test_a_model_of_text_returns_no_embeddings(forked_python: str) -> None:
    with serving(forked_python, POCKET) as engine:
        with pytest.raises(ConfigError, match="start it with `--is-embedding`"):
            engine.encode("a")
        assert engine.generate("a", {"max_new_tokens": 1})["text"] is not None


def test_two_ranks_return_the_same(forked_python: str, folder: Path) -> None:
    for name in ("Qwen3-Embedding", "Skywork-Reward-Llama"):
        kind, snapshot = MODELS[name], build(name, folder)
        reference, prompts = EmbeddingReference(name, snapshot), random_prompts([4, 70, 33])
        given = {"is_embedding": True} if kind.is_embedding else {}
        with serving(forked_python, snapshot, tp_size=2, **given) as engine:
            for prompt, answer in zip(prompts, engine.encode(input_ids=prompts), strict=True):
                assert_close(answer["embedding"], reference.row(prompt))


def test_a_class_without_embeddings_is_refused(models_folder: Path, tmp_path: Path) -> None:
    from support.models import tiny_models

    drivers.start_fork_server()
    snapshot = tiny_models.build("gemma2", models_folder)
    config = drivers.write_config(tmp_path, snapshot, options={"is_embedding": True})
    with pytest.raises(drivers.StartFailedError) as failure:
        drivers.fork(config)
    assert "SGLang's Gemma2ForCausalLM returns no embeddings" in failure.value.stderr
    assert "\nhint: " in failure.value.stderr


def test_drafts_are_refused(forked_python: str, folder: Path) -> None:
    snapshot = build("Qwen3-Embedding", folder)
    given = {"is_embedding": True, "speculative_algorithm": "NGRAM"}
    start = serving(forked_python, snapshot, **given)
    with pytest.raises(StartError, match="drafts are of text"), start:
        pass


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        ("lasttoken", "lasttoken"),
        ("mean_tokens", "mean"),
        ("cls_token", "cls"),
        ("max_tokens", None),
        ("weightedmean_tokens", None),
    ],
)
def test_how_files_name_a_pooling(mode: str, found: str | None, tmp_path: Path) -> None:
    """In the form of older files, and of newer ones."""
    write_modules(tmp_path, mode, normalize=True)
    newer = tmp_path / "newer"
    shutil.copytree(tmp_path, newer)
    short = mode.removesuffix("_token").removesuffix("_tokens")
    (newer / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": short}))
    for folder in (tmp_path, newer):
        if found is None:
            with pytest.raises(UnsupportedPoolingError, match=r"asks for \w+ pooling"):
                read_pooling(folder)
        else:
            files = read_pooling(folder)
            assert (files.mode, files.dense, files.normalize) == (found, (), True)
            assert files.needs_all_states is (found != "lasttoken")


def test_files_that_ask_for_something_else_are_refused(tmp_path: Path) -> None:
    def changed(file: str, **values: Any) -> str:
        path = tmp_path / file
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), **values}))
        with pytest.raises(UnsupportedPoolingError) as refusal:
            read_pooling(tmp_path)
        path.write_text(before)
        return str(refusal.value)

    assert read_pooling(tmp_path).normalize is None
    write_modules(tmp_path, "mean_tokens", dense=7, normalize=True)
    [dense] = read_pooling(tmp_path).dense
    assert dense[1:] == (64, 7, True, "Tanh")
    pooling, layer = "1_Pooling/config.json", "2_Dense/config.json"
    assert "asks for cls, mean pooling" in changed(pooling, pooling_mode_cls_token=True)
    assert "leaves prompts out" in changed(pooling, include_prompt=False)
    assert "activation 'Softmax'" in changed(layer, activation_function="torch.nn.Softmax")
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(UnsupportedPoolingError, match=r"no `2_Dense/model\.safetensors`"):
        read_pooling(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    for order, words in (((0, 1, 3, 2), "Dense module after Normalize"), ((0, 4), "a CNN module")):
        listed = [*modules, {"type": "sentence_transformers.models.CNN"}]
        (tmp_path / "modules.json").write_text(json.dumps([listed[at] for at in order]))
        with pytest.raises(UnsupportedPoolingError, match=words):
            read_pooling(tmp_path)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ValueError, match=r"modules.json is no list"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    ("mode", "dense", "normalize", "ranks"),
    [
        ("mean_tokens", 0, True, 1),
        ("mean_tokens", 24, False, 2),
        ("cls_token", 0, False, 1),
        ("lasttoken", 24, True, 1),
    ],
)
def test_poolings_are_those_of_sentence_transformers(
    mode: str, dense: int, normalize: bool, ranks: int, forked_python: str, folder: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Prompts in parts, side by side and one after another with a shared prefix."""
    import torch

    name, snapshot = "Qwen3Model", tmp_path / "model"
    shutil.copytree(build(name, folder), snapshot)
    layer = write_modules(snapshot, mode, dense=dense, normalize=normalize)
    reference, prompts = EmbeddingReference(name, snapshot), random_prompts(LENGTHS)
    prompts.append([*prompts[-1][:150], *prompts[-2][:9]])
    takes = {"lasttoken": lambda x: x[-1], "cls_token": lambda x: x[0]}
    with serving(forked_python, snapshot, tp_size=ranks) as engine:
        answers = engine.encode(input_ids=prompts)
        again = engine.encode(input_ids=prompts[-1])
        sizes = engine.get_server_info()["capabilities"]
        assert (sizes["embedding_size"], sizes["embedding_normalized"]) == (dense or 64, normalize)
        cut = engine.encode(input_ids=prompts[0], dimensions=5)["embedding"]
    for prompt, answer in zip(prompts, answers, strict=True):
        row = takes.get(mode, lambda x: x.mean(0))(reference.states(prompt))
        if layer:
            row = torch.tanh(torch.nn.functional.linear(row, *layer))
        expected = torch.nn.functional.normalize(row, dim=-1) if normalize else row
        assert_close(answer["embedding"], expected.tolist())
    assert_close(again["embedding"], answers[-1]["embedding"])
    short = torch.tensor(answers[0]["embedding"][:5])
    assert_close(
        cut, (torch.nn.functional.normalize(short, dim=-1) if normalize else short).tolist()
    )


def test_a_prompt_that_was_not_pooled_from_its_start() -> None:
    """As a runtime with a prefix cache of its own would send it."""
    import torch

    table = SimpleNamespace(slots=torch.tensor([[0], [16], [32]]))
    pooling = PromptPooling(PoolingFiles(mode="mean"), cast(Any, table), torch.nn.Sequential())
    states, rows = torch.arange(12.0).view(6, 2), torch.tensor([1, 2])
    assert pooling.pool(states, [4, 2], [0, 0], rows).tolist() == [[3, 4], [9, 10]]
    # The second prompt begins anew, in pages that another one had.
    assert pooling.pool(states + 8, [4, 2], [4, 0], rows).tolist() == [[7, 8], [17, 18]]
    for before in (2, 3):
        with pytest.raises(RuntimeError, match=f"first {before} tokens of a prompt"):
            pooling.pool(states[:1], [1], [before], torch.tensor([1]))


def test_prompts_that_end_between_two_parts_of_another_are_not_kept() -> None:
    """There may be more of them than are kept of prompts that have not ended."""
    import torch

    from pie_driver_sglang.engine.backend import Hidden

    count = 3 * _MOST_PROMPTS // 2
    table = SimpleNamespace(slots=torch.arange(0, 16 * (count + 1), 16).view(-1, 1))
    pooling = PromptPooling(PoolingFiles(mode="mean"), cast(Any, table), torch.nn.Sequential())
    pooling.pool(torch.tensor([[1.0], [3.0]]), [2], [0], torch.tensor([0]))
    rows = torch.arange(1, count + 1)
    for states in (torch.ones(count, 1), torch.zeros(count, 1)):
        pooled = pooling.pool(states, [1] * count, [0] * count, rows)
        hidden = Hidden(pooled, None, request_ends=rows, read=pooling.end)
        assert torch.equal(hidden.pooled(rows - 1), states)
    assert pooling.pool(torch.tensor([[8.0]]), [1], [2], torch.tensor([0])).tolist() == [[4.0]]
    assert len(pooling._prompts) == 1


def test_prompts_that_never_end_are_not_kept_forever() -> None:
    """Those that were aborted between two parts."""
    import torch

    count = 2 * _MOST_PROMPTS
    table = SimpleNamespace(slots=torch.arange(0, 16 * count, 16).view(-1, 1))
    pooling = PromptPooling(PoolingFiles(mode="mean"), cast(Any, table), torch.nn.Sequential())
    for row in range(count):
        pooling.pool(torch.ones(1, 1), [1], [0], torch.tensor([row]))
    assert len(pooling._prompts) == _MOST_PROMPTS + 1


def test_a_prompt_keeps_no_more_than_its_row() -> None:
    """A pass of 8,192 tokens would stay in memory for each prompt that it had."""
    import torch

    table = SimpleNamespace(slots=torch.tensor([[0], [16]]))
    states = torch.arange(12.0).view(6, 2)
    for mode in ("cls", "mean"):
        pooling = PromptPooling(PoolingFiles(mode=mode), cast(Any, table), torch.nn.Sequential())
        pooling.pool(states, [4, 2], [0, 0], torch.tensor([0, 1]))
        kept = [prompt.state.untyped_storage().nbytes() for prompt in pooling._prompts.values()]
        assert kept == [8, 8]


def test_a_checkpoint_with_another_pooling_does_not_start(folder: Path, tmp_path: Path) -> None:
    drivers.start_fork_server()
    snapshot = tmp_path / "model"
    shutil.copytree(build("Qwen3Model", folder), snapshot)
    write_modules(snapshot, "max_tokens", normalize=True)
    with pytest.raises(drivers.StartFailedError) as failure:
        drivers.fork(drivers.write_config(tmp_path, snapshot))
    assert "its `1_Pooling/config.json` asks for max pooling" in failure.value.stderr


def test_embeddings_are_scaled_as_the_files_say(
    forked_python: str, folder: Path, tmp_path: Path
) -> None:
    """Without a Normalize module they are not; a model with code of its own has a warning."""
    name = "gte-Qwen2"
    snapshot = tmp_path / "model"
    shutil.copytree(build(name, folder), snapshot)
    path = snapshot / "config.json"
    own = {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    write_modules(snapshot, "lasttoken", normalize=False)
    reference, prompts = EmbeddingReference(name, snapshot), random_prompts([5, 70])
    log = tmp_path / "driver.log"
    with serving(forked_python, snapshot, is_embedding=True, log_file=str(log)) as engine:
        assert not engine.get_server_info()["capabilities"]["embedding_normalized"]
        for prompt, answer in zip(prompts, engine.encode(input_ids=prompts), strict=True):
            row = reference.row(prompt, scaled=False)
            assert abs(math.hypot(*row) - 1) > 0.1
            assert_close(answer["embedding"], row)
        cut = engine.encode(input_ids=prompts[0], dimensions=7)["embedding"]
        assert_close(cut, reference.row(prompts[0], scaled=False)[:7])
    lines = log.read_text().splitlines()
    [warning] = [line for line in lines if "may attend to later tokens" in line]
    assert "`auto_map` names its own code, 'modeling_qwen.Qwen2Model'" in warning


@pytest.mark.parametrize(
    ("architecture", "has"),
    [
        ("LlamaForClassification", True),
        ("LlamaForSequenceClassificationWithNormal_Weights", True),
        ("Qwen3ForRewardModel", True),
        ("Qwen3ForCausalLM", False),
        ("MistralModel", False),
    ],
)
def test_which_classes_have_a_head(architecture: str, has: bool) -> None:
    assert has_head([architecture]) is has


def test_what_may_attend_to_later_tokens() -> None:
    assert may_attend_ahead({"is_causal": False}) == "`is_causal` is false"
    for plain in ({}, {"is_causal": True}, {"auto_map": {"AutoTokenizer": "x.Y"}}, {"auto_map": 1}):
        assert may_attend_ahead(plain) is None


def test_the_gateway_has_no_embeddings(folder: Path) -> None:
    words = ["--model-path", str(build("Qwen3Model", folder)), "--device", "cpu"]
    with pytest.raises(ConfigError, match="the gateway's services return text"):
        supervisor._run(words)
