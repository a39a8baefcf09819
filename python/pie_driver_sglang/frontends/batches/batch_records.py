"""Files and batches as records of the database, and as objects of OpenAI's API."""

from __future__ import annotations

import enum
import json
import math
import secrets
import time
from typing import Any, Final, NamedTuple, Self


class BatchStatus(enum.StrEnum):
    """The states of a batch, as in OpenAI's API."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


#: States that the runner still has to bring to an end.
OPEN_STATUSES: Final = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)


class StoredFile(NamedTuple):
    """A row of the table `files`; its content is a file of the same id in the folder.

    Attributes:
        id: Its name in the API.
        bytes: Its size.
        created_at: Seconds since the epoch.
        expires_at: When it is deleted; None for never.
        filename: The client's name for it.
        purpose: What the client uploaded it for, or `batch_output`.
        sha256: The digest of its content, in hexadecimal.
    """

    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    sha256: str

    def as_object(self) -> dict[str, Any]:
        """The file in OpenAI's API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Batch(NamedTuple):
    """A row of the table `batches`.

    Attributes:
        id: Its name in the API.
        input_file_id: The file with its lines.
        endpoint: The URL of all its lines.
        completion_window: As the client wrote it.
        status: Its state.
        created_at: Seconds since the epoch, as all times.
        expires_at: The end of its completion window.
        output_key: The id that its output file will have.
        error_key: The id that its error file will have.
        in_progress_at: When its first line could start; None before, as all later times.
        finalizing_at: When its last line had ended.
        completed_at: When its output was there.
        failed_at: When its input turned out to be wrong.
        expired_at: When its window closed before all lines were done.
        cancelling_at: When its cancellation was requested.
        cancelled_at: When the cancellation was complete.
        output_file_id: The results; None before the end, or without any.
        error_file_id: The lines that failed; None before the end, or without any.
        output_expires_s: Seconds after which the output files are deleted; None for never.
        errors: JSON of the list of errors of its input.
        metadata: JSON of the client's metadata.
        model: The model that its lines name.
        total: Its lines.
        completed: Lines with a result.
        failed: Lines that failed.
        starts: How often a process began to run it since its last committed line.
    """

    id: str
    input_file_id: str
    endpoint: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    output_key: str
    error_key: str
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_expires_s: int | None = None
    errors: str | None = None
    metadata: str | None = None
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    starts: int = 0

    @classmethod
    def of_row(cls, row: Any) -> Self:
        """The record of a row, whose columns have the order of the attributes."""
        found = cls(*row)
        return found._replace(status=BatchStatus(found.status))

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.status in OPEN_STATUSES

    def as_object(self) -> dict[str, Any]:
        """The batch in OpenAI's API."""
        errors = json.loads(self.errors) if self.errors else None
        times = {name: getattr(self, name) for name in self._fields if name.endswith("_at")}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": str(self.status),
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            **times,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": json.loads(self.metadata) if self.metadata else None,
        }


class LineResult(NamedTuple):
    """The result of one line, ready for its output file.

    Attributes:
        line: The number of the line in the input, from 1.
        is_error: Whether it belongs into the error file.
        text: The line of the output file, without its end.
    """

    line: int
    is_error: bool
    text: str


def new_file_id() -> str:
    """A random id of a file."""
    return f"file-{secrets.token_hex(12)}"


def new_batch(
    input_file_id: str, endpoint: str, window: str, window_s: int, **others: Any
) -> Batch:
    """A batch whose input has not been validated.

    Args:
        input_file_id: The file with its lines.
        endpoint: Their URL.
        window: The completion window, as the client wrote it.
        window_s: The same in seconds.
        others: Other attributes of the record.
    """
    now = time.time()
    return Batch(
        id=f"batch_{secrets.token_hex(16)}",
        input_file_id=input_file_id,
        endpoint=endpoint,
        completion_window=window,
        status=BatchStatus.VALIDATING,
        created_at=int(now),
        expires_at=math.ceil(now + window_s),
        output_key=new_file_id(),
        error_key=new_file_id(),
        **others,
    )


def result_line(
    custom_id: str, request_id: str, status: int | None, body: Any, error: dict[str, str] | None
) -> str:
    """A line of an output file in OpenAI's format.

    Args:
        custom_id: The client's name of the request.
        request_id: The server's name of the request.
        status: The HTTP status of its response; None if it was not run.
        body: The response; None if it was not run.
        error: Code and message of a request that was not run.
    """
    response = None
    if status is not None:
        response = {"status_code": status, "request_id": request_id, "body": body}
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    text = json.dumps(line, ensure_ascii=False)
    # Half of a surrogate pair may come from a token that is a part of a character.
    return text if is_text(text) else json.dumps(line)


def is_text(value: str) -> bool:
    """Whether a string is Unicode text, without halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
