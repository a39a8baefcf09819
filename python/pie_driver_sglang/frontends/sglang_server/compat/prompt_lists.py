"""Requests with a list of prompts: checks that SGLang lacks, and corrections of its embeddings."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.managers.io_struct import EmbeddingReqInput

_GET: Final = EmbeddingReqInput.__getitem__
_NORMALIZE: Final = EmbeddingReqInput.normalize_batch_and_arguments


def correct_embedding_lists() -> None:
    """Accept one `rid` for several prompts of an embedding request, and keep their priority.

    SGLang fails an assertion on such a `rid`, which is answered 500; 0.5.17 drops the priority.
    """
    EmbeddingReqInput.__getitem__ = _get
    EmbeddingReqInput.normalize_batch_and_arguments = _normalize


def _get(self: EmbeddingReqInput, i: int) -> EmbeddingReqInput:
    found: EmbeddingReqInput = _GET(self, i)
    found.priority = self.priority
    return found


def _normalize(self: EmbeddingReqInput) -> None:
    prompts = count_prompts(self)
    if isinstance(self.rid, str) and prompts:
        # As SGLang names the prompts of a request that generates.
        several = [f"{self.rid}_{number}" for number in range(prompts)]
        self.rid = [self.rid] if prompts == 1 else several
    _NORMALIZE(self)


def count_prompts(obj: Any) -> int:
    """The number of prompts in a request's list; 0 for a single prompt."""
    prompts = obj.text if obj.text is not None else obj.input_ids
    listed = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)
    return len(prompts) if listed else 0


def check_lists(obj: Any) -> None:
    """Reject lists that SGLang indexes by the number of a prompt, and which are shorter.

    Raises:
        ValueError: There is one, or a text is a list.
    """
    prompts = count_prompts(obj)
    for name in ("rid", "custom_logit_processor"):
        given = getattr(obj, name, None)
        if isinstance(given, list) and len(given) < prompts:
            raise ValueError(
                f"`{name}` is a list of {len(given)}, and there are {prompts} prompts: send as "
                "many as prompts"
            )
    has_pairs = getattr(obj, "is_cross_encoder_request", False)
    for number, text in enumerate(obj.text if isinstance(obj.text, list) else ()):
        if isinstance(text, list) and not has_pairs:
            raise ValueError(
                f"`text[{number}]` is a list of {len(text)}, expected a text: send pairs of a "
                "query and a document to `/v1/rerank`"
            )
