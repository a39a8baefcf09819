"""The process groups of a model's ranks: rendezvous, agreement, and no open ports."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

from pie_driver_sglang.errors import DriverError, WeightsError
from pie_driver_sglang.ranks.types import Rank

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SO_ATTACH_FILTER = 26
"""Of `asm-generic/socket.h`; Python does not name it."""


def gathered(value: T, group: Any = None) -> list[T]:
    """What each rank brings along, in their order; all ranks get the same list.

    A process without process groups is alone.

    Args:
        value: This rank's, which is pickled.
        group: Whose thread this is, by :func:`thread_group`; None for the thread that serves.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def agreed(work: Callable[[], T]) -> T:
    """Run something on all ranks, and raise on all of them where one fails.

    Raises:
        WeightsError: One has failed, with its reason.
    """
    failure: tuple[str, str] | None = None
    found: T | None = None
    try:
        found = work()
    except DriverError as error:
        failure = (error.message, error.hint)
    except Exception as error:
        logger.debug("a command failed", exc_info=True)
        failure = (f"{type(error).__name__}: {' '.join(str(error).split())}", "")
    for reason in gathered(failure):
        if reason is not None:
            raise WeightsError(*reason)
    return found  # type: ignore[return-value]


def thread_group() -> Any:
    """A group of all ranks for another thread than the one that serves; all ranks make it at once.

    Threads that share a group would have to agree on the order of what they say in it.
    """
    if dist.get_world_size() == 1:
        return None
    # One rank's disk may be slow, and no serving thread waits for it.
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))


@contextlib.contextmanager
def joined(rank: Rank, device: str) -> Iterator[None]:
    """Within it a library makes its groups from that of torch; they stay.

    Args:
        rank: Which rank this process is.
        device: ``cpu`` or ``cuda``.
    """
    if rank.size == 1:
        with _alone():
            yield
    else:
        _meet(rank, "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
        yield


def refuse_connections() -> None:
    """Has this process's listening sockets drop every further connection.

    Gloo keeps one for each group and keeps the descriptor of each connection, of strangers on this
    host, too. Its ranks are connected once a group is made, so no other is to come. To close the
    sockets would disturb gloo's own thread; a filter that drops all packets does not. For ranks on
    the CPU: NCCL connects later, too.
    """
    # struct sock_filter: BPF_RET | BPF_K, and 0 bytes to keep.
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    for entry in list(Path("/proc/self/fd").iterdir()):
        if not entry.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as own:
            listens = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and own.family in (socket.AF_INET, socket.AF_INET6):
                own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _meet(rank: Rank, backend: str) -> None:
    """Waits for the other ranks in the file that all of them have inherited."""
    store = FileStore(f"/proc/self/fd/{rank.rendezvous}", rank.size)
    dist.init_process_group(backend, store=store, rank=rank.number, world_size=rank.size)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Process groups of one process, which need no transport and so open no port."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")

    if not dist.is_initialized():
        dist.init_process_group("fake", store=HashStore(), rank=0, world_size=1)
    new_group = dist.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    def no_barrier(*_args: Any, **_kwargs: Any) -> None:
        """One process has no other to wait for."""

    with (
        mock.patch.object(dist, "new_group", new_fake_group),
        mock.patch.object(dist, "monitored_barrier", no_barrier),
    ):
        yield
