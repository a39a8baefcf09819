"""Contexts of text and images, on a driver and in transformers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from pie_driver_sglang import _core
from pie_driver_sglang._core import Image, Request, Sampler
from support.models import tiny_models
from support.models.reference import Context, Pages, random_tokens
from support.process import drivers

TOLERANCE: Final = 1e-4
PAGE: Final = 16
CHUNK: Final = 16
"""Tokens of a pass: some of the images have more."""
MERGE: Final = 2
IMAGE_TOKEN: Final = tiny_models.VOCABULARY - 4
START, END = tiny_models.VOCABULARY - 2, tiny_models.VOCABULARY - 1


class Picture:
    """An image as a processor leaves it: patches of a grid, each square of them a token."""

    def __init__(
        self,
        height: int,
        width: int,
        *seed: int,
        frames: int = 1,
        values: int = tiny_models.PATCH_VALUES,
    ) -> None:
        generator = torch.Generator().manual_seed(hash((height, width, seed)) % 2**31)
        self.grid = (frames, height, width)
        shape = (frames * height * width, values)
        self.pixels = torch.randn(shape, generator=generator)
        self.merged = (frames, height // MERGE, width // MERGE)
        self.tokens = frames * height * width // MERGE**2

    def axes(self, first: int) -> list[int]:
        """Positions of each token in time, height and width, from `first` on."""
        offsets = itertools.product(*map(range, self.merged))
        return [first + at for offset in offsets for at in offset]


class Span(NamedTuple):
    """An image in a context."""

    picture: Picture
    start: int
    """Its first token."""


class Sent(NamedTuple):
    """A request, and which tokens of its context its logit rows belong to."""

    request: Request
    context: Story
    rows: list[int]


class Story(Context):
    """A context of text and images, with positions as the runtime gives them."""

    def __init__(self, allocator: Pages) -> None:
        super().__init__(allocator)
        self.spans: list[Span] = []
        self.next = 0
        """Position of the next text token."""

    def send(
        self,
        *parts: int | Picture,
        drafts: Sequence[int] = (),
        samplers: Sequence[tuple[int, Sampler]] | None = None,
        masks: list[list[int]] | None = None,
        **changed: Any,
    ) -> Sent:
        """Appends tokens and images.

        Args:
            parts: Token ids and images.
            drafts: Tokens to verify after them.
            samplers: By default the logits of all rows.
            masks: Run lengths of each row.
            changed: Replaces fields of the images.
        """
        start, tokens, positions, images = len(self.tokens), [], [], []
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
                positions.append(self.next)
                self.next += 1
                continue
            axes = part.axes(self.next)
            fields = {"row": len(tokens), "grid": part.grid, "positions": axes}
            fields |= {"pixels": part.pixels.numpy().tobytes(), **changed}
            images.append(Image(**fields))
            self.spans.append(Span(part, start + len(tokens)))
            tokens += [0] * part.tokens
            positions += range(self.next, self.next + part.tokens)
            # Text continues after the longest side.
            self.next += max(part.merged)
        self.append(tokens, positions=positions, drafts=drafts)
        if samplers is None:
            samplers = [(row, Sampler.raw_logits()) for row in range(len(tokens))]
        request = Request(
            tokens,
            positions,
            self.pages,
            (start + len(tokens) - 1) % PAGE + 1,
            samplers,
            context_id=self.id,
            images=images,
            drafts=list(drafts),
            masks=masks,
        )
        raw = [start + row for row, _ in samplers]
        return Sent(request, self, raw)


class Reference:
    """The model in float32. It computes the positions by itself, from tokens and grids."""

    def __init__(self, snapshot: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers

            torch.set_num_threads(1)
            transformers.utils.logging.disable_progress_bar()
            model = transformers.AutoModelForImageTextToText.from_pretrained(
                snapshot, attn_implementation="eager", dtype=torch.float32
            )
        self._model = model.eval()

    def logits(self, story: Story, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of every row of a context: ``[tokens, vocabulary]``.

        Args:
            story: The context.
            visible: Which token each row sees, ``[tokens, tokens]``; by default all before it.
        """
        ids = torch.tensor([story.tokens])
        media: dict[str, Any] = {}
        for picture, start in story.spans:
            ids[0, start : start + picture.tokens] = IMAGE_TOKEN
        if story.spans:
            pictures = [span.picture for span in story.spans]
            media["pixel_values"] = torch.cat([picture.pixels for picture in pictures])
            media["image_grid_thw"] = torch.tensor([picture.grid for picture in pictures])
        kinds = (ids == IMAGE_TOKEN).int()
        everyone = torch.ones_like(ids)
        mask = everyone
        if visible is not None:
            positions, _ = self._model.model.get_rope_index(
                ids, kinds, image_grid_thw=media.get("image_grid_thw"), attention_mask=everyone
            )
            media["position_ids"] = positions
            mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None, None]
        with torch.inference_mode():
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                mm_token_type_ids=kinds,
                use_cache=False,
                **media,
            )
        logits: torch.Tensor = output.logits[0]
        return logits


class DriverHarness:
    """A driver of a model with images, and its reference."""

    def __init__(self, driver: drivers.Driver, reference: Reference) -> None:
        self.driver = driver
        self.client = driver.client()
        self.reference = reference
        self.allocator = Pages(driver.caps["total_pages"], PAGE)
        self._stories: list[Story] = []

    def story(self) -> Story:
        """An empty context."""
        self._stories.append(Story(self.allocator))
        return self._stories[-1]

    def run(self, *sent: Sent) -> _core.Reply:
        """Sends one frame and compares the logits of all rows."""
        reply = self.client.forward([each.request for each in sent])
        assert reply.status is None
        assert not reply.aborted
        for found, each in zip(reply.logits, sent, strict=True):
            assert_close(found, self.reference.logits(each.context)[each.rows])
        return reply

    def reasons(self) -> str:
        """Why requests were refused, once nothing runs."""
        # A reason is logged after the answer, but before the next one.
        story = self.story()
        self.run(story.send(5))
        return self.driver.stderr()

    def release(self) -> None:
        """Gives all pages back."""
        for story in self._stories:
            story.release()
        self._stories.clear()


def assert_close(found: Sequence[Sequence[float]], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=TOLERANCE)


def text(count: int, *seed: Any) -> list[int]:
    """Reproducible tokens, none of which means an image."""
    return random_tokens(IMAGE_TOKEN, count, "images", *seed)
