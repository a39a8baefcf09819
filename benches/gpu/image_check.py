"""Serves a Qwen3-VL with images and compares its logits with transformers' own model.

    python benches/gpu/image_check.py [--device cuda:0] [--model DIR] [--backends A,B]
        [--dtypes A,B] [--json FILE]

Without `--model` the weights are random, in a small shape with the head sizes of the real models.
The reference runs in float32 on the CPU, eagerly. In float32 (only on the CPU) every logit must be
near the reference's; in float16 and bfloat16 every best token must be the same where the two best
logits are more than `MIN_GAP` apart. Prompts hold images of several sizes, are cut into passes
within an image, share frames with text, and continue decoding. It also times the prefill of one
image, as the client sees it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import frame
import torch
from frame import Report
from serving import PAGE, decided, driver, pages

from pie_driver_sglang._core import Client, Image, Request, Sampler

TOLERANCE = 1e-4
"""Of float32."""
CHUNK = 512
DECODE_STEPS = 8
TIMED = 10

PROMPTS: tuple[tuple[int | tuple[int, int], ...], ...] = (
    (30, (16, 24), 20),
    (5, (2, 2), 3, (40, 28), 7, (8, 8), 11),
    (64,),
    (700, (32, 32), 9),
)
"""Numbers of text tokens, and images by height and width in patches."""


def random_model(folder: Path) -> Path:
    """Writes a Qwen3-VL with random weights."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    text = {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rope_parameters": {**rope, "mrope_section": [24, 20, 20]},
    }
    vision = {
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "patch_size": 16,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: 8000 + index for index, name in enumerate(special)}
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                gain = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
                weight.normal_(0.0, gain / weight[0].numel() ** 0.5)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")  # The driver looks for it; nothing here reads it.
    return folder


class Story:
    """A context of text and images."""

    def __init__(self, config: Any, parts: tuple[int | tuple[int, int], ...], number: int) -> None:
        self.config = config
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.images: list[Image] = []
        self.pixels: list[torch.Tensor] = []
        self.grids: list[tuple[int, int, int]] = []
        self.next = 0
        self.stored = 0
        self.number = number
        self.first_page = number * 128
        generator = torch.Generator().manual_seed(number)
        for part in parts:
            if isinstance(part, int):
                self.text(torch.randint(100, 7900, (part,), generator=generator).tolist())
            else:
                self.text([config.vision_start_token_id])
                self.image(*part, generator)
                self.text([config.vision_end_token_id])

    def text(self, tokens: list[int]) -> None:
        """Appends tokens."""
        self.tokens += tokens
        self.positions += range(self.next, self.next + len(tokens))
        self.next += len(tokens)

    def image(self, height: int, width: int, generator: torch.Generator) -> None:
        """Appends an image of random pixels."""
        vision = self.config.vision_config
        values = 3 * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn((height * width, values), generator=generator)
        merged = (height // vision.spatial_merge_size, width // vision.spatial_merge_size)
        offsets = itertools.product((0,), *map(range, merged))
        axes = [self.next + at for offset in offsets for at in offset]
        grid = (1, height, width)
        self.images.append(Image(len(self.tokens), grid, pixels.numpy().tobytes(), axes))
        self.pixels.append(pixels)
        self.grids.append(grid)
        count = merged[0] * merged[1]
        self.tokens += [self.config.image_token_id] * count
        self.positions += range(self.next, self.next + count)
        self.next += max(merged)

    def request(self, rows: list[int]) -> Request:
        """A request for what is not stored yet, with the logits of some of its rows."""
        image = self.config.image_token_id
        tokens = [0 if token == image else token for token in self.tokens[self.stored :]]
        end = len(self.tokens)
        request = Request(
            tokens,
            self.positions[self.stored :],
            pages(self.first_page, end),
            (end - 1) % PAGE + 1,
            [(row, Sampler.raw_logits()) for row in rows],
            context_id=self.number + 1,
            images=[] if self.stored else self.images,
        )
        self.stored = end
        return request

    def reference(self, model: Any) -> torch.Tensor:
        """Logits of every row: ``[tokens, vocabulary]``."""
        ids = torch.tensor([self.tokens])
        media: dict[str, Any] = {}
        if self.grids:
            media["pixel_values"] = torch.cat(self.pixels)
            media["image_grid_thw"] = torch.tensor(self.grids)
        with torch.inference_mode():
            output = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == self.config.image_token_id).int(),
                use_cache=False,
                **media,
            )
        logits: torch.Tensor = output.logits[0]
        return logits


def converse(client: Client, stories: list[Story]) -> list[torch.Tensor]:
    """Prefills all stories in one frame, then decodes; returns the logits of their last rows."""
    found: list[list[torch.Tensor]] = [[] for _ in stories]
    rows = [list(range(len(story.tokens) - 8, len(story.tokens))) for story in stories]
    for _ in range(DECODE_STEPS + 1):
        requests = [story.request(own) for story, own in zip(stories, rows, strict=True)]
        reply = client.forward(requests)
        for story, logits, parts in zip(stories, reply.logits, found, strict=True):
            if not logits:
                raise SystemExit(f"request {story.number} was rejected")
            parts.append(torch.tensor(logits))
            story.text([int(parts[-1][-1, :7900].argmax())])
        rows = [[0]] * len(stories)
    for story in stories:
        # The last token was never sent.
        del story.tokens[-1], story.positions[-1]
    return [torch.cat(parts) for parts in found]


def check(
    model: Any, snapshot: Path, device: str, backend: str, dtype: str, report: Report
) -> None:
    """Compares all stories, served in one type."""
    options = {
        "attention_backend": backend,
        "page_size": PAGE,
        "chunked_prefill_size": CHUNK,
        "mem_fraction_static": 0.2,
    }
    with driver(snapshot, options, device, dtype=dtype) as (client, _):
        stories = [Story(model.config, parts, number) for number, parts in enumerate(PROMPTS)]
        found = converse(client, stories)
        seconds = [time_image(client, model.config, 100 + turn) for turn in range(TIMED)]
    wrong = clear = 0
    error = 0.0
    for story, logits in zip(stories, found, strict=True):
        expected = story.reference(model)[-len(logits) :]
        error = max(error, float((logits - expected).abs().max()))
        counts = decided(expected, logits.argmax(-1).tolist())
        clear, wrong = clear + counts[0], wrong + counts[1]
    what = f"{backend} {dtype}"
    image_ms = 1e3 * statistics.median(seconds)
    report.add(backend=backend, dtype=dtype, error=error, decided_rows=clear, image_ms=image_ms)
    good = report.hold(f"{what}: wrong rows", wrong, at_most=0)
    good &= report.hold(f"{what}: decided rows", clear, at_least=1)
    if dtype == "float32":
        good &= report.hold(f"{what}: difference of logits", error, at_most=TOLERANCE)
    print(
        f"{'ok ' if good else 'BAD'} {backend} {dtype}: largest error {error:.2e}, "
        f"{wrong} wrong of {clear} decided rows; an image of 32 x 32 patches in "
        f"{image_ms:.1f} ms (p50 of {TIMED})"
    )


def time_image(client: Client, config: Any, number: int) -> float:
    """Seconds of a request that is one image."""
    story = Story(config, ((32, 32),), number)
    story.first_page = 0
    request = story.request([len(story.tokens) - 1])
    started = time.perf_counter()
    client.forward([request])
    return time.perf_counter() - started


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    made.add_argument("--model", type=Path, help="a Qwen3-VL snapshot; by default random weights")
    made.add_argument("--backends", help="by default those that suit the device")
    made.add_argument("--dtypes", help="by default those that suit the device")
    return made


def main() -> None:
    """Checks every backend in every type."""
    arguments = parser().parse_args()
    on_cpu = arguments.device == "cpu"
    backends = arguments.backends or ("torch_native" if on_cpu else "triton,flashinfer")
    # SGLang's norms on a GPU take no float32.
    dtypes = arguments.dtypes or ("float32,bfloat16" if on_cpu else "float16,bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Qwen3VLForConditionalGeneration
    with Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        snapshot = arguments.model or random_model(Path(folder))
        model = Qwen3VLForConditionalGeneration.from_pretrained(
            snapshot, attn_implementation="eager", dtype=torch.float32
        ).eval()
        for backend in backends.split(","):
            for dtype in dtypes.split(","):
                check(model, snapshot, arguments.device, backend, dtype, report)


if __name__ == "__main__":
    main()
