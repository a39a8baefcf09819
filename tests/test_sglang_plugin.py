"""The n-gram drafter as a plugin of SGLang."""

from __future__ import annotations

import json
import re
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest

from pie_driver_sglang._core import Drafter
from pie_driver_sglang.sglang_plugins.ngram import NAME, NgramCorpus
from support import REPOSITORY
from support.process import scripts

PAGE = REPOSITORY / "docs/start/parts.md"

TEXT = [5, 6, 7, 8, 9, 5, 6, 7]


IMAGE = 1_000_000 + 5
"""SGLang fills the place of an image with such ids."""


def played(plugins: str = "") -> dict[str, Any]:
    """What `plugin_process.py` found, as its last line."""
    out = scripts.run("tests/support/sglang_scripts/ngram_worker.py", plugins=plugins)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.engine
class TestInSglang:
    def test_sglang_finds_it(self) -> None:
        found = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == NAME]
        assert [entry.value for entry in found] == [
            "pie_driver_sglang.sglang_plugins.ngram:register"
        ]

    def test_named_it_replaces_the_corpus_and_drafts(self) -> None:
        found = played(f"another, {NAME}")
        assert found["corpus"] == "pie_driver_sglang.sglang_plugins.ngram"
        # What the page for users of SGLang has them look for, of each of the four workers.
        assert len(found["logged"]) == 4
        assert set(found["logged"]) <= set(re.findall("`([^`]+)`", PAGE.read_text()))
        settings = [(each["overlap"], each["breadth"]) for each in found["rounds"]]
        assert settings == [(False, 1), (False, 8), (True, 1), (True, 8)]
        for each in found["rounds"]:
            # Of 37 tokens one cannot be foreseen; prompts are known from the first step on.
            assert each["tokens_a_step"] > 5, each
            assert each["tokens_at_first"] > 5, each
            # Requests 0 to 3, 4 to 7 and 8 to 11: the third of each four is cut in two passes, the
            # last ends with its prompt.
            heard = [4 * wave + number for wave in range(3) for number in (0, 1, 2, 3)]
            assert each["heard"] == [f"request-{number}" for number in heard]
            # The last wave's requests were still there.
            erased = [*range(8), 11]
            assert sorted(each["erased"]) == sorted(f"request-{number}" for number in erased)

    def test_another_version_of_sglang_ends_the_start(self) -> None:
        """SGLang only logs exceptions of plugins, and would serve without this one."""
        script = "tests/support/sglang_scripts/ngram_worker.py"
        log = scripts.fail(script, "--other-version", plugins=NAME)
        assert log.rstrip().endswith(f"{NAME}: sglang is 0.5.20\n\nhint: install 0.5.17")

    def test_not_named_it_leaves_sglang_alone(self) -> None:
        found = played()
        assert found["corpus"] == "sglang.srt.speculative.cpp_ngram.ngram_corpus"
        assert found["logged"] == []


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

    def test_without_drafts_the_tree_is_padded(self) -> None:
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

    def test_prompts_are_heard(self) -> None:
        corpus = NgramCorpus(draft_token_num=3, max_bfs_breadth=1)
        for _ in range(2):
            corpus.add_prompt("a", TEXT)
            tokens, _ = corpus.batch_get(["a"], [[7]], [len(TEXT)])
            assert tokens.tolist() == [7, 8, 9]

    def test_an_id_that_is_used_again_has_a_new_text(self) -> None:
        corpus = NgramCorpus(draft_token_num=3, max_bfs_breadth=1, capacity=0)
        corpus.add_prompt("a", TEXT)
        corpus.add_prompt("a", [5, 6, 1, 5, 6])
        tokens, _ = corpus.batch_get(["a"], [[6]], [5])
        assert tokens.tolist() == [6, 1, 5]
        # As long as the one before.
        corpus.add_prompt("a", [5, 6, 2, 5, 6])
        tokens, _ = corpus.batch_get(["a"], [[6]], [5])
        assert tokens.tolist() == [6, 2, 5]

    @pytest.mark.parametrize("outside", [IMAGE, -1, 1 << 40, 50])
    def test_ids_outside_the_vocabulary_are_not_drafted(self, outside: int) -> None:
        corpus = NgramCorpus(draft_token_num=3, max_bfs_breadth=1)
        corpus.vocab_size = 50
        prompt = [5, 6, 7, outside, 5, 6, 8, 9, 1, 2, 3, 4, 5, 6]
        corpus.add_prompt("a", prompt)
        tokens, _ = corpus.batch_get(["a"], [prompt[-12:]], [len(prompt)])
        assert tokens.tolist() == [6, 8, 9]
        # Nor by another request, from what they share.
        corpus.erase_match_state(["a"])
        tokens, _ = corpus.batch_get(["b"], [[6, 7]], [2])
        assert tokens.tolist() == [7, 0, 0]
        tokens, _ = corpus.batch_get(["b", "c"], [[6, 8], [1, outside]], [2, 2])
        assert tokens.tolist() == [8, 9, 1, 0, 0, 0]

    def test_a_request_that_ended_is_forgotten(self) -> None:
        corpus = NgramCorpus(draft_token_num=3, max_bfs_breadth=1, capacity=0)
        for number in range(2):
            corpus.add_prompt(str(number), TEXT)
        corpus.decoded(["1"])
        corpus.decoded([])
        tokens, _ = corpus.batch_get(["0", "1"], [[7], [7]], [len(TEXT)] * 2)
        assert tokens.tolist() == [7, 0, 0, 7, 8, 9]

    def test_where_nobody_decodes_the_oldest_is_forgotten(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pie_driver_sglang.sglang_plugins.ngram._MOST_WAITING", 2)
        corpus = NgramCorpus(draft_token_num=3, max_bfs_breadth=1, capacity=0)
        for number in range(3):
            corpus.add_prompt(str(number), TEXT)
        tokens, _ = corpus.batch_get(["0", "1"], [[7], [7]], [len(TEXT)] * 2)
        assert tokens.tolist() == [7, 0, 0, 7, 8, 9]

    def test_what_is_over_helps_others_until_the_reset(self) -> None:
        corpus = NgramCorpus(draft_token_num=3, max_bfs_breadth=1)
        corpus.add_prompt("a", TEXT)
        corpus.erase_match_state(["a", "nobody"])
        tokens, _ = corpus.batch_get(["b"], [[5, 6, 7]], [3])
        assert tokens.tolist() == [7, 8, 9]
        corpus.reset()
        tokens, _ = corpus.batch_get(["c"], [[5, 6, 7]], [3])
        assert tokens.tolist() == [7, 0, 0]

    def test_ranks_agree_in_whatever_order_requests_leave(self) -> None:
        drafts = []
        for order in (["a", "b"], ["b", "a"]):
            corpus = NgramCorpus(draft_token_num=3, max_bfs_breadth=1)
            corpus.add_prompt("a", [*TEXT, 1])
            corpus.add_prompt("b", [*TEXT, 2])
            corpus.erase_match_state(order)
            tokens, _ = corpus.batch_get(["c"], [[9, 5, 6, 7]], [4])
            drafts.append(tokens.tolist())
        assert drafts == [[7, 2, 0]] * 2

    def test_external_corpora_are_refused(self) -> None:
        with pytest.raises(ValueError, match="external_sam_budget=4"):
            NgramCorpus(external_sam_budget=4)
        corpus = NgramCorpus()
        assert corpus.list_external_corpora() == {}
        with pytest.raises(ValueError, match=r"'docs'.*SGLANG_PLUGINS"):
            corpus.load_external_corpus_named("docs", [[1]])

    def test_settings_out_of_range(self) -> None:
        with pytest.raises(ValueError, match="speculative_ngram_max_trie_depth is 256"):
            NgramCorpus(max_trie_depth=256)
        with pytest.raises(ValueError, match="speculative_ngram_capacity is 2000000000"):
            NgramCorpus(capacity=2_000_000_000)
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

    @pytest.mark.parametrize(("context", "tokens"), [(1, []), (0, [1])])
    def test_nothing_is_not_heard(self, context: int, tokens: list[int]) -> None:
        drafter = Drafter(nodes=2, max_depth=4, capacity=0, context_bytes=1000, branches=True)
        with pytest.raises(ValueError, match=f"context {context} has {len(tokens)} tokens"):
            drafter.append(context, 0, tokens)
