"""Compiles the kernels of a captured step for compute capability 9.0 without a GPU.

The interpreter runs the kernels as Python, which takes what Triton's compiler refuses; and it does
not know of kernels that start before the one in front of them has ended.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any
from unittest import mock

import torch

from pie_driver_sglang.kernels.attention import paged_decode, single_decode
from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams
from pie_driver_sglang.kernels.attention.paged_decode import attend_paged
from pie_driver_sglang.kernels.attention.split_plan import (
    DecodeRows,
    Prefixes,
    SplitPlan,
    plan_splits,
    split_tuning,
)
from pie_driver_sglang.kernels.comm.all_reduce_norm import TUNINGS, LamportAllReduceNorm, PeerMemory
from pie_driver_sglang.kernels.gemm import linear
from pie_driver_sglang.kernels.gemm.types import Heads, Norm, Residual, Workspace
from pie_driver_sglang.kernels.moe import experts
from pie_driver_sglang.kernels.moe.experts import Experts
from pie_driver_sglang.kernels.moe.routing import Router
from pie_driver_sglang.kernels.sampling import penalties, sampler, token_logprobs
from pie_driver_sglang.kernels.sampling.logit_rows import LogitRows
from pie_driver_sglang.kernels.sampling.slot_params import STEP_RECORD_WORDS, SlotParams
from support.kernels.compile_gemm import (
    check_dense,
    check_quantized,
    check_small_m,
    check_tiles,
)
from support.kernels.compile_harness import check_order, recorded
from support.kernels.compile_lora import check_lora

FEW = 3
"""Rows of a step."""


def attention(
    dim: int,
    group: int,
    pool: torch.dtype,
    queries: torch.dtype,
    page: int,
    rule: AttentionParams,
    window: int,
    count: int = FEW,
    prompts: bool = False,
    *,
    grouped: bool = False,
) -> None:
    """What one layer launches in a step of so many rows."""
    numbers = torch.zeros(count, dtype=torch.int32)
    rows = DecodeRows(
        torch.zeros(4, 512, dtype=torch.int32),
        torch.zeros(count, dtype=torch.int64),
        torch.arange(count),
        Prefixes(numbers, numbers, numbers, numbers, numbers[:1]) if grouped else None,
    )
    storage = torch.zeros(64, 8, dim).to(pool)
    q = torch.zeros(count, 8 * group, dim, dtype=queries)
    how = split_tuning(dim, group, pool.itemsize, count, prompts=prompts)
    shares = plan_splits(rows, SplitPlan(how, 8, group, window), 132)
    attend_paged(q, storage, storage, torch.empty_like(q), rows, shares, rule, page)


def check_attention() -> None:
    """KV is loaded ahead, and two programs have room on a multiprocessor of an H100 or H200."""
    for case, grouped in itertools.product(CASES, (False, True)):
        check_attention_case(case, grouped=grouped)


def check_attention_case(case: Any, *, grouped: bool) -> None:
    """One layer, with groups of rows or without."""
    window, prompts = case[6], case[-1] is True
    count = case[7] if len(case) > 7 else FEW
    grouped = grouped and window < 0 and not prompts
    kernels = recorded(functools.partial(attention, *case, grouped=grouped))
    assert [kernel.name for kernel in kernels] == ["_plan_splits", "_paged_decode"]
    page, block = case[4], split_tuning(*case[:2], case[2].itemsize, count, prompts=prompts).block
    # Shares, two tiles and where the first block is stored: neither queries nor KV.
    slots = paged_decode.slot_pages(block, page)
    loads = 16 + slots if slots and not grouped else None
    for kernel, early in zip(kernels, (0, loads), strict=True):
        check_order(kernel, early)
    before = kernels[1].asm["ptx"].partition("griddepcontrol.wait")[0]
    assert "prefetch.global.L2" in before, "nobody asks for the first block"
    loop = kernels[1].asm["ttgir"].partition("scf.for")[2].partition("scf.for")[2]
    assert "async_copy_global_to_local" in loop, "KV is not loaded ahead"
    shared = kernels[1].metadata.shared
    assert 2 * (shared + 1024) <= 228 * 1024, shared
    print(f"{shared} bytes of shared memory: {case[:5]} {case[7:]}{' in groups' * grouped}")
    # Of the parts of a tile, and of the halves of rows where a tile is finished, which is in three
    # places.
    first, *others = kernels[1].asm["ptx"].split("atom.global.gpu.acq_rel.add")
    assert len(others) >= (4 if grouped else 1), "nobody hears of the last part"
    for before, behind in itertools.pairwise((first, *others)):
        # Between the parts and the word that they are there, and between that and others' parts.
        assert "bar.sync" in before.rpartition("st.global")[2]
        heard, loaded, _ = behind.partition("ld.global.cg")
        assert not loaded or "bar.sync" in heard
    assert "ld.global.cg" in others[-1]


def check_single_decode() -> None:
    """What is stored already is loaded before the wait, and parts are merged safely."""
    for queries, kv_heads, dim in ((16, 4, 128), (32, 4, 128), (40, 4, 128), (14, 2, 64)):
        storage = torch.zeros(64, kv_heads, dim, dtype=torch.bfloat16)
        norm, one = Norm(storage[0, 0], 1e-6), torch.zeros(1, dtype=torch.int64)
        heads = Heads(queries, norm, norm, torch.zeros(512, dim), True, storage, storage)
        row = single_decode.DecodeToken(torch.zeros(4, 512, dtype=torch.int32), one, one, one, one)
        qkv = torch.zeros(1, (queries + 2 * kv_heads) * dim, dtype=torch.bfloat16)
        semaphores = torch.zeros(kv_heads, 33, dtype=torch.int32)
        attend = functools.partial(
            single_decode.attend_single,
            qkv,
            heads,
            row,
            semaphores,
            0.1,
            single_decode.find_single_decode_config(heads),
        )
        [kernel] = recorded(attend)
        check_order(kernel, early=None, leads=True)
        code = kernel.asm["ptx"]
        assert "ld.global.v4" in code.partition("griddepcontrol.wait")[0], "KV is loaded late"
        before, _, behind = code.partition("atom.global.gpu.acq_rel.add")
        assert "bar.sync" in before.rpartition("st.global")[2]
        assert "bar.sync" in behind.partition("ld.global.cg")[0]


def check_experts(dtype: torch.dtype) -> None:
    """As many kernels as are said, whose loads before they wait are weights and who has them."""

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    mixture = Experts(
        Router(zeros(128, 2048), 8, True),
        zeros(1).expand(128, 1536, 2048),
        zeros(1).expand(128, 2048, 768),
    )
    workspace = Workspace(torch.zeros(64), torch.zeros(256, dtype=torch.int32))
    gemms = ["_expert_gemm", "_expert_gemm", "_combine_add"]
    for count, sum_squares, names in (
        (1, 512, ["_route_row", "_expert_gemm", "_down_gemm_add"]),
        (16, 512, ["_route_row", *gemms]),
        (128, 32, ["_route_tile", *gemms]),
        (256, 0, ["_route_tile", *gemms]),
    ):
        stream = Residual(zeros(count, 2048), torch.zeros(count, sum_squares))
        add = functools.partial(
            experts.add_moe, stream, Norm(zeros(2048), 1e-6), mixture, workspace
        )
        kernels = recorded(add)
        assert [kernel.name for kernel in kernels] == names
        for kernel in kernels:
            # The router's weights; of one row the experts, and some weights of theirs.
            some = kernel.name in ("_route_row", "_down_gemm_add")
            follows = kernel.name == "_expert_gemm" and count == 1
            check_order(kernel, early=None if some else 0, leads=not follows)
            assert kernel.metadata.shared <= linear.MAX_SHARED_BYTES, kernel.metadata.shared


def rank_sum(ranks: int, dtype: torch.dtype, width: int, *, two_shot: bool) -> Any:
    """A sum of some rows over ranks."""
    tuning = TUNINGS[ranks]._replace(max_rows=64, one_shot_rows=0 if two_shot else 64)
    size = LamportAllReduceNorm.size(ranks, tuning.max_rows, width, dtype)
    shared = PeerMemory([torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)])
    sums = LamportAllReduceNorm(shared, ranks - 1, width, dtype, tuning)
    norm = Norm(torch.zeros(width, dtype=dtype), 1e-6)
    part = torch.zeros(40, width, dtype=dtype)
    [kernel] = recorded(lambda: sums.add_rms_norm(0, part, part.clone(), norm))
    check_order(kernel, early=None)
    return kernel


def check_lookers(kernel: Any) -> None:
    """No two threads look at the same word: they would at different times."""
    code = kernel.asm["ttgir"]
    looks = re.findall(r"isVolatile = true.*tensor<(\d+)x!tt.ptr<i32>, #(\w+)>", code)
    assert looks
    for words, layout in looks:
        [given] = re.findall(rf"#{layout} = #ttg.blocked<(.*)>", code)
        spread = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[(\d+)\]", given)
        assert math.prod(map(int, spread)) <= int(words), given


def check_all_reduce_norm(ranks: int, dtype: torch.dtype) -> None:
    """What ranks send is looked for again and again, past the first-level cache."""
    vectors = 16 * dtype.itemsize // TUNINGS[ranks].warps
    for two_shot in (False, True):
        for width in (64, 256):
            check_lookers(rank_sum(ranks, dtype, width, two_shot=two_shot))
        kernel = rank_sum(ranks, dtype, 5120, two_shot=two_shot)
        check_lookers(kernel)
        before, _, code = kernel.asm["ptx"].partition("griddepcontrol.wait")
        assert not re.search("atom|fence|membar", code)
        # Before the wait only the norm's weight is read, behind it the own part and the residual.
        assert before.count("ld.global") == vectors
        assert code.count("ld.global") == code.count("ld.global.v4.b32") == 2 * vectors
        loops = re.findall(r"(\$L__BB0_\d+):[^\n]*Loop Header(.*?)bra[^\n]*\1;", code, re.DOTALL)
        # Of an owner's row, and of others.
        senders = [ranks - 1, 1] if two_shot else [ranks - 1]
        found = [len(re.findall(r"ld\.volatile\.global", loop)) for _, loop in loops]
        assert found == [vectors * count for count in senders], found


def check_sampling(dtype: torch.dtype) -> None:
    """What follows the logits."""
    ones = torch.ones(40)
    params = SlotParams(ones, ones.int(), ones, ones, ones)
    logits = torch.zeros(40, 151_936, dtype=dtype)
    results, step = torch.zeros(40, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    words = torch.zeros(64, dtype=torch.int32)
    records = torch.zeros(40, 8, dtype=torch.int32)
    requested = torch.zeros(40, STEP_RECORD_WORDS, dtype=torch.int32)
    wide, tokens = torch.zeros(40, 151_936), torch.zeros(512, dtype=torch.int32)
    changed = LogitRows(logits, wide, torch.zeros(40, dtype=torch.int32))
    kinds = [(LogitRows(logits), None), (LogitRows(logits), 30.0), (changed, None)]
    for rows, cap in kinds if dtype == torch.bfloat16 else kinds[:1]:
        sample = functools.partial(sampler.sample_step, rows, params, results, step, cap)
        kernels = recorded(sample)
        names = ["_block_stats", "_sample_rows", "_count_coarse", "_count_fine", "_sample_deferred"]
        assert [kernel.name for kernel in kernels] == names
        masked = torch.zeros(40, 2, dtype=torch.int32)
        kernels += recorded(functools.partial(sampler.mask_logits, rows, masked, words))
        kernels += recorded(
            functools.partial(penalties.cast_modified_rows, logits, records, requested, cap)
        )
        assert [kernel.name for kernel in kernels[5:]] == ["_mask_logits", "_cast_modified_rows"]
        for kernel in kernels:
            check_order(kernel)
    slots, ids, pairs = results.clone(), results.clone(), words[:2]
    kernels = recorded(lambda: penalties.record_tokens(tokens, slots, ids, words, pairs))
    counts = torch.zeros(64, 151_936, dtype=torch.int32)
    kernels += recorded(
        lambda: penalties.apply_penalties(wide, tokens.view(4, 128), tokens, records, words, counts)
    )
    kernels += recorded(
        functools.partial(
            token_logprobs.compute_logprobs, wide, results, requested, words, words.clone(), 32
        )
    )
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        kernels += recorded(lambda: sampler.publish(results, results.clone()))
    names = ["_record_tokens", "_apply_penalties", "_block_top", "_write_logprobs", "_publish"]
    assert [kernel.name for kernel in kernels] == names
    for kernel in kernels:
        check_order(kernel)
    # Each result at once, and after what earlier kernels have written.
    assert re.search(r"fence\.acq_rel\.sys.*st\.global(\.v2)?\.b64", kernel.asm["ptx"], re.DOTALL)


def check_staging() -> None:
    """What comes before the model: words of the host's, and the block table's changes."""
    words, count = torch.zeros(40_000, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    [kernel] = recorded(lambda: sampler.fetch(words, words.clone(), count))
    assert kernel.name == "_fetch"
    for page in (1, 16, 24):
        table = torch.zeros(512, page, dtype=torch.int32)
        updates = torch.zeros(512, 2, dtype=torch.int64)
        update = functools.partial(sampler.update_table, table, updates, words, count)
        [kernel] = recorded(update)
        assert kernel.name == "_update_table"


CASES: list[Any] = [
    (128, 2, torch.bfloat16, torch.bfloat16, 16, AttentionParams(0.1), -1),
    (128, 5, torch.bfloat16, torch.bfloat16, 1, AttentionParams(0.1), 100),
    (64, 71, torch.float16, torch.float16, 64, AttentionParams(0.1, logit_cap=3.0), -1),
    (
        80,
        5,
        torch.float8_e4m3fn,
        torch.bfloat16,
        16,
        AttentionParams(0.1, sinks=torch.zeros(40)),
        -1,
    ),
    (256, 1, torch.float8_e5m2, torch.bfloat16, 24, AttentionParams(0.1), 0),
    (128, 5, torch.float32, torch.float32, 16, AttentionParams(0.1), -1),
    (128, 2, torch.bfloat16, torch.bfloat16, 16, AttentionParams(0.1), -1, 256),
    (128, 5, torch.bfloat16, torch.bfloat16, 16, AttentionParams(0.1), -1, 256),
    # Prompts.
    (128, 2, torch.bfloat16, torch.bfloat16, 16, AttentionParams(0.1), -1, 2304, True),
    (128, 5, torch.bfloat16, torch.bfloat16, 16, AttentionParams(0.1), 100, 640, True),
]


if __name__ == "__main__":
    check_attention()
    check_single_decode()
    check_dense(torch.bfloat16)
    check_lora(torch.bfloat16)
    check_small_m(torch.bfloat16)
    check_tiles()
    check_quantized()
    check_experts(torch.bfloat16)
    for ranks in (2, 4):
        for dtype in (torch.bfloat16, torch.float32):
            check_all_reduce_norm(ranks, dtype)
    check_sampling(torch.bfloat16)
    check_sampling(torch.float32)
    check_staging()
    print("compiled")
