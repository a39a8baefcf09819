"""Batch-invariant attention and GEMMs on the CPU: equal bits, and equal to what they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang.engine.attention.batch_invariant_cpu import (
    QUERY_ROWS,
    CpuBatchInvariantAttention,
    find_query_blocks,
)
from pie_driver_sglang.engine.attention.paged import AttentionLayer
from pie_driver_sglang.engine.backend import Extends
from pie_driver_sglang.engine.block_table import BlockTable
from pie_driver_sglang.engine.layers import batch_invariant_cpu
from pie_driver_sglang.engine.layers.batch_invariant_cpu import CpuBatchInvariantGemm
from pie_driver_sglang.errors import StartError

PAGE, ROW_PAGES, REQUESTS = 4, 13, 3
LONGEST = PAGE * ROW_PAGES
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


class Contexts:
    """KV of some contexts in pages of random order, and a query for each token."""

    def __init__(self, window: int, group: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(window + group)
        kv_heads, dim, value_dim = 2, 16, 24
        self.table = BlockTable(REQUESTS, ROW_PAGES, PAGE, "cpu")
        slots = (REQUESTS * ROW_PAGES + 1) * PAGE
        # What no token has written may be anything.
        keys, values = torch.full((2, slots, kv_heads, value_dim), float("nan"), dtype=dtype)
        pages = torch.randperm(REQUESTS * ROW_PAGES, generator=generator) + 1
        entries = torch.arange(ROW_PAGES, ROW_PAGES * (REQUESTS + 1))
        self.table.update(torch.stack([entries, pages * PAGE], 1))
        self.keys, self.values = (
            torch.randn(REQUESTS, LONGEST, kv_heads, width, generator=generator).to(dtype)
            for width in (dim, value_dim)
        )
        self.queries = torch.randn(
            REQUESTS, LONGEST, kv_heads * group, dim, generator=generator
        ).to(dtype)
        self.layer = AttentionLayer(
            0, kv_heads * group, kv_heads, dim, value_dim, 0.25, 0.0, window,
            keys[..., :dim].contiguous(), values,
        )  # fmt: skip
        self.attention = CpuBatchInvariantAttention(self.table, [self.layer])

    def store(self, request: int, first: int, end: int) -> None:
        """Writes the KV of some tokens, as the layers do before they attend."""
        slots = self.table.slots[request + 1, first:end].long()
        self.layer.keys[slots] = self.keys[request, first:end]
        self.layer.values[slots] = self.values[request, first:end]

    def extend(self, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """A prefill of tokens ``[first, end)`` of requests: ``[tokens, heads * dim]`` of each."""
        for part in parts:
            self.store(*part)
        lens = [end - first for _, first, end in parts]
        lens_tensor = torch.tensor(lens, dtype=torch.int32)
        prefixes = torch.tensor([first for _, first, _ in parts], dtype=torch.int32)
        starts = (lens_tensor.cumsum(0) - lens_tensor).int()
        extends = Extends(lens_tensor, prefixes, starts, lens, prefixes.tolist())
        rows = torch.tensor([request + 1 for request, _, _ in parts])
        self.attention.plan_extend(rows, extends, sum(lens))
        queries = torch.cat([self.queries[part[0], part[1] : part[2]] for part in parts])
        return list(self.attention.attend(self.layer, queries).split(lens))

    def decode(self, rows: list[tuple[int, int]], padding: int) -> torch.Tensor:
        """A decode of requests at positions, and rows of padding after it."""
        for request, position in rows:
            self.store(request, position, position + 1)
        table_rows = torch.tensor([request + 1 for request, _ in rows] + [0] * padding)
        kv_lens = torch.tensor([position + 1 for _, position in rows] + [1] * padding)
        queries = torch.stack([self.queries[row] for row in rows])
        blank = queries.new_zeros(padding, *queries.shape[1:])
        self.attention.plan(table_rows, kv_lens)
        return self.attention.attend(self.layer, torch.cat([queries, blank]))[: len(rows)]

    def expected(self, request: int, position: int) -> torch.Tensor:
        """``[heads * value_dim]`` float64 by the definition of attention."""
        window = self.layer.window
        first = 0 if window < 0 else max(0, position - window)
        group = self.layer.heads // self.layer.kv_heads
        keys, values = (
            each[request, first : position + 1].double().repeat_interleave(group, 1)
            for each in (self.keys, self.values)
        )
        query = self.queries[request, position].double()
        weights = (torch.einsum("hd,thd->ht", query, keys) * self.layer.scale).softmax(-1)
        return torch.einsum("ht,thd->hd", weights, values).flatten()


@settings(max_examples=25)
@given(st.data(), st.sampled_from([-1, 0, 5, 16, 30]), st.sampled_from([1, 3]), DTYPES)
def test_a_row_has_the_bits_of_its_prompt_in_any_pass(
    data: st.DataObject, window: int, group: int, dtype: torch.dtype
) -> None:
    lengths = data.draw(st.lists(st.integers(2, LONGEST), min_size=1, max_size=REQUESTS))
    alone: list[torch.Tensor] = []
    for request, length in enumerate(lengths):
        contexts = Contexts(window, group, dtype)
        alone += contexts.extend([(request, 0, length)])
        expected = torch.stack([contexts.expected(request, at) for at in range(length)])
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(alone[-1].double(), expected, atol=tolerance, rtol=tolerance)
    contexts, done = Contexts(window, group, dtype), [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        left = [at for at, length in enumerate(lengths) if done[at] < length]
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        if data.draw(st.booleans()):
            rows = [(request, done[request]) for request in chosen]
            found = contexts.decode(rows, data.draw(st.integers(0, 3)))
            for row, (request, position) in zip(found, rows, strict=True):
                assert torch.equal(row, alone[request][position])
                done[request] += 1
            continue
        ends = [data.draw(st.integers(done[at] + 1, lengths[at])) for at in chosen]
        parts = [(at, done[at], end) for at, end in zip(chosen, ends, strict=True)]
        for (request, first, end), rows in zip(parts, contexts.extend(parts), strict=True):
            assert torch.equal(rows, alone[request][first:end])
            done[request] = end


def test_rows_of_one_position_are_in_different_blocks() -> None:
    """And those of padding are in none."""
    blocks = find_query_blocks([3, 0, 3, 3, 2], [QUERY_ROWS + 1, 1, QUERY_ROWS + 1, 20, 1])
    assert [tuple(block) for block in blocks] == [
        (3, QUERY_ROWS, [0], [0]),
        (3, QUERY_ROWS, [2, 3], [0, 3]),
        (2, 0, [4], [0]),
    ]


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 8), st.integers(1, 90), DTYPES)
def test_rows_of_a_gemm_do_not_depend_on_each_other(
    rows: int, tiles: int, inputs: int, dtype: torch.dtype
) -> None:
    gemm, generator = CpuBatchInvariantGemm(), torch.Generator().manual_seed(rows)
    weight = torch.randn(32 * tiles, inputs, generator=generator).to(dtype)
    values = torch.randn(rows, inputs, generator=generator).to(dtype)
    assert gemm.supports(weight)
    found = gemm(values, weight)
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(gemm(values[order], weight), found[order])
    assert torch.equal(torch.cat([gemm(row[None], weight) for row in values]), found)
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    expected = values.double() @ weight.double().T
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0.02)


def test_a_gemm_that_depends_on_a_rows_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.nn.functional.linear

    def other_in_the_last_row(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = plain(rows, weight)
        found[-1] *= 1 + 2**-20
        return found

    monkeypatch.setattr(batch_invariant_cpu.functional, "linear", other_in_the_last_row)
    with pytest.raises(StartError, match=r"torch's GEMM of 16 rows .* of \[64, 32\]") as caught:
        CpuBatchInvariantGemm().supports(torch.randn(64, 32))
    assert caught.value.hint
