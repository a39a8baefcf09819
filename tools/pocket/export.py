"""Write the trained network as a Hugging Face folder with its model card."""

import argparse
import json
from pathlib import Path
from string import Template
from typing import Any

import torch
from safetensors.torch import save_file
from sample import sample_for_card
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vocabulary import END_OF_TEXT, END_OF_TURN

MAX_BYTES = 12_000_000


def main() -> None:
    """Write weights, configuration, tokenizer and card, and check the folder's size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("target/pocket"))
    parser.add_argument("--checkpoint", type=Path, default=Path("target/pocket/pocket.pt"))
    parser.add_argument("--out", type=Path, default=Path("models/pocket"))
    parser.add_argument("--date", required=True, help="the day of training, YYYY-MM-DD")
    parser.add_argument("--hardware", required=True, help='such as "one NVIDIA H200"')
    parser.add_argument("--trials", default="", help="a sentence on the runs it was chosen from")
    options = parser.parse_args()

    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    trained = torch.load(options.checkpoint, weights_only=True)
    tokenizer = AutoTokenizer.from_pretrained(options.data / "tokenizer")
    save_file(trained["weights"], out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    _write_json(out / "config.json", _config(trained["shape"], tokenizer))
    _write_json(out / "generation_config.json", _generation_config(tokenizer))
    _write_tokenizer(out, tokenizer)
    data = json.loads((options.data / "data.json").read_text("utf-8"))
    info = {"date": options.date, "hardware": options.hardware, "trials": options.trials}
    card = _card(trained, data, out, info)
    (out / "README.md").write_text(card, encoding="utf-8")

    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size:,} bytes")
    if size > MAX_BYTES:
        raise SystemExit(f"{size:,} bytes is more than {MAX_BYTES:,}")


def _config(shape: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Describe the network; the rotary base stands in both the old and the new place."""
    sizes = {key: value for key, value in shape.items() if key != "rope_theta"}
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **sizes,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        "eos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TURN),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": shape["num_hidden_layers"],
        "pad_token_id": tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        "rope_parameters": {"rope_theta": shape["rope_theta"], "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": shape["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }


def _generation_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    end_of_text, end_of_turn = tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_OF_TURN])
    return {
        "bos_token_id": end_of_text,
        "do_sample": True,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 0.8,
        "top_p": 0.95,
    }


def _write_tokenizer(out: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save the tokenizer under the class name that every version of transformers knows."""
    tokenizer.save_pretrained(out, save_jinja_files=False)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    transient = {"backend", "is_local", "local_files_only"}
    known = {key: config[key] for key in config if key not in transient}
    _write_json(path, known | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _card(trained: dict[str, Any], data: dict[str, Any], out: Path, info: dict[str, str]) -> str:
    """Fill the card's template with the sizes, the measurements and three samples."""
    metrics, shape, options = trained["metrics"], trained["shape"], trained["options"]
    values: dict[str, Any] = info | shape | metrics
    values["python"] = data["python"]
    values["parameters"] = f"{sum(w.numel() for w in trained['weights'].values()):,}"
    values["weight_bytes"] = f"{(out / 'model.safetensors').stat().st_size:,}"
    values["tokens_seen"] = f"{metrics['tokens_seen'] / 1e6:.0f}"
    unique = data["train_code"]["tokens"] + data["train_chat"]["tokens"]
    values["passes"] = f"{metrics['tokens_seen'] / unique:.0f}"
    for name in ("train_code", "train_chat", "validation_code", "validation_chat"):
        values |= {f"{name}_{key}": f"{value:,}" for key, value in data[name].items()}
        values[f"{name}_nats"] = f"{metrics[name]['nats_per_token']:.3f}"
        values[f"{name}_bits"] = f"{metrics[name]['bits_per_byte']:.3f}"
    for name in ("batch", "length", "lr", "dropout", "weight_decay", "chat_share", "seed"):
        values[name] = options[name]
    values["samples"] = sample_for_card(out)
    template = (Path(__file__).parent / "card.md").read_text("utf-8")
    return Template(template).substitute(values)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
