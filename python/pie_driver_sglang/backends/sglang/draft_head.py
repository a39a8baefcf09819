"""`EagleHead`: an EAGLE head of SGLang's classes behind the interface of the engine core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang.backends.sglang.compat import draft_head
from pie_driver_sglang.backends.sglang.compat.pools import keeps_heads, store_kv
from pie_driver_sglang.config.draft_head import read_draft_head
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.memory.batch_sizes import scratch_pages

if TYPE_CHECKING:
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner
    from pie_driver_sglang.backends.sglang.compat.passes import ForwardBatch
    from pie_driver_sglang.config.options import DriverOptions
    from pie_driver_sglang.engine.backend import PassContext
    from pie_driver_sglang.engine.block_table import BlockTable

_REMEDY = "remove `spec_eagle_path`"


class EagleHead:
    """Implements `DraftModel`."""

    features: torch.Tensor
    scratch_page: int

    def __init__(self, runner: ModelRunner, options: DriverOptions) -> None:
        """Loads the head of a loaded model, and has the model return what the head takes.

        Raises:
            StartError: The model or its layers cannot have one.
        """
        assert options.spec_eagle_path is not None
        found = read_draft_head(options.spec_eagle_path)
        if not draft_head.gives_aux_states(runner.model):
            raise StartError(
                f"SGLang's {type(runner.model).__name__} returns no hidden states of its layers, "
                "which an EAGLE head takes",
                hint=_REMEDY,
            )
        self._head: Any = draft_head.load_head(runner, found.folder)
        if found.is_eagle3:
            draft_head.capture_layers(runner.model, found.aux_layers)
        self._num_drafts = options.spec_eagle_num_drafts

    @property
    def module(self) -> torch.nn.Module:
        """SGLang's."""
        module: torch.nn.Module = self._head
        return module

    def allocate(self, runner: ModelRunner, table: BlockTable) -> None:
        """Adds a layer for the head to a model's KV pool, and features for each of its slots.

        Raises:
            StartError: The pool is of another kind.
        """
        pool = runner.token_to_kv_pool
        if not keeps_heads(pool):
            raise StartError(
                f"an EAGLE head needs KV by heads, and the pool is a {type(pool).__name__}",
                hint=_REMEDY,
            )
        scratch = scratch_pages(self._num_drafts, table.page_size)
        slots = pool.k_buffer[0].shape[0]
        self.scratch_page = slots // table.page_size
        draft_head.add_layer(pool, self._head, scratch * table.page_size)
        model_config = runner.model_config
        shape = (slots, model_config.hidden_size)
        self.features = torch.zeros(shape, dtype=model_config.dtype, device=runner.device)
        self._pool, self._table = pool, table.slots

    def store(self, batch: ForwardBatch, states: torch.Tensor, vocabulary: int) -> None:
        """Stores features and the head's KV of the rows of a pass. Can be captured, of a decode.

        Args:
            batch: The pass, which has run.
            states: ``[tokens, width]``: what the model has returned for the head.
            vocabulary: Tokens; the ids of placeholders are larger.
        """
        slots = batch.out_cache_loc
        self.features[slots] = draft_head.combine_features(self._head, states)
        rows, index = _places(batch)
        # Those of the pass are stored already, those before lie in the context's pages.
        before = self.features[self._table[rows, (index - 1).clamp(min=0)].long()]
        before = torch.where((index > 0)[:, None], before, 0)
        ids = batch.input_ids.clamp(max=vocabulary - 1)
        keys, values = draft_head.keys_and_values(self._head, ids, batch.positions, before)
        layer = self._head.model.layers[0].self_attn.attn
        store_kv(self._pool, layer, slots, keys, values)

    def forward(
        self, context: PassContext, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftModel.forward`."""
        states, features = draft_head.run_head(self._head, context.native, features)
        return draft_head.likeliest_tokens(self._head, states), features


def _places(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of a pass its row of the block table, and its KV index."""
    if batch.forward_mode.is_decode():
        return batch.req_pool_indices, batch.seq_lens - 1
    lens = batch.extend_seq_lens
    rows = torch.repeat_interleave(batch.req_pool_indices, lens)
    starts = torch.repeat_interleave(batch.extend_prefix_lens - batch.extend_start_loc, lens)
    return rows, starts.long() + torch.arange(len(rows), device=rows.device)
