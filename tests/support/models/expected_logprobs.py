"""Expected logprobs of SGLang's `meta_info`, by transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from support.models.reference import Reference

TOLERANCE = 1e-4

Texts = Callable[[int], str | None]


class LogprobParams(NamedTuple):
    """What a request asks for, under SGLang's names."""

    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Those of `generate`, and of the HTTP interface."""
        given = list(self.token_ids_logprob) or None
        return {**self._asdict(), "return_logprob": True, "token_ids_logprob": given}


def check_answer(
    answer: dict[str, Any],
    requested: LogprobParams,
    prompt: Sequence[int],
    reference: Reference,
    texts: Texts = lambda _: None,
    divisor: float = 1.0,
) -> None:
    """Compares all of an answer.

    Args:
        answer: As SGLang gives it.
        asked: What its request asks for.
        prompt: Its tokens.
        reference: The model.
        texts: The text of a token, where that is wanted.
        divisor: Of the logits of tokens that were drawn: a temperature.
    """
    meta, tokens = answer["meta_info"], answer["output_ids"]
    logits = reference.logits([*prompt, *tokens])
    start = len(prompt) if requested.logprob_start_len < 0 else requested.logprob_start_len
    first = len(prompt) - 1
    scored = tokens or [meta["output_token_logprobs"][0][1]]
    assert meta["output_token_logprobs_length"] == len(scored)
    outputs = logits[first : first + len(scored)].double() / divisor
    inputs = logits[start:first].double()
    names = {name for name in meta if name.endswith("_logprobs")}
    kinds = ["token", *["top"] * bool(requested.top_logprobs_num)]
    kinds += ["token_ids"] * bool(requested.token_ids_logprob)
    assert names == {f"{side}_{kind}_logprobs" for side in ("input", "output") for kind in kinds}
    for side, rows, drawn in (
        ("input", inputs, prompt[start + 1 :]),
        ("output", outputs, scored),
    ):
        found = {kind: list(meta[f"{side}_{kind}_logprobs"]) for kind in kinds}
        if side == "input" and start < len(prompt):
            assert tuple(found["token"].pop(0)) == (None, prompt[start], texts(prompt[start]))
            assert all(found[kind].pop(0) is None for kind in kinds[1:])
        assert {len(values) for values in found.values()} == {len(drawn)}
        for at, token in enumerate(drawn):
            expected = torch.log_softmax(rows[at], dim=-1)
            _same([found["token"][at]], [token], expected, texts)
            if requested.top_logprobs_num:
                top = found["top"][at]
                best = expected.topk(requested.top_logprobs_num).values.tolist()
                assert [value for value, _, _ in top] == pytest.approx(best, abs=TOLERANCE)
                _same(top, [token for _, token, _ in top], expected, texts)
            if requested.token_ids_logprob:
                _same(found["token_ids"][at], requested.token_ids_logprob, expected, texts)


def _same(
    entries: Sequence[Sequence[Any]], ids: Sequence[int], expected: torch.Tensor, texts: Texts
) -> None:
    assert [(token, text) for _, token, text in entries] == [(id, texts(id)) for id in ids]
    values = [value for value, _, _ in entries]
    assert values == pytest.approx([float(expected[id]) for id in ids], abs=TOLERANCE)
