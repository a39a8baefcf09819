"""Images of Qwen2-VL and Qwen2.5-VL, against transformers: logits of all rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.models import tiny_models
from support.models.image_stories import (
    CHUNK,
    END,
    PAGE,
    START,
    TOLERANCE,
    DriverHarness,
    Picture,
    Reference,
    assert_close,
    text,
)
from support.process import drivers

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["qwen2-vl", "qwen2.5-vl"])
def shared(
    request: pytest.FixtureRequest, models_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DriverHarness]:
    drivers.start_fork_server()
    snapshot = tiny_models.build(request.param, models_folder)
    reference = Reference(snapshot)
    options = {"page_size": PAGE, "chunked_prefill_size": CHUNK}
    config = drivers.write_config(tmp_path_factory.mktemp("images"), snapshot, options=options)
    with drivers.running(config) as driver:
        yield DriverHarness(driver, reference)


@pytest.fixture
def harness(shared: DriverHarness) -> Iterator[DriverHarness]:
    yield shared
    shared.release()


def picture(height: int, width: int, *seed: int) -> Picture:
    return Picture(height, width, *seed, values=tiny_models.WIDE_PATCH_VALUES)


@pytest.mark.parametrize("grid", [(2, 2), (2, 8), (6, 2), (4, 6), (8, 8), (10, 12)])
def test_text_around_an_image(harness: DriverHarness, grid: tuple[int, int]) -> None:
    """Images of whole windows of Qwen2.5-VL's encoder, and of parts of them; the last is cut."""
    harness.run(harness.story().send(*text(3), START, picture(*grid), END, *text(4, "behind")))


def test_an_image_changes_the_logits(harness: DriverHarness) -> None:
    """The reference is sensitive: one image for another could not pass."""
    first, second = harness.story(), harness.story()
    for story, seed in ((first, 1), (second, 2)):
        harness.run(story.send(*text(3), START, picture(4, 4, seed), END, *text(3)))
    change = harness.reference.logits(first) - harness.reference.logits(second)
    assert float(change[4:].abs().amax(1).min()) > 100 * TOLERANCE


def test_images_and_text_in_one_frame(harness: DriverHarness) -> None:
    """Requests with one image, two, and none; then all decode together."""
    stories = [harness.story() for _ in range(3)]
    parts: list[list[int | Picture]] = [
        [*text(1, 1), START, picture(4, 4, 1), END],
        [START, picture(6, 10, 2), END, *text(2, 3), START, picture(2, 4, 3), END],
        [*text(9, 2)],
    ]
    harness.run(*(story.send(*part) for story, part in zip(stories, parts, strict=True)))
    for step in range(3):
        harness.run(*(story.send(*text(1, "decode", step)) for story in stories))


def test_masks_beside_images(harness: DriverHarness) -> None:
    masked = harness.story()
    count = 4 + 1 + 10 + 1 + 5
    rows = [[max(0, row - 6), min(row, 6) + 1] for row in range(count)]
    window = torch.ones(count, count).tril().triu(-6).bool()
    sent = masked.send(*text(4), START, picture(4, 10), END, *text(5), masks=rows)
    reply = harness.client.forward([sent.request])
    assert_close(reply.logits[0], harness.reference.logits(masked, window))


def test_only_the_padding_of_sglang_is_accepted(models_folder: Path, tmp_path: Path) -> None:
    """SGLang makes a width of 60 one of 64; a model with 64 lacks four."""
    snapshot = tmp_path / "model"
    shutil.copytree(tiny_models.build("qwen2.5-vl", models_folder), snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    assert config["vision_config"]["intermediate_size"] == 60
    config["vision_config"]["intermediate_size"] = 64
    (snapshot / "config.json").write_text(json.dumps(config))
    with (
        pytest.raises(drivers.StartFailedError, match=r"do not fit its `config\.json`"),
        drivers.fork(drivers.write_config(tmp_path, snapshot)),
    ):
        pass
