"""Complete prompts with the exported model, on the CPU and without a network."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "def read_config(path):\n",
    "class Stack:\n",
    "import os\nimport sys\n\ndef main(",
)


class Sampler:
    """The exported model in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()

    def complete(self, prompt: str, tokens: int, temperature: float, seed: int = 0) -> str:
        """Continue the prompt; a temperature of zero takes the likeliest token each time."""
        torch.manual_seed(seed)
        inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        choice = {"do_sample": False, "temperature": None, "top_p": None}
        if temperature > 0:
            choice = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        output = self.model.generate(**inputs, max_new_tokens=tokens, **choice)
        return self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])

    def answer(self, question: str, tokens: int, temperature: float, seed: int = 0) -> str:
        """Answer a question through the chat template."""
        messages = [{"role": "user", "content": question}]
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.complete(prompt, tokens, temperature, seed)


def sample_for_card(folder: Path) -> str:
    """Complete the three prompts as the card shows them."""
    sampler = Sampler(folder)
    parts = []
    for prompt, temperature in zip(PROMPTS, (0.0, 0.8, 0.8), strict=True):
        text = prompt + sampler.complete(prompt, 120, temperature)
        title = f"Temperature {temperature}, seed 0" if temperature else "Greedy"
        parts.append(f"{title}, from `{prompt!r}`:\n\n```python\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


def main() -> None:
    """Print completions of the given prompts, or of the card's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", type=Path, default=Path("models/pocket"))
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat", action="store_true", help="treat the prompts as questions")
    options = parser.parse_args()
    sampler = Sampler(options.model)
    for prompt in options.prompts:
        make = sampler.answer if options.chat else sampler.complete
        completion = make(prompt, options.tokens, options.temperature, options.seed)
        print(f"{'=' * 60}\n{prompt}{completion}")


if __name__ == "__main__":
    main()
