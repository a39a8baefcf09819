"""`pie-sglang serve` with embedding models: SGLang's endpoints over our scheduler."""

from __future__ import annotations

import base64
import json
import math
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer
from support.examples import run_example
from support.models.embedding_models import EmbeddingReference, build, random_prompts
from support.models.tiny_models import POCKET
from support.servers.pie_server import refusal, running, state, wait_until
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOLERANCE = 5e-6
NAME = "Qwen3-Embedding"
CLASSES = "Qwen3-classes"
TEXTS = ["def f(x):", "return x + 1", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(
    forked_python: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--scheduler", "pie", "--is-embedding", "--chunked-prefill-size", "48"]
    flags += ["--file-storage-path", str(folder / "storage")]
    place, model = tmp_path_factory.mktemp("server"), build(NAME, folder)
    with running(place, *flags, model=model, python=forked_python) as (found, _):
        yield found


@pytest.fixture(scope="module")
def classes(
    forked_python: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A model with a classification head, which needs no flag."""
    place, model = tmp_path_factory.mktemp("classes"), build(CLASSES, folder)
    with running(place, "--scheduler", "pie", model=model, python=forked_python) as (found, _):
        yield found


def test_the_example_ranks_texts(server: Server) -> None:
    lines = run_example("embeddings.py", "--url", server.url).splitlines()
    scores = [float(line.split()[0]) for line in lines]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert all(-1 <= score <= 1 for score in scores)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def reference(folder: Path) -> EmbeddingReference:
    return EmbeddingReference(NAME, build(NAME, folder))


@pytest.fixture(scope="module")
def class_reference(folder: Path) -> EmbeddingReference:
    return EmbeddingReference(CLASSES, build(CLASSES, folder))


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(POCKET)


def assert_close(found: Sequence[float], expected: Sequence[float]) -> None:
    assert found == pytest.approx(expected, rel=0, abs=TOLERANCE * max(1, *map(abs, expected)))


def fetch(server: Server, path: str, body: dict[str, Any]) -> Any:
    return json.loads(server.fetch(path, body))


class TestEmbeddings:
    """`/v1/embeddings` by the `openai` client."""

    def test_texts(
        self, client: openai.OpenAI, reference: EmbeddingReference, tokenizer: ModelTokenizer
    ) -> None:
        tokens = tokenizer.encode(TEXTS)
        # The client asks for base64, and decodes it.
        answer = client.embeddings.create(model="m", input=TEXTS)
        assert [each.index for each in answer.data] == [0, 1, 2]
        for each, ids in zip(answer.data, tokens, strict=True):
            assert_close(each.embedding, reference.row(ids))
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
        one = client.embeddings.create(model="m", input=TEXTS[0], encoding_format="float")
        assert_close(one.data[0].embedding, reference.row(tokens[0]))

    def test_tokens(self, client: openai.OpenAI, reference: EmbeddingReference) -> None:
        prompts = random_prompts([3, 100, 20])
        answer = client.embeddings.create(model="m", input=prompts)
        for each, ids in zip(answer.data, prompts, strict=True):
            assert_close(each.embedding, reference.row(ids))
        one = client.embeddings.create(model="m", input=prompts[1])
        assert_close(one.data[0].embedding, reference.row(prompts[1]))

    def test_base64(self, server: Server, reference: EmbeddingReference) -> None:
        [prompt] = random_prompts([9])
        body = {"model": "m", "input": prompt, "encoding_format": "base64"}
        found = fetch(server, "/v1/embeddings", body)["data"][0]["embedding"]
        data = base64.b64decode(found)
        assert_close(struct.unpack(f"<{len(data) // 4}f", data), reference.row(prompt))

    def test_dimensions(self, client: openai.OpenAI, reference: EmbeddingReference) -> None:
        [prompt] = random_prompts([12])
        answer = client.embeddings.create(model="m", input=prompt, dimensions=8)
        cut = reference.row(prompt)[:8]
        norm = math.hypot(*cut)
        assert_close(answer.data[0].embedding, [value / norm for value in cut])

    def test_several_prompts_have_one_name(self, server: Server) -> None:
        bodies: list[dict[str, Any]] = [{"rid": "one"}, {"rid": ["one", "other"]}, {}]
        first, *others = (
            fetch(server, "/v1/embeddings", {"model": "m", "input": TEXTS[:2], **body})["data"]
            for body in bodies
        )
        assert len(first) == 2
        assert others == [first, first]
        [alone] = fetch(server, "/encode", {"text": TEXTS[:1], "rid": "one"})
        assert alone["meta_info"]["id"] == "one"

    def test_a_batch_of_files(self, client: openai.OpenAI) -> None:
        """With every kind of input."""
        inputs = [TEXTS[0], TEXTS, [5, 6, 7], [[5, 6, 7], [8]], [TEXTS[1]]]
        lines = [
            {
                "custom_id": f"id-{number}",
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": "m", "input": each},
            }
            for number, each in enumerate(inputs)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        wait_until(lambda: bool(client.batches.retrieve(batch.id).completed_at), 60, "completed")
        found = client.batches.retrieve(batch.id)
        assert found.error_file_id is None
        results = map(json.loads, client.files.content(str(found.output_file_id)).iter_lines())
        for result, each in zip(results, inputs, strict=True):
            one = client.embeddings.create(model="m", input=each, encoding_format="float")
            found_rows = [row["embedding"] for row in result["response"]["body"]["data"]]
            for row, expected in zip(found_rows, one.data, strict=True):
                assert_close(row, expected.embedding)

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"input": []}, "empty"),
            ({"input": ""}, "empty"),
            ({"input": [4096]}, "not in the vocabulary, which has 4096: send ids below that"),
            ({"input": [[5], [9999]]}, "not in the vocabulary"),
            ({"input": [5] * 600}, "512"),
            ({"input": "x", "dimensions": 65}, "64"),
            ({"input": "x", "dimensions": 0}, "greater than 0"),
        ],
        ids=str,
    )
    def test_bad_input(self, server: Server, body: dict[str, Any], words: str) -> None:
        status, text = refusal(server, {"model": "m", **body}, "/v1/embeddings")
        assert (status, words in text) == (400, True), text


def test_the_native_endpoints(
    server: Server, reference: EmbeddingReference, tokenizer: ModelTokenizer
) -> None:
    tokens = tokenizer.encode(TEXTS)
    for path in ("/encode", "/classify"):
        answers = fetch(server, path, {"text": TEXTS})
        for answer, ids in zip(answers, tokens, strict=True):
            assert_close(answer["embedding"], reference.row(ids))
            assert answer["meta_info"]["prompt_tokens"] == len(ids)
        answer = fetch(server, path, {"input_ids": tokens[0]})
        assert_close(answer["embedding"], reference.row(tokens[0]))
    for body, words in (
        ({"input_ids": [4096]}, "not in the vocabulary"),
        ({"input_ids": []}, "`input_ids` is a list of 0, it must have at least one token"),
        ({"text": ["a", "b"], "rid": ["x"]}, "`rid` is a list of 1, and there are 2 prompts"),
        ({"text": [["a", "b"]]}, "`text[0]` is a list of 2, expected a text"),
    ):
        status, text = refusal(server, body, "/encode")
        assert (status, words in text) == (400, True), text


def test_health_and_what_is_active(server: Server) -> None:
    announced = server.log.read_text()
    assert f"curl {server.url}/v1/embeddings" in announced
    assert "/v1/chat/completions" not in announced
    server.fetch("/health_generate")
    info = json.loads(server.fetch("/server_info"))
    assert info["scheduler"] == "pie"
    assert json.loads(server.fetch("/model_info"))["is_generation"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        ("/v1/completions", {"model": "m", "prompt": "x"}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_text_is_not_generated(server: Server, path: str, body: dict[str, Any]) -> None:
    status, text = refusal(server, body, path)
    assert (status, "use /v1/embeddings" in text) == (400, True), text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/classify", {"model": "m", "input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y", "z"]}),
        ("/v1/score", {"model": "m", "query": "x", "items": ["y"], "label_token_ids": [5]}),
    ],
)
def test_scores_and_classes_need_a_head(server: Server, path: str, body: dict[str, Any]) -> None:
    status, text = refusal(server, body, path)
    assert (status, f"`{path}` needs a model with a classification" in text) == (400, True), text
    assert "Qwen3ForCausalLM, returns embeddings" in text


def test_many_clients_and_one_that_leaves(server: Server, reference: EmbeddingReference) -> None:
    prompts = random_prompts([1 + 13 * number % 300 for number in range(64)])
    leaving = openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=0.01, max_retries=0
    )
    gone = threading.Thread(target=_give_up, args=(leaving, prompts * 8))
    gone.start()
    with ThreadPoolExecutor(16) as pool:
        bodies = [{"input_ids": prompt} for prompt in prompts]
        answers = list(pool.map(lambda body: fetch(server, "/encode", body), bodies))
    gone.join()
    for prompt, answer in list(zip(prompts, answers, strict=True))[::9]:
        assert_close(answer["embedding"], reference.row(prompt))
    wait_until(lambda: not state(server)["open_requests"], 60, "no request is left")
    counts = state(server)
    assert counts["pages_free"] + counts["pages_cached"] == counts["pages_total"]


def _give_up(client: openai.OpenAI, prompts: list[list[int]]) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.embeddings.create(model="m", input=prompts)


class TestClasses:
    """A model with a classification head."""

    def test_classify(
        self, classes: Server, class_reference: EmbeddingReference, tokenizer: ModelTokenizer
    ) -> None:
        tokens = tokenizer.encode(TEXTS)
        for answer, ids in zip(fetch(classes, "/classify", {"text": TEXTS}), tokens, strict=True):
            assert_close(answer["embedding"], class_reference.row(ids))
        found = fetch(classes, "/v1/classify", {"model": "m", "input": TEXTS})["data"]
        for each, ids in zip(found, tokens, strict=True):
            logits = class_reference.row(ids)
            total = sum(map(math.exp, logits))
            assert each["probs"] == pytest.approx(
                [math.exp(value) / total for value in logits], abs=1e-4
            )
            assert each["label"] == f"LABEL_{logits.index(max(logits))}"

    def test_rerank(
        self, classes: Server, class_reference: EmbeddingReference, tokenizer: ModelTokenizer
    ) -> None:
        body = {"query": "return x", "documents": TEXTS, "return_documents": True}
        found = fetch(classes, "/v1/rerank", body)
        pairs = tokenizer.encode_pairs([("return x", text) for text in TEXTS])
        expected = [class_reference.row(ids)[0] for ids in pairs]
        scores = {each["document"]: each["score"] for each in found}
        assert_close([scores[text] for text in TEXTS], expected)
        assert [each["score"] for each in found] == sorted(scores.values(), reverse=True)

    def test_score(
        self, classes: Server, class_reference: EmbeddingReference, tokenizer: ModelTokenizer
    ) -> None:
        body = {"model": "m", "query": "return x", "items": TEXTS, "apply_softmax": False}
        found = fetch(classes, "/v1/score", body)["scores"]
        tokens = tokenizer.encode([f"return x{text}" for text in TEXTS])
        for scores, ids in zip(found, tokens, strict=True):
            assert_close(scores, class_reference.row(ids))
