"""The prompts of a call: validated and tokenized."""

from __future__ import annotations

import operator
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.frontends.common.lora_adapters import EngineAdapters, require_count
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer
from pie_driver_sglang.frontends.offline.generate_arguments import (
    parse_generate_arguments,
    parse_processors,
)
from pie_driver_sglang.frontends.offline.hidden_states import Wanted, parse_hidden_states
from pie_driver_sglang.frontends.offline.images import (
    IMAGES,
    ImageProcessor,
    PromptImage,
    parse_images,
)
from pie_driver_sglang.frontends.offline.input_embeds import EMBEDS, parse_input_embeds
from pie_driver_sglang.frontends.offline.logprobs import LogprobRequest
from pie_driver_sglang.frontends.offline.requests import batched_by_size
from pie_driver_sglang.frontends.offline.sampling import SamplingParameters, parse_sampling

BATCH_CHARACTERS: Final = 1 << 16
"""Characters that are tokenized at once. The first requests run while others are tokenized."""


class CallPrompt(NamedTuple):
    """One prompt of a call."""

    text: str
    """Empty for `input_ids`."""
    tokens: Sequence[int]
    """Empty until a text is tokenized."""
    sampling: SamplingParameters
    name: str
    adapter: int | None
    """Its adapter id; None for the base model."""
    logprobs: LogprobRequest | None
    processor: str | None = None
    """Its custom logit processor."""
    hidden_states: Wanted = False
    """Which hidden states it requests."""
    sources: Sequence[Any] = ()
    """Its images, as they were given."""
    images: Sequence[PromptImage] = ()
    """Its images, once it is tokenized."""
    embeds: bytes | None = None
    """Its embeddings, float32 ``[tokens, embed_size]``, for a prompt without tokens."""


class CallPrompts(NamedTuple):
    """All prompts of a call."""

    prompts: list[CallPrompt]
    is_list: bool
    """Whether the result is a list."""
    has_texts: bool


class PromptParser:
    """Parses the prompts of calls, for one model."""

    def __init__(
        self,
        tokenizer: ModelTokenizer | None,
        sampling: Mapping[str, Any],
        adapters: EngineAdapters,
        context_length: int,
        images: ImageProcessor | None = None,
        embed_size: int = 0,
    ) -> None:
        """Parse for a model.

        Args:
            tokenizer: The model's; None where prompts are tokens.
            sampling: Default sampling parameters.
            adapters: Loaded adapters by name.
            context_length: Tokens of prompt and output together.
            images: Reads images; None for a model of text.
            embed_size: Numbers of an embedding of `input_embeds`; 0 where none are taken.
        """
        self._tokenizer = tokenizer
        self._defaults = sampling
        self._adapters = adapters
        self._context_length = context_length
        self._images = images
        self._embed_size = embed_size

    def read(
        self,
        prompt: Any,
        sampling_params: Any,
        input_ids: Any,
        rid: Any,
        others: Mapping[str, Any],
        lora_path: Any = None,
    ) -> CallPrompts:
        """Validate the arguments of a call; texts are not tokenized yet.

        Args:
            prompt: A text or a list of texts, or None.
            sampling_params: Parameters for all prompts, or a list with those of each.
            input_ids: Tokens or a list of them, or None.
            rid: A name or a list of names, or None.
            others: Further arguments of SGLang's `generate`, by name.
            lora_path: Name of an adapter for all prompts, a list of names, or None.

        Raises:
            ConfigError: One of them is wrong, does not fit the prompts, or names no adapter.
        """
        embeds = parse_input_embeds(others, self._embed_size)
        if embeds is None:
            texts, tokens, is_batch = self._inputs(prompt, input_ids)
        else:
            texts, tokens, is_batch = self._of_embeds(prompt, input_ids, embeds)
        count = len(tokens)
        logprobs = parse_generate_arguments(others, count)
        processors = parse_processors(others, count)
        states = parse_hidden_states(others, count)
        images = parse_images(others, count, is_batch=is_batch)
        if any(images) and embeds is not None:
            raise ConfigError(f"`{IMAGES}` and `{EMBEDS}` are given", "give one of them")
        if any(images) and self._images is None:
            raise ConfigError(
                f"`{IMAGES}` is given, and this model takes text and tokens",
                f"remove `{IMAGES}`, or use a model with images (Qwen2-VL, Qwen2.5-VL, Qwen3-VL)",
            )
        if isinstance(sampling_params, Mapping) or sampling_params is None:
            samplings = [self._sampling(sampling_params)] * count
        else:
            given = _listed("sampling_params", sampling_params, "a dictionary or a list of them")
            samplings = [self._sampling(one) for one in given]
        names = _names(rid, count)
        for what, listed in (("sampling_params", samplings), ("rid", names)):
            require_count(what, listed, count)
        adapters = self._adapters.adapter_ids(lora_path, count)
        options = (logprobs, processors, states, images)
        parts = zip(texts, tokens, samplings, names, adapters, *options, strict=True)
        prompts = [CallPrompt(*one) for one in parts]
        if embeds is not None:
            pairs = zip(prompts, embeds[0], strict=True)
            prompts = [one._replace(embeds=matrix.tobytes()) for one, matrix in pairs]
        has_texts = prompt is not None
        if not has_texts:
            for one in prompts:
                self._check_length(one)
        is_list = is_batch or any(sampling.n > 1 for sampling in samplings)
        return CallPrompts(prompts, is_list, has_texts)

    def read_pairs(self, pairs: Any) -> CallPrompts:
        """Validate and tokenize pairs of texts, joined as the tokenizer joins them.

        Raises:
            ConfigError: They are not such pairs, or one of them is too long for the model.
        """
        if self._tokenizer is None:
            raise ConfigError(
                "there is no tokenizer: `skip_tokenizer_init` is set", "call `encode` with tokens"
            )
        listed = [
            _listed("an entry of `prompt`", pair, _PAIRS)
            for pair in _listed("prompt", pairs, _PAIRS)
        ]
        for pair in listed:
            if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise _wrong("an entry of `prompt`", pair, _PAIRS)
            for text in pair:
                _check_encodable(text)
        found = self._tokenizer.encode_pairs([(first, second) for first, second in listed])
        sampling, names = self._sampling(None), _names(None, len(found))
        parts = zip(found, names, strict=True)
        prompts = [CallPrompt("", tokens, sampling, name, None, None) for tokens, name in parts]
        for prompt in prompts:
            self._check_length(prompt)
        return CallPrompts(prompts, is_list=True, has_texts=False)

    def tokenized(self, call: CallPrompts) -> Iterator[list[CallPrompt]]:
        """Yield the prompts with their tokens; texts in batches.

        Raises:
            ConfigError: A text is too long for the model, or has no tokens.
        """
        if self._tokenizer is None or not call.has_texts:
            yield [self._with_images(prompt) for prompt in call.prompts]
            return
        for part in batched_by_size(
            call.prompts, lambda prompt: len(prompt.text), BATCH_CHARACTERS
        ):
            found = self._tokenizer.encode([prompt.text for prompt in part])
            pairs = zip(part, found, strict=True)
            part = [self._with_images(prompt._replace(tokens=tokens)) for prompt, tokens in pairs]
            for prompt in part:
                self._check_length(prompt)
            yield part

    def _with_images(self, prompt: CallPrompt) -> CallPrompt:
        if self._images is None or not prompt.sources:
            return prompt
        tokens, images = self._images.insert(prompt.tokens, prompt.sources)
        found = prompt._replace(tokens=tokens, images=images)
        self._check_length(found)
        return found

    def _of_embeds(
        self, prompt: Any, input_ids: Any, embeds: tuple[list[Any], bool]
    ) -> tuple[list[str], list[Sequence[int]], bool]:
        """As `_inputs`, of `input_embeds`; the tokens are placeholders."""
        if prompt is not None or input_ids is not None:
            other = "prompt" if input_ids is None else "input_ids"
            raise ConfigError(f"`{other}` and `{EMBEDS}` are given", "give exactly one of them")
        matrices, is_batch = embeds
        return [""] * len(matrices), [[0] * len(each) for each in matrices], is_batch

    def _inputs(self, prompt: Any, input_ids: Any) -> tuple[list[str], list[Sequence[int]], bool]:
        """The texts or the tokens of a call, and whether it is a batch."""
        if (prompt is None) == (input_ids is None):
            raise ConfigError("a call needs `prompt` or `input_ids`", "give exactly one of them")
        if prompt is None:
            ids = _listed("input_ids", input_ids, _TOKENS)
            is_batch = bool(ids) and not _is_number(ids[0])
            tokens: list[Sequence[int]] = [
                _token_ids(each) for each in (ids if is_batch else [ids])
            ]
            return [""] * len(tokens), tokens, is_batch
        is_batch = not isinstance(prompt, str)
        texts = _listed("prompt", prompt, _TEXTS) if is_batch else [prompt]
        for text in texts:
            if not isinstance(text, str):
                raise _wrong("an entry of `prompt`", text, _TEXTS, "give tokens as `input_ids`")
            _check_encodable(text)
        if self._tokenizer is None:
            raise ConfigError(
                "there is no tokenizer: `skip_tokenizer_init` is set", "give `input_ids`"
            )
        return texts, [()] * len(texts), is_batch

    def _sampling(self, given: Mapping[str, Any] | None) -> SamplingParameters:
        if given is not None and not isinstance(given, Mapping):
            raise _wrong("`sampling_params`", given, "a dictionary or a list of them")
        sampling = parse_sampling({**self._defaults, **(given or {})})
        for name in ("stop", "stop_regex"):
            if getattr(sampling, name) and self._tokenizer is None:
                raise ConfigError(
                    f"`{name}` needs a tokenizer, and `skip_tokenizer_init` is set",
                    "use `stop_token_ids`",
                )
        if sampling.grammar is not None and self._tokenizer is None:
            raise ConfigError(
                f"`{sampling.grammar[0]}` needs a tokenizer, and `skip_tokenizer_init` is set",
                "remove `skip_tokenizer_init`",
            )
        return sampling

    def _check_length(self, prompt: CallPrompt) -> None:
        count, most = len(prompt.tokens), self._context_length
        if not count:
            raise ConfigError("a prompt has no tokens", "give it a token or more")
        if count >= most:
            raise ConfigError(
                f"a prompt has {count:,} tokens, and a context of this model {most:,}, "
                "the answer included",
                "shorten the prompt",
            )


_TOKENS: Final = "a list of token ids, or a list of such lists"
_TEXTS: Final = "a text or a list of texts"
_PAIRS: Final = "a list of pairs of texts"
_MOST_TOKEN: Final = 2**32 - 1
_NAMES: Final = "a name or a list of names"


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__")


def _listed(name: str, value: Any, expected: str) -> list[Any]:
    """The entries of a list, a tuple or an array."""
    is_other = isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__")
    try:
        if not is_other:
            return list(value)
    except TypeError:  # An array of no dimension.
        pass
    raise _wrong(f"`{name}`", value, expected)


def _token_ids(given: Any) -> list[int]:
    """The ids of one prompt; the scheduler checks them against the vocabulary."""
    ids = _listed("input_ids", given, _TOKENS)
    if set(map(type, ids)) - {int}:
        for one in ids:
            if not _is_number(one):
                raise _wrong("an entry of `input_ids`", one, _TOKENS)
        ids = [operator.index(one) for one in ids]
    if ids and not 0 <= min(ids) <= max(ids) <= _MOST_TOKEN:
        outside = next(one for one in ids if not 0 <= one <= _MOST_TOKEN)
        raise _wrong("an entry of `input_ids`", outside, f"token ids from 0 to {_MOST_TOKEN}")
    return ids


def _names(rid: Any, count: int) -> list[str]:
    """The requests' names: `rid`, for several prompts with their numbers, or random ones."""
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        # As SGLang.
        return [rid] if count == 1 else [f"{rid}_{number}" for number in range(count)]
    names = _listed("rid", rid, _NAMES)
    for name in names:
        if not isinstance(name, str):
            raise _wrong("an entry of `rid`", name, _NAMES)
    return names


def _check_encodable(text: str) -> None:
    """Reject a text with lone surrogates, which the tokenizer cannot encode."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise _wrong(
            "a character of `prompt`", found, "a text", "decode bytes with `errors='replace'`"
        ) from None


def _wrong(what: str, value: Any, expected: str, hint: str = "") -> ConfigError:
    return ConfigError(
        f"{what} is {quoted(value)}, expected {expected}", hint or f"give {expected}"
    )
