"""Small GGUF files, with the weights and the vocabulary of the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from support.models.tiny_models import POCKET

_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
CHAT_TEMPLATE: Final = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


def write(path: Path, kind: str = "F16", pre: str = "qwen2") -> Path:
    """Writes the model to a GGUF file, with matrices in one of GGML's types.

    With a type that no library dequantizes the first matrix alone is of that type.
    """
    import gguf
    from safetensors.torch import load_file

    config = json.loads((POCKET / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3")
    _add_sizes(writer, config)
    _add_tokens(writer, config, pre)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, tensor in sorted(load_file(POCKET / "model.safetensors").items()):
        values = tensor.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(_renamed(name), values)
        elif kind == "Q8_K":
            block = gguf.GGML_QUANT_SIZES[quantization]
            shape = (values.shape[0], values.shape[1] // block[0] * block[1])
            raw = values.view("uint8").reshape(-1)[: shape[0] * shape[1]].reshape(shape)
            writer.add_tensor(_renamed(name), raw.copy(), raw_dtype=quantization)
        else:
            data = gguf.quantize(values, quantization)
            writer.add_tensor(_renamed(name), data, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _add_tokens(writer: Any, config: dict[str, Any], pre: str) -> None:
    tokenizer = json.loads((POCKET / "tokenizer.json").read_text())
    pieces = dict(tokenizer["model"]["vocab"])
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    names = {number: piece for piece, number in {**pieces, **added}.items()}
    tokens = [names.get(number, f"<unused{number}>") for number in range(config["vocab_size"])]
    merges = [
        each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    types = {
        token["content"]: _CONTROL if token["special"] else _USER_DEFINED
        for token in tokenizer["added_tokens"]
    }
    writer.add_token_types([types.get(token, _NORMAL) for token in tokens])
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])


def _renamed(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name
