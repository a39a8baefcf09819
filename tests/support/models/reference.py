"""Reference logits and tokens by transformers, and the runtime's page allocation."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pie_driver_sglang._core import Request, Sampler

if TYPE_CHECKING:
    import torch

GAP: Final = 1e-3
"""A row whose two best logits are nearer than this may give either token."""


class Reference:
    """A model with eager attention, in float32 by default; a row is computed from all before it."""

    def __init__(self, snapshot: Path, dtype: str = "float32") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            import transformers

            torch.set_num_threads(1)
            transformers.utils.logging.disable_progress_bar()
            model = transformers.AutoModelForCausalLM.from_pretrained(
                snapshot, attn_implementation="eager", dtype=dtype
            )
        self._model = model.eval()
        self._torch = torch
        self.vocab_size: int = model.config.vocab_size
        self.context_length: int = model.config.max_position_embeddings
        self._cached = functools.lru_cache(maxsize=512)(self._compute)

    def logits(self, tokens: Sequence[int], positions: Iterable[int] | None = None) -> torch.Tensor:
        """Logits of every row: ``[tokens, vocabulary]``. Each row sees itself and those before."""
        positions = range(len(tokens)) if positions is None else positions
        return self._cached(tuple(tokens), tuple(positions))

    def rows(
        self, tokens: Sequence[int], positions: Iterable[int] | None = None
    ) -> list[tuple[int, float]]:
        """Of every row, the best token and how far below it the second best is."""
        best = self.logits(tokens, positions).topk(2, dim=-1)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        return list(zip(best.indices[:, 0].tolist(), gaps, strict=True))

    @property
    def embeddings(self) -> torch.Tensor:
        """Those of its tokens: ``[vocabulary, hidden]`` float32."""
        table: torch.Tensor = self._model.get_input_embeddings().weight.detach().float()
        return table

    def after_embeddings(self, embeds: torch.Tensor, count: int) -> list[int]:
        """The best tokens after a prompt of embeddings ``[tokens, hidden]``."""
        found: list[int] = []
        with self._torch.inference_mode():
            for _ in range(count):
                logits = self._model(inputs_embeds=embeds[None]).logits[0, -1]
                found.append(int(logits.argmax()))
                embeds = self._torch.cat([embeds, self.embeddings[found[-1:]]])
        return found

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """The state of every row after the final norm: ``[tokens, hidden]`` float32."""
        with self._torch.inference_mode():
            ids = self._torch.tensor([tokens])
            output = self._model(input_ids=ids, use_cache=False, output_hidden_states=True)
        states: torch.Tensor = output.hidden_states[-1][0].float()
        return states

    def greedy(self, prompt: Sequence[int], steps: int) -> tuple[list[int], float]:
        """The greedy continuation and its smallest gap."""
        tokens = list(prompt)
        gaps = []
        for _ in range(steps):
            token, gap = self.rows(tokens)[-1]
            tokens.append(token)
            gaps.append(gap)
        return tokens[len(prompt) :], min(gaps)

    def check(
        self,
        tokens: Sequence[int],
        found: Sequence[int],
        *,
        rows: Iterable[int] | None = None,
        positions: Iterable[int] | None = None,
    ) -> int:
        """Asserts that `found` are the greedy tokens of `rows`.

        Args:
            tokens: The sequence, as far as the last of the rows.
            found: One token per row.
            rows: By default the last ones.
            positions: Of `tokens`; by default from 0 on.

        Returns:
            How many rows left no choice.
        """
        expected = self.rows(tokens, positions)
        scores = self.logits(tokens, positions)
        rows = range(len(tokens) - len(found), len(tokens)) if rows is None else rows
        decided = 0
        for row, token in zip(rows, found, strict=True):
            best, gap = expected[row]
            decided += gap > GAP
            behind = float(scores[row, best] - scores[row, token])
            assert token == best or behind <= GAP, (
                f"row {row} of {len(tokens)}: token {token}, reference {best} ahead by {behind}"
            )
        return decided

    def _compute(self, tokens: tuple[int, ...], positions: tuple[int, ...]) -> torch.Tensor:
        torch = self._torch
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            # With an explicit mask a jump of the positions does not begin another sequence.
            output = self._model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=torch.tensor([positions]),
                use_cache=False,
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits


class MaskedReference:
    """A model with eager attention under a mask that names every row and key.

    In float64 by default, which torch does not have for experts.
    """

    def __init__(self, snapshot: Path, dtype: str = "float64") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            import transformers

            torch.set_num_threads(1)
            transformers.utils.logging.disable_progress_bar()
            transformers.AttentionInterface.register(_EAGER_OR_NOTHING, _eager_or_nothing)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                snapshot, attn_implementation=_EAGER_OR_NOTHING, dtype=dtype
            )
        self._model = model.eval()
        self._torch = torch
        self._dtype = model.dtype
        config = model.config
        self.vocab_size: int = config.vocab_size
        # Layers of another kind take another mask.
        self._kinds: set[str] = set(getattr(config, "layer_types", None) or ())
        self._window: int | None = getattr(config, "sliding_window", None)

    def logits(
        self, tokens: Sequence[int], positions: Sequence[int], visible: Sequence[Sequence[bool]]
    ) -> torch.Tensor:
        """Logits of every row: ``[tokens, vocabulary]``.

        Args:
            tokens: In the order in which their KV is stored.
            positions: One per token.
            visible: For each row which of all tokens it sees; shorter rows see none of the rest.
        """
        torch = self._torch
        count = len(tokens)
        shown = torch.zeros(count, count, dtype=torch.bool)
        for row, bits in enumerate(visible):
            shown[row, : len(bits)] = torch.tensor(bits[:count], dtype=torch.bool)
        index = torch.arange(count)
        masks: Any = self._additive(shown)
        if "sliding_attention" in self._kinds:
            near = index > index[:, None] - self._window
            masks = {"full_attention": masks, "sliding_attention": self._additive(shown & near)}
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([tokens]),
                attention_mask=masks,
                position_ids=torch.tensor([positions]),
                use_cache=False,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _additive(self, shown: torch.Tensor) -> torch.Tensor:
        torch = self._torch
        return torch.zeros(shown.shape, dtype=self._dtype).masked_fill(~shown, -torch.inf)[
            None, None
        ]


_EAGER_OR_NOTHING: Final = "eager_or_nothing"


def _eager_or_nothing(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **how: Any
) -> tuple[Any, Any]:
    """The model's own eager attention; rows that see nothing, which it cannot do, give zeros."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    blind = attention_mask.isneginf().all(dim=-1, keepdim=True)
    mask = attention_mask.masked_fill(blind, 0.0)
    output, weights = eager(module, query, key, value, mask, **how)
    return output.masked_fill(blind[0, 0, None, :, :, None], 0.0), weights


class Pages:
    """The runtime's page allocator: ids from the high end, the last freed first."""

    def __init__(self, total: int, size: int) -> None:
        self.size = size
        self._free = list(range(total))
        self._owners: Counter[int] = Counter()

    def take(self) -> int:
        """A page for one owner."""
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner."""
        self._owners.update(pages)

    def give_back(self, pages: Iterable[int]) -> None:
        """Removes an owner; pages without one are free."""
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)


class Context:
    """One context as the runtime keeps it: the stored tokens and their pages."""

    _ids = itertools.count(1)

    def __init__(self, allocator: Pages, state: int | None = None, *, adapter_id: int = -1) -> None:
        self.allocator = allocator
        self.adapter_id = adapter_id
        self.state = state
        """Slot of recurrent state, of a model that has some; it cannot be rewound."""
        self.id = next(Context._ids)
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.pages: list[int] = []
        self.given_back = False

    def append(
        self,
        tokens: Sequence[int],
        *,
        positions: Sequence[int] | None = None,
        drafts: Sequence[int] = (),
        **how: Any,
    ) -> Request:
        """The request that stores tokens, and drafts after them; both count as stored afterwards.

        Args:
            tokens: The input.
            positions: Of the input; by default those that follow.
            drafts: Tokens to verify.
            how: Further arguments of `request`.
        """
        following = self.positions[-1] + 1 if self.positions else 0
        given = list(range(following, following + len(tokens)) if positions is None else positions)
        self.tokens += [*tokens, *drafts]
        self.positions += [*given, *range(given[-1] + 1, given[-1] + 1 + len(drafts))]
        while len(self.pages) * self.allocator.size < len(self.tokens):
            self.pages.append(self.allocator.take())
        return self.request(tokens, given, drafts=drafts, **how)

    def request(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        *,
        rows: Sequence[int] | None = None,
        pages: Sequence[int] | None = None,
        drafts: Sequence[int] = (),
        masks: Sequence[Sequence[int]] | None = None,
        context_id: int | None = None,
        sampler: Sampler | None = None,
        logit_mask: Sequence[int] | None = None,
        wants_drafts: bool = False,
    ) -> Request:
        """A request whose tokens and drafts are the last stored ones; nothing is recorded.

        Args:
            tokens: The input.
            positions: Of the input.
            rows: Input rows to sample; by default the last one.
            pages: By default the context's own.
            drafts: Tokens to verify.
            masks: One run-length row per token.
            context_id: By default the context's own.
            sampler: Of all rows; by default greedy.
            logit_mask: Run lengths over the vocabulary.
            wants_drafts: Ask for drafts.
        """
        rows = [len(tokens) - 1] if rows is None else rows
        stored = len(self.tokens) - len(drafts)
        return Request(
            list(tokens),
            list(positions),
            list(self.pages if pages is None else pages),
            (stored - 1) % self.allocator.size + 1,
            [(row, sampler or Sampler.greedy()) for row in rows],
            context_id=self.id if context_id is None else context_id,
            masks=None if masks is None else [list(row) for row in masks],
            drafts=list(drafts),
            adapter_id=self.adapter_id,
            state_slot=self.state,
            state_reset=stored == len(tokens),
            logit_mask=None if logit_mask is None else list(logit_mask),
            wants_drafts=wants_drafts,
        )

    def causal_masks(self, tokens: Sequence[int]) -> list[list[int]]:
        """Causal rows for tokens that are about to be appended."""
        first = len(self.tokens) + 1
        return [[0, length] for length in range(first, first + len(tokens))]

    def fork(self, copy: Callable[[list[int], list[int]], None]) -> Context:
        """Another context with the same tokens.

        Args:
            copy: Copies pages within the pool; it gets the last page unless that one is full.
        """
        child = Context(self.allocator, adapter_id=self.adapter_id)
        child.tokens, child.positions = list(self.tokens), list(self.positions)
        full = len(self.tokens) // self.allocator.size
        child.pages = self.pages[:full]
        self.allocator.share(child.pages)
        for page in self.pages[full:]:
            child.pages.append(self.allocator.take())
            copy([page], child.pages[-1:])
        return child

    def move(self, copy: Callable[[list[int], list[int]], None]) -> None:
        """Moves the context to other pages."""
        former = self.pages
        self.pages = [self.allocator.take() for _ in former]
        copy(former, self.pages)
        self.allocator.give_back(former)

    def rewind(self, length: int) -> None:
        """Forgets all tokens from index `length` on."""
        del self.tokens[length:], self.positions[length:]
        kept = -(-length // self.allocator.size)
        self.allocator.give_back(reversed(self.pages[kept:]))
        del self.pages[kept:]

    def release(self) -> None:
        """Gives all pages back, once."""
        if not self.given_back:
            self.given_back = True
            self.allocator.give_back(reversed(self.pages))


def random_tokens(vocab_size: int, count: int, *seed: Any) -> list[int]:
    """Reproducible tokens; the first few ids, which models use for control, do not occur."""
    generator = random.Random(repr((count, seed)))
    return [generator.randrange(3, vocab_size) for _ in range(count)]
