"""Random pictures, and what transformers makes of prompts with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from support.models import tiny_vision

TOKENS: Final = 8
"""Tokens of an answer."""


def picture(rows: int, columns: int, seed: int) -> Image.Image:
    """An image that has so many tokens, one for each square."""
    noise = np.random.default_rng(seed)
    shape = (rows * tiny_vision.SIDE, columns * tiny_vision.SIDE, 3)
    return Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8))


class Reference:
    """The model in float32 with the processor of its snapshot."""

    def __init__(self, snapshot: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            import transformers

            self._torch = torch
            transformers.utils.logging.disable_progress_bar()
            self._processor = transformers.AutoProcessor.from_pretrained(snapshot)
            model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
                snapshot, attn_implementation="eager", dtype=torch.float32
            )
        self._model = model.eval()

    def tokens(self, *messages: dict[str, Any], images: list[Image.Image]) -> list[int]:
        """What follows a chat greedily."""
        shown = [
            {**each, "content": [_shown(part) for part in each["content"]]} for each in messages
        ]
        text = self._processor.apply_chat_template(
            shown, add_generation_prompt=True, tokenize=False
        )
        return self.after(text, images)

    def after(self, text: str, images: list[Image.Image]) -> list[int]:
        """What follows a text with placeholders greedily."""
        torch = self._torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = self._processor(text=[text], images=images, return_tensors="pt")
        ids, found = inputs.input_ids, []
        image = self._model.config.image_token_id
        for _ in range(TOKENS):
            with torch.inference_mode():
                logits = self._model(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    mm_token_type_ids=(ids == image).int(),
                    pixel_values=inputs.pixel_values,
                    image_grid_thw=inputs.image_grid_thw,
                    use_cache=False,
                ).logits
            found.append(int(logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([[found[-1]]])], 1)
        return found

    def text(self, tokens: list[int]) -> str:
        """What tokens say."""
        said: str = self._processor.tokenizer.decode(tokens)
        return said


def _shown(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image_url" else part
