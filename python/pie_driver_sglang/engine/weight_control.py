"""`WeightControl`: updates and reads the weights of a loaded model, on all ranks alike.

An update is checked by all ranks before any of them writes. It writes in place, so that captured
graphs and fused layers, which have addresses of weights, see it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError, safe_open

from pie_driver_sglang.checkpoint.replacement import ServedCheckpoint
from pie_driver_sglang.checkpoint.tensors import Tensor
from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.control_commands import (
    CheckWeights,
    ControlCommand,
    DiskUpdate,
    GroupUpdate,
    JoinGroup,
    LeaveGroup,
    ReadWeight,
    ReleaseMemory,
    ResumeMemory,
    TensorUpdate,
)
from pie_driver_sglang.engine.sleep import DeviceMemory
from pie_driver_sglang.engine.update_groups import UpdateGroups
from pie_driver_sglang.errors import LostWeightsError, WeightsError, quoted

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend_features import WeightBackend, WeightPart
    from pie_driver_sglang.engine.folded_norms import FoldedNorms

logger = logging.getLogger(__name__)

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_ACTIONS: Final = ("checksum", "snapshot", "reset_tensors", "compare")
_MOST_NAMED: Final = 3


class WeightControl:
    """The weights of one rank. All ranks make the same calls in the same order."""

    def __init__(
        self,
        backend: WeightBackend,
        folder: Path,
        folded: FoldedNorms | None,
        memory: DeviceMemory,
        rank: int,
    ) -> None:
        """Control a model that was loaded from a folder.

        Args:
            backend: The library's weights.
            folder: Where they came from.
            folded: Norms that are folded into other weights; None for none.
            memory: What can be released.
            rank: This rank's number.
        """
        self._backend = backend
        self._served = ServedCheckpoint.read(folder)
        self._source: Path | None = folder
        """None where the weights are in no folder."""
        self._lacking: set[str] = set()
        """Tensors that no update has brought since the weights were those of `_source`."""
        self._folded = folded
        self._memory = memory
        self._groups = UpdateGroups(backend, rank)
        self._snapshot: dict[str, torch.Tensor] | None = None

    @torch.inference_mode()
    def run(self, command: ControlCommand) -> dict[str, Any]:
        """Run a command.

        Raises:
            WeightsError: It is refused; nothing has changed.
            LostWeightsError: An update failed after it had begun, and so did its rollback.
        """
        match command:
            case DiskUpdate(folder):
                return self._update_from_disk(Path(folder))
            case TensorUpdate(file):
                return self._update_from_file(file)
            case GroupUpdate():
                return self._update_from_group(command)
            case JoinGroup():
                process_groups.agreed(lambda: self._groups.join(command))
            case LeaveGroup(name):
                process_groups.agreed(lambda: self._groups.leave(name))
            case ReadWeight(name, rows):
                return {"rows": self._read(name, rows)}
            case CheckWeights(action):
                return self._check(action)
            case ReleaseMemory(tags):
                self._release(tags)
            case ResumeMemory(tags):
                process_groups.agreed(lambda: self._memory.resume(tags))
        return {}

    def _release(self, tags: Sequence[str]) -> None:
        awake = [tag for tag in tags if self._memory.is_awake(tag)]
        try:
            process_groups.agreed(lambda: self._memory.release(tags))
        except WeightsError:
            # One rank lacks space for its weights, and others have released theirs.
            try:
                process_groups.agreed(lambda: self._memory.resume(awake))
            except WeightsError as error:
                raise LostWeightsError(
                    f"memory was released by some ranks only: {error.message}"
                ) from error
            raise

    def _update_from_disk(self, folder: Path) -> dict[str, Any]:
        self._require_updates()
        process_groups.agreed(lambda: self._served.check_folder(folder))
        self._write(lambda: self._backend.read_folder(folder), None)
        self._source, self._lacking = folder, set()
        return {"lacking": 0}

    def _update_from_file(self, file: str) -> dict[str, Any]:
        self._require_updates()
        listed = process_groups.agreed(lambda: _listed(file))
        process_groups.agreed(lambda: self._check_part(listed))
        self._write(lambda: _tensors_of(file), [tensor.name for tensor in listed])
        return self._updated_part(listed)

    def _update_from_group(self, command: GroupUpdate) -> dict[str, Any]:
        self._require_updates()
        listed = process_groups.agreed(lambda: self._groups.listed(command))
        process_groups.agreed(lambda: self._check_part(listed))
        # What the model does not read is received all the same.
        process_groups.agreed(lambda: self._served.check_sizes(listed))
        # Received first: what fails until here changes nothing.
        received = process_groups.agreed(lambda: self._groups.receive(command))
        self._write(lambda: received, [tensor.name for tensor in listed])
        return self._updated_part(listed)

    def _updated_part(self, listed: Collection[Tensor]) -> dict[str, Any]:
        if self._source is not None:
            self._source, self._lacking = None, set(self._served.needed())
        self._lacking -= {tensor.name for tensor in listed}
        return {"lacking": len(self._lacking)}

    def _check_part(self, listed: Collection[Tensor]) -> None:
        self._served.check_tensors(listed)
        if self._folded is not None:
            names = [tensor.name for tensor in listed]
            self._folded.check(self._backend.name_of, names, self._served.tensors)

    def _require_updates(self) -> None:
        process_groups.agreed(lambda: self._memory.require_awake("weights"))
        if self._backend.update_refusal is not None:
            raise WeightsError(
                f"this model's weights cannot be updated: {self._backend.update_refusal}",
                "restart the server with the new weights",
            )

    def _write(self, tensors: Callable[[], NamedTensors], names: Collection[str] | None) -> None:
        """Write new weights; all of the former ones are back where that fails."""
        try:
            process_groups.agreed(lambda: self._load(tensors(), names))
        except WeightsError as error:
            source = self._source
            if source is None:
                raise LostWeightsError(
                    f"an update of the weights failed half-way: {error.message}; those before "
                    "cannot be read again, as they came from tensors"
                ) from error
            logger.warning("an update of the weights failed, the former ones are read again")
            try:
                process_groups.agreed(lambda: self._load(self._backend.read_folder(source), None))
            except WeightsError as second:
                raise LostWeightsError(
                    f"an update of the weights failed: {error.message}; the former ones cannot "
                    f"be read from {source}: {second.message}"
                ) from second
            raise

    def _load(self, tensors: NamedTensors, names: Collection[str] | None) -> None:
        before = self._addresses()
        self._backend.load(tensors)
        if self._addresses() != before:
            raise WeightsError("the library has moved weights, whose addresses graphs have")
        if self._folded is not None:
            self._folded.fold_again(self._backend.name_of, names)

    def _addresses(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {
            name: (tensor.data_ptr(), tuple(tensor.shape))
            for name, tensor in self._backend.named_tensors()
        }

    def _read(self, name: str, rows: int) -> list[Any]:
        process_groups.agreed(lambda: self._memory.require_awake("weights"))
        stored = (lambda tensor: tensor) if self._folded is None else self._folded.stored
        count = max(0, rows)

        def first_rows() -> WeightPart:
            part = self._backend.read_part(name, stored)
            # Also where ranks have rows each: the first ones are among the first of each. A copy,
            # as the whole storage of a view would be sent to the other ranks.
            return part._replace(values=part.values[:count].cpu().clone())

        parts = process_groups.gathered(process_groups.agreed(first_rows))
        found: list[Any] = self._backend.joined(parts)[:count].float().tolist()
        return found

    def _check(self, action: str) -> dict[str, Any]:
        if action not in _ACTIONS:
            raise WeightsError(f"the action is {quoted(action)}", f"use {', '.join(_ACTIONS)}")
        process_groups.agreed(lambda: self._memory.require_awake("weights"))
        if action == "snapshot":
            self._snapshot = {
                name: tensor.cpu().clone() for name, tensor in self._backend.named_tensors()
            }
        elif action == "reset_tensors":
            self._require_updates()
            self._require_unfolded()
            for _, tensor in self._backend.named_parameters():
                tensor.normal_()
        elif action == "compare":
            process_groups.agreed(self._compare)
        else:
            return {"ranks": process_groups.gathered(self._checksums())}
        return {}

    def _require_unfolded(self) -> None:
        """Random weights are for tests of updates, and must be found again after a restart."""
        if self._folded is not None:
            raise WeightsError(
                "norms are folded into the matrices after them", "start with `fuse_layers = false`"
            )

    def _compare(self) -> None:
        if self._snapshot is None:
            raise WeightsError("there is no snapshot", 'send the action "snapshot" before')
        wrong = [
            name
            for name, tensor in self._backend.named_tensors()
            if not torch.equal(tensor.cpu(), self._snapshot[name])
        ]
        if wrong:
            named = ", ".join(wrong[:_MOST_NAMED])
            raise WeightsError(f"{len(wrong)} tensors differ from the snapshot: {named}")

    def _checksums(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(_bytes_of(tensor)).hexdigest()
            for name, tensor in self._backend.named_tensors()
        }


def _listed(file: str) -> list[Tensor]:
    """The tensors of a safetensors file, by its header."""
    found = []
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                part = opened.get_slice(name)
                floating = part.get_dtype() in ("F64", "F32", "F16", "BF16")
                found.append(Tensor(name, tuple(part.get_shape()), 0, floating))
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"the tensors are not a safetensors file: {error}") from error
    if not found:
        raise WeightsError("there are no tensors in the update", "send at least one")
    return found


def _tensors_of(file: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
            yield name, opened.get_tensor(name)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # A copy: torch fixes the size of a storage that numpy refers to.
    flat = tensor.detach().cpu().clone().flatten()
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view
