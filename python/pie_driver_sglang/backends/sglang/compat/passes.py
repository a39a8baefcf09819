"""Passes: the batch that SGLang's models take, and the capture of one in a graph.

`ForwardBatch` is passed on for annotations: attention backends read its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

from pie_driver_sglang.backends.sglang.compat.attention import AttentionBackend, attending
from pie_driver_sglang.backends.sglang.compat.ranks import capturing_collectives
from pie_driver_sglang.engine.backend import Extends, PassContext, PassInputs

__all__ = ["ForwardBatch"]


def make_batch(
    inputs: PassInputs,
    extends: Extends | None = None,
    images: list[MultimodalInputs | None] | None = None,
) -> ForwardBatch:
    """A `ForwardBatch` by hand: a version's new fields have defaults, which a pass may not bear.

    Args:
        inputs: The rows.
        extends: Of a prefill; None for a decode.
        images: Of each request, if there are any.
    """
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if extends is None else ForwardMode.EXTEND,
        batch_size=len(inputs.seq_lens),
        input_ids=inputs.input_ids,
        positions=inputs.positions,
        mrope_positions=inputs.mrope_positions,
        out_cache_loc=inputs.out_cache_loc,
        req_pool_indices=inputs.req_pool_indices,
        seq_lens=inputs.seq_lens,
        seq_lens_cpu=inputs.seq_lens_cpu,
        seq_lens_sum=inputs.seq_lens_sum,
        orig_seq_lens=inputs.seq_lens,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    if extends is not None:
        batch.extend_num_tokens = len(inputs.input_ids)
        batch.extend_seq_lens = extends.seq_lens
        batch.extend_prefix_lens = extends.prefix_lens
        batch.extend_start_loc = extends.start_loc
        batch.extend_seq_lens_cpu = extends.seq_lens_cpu
        batch.extend_prefix_lens_cpu = extends.prefix_lens_cpu
    if images is not None:
        batch.mm_inputs = images
    return batch


def make_row_batch(rows: int) -> ForwardBatch:
    """A decode of so many rows without inputs, for what reads only its mode and its size."""
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=rows,
        input_ids=None,
        req_pool_indices=None,
        seq_lens=None,
        out_cache_loc=None,
        seq_lens_sum=0,
    )


def context_of(batch: ForwardBatch) -> PassContext:
    """A batch as the core knows it."""
    extends = None
    if not batch.forward_mode.is_decode():
        extends = Extends(
            batch.extend_seq_lens,
            batch.extend_prefix_lens,
            batch.extend_start_loc,
            batch.extend_seq_lens_cpu,
            batch.extend_prefix_lens_cpu,
        )
    return PassContext(batch.out_cache_loc, extends, batch)


def skip_planning(batch: ForwardBatch) -> None:
    """Has the runner leave out its backend's plan of a pass, which attends by another one."""
    batch.mark_forward_metadata_ready()


@contextmanager
def capturing(backend: AttentionBackend, stream: torch.cuda.Stream) -> Iterator[None]:
    """Within it decodes are captured as SGLang's own runner captures them."""
    with attending(backend), model_capture_mode(), capturing_collectives(stream):
        yield


def find_embedding_table(model: torch.nn.Module) -> torch.nn.Module | None:
    """The layer that embeds token ids, with its adapters; None for a model with several."""
    tables = [
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    return model.get_submodule(tables[0]) if len(tables) == 1 else None


def embedding_width(table: torch.nn.Module) -> int:
    """Numbers of an embedding."""
    base: Any = getattr(table, "base_layer", table)
    return int(base.embedding_dim)


def image_pixels(pixels: torch.Tensor, grid: Sequence[int]) -> MultimodalDataItem:
    """An image as the vision encoders of the Qwen-VL family take it.

    Args:
        pixels: ``[patches, numbers]`` float32.
        grid: Patches of each axis: frames, height, width.
    """
    return MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=pixels,
        model_specific_data={"image_grid_thw": torch.tensor([list(grid)])},
    )


def image_embeddings(
    embeddings: torch.Tensor, kv: tuple[int, int], placeholder: int
) -> MultimodalDataItem:
    """An image that is encoded already; a version that encodes it all the same has no pixels.

    Args:
        embeddings: ``[rows, hidden]``.
        kv: Its first KV index, and the one after its last.
        placeholder: The token of its rows.
    """
    first, end = kv
    return MultimodalDataItem(
        modality=Modality.IMAGE,
        pad_value=placeholder,
        offsets=[(first, end - 1)],
        precomputed_embeddings=embeddings,
    )


def image_inputs(items: Iterable[MultimodalDataItem]) -> MultimodalInputs | None:
    """The images of a request; None where it has none."""
    found = list(items)
    return MultimodalInputs(mm_items=found) if found else None


@contextmanager
def run_instead(
    model: Any, run: Callable[[torch.Tensor, torch.Tensor, PassContext], Any]
) -> Iterator[None]:
    """Within it `run` takes the place of a model's `forward`, which SGLang calls by that name.

    Args:
        model: SGLang's, without its LM head.
        run: Takes token ids, positions, and the pass; returns what `forward` does. A pass that has
            more, as embeddings of images, is refused by a `ValueError`.
    """

    def forward(
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        *others: None,
        **named: None,
    ) -> Any:
        if any(other is not None for other in (*others, *named.values())):
            raise ValueError("a pass has tokens and nothing else")
        return run(input_ids, positions, context_of(forward_batch))

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
