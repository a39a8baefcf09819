"""What only some libraries or models offer the engine core: the optional parts of a backend.

================  ==================================================================================
`StateBackend`    recurrent state (convolution windows, SSM matrices), for models that have some
`LoraBackend`     LoRA slots on the device, and which rows apply which
`AdapterSlots`    these slots, of libraries whose slots fused layers can read
`WeightBackend`   weights that change while the model is loaded
`PoolingBackend`  what pools the hidden states of an embedding model
`DraftModel`      an EAGLE head, which drafts from the hidden states of the model
================  ==================================================================================

`backend` says which thread and stream the calls are on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from pie_driver_sglang.engine.backend import Hidden, PassContext
    from pie_driver_sglang.engine.control_commands import JoinGroup
    from pie_driver_sglang.engine.layers.weights import LayerAdapters
    from pie_driver_sglang.engine.lora.files import Linear


class StateBackend(Protocol):
    """Recurrent state: slots ``1..slots`` of the library; slot 0 is for padding."""

    @property
    def slots(self) -> int:
        """Slots without the one for padding."""

    @property
    def rows(self) -> torch.Tensor:
        """``[block-table rows]`` int32 on the device: the slot of each; the core writes it."""

    @property
    def parts(self) -> list[torch.Tensor]:
        """The tensors of the state, ``[layers, slots + 1, ...]`` each."""

    def clear(self, slots: torch.Tensor) -> None:
        """Fills slots with zeros."""

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies slots within the device."""


class PreparedAdapter(Protocol):
    """An adapter in host memory, as the library keeps it."""

    @property
    def uid(self) -> str:
        """Its name, which no other load ever had."""


class AdapterCopy(Protocol):
    """A copy of an adapter into a device slot, a few layers at a time."""

    @property
    def layers(self) -> int:
        """Steps of the copy."""

    @property
    def bytes(self) -> int:
        """Host memory of the adapter, with all ranks' parts."""

    def copy(self, layers: int) -> bool:
        """Copies the next layers; returns whether that was all."""


class AdapterSlots(Protocol):
    """Device slots of adapters, as fused layers read them."""

    @property
    def slot_ranks(self) -> torch.Tensor:
        """``[slots]`` int32 on the device: the rank of the adapter in each slot."""

    def layer_adapters(self) -> list[LayerAdapters]:
        """The slots of each layer of :meth:`ModelBackend.decoder_weights`, on this rank."""

    def used_slots(self) -> dict[str, int]:
        """The slot of each adapter that has one; brings :attr:`slot_ranks` up to date."""

    def inputs_of(self, weight: torch.Tensor) -> list[str]:
        """The layers of `LoraBackend.layers` that are parts of this matrix, by their own names."""


class LoraBackend(Protocol):
    """LoRA adapters of a library, by names (`uid`) that the core gives them."""

    @property
    def library(self) -> str:
        """The library's name, for messages."""

    @property
    def kernels(self) -> str:
        """The name of its kernels, for the log."""

    @property
    def slots(self) -> int:
        """Different adapters of a pass, no adapter being one of them."""

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""

    @property
    def max_rank(self) -> int:
        """Largest rank of an adapter."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights in slots."""

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        """The slots for fused layers; None where only the library's layers apply adapters."""

    def layers(self) -> dict[str, Linear]:
        """The layers that take adapters, by the names that checkpoints have for them."""

    def prepare(
        self, uid: str, rank: int, targets: Sequence[str], tensors: Mapping[str, torch.Tensor]
    ) -> PreparedAdapter:
        """Brings weights into the library's form; on any thread, blocks while it copies.

        Args:
            uid: The adapter's name.
            rank: Of the adapter, whose scaling is in its weights already.
            targets: Last components of the layers' names.
            tensors: Its weights.

        Raises:
            ValueError: The library does not take it.
        """

    def put(self, adapter: Any) -> None:
        """Registers an adapter of :meth:`prepare`, and copies it into a slot (LRU eviction)."""

    def begin_copy(self, adapter: Any) -> AdapterCopy:
        """As :meth:`put`, in steps between which passes may run. Reserves a slot."""

    def forget(self, uid: str) -> None:
        """Unregisters an adapter, in a slot or not, if there is one of this name."""

    def bind(self, context: PassContext, uids: Sequence[str | None]) -> None:
        """Has the next pass apply the adapter of each of its requests; None for none."""

    def bind_rows(self, uids: Sequence[str | None]) -> None:
        """Has the LM head, or a captured decode, apply the adapter of each row; None for none."""

    def unbind(self) -> None:
        """Has the next pass apply no adapters, at no cost."""

    def bind_by_memory(self, rows: int) -> None:
        """From now on :meth:`bind_rows` writes to memory that graphs of up to so many rows read."""


class WeightBackend(Protocol):
    """The weights of a loaded model, of one rank, as updates see them."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    @property
    def update_refusal(self) -> str | None:
        """Why the library cannot write new weights into a model that serves; None if it can."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters by their names in the model."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters, and the buffers."""

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of the parameter that has this memory."""

    def read_folder(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads the tensors of a checkpoint, on the host."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes tensors of a checkpoint into the parameters, each rank its part, in place."""

    def read_part(self, name: str, stored: Callable[[torch.Tensor], torch.Tensor]) -> WeightPart:
        """This rank's part of a tensor of a checkpoint.

        Args:
            name: Its name in the checkpoint.
            stored: Gives the values as a checkpoint has them, for a parameter.

        Raises:
            WeightsError: The model has none of this name.
        """

    def joined(self, parts: Sequence[WeightPart]) -> torch.Tensor:
        """A whole tensor from the ranks' parts."""

    def new_group(self, backend: str, command: JoinGroup, timeout_s: float) -> Any:
        """Joins a process group as the rank `rank_offset` of `command`; blocks for the others."""


class PoolingBackend(Protocol):
    """The end of an embedding model, after its final norm."""

    def pool(self, context: PassContext, states: torch.Tensor) -> Hidden:
        """Pools the prompts of an extend that :meth:`ModelBackend.run_model` has run.

        Args:
            context: The extend.
            states: ``[tokens, hidden]`` after the final norm.
        """


class DraftModel(Protocol):
    """An EAGLE head: one decoder layer, whose KV is in the pages of the model's.

    KV slot `j` of the head is computed from the token at `j` and the hidden state at `j - 1`, so it
    depends on no later token, and the backend stores it in every pass that stores the model's.
    """

    @property
    def features(self) -> torch.Tensor:
        """``[KV slots, hidden]``: what the head takes of the model's hidden state at each slot."""

    @property
    def scratch_page(self) -> int:
        """The first of `scratch_pages` (`memory/batch_sizes.py`) that only the head's KV has."""

    def forward(
        self, context: PassContext, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a planned decode, and stores its KV. Can be captured.

        Args:
            context: A decode of the tokens to continue.
            features: ``[rows, hidden]``: of the position before each.

        Returns:
            The most likely next tokens, ``[rows]`` int64, and the features of these rows, ``[rows,
            hidden]``.
        """


class WeightPart(NamedTuple):
    """A rank's part of a weight."""

    values: torch.Tensor
    dim: int | None
    """The dimension that ranks divide; None where each has all."""
    rows: int | None = None
    """Rows of the whole, which may be padded; None for all."""
    copies: int = 1
    """How many ranks in a row have the same part."""
