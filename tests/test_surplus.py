"""Tensors of a checkpoint that SGLang leaves unread."""

from __future__ import annotations

from typing import Any

import pytest

from pie_driver_sglang.checkpoint.tensors import CheckpointModel
from pie_driver_sglang.checkpoint.unread_tensors import required_tensors

MODEL = CheckpointModel(layers=2)
READ = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.visual.a.weight")


@pytest.mark.parametrize(
    ("name", "properties"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", {}),
        ("model.layers.0.self_attn.rotary_emb.cos_cached", {}),
        ("transformer.rotary_pos_emb.inv_freq", {}),
        ("transformer.h.0.attn.masked_bias", {}),
        ("h.0.attn.bias", {}),
        ("vision_model.embeddings.position_ids", {}),
        ("mtp.layers.0.mlp.up_proj.weight", {}),
        ("model.mtp_block.weight", {}),
        ("model.layers.2.eh_proj.weight", {"next_layers": 1}),
        ("lm_head.weight", {"tied": True}),
        ("language_model.lm_head.weight", {"tied": True}),
        ("score.weight", {}),
        ("v_head.summary.weight", {}),
        ("vision_tower.blocks.0.weight", {}),
        ("model.audio_tower.conv.weight", {}),
        ("multi_modal_projector.linear.weight", {}),
        ("talker.model.norm.weight", {}),
        ("model.layers.0.self_attn.k_scale", {}),
        ("model.layers.0.self_attn.k_proj.k_scale", {}),
        ("model.layers.0.mlp.up_proj.input_scale", {"quantization": "fp8"}),
        ("model.layers.0.mlp.up_proj.g_idx", {"quantization": "gptq_marlin"}),
        ("model.layers.0.mlp.up_proj.bias", {"quantization": "gptq_marlin"}),
        ("model.layers.61.x", {"ignored": [r"model\.layers\.61.*"]}),
    ],
)
def test_what_is_left_out_on_purpose(name: str, properties: dict[str, Any]) -> None:
    assert required_tensors([name], READ, MODEL._replace(**properties)) == []


@pytest.mark.parametrize(
    ("name", "properties"),
    [
        ("model.layers.2.mlp.up_proj.weight", {}),
        ("model.layers.3.mlp.up_proj.weight", {"next_layers": 1}),
        ("model.layers.1.eh_proj.weight", {"next_layers": 1}),
        ("lm_head.weight", {}),
        ("model.layers.0.self_attn.q_proj.bias", {}),
        ("model.layers.0.self_attn.q_proj.bias", {"quantization": "fp8"}),
        ("model.layers.0.self_attn.q_norm.weight", {}),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", {}),
        ("model.layers.0.mlp.up_proj.weight", {"quantization": "fp8"}),
        # The rest of an encoder that is served.
        ("model.visual.b.weight", {}),
    ],
)
def test_what_a_model_is_wrong_without(name: str, properties: dict[str, Any]) -> None:
    assert required_tensors([name], READ, MODEL._replace(**properties)) == [name]
