"""Images through `pie-sglang serve`, against transformers: its model and its processor."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from PIL import Image

from support.examples import run_example
from support.models import tiny_vision
from support.models.vision_reference import TOKENS, Reference, picture
from support.servers.pie_server import generate, refusal, running, state, wait_until
from support.servers.sglang_server import Server, event
from support.versions import IS_OLDEST

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

#: Where a choice of a chat has its tokens.
TOKEN_IDS: Final = "token_ids" if IS_OLDEST else "response_token_ids"
MOST_TOKENS: Final = 40
"""Tokens of an image that the driver takes; the processor allows more."""
IMAGE_PROMPT: Final = "<|vision_start|><|image_pad|><|vision_end|>"
WORDS: Final = "What is in this picture, and what is not? Say it in a few words."


def part(image: Image.Image) -> dict[str, Any]:
    data = io.BytesIO()
    image.save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def message(*parts: str | Image.Image) -> dict[str, Any]:
    content = [
        {"type": "text", "text": each} if isinstance(each, str) else part(each) for each in parts
    ]
    return {"role": "user", "content": content}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    options = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    return {"model": "m", "messages": list(messages), **options, **more}


def chat(server: Server, *messages: dict[str, Any], **more: Any) -> tuple[list[int], Any]:
    """The tokens of an answer, and what it says of the prompt."""
    answer = json.loads(server.fetch("/v1/chat/completions", body(*messages, **more)))
    return answer["choices"][0][TOKEN_IDS], answer["usage"]


def cached(usage: Any) -> int:
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.build(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def reference(snapshot: Path) -> Reference:
    return Reference(snapshot)


@pytest.fixture(scope="module")
def server(
    snapshot: Path, forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--scheduler", "pie", "--enable-multimodal", "--enable-cache-report"]
    flags += ["--option", f"max_image_tokens={MOST_TOKENS}"]
    folder = tmp_path_factory.mktemp("images")
    with running(folder, *flags, model=snapshot, python=forked_python) as (server, _):
        yield server


def test_the_example_sends_a_file(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    picture(4, 5, 1).save(path)
    answer = run_example("vision_chat.py", "--url", server.url, "--image", str(path))
    assert answer.startswith("answer: ")


def test_one_image_and_two(server: Server, reference: Reference) -> None:
    first, second = picture(3, 5, 1), picture(4, 2, 2)
    for parts in (
        [first, WORDS],
        ["Look: ", first],
        ["a", second, "b", first, "c"],
        [first, first],
        # More than one step of the driver takes.
        [picture(5, 6, 3), picture(6, 5, 4)],
    ):
        requested = message(*parts)
        images = [each for each in parts if isinstance(each, Image.Image)]
        tokens, usage = chat(server, requested)
        assert tokens == reference.tokens(requested, images=images)
        squares = sum(each.width * each.height for each in images) // tiny_vision.SIDE**2
        assert usage["prompt_tokens_details"]["image_tokens"] == squares


def test_an_image_decides(reference: Reference) -> None:
    """The reference is sensitive: one image for another could not pass."""
    answers = {
        tuple(reference.tokens(message(image, "a"), images=[image]))
        for image in (picture(3, 5, seed) for seed in range(3))
    }
    assert len(answers) == 3


def test_a_second_turn_continues_the_first(server: Server, reference: Reference) -> None:
    image, later = picture(5, 4, 10), picture(2, 3, 11)
    first = message("Turn one.", image, WORDS)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "An answer."}]}
    server.flush()
    _, before = chat(server, first)
    assert cached(before) == 0
    for turn, images in ((message("And now?"), [image]), (message(later, "?"), [image, later])):
        tokens, usage = chat(server, first, answer, turn)
        assert tokens == reference.tokens(first, answer, turn, images=images)
        # All of the first turn but its last page, and the beginning of the answer.
        assert cached(usage) > before["prompt_tokens"] - 64


def test_another_image_of_the_same_size_is_no_hit(server: Server, reference: Reference) -> None:
    one, other = picture(4, 6, 20), picture(4, 6, 21)
    server.flush()
    chat(server, message(one, WORDS))
    tokens, usage = chat(server, message(other, WORDS))
    assert cached(usage) < 16
    assert tokens == reference.tokens(message(other, WORDS), images=[other])
    _, usage = chat(server, message(one, WORDS))
    assert cached(usage) >= 64
    # One colour has the same patches in every shape.
    shapes = [Image.new("RGB", size, (200, 30, 90)) for size in ((48, 32), (32, 48))]
    for image in shapes:
        requested = message(image, "Which?")
        assert chat(server, requested)[0] == reference.tokens(requested, images=[image])


def test_streams_and_many_at_once(server: Server, reference: Reference) -> None:
    images = [picture(2 + at % 3, 3, 30 + at) for at in range(6)]
    found: dict[int, list[int]] = {}

    def send(at: int) -> None:
        options = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        requested = {
            "text": f"{IMAGE_PROMPT}{at}",
            "image_data": [part(images[at])["image_url"]["url"]],
        }
        request = server.request(
            "/generate", {**requested, "sampling_params": options, "stream": True}
        )
        with urllib.request.urlopen(request, timeout=120) as lines:
            answers = [answer for line in lines if (answer := event(line))]
        # On a busy machine what is new may come at once.
        said = [answer["output_ids"] for answer in answers]
        assert all(later[: len(one)] == one for one, later in itertools.pairwise(said))
        found[at] = said[-1]

    threads = [threading.Thread(target=send, args=[at]) for at in range(len(images))]
    for thread in threads:
        thread.start()
    text = generate(server, "plain text in between")["output_ids"]
    for thread in threads:
        thread.join()
    assert text == generate(server, "plain text in between")["output_ids"]
    for at, image in enumerate(images):
        assert found[at] == reference.after(f"{IMAGE_PROMPT}{at}", [image])


def test_an_abort_in_the_middle(server: Server) -> None:
    requested = body(message(picture(3, 3, 40), "go"), max_tokens=400)
    requested |= {"stream": True, "return_token_ids": False}
    request = server.request("/v1/chat/completions", requested)
    with urllib.request.urlopen(request, timeout=120) as lines:
        assert b"data:" in next(iter(lines))
    wait_until(lambda: not open_requests(server), 60, "the request ends with its client")


def open_requests(server: Server) -> int:
    [load] = json.loads(server.fetch("/v1/loads"))["loads"]
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


def test_what_is_not_served_is_refused_by_name(server: Server) -> None:
    def refused(*parts: dict[str, Any], **more: Any) -> str:
        requested = {"role": "user", "content": list(parts)}
        code, answer = refusal(server, body(requested, **more), "/v1/chat/completions")
        assert code == 400, answer
        return answer

    answer = refused(part(picture(6, 7, 50)))
    assert "image 0 has 42 tokens" in answer
    assert "max_image_tokens" in answer
    nothing = {"url": "data:video/mp4;base64,AAAA"}
    assert "`video_data` is not served" in refused({"type": "video_url", "video_url": nothing})
    assert "`audio_data` is not served" in refused({"type": "audio_url", "audio_url": nothing})
    # Nothing is left of those that were refused.
    assert open_requests(server) == 0
    assert not [path for path in Path("/dev/shm").glob("sgl_shm_mm_*") if is_of(path, server)]
    assert state(server)["scheduler"] == "pie"


def is_of(path: Path, server: Server) -> bool:
    """Whether a process of this server made a segment, whose name has its number."""
    with contextlib.suppress(psutil.NoSuchProcess):
        maker = psutil.Process(int(path.name.split("_")[3]))
        return str(server.log.parent) in maker.environ().get("TMPDIR", "")
    return False


def test_a_broken_image(server: Server) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(urllib.error.HTTPError) as error:
        server.fetch("/v1/chat/completions", body({"role": "user", "content": [broken]}))
    assert error.value.code == 400
    assert chat(server, message("text"))[0]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9/cat.png", "--allow-private-media-hosts"),
        ("http://localhost:9/cat.png", "--allow-private-media-hosts"),
        ("http://169.254.169.254/latest/meta-data/", "--allow-private-media-hosts"),
        ("file:///etc/hostname", "not served"),
        ("/etc/hostname.png", "not served"),
        ("ftp://a.example/cat.png", "not served"),
    ],
)
def test_addresses_and_files_of_this_host_are_refused(server: Server, url: str, words: str) -> None:
    image = {"type": "image_url", "image_url": {"url": url}}
    status, text = refusal(
        server, body({"role": "user", "content": [image]}), "/v1/chat/completions"
    )
    assert (status, words in text) == (400, True), text
    requested = {"text": "x", "image_data": url, "sampling_params": {"max_new_tokens": 2}}
    status, text = refusal(server, requested)
    assert (status, words in text) == (400, True), text


@pytest.fixture(scope="module")
def gateway(
    snapshot: Path, forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--front", "gateway", "--served-model-name", "m"]
    flags += ["--option", f"max_image_tokens={MOST_TOKENS}"]
    folder = tmp_path_factory.mktemp("gateway")
    with running(folder, *flags, model=snapshot, python=forked_python) as (server, _):
        yield server


class TestGateway:
    """The same model behind the gateway, which makes tensors of images by itself."""

    def text(self, server: Server, *messages: dict[str, Any]) -> tuple[str, Any]:
        requested = body(*messages)
        del requested["return_token_ids"]
        answer = json.loads(server.fetch("/v1/chat/completions", requested))
        return answer["choices"][0]["message"]["content"], answer["usage"]

    def test_an_answer_is_that_of_the_model(self, gateway: Server, reference: Reference) -> None:
        first, second = picture(3, 5, 1), picture(4, 2, 2)
        for parts in (
            [first, WORDS],
            ["a", second, "b", first, "c"],
            # More than one step of the driver takes.
            [picture(5, 6, 3), "and", picture(6, 5, 4)],
        ):
            images = [each for each in parts if isinstance(each, Image.Image)]
            text, _ = self.text(gateway, message(*parts))
            # The gateway puts a message's images before its text.
            shown = message(*images, *(each for each in parts if isinstance(each, str)))
            expected = reference.text(reference.tokens(shown, images=images))
            # The gateway keeps back what is half a character.
            assert text.rstrip("\ufffd")
            assert text.rstrip("\ufffd") == expected.rstrip("\ufffd")

    def test_an_image_is_found_again(self, gateway: Server) -> None:
        one, other = (message(picture(4, 6, seed), WORDS) for seed in (20, 21))
        self.text(gateway, one)
        _, usage = self.text(gateway, other)
        assert cached(usage) < 16
        _, usage = self.text(gateway, one)
        assert cached(usage) >= 64

    def test_what_is_too_large_is_refused(self, gateway: Server) -> None:
        requested = body(message(picture(6, 7, 50)))
        del requested["return_token_ids"]
        code, answer = refusal(gateway, requested, "/v1/chat/completions")
        assert code == 400
        assert "image 0 has 42 tokens" in answer
        assert "max_image_tokens" in answer

    @pytest.mark.parametrize(
        "url",
        [
            "http://127.0.0.1:9/cat.png",
            "http://169.254.169.254/latest/meta-data/",
            "file:///etc/hostname",
            "/etc/hostname",
        ],
    )
    def test_addresses_and_files_of_this_host_are_refused(self, gateway: Server, url: str) -> None:
        image = {"type": "image_url", "image_url": {"url": url}}
        requested = body({"role": "user", "content": [image]})
        del requested["return_token_ids"]
        status, _ = refusal(gateway, requested, "/v1/chat/completions")
        assert status == 400
