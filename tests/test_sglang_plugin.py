"""The n-gram drafter as SGLang's plugin: in where it is asked for, and right in what it drafts."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

import numpy as np
import pytest

import scripts
from pie_driver_sglang._core import Drafter
from pie_driver_sglang.sglang.ngram import NAME, NgramCorpus

TEXT = [5, 6, 7, 8, 9, 5, 6, 7]


@pytest.mark.engine
@pytest.mark.timeout(240)
class TestInSglang:
    def test_sglang_finds_it(self) -> None:
        found = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == NAME]
        assert [entry.value for entry in found] == ["pie_driver_sglang.sglang.ngram:register"]

    def test_named_it_replaces_the_corpus_and_drafts(self) -> None:
        out = scripts.run("tests/plugin_process.py", plugins=f"another, {NAME}")
        assert "corpus pie_driver_sglang.sglang.ngram" in out
        speeds = [float(speed) for speed in re.findall(r"\d+\.\d+", out)]
        # Of 37 tokens one cannot be foreseen; prompts are known from the first step on.
        assert len(speeds) == 8 and min(speeds) > 5, out

    def test_not_named_it_leaves_sglang_alone(self) -> None:
        assert "corpus sglang.srt.speculative.cpp_ngram.ngram_corpus" in scripts.run(
            "tests/plugin_process.py"
        )


class TestCorpus:
    def test_a_chain(self) -> None:
        corpus = NgramCorpus(draft_token_num=5, max_bfs_breadth=1)
        tokens, mask = corpus.batch_get(["a"], [TEXT], [len(TEXT)])
        assert tokens.tolist() == [7, 8, 9, 5, 6]
        assert mask.reshape(5, 5).tolist() == np.tri(5, dtype=bool).tolist()

    def test_branches(self) -> None:
        corpus = NgramCorpus(draft_token_num=16)
        text = [9, 1, 2, 8, 1, 3, 9, 1]
        tokens, mask = corpus.batch_get(["a"], [text], [len(text)])
        rows = mask.reshape(16, 16)
        behind_the_last = [token for token, row in zip(tokens, rows, strict=True) if row.sum() == 2]
        assert sorted(behind_the_last) == [2, 3]

    def test_nothing_known_is_padded(self) -> None:
        tokens, mask = NgramCorpus(draft_token_num=3).batch_get(["a"], [[4]], [1])
        assert tokens.tolist() == [4, 0, 0]
        assert mask.reshape(3, 3).tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]

    def test_only_ends_are_brought(self) -> None:
        corpus = NgramCorpus(draft_token_num=3, max_bfs_breadth=1)
        corpus.batch_get(["a", "b"], [TEXT, [1]], [len(TEXT), 1])
        tokens, _ = corpus.batch_get(["b", "a"], [[1, 2], [7, 8]], [2, len(TEXT) + 1])
        assert tokens.tolist() == [2, 0, 0, 8, 9, 5]
        # Fewer than before: the request went back.
        tokens, _ = corpus.batch_get(["a"], [[7, 8]], [4])
        assert tokens.tolist() == [8, 0, 0]

    def test_prompts_are_heard_once(self) -> None:
        corpus = NgramCorpus(draft_token_num=3, max_bfs_breadth=1)
        corpus.hear("a", TEXT)
        tokens, _ = corpus.batch_get(["a"], [[7]], [len(TEXT)])
        assert tokens.tolist() == [7, 8, 9]
        corpus.hear("a", TEXT[:4])
        tokens, _ = corpus.batch_get(["a"], [[7]], [len(TEXT)])
        assert tokens.tolist() == [7, 8, 9]

    def test_what_is_over_helps_others_until_the_reset(self) -> None:
        corpus = NgramCorpus(draft_token_num=3, max_bfs_breadth=1)
        corpus.hear("a", TEXT)
        corpus.erase_match_state(["a", "nobody"])
        tokens, _ = corpus.batch_get(["b"], [[5, 6, 7]], [3])
        assert tokens.tolist() == [7, 8, 9]
        corpus.reset()
        tokens, _ = corpus.batch_get(["c"], [[5, 6, 7]], [3])
        assert tokens.tolist() == [7, 0, 0]

    def test_external_corpora_are_refused(self) -> None:
        with pytest.raises(ValueError, match="external_sam_budget=4"):
            NgramCorpus(external_sam_budget=4)
        corpus = NgramCorpus()
        assert corpus.list_external_corpora() == {}
        with pytest.raises(ValueError, match=r"'docs'.*SGLANG_PLUGINS"):
            corpus.load_external_corpus_named("docs", [[1]])

    def test_settings_out_of_range(self) -> None:
        with pytest.raises(ValueError, match="max_depth is 256"):
            NgramCorpus(max_trie_depth=256)
        with pytest.raises(ValueError, match="0 nodes"):
            NgramCorpus(draft_token_num=0)


class TestDrafter:
    @pytest.mark.parametrize(
        ("contexts", "positions", "tokens", "said"),
        [
            ([1, 2], [0], [[1], [1]], "2 contexts, 1 positions"),
            ([1], [0], [[]], "context 1 has 0 tokens"),
            ([0], [0], [[1]], "context 0"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, contexts: list[int], positions: list[int], tokens: list[list[int]], said: str
    ) -> None:
        drafter = Drafter(nodes=2, max_depth=4, capacity=0, context_bytes=1000, branches=True)
        with pytest.raises(ValueError, match=said):
            drafter.draft(contexts, positions, tokens)
