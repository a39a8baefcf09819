"""The host path of a decode step in numpy: request bytes to staged arrays to reply bytes.

Started by the bench with a variant and a folder that holds frames and what the Rust planner makes
of them. All variants check the frame, fill the arrays that the engine needs and write the reply;
they differ in the block table and the reply:

- `numpy_delta` keeps a mirror and stages what changed,
- `numpy_full_table` stages the whole table in every step, and keeps the indices of its entries,
- `numpy_rebuilt` keeps nothing from one step to the next, and answers through Python lists.

The last has two habits of Pie's own driver, and is no measurement of it. There, index tables also
go to the host and back to the device, and a reply is tried with several sizes of buffers.

All are spared what the planner also does: storage slots named twice, masks, drafts, adapters,
media, seeds, contexts that change rows.
"""

import json
import struct
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ROOT_BYTES, BODY_OFFSET = 296, 12
BODY = struct.Struct("<" + "iI" * 22)
VECTORS = {  # index of the vector in the body's first 22, element type
    "token_ids": (0, "<u4"),
    "position_ids": (1, "<u4"),
    "pages": (2, "<u4"),
    "page_indptr": (3, "<u4"),
    "last_page_lens": (4, "<u4"),
    "qo_indptr": (5, "<u4"),
    "sampling_indices": (12, "<u4"),
    "samplers": (14, np.dtype("<u1,V3,<f4,<u4,<f4")),
    "sampler_indptr": (15, "<u4"),
    "adapters": (16, np.dtype("<i8,<i8")),
    "context_ids": (21, "<u8"),
}
REPLY = struct.Struct("<8sIII")
GREEDY_TEMPERATURE = np.float32(1e-5)


class HostPath:
    """One planner: staged arrays that are reused, and what the device is known to hold."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        tokens, requests = case["chunk_tokens"], case["max_requests"]
        self.page_size = np.int64(case["page_size"])
        wide, narrow, real = np.int64, np.int32, np.float32
        sizes = {
            "input_ids": (tokens, wide),
            "positions": (tokens, wide),
            "out_cache_loc": (tokens, wide),
            "seq_lens": (requests, wide),
            "req_pool_indices": (requests, wide),
            "extend_prefix_lens": (requests, narrow),
            "extend_seq_lens": (requests, narrow),
            "extend_start_loc": (requests, narrow),
            "slot_rows": (requests, wide),
            "temperatures": (requests, real),
            "top_ps": (requests, real),
            "min_ps": (requests, real),
            "top_ks": (requests, narrow),
            "uniforms": (requests, real),
        }
        self.staged: dict[str, Array] = {
            name: np.zeros(count, dtype) for name, (count, dtype) in sizes.items()
        }
        self.table = np.full((requests, case["row_pages"]), -1, np.int64)
        self.updates = np.empty((requests * case["row_pages"], 2), np.int64)
        self.update_count = 0
        self.response = np.zeros(20 + 4 * requests, np.uint8)
        self.response_tokens = self.response[20:].view("<u4")
        self.random = np.random.default_rng(0)
        self.contexts: Array = np.empty(0, np.uint64)
        self.rows: Array = np.empty(0, np.int64)
        self.page_indptr: Array = np.empty(0, np.uint32)
        self.entries: Array = np.empty(0, np.int64)

    def run(self, frame: Array, tokens: Array) -> Array:
        """Stages a frame and answers it with `tokens`, one per slot in the staged order."""
        frame = frame.copy()
        v = self.parse(frame)
        qo = v["qo_indptr"].astype(np.int64)
        indptr = v["page_indptr"].astype(np.int64)
        self.check(v, qo, indptr)
        requests, count = len(qo) - 1, len(v["token_ids"])
        s, starts, lens = self.staged, qo[:-1], np.diff(qo)
        seq_lens = (np.diff(indptr) - 1) * self.page_size + v["last_page_lens"]
        prefix = seq_lens - lens
        s["input_ids"][:count] = v["token_ids"]
        s["positions"][:count] = v["position_ids"]
        s["seq_lens"][:requests] = seq_lens
        s["extend_prefix_lens"][:requests] = prefix
        s["extend_seq_lens"][:requests] = lens
        s["extend_start_loc"][:requests] = starts
        if count == requests:
            index, first = seq_lens - 1, indptr[:-1]
        else:
            request = np.repeat(np.arange(requests), lens)
            index, first = np.arange(count) + (prefix - starts)[request], indptr[:-1][request]
        page, offset = np.divmod(index, self.page_size)
        s["out_cache_loc"][:count] = (
            v["pages"][first + page] + np.int64(1)
        ) * self.page_size + offset
        self.place(v["context_ids"])
        s["req_pool_indices"][:requests] = self.rows + 1
        self.stage_table(v["pages"], v["page_indptr"])
        order = self.stage_samplers(v["samplers"], starts + v["sampling_indices"])
        return self.reply(tokens, order, requests)

    def parse(self, frame: Array) -> dict[str, Array]:
        """Views of the frame's arrays."""
        body = len(frame) - ROOT_BYTES + BODY_OFFSET
        words = BODY.unpack_from(frame, body)
        return {
            name: np.frombuffer(
                frame, dtype, words[2 * index + 1], body + 8 * index + words[2 * index]
            )
            for name, (index, dtype) in VECTORS.items()
        }

    def check(self, v: dict[str, Array], qo: Array, indptr: Array) -> None:
        """Raises ValueError unless the arrays agree and every id is in range."""
        case, requests = self.case, len(qo) - 1
        fine = (
            len(v["position_ids"]) == len(v["token_ids"]) == qo[-1]
            and len(v["pages"]) == indptr[-1]
            and len(indptr) == len(v["sampler_indptr"]) == requests + 1
            and len(v["last_page_lens"]) == requests
            and (qo[1:] > qo[:-1]).all()
            and (indptr[1:] > indptr[:-1]).all()
            and v["token_ids"].max() < case["vocab_size"]
            and v["position_ids"].max() < case["max_positions"]
            and v["pages"].max() < case["total_pages"]
            and v["last_page_lens"].min() > 0
            and v["last_page_lens"].max() <= case["page_size"]
            and v["adapters"]["f0"].max() < 0
        )
        if not fine:
            raise ValueError("a frame that this peer does not serve")

    def place(self, contexts: Array) -> None:
        """Gives each context its row of the table: its place, since these contexts stay."""
        if not np.array_equal(contexts, self.contexts):
            self.contexts, self.rows = contexts.copy(), np.arange(len(contexts), dtype=np.int64)
            self.page_indptr = np.empty(0, np.uint32)

    def find_entries(self, indptr: Array) -> None:
        """Indices of the table's entries that the frame's pages stand for, in their order."""
        if not np.array_equal(indptr, self.page_indptr):
            lens = np.diff(indptr)
            columns = np.arange(indptr[-1]) - np.repeat(indptr[:-1], lens)
            self.entries = np.repeat(self.rows * self.table.shape[1], lens) + columns
            self.page_indptr = indptr.copy()

    def stage_table(self, pages: Array, indptr: Array) -> None:
        """Stages the block table, or what changed in it."""
        raise NotImplementedError

    def stage_samplers(self, samplers: Array, rows: Array) -> Array:
        """Fills the slots' parameters, greedy slots first; returns the order of the requests."""
        s, count = self.staged, len(samplers)
        temperature = samplers["f2"]
        drawn = temperature > GREEDY_TEMPERATURE
        if not drawn.any():
            s["slot_rows"][:count] = rows
            s["temperatures"][:count] = 1
            return np.arange(count)
        tag, value, share = samplers["f0"], samplers["f3"], samplers["f3"].view("<f4")
        vocab = self.case["vocab_size"]
        top_p = np.where(tag == 2, share, np.where(tag == 4, samplers["f4"], np.float32(1))).clip(
            0, 1
        )
        min_p = np.where(tag == 3, share, np.float32(0)).clip(0, 1)
        top_k = np.where((tag == 1) | (tag == 4), value, vocab)
        top_k = np.where((top_k == 0) | (top_k > vocab), vocab, top_k)
        filtered = (top_k < vocab) | (top_p < 1) | (min_p > 0)
        order = np.where(drawn, 1 + filtered, 0).argsort(kind="stable")
        s["slot_rows"][:count] = rows[order]
        s["temperatures"][:count] = np.where(drawn, temperature, np.float32(1))[order]
        s["top_ps"][:count] = top_p[order]
        s["min_ps"][:count] = min_p[order]
        s["top_ks"][:count] = top_k[order]
        self.random.random(dtype=np.float32, out=s["uniforms"][:count])
        return order

    def reply(self, tokens: Array, order: Array, requests: int) -> Array:
        """Writes the fast token reply."""
        REPLY.pack_into(self.response, 0, b"PIETFWD1", 0, requests, requests)
        self.response_tokens[order] = tokens[:requests]
        return self.response[: 20 + 4 * requests]


class Delta(HostPath):
    """Stages the entries that differ from the mirror."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__(case)
        self.pages: Array = np.empty(0, np.uint32)

    def stage_table(self, pages: Array, indptr: Array) -> None:
        """Finds the entries that differ and stages them."""
        self.update_count = 0
        if np.array_equal(indptr, self.page_indptr) and np.array_equal(pages, self.pages):
            return
        self.find_entries(indptr)
        slots = (pages + np.int64(1)) * self.page_size
        table = self.table.reshape(-1)
        changed = np.flatnonzero(table[self.entries] != slots)
        entries = self.entries[changed]
        table[entries] = slots[changed]
        self.update_count = len(changed)
        self.updates[: len(changed), 0] = entries + self.table.shape[1]
        self.updates[: len(changed), 1] = slots[changed]
        self.pages = pages.copy()


class FullTable(HostPath):
    """Stages every entry of every request."""

    def stage_table(self, pages: Array, indptr: Array) -> None:
        """Stages everything."""
        self.find_entries(indptr)
        self.table.reshape(-1)[self.entries] = (pages + np.int64(1)) * self.page_size


class Rebuilt(FullTable):
    """Makes the tables anew in each step, and the reply of Python lists."""

    def place(self, contexts: Array) -> None:
        """Gives each context its row; nothing is known of the step before."""
        self.contexts = np.empty(0, np.uint64)
        super().place(contexts)

    def reply(self, tokens: Array, order: Array, requests: int) -> Array:
        """Writes the fast token reply of a list for each request."""
        answers: list[list[int]] = [[] for _ in range(requests)]
        for request, token in zip(order.tolist(), tokens[:requests].tolist(), strict=True):
            answers[request].append(token)
        flat = [token for answer in answers for token in answer]
        body = REPLY.pack(b"PIETFWD1", 0, len(answers), len(flat))
        body += struct.pack(f"<{len(flat)}I", *flat)
        return np.frombuffer(body, np.uint8)


VARIANTS = {"numpy_delta": Delta, "numpy_full_table": FullTable, "numpy_rebuilt": Rebuilt}


def compare(path: HostPath, data: Array, frame: dict[str, Any], tokens: Array) -> None:
    """Stages a frame and compares everything with what the planner made of it."""

    def part(place: list[int]) -> Array:
        return data[place[0] : place[0] + place[1]]

    request = part(frame["request"])
    reply = path.run(request, tokens)
    np.testing.assert_array_equal(reply, part(frame["reply"]))
    temperatures = part(frame["arrays"]["temperatures"]).view(np.float32)
    drawn = bool((temperatures != 1).any())
    for name, place in frame["arrays"].items():
        if name in ("top_ps", "min_ps", "top_ks") and not drawn:
            continue
        found = path.staged[name]
        expected = part(place).view(found.dtype)
        np.testing.assert_array_equal(found[: len(expected)], expected, err_msg=name)
    v = path.parse(request)
    for row, (start, end) in enumerate(zip(v["page_indptr"], v["page_indptr"][1:], strict=False)):
        slots = (v["pages"][start:end] + np.int64(1)) * path.page_size
        np.testing.assert_array_equal(path.table[row, : end - start], slots)


def main(variant: str, folder: Path) -> None:
    """Checks every frame, then runs as many as each line of stdin says and writes their times."""
    case = json.loads((folder / "case.json").read_text())
    data = np.fromfile(folder / "data.bin", np.uint8)
    path = VARIANTS[variant](case)
    tokens = np.full(case["max_requests"], case["token"], np.int64)
    for frame in case["frames"]:
        compare(path, data, frame, tokens)
    requests = [frame["request"] for frame in case["frames"]]
    frames = [data[start : start + size] for start, size in requests]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    step = 0
    for line in sys.stdin:
        times = np.empty(int(line), "<u8")
        for index in range(len(times)):
            step = (step + 1) % len(frames)
            begin = perf_counter_ns()
            path.run(frames[step], tokens)
            times[index] = perf_counter_ns() - begin
        sys.stdout.buffer.write(times.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
