"""What differs between the supported versions of SGLang's server, as typed protocols.

Modules of `v0517` and `v0523` implement them; `selection` returns that of the installed version.
What the driver and the server share, such as settings, is in the driver's `compat` package.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import PortArgs, ServerArgs


ReadImage = tuple[int, int, tuple[int, int, int], bytes, bytes]
"""Index of the first token in the prompt, the number of tokens, the grid (time, height, width in
patches), the pixels (float32 ``[patches, values of a patch]``), and the rotary positions (uint32
``[tokens, 3]``, or none)."""


class LaunchCompat(Protocol):
    """The launch of the HTTP server."""

    def attach(self, args: ServerArgs, name: str, value: Any) -> None:
        """Adds an attribute to settings, which reaches the server's other processes."""

    def take_keys(self, args: ServerArgs) -> tuple[str | None, str | None]:
        """Removes the API key and the admin key from settings, which SGLang logs."""

    def warming_up(self, args: ServerArgs, token: str) -> AbstractContextManager[ServerArgs]:
        """Within it SGLang's warm-up, called with what this returns, sends this key."""

    def freeze_with_key(self, token: Callable[[ServerArgs], str]) -> None:
        """Has SGLang send this key when it freezes the garbage collector after the warm-up."""

    def verifies_ssl(self, args: ServerArgs) -> bool | str:
        """How a client of this host verifies the server's certificate, for `requests`."""

    def replacing_server(self, run: Callable[[Any], None]) -> AbstractContextManager[None]:
        """Within it `run` gets the application where SGLang would serve it by uvicorn."""


class SchedulerCompat(Protocol):
    """A scheduler's process."""

    def parameters(self) -> tuple[str, ...]:
        """The names of the positional arguments of `run_scheduler_process`."""

    def ranks_of(self, scheduler: Any) -> tuple[int, int | None]:
        """The rank of tensor parallelism of SGLang's `Scheduler`, and its replica."""

    def uses_zmq(self, args: ServerArgs) -> bool:
        """Whether load snapshots are sent instead of kept in shared memory."""

    def make_load_writer(
        self, args: ServerArgs, ports: PortArgs, replicas: int, replica: int
    ) -> Any:
        """SGLang's writer of load snapshots."""

    def media_classes(self) -> tuple[type, ...]:
        """The classes of images in a request, where they are messages.

        None where they are pickled; then `image_reader` has what reads them.
        """

    def image_reader(self) -> Callable[[bytes], list[ReadImage]] | None:
        """Reads the pickled images of a request; None where they are messages."""

    def parallelism_of(self, rank: dict[str, int]) -> dict[str, int] | list[dict[str, Any]]:
        """Ranks and sizes of a process, as replies with checksums have them."""

    def make_collector(self, args: ServerArgs, rank: int, replica: int | None) -> Any:
        """SGLang's metrics of a scheduler: a `SchedulerMetricsCollector`."""


class EndpointsCompat(Protocol):
    """HTTP endpoints, and the tokenizer manager behind them."""

    def correct_top_logprobs(self) -> None:
        """Gives each token of a streamed chunk its own `top_logprobs`, where it lacks them."""

    def check_by_scheduler(self) -> None:
        """Leaves the types of parameters to our scheduler, which names the wrong one."""

    def fold_salt(self, request: Any) -> None:
        """Puts the `cache_salt` of a tokenized request into its `extra_key`."""

    def aborts_children(self, manager: TokenizerManager, rid: str) -> bool:
        """Whether SGLang aborts all samples of a request by its id."""
