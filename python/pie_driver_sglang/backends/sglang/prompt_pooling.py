"""Pooling as the files of sentence-transformers say, over all passes of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from safetensors.torch import load_file

from pie_driver_sglang.checkpoint.pooling import CLS, LAST, DenseModule, PoolingFiles
from pie_driver_sglang.errors import StartError

if TYPE_CHECKING:
    from pie_driver_sglang.engine.block_table import BlockTable

_MOST_PROMPTS: Final = 1024
"""Prompts that may be computed in part at once, with those that were aborted meanwhile."""


class _Pooled(NamedTuple):
    """A prompt so far."""

    tokens: int
    state: torch.Tensor
    """``[hidden]`` float32: the first token's, or the sum of all."""


class PromptPooling:
    """Pools the hidden states of prompts, whose parts come in different passes.

    What a prompt has so far is kept by its first KV slot, which is its own until it ends, as
    prefixes are not shared. It has ended when its row is read. A prompt that is computed again
    begins anew.
    """

    def __init__(self, files: PoolingFiles, block_table: BlockTable, layers: torch.nn.Sequential):
        """Nothing is pooled yet.

        Args:
            files: What the checkpoint says.
            block_table: Says where the KV of requests begins.
            layers: Its Dense modules; see `dense_layers`.
        """
        self._mode, self._layers = files.mode, layers
        self._slots = block_table.slots
        self._prompts: OrderedDict[int, _Pooled] = OrderedDict()
        """Of prompts that have not ended, by their first KV slot, the oldest ones first."""
        self._pass_slots: list[int] = []
        """The first KV slots of the prompts of the last pass."""

    def pool(
        self,
        states: torch.Tensor,
        lens: Sequence[int],
        before: Sequence[int],
        table_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Pools a pass; see `PassPooler`. Rows of prompts that are not at their end mean nothing.

        Raises:
            RuntimeError: What came before a part of a prompt was not computed for it.
        """
        parts = [part.float() for part in torch.split(states, list(lens))]
        if self._mode == LAST:
            rows = torch.stack([part[-1] for part in parts])
        else:
            # Before the pass: which of its prompts end is known after it.
            while len(self._prompts) > _MOST_PROMPTS:
                self._prompts.popitem(last=False)
            self._pass_slots = self._slots[table_rows, 0].tolist()
            asked = zip(parts, before, self._pass_slots, strict=True)
            rows = torch.stack([self._add(*one) for one in asked])
        pooled: torch.Tensor = self._layers(rows)
        return pooled

    def end(self, requests: Sequence[int]) -> None:
        """Drops what is kept of prompts of the last pass, by their number in it."""
        if self._mode != LAST:
            for request in requests:
                self._prompts.pop(self._pass_slots[request], None)

    def _add(self, part: torch.Tensor, before: int, slot: int) -> torch.Tensor:
        """Adds a part of a prompt, and returns its embedding so far."""
        found = self._prompts.pop(slot, None)
        if before == 0:
            found = None
        elif found is None or found.tokens != before:
            raise RuntimeError(
                f"the states of the first {before} tokens of a prompt are needed for its pooling; "
                "send it again, with `disable_radix_cache`"
            )
        if self._mode == CLS:
            # Copied, as a view would keep the states of the whole part.
            state = part[0].clone() if found is None else found.state
        else:
            state = part.sum(0) if found is None else found.state + part.sum(0)
        tokens = before + len(part)
        self._prompts[slot] = _Pooled(tokens, state)
        return state if self._mode == CLS else state / tokens


def dense_layers(
    modules: Sequence[DenseModule], hidden: int, device: torch.device
) -> torch.nn.Sequential:
    """The Dense modules of a checkpoint one after the other, in float32.

    Args:
        modules: In their order.
        hidden: Numbers of a hidden state.
        device: Where they go.

    Raises:
        StartError: Their sizes do not follow each other, or their files have other tensors.
    """
    layers: list[torch.nn.Module] = []
    for module in modules:
        if module.inputs != hidden:
            raise StartError(
                f"{module.path.parent}/config.json takes {module.inputs} numbers, and what comes "
                f"before it has {hidden}",
                "download the snapshot again",
            )
        linear = torch.nn.Linear(module.inputs, module.outputs, bias=module.bias, device=device)
        try:
            tensors = load_file(module.path)
            linear.load_state_dict(
                {name.removeprefix("linear."): tensor for name, tensor in tensors.items()}
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise StartError(
                f"{module.path} cannot be loaded: {error}", "download the snapshot again"
            ) from error
        layers += [linear.float(), getattr(torch.nn, module.activation)()]
        hidden = module.outputs
    return torch.nn.Sequential(*layers).requires_grad_(requires_grad=False)
