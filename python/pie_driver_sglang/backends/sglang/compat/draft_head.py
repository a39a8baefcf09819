"""EAGLE heads: SGLang's classes of them, loaded by its loader, and their layer of the KV pool.

A draft is computed by the `forward` of a head's `model`. The KV of other rows is computed here,
from the modules of its one layer: their attention and MLP would have no use.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.model_loader import get_model

from pie_driver_sglang.backends.sglang.compat.model import ModelConfig, unpadded

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from pie_driver_sglang.backends.sglang.compat.pools import MHATokenToKVPool


def load_head(runner: ModelRunner, folder: Path) -> torch.nn.Module:
    """Loads a head of one layer; it takes a model's embeddings, and its LM head if it has none."""
    _register_classes()
    # Its own context length is of its training: rotary tables are as long as the model's.
    config = ModelConfig.from_server_args(
        runner.server_args, model_path=str(folder), is_draft_model=True, context_length=1
    )
    config.dtype = runner.model_config.dtype
    config.context_len = runner.model_config.context_len
    text = config.hf_text_config
    text.max_position_embeddings = max(text.max_position_embeddings, config.context_len)
    with unpadded():
        head = get_model(
            model_config=config,
            load_config=runner.load_config,
            device_config=DeviceConfig(runner.device, gpu_id=runner.gpu_id),
        )
    embeddings, lm_head = runner.model.get_embed_and_head()
    # As SGLang's `set_embed`, which clears the cache of an accelerator, too.
    head.model.embed_tokens.weight = embeddings
    is_tied = head.lm_head is head.model.embed_tokens
    if not is_tied and (not is_eagle3(head) or head.load_lm_head_from_target):
        head.lm_head.weight = lm_head
    if is_eagle3(head) and head.hot_token_id is not None:
        head.hot_token_id = head.hot_token_id.to(embeddings.device)
    loaded: torch.nn.Module = head
    return loaded


def _register_classes() -> None:
    """Makes SGLang's classes of heads known: a start imports the modules of its own model alone."""
    from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from sglang.srt.models.registry import ModelRegistry

    for known in (LlamaForCausalLMEagle, LlamaForCausalLMEagle3):
        ModelRegistry.models.setdefault(known.__name__, known)


def is_eagle3(head: Any) -> bool:
    """Whether a head takes hidden states of several layers."""
    return bool(head.capture_aux_hidden_states)


def gives_aux_states(model: torch.nn.Module) -> bool:
    """Whether a model can return hidden states of its layers."""
    return hasattr(model, "set_eagle3_layers_to_capture") and hasattr(model, "get_embed_and_head")


def capture_layers(model: Any, layers: Sequence[int] | None) -> None:
    """Has a model return the hidden states that an EAGLE-3 head takes; None: of default layers."""
    model.set_eagle3_layers_to_capture(None if layers is None else list(layers))


def add_layer(pool: MHATokenToKVPool, head: Any, slots: int) -> None:
    """Gives a pool one more layer, that of a head, with `slots` more KV slots than the others.

    `set_kv_buffer` stores KV of that layer by a shallow copy of the pool with a larger `size`: on
    CUDA SGLang's `store_cache` asserts that a slot is below it, and no process survives that.
    """
    for buffers in (pool.k_buffer, pool.v_buffer):
        shape = buffers[0].shape
        buffers.append(buffers[0].new_zeros((shape[0] + slots, *shape[1:])))
    layer = head.model.layers[0].self_attn.attn
    layer.layer_id = pool.start_layer + len(pool.k_buffer) - 1
    larger, others = copy.copy(pool), pool.set_kv_buffer
    larger.size = pool.size + slots

    def set_kv_buffer(stored: Any, *arguments: Any, **named: Any) -> None:
        write = larger.set_kv_buffer if stored is layer else others
        write(stored, *arguments, **named)

    pool.set_kv_buffer = set_kv_buffer


def combine_features(head: Any, states: torch.Tensor) -> torch.Tensor:
    """What a head takes of hidden states: ``[rows, width of all layers]`` -> ``[rows, hidden]``."""
    if not is_eagle3(head):
        return states
    model = head.model
    if model.input_norm is not None:
        states = model.input_norm(states)
    if model.fc_norm is not None:
        chunks = states.chunk(model.num_aux_hidden_states, dim=-1)
        states = torch.cat([norm(x) for norm, x in zip(model.fc_norm, chunks, strict=True)], dim=-1)
    combined: torch.Tensor = model.fc(states)
    return combined


def keys_and_values(
    head: Any, input_ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The KV of a head's layer, as its `forward` computes it: ``[rows, heads, dim]`` each.

    Args:
        head: Of :func:`load_head`.
        input_ids: ``[rows]`` int64.
        positions: ``[rows]`` int64.
        features: ``[rows, hidden]`` of the positions before.
    """
    layer, embeds = head.model.layers[0], head.model.embed_tokens(input_ids)
    if is_eagle3(head):
        inputs = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(features)], dim=-1)
    else:
        # The first layer of an EAGLE-2 head has no input norm.
        inputs = head.model.fc(torch.cat([embeds, features], dim=-1))
    attention = layer.self_attn
    qkv, _ = attention.qkv_proj(inputs)
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    queries, keys, values = qkv.split(sizes, dim=-1)
    _, keys = attention.rotary_emb(positions, queries, keys)
    shape = (len(input_ids), -1, attention.head_dim)
    return keys.reshape(shape), values.reshape(shape)


def run_head(
    head: Any, batch: ForwardBatch, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a head on a decode: its states for the LM head, and the features of its rows."""
    # The models read this field of it alone.
    batch.spec_info = SimpleNamespace(hidden_states=features)
    states = head.model.forward(batch.input_ids, batch.positions, batch)
    if not is_eagle3(head):
        return states, states
    states, aux = states
    return states, aux[0]


def likeliest_tokens(head: Any, states: torch.Tensor) -> torch.Tensor:
    """``[rows]`` int64: the tokens of the model's vocabulary that a head finds most likely."""
    logits = head.logits_processor._compute_lm_head(states, head.lm_head)
    ids = logits[:, : head.logits_processor.config.vocab_size].argmax(-1)
    found: torch.Tensor = (
        ids if not is_eagle3(head) or head.hot_token_id is None else (head.hot_token_id[ids])
    )
    return found
