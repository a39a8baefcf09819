"""Outputs of requests, in the form of SGLang's `Engine.generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer, StopFilter
from pie_driver_sglang.frontends.offline.hidden_states import OutputHiddenStates
from pie_driver_sglang.frontends.offline.logprobs import LogprobRequest, OutputLogprobs
from pie_driver_sglang.frontends.offline.prompts import CallPrompt
from pie_driver_sglang.frontends.offline.requests import OutputEvent
from pie_driver_sglang.frontends.offline.sampling import SamplingParameters


class SequenceOutput:
    """One output sequence of a request, as far as it is generated.

    A streamed text is detokenized incrementally, any other once at the end.
    """

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        sampling: SamplingParameters,
        tokenizer: ModelTokenizer | None,
        streams: bool,
        logprobs: LogprobRequest | None = None,
        states: OutputHiddenStates | None = None,
    ) -> None:
        """An empty sequence.

        Args:
            name: SGLang's `rid`.
            prompt: The prompt's tokens.
            sampling: The request's sampling parameters.
            tokenizer: None for an output with tokens only.
            streams: Whether to detokenize incrementally.
            logprobs: The requested log-probabilities.
            states: For the requested hidden states.
        """
        self._name = name
        self._prompt = prompt
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._started = time.perf_counter()
        self._seconds = 0.0
        self._tokens: list[int] = []
        self._text = ""
        self._cached = 0
        self._finish: dict[str, Any] | None = None
        skip = sampling.skip_special_tokens
        self._stream = tokenizer.stream(prompt, skip) if tokenizer and streams else None
        hidden = 0 if states is None else states.hidden_size
        self._logprobs = logprobs and OutputLogprobs(logprobs, prompt, tokenizer, hidden)
        self._states = states
        self._stops = StopFilter(sampling.trimmed, keep=sampling.no_stop_trim)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self._finish is not None

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens so far."""
        return self._tokens

    def add(self, output: Any) -> None:
        """Append a `_core.Output`."""
        new = output.token_ids
        self._tokens += new
        self._cached = output.cached_tokens
        if self._logprobs is not None:
            self._logprobs.add(output)
        if self._states is not None:
            self._states.add(output)
        if output.finish_reason is not None:
            self._finish = _finish_reason(output, self._sampling, len(self._tokens))
            self._seconds = time.perf_counter() - self._started
        if self._stream is not None:
            self._extend(self._stream, self._text_tokens(new, output))

    def finish_text(self) -> None:
        """Detokenize a sequence that is not streamed."""
        if self._tokenizer is None or self._stream is not None:
            return
        trim = self._ends_by_token and not self._sampling.no_stop_trim
        tokens = self._tokens[:-1] if trim else self._tokens
        stream = self._tokenizer.stream(self._prompt, self._sampling.skip_special_tokens)
        text = self._stops.push(stream.push(tokens, is_last=True))
        self._text = text + self._stops.finish(self._matched_text)

    def as_dict(self) -> dict[str, Any]:
        """The dictionary that SGLang's `Engine.generate` returns for a sequence."""
        found: dict[str, Any] = {} if self._tokenizer is None else {"text": self._text}
        found["output_ids"] = list(self._tokens)
        found["meta_info"] = {
            "id": self._name,
            "finish_reason": self._finish,
            "prompt_tokens": len(self._prompt),
            "completion_tokens": len(self._tokens),
            "cached_tokens": self._cached,
        }
        if self._logprobs is not None:
            found["meta_info"] |= self._logprobs.meta_info()
        if self._states is not None:
            found["meta_info"] |= self._states.meta_info()
        if self._finish is not None:
            found["meta_info"]["e2e_latency"] = self._seconds
        return found

    def _text_tokens(self, new: Sequence[int], output: Any) -> Sequence[int]:
        """The tokens that are detokenized, without a stop token."""
        is_stop = output.stop_token is not None and not self._sampling.no_stop_trim
        return new[:-1] if is_stop else new

    def _extend(self, stream: Any, new: Sequence[int]) -> None:
        self._text += self._stops.push(stream.push(new, is_last=self.is_finished))
        if self.is_finished:
            self._text += self._stops.finish(self._matched_text)

    @property
    def _matched_text(self) -> str | None:
        matched = self._finish.get("matched") if self._finish else None
        return matched if isinstance(matched, str) else None

    @property
    def _ends_by_token(self) -> bool:
        return self._finish is not None and isinstance(self._finish.get("matched"), int)


class CallOutputs:
    """All output sequences of a call, those of a prompt in a row."""

    def __init__(self, tokenizer: ModelTokenizer | None, is_list: bool, *, streams: bool) -> None:
        """Outputs of no request yet.

        Args:
            tokenizer: None for outputs with tokens only.
            is_list: Whether the result is a list.
            streams: Whether to detokenize incrementally.
        """
        self._tokenizer = tokenizer
        self._is_list = is_list
        self._streams = streams
        self._first: list[int] = []
        self._sequences: list[SequenceOutput] = []

    def add(self, prompt: CallPrompt, hidden_size: int) -> None:
        """Add the sequences of the next request, whose latency counts from now.

        Args:
            prompt: The request.
            hidden_size: Numbers of a hidden state.
        """
        self._first.append(len(self._sequences))
        wanted, logprobs = prompt.hidden_states, prompt.logprobs
        parts = (prompt.name, prompt.tokens, prompt.sampling, self._tokenizer, self._streams)
        for _ in range(prompt.sampling.n):
            states = OutputHiddenStates(wanted, logprobs, hidden_size) if wanted else None
            self._sequences.append(SequenceOutput(*parts, logprobs, states))

    def append(self, event: OutputEvent) -> int:
        """Append an output, and return the index of its sequence."""
        index: int = self._first[event.request] + event.output.sample
        sequence = self._sequences[index]
        sequence.add(event.output)
        if sequence.is_finished:
            sequence.finish_text()
        return index

    def partial(self, index: int) -> dict[str, Any]:
        """Return a sequence as far as it is generated."""
        found = self._sequences[index].as_dict()
        return {**found, "index": index} if self._is_list else found

    def result(self) -> Any:
        """Return all sequences, or the only one."""
        found = [sequence.as_dict() for sequence in self._sequences]
        return found if self._is_list else found[0]


def _finish_reason(output: Any, sampling: SamplingParameters, count: int) -> dict[str, Any]:
    """SGLang's `finish_reason`."""
    kind = output.finish_reason
    if kind == "length":
        return {"type": "length", "length": count}
    if kind == "stop":
        matched = output.stop_token
        if output.stop_string is not None:
            matched = sampling.stop[output.stop_string]
        if output.stop_regex is not None:
            matched = sampling.stop_regex[output.stop_regex]
        return {"type": "stop", "matched": matched}
    message = {"abort": "it was aborted", "deadline": "its time was over"}.get(kind)
    return {"type": "abort", "message": output.error or message or str(kind)}
