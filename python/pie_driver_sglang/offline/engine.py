"""`pie_driver_sglang.Engine`: SGLang's offline engine on this driver."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple, NoReturn, Self, TypeVar

from pie_driver_sglang import __version__, _core
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.config.thinking import think_end_of
from pie_driver_sglang.errors import ConfigError, DriverError, nearest, quoted
from pie_driver_sglang.offline.adapters import AdapterUpdate, EngineAdapters, parse_paths
from pie_driver_sglang.offline.answers import Answer
from pie_driver_sglang.offline.arguments import EngineArguments, parse_arguments
from pie_driver_sglang.offline.requests import Call, Event, OpenRequests
from pie_driver_sglang.offline.sampling import SamplingParameters, parse_sampling
from pie_driver_sglang.offline.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

_Error = TypeVar("_Error", bound=DriverError)

_WAIT_S: Final = 0.1
"""How often a start looks for new lines of the drivers' log."""

#: Arguments of SGLang's `generate` that are refused unless they are empty, and why.
REFUSED_ARGUMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "audio_data": "the offline engine takes text and tokens",
        "bootstrap_host": "prefill and decode run in one driver",
        "bootstrap_port": "prefill and decode run in one driver",
        "bootstrap_room": "prefill and decode run in one driver",
        "custom_logit_processor": "the driver samples natively",
        "data_parallel_rank": "the runtime chooses the replica",
        "disagg_prefill_dp_rank": "prefill and decode run in one driver",
        "external_trace_header": "requests are not traced",
        "image_data": "the offline engine takes text and tokens",
        "logprob_start_len": "log-probabilities are not served yet",
        "mm_hashes": "the offline engine takes text and tokens",
        "return_hidden_states": "hidden states stay in the driver",
        "return_logprob": "log-probabilities are not served yet",
        "return_routed_experts": "the driver does not return them",
        "routed_dp_rank": "the runtime chooses the replica",
        "routed_experts_start_len": "the driver does not return them",
        "session_params": "name a conversation by `session_id`",
        "token_ids_logprob": "log-probabilities are not served yet",
        "top_logprobs_num": "log-probabilities are not served yet",
        "video_data": "the offline engine takes text and tokens",
    }
)


class _Request(NamedTuple):
    """One prompt of a call."""

    tokens: Sequence[int]
    sampling: SamplingParameters
    name: str
    adapter: int | None
    """Its id; None for the model alone."""


class _Prompts(NamedTuple):
    """All prompts of a call."""

    requests: list[_Request]
    is_batch: bool
    """Whether the answer is a list."""


class Engine:
    """Generates text and tokens without a server. Use it as a context manager, or call `shutdown`.

    Example::

        with Engine(model_path="Qwen/Qwen3-0.6B") as engine:
            print(engine.generate("The capital of France is")["text"])

    Methods may be called from several threads and coroutines at once; requests of all calls run in
    one batch. A driver that dies is started again, and its requests go on where they were.

    Attributes:
        tokenizer: The model's; None with `skip_tokenizer_init`.
    """

    def __init__(
        self, *, on_start: Callable[[float, str], None] | None = None, **arguments: Any
    ) -> None:
        """Start the drivers and wait until they serve.

        Args:
            on_start: Called at least ten times a second while they load, with the seconds so far
                and a new line of their log; an empty one where there is none.
            arguments: Those of SGLang's `ServerArgs`, of which `model_path` is needed, and
                `devices`, `log_file`, `max_restarts`, `max_token_gap_ms` and `ready_timeout_s`.

        Raises:
            ConfigError: An argument is unknown, not served or wrong.
            StartError: The drivers cannot start.
        """
        parsed = _with_hint(parse_arguments, arguments)
        self._arguments: EngineArguments = parsed
        self._given = dict(arguments)
        started = time.monotonic()
        folder = parsed.tokenizer
        self.tokenizer = None if folder is None else _with_hint(ModelTokenizer, folder)
        self._runtime = self._make_runtime(parsed)
        try:
            self._wait(on_start, started)
            self._capabilities: dict[str, Any] = self._runtime.capabilities()
            self._adapters = EngineAdapters(self._runtime, parsed.max_adapters)
            for adapter in parsed.adapters:
                _with_hint(self._adapters.load, adapter)
            self._requests = OpenRequests(self._runtime)
        except BaseException:
            self._runtime.shutdown()
            raise
        self._start_s = time.monotonic() - started
        self._sessions: dict[str, int] = {}

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        rid: str | Sequence[str] | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        extra_key: str | None = None,
        lora_path: str | Sequence[str | None] | None = None,
        require_reasoning: bool = False,
        **others: Any,
    ) -> Any:
        """Generate from one prompt or several.

        Args:
            prompt: A text, or a list of texts.
            sampling_params: SGLang's parameters for all prompts, or a list with those of each.
            input_ids: Tokens instead of text, or a list of them.
            stream: Return an iterator over the answers as they grow.
            rid: The requests' names; made up where there are none.
            priority: Higher comes first, with `enable_priority_scheduling`.
            session_id: A conversation, whose pages are kept.
            extra_key: Requests with different keys share no prefix.
            lora_path: Name of the loaded adapter to use, for all prompts or a list with that of
                each; None for the model alone.
            require_reasoning: A grammar binds what comes after the model's thinking; needs
                `reasoning_parser`.
            others: Arguments of SGLang's `generate` that must be empty here.

        Returns:
            A dictionary with `text`, `output_ids` and `meta_info`; a list of them for a list of
            prompts, or if `n` is not 1; with `stream` an iterator over such dictionaries, each with
            all that its sequence has so far, and with `index` if there are several.

        Raises:
            ConfigError: An argument or a parameter is unknown, not served or wrong.
            StartError: The drivers are gone.
        """
        prompts = self._prompts(prompt, sampling_params, input_ids, rid, others, lora_path)
        extra = self._extra(priority, session_id, extra_key, require_reasoning)
        if stream:
            return self._streamed(prompts, extra)
        return self._collected(prompts, extra)

    def as_completed(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        extra_key: str | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Generate from many prompts, and yield each answer when it has ended, with its `index`.

        Raises:
            ConfigError: As :meth:`generate`; before anything is computed.
            StartError: The drivers are gone.
        """
        prompts = self._prompts(prompt, sampling_params, input_ids, None, {})
        return self._completed(prompts, self._extra(None, None, extra_key))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        rid: str | Sequence[str] | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        extra_key: str | None = None,
        lora_path: str | Sequence[str | None] | None = None,
        require_reasoning: bool = False,
        **others: Any,
    ) -> Any:
        """Do as :meth:`generate` without blocking the loop; `stream` gives an async iterator."""
        prompts = await asyncio.to_thread(
            self._prompts, prompt, sampling_params, input_ids, rid, others, lora_path
        )
        extra = self._extra(priority, session_id, extra_key, require_reasoning)
        if stream:
            return self._async_streamed(prompts, extra)
        answers = _Answers(self, prompts, streams=False)
        with self._submitted(prompts, extra) as call:
            async for event in _async_events(call):
                answers.take(event)
        return answers.result()

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: the driver serves causal language models, which have no embeddings to return.

        Raises:
            ConfigError: Always.
        """
        raise _noted(
            ConfigError(
                "`encode` is not served: the driver runs causal language models, not embedding "
                "models",
                "use SGLang's own `Engine` with `is_embedding=True`",
            )
        )

    async_encode = encode

    def load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False
    ) -> AdapterUpdate:
        """Load an adapter, which requests then name as `lora_path`; they go on meanwhile.

        Args:
            lora_name: What requests call it.
            lora_path: A folder as PEFT saves it, a safetensors file next to its
                `adapter_config.json`, or a repository in the Hugging Face cache.
            pinned: Without effect: the drivers keep every adapter of an engine in memory.

        Returns:
            Whether it was loaded, and why not.
        """
        try:
            [adapter] = parse_paths({lora_name: lora_path})
            self._adapters.load(adapter)
        except DriverError as error:
            text = "; ".join(filter(None, (str(error), error.hint)))
            return AdapterUpdate(False, text, self._adapters.paths)
        return AdapterUpdate(True, "", self._adapters.paths)

    def flush_cache(self) -> bool:
        """Empty the prefix cache. False, with nothing done, while requests run."""
        return bool(self._runtime.flush_cache())

    def get_server_info(self) -> dict[str, Any]:
        """The arguments, the driver's capabilities and the counts of the scheduler so far."""
        return {
            **self._given,
            "model_path": str(self._arguments.model),
            "version": __version__,
            "startup_time": self._start_s,
            "capabilities": dict(self._capabilities),
            "internal_states": [self._runtime.stats()],
        }

    def end_session(self, session_id: str) -> None:
        """Let the pages of a conversation go."""
        number = self._sessions.pop(session_id, None)
        if number is not None:
            self._runtime.end_session(number)

    @property
    def context_length(self) -> int:
        """Positions of a context, prompt and answer together."""
        return int(self._capabilities["max_model_len"])

    def shutdown(self) -> None:
        """Stop the drivers; requests under way end with an error. A second call does nothing."""
        self._requests.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _make_runtime(self, parsed: EngineArguments) -> Any:
        tokenizer = self.tokenizer
        keywords = dict(parsed.runtime)
        if tokenizer is not None:
            keywords["eos_token_ids"] = sorted(tokenizer.end_tokens)
            keywords["vocabulary"] = tokenizer.vocabulary()
            keywords["special_tokens"] = tokenizer.special_tokens()
        else:
            hf_config = load_hf_config(parsed.model)
            ends = hf_config.get("eos_token_id")
            listed = ends if isinstance(ends, list) else [ends]
            keywords["eos_token_ids"] = [end for end in listed if isinstance(end, int)]
        try:
            return _core.Runtime(**keywords)
        except (ValueError, OverflowError) as error:
            raise _noted(_native(error)) from error
        except TypeError as error:
            hint = "check the types of the arguments"
            raise _noted(ConfigError(str(error), hint)) from error

    def _wait(self, on_start: Callable[[float, str], None] | None, started: float) -> None:
        while not self._runtime.wait_ready(_WAIT_S):
            for line in self._runtime.log_lines() or [""]:
                if line:
                    logger.info("%s", line)
                if on_start is not None:
                    on_start(time.monotonic() - started, line)

    def _prompts(
        self,
        prompt: Any,
        sampling_params: Any,
        input_ids: Any,
        rid: Any,
        others: Mapping[str, Any],
        lora_path: Any = None,
    ) -> _Prompts:
        """Checks the arguments of a call, and tokenizes."""
        _refuse(others)
        tokens, is_batch = self._tokens(prompt, input_ids)
        count = len(tokens)
        if isinstance(sampling_params, Mapping) or sampling_params is None:
            samplings = [self._sampling(sampling_params)] * count
        else:
            samplings = [self._sampling(given) for given in sampling_params]
        names = [rid] if isinstance(rid, str) else rid or [uuid.uuid4().hex for _ in tokens]
        for what, listed in (("sampling_params", samplings), ("rid", names)):
            if len(listed) != count:
                raise _noted(
                    ConfigError(
                        f"`{what}` has {len(listed)} entries for {count} prompts",
                        "give one for each prompt, or one for all",
                    )
                )
        adapters = _with_hint(lambda given: self._adapters.numbers(given, count), lora_path)
        parts = zip(tokens, samplings, names, adapters, strict=True)
        requests = [_Request(*one) for one in parts]
        for request in requests:
            self._check_length(request)
        return _Prompts(requests, is_batch)

    def _tokens(self, prompt: Any, input_ids: Any) -> tuple[list[Sequence[int]], bool]:
        if (prompt is None) == (input_ids is None):
            raise _noted(
                ConfigError("a call needs `prompt` or `input_ids`", "give exactly one of them")
            )
        if prompt is None:
            is_batch = bool(len(input_ids)) and not _is_number(input_ids[0])
            return [list(ids) for ids in input_ids] if is_batch else [list(input_ids)], is_batch
        is_batch = not isinstance(prompt, str)
        texts = list(prompt) if is_batch else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise _noted(
                ConfigError("`prompt` is neither a text nor a list", "give tokens as `input_ids`")
            )
        if self.tokenizer is None:
            raise _noted(
                ConfigError(
                    "there is no tokenizer: `skip_tokenizer_init` is set", "give `input_ids`"
                )
            )
        return list(self.tokenizer.encode(texts)), is_batch

    def _sampling(self, given: Mapping[str, Any] | None) -> SamplingParameters:
        merged = {**self._arguments.sampling, **(given or {})}
        sampling: SamplingParameters = _with_hint(parse_sampling, merged)
        for name in ("stop", "stop_regex"):
            if getattr(sampling, name) and self.tokenizer is None:
                raise _noted(
                    ConfigError(
                        f"`{name}` needs a tokenizer, and `skip_tokenizer_init` is set",
                        "use `stop_token_ids`",
                    )
                )
        if sampling.grammar is not None and self.tokenizer is None:
            raise _noted(
                ConfigError(
                    f"`{sampling.grammar[0]}` needs a tokenizer, and `skip_tokenizer_init` is set",
                    "remove `skip_tokenizer_init`",
                )
            )
        return sampling

    def _check_length(self, request: _Request) -> None:
        count, most = len(request.tokens), self.context_length
        if not count:
            raise _noted(ConfigError("a prompt has no tokens", "give it a token or more"))
        if count >= most:
            raise _noted(
                ConfigError(
                    f"a prompt has {count:,} tokens, and a context of this model {most:,}, "
                    "the answer included",
                    "shorten the prompt",
                )
            )

    def _extra(
        self,
        priority: int | None,
        session_id: str | None,
        extra_key: str | None,
        require_reasoning: bool = False,
    ) -> dict[str, Any]:
        session = None
        if session_id is not None:
            session = self._sessions.setdefault(session_id, len(self._sessions) + 1)
        speculates = self._arguments.speculates
        named = {"priority": priority, "session": session, "namespace": extra_key}
        after = self._end_of_thinking() if require_reasoning else []
        return {**named, "speculate": speculates, "grammar_after": after}

    def _end_of_thinking(self) -> list[int]:
        """The tokens that end the model's thinking."""
        parser = self._arguments.reasoning_parser
        if parser is None or self.tokenizer is None:
            raise _noted(
                ConfigError(
                    "`require_reasoning` is set, but how the model ends its thinking is not known",
                    'name its parser, as `Engine(reasoning_parser="qwen3")`, or remove it',
                )
            )
        return list(self.tokenizer.encode_plain(think_end_of(parser)))

    def _submitted(
        self, prompts: _Prompts, extra: Mapping[str, Any], *, streams: bool = False
    ) -> Call:
        call = Call(self._requests, streams=streams)
        try:
            for index, request in enumerate(prompts.requests):
                room = self.context_length - len(request.tokens)
                parameters = {**request.sampling.submitted(room), **extra}
                if request.adapter is not None:
                    parameters["adapter_id"] = request.adapter
                call.submit(index, request.tokens, request.sampling.n, parameters)
        except (ValueError, OverflowError) as error:
            call.abort()
            raise _noted(_native(error)) from error
        except BaseException:
            call.abort()
            raise
        return call

    def _collected(self, prompts: _Prompts, extra: Mapping[str, Any]) -> Any:
        answers = _Answers(self, prompts, streams=False)
        with self._submitted(prompts, extra) as call:
            for event in call.events():
                answers.take(event)
        return answers.result()

    def _completed(self, prompts: _Prompts, extra: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        answers = _Answers(self, prompts, streams=False)
        with self._submitted(prompts, extra) as call:
            for event in call.events():
                index = answers.take(event)
                if event.output.finish_reason is not None:
                    yield {**answers.shown(index), "index": index}

    def _streamed(self, prompts: _Prompts, extra: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        answers = _Answers(self, prompts, streams=True)
        with self._submitted(prompts, extra, streams=True) as call:
            for event in call.events():
                yield answers.shown(answers.take(event))

    async def _async_streamed(
        self, prompts: _Prompts, extra: Mapping[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        answers = _Answers(self, prompts, streams=True)
        with self._submitted(prompts, extra, streams=True) as call:
            async for event in _async_events(call):
                yield answers.shown(answers.take(event))


class _Answers:
    """All sequences of a call, those of a prompt side by side."""

    def __init__(self, engine: Engine, prompts: _Prompts, *, streams: bool) -> None:
        self._is_list = prompts.is_batch or any(r.sampling.n > 1 for r in prompts.requests)
        self._first: list[int] = []
        self._answers: list[Answer] = []
        for request in prompts.requests:
            self._first.append(len(self._answers))
            parts = (request.tokens, request.sampling, engine.tokenizer, streams)
            self._answers += [Answer(request.name, *parts) for _ in range(request.sampling.n)]

    def take(self, event: Event) -> int:
        """Adds an output, and returns the number of its sequence."""
        index: int = self._first[event.request] + event.output.sample
        answer = self._answers[index]
        answer.take(event.output)
        if answer.is_over:
            answer.finish_text()
        return index

    def shown(self, index: int) -> dict[str, Any]:
        """A sequence as far as it has come."""
        found = self._answers[index].as_dict()
        return {**found, "index": index} if self._is_list else found

    def result(self) -> Any:
        """All answers, as a list where several were asked for."""
        found = [answer.as_dict() for answer in self._answers]
        return found if self._is_list else found[0]


async def _async_events(call: Call) -> AsyncIterator[Event]:
    """The events of a call, waited for by the running loop."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        # A loop that is closed waits for nothing any more.
        if not loop.is_closed():
            loop.call_soon_threadsafe(arrived.set)

    call.notify(wake)
    while not call.is_over:
        await arrived.wait()
        arrived.clear()
        for event in call.ready():
            yield event


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in REFUSED_ARGUMENTS:
            raise _noted(
                ConfigError(
                    f"`generate` has no argument {quoted(name)}", nearest(name, REFUSED_ARGUMENTS)
                )
            )
        if value is not None and value is not False and value != 0:
            raise _noted(
                ConfigError(
                    f"`{name}` is not served: {REFUSED_ARGUMENTS[name]}", f"remove `{name}`"
                )
            )


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__")


def _native(error: Exception) -> ConfigError:
    """What the native runtime refuses, as an error of this package."""
    message, _, hint = str(error).partition("\n\nhint: ")
    return ConfigError(message, hint)


def _with_hint(function: Callable[..., Any], argument: Any) -> Any:
    try:
        return function(argument)
    except DriverError as error:
        raise _noted(error) from None


def _noted(error: _Error) -> _Error:
    """With the hint where a traceback shows it."""
    if error.hint:
        error.add_note(f"hint: {error.hint}")
    return error
