"""Penalties, biases and minimum lengths of requests, by the wire extension."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pie_driver_sglang._core import Extension


class ExtensionParams(NamedTuple):
    """Parameters of one request, under SGLang's names."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0

    def extension(self, prompt: int, history: Sequence[int] = (), **more: Any) -> Extension:
        """The extension of a sequence with a prompt of so many tokens."""
        return Extension(
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=list(self.logit_bias),
            suppressed=list(self.stop_token_ids),
            suppressed_until=prompt + self.min_new_tokens,
            counted_from=prompt,
            history=list(history),
            **more,
        )

    def adjusted(self, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """Token by token what SGLang makes of the logits after this output."""
        logits = logits.clone()
        for token, count in Counter(output).items():
            value = float(logits[token]) - self.frequency_penalty * count - self.presence_penalty
            scale = self.repetition_penalty
            logits[token] = value * scale if value < 0 else value / scale
        if len(output) < self.min_new_tokens:
            logits[list(self.stop_token_ids)] = -torch.inf
        for token, value in self.logit_bias:
            logits[token] += value
        return logits


PENALTIES = {
    "frequency": ExtensionParams(frequency_penalty=1.5),
    "presence": ExtensionParams(presence_penalty=1.9),
    "negative": ExtensionParams(frequency_penalty=-0.7, presence_penalty=-0.5),
    "repetition": ExtensionParams(repetition_penalty=1.8),
    "encouraged": ExtensionParams(repetition_penalty=0.6),
    "bias": ExtensionParams(logit_bias=((7, 3.0), (8, 2.5), (11, -100.0), (100, 1.0))),
    "all": ExtensionParams(0.4, 0.3, 1.2, ((9, 1.0), (3, -2.0)), (2, 5), 4),
}
