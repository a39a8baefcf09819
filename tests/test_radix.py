"""The prefix index and the page pool from Python."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

import numpy as np
import pytest

import pie_driver_sglang
from pie_driver_sglang import PagePool, RadixIndex
from pie_driver_sglang.errors import PagesError, RadixError
from support import REPOSITORY


def ids(*numbers: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def filled() -> RadixIndex:
    """Pages of two tokens: 1 2 | 3 4 | 5 6, and 1 2 | 9 9."""
    index = RadixIndex(2)
    index.insert(ids(1, 2, 3, 4, 5, 6), ids(70, 71, 72))
    index.insert(ids(1, 2, 9, 9), ids(70, 80))
    return index


class TestDocuments:
    def test_the_example_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        page = "docs/radix.md"
        text = (REPOSITORY / page).read_text()
        examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        [example] = [each for each in examples if "RadixIndex" in each]
        exec(compile(example, page, "exec"), {})
        assert "used=3" in capsys.readouterr().out

    def test_names_are_public(self) -> None:
        names = {"PagePool", "PagesError", "RadixError", "RadixIndex"}
        assert names <= set(pie_driver_sglang.__all__)
        with pytest.raises(pie_driver_sglang.PagesError):
            PagePool(1).allocate(2)
        with pytest.raises(pie_driver_sglang.RadixError):
            RadixIndex(0)


class TestArrays:
    @pytest.mark.parametrize("kind", ["int32", "uint32", "int64", "uint64"])
    def test_any_integers_go_in(self, kind: str) -> None:
        found = filled().match_prefix(np.array([1, 2, 3, 4], kind))
        assert found.pages.tolist() == [70, 71]
        assert found.pages.dtype == np.int32

    def test_arrays_without_numpy(self) -> None:
        assert filled().match_prefix(array("q", [1, 2])).pages.tolist() == [70]
        assert filled().match_prefix(array("q")).pages.tolist() == []
        assert filled().match_prefix(memoryview(array("i", [1, 2]))).pages.tolist() == [70]

    @pytest.mark.parametrize(
        "tokens",
        [[1, 2], np.array([1.0, 2.0]), np.ones((2, 2), int), np.arange(8)[::2], "12", b"12"],
    )
    def test_others_are_refused(self, tokens: Any) -> None:
        with pytest.raises(TypeError, match="tokens must be a one-dimensional, contiguous array"):
            filled().match_prefix(tokens)

    @pytest.mark.parametrize("token", [-1, 1 << 32])
    def test_tokens_out_of_range(self, token: int) -> None:
        with pytest.raises(
            OverflowError, match=rf"tokens\[1\] is {token}; its ids are from 0 to 4294967295"
        ):
            filled().match_prefix(np.array([1, token]))

    @pytest.mark.parametrize("page", [-1, 1 << 31])
    def test_pages_out_of_range(self, page: int) -> None:
        with pytest.raises(
            OverflowError, match=rf"pages\[0\] is {page}; its ids are from 0 to 2147483647"
        ):
            filled().insert(ids(7, 7), np.array([page]))

    @pytest.mark.parametrize("number", [-1, 1 << 64])
    def test_numbers_that_no_node_has(self, number: int) -> None:
        index = filled()
        calls = [index.lock, index.unlock, index.info, index.path_pages]
        moves = [index.backup, index.load]
        for call in calls:
            with pytest.raises(RadixError, match=rf"node {number} is not in the index"):
                call(number)
        for move in moves:
            with pytest.raises(RadixError, match=rf"node {number} is not in the index"):
                move(number, ids(1))

    @pytest.mark.parametrize("page", [-1, 1 << 32])
    def test_ids_that_no_page_has(self, page: int) -> None:
        pool = PagePool(4)
        for call in (pool.references, pool.make_unique):
            with pytest.raises(PagesError, match=rf"page {page} is of no pool: .* 0 to 2147483647"):
                call(page)


class TestIndex:
    def test_a_limit_cuts_the_key(self) -> None:
        index = filled()
        assert index.match_prefix(ids(1, 2, 3, 4), limit=3).pages.tolist() == [70]
        assert index.peek(ids(1, 2, 3, 4), limit=4) == (2, 0)
        assert index.match_prefix(ids(1, 2), limit=100).pages.tolist() == [70]

    def test_namespaces(self) -> None:
        index = filled()
        index.insert(ids(1, 2), ids(5), namespace="lora")
        assert index.match_prefix(ids(1, 2), namespace="lora").pages.tolist() == [5]
        assert index.match_prefix(ids(1, 2), namespace="").node == 0

    def test_a_lock_ends_with_its_block(self) -> None:
        index = filled()
        with index.match_and_lock(ids(1, 2, 9, 9)) as found:
            assert index.protected_pages == 2
            assert "locked" in repr(found)
            assert index.evict(10).device.tolist() == [71, 72]
        assert index.protected_pages == 0
        with pytest.raises(RuntimeError, match="holds no lock"):
            found.unlock()
        assert sorted(index.evict(10).device.tolist()) == [70, 80]

    def test_a_lock_that_was_given_back_early(self) -> None:
        index = filled()
        with index.match_and_lock(ids(1, 2)) as found:
            found.unlock()
            assert index.protected_pages == 0

    def test_a_lock_ends_with_an_error(self) -> None:
        index = filled()
        with pytest.raises(KeyError), index.match_and_lock(ids(1, 2)):
            raise KeyError
        assert index.protected_pages == 0

    def test_nodes(self) -> None:
        index = filled()
        node = index.match_prefix(ids(1, 2, 3, 4)).node
        assert index.path_pages(node).tolist() == [70, 71]
        info = index.info(node)
        assert (info.pages, info.depth, info.locks, info.on_host) == (1, 2, 0, False)
        assert index.lock(node) == 2
        assert index.unlock(node) == 2
        with pytest.raises(RadixError, match="not locked"):
            index.unlock(node)
        index.reset()
        with pytest.raises(RadixError, match="not in the index"):
            index.lock(node)

    def test_new_pages_from_a_pool(self) -> None:
        index, pool = RadixIndex(2), PagePool(4)
        inserted, new = index.insert_new(ids(1, 2, 3, 4), pool)
        assert (inserted.existing, inserted.pages, new.tolist()) == (0, 2, [0, 1])
        inserted, new = index.insert_new(ids(1, 2, 5, 6), pool)
        assert (inserted.existing, new.tolist()) == (1, [2])
        assert (pool.stats().cached, pool.available) == (3, 1)
        with pytest.raises(PagesError, match="2 pages are asked for and 1 are free"):
            index.insert_new(ids(7, 7, 8, 8), pool)
        assert index.peek(ids(7, 7)) == (0, 0)
        pool.uncache(index.evict(4).device)
        assert pool.available == 4

    def test_two_tiers(self) -> None:
        index = RadixIndex(1)
        index.insert(ids(1, 2, 3), ids(0, 1, 2))
        left = index.evict_to_host(3, ids(10, 11, 12, 13))
        assert left.device.tolist() == [0, 1, 2]
        assert left.moves.tolist() == [[0, 10], [1, 11], [2, 12]]
        assert left.host.tolist() == [13]
        found = index.match_and_lock(ids(1, 2, 3, 4))
        assert (found.pages.tolist(), found.host_pages) == ([], 3)
        assert index.load(found.node, ids(5, 6, 7)).tolist() == [[10, 5], [11, 6], [12, 7]]
        found.unlock()
        assert index.match_prefix(ids(1, 2, 3)).pages.tolist() == [5, 6, 7]
        assert index.host_pages == 3

    def test_copy_on_write(self) -> None:
        index = RadixIndex(4)
        index.insert(ids(1, 2, 3, 4, 5, 6, 7, 8), ids(0, 1))
        key = ids(1, 2, 3, 4, 5, 6, 9, 9)
        found = index.match_prefix(key)
        assert found.pages.tolist() == [0]
        partial = index.partial(key, found)
        assert partial is not None
        assert partial[:2] == (1, 2)
        assert index.partial(ids(1, 2, 3, 4, 9, 9, 9, 9), found) is None

    def test_events_and_pictures(self) -> None:
        index = RadixIndex(2, events=True)
        index.insert(ids(1, 2, 3, 4), ids(0, 1), namespace="lora")
        index.evict(1)
        cleared, stored, removed = index.take_events()
        assert (cleared.kind, stored.kind, removed.kind) == ("cleared", "stored", "removed")
        assert (stored.tokens, stored.namespace, stored.medium) == ([1, 2, 3, 4], "lora", "GPU")
        assert removed.hashes == stored.hashes
        assert index.take_events() == []
        json.loads(filled().to_json())
        assert filled().to_dot().startswith("digraph")

    def test_settings_out_of_range(self) -> None:
        with pytest.raises(RadixError, match=r"page size 1025 is not within 1\.\.=1024"):
            RadixIndex(1025)
        with pytest.raises(RadixError, match="`best` is not an eviction policy"):
            RadixIndex(policy="best")
        with pytest.raises(RadixError, match="1 pages were given where 2 are needed"):
            RadixIndex(2).insert(ids(1, 2, 3, 4), ids(1))

    def test_an_empty_index_is_true(self) -> None:
        assert RadixIndex()
        assert len(RadixIndex()) == 0
        assert repr(filled()).startswith("RadixIndex(page_size=2, policy=lru, nodes=3")


class TestPool:
    def test_references(self) -> None:
        pool = PagePool(4, first=10)
        pages = pool.allocate(2)
        assert pages.tolist() == [10, 11]
        pool.share(pages[:1])
        assert pool.make_unique(10) == (12, True)
        assert pool.make_unique(11) == (11, False)
        pool.audit(ids(10, 11, 12))
        pool.free(ids(10, 11, 12))
        with pytest.raises(PagesError, match="page 10 is not held"):
            pool.free(ids(10))
        with pytest.raises(PagesError, match="page 9 is not of this pool"):
            pool.references(9)
        assert (len(pool), pool.available, pool.stats().high_water) == (4, 4, 3)

    def test_a_running_step(self) -> None:
        pool = PagePool(2, order="lifo")
        pool.free_after(pool.allocate(1), 7)
        assert (pool.stats().leaving, pool.available) == (1, 1)
        assert (pool.complete(6), pool.complete(7), pool.available) == (0, 1, 2)

    def test_a_leak_is_found(self) -> None:
        pool = PagePool(2)
        pool.allocate(2)
        with pytest.raises(PagesError, match="it leaked"):
            pool.audit(ids(0))

    def test_what_does_not_fit(self) -> None:
        with pytest.raises(PagesError, match="3 pages are asked for and 2 are free"):
            PagePool(2).allocate(3)
        with pytest.raises(ValueError, match='must be "lowest" or "lifo"'):
            PagePool(2, order="best")
        with pytest.raises(ValueError, match="ids must be less than"):
            PagePool(2, first=(1 << 31) - 1)
