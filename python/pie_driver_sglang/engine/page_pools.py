"""Whole KV pages: the device's pool, a pool of the host, and copies within and between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pie_driver_sglang.errors import StartError
from pie_driver_sglang.kernels.attention.page_copy import BufferRows, copy_rows
from pie_driver_sglang.memory.units import GIB

STAGING_BYTES = 64 << 20
"""Device memory through which pages go to and from the host."""


def page_buffers(pages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The runtime's pages in every KV buffer: ``[pages, words]`` int64 or uint8 views.

    A row is what one page has in one layer, keys or values; row 0 is the runtime's page 0, which
    follows the page for padding.

    Args:
        pages: As `ModelBackend.kv_pages` gives them.
    """
    rows = [buffer.view(len(buffer), -1).view(torch.uint8) for buffer in pages]
    # The wider the elements, the fewer a kernel has to move.
    words = torch.uint8 if any(row.shape[1] % 8 for row in rows) else torch.int64
    return [row.view(words)[1:] for row in rows]


def page_bytes(buffers: Sequence[torch.Tensor]) -> int:
    """Bytes of a page over all buffers."""
    return sum(buffer.shape[1] * buffer.itemsize for buffer in buffers)


def host_pages(budget: int, buffers: Sequence[torch.Tensor]) -> int:
    """Pages that a budget of host memory, in bytes, holds.

    Raises:
        StartError: There is a budget, but it does not hold one page.
    """
    pages = budget // page_bytes(buffers)
    if budget and not pages:
        raise StartError(
            f"option `cpu_mem_budget_in_gb` gives {budget / GIB:g} GiB to a device, which does "
            f"not hold one page of {page_bytes(buffers) / GIB:.1f} GiB",
            hint="raise `cpu_mem_budget_in_gb`, lower `page_size`, or set the budget to 0",
        )
    return pages


class PagePools:
    """The device's pages, the host's, and the copies of whole pages over all layers.

    A page of the host is one piece of memory with the rows of all buffers one after the other, so
    that a page travels in one transfer. On its way it lies in the same order in a staging area on
    the device, which kernels fill from, or spread over, the layers' buffers.
    """

    def __init__(
        self,
        buffers: list[torch.Tensor],
        pages: int,
        *,
        staging_bytes: int = STAGING_BYTES,
        fused: bool | None = None,
    ) -> None:
        """Allocates the host's pool.

        Args:
            buffers: Of the device; see `page_buffers`.
            pages: Of the host; 0 for none.
            staging_bytes: Most device memory to use for a copy; one page at least.
            fused: Whether one kernel moves the rows of all buffers; by default on a GPU.

        Raises:
            StartError: The host has too little memory.
        """
        self._buffers = buffers
        self._device = buffers[0].device
        widths = [buffer.shape[1] for buffer in buffers]
        row_bytes = max(widths) * buffers[0].itemsize
        self._pages_at_once = max(1, staging_bytes // row_bytes)
        staged = min(pages, max(1, staging_bytes // page_bytes(buffers)))
        self._host = _allocate(pages, sum(widths), buffers[0])
        self._staging = buffers[0].new_empty((staged, sum(widths)))
        self._staging_parts = torch.split(self._staging, widths, dim=1)
        self._rows = self._staging_rows = None
        if self._device.type == "cuda" if fused is None else fused:
            self._rows, self._staging_rows = (
                BufferRows.of(buffers),
                BufferRows.of(self._staging_parts),
            )
            self._staging_numbers = torch.arange(staged, device=self._device)

    @property
    def host_pages(self) -> int:
        """Pages of the host's pool."""
        return self._host.shape[0]

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's pages."""
        return sum(buffer.numel() * buffer.itemsize for buffer in self._buffers)

    def copy(self, direction: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies pages; see `ModelExecutor.copy_pages`."""
        match direction:
            case "D2D":
                self._copy_on_device(sources, targets)
            case "D2H":
                self._swap_out(sources, targets)
            case "H2D":
                self._swap_in(sources, targets)
            case "H2H":
                for source, target in zip(sources, targets, strict=True):
                    self._host[target].copy_(self._host[source])
            case _:
                raise ValueError(f"direction {direction!r} is not one of D2D, D2H, H2D, H2H")
        if self._device.type == "cuda":
            # The copies are in stream order with the passes before and after them; the host's side
            # is read and written only now.
            torch.cuda.current_stream(self._device).synchronize()

    def _copy_on_device(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self._rows is not None and set(sources).isdisjoint(targets):
            copy_rows(self._rows, self._index(sources), self._rows, self._index(targets))
            return
        parts = (torch.split(self._index(ids), self._pages_at_once) for ids in (sources, targets))
        # Part by part in order: a later pair may write what an earlier one reads.
        for source, target in zip(*parts, strict=True):
            for buffer in self._buffers:
                buffer.index_copy_(0, target, buffer.index_select(0, source))

    def _swap_out(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pages, slots = _by_slot(sources, targets)
        for start, page in self._staged(pages):
            self._gather(page)
            for host, staging in self._runs(slots[start : start + len(page)]):
                host.copy_(staging, non_blocking=True)

    def _swap_in(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pages, slots = _by_slot(targets, sources)
        for start, page in self._staged(pages):
            for host, staging in self._runs(slots[start : start + len(page)]):
                staging.copy_(host, non_blocking=True)
            self._spread(page)

    def _gather(self, pages: torch.Tensor) -> None:
        """Device pages to the first rows of the staging area."""
        if self._rows is not None and self._staging_rows is not None:
            copy_rows(self._rows, pages, self._staging_rows, self._staging_numbers[: len(pages)])
            return
        for buffer, part in zip(self._buffers, self._staging_parts, strict=True):
            torch.index_select(buffer, 0, pages, out=part[: len(pages)])

    def _spread(self, pages: torch.Tensor) -> None:
        """The first rows of the staging area to device pages."""
        if self._rows is not None and self._staging_rows is not None:
            copy_rows(self._staging_rows, self._staging_numbers[: len(pages)], self._rows, pages)
            return
        for buffer, part in zip(self._buffers, self._staging_parts, strict=True):
            buffer.index_copy_(0, pages, part[: len(pages)])

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._device)

    def _staged(self, pages: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Device pages, as many at a time as can be staged, and how many came before."""
        size = len(self._staging)
        for number, part in enumerate(torch.split(self._index(pages), size)):
            yield number * size, part

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the host's pool and of the staging area, one per run of consecutive slots."""
        start = 0
        for end in range(1, len(slots) + 1):
            if end == len(slots) or slots[end] != slots[end - 1] + 1:
                first = slots[start]
                yield self._host[first : first + end - start], self._staging[start:end]
                start = end


def _by_slot(pages: Sequence[int], slots: Sequence[int]) -> tuple[list[int], list[int]]:
    """Pairs of device pages and host slots, ordered by slot, so that slots come in long runs."""
    order = sorted(range(len(slots)), key=slots.__getitem__)
    return [pages[index] for index in order], [slots[index] for index in order]


def _allocate(pages: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Host memory of the dtype of `like`, page-locked if that lies on a GPU."""
    size = pages * width * like.itemsize
    try:
        host = torch.empty((pages, width), dtype=like.dtype)
        if pages and like.device.type == "cuda":
            # torch's own pinned memory comes in powers of two.
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = int(cudart.cudaHostRegister(host.data_ptr(), size, 0))
            if status:
                raise torch.cuda.CudaError(status)
    except RuntimeError as error:
        raise StartError(
            f"{size / GIB:.1f} GiB of host memory for swapped pages cannot be had: "
            f"{str(error).splitlines()[0]}",
            hint="lower `cpu_mem_budget_in_gb` or free memory",
        ) from error
    return host
