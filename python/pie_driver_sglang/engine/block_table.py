"""The block table: which KV slots the tokens of each request have."""

from __future__ import annotations

import torch


class BlockTable:
    """For each request a row of KV slots on the device; row 0 is for padding.

    Slots are kept token by token, as SGLang's ``req_to_token`` has them; those of a page follow one
    another, so a backend with page tables takes every `page_size`-th one.
    """

    def __init__(
        self, requests: int, row_pages: int, page_size: int, device: torch.device | str
    ) -> None:
        """Allocates rows of zeros.

        Args:
            requests: Rows besides the one for padding.
            row_pages: Pages of a row.
            page_size: Tokens of a page.
            device: That of the KV.
        """
        self.requests = requests
        self.page_size = page_size
        self.slots = torch.zeros(
            (requests + 1, row_pages * page_size), dtype=torch.int32, device=device
        )
        """``[requests + 1, row tokens]`` int32: KV slots."""
        self.pages = self.slots.view(-1, page_size)
        """``[entries, page_size]``: the same by pages."""
        self._offsets = torch.arange(page_size, dtype=torch.int32, device=device)

    @property
    def row_pages(self) -> int:
        """Pages of a row."""
        return self.slots.shape[1] // self.page_size

    def update(self, changed: torch.Tensor) -> None:
        """Writes changed entries.

        Args:
            changed: ``[updates, 2]`` int64 on the device: entry, and first KV slot of its page.
        """
        if len(changed):
            self.pages[changed[:, 0]] = changed[:, 1:].to(self._offsets.dtype) + self._offsets
