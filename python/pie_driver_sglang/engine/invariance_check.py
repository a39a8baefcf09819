"""A check of a loaded model: its hidden states do not depend on the batch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import torch

from pie_driver_sglang.engine.backend import Extends, ModelBackend, PassInputs
from pie_driver_sglang.errors import StartError

if TYPE_CHECKING:
    from pie_driver_sglang.engine.block_table import BlockTable

_TOKENS: Final = 37
"""Of the context that is compared: two query blocks, and a part of one."""
_OTHER_TOKENS: Final = 21
"""Of the context beside it."""


@torch.inference_mode()
def check_batch_invariance(backend: ModelBackend, block_table: BlockTable) -> None:
    """Computes a context beside another one, and alone in parts.

    It writes to the first pages, which are free, and leaves the block table empty.

    Raises:
        StartError: The hidden states differ.
    """
    tokens = min(_TOKENS, backend.info.context_length)
    check = _Check(backend, block_table)
    pages = -(-tokens // block_table.page_size)
    if backend.info.total_pages >= 2 * pages:
        others = min(_OTHER_TOKENS, tokens)
        expected = check.extend([(1, 0, tokens), (2, 0, others)])[:tokens]
    else:
        expected = check.extend([(1, 0, tokens)])
    cuts = sorted({0, tokens, *(cut for cut in (1, 6, tokens - 2, tokens - 1) if 0 < cut < tokens)})
    parts = [check.extend([(1, first, end)]) for first, end in itertools.pairwise(cuts)]
    block_table.slots.zero_()
    if not torch.equal(torch.cat(parts), expected):
        raise StartError(
            "`enable_deterministic_inference` is set, and the hidden states of this model depend "
            "on its batch: some of its operations are not batch-invariant",
            hint="unset it",
        )


class _Check:
    """Passes of contexts whose pages follow one another; request n has row n."""

    def __init__(self, backend: ModelBackend, block_table: BlockTable) -> None:
        self._backend = backend
        self._table = block_table
        self._device = block_table.slots.device
        draw = torch.Generator().manual_seed(0)
        shape = (3, _TOKENS)
        self._tokens = torch.randint(backend.info.vocab_size, shape, generator=draw)
        size = block_table.page_size
        self._pages = -(-_TOKENS // size)

    def extend(self, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        """The hidden states of tokens ``[first, end)`` of requests: ``[tokens, hidden]``."""
        size, table = self._table.page_size, self._table
        for request, _, end in parts:
            pages = torch.arange(-(-end // size), device=self._device)
            first_page = 1 + (request - 1) * self._pages
            entries = torch.stack([request * table.row_pages + pages, (first_page + pages) * size])
            table.update(entries.T)
        rows = [torch.arange(first, end) for _, first, end in parts]
        requests = torch.tensor([request for request, _, _ in parts])
        lens = torch.tensor([end - first for _, first, end in parts])
        ends = torch.tensor([end for _, _, end in parts])
        owners = torch.repeat_interleave(requests, lens)
        positions = torch.cat(rows)
        to = self._device
        inputs = PassInputs(
            input_ids=self._tokens[owners, positions].to(to),
            positions=positions.to(to),
            mrope_positions=positions.expand(3, -1).to(to)
            if self._backend.info.uses_mrope
            else None,
            out_cache_loc=table.slots[owners.to(to), positions.to(to)].long(),
            req_pool_indices=requests.to(to),
            seq_lens=ends.to(to),
            seq_lens_cpu=ends,
            seq_lens_sum=int(ends.sum()),
        )
        starts = lens.cumsum(0) - lens
        extends = Extends(
            seq_lens=lens.int().to(to),
            prefix_lens=(ends - lens).int().to(to),
            start_loc=starts.int().to(to),
            seq_lens_cpu=lens.tolist(),
            prefix_lens_cpu=(ends - lens).tolist(),
        )
        context = self._backend.make_context(inputs, extends)
        return self._backend.forward(context).states.clone()
