"""Reads the lines of an input file, and validates them before the batch begins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import quoted, reason
from pie_driver_sglang.frontends.batches.batch_records import is_text

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_CUSTOM_ID: Final = 512
"""Characters of a `custom_id`."""
MAX_MODEL: Final = 1024
"""Characters of a model's name."""
MAX_LINE_BYTES: Final = 16 << 20
MAX_ERRORS: Final = 100
"""Errors that a batch reports; the lines after them are not looked at."""


class InputLine(NamedTuple):
    """A valid line of an input file.

    Attributes:
        number: From 1.
        custom_id: The client's name for it.
        url: The endpoint.
        body: The request.
    """

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


class InputError(NamedTuple):
    """What is wrong with a line.

    Attributes:
        code: Of OpenAI's API, where it has one.
        message: The value, the limit and the remedy.
        line: The number of the line; None for the whole file.
        param: The field.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Validation(NamedTuple):
    """The outcome of `validate`.

    Attributes:
        total: The number of requests.
        model: The model that they name; None if they name none.
        endpoint: Their URL.
        errors: Errors; the batch fails if there are any.
    """

    total: int
    model: str | None
    endpoint: str | None
    errors: list[InputError]


def read_lines(path: Path) -> Iterator[InputLine]:
    """The lines of a valid input file; empty ones are skipped."""
    for number, raw in _raw_lines(path):
        found = json.loads(raw)
        yield InputLine(number, found["custom_id"], found["url"], found["body"])


def validate(path: Path, endpoint: str | None, max_lines: int | None) -> Validation:
    """Look at every line of an input file.

    Args:
        path: The file.
        endpoint: The URL that all lines must have; None for that of the first line.
        max_lines: The most lines; None for any number.
    """
    errors: list[InputError] = []
    lines_of_ids: dict[str, int] = {}
    models: dict[str | None, int] = {}
    for number, raw in _raw_lines(path):
        if max_lines is not None and len(lines_of_ids) >= max_lines:
            text = (
                f"line {number} is one more than the {max_lines} lines that a batch may have: "
                "split the file, or start the server with a larger `--max-batch-lines`"
            )
            errors.append(InputError("too_many_lines", text, number))
            break
        if len(errors) >= MAX_ERRORS:
            break
        found = _parse(number, raw)
        if isinstance(found, InputLine) and endpoint is None and found.url in ENDPOINTS:
            endpoint = found.url
        problem = found if isinstance(found, InputError) else _check(found, endpoint)
        if problem is None and isinstance(found, InputLine):
            problem = _check_others(found, lines_of_ids, models)
        if problem is not None:
            errors.append(problem)
        if isinstance(found, InputLine):
            lines_of_ids.setdefault(found.custom_id, number)
    if not lines_of_ids and not errors:
        errors.append(InputError("empty_file", "the file has no lines: write a request in each"))
    model = next(iter(models), None)
    return Validation(len(lines_of_ids), model, endpoint, errors)


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        number = 0
        # Of a longer line only what shows that it is too long is read at once.
        while raw := file.readline(MAX_LINE_BYTES + 2):
            number += 1
            while not raw.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
                raw = raw[: MAX_LINE_BYTES + 1] + rest[-1:]
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield number, raw


def _parse(number: int, raw: bytes) -> InputLine | InputError:
    def wrong(code: str, text: str, param: str | None = None) -> InputError:
        return InputError(code, f"line {number}{text}", number, param)

    if len(raw) > MAX_LINE_BYTES:
        text = f" has more than {MAX_LINE_BYTES} bytes: shorten it"
        return wrong("line_too_long", text)
    try:
        found = json.loads(raw)
    except json.JSONDecodeError as error:
        return wrong("invalid_json_line", f" is not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return wrong("invalid_json_line", f" is not JSON: {reason(error)}")
    if not isinstance(found, dict):
        text = f" is {quoted(found)}: write a JSON object with custom_id, method, url and body"
        return wrong("invalid_json_line", text)
    custom_id, method = found.get("custom_id"), found.get("method")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        text = f": `custom_id` is {quoted(custom_id)}, expected 1 to {MAX_CUSTOM_ID} characters"
        return wrong("invalid_custom_id", text, "custom_id")
    if method != "POST":
        return wrong("invalid_method", f": `method` is {quoted(method)}, expected 'POST'", "method")
    url, body = found.get("url"), found.get("body")
    if not isinstance(url, str) or url not in ENDPOINTS:
        text = f": `url` is {quoted(url)}, expected one of {', '.join(ENDPOINTS)}"
        return wrong("invalid_url", text, "url")
    if not isinstance(body, dict):
        return wrong("invalid_body", f": `body` is {quoted(body)}, expected an object", "body")
    return InputLine(number, custom_id, url, body)


def _check(line: InputLine, endpoint: str | None) -> InputError | None:
    """What is wrong with a line by itself."""
    number, body = line.number, line.body
    if line.url != endpoint:
        text = f"line {number}: `url` is {quoted(line.url)}, the batch has {quoted(endpoint)}"
        return InputError("mismatched_url", text, number, "url")
    if body.get("stream"):
        text = f"line {number}: `stream` is {quoted(body['stream'])}, batches have none: remove it"
        return InputError("invalid_body", text, number, "body.stream")
    model = body.get("model")
    is_name = isinstance(model, str) and 0 < len(model) <= MAX_MODEL and is_text(model)
    if model is not None and not is_name:
        text = f"line {number}: `model` is {quoted(model)}, expected up to {MAX_MODEL} characters"
        return InputError("invalid_model", text, number, "body.model")
    return None


def _check_others(
    line: InputLine, lines_of_ids: dict[str, int], models: dict[str | None, int]
) -> InputError | None:
    """What is wrong with a line next to those before it."""
    number, model = line.number, line.body.get("model")
    before = lines_of_ids.get(line.custom_id)
    if before is not None:
        name = quoted(line.custom_id)
        text = f"line {number}: `custom_id` is {name}, as in line {before}: use each once"
        return InputError("duplicate_custom_id", text, number, "custom_id")
    models.setdefault(model, number)
    first = next(iter(models))
    if model != first:
        text = (
            f"line {number}: `model` is {quoted(model)}, and {quoted(first)} in line "
            f"{models[first]}: a batch has one model"
        )
        return InputError("mismatched_model", text, number, "body.model")
    return None
