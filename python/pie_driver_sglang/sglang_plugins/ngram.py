"""The n-gram drafter as a plugin of SGLang: replaces the corpus of its NGRAM worker.

SGLang loads entry points of ``sglang.srt.plugins``; this one does nothing unless it is named::

    SGLANG_PLUGINS=pie_ngram python -m sglang.launch_server --speculative-algorithm NGRAM ...

The variable disables plugins that it does not name, so add this one to others that are needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pie_driver_sglang._core import Drafter

NAME = "pie_ngram"
"""The plugin's name, in ``SGLANG_PLUGINS`` and among the entry points."""

_LOG = logging.getLogger(__name__)
_CONTEXT_BYTES = 1 << 30
"""Memory of the requests' texts, above which the least recently used one is evicted."""
_MOST_WAITING = 4096
"""Maximum requests between prefill and first decode."""
_PAD_VALUES = 1_000_000
"""First of SGLang's placeholder ids for images, above every vocabulary."""
_NAMES = {
    "max_depth": "speculative_ngram_max_trie_depth",
    "capacity": "speculative_ngram_capacity",
}
"""SGLang's names of the drafter's parameters."""


class NgramCorpus:
    """Replaces SGLang's class of that name, see ``srt/speculative/cpp_ngram``.

    Matches are searched in a request's own text, prompt included, and in that of other requests.
    ``min_bfs_breadth`` and ``match_type`` are ignored: a tree grows where it is most probable.

    Ids outside the vocabulary, such as placeholders of images, are never drafted.

    Args:
        max_trie_depth: Longest match, in tokens.
        min_bfs_breadth: Not used.
        max_bfs_breadth: 1 for drafts without branches.
        draft_token_num: Nodes of a tree, the last token included.
        match_type: Not used.
        capacity: Tokens of the history that requests share, 64 bytes each at most.
        external_sam_budget: Must be 0.
        external_corpus_max_tokens: Not used.

    Raises:
        ValueError: A setting is out of range, or external corpora are asked for.
    """

    def __init__(
        self,
        max_trie_depth: int = 18,
        min_bfs_breadth: int = 1,
        max_bfs_breadth: int = 8,
        draft_token_num: int = 8,
        match_type: str = "BFS",
        capacity: int = 1_000_000,
        external_sam_budget: int = 0,
        external_corpus_max_tokens: int = 10_000_000,
    ) -> None:
        if external_sam_budget:
            _refuse_corpora(f"speculative_ngram_external_sam_budget={external_sam_budget}")
        self.draft_token_num = draft_token_num
        self.vocab_size = _PAD_VALUES
        """Tokens from here on are not drafted; the worker's hook sets the model's own size."""
        self._waiting: dict[str, None] = {}
        """Requests added since the last decode, the oldest first."""
        self._new = partial(
            Drafter,
            nodes=draft_token_num,
            max_depth=max_trie_depth,
            capacity=capacity,
            context_bytes=_CONTEXT_BYTES,
            branches=max_bfs_breadth > 1,
        )
        try:
            self._drafter = self._new()
        except ValueError as error:
            text = str(error)
            for ours, theirs in _NAMES.items():
                text = text.replace(ours, theirs)
            raise ValueError(text) from None

    def add_prompt(self, req_id: str, tokens: Sequence[int]) -> None:
        """Add a request's text before its first decode."""
        start, known = self._known(tokens)
        self._drafter.append(_context(req_id), start, known)
        self._waiting[req_id] = None
        if len(self._waiting) > _MOST_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self.erase_match_state([oldest])

    def decoded(self, req_ids: Iterable[str]) -> None:
        """Forgets the requests that were received and are not among those that decode now.

        SGLang erases only what has decoded before. A request that ended with its prompt, or was
        taken back, is in no batch; one that waits longer brings its last tokens again, or all.
        """
        self.erase_match_state(list(self._waiting.keys() - set(req_ids)))
        self._waiting.clear()

    def batch_get(
        self, req_ids: list[str], batch_tokens: list[list[int]], total_lens: list[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Drafts for requests.

        Args:
            req_ids: Whose drafts.
            batch_tokens: The last tokens of each, one at least.
            total_lens: The number of all its tokens.

        Returns:
            tokens int64 ``(requests * nodes,)`` and the mask bool ``(requests * nodes * nodes,)``.
            The first node of a tree is the last token, or 0 if that is outside the vocabulary;
            missing ones are tokens 0 after it.
        """
        contexts = [_context(req_id) for req_id in req_ids]
        starts, ends = [], []
        for total, last in zip(total_lens, batch_tokens, strict=True):
            start, known = self._known(last)
            starts.append(total - len(last) + start)
            ends.append(known)
        tokens, mask = self._drafter.draft(contexts, starts, ends)
        return np.frombuffer(tokens, np.int64), np.frombuffer(mask, np.bool_)

    def batch_put(self, batch_tokens: list[list[int]]) -> None:
        """Does nothing: `batch_get` brings the same tokens, and says whose they are."""

    def synchronize(self) -> None:
        """Does nothing: nothing runs in the background."""

    def erase_match_state(self, req_ids: list[str]) -> None:
        """Forgets requests that are over; what they said stays in the shared history.

        It gets there in the order of their ids: SGLang's comes from a set, and differs by rank.
        """
        for req_id in sorted(req_ids):
            self._drafter.release(_context(req_id))

    def reset(self) -> None:
        """Forgets everything."""
        self._drafter = self._new()
        self._waiting.clear()

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> int:
        """Refuses: there are no external corpora here."""
        _refuse_corpora(f"external corpus {corpus_id!r}")

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Refuses: there are no external corpora here."""
        _refuse_corpora(f"external corpus {corpus_id!r}")

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Refuses: there are no external corpora here."""
        _refuse_corpora(f"external corpus {corpus_id!r}")

    def list_external_corpora(self) -> dict[str, int]:
        """None."""
        return {}

    def _known(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """What follows the last id outside the vocabulary, and where it starts; never empty."""
        ids = np.asarray(tokens, np.int64)
        outside = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        start = int(outside[-1]) + 1 if len(outside) else 0
        return (start, ids[start:].tolist()) if start < len(ids) else (max(len(ids) - 1, 0), [0])


def _refuse_corpora(what: str) -> NoReturn:
    raise ValueError(
        f"{what}: the plugin {NAME} has no external corpora; "
        f"leave them out, or start without {NAME} in SGLANG_PLUGINS"
    )


def _context(req_id: str) -> int:
    """A request's context id, not 0; the same on all ranks, unlike Python's `hash`."""
    return int.from_bytes(blake2b(req_id.encode(), digest_size=8).digest(), "little") or 1


def _configure_worker(_: None, worker: Any, *__: Any, **___: Any) -> None:
    """Set a new worker's trie depth and vocabulary size, and log that the drafter is in use."""
    worker.max_trie_depth = max(worker.max_trie_depth, worker.draft_token_num)
    worker.ngram_corpus.vocab_size = worker.model_runner.model_config.vocab_size
    _LOG.info("%s drafts in the place of SGLang's corpus", NAME)


def _add_prompts(_: Any, worker: Any, batch: Any, *__: Any, **___: Any) -> None:
    """Add prompts to the corpus once their last chunk is running."""
    if batch.forward_mode.is_decode():
        worker.ngram_corpus.decoded(request.rid for request in batch.reqs)
    elif batch.forward_mode.is_extend():
        from pie_driver_sglang.backends.sglang.compat.hooks import corpus_prompt

        for request in batch.reqs:
            if request is not batch.chunked_req:
                text = [*corpus_prompt(request), *request.output_ids]
                worker.ngram_corpus.add_prompt(request.rid, text)


def register() -> None:
    """Install the corpus, if ``SGLANG_PLUGINS`` names it; SGLang calls this in each process."""
    from pie_driver_sglang.backends.sglang.compat import hooks

    if hooks.is_named(NAME):
        hooks.replace_corpus(NgramCorpus, made=_configure_worker, stepped=_add_prompts)
