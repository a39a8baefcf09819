"""Checks and times page copies between a GPU and the host.

    python benches/gpu/swap_check.py [--pocket DIR] [--layers 28] [--heads 8] [--pages 4096]
        [--device cuda:0] [--json FILE]

Three parts; the first one that is wrong ends the script:

1. `pocket` in bfloat16 in a driver process: contexts that are swapped out, overwritten and
   swapped in elsewhere must continue with the tokens of undisturbed ones.
2. The copies after kernels that the device has not finished: a page holds what the kernels before
   the copy wrote, and nothing of what later ones write.
3. Random pages in the shape of a model: bit-exact round trips, and GB/s by direction, number of
   pages and order of the slots. The peer is one plain copy of as many bytes to or from memory that
   torch pinned, within the device for D2D. All run in turns; the
   figures are medians.

`--device cpu` tries the script out; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import frame
import torch
from frame import Report
from serving import PAGE, driver, step

from pie_driver_sglang._core import Client
from pie_driver_sglang.engine.page_pools import PagePools, page_bytes

COUNTS = (1, 4, 32, 256, 2048)
RUNS = 15


def check_contexts(model: Path, device: str, contexts: int = 4, new_tokens: int = 32) -> int:
    """Swaps contexts of a served model; returns how many tokens that changes."""
    prompts = [[(7 * i + 11 * c) % 2000 + 300 for i in range(40 + 30 * c)] for c in range(contexts)]
    options: dict[str, object] = {"cpu_mem_budget_in_gb": 1, "page_size": PAGE}
    with driver(model, options, device) as (client, caps):
        print(f"    {caps['swap_pool_size']} slots for {caps['total_pages']} pages")
        expected = [generate(client, prompt, 200 * c, 0) for c, prompt in enumerate(prompts)]
        undisturbed = [go_on(client, ids, 200 * c, new_tokens) for c, ids in enumerate(expected)]
        found = []
        for c, prompt in enumerate(prompts):
            ids = generate(client, prompt, 1000 + 200 * c, 0)
            count = -(-len(prompt) // PAGE)
            slots = list(range(50 * c + count, 50 * c, -1))
            former = list(range(1000 + 200 * c, 1000 + 200 * c + count))
            fresh = list(range(1900 - 20 * c, 1900 - 20 * c + count))
            status(client, "D2H", former, slots)
            generate(client, prompt[::-1], 1000 + 200 * c, 0)
            status(client, "H2D", slots, fresh)
            found.append(go_on(client, ids, fresh[0], new_tokens))
    tokens = contexts * new_tokens
    wrong = sum(
        a != b for x, y in zip(undisturbed, found, strict=True) for a, b in zip(x, y, strict=True)
    )
    print(f"    {tokens} tokens after a swap, {wrong} differ from those of undisturbed contexts")
    return wrong


def generate(client: Client, prompt: list[int], first_page: int, context: int) -> list[int]:
    """Stores a prompt and returns it with the token that follows."""
    ((token,),) = client.forward([step(prompt, 0, first_page, context)]).tokens
    return [*prompt, token]


def go_on(client: Client, ids: list[int], first_page: int, count: int) -> list[int]:
    """The next greedy tokens."""
    ids = list(ids)
    for _ in range(count):
        ((token,),) = client.forward([step(ids[-1:], len(ids) - 1, first_page, 0)]).tokens
        ids.append(token)
    return ids[-count:]


def status(client: Client, direction: str, sources: list[int], targets: list[int]) -> None:
    """Copies pages, which must succeed."""
    answered = client.copy(direction, sources, targets)
    if answered != 0:
        raise SystemExit(f"{direction} was answered with status {answered}")


def new_pools(arguments: argparse.Namespace) -> tuple[list[torch.Tensor], PagePools]:
    """Random pages in the shape of a model, and as many slots."""
    width = PAGE * arguments.heads * 128 * 2 // 8
    shape = (arguments.pages, width)
    buffers = [
        torch.randint(2**62, shape, device=arguments.device) for _ in range(2 * arguments.layers)
    ]
    started = time.monotonic()
    pools = PagePools(buffers, arguments.pages)
    seconds = time.monotonic() - started
    size = arguments.pages * page_bytes(buffers)
    print(
        f"    pages of {page_bytes(buffers)} bytes; {size / 2**30:.2f} GiB of host memory in "
        f"{seconds:.2f} s, page-locked: {pools._host.is_pinned()}"
    )
    return buffers, pools


def check_order(buffers: list[torch.Tensor], pools: PagePools) -> None:
    """Copies between kernels that are still queued."""
    pages = list(range(min(64, pools.host_pages)))
    busy = torch.randn(4096 if buffers[0].is_cuda else 256, device=buffers[0].device).diag()
    for value in range(1, 6):
        for _ in range(20):
            busy = torch.mm(busy, busy).clamp(-1, 1)
        for buffer in buffers:
            buffer[: len(pages)] = value
        pools.copy("D2H", pages, pages)
        for buffer in buffers:
            buffer[: len(pages)] = -value
        pools.copy("H2D", pages, pages)
        if not all(bool((buffer[: len(pages)] == value).all()) for buffer in buffers):
            raise SystemExit(f"round {value}: the copies are not in the order of the stream")
    print("    5 rounds after busy kernels: right")


def check_round_trip(buffers: list[torch.Tensor], pools: PagePools) -> None:
    """Every page through the host, to another place."""
    before = [buffer.clone() for buffer in buffers]
    source = random.Random(3)
    count = pools.host_pages
    pages, slots, moved = (source.sample(range(count), count) for _ in range(3))
    pools.copy("D2H", pages, slots)
    for buffer in buffers:
        buffer.zero_()
    pools.copy("H2D", slots, moved)
    from_, to = (torch.tensor(ids, device=buffers[0].device) for ids in (pages, moved))
    if not all(bool((b[to] == a[from_]).all()) for a, b in zip(before, buffers, strict=True)):
        raise SystemExit("a round trip changed pages")
    half = count // 2
    pools.copy("D2D", moved[:half], moved[half : 2 * half])
    for a, b in zip(before, buffers, strict=True):
        if not bool((b[to[half : 2 * half]] == a[from_[:half]]).all()):
            raise SystemExit("a copy on the device changed pages")
    print(f"    {count} pages there and back, then {half} on the device: every bit is right")


def slots_in(order: str, count: int, limit: int) -> list[int]:
    """Slots as an allocator hands them out."""
    if order == "descending":
        return list(range(limit - 1, limit - 1 - count, -1))
    return random.Random(count).sample(range(limit), count)


def time_copies(buffers: list[torch.Tensor], pools: PagePools, report: Report) -> None:
    """GB/s against a plain copy."""
    size, limit = page_bytes(buffers), pools.host_pages
    counts = [count for count in COUNTS if count <= limit // 2] or [1]
    device = torch.empty((max(counts), size // 8), dtype=torch.int64, device=buffers[0].device)
    host = torch.empty(device.shape, dtype=torch.int64, pin_memory=buffers[0].is_cuda)
    plain = {"D2H": (host, device), "H2D": (device, host), "D2D": (device, device.clone())}
    print("    direction   pages  slots         us   GB/s   plain   ratio")
    for direction, count, order in itertools.product(plain, counts, ("descending", "scattered")):
        to, from_ = plain[direction]
        slots = slots_in(order, count, limit)
        unused = set(range(limit)) - set(slots) if direction == "D2D" else range(limit)
        pages = random.Random(5).sample(sorted(unused), count)
        lists = (slots, pages) if direction == "H2D" else (pages, slots)
        ways = {
            "ours": partial(seconds, partial(pools.copy, direction, *lists)),
            "plain": partial(seconds, partial(plain_copy, to[:count], from_[:count])),
        }
        times = frame.in_turns(ways, RUNS)
        took = {name: statistics.median(each) for name, each in times.items()}
        rates = {name: size * count / each / 1e9 for name, each in took.items()}
        print(
            f"    {direction:9} {count:7}  {order:10} {took['ours'] * 1e6:7.0f}"
            f" {rates['ours']:6.1f} {rates['plain']:7.1f} {rates['ours'] / rates['plain']:7.2f}"
        )
        us = {name: 1e6 * each for name, each in took.items()}
        report.add(direction=direction, pages=count, slots=order, us=us, gb_s=rates["ours"])


def plain_copy(to: torch.Tensor, from_: torch.Tensor) -> None:
    """One copy, waited for."""
    to.copy_(from_, non_blocking=True)
    if to.is_cuda or from_.is_cuda:
        torch.cuda.current_stream().synchronize()


def seconds(run: Callable[[], None]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "pocket", "device")
    made.add_argument("--layers", type=int, default=28)
    made.add_argument("--heads", type=int, default=8, help="KV heads, 128 wide")
    made.add_argument("--pages", type=int, default=4096)
    return made


def main() -> None:
    """Checks, then times."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report:
        print(f"pocket, bfloat16, {arguments.device}")
        wrong = check_contexts(arguments.pocket, arguments.device)
        if not report.hold("tokens that a swap changes", wrong, at_most=0):
            raise SystemExit("a swapped context went on differently")
        print(f"{arguments.layers} layers, {arguments.heads} heads, pages of {PAGE} tokens")
        buffers, pools = new_pools(arguments)
        check_order(buffers, pools)
        check_round_trip(buffers, pools)
        time_copies(buffers, pools, report)


if __name__ == "__main__":
    main()
