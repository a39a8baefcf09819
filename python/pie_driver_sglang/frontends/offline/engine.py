"""`pie_driver_sglang.Engine`: SGLang's offline engine on this driver."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, Self

from pie_driver_sglang import __version__, _core
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.config.reasoning_parsers import reasoning_end
from pie_driver_sglang.errors import ConfigError, DriverError, invalid_value
from pie_driver_sglang.frontends.common.arguments import EngineArguments, parse_arguments
from pie_driver_sglang.frontends.common.control_socket import ControlSocket
from pie_driver_sglang.frontends.common.lora_adapters import EngineAdapters
from pie_driver_sglang.frontends.common.model_updates import ModelUpdates
from pie_driver_sglang.frontends.common.profiles import Profiles
from pie_driver_sglang.frontends.common.tokenizer import (
    ModelTokenizer,
    TokenizerManager,
    configured_ends,
)
from pie_driver_sglang.frontends.offline.adapters import AdapterMethods
from pie_driver_sglang.frontends.offline.embeddings import EmbeddingCalls
from pie_driver_sglang.frontends.offline.error_notes import config_error, with_hint, with_note
from pie_driver_sglang.frontends.offline.images import ImageProcessor
from pie_driver_sglang.frontends.offline.outputs import CallOutputs
from pie_driver_sglang.frontends.offline.processes import ProcessMethods
from pie_driver_sglang.frontends.offline.profiling import ProfileMethods
from pie_driver_sglang.frontends.offline.prompts import CallPrompts, PromptParser
from pie_driver_sglang.frontends.offline.requests import (
    Call,
    NewRequest,
    OpenRequests,
    wait_ready,
)
from pie_driver_sglang.frontends.offline.scoring import ScoreMethods
from pie_driver_sglang.frontends.offline.unsupported import UnsupportedMethods
from pie_driver_sglang.frontends.offline.weights import WeightMethods
from pie_driver_sglang.observability import batch_log, start_spans
from pie_driver_sglang.observability.active import ActiveFile

MAX_STEP_MS: Final = 2000.0
"""Longest step while nothing streams: no interactive client waits for it."""


class _Closes(Protocol):
    """A part of an engine."""

    def close(self) -> None:
        """End it; in a fork of the process, do nothing to that of its parent."""


class Engine(
    EmbeddingCalls,
    ScoreMethods,
    AdapterMethods,
    WeightMethods,
    ProfileMethods,
    ProcessMethods,
    UnsupportedMethods,
):
    """Generates text and tokens, or returns embeddings, without a server.

    Use it as a context manager, or call `shutdown`.

    Example::

        with Engine(model_path="Qwen/Qwen3-0.6B") as engine:
            print(engine.generate("The capital of France is")["text"])

    Methods may be called from several threads and coroutines at once; requests of all calls run in
    one batch. A driver that crashes is restarted, and its requests continue. An engine without
    references is shut down, and so is every engine at the end of the process. A fork of the process
    cannot use it.

    Attributes:
        tokenizer: The model's tokenizer; None with `skip_tokenizer_init`.
        tokenizer_manager: Has it as its `tokenizer`, as in SGLang.
    """

    def __init__(
        self, *, on_start: Callable[[float, str], None] | None = None, **arguments: Any
    ) -> None:
        """Start the drivers, and wait until they are ready.

        Args:
            on_start: Called at least ten times a second while they load, with the elapsed seconds
                and a new line of their log, or an empty string.
            arguments: Arguments of SGLang's `ServerArgs`, of which `model_path` is required, and
                of this engine (docs/engine.md lists both). With `engine="vllm"` vLLM runs the
                model, and arguments may have vLLM's names (docs/vllm.md).

        Raises:
            ConfigError: An argument is unknown, unsupported or invalid.
            StartError: A driver does not start.
        """
        parsed = with_hint(parse_arguments, arguments)
        with_hint(parsed.check_devices)
        self._arguments: EngineArguments = parsed
        self._given = dict(arguments)
        self._started_at = started = time.monotonic()
        folder = parsed.tokenizer
        self.tokenizer = None if folder is None else with_hint(ModelTokenizer, folder)
        self.tokenizer_manager = TokenizerManager(self.tokenizer)
        active, socket = ActiveFile(), ControlSocket(parsed.engine)
        runtime = self._make_runtime(parsed, active, socket)
        try:
            wait_ready(runtime, on_start, started)
            self._capabilities: dict[str, Any] = runtime.capabilities()
            self._adapters = EngineAdapters(runtime, socket, parsed.max_adapters, parsed.engine)
            for adapter in parsed.adapters:
                with_hint(self._adapters.load, adapter)
            self._prompts = PromptParser(
                self.tokenizer,
                parsed.sampling,
                self._adapters,
                self.context_length,
                self._image_processor(),
                int(self._capabilities["embed_size"]),
            )
            log = batch_log.start_batch_log(
                runtime,
                active.read(),
                batch_log.line_writer(parsed.runtime["options"].get("log_level")),
                interval=parsed.decode_log_interval,
                device=parsed.runtime["devices"][0],
                speculates=parsed.speculates,
            )
            requests, folder = OpenRequests(runtime), parsed.model
            self._updates = ModelUpdates(runtime, socket, folder, on_unavailable=requests.refuse)
            self._profiles = Profiles(runtime, socket)
            first: list[_Closes] = [self._profiles, *([] if log is None else [log])]
            self._attach(runtime, requests, active, first, [socket, self._adapters])
        except BaseException:
            runtime.shutdown()
            raise
        self._start_s = time.monotonic() - started

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
            sampling_params: SGLang's sampling parameters for all prompts, or a list with one
                dictionary for each prompt.
            input_ids: Token ids in place of `prompt`, or a list of such lists.
            stream: Return an iterator over the growing outputs.
            rid: Id of the request, or a list of ids; generated if None.
            priority: With `enable_priority_scheduling`, higher values are scheduled first.
            session_id: Id of a conversation, whose KV pages are kept until `end_session`.
            extra_key: Namespace of the prefix cache: requests with different keys share no prefix.
            lora_path: Name of a loaded adapter for all prompts, or a list with one for each prompt;
                None for the base model.
            require_reasoning: Apply the grammar only after the reasoning section; needs
                `reasoning_parser`.
            others: Further arguments of SGLang's `generate`, each for all prompts or a list with
                one value for each. Log-probabilities: `return_logprob`, `logprob_start_len`,
                `top_logprobs_num`, `token_ids_logprob` and `return_text_in_logprobs`.
                `custom_logit_processor` and `return_hidden_states`, if the engine's
                `enable_custom_logit_processor` and `enable_return_hidden_states` are set.
                `image_data`: images, each with a placeholder in its prompt. `input_embeds`:
                embeddings ``[tokens, hidden]`` in place of `prompt` and `input_ids`. All others
                must be empty.

        Returns:
            A dictionary with `text`, `output_ids` and `meta_info`. For a list of prompts, or if `n`
            is not 1, a list of such dictionaries. With `stream` an iterator over them, each with
            the cumulative output of its sequence, and with `index` if there are several sequences.

        Raises:
            ConfigError: An argument or a parameter is unknown, unsupported or invalid.
            StartError: No driver is left.
        """
        prompts = self._read(prompt, sampling_params, input_ids, rid, others, lora_path)
        extra = self._request_options(priority, session_id, extra_key, require_reasoning)
        if stream:
            return self._streamed(prompts, extra)
        return self._collected(prompts, extra)

    def as_completed(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        rid: str | Sequence[str] | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        extra_key: str | None = None,
        lora_path: str | Sequence[str | None] | None = None,
        require_reasoning: bool = False,
        **others: Any,
    ) -> Iterator[dict[str, Any]]:
        """Generate from many prompts, and yield each output when it finishes, with its `index`.

        Arguments are those of :meth:`generate`, except for `stream`.

        Raises:
            ConfigError: As for :meth:`generate`, before the first output.
            StartError: No driver is left.
        """
        prompts = self._read(prompt, sampling_params, input_ids, rid, others, lora_path)
        extra = self._request_options(priority, session_id, extra_key, require_reasoning)
        return self._completed(prompts, extra)

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
        """The coroutine of :meth:`generate`; with `stream` it returns an async iterator."""
        prompts = self._read(prompt, sampling_params, input_ids, rid, others, lora_path)
        extra = self._request_options(priority, session_id, extra_key, require_reasoning)
        if stream:
            return self._async_streamed(prompts, extra)
        outputs = CallOutputs(self.tokenizer, prompts.is_list, streams=False)
        with await self._async_submitted(prompts, extra, outputs, streams=False) as call:
            async for event in call.async_events():
                outputs.append(event)
        return outputs.result()

    def get_server_info(self) -> dict[str, Any]:
        """Return the arguments, capabilities, active components, start spans and counters."""
        return {
            **self._given,
            "model_path": str(self._arguments.model),
            "version": __version__,
            "startup_time": self._start_s,
            "capabilities": dict(self._capabilities),
            "active": self._active.read(),
            "start": start_spans.as_list(self._active.start_spans(), "driver", self._started_at),
            "internal_states": [self._runtime.stats()],
        }

    def end_session(self, session_id: str) -> None:
        """Free the KV pages of a session."""
        number = self._sessions.pop(session_id, None)
        if number is not None:
            self._runtime.end_session(number)

    @property
    def context_length(self) -> int:
        """The context length: tokens of prompt and output together."""
        return int(self._capabilities["max_model_len"])

    def shutdown(self) -> None:
        """Stop the drivers; running requests end with an error. A second call does nothing.

        Any thread, a signal handler and a callback may call it; in a fork it does nothing.
        """
        self._finalizer()
        # A second call waits for the first.
        self._requests.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down."""
        self.shutdown()

    def _attach(
        self,
        runtime: Any,
        requests: OpenRequests,
        active: ActiveFile,
        first: Sequence[_Closes] = (),
        last: Sequence[_Closes] = (),
    ) -> None:
        """Store the runtime, and shut it down when the engine is garbage-collected.

        Args:
            runtime: The native runtime.
            requests: Its open requests.
            active: Must live until the runtime is shut down, because drivers write to it.
            first: Closed before the runtime.
            last: Closed after it.
        """
        self._native_runtime, self._requests, self._active = runtime, requests, active
        parts = [*first, requests, *last]
        self._finalizer = weakref.finalize(self, _close, parts, active)
        self._sessions: dict[str, int] = {}
        self._session_numbers = itertools.count(1)

    def _make_runtime(
        self, parsed: EngineArguments, active: ActiveFile, socket: ControlSocket
    ) -> Any:
        tokenizer = self.tokenizer
        images = {"max_image_bytes": parsed.media_bytes}
        keywords = {"max_step_ms": MAX_STEP_MS, **images, **parsed.runtime}
        if tokenizer is not None:
            keywords |= tokenizer.for_runtime()
            keywords["eos_token_ids"] = sorted(tokenizer.end_tokens)
        else:
            keywords["eos_token_ids"] = sorted(configured_ends(load_hf_config(parsed.model)))
        try:
            return _core.Runtime(**socket.runtime(active.runtime(keywords)))
        except (ValueError, OverflowError) as error:
            raise with_note(config_error(error)) from error
        except TypeError as error:
            hint = "check the types of the arguments"
            raise with_note(ConfigError(str(error), hint)) from error

    def _image_processor(self) -> ImageProcessor | None:
        """Reads the images of prompts, for a model that takes some."""
        if not self._arguments.image_bytes:
            return None
        folder = self._arguments.model
        vocab_size = int(self._capabilities["vocab_size"])
        return ImageProcessor(folder, load_hf_config(folder), vocab_size)

    @property
    def _runtime(self) -> Any:
        """The native runtime; raises in a forked process."""
        with_hint(self._requests.require_own_process)
        return self._native_runtime

    def _read(self, *given: Any) -> CallPrompts:
        """As `PromptParser.read`."""
        prompts: CallPrompts = with_hint(self._prompts.read, *given)
        return prompts

    def _request_options(
        self,
        priority: int | None,
        session_id: str | None,
        extra_key: str | None,
        require_reasoning: bool = False,
    ) -> dict[str, Any]:
        for name, value in (("session_id", session_id), ("extra_key", extra_key)):
            if value is not None and not isinstance(value, str):
                raise with_note(invalid_value(f"`{name}`", value, "a text"))
        if not isinstance(require_reasoning, bool):
            raise with_note(
                invalid_value("`require_reasoning`", require_reasoning, "True or False")
            )
        is_integer = isinstance(priority, int) and not isinstance(priority, bool)
        if priority is not None and not (is_integer and abs(priority) < 2**31):
            expected = f"an integer from {1 - 2**31} to {2**31 - 1}"
            raise with_note(invalid_value("`priority`", priority, expected))
        session = None
        if session_id is not None:
            # Numbers are never used again; both calls are atomic.
            session = self._sessions.setdefault(session_id, next(self._session_numbers))
        speculates = self._arguments.speculates
        named = {"priority": priority, "session": session, "namespace": extra_key}
        after = self._reasoning_end() if require_reasoning else []
        return {**named, "speculate": speculates, "grammar_after": after}

    def _reasoning_end(self) -> list[int]:
        """The tokens that end the model's reasoning."""
        parser = self._arguments.reasoning_parser
        if parser is None or self.tokenizer is None:
            raise with_note(
                ConfigError(
                    "`require_reasoning` is set, but how the model ends its thinking is not known",
                    'name its parser, as `Engine(reasoning_parser="qwen3")`, or remove it',
                )
            )
        return list(self.tokenizer.encode_plain(reasoning_end(parser)))

    def _submitted(
        self, prompts: CallPrompts, extra: Mapping[str, Any], outputs: CallOutputs, *, streams: bool
    ) -> Call:
        """Tokenize and submit the requests, batch by batch, and add their outputs."""
        call = Call(self._requests, streams=streams)
        # As the driver has measured it.
        hidden_size = self._capabilities["hidden_size"] or self._arguments.hidden_size
        try:
            for part in self._prompts.tokenized(prompts):
                asked = []
                for prompt in part:
                    context_left = self.context_length - len(prompt.tokens)
                    parameters = {**prompt.sampling.runtime_arguments(context_left), **extra}
                    if prompt.adapter is not None:
                        parameters["adapter_id"] = prompt.adapter
                    if prompt.logprobs is not None:
                        parameters |= prompt.logprobs.runtime_arguments()
                    if prompt.processor is not None:
                        parameters["logit_processor"] = prompt.processor
                    if prompt.hidden_states:
                        parameters["hidden_states"] = True
                    if prompt.images:
                        parameters["images"] = prompt.images
                    if prompt.embeds is not None:
                        parameters["input_embeds"] = prompt.embeds
                    asked.append(NewRequest(prompt.tokens, prompt.sampling.n, parameters))
                # First, because it rejects a huge `n`.
                with self._updates.admitting():
                    call.submit(asked)
                for prompt in part:
                    outputs.add(prompt, hidden_size)
        except (TypeError, ValueError, OverflowError) as error:
            call.abort()
            raise with_note(config_error(error)) from error
        except DriverError as error:
            call.abort()
            raise with_note(error) from None
        except BaseException:
            call.abort()
            raise
        return call

    async def _async_submitted(
        self, prompts: CallPrompts, extra: Mapping[str, Any], outputs: CallOutputs, *, streams: bool
    ) -> Call:
        """As `_submitted`, in a thread; a cancelled caller's requests are aborted."""
        submit = functools.partial(self._submitted, prompts, extra, outputs, streams=streams)
        submitting = asyncio.ensure_future(asyncio.to_thread(submit))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(_abort)
            raise

    def _collected(self, prompts: CallPrompts, extra: Mapping[str, Any]) -> Any:
        outputs = CallOutputs(self.tokenizer, prompts.is_list, streams=False)
        with self._submitted(prompts, extra, outputs, streams=False) as call:
            for event in call.events():
                outputs.append(event)
        return outputs.result()

    def _completed(
        self, prompts: CallPrompts, extra: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        outputs = CallOutputs(self.tokenizer, prompts.is_list, streams=False)
        with self._submitted(prompts, extra, outputs, streams=False) as call:
            for event in call.events():
                index = outputs.append(event)
                if event.output.finish_reason is not None:
                    yield {**outputs.partial(index), "index": index}

    def _streamed(self, prompts: CallPrompts, extra: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        outputs = CallOutputs(self.tokenizer, prompts.is_list, streams=True)
        with self._submitted(prompts, extra, outputs, streams=True) as call:
            for event in call.events():
                yield outputs.partial(outputs.append(event))

    async def _async_streamed(
        self, prompts: CallPrompts, extra: Mapping[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        outputs = CallOutputs(self.tokenizer, prompts.is_list, streams=True)
        with await self._async_submitted(prompts, extra, outputs, streams=True) as call:
            async for event in call.async_events():
                yield outputs.partial(outputs.append(event))


def _close(parts: Sequence[_Closes], _: ActiveFile) -> None:
    """Close the parts of an engine, in order."""
    for part in parts:
        part.close()


def _abort(submitting: asyncio.Future[Call]) -> None:
    """Abort the requests of a cancelled caller."""
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().abort()
