"""`Engine.score`: probabilities of label tokens, or the logits of a classification head."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import ConfigError, invalid_value
from pie_driver_sglang.frontends.offline.error_notes import refuse_argument, with_note

#: Arguments of SGLang's `score` that are not served, which must be None or False, and the reason.
REFUSED_SCORE_ARGUMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "embed_override_token_id": "the driver computes embeddings itself",
        "query_embed_overrides": "the driver computes embeddings itself",
        "item_embed_overrides": "the driver computes embeddings itself",
        "return_pooled_hidden_states": "the driver returns the head's output",
    }
)


_ONE_TOKEN: Final[Mapping[str, Any]] = MappingProxyType(
    {"max_new_tokens": 1, "min_new_tokens": 0, "n": 1, "temperature": 1.0, "ignore_eos": True}
)
"""Sampling parameters of a scored prompt, which `preferred_sampling_params` must not replace."""


class ScoreResult(NamedTuple):
    """What :meth:`ScoreMethods.score` returns: the fields of SGLang's `ScoreResult`."""

    scores: list[list[float]]
    """For each item one score for each label, or the logits of the classification head."""
    prompt_tokens: int = 0
    """Tokens of all prompts."""
    pooled_hidden_states: None = None
    """Not served."""


class ScoreMethods:
    """The scoring methods of an engine, by its `generate` and `encode`."""

    _capabilities: dict[str, Any]
    generate: Any
    encode: Any

    def score(
        self,
        query: str | Sequence[int] | None = None,
        items: str | Sequence[str] | Sequence[Sequence[int]] | None = None,
        label_token_ids: Sequence[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        **others: Any,
    ) -> ScoreResult:
        """Score items against a query.

        A model that generates text returns the probability of each label as the token after query
        and item. A model with a classification or reward head returns the head's logits.

        Args:
            query: A text, or token ids.
            items: A text or a list of texts; lists of token ids if `query` is token ids.
            label_token_ids: Tokens to score; required for a model that generates text.
            apply_softmax: Normalize the scores of an item over its labels or classes.
            item_first: Put the item before the query.
            others: Arguments of SGLang's `score` that must be None or False here.

        Returns:
            The scores, one list for each item, and the number of prompt tokens.

        Raises:
            ConfigError: An argument is unknown, missing, unsupported or invalid.
            StartError: No driver is left.
        """
        for name, value in others.items():
            refuse_argument("score", name, value, REFUSED_SCORE_ARGUMENTS)
        prompts = _prompts(query, items, item_first)
        encodes = int(self._capabilities["embedding_size"]) > 0
        vocab_size = int(self._capabilities["vocab_size"])
        labels = None if encodes else _labels(label_token_ids, vocab_size)
        if not prompts:
            return ScoreResult([])
        key = "prompt" if isinstance(prompts[0], str) else "input_ids"
        if labels is None:
            answers = self.encode(**{key: prompts})
            scores = [list(answer["embedding"]) for answer in answers]
            if apply_softmax:
                scores = [_softmax(logits) for logits in scores]
        else:
            answers = self.generate(
                **{key: prompts},
                sampling_params=_ONE_TOKEN,
                return_logprob=True,
                token_ids_logprob=labels,
            )
            scores = [_label_scores(answer, apply_softmax) for answer in answers]
        return ScoreResult(scores, sum(answer["meta_info"]["prompt_tokens"] for answer in answers))

    async def async_score(self, *arguments: Any, **named: Any) -> ScoreResult:
        """Do as :meth:`score` without blocking the event loop."""
        return await asyncio.to_thread(self.score, *arguments, **named)


def _prompts(query: Any, items: Any, item_first: bool) -> list[Any]:
    """One prompt for each item."""
    if items is None:
        raise with_note(ConfigError("`items` is missing", "give a text, or a list of items"))
    listed = [items] if isinstance(items, str) else list(items)
    if isinstance(query, str):
        expected = "a list of texts, as `query` is a text"
        is_right = all(isinstance(item, str) for item in listed)
    elif isinstance(query, list | tuple):
        expected = "lists of token ids, as `query` is token ids"
        is_right = all(isinstance(item, list | tuple) for item in listed)
    else:
        raise with_note(invalid_value("`query`", query, "a text or a list of token ids"))
    if not is_right:
        raise with_note(invalid_value("`items`", items, expected))
    if isinstance(query, str):
        return [item + query if item_first else query + item for item in listed]
    return [[*item, *query] if item_first else [*query, *item] for item in listed]


def _labels(given: Sequence[int] | None, vocab_size: int) -> list[int]:
    if given is None:
        raise with_note(
            ConfigError(
                "`label_token_ids` is missing, and this model generates text",
                "give the ids of the tokens whose probabilities you want",
            )
        )
    expected = f"token ids from 0 to {vocab_size - 1:,}, at least one"
    if not isinstance(given, list | tuple) or not given:
        raise with_note(invalid_value("`label_token_ids`", given, expected))
    for token in given:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise with_note(invalid_value("`label_token_ids`", token, expected))
    return list(given)


def _label_scores(answer: Mapping[str, Any], apply_softmax: bool) -> list[float]:
    reason = answer["meta_info"]["finish_reason"]
    if reason["type"] == "abort":
        raise with_note(ConfigError(reason["message"], "shorten the item or the query"))
    [labels] = answer["meta_info"]["output_token_ids_logprobs"]
    logprobs = [logprob for logprob, _, _ in labels]
    return _softmax(logprobs) if apply_softmax else [math.exp(each) for each in logprobs]


def _softmax(values: Sequence[float]) -> list[float]:
    largest = max(values)
    weights = [math.exp(value - largest) for value in values]
    return [weight / sum(weights) for weight in weights]
