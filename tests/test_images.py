"""Images, against transformers: logits, positions and patches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pie_driver_sglang import _core
from pie_driver_sglang._core import Image, Request, Sampler
from support.models import tiny_models
from support.models.image_stories import (
    CHUNK,
    END,
    MERGE,
    PAGE,
    START,
    TOLERANCE,
    DriverHarness,
    Picture,
    Reference,
    Story,
    assert_close,
    text,
)
from support.models.reference import Pages
from support.process import drivers, engine_process
from support.process.inspection import network_inodes, socket_inodes
from support.process.runtime_client import children

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def shared(
    request: pytest.FixtureRequest, models_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DriverHarness]:
    drivers.start_fork_server()
    snapshot = tiny_models.build("qwen3-vl", models_folder)
    reference = Reference(snapshot)
    options = {"page_size": PAGE, "chunked_prefill_size": CHUNK}
    folder, devices = tmp_path_factory.mktemp("images"), drivers.spread(request.param)
    config = drivers.write_config(folder, snapshot, options=options, **devices)
    with drivers.running(config) as driver:
        yield DriverHarness(driver, reference)


@pytest.fixture
def harness(shared: DriverHarness) -> Iterator[DriverHarness]:
    yield shared
    shared.release()


def test_a_start_needs_neither_processor_nor_network(
    harness: DriverHarness, models_folder: Path
) -> None:
    assert harness.driver.caps["arch_name"] == "qwen3_vl"
    assert not list((models_folder / "qwen3-vl").glob("*processor*"))
    pid = harness.driver.process.pid
    # Ranks talk to each other.
    assert children(pid) or not socket_inodes(pid) & network_inodes(pid)


@pytest.mark.parametrize("grid", [(2, 2), (2, 8), (6, 2), (4, 6), (8, 8), (10, 12)])
def test_text_around_an_image(harness: DriverHarness, grid: tuple[int, int]) -> None:
    """The first fit one pass; the last have more tokens than one, and are cut twice."""
    picture = Picture(*grid)
    harness.run(harness.story().send(*text(3), START, picture, END, *text(4, "behind")))


def test_an_image_changes_the_logits(harness: DriverHarness) -> None:
    """The reference is sensitive: one image for another could not pass."""
    first, second = harness.story(), harness.story()
    for story, seed in ((first, 1), (second, 2)):
        harness.run(story.send(*text(3), START, Picture(4, 4, seed), END, *text(3)))
    change = harness.reference.logits(first) - harness.reference.logits(second)
    assert float(change[4:].abs().amax(1).min()) > 100 * TOLERANCE
    assert float(change[:4].abs().max()) == 0.0


def test_two_images_in_a_request(harness: DriverHarness) -> None:
    parts = [*text(2), START, Picture(4, 4, 1), END, *text(3, 1), START, Picture(2, 6, 2), END]
    harness.run(harness.story().send(*parts, *text(2, 2)))
    # The same one twice, one after the other.
    twice = Picture(4, 4, 3)
    harness.run(harness.story().send(START, twice, END, START, twice, END))


@pytest.mark.parametrize("before", range(1, CHUNK + 1))
def test_passes_end_everywhere_in_an_image(harness: DriverHarness, before: int) -> None:
    """Between its rows, before it, after it; then two images share a pass."""
    parts = [*text(before - 1, before), START, Picture(4, 10), END, START, Picture(2, 4), END]
    harness.run(harness.story().send(*parts))


def test_images_and_text_in_one_frame(harness: DriverHarness) -> None:
    """Two requests with images, others before, between and after; then all decode together."""
    stories = [harness.story() for _ in range(5)]
    parts: list[list[int | Picture]] = [
        [*text(3, 0)],
        [*text(1, 1), START, Picture(4, 4, 1), END],
        [*text(9, 2)],
        [START, Picture(6, 10, 2), END, *text(2, 3)],
        [*text(1, 4)],
    ]
    harness.run(*(story.send(*part) for story, part in zip(stories, parts, strict=True)))
    for step in range(3):
        harness.run(*(story.send(*text(1, "decode", step)) for story in stories))
    late, *others = stories
    image = late.send(START, Picture(4, 4, 3), END, *text(2, 5))
    harness.run(*(story.send(*text(1, "late")) for story in others), image)


def test_decoding_behind_images(harness: DriverHarness) -> None:
    """Several turns with the KV of the former; positions come from the frame alone."""
    story = harness.story()
    for turn in range(3):
        harness.run(story.send(*text(2, turn), START, Picture(4, 8, turn), END, *text(2, turn)))
        for step in range(20):
            harness.run(story.send(*text(1, turn, step)))


def test_an_image_is_encoded_once(models_folder: Path, tmp_path: Path) -> None:
    """However many passes have rows of it; but again when it comes again."""
    snapshot = tiny_models.build("qwen3-vl", models_folder)
    options = {"page_size": PAGE, "chunked_prefill_size": CHUNK}
    config = drivers.write_config(tmp_path, snapshot, options=options)
    allocator = Pages(16, PAGE)
    parts = [START, Picture(10, 12), END, START, Picture(2, 4), END, START, Picture(4, 10), END]
    slots = [(0, Sampler.greedy())]
    sent = [Story(allocator).send(*parts, samplers=slots) for _ in range(2)]
    frames = [_core.encode_forward([each.request]) for each in sent]
    log = tmp_path / "engine.stderr"
    ours, theirs = multiprocessing.Pipe()
    arguments = (str(config), theirs, str(log))
    process = drivers.fork_call(engine_process.count_images, arguments)
    theirs.close()
    with ours:
        ours.send(frames)
        # The first two passes have rows of the first image, the last one all of the others.
        assert ours.recv() == [[1, 2], [1, 2]]
    assert process.wait(drivers.STOP_TIMEOUT_S) == 0


def test_an_image_of_one_token(harness: DriverHarness) -> None:
    """A request that is nothing but one placeholder is no decode, though all have one row."""
    stories = [harness.story() for _ in range(3)]
    harness.run(*(story.send(*text(4, index), START) for index, story in enumerate(stories)))
    first, second, third = stories
    harness.run(first.send(END), second.send(Picture(2, 2)), third.send(7))


def test_positions_of_text_where_an_image_brings_none(harness: DriverHarness) -> None:
    """Without positions of its own an image has those of its rows, on every axis."""
    picture = Picture(2, 2)
    story = harness.story()
    harness.run(story.send(*text(3), START, picture, END, *text(2), positions=[]))


def test_text_alone(harness: DriverHarness) -> None:
    """In any mixture, with the logits of the language model."""
    first, second = harness.story(), harness.story()
    harness.run(first.send(*text(50)))
    harness.run(first.send(*text(1, 1)), second.send(*text(9, 2)))
    harness.run(second.send(*text(1, 3)), first.send(*text(1, 4)))


def test_masks_beside_images(harness: DriverHarness) -> None:
    """Rows of images see, and are seen, as the mask says."""
    masked, plain = harness.story(), harness.story()
    parts: list[int | Picture] = [*text(4), START, Picture(4, 10), END, *text(5)]
    count = 4 + 1 + 10 + 1 + 5
    rows = [[max(0, row - 6), min(row, 6) + 1] for row in range(count)]
    window = torch.ones(count, count).tril().triu(-6).bool()
    sent = masked.send(*parts, masks=rows)
    other = plain.send(START, Picture(4, 4), END)
    reply = harness.client.forward([sent.request, other.request])
    assert_close(reply.logits[0], harness.reference.logits(masked, window))
    assert_close(reply.logits[1], harness.reference.logits(plain))
    unmasked = harness.reference.logits(masked)
    assert float((torch.tensor(reply.logits[0]) - unmasked).abs().max()) > 100 * TOLERANCE


def test_drafts_and_probes_behind_an_image(harness: DriverHarness) -> None:
    story, plain = harness.story(), harness.story()
    parts: list[int | Picture] = [*text(3), START, Picture(4, 6), END, *text(3, 1)]
    last = 3 + 1 + 6 + 1 + 3 - 1
    harness.run(plain.send(*parts))
    drafts: list[int] = []
    for _ in range(3):
        best = harness.reference.logits(plain)[-1].topk(2)
        assert best.values[0] - best.values[1] > 2 * TOLERANCE
        drafts.append(int(best.indices[0]))
        harness.run(plain.send(drafts[-1]))
    samplers = [(last, Sampler.greedy()), (last, Sampler.entropy()), (2, Sampler.logprobs([5, 6]))]
    sent = story.send(*parts, drafts=drafts[:2], samplers=samplers)
    reply = harness.client.forward([sent.request])
    assert reply.tokens == [drafts]
    scores = torch.log_softmax(harness.reference.logits(plain), dim=-1)
    entropy = -(scores[last].exp() * scores[last]).sum()
    assert reply.entropies[0] == [pytest.approx(float(entropy), abs=TOLERANCE)]
    assert_close([reply.logprobs[0][0]], scores[2, [5, 6]][None])


def test_patches_of_the_processor(harness: DriverHarness) -> None:
    """The rows of `pixel_values` travel as they are: what the processor makes is what is served."""
    from transformers import Qwen2VLImageProcessor

    generator = np.random.default_rng(5)
    photo = generator.integers(0, 256, (20, 28, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessor(
        patch_size=4, temporal_patch_size=2, merge_size=MERGE, min_pixels=64, max_pixels=4096
    )
    made = processor(images=[photo], return_tensors="pt")
    [grid] = made["image_grid_thw"].tolist()
    picture = Picture(grid[1], grid[2])
    picture.pixels = made["pixel_values"]
    assert picture.pixels.shape == (picture.tokens * MERGE**2, tiny_models.PATCH_VALUES)
    assert picture.pixels.dtype == torch.float32
    harness.run(harness.story().send(START, picture, END, *text(3)))


def wrong_images() -> dict[str, tuple[dict[str, Any], str]]:
    """Changes of a request's image of 4 x 4 patches, and the reason of the refusal.

    A second one of the same kind is not logged at once.
    """
    values = 4 * tiny_models.PATCH_VALUES
    return {
        "clip": (
            {"grid": (2, 4, 4), "pixels": bytes(32 * values)},
            "video clips are not supported",
        ),
        "no frames": ({"grid": (0, 4, 4)}, "its grid is 0 x 4 x 4"),
        "odd": ({"grid": (1, 16, 1)}, ""),
        "too long": ({"grid": (1, 8194, 2)}, "8194 patches long, the model's limit is 8192"),
        "short pixels": ({"pixels": bytes(16 * values - 1)}, f"needs {16 * values}"),
        "no pixels": ({"pixels": b""}, ""),
        "too many rows": ({"grid": (1, 8, 8), "pixels": bytes(64 * values)}, "16 rows from row"),
        "other row": ({"row": 0, "anchor": 0}, "not the placeholder 0"),
        "anchor": ({"anchor": 9}, "its anchor position is 9"),
        "axes": ({"positions": [1] * 11}, "11 rotary positions, expected none or 12"),
        "far axis": ({"positions": [1] * 11 + [tiny_models.CONTEXT]}, "rotary position 512"),
        "patches": ({"patch_positions": [0] * 31}, "`image_patch_positions` must have"),
    }


@pytest.mark.parametrize("flaw", wrong_images())
def test_a_wrong_image_is_refused_alone(harness: DriverHarness, flaw: str) -> None:
    changed, reason = wrong_images()[flaw]
    bad, text_only, good = harness.story(), harness.story(), harness.story()
    refused = bad.send(7, START, Picture(4, 4), END, **changed)
    # Nobody can tell whose patch positions are too many, so images go together.
    company = text(3) if flaw == "patches" else [START, Picture(4, 4, 2), END]
    sent = [refused, text_only.send(*text(4)), good.send(*company)]
    reply = harness.client.forward([each.request for each in sent])
    assert reply.logits[0] == []
    for found, each in zip(reply.logits[1:], sent[1:], strict=True):
        assert_close(found, harness.reference.logits(each.context))
    assert reason in harness.reasons()


def test_pixels_at_any_address(harness: DriverHarness) -> None:
    """Those after an odd number of bytes are not aligned."""
    bad, good = harness.story(), harness.story()
    refused = bad.send(START, Picture(2, 2), END, pixels=b"123")
    sent = good.send(START, Picture(4, 4), END)
    reply = harness.client.forward([refused.request, sent.request])
    assert reply.logits[0] == []
    assert_close(reply.logits[1], harness.reference.logits(good))


def test_patch_positions_are_accepted(harness: DriverHarness) -> None:
    """They are for models that place patches by them; this one goes by the grid."""
    story = harness.story()
    harness.run(story.send(START, Picture(4, 4), END, patch_positions=[7] * 32))


def test_audio_is_refused_alone(harness: DriverHarness) -> None:
    story = harness.story()
    sent = story.send(START, Picture(4, 4), END)
    clip = Request([0], [0], [0], 1, [(0, Sampler.greedy())], audio=[(0, bytes(4 * 128))])
    reply = harness.client.forward([clip, sent.request])
    assert reply.tokens[0] == []
    assert_close(reply.logits[1], harness.reference.logits(story))
    assert "1 audio spans were sent, but this model is served without audio" in harness.reasons()


def test_a_text_model_refuses_images_alone(llama_driver: drivers.Driver) -> None:
    picture = Picture(4, 4)
    sampler = [(0, Sampler.greedy())]
    image = Image(0, picture.grid, picture.pixels.numpy().tobytes(), picture.axes(0))
    bad = Request([0] * 4, list(range(4)), [0], 4, sampler, images=[image])
    good = Request([5], [0], [1], 1, sampler)
    client = llama_driver.client()
    reply = client.forward([bad, good])
    assert [len(tokens) for tokens in reply.tokens] == [0, 1]
    llama_driver.logged("this model takes text, no images")
