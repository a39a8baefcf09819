"""What a lane needs from a model: the door between the driver and an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pie_driver_sglang._core import Lane, Pass, SlotGroup
    from pie_driver_sglang.sampling.types import Outputs


class Facts(NamedTuple):
    """What the engine found out about the model while it loaded it."""

    total_pages: int
    """KV pages that the runtime may use: ids ``0..total_pages``."""
    page_size: int
    """Tokens of one page."""
    vocab_size: int
    """Rows of the embedding table and columns of the logits."""
    context_length: int
    """Positions ``0..context_length``."""
    arch_name: str
    """Architecture as the runtime's chat templates know it."""
    dtype: str
    """Activation dtype, e.g. ``bfloat16``."""
    attention_backend: str
    """The attention backend, or ``prefill,decode``."""
    host_pages: int = 0
    """Pages of the host's pool, for swapping: slots ``0..host_pages``."""
    adapter_slots: int = 0
    """Different adapters of a pass, no adapter being one of them; 0: adapters are off."""
    state_slots: int = 0
    """Slots of recurrent state: ``0..state_slots``; 0 for a model without."""
    state_bytes: int = 0
    """Bytes of one of them."""


class Engine(Protocol):
    """A loaded model with its KV pool. All calls come from one thread."""

    @property
    def recovers(self) -> bool:
        """False once this rank has failed where others wait for it, so that none can go on."""

    def find_loss(self) -> str | None:
        """Asks the device, after a call that failed, whether it still works; returns why not."""

    @property
    def facts(self) -> Facts:
        """Sizes and names of the loaded model."""

    @property
    def block(self) -> npt.NDArray[np.uint8]:
        """The staging block that the planner fills: ``[bytes]`` uint8, pinned for a GPU."""

    @property
    def lane(self) -> Lane | None:
        """What runs short batches without Python; None if every batch goes through `forward`."""

    def forward(self, batch: Pass) -> None:
        """Runs the staged pass and stores its KV.

        The final hidden states stay with the engine until the pass's slot groups are sampled. The
        adapters of the pass have been fetched.
        """

    def sample(self, group: SlotGroup) -> Outputs:
        """Computes the staged slot group of the last pass: tokens and probes, on the host."""

    def take_waits(self) -> tuple[int, int]:
        """Host nanoseconds of host-to-device copies and of waiting, since the last call."""

    def copy_pages(self, direction: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole KV pages of all layers, at once; they are there when the call returns.

        Args:
            direction: The pools of sources and targets, `D2H`, `H2D`, `D2D` or `H2H`, with D for
                the device's and H for the host's.
            sources: Pages to read.
            targets: Pages to write, pair by pair. None is named twice, and none is the source of a
                later pair.
        """

    def begin_load(
        self, number: int, adapter_id: int, path: str, done: Callable[[], object]
    ) -> None:
        """Begins to read an adapter while other calls go on.

        Args:
            number: Tells this load from all others.
            adapter_id: What passes will name the adapter by.
            path: A PEFT folder, or a safetensors file beside its `adapter_config.json`.
            done: Called once it is read, from another thread, in the order of the loads.
        """

    def finish_load(self, number: int) -> None:
        """Makes an adapter that was read usable, in the place of the one that has its id already.

        Raises:
            AdapterError: It cannot be read or does not fit the model; nothing has changed.
        """

    def discard_load(self, number: int) -> None:
        """Forgets what a load has read instead."""

    def fetch_adapters(self, adapter_ids: Sequence[int]) -> dict[int, str]:
        """Makes the adapters of the next pass ready; returns why those that are missing are."""

    def load_rehearsal_adapter(self) -> None:
        """Makes `REHEARSAL_ADAPTER` an adapter of all layers that changes nothing."""

    def drop_rehearsal_adapter(self) -> None:
        """Forgets it."""

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots of recurrent state, under the conditions of `copy_pages`."""
