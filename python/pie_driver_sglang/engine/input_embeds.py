"""`input_embeds`: tokens of a pass that bring their embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pie_driver_sglang.engine.backend import EncodedImage, Extends


def pass_rows(embeds: Sequence[EncodedImage], extends: Extends) -> list[tuple[int, torch.Tensor]]:
    """Where the embeddings of a pass lie among its rows.

    Args:
        embeds: Blocks of embeddings, of which the pass may have a part.
        extends: Of the pass.

    Returns:
        The first row of each block in the pass, and its embeddings ``[rows, embed_size]``.
    """
    rows = []
    for request, (first, end), embeddings in embeds:
        prefix, count = extends.prefix_lens_cpu[request], extends.seq_lens_cpu[request]
        start, stop = max(first, prefix), min(end, prefix + count)
        if start < stop:
            row = sum(extends.seq_lens_cpu[:request]) + start - prefix
            rows.append((row, embeddings[start - first : stop - first]))
    return rows


@contextlib.contextmanager
def replaced_embeddings(
    table: torch.nn.Module, rows: Sequence[tuple[int, torch.Tensor]], vocab_size: int
) -> Iterator[None]:
    """Within it some rows of what an embedding layer returns are replaced.

    By hooks, so that any model and any fused layers that call it see them; on several ranks they
    run after the all-reduce.

    Args:
        table: The layer.
        rows: See `pass_rows`.
        vocab_size: Ids of placeholders are this one or above.
    """

    def known_ids(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, *others = inputs
        return (ids.clamp(max=vocab_size - 1), *others)

    def replace(_: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        for row, embeddings in rows:
            output[row : row + len(embeddings)] = embeddings
        return output

    hooks = [table.register_forward_pre_hook(known_ids), table.register_forward_hook(replace)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
