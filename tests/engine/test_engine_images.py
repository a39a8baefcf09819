"""Images of prompts in `Engine`, against transformers: its model and its processor."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from PIL import Image

from pie_driver_sglang import Engine
from pie_driver_sglang.errors import ConfigError
from support.models import tiny_vision
from support.models.vision_reference import TOKENS, Reference, picture

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    # Of transformers.
    pytest.mark.filterwarnings("ignore"),
]

SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.build(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def reference(snapshot: Path) -> Reference:
    return Reference(snapshot)


@pytest.fixture(scope="module")
def engine(snapshot: Path, forked_python: str) -> Iterator[Engine]:
    with mock.patch.object(sys, "executable", forked_python):
        found = Engine(model_path=str(snapshot), device="cpu", max_image_tokens=40)
    with found:
        yield found


def png(image: Image.Image) -> bytes:
    return saved(image, "PNG")


def saved(image: Image.Image, kind: str) -> bytes:
    data = io.BytesIO()
    image.save(data, kind)
    return data.getvalue()


def test_prompts_with_and_without(engine: Engine, reference: Reference) -> None:
    first, second, third = picture(3, 5, 1), picture(4, 2, 2), picture(2, 2, 3)
    prompts = {
        f"a{SHOWN}b": [first],
        f"{SHOWN}{SHOWN}c": [second, first],
        f"x{SHOWN}y{SHOWN}z{SHOWN}": [first, third, second],
    }
    found = engine.generate(
        [*prompts, "text"], GREEDY, image_data=[*prompts.values(), None], rid=list("abcd")
    )
    for answer, (text, images) in zip(found, prompts.items(), strict=False):
        assert answer["output_ids"] == reference.after(text, images)
        squares = sum(each.width * each.height for each in images) // tiny_vision.SIDE**2
        placeholders = text.count(SHOWN)
        letters = len(text) - placeholders * len(SHOWN)
        assert answer["meta_info"]["prompt_tokens"] == letters + 2 * placeholders + squares
    assert found[3]["output_ids"] == engine.generate("text", GREEDY)["output_ids"]


def test_forms_of_an_image(engine: Engine, reference: Reference, tmp_path: Path) -> None:
    image = picture(3, 4, 5)
    data, file = png(image), tmp_path / "an image.png"
    file.write_bytes(data)
    text = base64.b64encode(data).decode()
    forms = (image, data, file, str(file), file.as_uri(), text, f"data:image/png;base64,{text}")
    expected = reference.after(f"a{SHOWN}", [image])
    for form in forms:
        answer = engine.generate(f"a{SHOWN}", GREEDY, image_data=form)
        assert answer["output_ids"] == expected, type(form)
    # One for every prompt of a list, as in SGLang.
    for answer in engine.generate([f"a{SHOWN}"] * 2, GREEDY, image_data=image):
        assert answer["output_ids"] == expected


def test_base64_that_is_longer_than_a_file_name(engine: Engine, reference: Reference) -> None:
    image = Image.new("RGB", (32, 32))
    text = base64.b64encode(saved(image, "BMP")).decode()
    assert max(map(len, text.split("/"))) > 255
    answer = engine.generate(f"a{SHOWN}", GREEDY, image_data=text)
    assert answer["output_ids"] == reference.after(f"a{SHOWN}", [image])


def test_tokens_streams_and_the_prefix_cache(engine: Engine, reference: Reference) -> None:
    assert engine.tokenizer is not None
    one, other = picture(4, 6, 20), picture(4, 6, 21)
    text = f"{SHOWN}What is it, and what not?"
    [ids] = engine.tokenizer.encode([text])
    cached = []
    for image in (one, other, one):
        *_, last = engine.generate(input_ids=ids, sampling_params=GREEDY, image_data=[image],
                                   stream=True)  # fmt: skip
        assert last["output_ids"] == reference.after(text, [image])
        cached.append(last["meta_info"]["cached_tokens"])
    # Another image of the same size is no hit.
    assert cached[0] == 0
    assert cached[1] < 16 <= cached[2]


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ("a", [b"x"], "has 1 images for a prompt with 0 placeholders"),
        (f"{SHOWN}{SHOWN}", ["x"], "has 1 images for a prompt with 2 placeholders"),
        (
            SHOWN,
            [b"no image"],
            "image 0 of `image_data`, of type bytes, cannot be read: it is no image",
        ),
        (SHOWN, [saved(picture(2, 2, 1), "DDS")[:80] + bytes(48)], "image 0 of `image_data`"),
        (SHOWN, ["/nowhere.png"], "'/nowhere.png', cannot be read: there is no such file"),
        (SHOWN, [7], "image 0 of `image_data`, of type int, cannot be read: expected a path"),
        (SHOWN, ["http://127.0.0.1:9/x.png"], "cannot be read: "),
        (SHOWN, ["http://127.0.0.1:9/a b"], "cannot be read: URL can't contain"),
        ([SHOWN, SHOWN], [b"x"], "image_data"),
    ],
    ids=str,
)
def test_bad_images_are_one_line(engine: Engine, prompt: Any, images: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        engine.generate(prompt, GREEDY, image_data=images)
    assert words in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    # The next one is served.
    assert engine.generate("a", GREEDY)["output_ids"]


def test_tokens_outside_of_the_vocabulary(engine: Engine) -> None:
    assert engine.tokenizer is not None
    [ids] = engine.tokenizer.encode([SHOWN])
    with pytest.raises(ConfigError, match="token 99999 of `input_ids` is not in the vocabulary"):
        engine.generate(input_ids=[*ids, 99999], image_data=[picture(2, 2, 1)])


def test_an_image_that_a_driver_does_not_take(engine: Engine) -> None:
    """It has 42 tokens, and the driver takes 40 in a step."""
    answer = engine.generate(f"a{SHOWN}", GREEDY, image_data=[picture(6, 7, 50)])
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert "42" in answer["meta_info"]["finish_reason"]["message"]


def test_a_session_keeps_an_image(engine: Engine, reference: Reference) -> None:
    image, later = picture(4, 6, 60), picture(2, 3, 61)
    text = f"{SHOWN}What is it?"
    turns = [(text, [image]), (f"{text} And this? {SHOWN}", [image, later])]
    for turn, images in turns:
        answer = engine.generate(turn, GREEDY, image_data=images, session_id="s")
        assert answer["output_ids"] == reference.after(turn, images)
    assert answer["meta_info"]["cached_tokens"] >= 16
    engine.end_session("s")
