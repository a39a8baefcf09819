"""A small model with images, with tokenizer, chat template and processor for a server."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any, Final

from support.models import tiny_models

PATCH: Final = 4
MERGE: Final = 2
SIDE: Final = PATCH * MERGE
"""Pixels of a side of the square that one token stands for."""
MOST_TOKENS: Final = 64
"""Tokens of an image: larger ones are made smaller."""
BEGIN, END = "<|im_start|>", "<|im_end|>"
_NAMES: Final = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
#: As Qwen3-VL's, without tools.
_TEMPLATE: Final = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' or 'video' in part %}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def build(folder: Path) -> Path:
    """Makes the model below `folder` and returns its folder."""
    target = folder / "qwen3-vl-served"
    shutil.copytree(tiny_models.build("qwen3-vl", folder), target)
    (target / "tokenizer.json").unlink()
    config = json.loads((target / "config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _processor(config).save_pretrained(target)
    return target


def _processor(config: dict[str, Any]) -> Any:
    import transformers

    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    pixels = {"shortest_edge": SIDE**2, "longest_edge": MOST_TOKENS * SIDE**2}
    tokenizer = _tokenizer()
    ids = [config["image_token_id"], config["video_token_id"]]
    ids += [config["vision_start_token_id"], config["vision_end_token_id"]]
    assert tokenizer.convert_tokens_to_ids(list(_NAMES)) == ids
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes, size=pixels),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(**sizes, size=pixels),
        chat_template=_TEMPLATE,
    )


def _tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: 3 + at for at, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "<pad>": 0, BEGIN: 1, END: 2}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fillers = [f"<extra_{at}>" for at in range(259, tiny_models.VOCABULARY - len(_NAMES))]
    tokenizer.add_special_tokens(["<pad>", BEGIN, END])
    tokenizer.add_tokens(fillers)
    tokenizer.add_special_tokens(list(_NAMES))
    return transformers.Qwen2TokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<pad>", bos_token=None, unk_token=None
    )
