"""The interface between a serving loop and a loaded model: `ModelExecutor`, `ModelInfo`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pie_driver_sglang._core import GraphPath, Pass, SlotGroup
    from pie_driver_sglang.engine.control_commands import ControlCommand
    from pie_driver_sglang.kernels.sampling.outputs import Outputs


class ModelInfo(NamedTuple):
    """Sizes and names of a loaded model; the same on all ranks."""

    total_pages: int
    """KV pages for requests: ids ``0..total_pages``."""
    page_size: int
    """Tokens of one page."""
    vocab_size: int
    """Rows of the embedding table and columns of the logits."""
    context_length: int
    """Positions ``0..context_length``."""
    arch_name: str
    """Architecture, by the name that selects the runtime's chat template."""
    dtype: str
    """Activation dtype, e.g. ``bfloat16``."""
    attention_backend: str
    """The attention backend, or ``prefill,decode``."""
    host_pages: int = 0
    """Pages of the host pool for swapping: slots ``0..host_pages``."""
    adapter_slots: int = 0
    """Different adapters of a pass; the base model counts as one. 0 if adapters are off."""
    state_slots: int = 0
    """Slots of recurrent state: ``0..state_slots``; 0 for a model without."""
    state_bytes: int = 0
    """Bytes of one such slot."""
    embedding_size: int = 0
    """Numbers of a pooled row of an embedding model; 0 for a model that generates."""
    embedding_normalized: bool = False
    """Whether pooled rows have norm 1."""
    hidden_size: int = 0
    """Numbers of a hidden state; 0 before the warm-up, and for an embedding model."""
    embed_size: int = 0
    """Numbers of an embedding of `input_embeds`; 0 where none are taken."""


class ModelExecutor(Protocol):
    """A loaded model with its KV pool.

    **Thread.** All calls come from the serving thread, one at a time. The callback of
    :meth:`begin_load` is the only code of an engine that runs on another thread.

    **Stream.** All work of a GPU goes to one CUDA stream, which the start makes the current one of
    the serving thread. Passes, copies and captured graphs therefore run in the order of their
    calls, without events between them. The CPU runs each call to its end.

    **Errors.** Unless a method says otherwise, it may raise any exception of torch, CUDA or the
    inference library. The caller then answers the request by an abort, asks :meth:`find_loss`, and
    ends the driver if the device is lost or :attr:`recovers` is false (`driver/failures.py`).
    Otherwise the engine continues: KV of the failed pass is undefined, everything else is as
    before.
    """

    @property
    def recovers(self) -> bool:
        """Whether the engine is usable after the last exception.

        False once this rank has failed in a collective operation that other ranks wait for.
        """

    def find_loss(self) -> str | None:
        """Asks the device, after an exception, whether it still works.

        Blocks until the device has done all its work, or reports an error.

        Returns:
            The reason if the device is lost; None if it works. Raises nothing.
        """

    @property
    def model_info(self) -> ModelInfo:
        """Sizes and names of the loaded model."""

    @property
    def active(self) -> Mapping[str, Any]:
        """What runs the model, as `observability.active.Active.as_dict` has it."""

    @property
    def block(self) -> npt.NDArray[np.uint8]:
        """The staging block that the planner fills: ``[bytes]`` uint8, pinned for a GPU.

        The same memory for the engine's whole life. It may be written again as soon as
        :meth:`forward` or :meth:`sample` has returned or raised.
        """

    def make_graph_path(self) -> GraphPath | None:
        """Makes the graph path: captured steps that Rust stages, launches and reads by itself.

        Call it once, at the start. On several ranks the leader's also broadcasts its steps.

        Returns:
            The native graph path, which keeps its memory and graphs alive; None if every batch goes
            through :meth:`forward`.
        """

    def forward(self, batch: Pass) -> None:
        """Runs the staged pass and stores its KV.

        Returns once the device has copied the block, which waits for all work before it. The model
        may still run then. The final hidden states stay with the engine until the next pass.

        Args:
            batch: The pass that is staged in :attr:`block`. Its adapters have been fetched; its
                images' pixels are read during the call.
        """

    def sample(self, group: SlotGroup) -> Outputs:
        """Computes the staged slot group of the last pass: tokens and probes.

        Blocks until the outputs are in host memory, and so until the pass has ended.

        Args:
            group: The slots that are staged in :attr:`block`.

        Returns:
            Tensors in host memory, which belong to the caller.
        """

    def take_waits(self) -> tuple[int, int]:
        """Host nanoseconds spent on host-to-device copies and on waiting, since the last call.

        Never blocks, raises nothing.
        """

    def copy_pages(self, direction: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole KV pages of all layers.

        Blocks until the copies have ended, after all passes before them.

        Args:
            direction: The pools of sources and targets, `D2H`, `H2D`, `D2D` or `H2H`, with D for
                the device's and H for the host's.
            sources: Pages to read.
            targets: Pages to write, pair by pair. None is named twice, and none is the source of a
                later pair.

        Raises:
            ValueError: The direction is not one of these.
        """

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots of recurrent state, under the conditions of :meth:`copy_pages`."""

    def begin_load(
        self, number: int, adapter_id: int, path: str, done: Callable[[], object]
    ) -> None:
        """Starts to read an adapter on a thread, while the serving thread continues.

        Never blocks. What is wrong with the files shows in :meth:`finish_load`.

        Args:
            number: Names this load; no other load has it.
            adapter_id: The id by which passes will name the adapter.
            path: A PEFT folder, or a safetensors file next to its `adapter_config.json`.
            done: Called once it is read, on the reading thread, in the order of the loads.
        """

    def finish_load(self, number: int) -> bool:
        """Makes a loaded adapter usable, replacing one of the same id.

        Blocks until it is read, then copies some layers of it into a slot. Call it after the
        load's `done`, and again until it returns True; passes, copies and other loads may come in
        between, and find what they found before.

        Returns:
            Whether the adapter is usable now.

        Raises:
            AdapterError: The adapter cannot be read or does not fit the model. Nothing has changed,
                and the engine continues.
        """

    def discard_load(self, number: int) -> None:
        """Drops a load instead of finishing it, whatever was copied; never blocks for long."""

    def fetch_adapters(self, adapter_ids: Sequence[int]) -> dict[int, str]:
        """Brings the adapters of the next pass into host memory.

        Blocks while it reads files, for adapters that had to leave host memory.

        Returns:
            The reason for each adapter that is lost. The caller refuses the requests that bind it.
        """

    def graph_adapter_slots(self) -> list[tuple[int, int]]:
        """Id and device slot of the loaded adapters that the graph path can apply.

        Other calls about adapters, and passes that bind some, change it.
        """

    def load_warm_up_adapter(self) -> None:
        """Makes `WARM_UP_ADAPTER` an adapter of all layers that changes nothing.

        For the warm-up; blocks while it copies.
        """

    def drop_warm_up_adapter(self) -> None:
        """Removes `WARM_UP_ADAPTER` after the warm-up."""

    def control(self, command: ControlCommand) -> dict[str, Any]:
        """Updates, reads, releases or resumes weights or KV, unloads an adapter, or profiles.

        Blocks meanwhile.

        No pass is in flight, and no request has KV that is to be used with other weights.

        Raises:
            WeightsError: It is refused, or has failed; the engine is as it was.
            LostWeightsError: The weights are partly old and partly new.
        """
