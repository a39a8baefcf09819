"""The native prefix index with the slots of SGLang's KV pool.

The index is in host memory, and the slots of SGLang's KV pool only on the device, where reading
them would synchronize. So the index has pages of its own, and a table on the device maps pages to
slots: page ids are copied to the device, nothing is read back.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from pie_driver_sglang._core import PagePool, RadixIndex

ROOT: Final = 0
"""The node that an empty match ends in."""
_PRIORITIES: Final = np.iinfo(np.int32)


class TreeNode:
    """A node of the tree for SGLang's policy ``dfs-weight``.

    Attributes:
        children: The children on paths to resolved nodes, by their handles.
    """

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[int, TreeNode] = {}


class PagedSlots:
    """A prefix index, its pages, and their slots.

    Args:
        tokens: Of SGLang's KV pool.
        page_size: Tokens of a page.
        policy: What is evicted first, by SGLang's name.
        bigram: Units of keys are pairs of consecutive tokens.
        events: Record KV cache events.
        split_keeps_age: Both parts of a split node have the time of its creation.
        device: Of the slots.

    Attributes:
        index: The prefix index. Its node handles are integers. Time is counted in calls, so that
            all ranks evict the same nodes.
    """

    def __init__(
        self,
        tokens: int,
        page_size: int,
        policy: str,
        *,
        bigram: bool,
        events: bool,
        split_keeps_age: bool,
        device: torch.device,
    ) -> None:
        pages = tokens // page_size
        self.index = RadixIndex(
            page_size, policy, bigram=bigram, events=events, split_keeps_age=split_keeps_age
        )
        self.device = device
        self._page_size = page_size
        self._pool = PagePool(pages)
        self._slots = torch.zeros((pages, page_size), dtype=torch.int64, device=device)
        """The slots of each page of the index."""
        self._cached = np.zeros(pages, dtype=np.bool_)
        """Pages that are in the index."""
        self._view: dict[int, TreeNode] = {}
        """Nodes resolved since `clear_view`, and their ancestors."""

    def reset(self) -> None:
        """Clear the index; the caller frees the slots."""
        self.index.reset()
        self._pool.reset()
        self._cached[:] = False
        self._view.clear()

    def insert(
        self,
        tokens: Any,
        namespace: str | None,
        slots: torch.Tensor,
        priority: int | None,
        *,
        chunked: bool = False,
        inserted: int = 0,
        limit: int | None = None,
    ) -> tuple[int, int, int]:
        """Insert a key with its slots.

        Args:
            tokens: The key.
            namespace: Of the key.
            slots: Of its tokens.
            priority: Nodes on its path get at least this.
            chunked: It does not count as a hit.
            inserted: Tokens of the key that the same request has inserted before, which count no
                hit.
            limit: Tokens of the key that count.

        Returns:
            Tokens that were cached before, tokens of the key in whole pages, and its last node.
        """
        found, new = self.index.insert_new(
            tokens,
            self._pool,
            namespace=namespace,
            limit=limit,
            priority=min(max(priority or 0, _PRIORITIES.min), _PRIORITIES.max),
            chunked=chunked,
            inserted=inserted,
        )
        existing, whole = found.existing * self._page_size, found.pages * self._page_size
        if existing < whole:
            values = slots[existing:whole].view(-1, self._page_size).to(torch.int64)
            self._slots.index_copy_(0, self._on_device(new.astype(np.int64)), values)
            self._cached[new] = True
        return existing, whole, found.node

    def evict(self, pages: int) -> torch.Tensor:
        """Evict at least so many pages from leaves, by the policy.

        Returns:
            Their slots, int64 ``(tokens,)`` on the device; empty if no leaf may be evicted.
        """
        evicted = self.index.evict(pages).device
        if not len(evicted):
            return self._slots.new_empty(0)
        self._pool.uncache(evicted)
        self._cached[evicted] = False
        return self.gather(evicted)

    def gather(self, pages: npt.NDArray[np.int32]) -> torch.Tensor:
        """The slots of pages, int64 ``(tokens,)``."""
        return self._slots.index_select(0, self._on_device(pages)).view(-1)

    def all_slots(self) -> torch.Tensor:
        """The slots of all pages of the index."""
        return self.gather(np.flatnonzero(self._cached).astype(np.int32))

    @property
    def root(self) -> TreeNode:
        """The root, with the paths to resolved nodes."""
        return self.resolve(ROOT)

    def clear_view(self) -> None:
        """Forget the resolved nodes."""
        self._view.clear()

    def resolve(self, handle: int) -> TreeNode:
        """Resolve a node, and add its path to the tree of `root`."""
        node, view = self._view.get(handle), self._view
        if node is not None:
            return node
        node = view[handle] = found = TreeNode()
        while handle != ROOT:
            parent = self.index.info(handle).parent
            known = parent in view
            above = view.setdefault(parent, TreeNode())
            above.children[handle] = node
            if known:
                break
            node, handle = above, parent
        return found

    def _on_device(self, ids: npt.NDArray[Any]) -> torch.Tensor:
        """Ids as a tensor, copied without synchronization."""
        tensor = torch.from_numpy(ids)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
