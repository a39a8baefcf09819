"""Page copies by one kernel, against copies buffer by buffer, in Triton's interpreter."""

from __future__ import annotations

import random

import torch

from pie_driver_sglang.engine import page_pools as pool_module
from pie_driver_sglang.engine.page_pools import PagePools, page_bytes
from pie_driver_sglang.kernels.attention.page_copy import COPY_BLOCK, BufferRows, copy_rows

PAGES = 9
WIDTHS = (3, 1, COPY_BLOCK + 5, 2)


def move_backwards(
    source: BufferRows, source_rows: torch.Tensor, target: BufferRows, target_rows: torch.Tensor
) -> None:
    """The interpreter takes pair after pair; a GPU takes them in any order."""
    copy_rows(source, source_rows.flip(0), target, target_rows.flip(0))


def main() -> None:
    """Copies at random."""
    pool_module.copy_rows = move_backwards
    torch.manual_seed(1)
    source = random.Random(2)
    for dtype in (torch.int64, torch.uint8):
        # Rows with a gap after them, as a view of a pool may have.
        wide = [torch.randint(0, 200, (PAGES, width + 1), dtype=dtype) for width in WIDTHS]
        plain = [part.clone()[:, :-1] for part in wide]
        fused = [part[:, :-1] for part in wide]
        gaps = [part[:, -1].clone() for part in wide]
        staging = 2 * page_bytes(fused)
        pools = [
            PagePools(buffers, PAGES, staging_bytes=staging, fused=flag)
            for buffers, flag in ((fused, True), (plain, False))
        ]
        for pool in pools:
            pool.copy("D2H", list(range(PAGES)), list(range(PAGES)))
        for number in range(24):
            direction = ("D2H", "H2D", "D2D")[number % 3]
            count = source.randrange(1, 6)
            sources = source.sample(range(PAGES), count)
            targets = source.sample(range(PAGES), count)
            if direction == "D2D":
                # Pairs of a call may write what an earlier one reads, not the other way round.
                pairs = zip(sources, targets, strict=True)
                kept = [(a, b) for n, (a, b) in enumerate(pairs) if a not in targets[:n]]
                sources, targets = ([pair[side] for pair in kept] for side in (0, 1))
            for pool in pools:
                pool.copy(direction, sources, targets)
            if not all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True)):
                raise SystemExit(f"{dtype}: {direction} {sources} -> {targets} differ")
        if not all(torch.equal(part[:, -1], gap) for part, gap in zip(wide, gaps, strict=True)):
            raise SystemExit(f"{dtype}: a copy wrote behind a row")
        print(f"ok  {dtype}")


if __name__ == "__main__":
    main()
