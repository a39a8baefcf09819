"""`benches/gpu/accuracy_check.py`: log-probabilities of checkpoints, its thresholds and texts."""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import REPOSITORY
from support.process import scripts


@pytest.fixture(scope="module")
def frame() -> Iterator[Any]:
    """What the checks have in common."""
    folder = str(REPOSITORY / "benches" / "gpu")
    sys.path.insert(0, folder)
    yield importlib.import_module("frame")
    sys.path.remove(folder)


def test_accuracy_of_the_embedded_model(frame: Any, forked_python: str, tmp_path: Path) -> None:
    """In float32 the engine's log-probabilities are those of transformers, by every path."""
    words = ["--device", "cpu", "--dtype", "float32", "--ways", "fused,drafts,lora"]
    words += ["--prompts", "8", "--tokens", "2000", "--output", "8"]
    words += ["--json", str(tmp_path / "record.json")]
    printed = scripts.run("benches/gpu/accuracy_check.py", *words, python=forked_python)
    record = frame.read(tmp_path / "record.json")
    assert record.ok, printed
    rows = {(row["way"], row["path"]): row for row in record.rows if "way" in row}
    paths = ("one", "several", "many", "prefix", "plain", "prefill")
    expected = [("fused", path) for path in paths]
    expected += [("drafts", "several"), ("drafts", "many")]
    expected += [("lora", path) for path in ("several", "many", "prefill")]
    assert list(rows) == expected
    for (_, path), row in rows.items():
        assert row["agreement"] >= 0.999
        assert row["tokens"] == (2044 if path == "prefill" else 64)
        if path != "plain":
            assert row["max"] < 1e-3
            assert abs(row["kl"]) < 1e-4
    text = rows["fused", "prefill"]
    assert text["perplexity"] == pytest.approx(text["reference_perplexity"], rel=1e-5)
    # The text is no noise to the model, to which all of its tokens would be as likely.
    assert text["perplexity"] < 4096
    assert rows["fused", "prefix"]["cached_tokens"] > rows["fused", "many"]["cached_tokens"]


def test_a_worse_path_is_a_violation(frame: Any, tmp_path: Path) -> None:
    """A path whose differences are 1.5 times SGLang's, and one that is as good."""
    check = importlib.import_module("accuracy_check")
    draw = np.random.default_rng(1)
    shape = (64, 100)
    own: dict[str, dict[str, Any]] = {"sglang": {}, "fused": {}}
    reference = {}
    for way, factor in (("sglang", 1.0), ("fused", 1.5)):
        for path in check.WAYS[way].paths:
            noise = draw.normal(0, 0.01, shape) * (factor if path == "one" else 1.0)
            logprob = np.full(shape, -1.0)
            fields = {"logprob": logprob + noise, "top": (logprob + noise)[..., None]}
            fields |= {"tokens": np.ones(shape, np.int64), "cached": np.full(64, 90)}
            fields["top_ids"] = fields["tokens"][..., None]
            own[way] |= {f"{path}/{name}": each for name, each in fields.items()}
            truth = {"logprob": logprob, "best": logprob, "top": logprob[..., None]}
            truth["best_id"] = fields["tokens"]
            reference |= {f"{way}/{path}/{name}": each for name, each in truth.items()}
        np.savez(tmp_path / f"{way}.npz", **own[way])
    np.savez(tmp_path / "transformers.npz", **reference)
    arguments = argparse.Namespace(device="cpu", json=None)
    report = frame.Report("benches/gpu/accuracy_check.py", arguments)
    comparison = check.Comparison("m", tmp_path, report, 2.0)
    comparison.show()
    comparison.hold(check.Work([[1] * 100] * 64, [], 64, 100), drafts=True)
    wrong = [bar for bar in report.record.bars if not bar.ok]
    assert len(wrong) == 4
    assert all(bar.name.startswith("m, fused one: ") for bar in wrong)
    assert [bar.name.split()[3] for bar in wrong] == ["mean", "p999", "mean", "p999"]


def test_divergence_of_the_most_probable_tokens(frame: Any) -> None:
    check = importlib.import_module("accuracy_check")
    p, q = np.log([[0.5, 0.25]]), np.log([[0.25, 0.25]])
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)
    assert check.kl_divergence(p, q) == pytest.approx([expected])
    assert check.kl_divergence(p, p) == pytest.approx([0])


def test_texts_are_real_and_always_the_same(frame: Any) -> None:
    texts = importlib.import_module("real_texts")
    manual = list(itertools.islice(texts.documentation(), 60))
    assert sum(map(len, manual)) > 200_000
    assert manual == list(itertools.islice(texts.documentation(), 60))
    for kind in texts.KINDS:
        found = texts.make_requests(kind, 64)
        assert len(set(found)) == 64
        assert found[:8] == texts.make_requests(kind, 8)
    with pytest.raises(ValueError, match="100000 requests of chat"):
        texts.make_requests("chat", 100_000)


@pytest.mark.engine
def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    script = "benches/gpu/accuracy_check.py"
    log = scripts.fail(script, "--device", "cpu", "--ways", "fused,other")
    assert "no way other; there are sglang, fused" in log
    (tmp_path / "config.json").write_text("{}")
    log = scripts.fail(script, "--device", "cpu", "--model", str(tmp_path))
    assert f"there is no '{tmp_path}/tokenizer.json'; download" in log
