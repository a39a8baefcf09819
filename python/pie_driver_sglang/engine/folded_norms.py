"""Norm weights that are folded into the matrices after them, and what an update does to both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from pie_driver_sglang.errors import WeightsError

_PARTS: Final[Mapping[str, Sequence[str]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The matrices of a checkpoint that one parameter consists of."""


class _Fold(NamedTuple):
    norm: torch.Tensor
    matrix: torch.Tensor
    weight: torch.Tensor
    """What the norm was before."""


class FoldedNorms:
    """Pairs of a norm and the matrix that is multiplied by its weights.

    Fused kernels compute ``(x / rms(x)) @ (W * n)``, so the norm's own weights are ones.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Fold norms.

        Args:
            pairs: ``[inputs]`` weights of a norm, and ``[outputs, inputs]`` of the matrix after it.
        """
        self._folds = [_Fold(norm, matrix, norm.clone()) for norm, matrix in pairs]
        for fold in self._folds:
            _apply(fold)

    def fold_again(self, names: Callable[[torch.Tensor], str], new: Collection[str] | None) -> None:
        """Fold again what an update has written.

        Args:
            names: The names of the model's parameters.
            new: The names of the tensors that were written; None for all.
        """
        for fold in self._folds:
            if new is None or names_of_pair(names(fold.norm), names(fold.matrix)) & set(new):
                fold.weight.copy_(fold.norm)
                _apply(fold)

    def check(
        self,
        names: Callable[[torch.Tensor], str],
        new: Collection[str],
        stored: Collection[str],
    ) -> None:
        """Check that an update writes a norm and the matrix after it together.

        Args:
            names: The names of the model's parameters.
            new: The names of the tensors of the update.
            stored: The names of all tensors of a checkpoint.

        Raises:
            WeightsError: One is missing, or their names are not those of the model.
        """
        for fold in self._folds:
            pair = names_of_pair(names(fold.norm), names(fold.matrix)) & set(stored)
            if names(fold.norm) not in pair or len(pair) == 1:
                raise WeightsError(
                    f"norms are folded into the matrices after them, and the checkpoint has other "
                    f"names for {names(fold.norm)} and {names(fold.matrix)}",
                    "update all weights from a folder, or start with `fuse_layers = false`",
                )
            if pair & set(new) and not pair <= set(new):
                lacking = ", ".join(sorted(pair - set(new)))
                raise WeightsError(
                    f"{lacking} must be updated in the same call: norms are folded into the "
                    "matrices after them",
                    "send whole layers, or start with `fuse_layers = false`",
                )

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """The weights of a norm as the checkpoint has them; other tensors as they are.

        Raises:
            WeightsError: It is a matrix that a norm is folded into.
        """
        for fold in self._folds:
            if tensor.data_ptr() == fold.norm.data_ptr():
                return fold.weight
            if tensor.data_ptr() == fold.matrix.data_ptr():
                raise WeightsError(
                    "it is multiplied by the weights of the norm before it",
                    "start with `fuse_layers = false` to read it",
                )
        return tensor

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each matrix, and the weights of the norm before it, which it is multiplied by."""
        return ((fold.matrix, fold.weight) for fold in self._folds)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The weights of norms that are kept besides the model's."""
        return (fold.weight for fold in self._folds)


def names_of_pair(norm: str, matrix: str) -> set[str]:
    """The tensors of a checkpoint that a norm and the matrix after it are filled from.

    Args:
        norm: The name of the norm's parameter.
        matrix: The name of the matrix's parameter, which may consist of several of a checkpoint.

    Returns:
        The norm, the matrix and its parts; a checkpoint has one of the latter two.
    """
    path, _, leaf = matrix.rpartition(".")
    module, _, kind = path.rpartition(".")
    # Some checkpoints, as Phi-3's, have the whole matrix.
    parts = (f"{module}.{part}.{leaf}" for part in _PARTS.get(kind, ()))
    return {norm, matrix, *parts}


def _apply(fold: _Fold) -> None:
    fold.matrix.mul_(fold.norm)
    fold.norm.fill_(1.0)
