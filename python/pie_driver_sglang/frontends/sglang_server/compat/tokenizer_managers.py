"""Subclasses of SGLang's tokenizer manager, alone or as one of several workers."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fastapi import HTTPException
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, LoRAUpdateOutput
from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.multimodal.mm_utils import has_valid_data
from sglang.srt.multimodal.processors import base_processor
from sglang.srt.server_args import ServerArgs

from pie_driver_sglang import errors
from pie_driver_sglang._core import MAX_SAMPLES
from pie_driver_sglang.backends.sglang.compat import selection
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.sglang_server import unsupported
from pie_driver_sglang.frontends.sglang_server.compat import adapter_tensors, weight_tensors
from pie_driver_sglang.frontends.sglang_server.compat.detokenize_endpoint import correct_detokenize
from pie_driver_sglang.frontends.sglang_server.compat.http_app import (
    HTTP_CONFIG_ATTRIBUTE,
    http_config_of,
)
from pie_driver_sglang.frontends.sglang_server.compat.ollama_endpoints import correct_ollama
from pie_driver_sglang.frontends.sglang_server.compat.openai_endpoints import (
    accept_adapter_names,
    correct_errors,
    correct_template_arguments,
    correct_tool_schemas,
    limit_stored_responses,
    require_heads,
)
from pie_driver_sglang.frontends.sglang_server.compat.prompt_lists import (
    check_lists,
    correct_embedding_lists,
    count_prompts,
)
from pie_driver_sglang.frontends.sglang_server.compat.selection import (
    endpoints_compat,
)
from pie_driver_sglang.frontends.sglang_server.flow_control import Acknowledger
from pie_driver_sglang.frontends.sglang_server.media import MediaFetcher
from pie_driver_sglang.observability import start_spans

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.1
_SHORT_TEXT: Final = 16_384
"""Characters whose tokenization takes less time than a step."""


class MsgpackManager(TokenizerManager):
    """SGLang's tokenizer manager, for messages in msgpack.

    There a status arrives as a number, and the OpenAI layer recognizes only an ``HTTPStatus`` as an
    error: a failed stream would end like a finished one.
    """

    _most_samples = sys.maxsize
    #: Awaited before the requests that run at SIGTERM.
    before_exit: Callable[[], Awaitable[None]] | None = None

    def __init__(self, server_args: ServerArgs, *arguments: Any, **keywords: Any) -> None:
        """As SGLang's manager."""
        if selection.settings().values(server_args).device == "cpu":
            # Otherwise image processors use CUDA.
            base_processor._is_cpu = True
        correct_template_arguments()
        endpoints_compat().correct_top_logprobs()
        correct_tool_schemas()
        accept_adapter_names()
        correct_embedding_lists()
        correct_ollama()
        correct_detokenize()
        limit_stored_responses()
        correct_errors()
        self._edge = http_config_of(server_args).settings
        self._media = MediaFetcher(self._edge.media)
        super().__init__(server_args, *arguments, **keywords)

    async def sigterm_watchdog(self) -> None:
        """End the server soon after SIGTERM, for which SGLang polls every five seconds."""
        while not self.gracefully_exit:
            await asyncio.sleep(_LOOK_S)
        if self.before_exit is not None:
            await self.before_exit()
        await super().sigterm_watchdog()

    async def get_internal_state(self) -> list[dict[Any, Any]]:
        """The schedulers' states, without the key digests in SGLang's settings.

        The start of the server has this process's spans as well.
        """
        states: list[dict[Any, Any]] = await super().get_internal_state()
        spans = start_spans.as_list(start_spans.recorded(), "server", start_spans.origin())
        for state in states:
            state.pop(HTTP_CONFIG_ATTRIBUTE, None)
            if "start" in state:
                state["start"] = spans + state["start"]
        return states

    def generate_request(self, obj: Any, request: Any = None) -> Any:
        """Yield outputs, after checks that SGLang lacks."""
        _check_params(obj, self._most_samples)
        return super().generate_request(obj, request=request)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort a request, or all whose ids have this prefix: SGLang ignores unknown ids.

        SGLang names the prompts of a request with several `{rid}_0`, `{rid}_1`, and so on.
        """
        exact = abort_all or not rid or rid in self.rid_to_state
        if not exact and not endpoints_compat().aborts_children(self, rid):
            for name in [name for name in self.rid_to_state if name.startswith(rid)]:
                super().abort_request(name)
        # Both schedulers abort by prefix, too; with several workers, requests of the others.
        super().abort_request(rid, abort_all=abort_all)

    async def load_lora_adapter_from_tensors(self, obj: Any, request: Any = None) -> Any:
        """Load an adapter from a request, as safetensors unless pickles are allowed."""
        try:
            adapter_tensors.check_format(obj, allow_pickles=self._edge.allow_pickled_adapters)
            return await self._load_sent(obj, request)
        except (ConfigError, ValueError) as error:
            text = error.with_hint if isinstance(error, ConfigError) else str(error)
            return LoRAUpdateOutput(success=False, error_message=text)

    async def _load_sent(self, obj: Any, request: Any) -> Any:
        if adapter_tensors.is_pickled(obj):
            return await super().load_lora_adapter_from_tensors(obj)
        # SGLang's scheduler loads pickles or files. The files stay, because an evicted adapter is
        # loaded again; the server's temporary folder is removed at the end.
        folder = Path(tempfile.mkdtemp(prefix="adapter-"))
        await asyncio.to_thread(adapter_tensors.write_adapter, obj, folder)
        files = LoadLoRAAdapterReqInput(
            lora_name=obj.lora_name, lora_path=str(folder), pinned=obj.pinned
        )
        return await self.load_lora_adapter(files, request)

    async def _tokenize_one_request(self, obj: Any) -> Any:
        if self.mm_processor is None or not obj.contains_mm_input():
            return await super()._tokenize_one_request(obj)
        for name in ("image_data", "video_data", "audio_data"):
            if (data := getattr(obj, name)) is not None and not isinstance(data, list):
                setattr(obj, name, [data])
        self._validate_mm_limits(obj)
        await self._media.resolve(obj)
        try:
            return await super()._tokenize_one_request(obj)
        except (RuntimeError, OSError, TypeError, LookupError, AttributeError) as error:
            # Any exception of decoders and processors would be answered 500.
            logger.warning("a request's media are not taken", exc_info=error)
            raise ValueError(
                f"the request's media cannot be read: {errors.reason(error)}"
            ) from error

    def _validate_one_request(self, obj: Any, input_ids: Any) -> None:
        _check_prompt(obj, input_ids)
        if self.enable_metrics:
            # prometheus_client would raise with the response, which would end the server.
            _check_labels(getattr(obj, "custom_labels", None) or {}, self.metrics_collector.labels)
        if self.server_args.grammar_backend == "none":
            _refuse_grammars(obj.sampling_params)
        with _reading_params():
            super()._validate_one_request(obj, input_ids=input_ids)

    def _create_tokenized_object(self, *arguments: Any, **keywords: Any) -> Any:
        with _reading_params():
            return super()._create_tokenized_object(*arguments, **keywords)

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        try:
            super()._dispatch_to_scheduler(obj)
        except (OverflowError, RecursionError) as error:
            # msgpack limits integers to 64 bits, and nesting.
            raise ValueError(f"the request cannot be passed on: {error}") from error

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        """Tokenize long texts in a thread, so that the loop serves others."""
        if self.async_dynamic_batch_tokenizer or _characters(texts) <= _SHORT_TEXT:
            return await super()._tokenize_texts(texts, is_cross_encoder=is_cross_encoder)
        tokenized = super()._tokenize_texts(texts, is_cross_encoder=is_cross_encoder)
        return await asyncio.to_thread(asyncio.run, tokenized)

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        for reason in recv_obj.finished_reasons:
            _name_status(reason)
        if recv_obj.retraction_counts is None:
            # SGLang's router drops them from embeddings for one of several workers.
            recv_obj.retraction_counts = [0] * len(recv_obj.rids)
        await super()._handle_batch_output(recv_obj)

    def _handle_abort_req(self, recv_obj: Any) -> None:
        _name_status(recv_obj.finished_reason)
        super()._handle_abort_req(recv_obj)


_NEEDS_ONE_REPLICA: Final = (
    False,
    "tensors update one replica, and `--dp-size` is larger; update from a folder, or serve the "
    "replicas one by one",
)
"""SGLang's tokenizer manager fails an assertion there."""


class RefusingManager(MsgpackManager):
    """The tokenizer manager of our scheduler: rejects what its replies cannot."""

    # SGLang allocates for any number before the scheduler sees the request.
    _most_samples = MAX_SAMPLES

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """As SGLang's manager."""
        require_heads()
        endpoints_compat().check_by_scheduler()
        super().__init__(*arguments, **keywords)

    def _create_tokenized_object(self, *arguments: Any, **keywords: Any) -> Any:
        made = super()._create_tokenized_object(*arguments, **keywords)
        endpoints_compat().fold_salt(made)
        return made

    async def _load_sent(self, obj: Any, request: Any) -> Any:
        # Our scheduler writes the files, and removes them with the adapter.
        return await TokenizerManager.load_lora_adapter_from_tensors(self, obj)

    async def update_weights_from_tensor(self, obj: Any, request: Any = None) -> Any:
        """Update weights from a request, as safetensors unless pickles are allowed."""
        if self.server_args.dp_size > 1:
            return _NEEDS_ONE_REPLICA
        try:
            allowed = self._edge.allow_pickled_weights
            weight_tensors.check_weights_format(obj, allow_pickles=allowed)
            return await super().update_weights_from_tensor(obj, request)
        except (ConfigError, ValueError) as error:
            return False, error.with_hint if isinstance(error, ConfigError) else str(error)

    async def init_weights_update_group(self, obj: Any, request: Any = None) -> Any:
        """Join a group of a trainer, as the only replica."""
        if self.server_args.dp_size > 1:
            return _NEEDS_ONE_REPLICA
        return await super().init_weights_update_group(obj, request)

    async def destroy_weights_update_group(self, obj: Any, request: Any = None) -> Any:
        """Leave such a group."""
        if self.server_args.dp_size > 1:
            return _NEEDS_ONE_REPLICA
        return await super().destroy_weights_update_group(obj, request)

    async def update_weights_from_distributed(self, obj: Any, request: Any = None) -> Any:
        """Receive weights by such a group."""
        if self.server_args.dp_size > 1:
            return _NEEDS_ONE_REPLICA
        return await super().update_weights_from_distributed(obj, request)

    async def get_weights_by_name(self, obj: Any, request: Any = None) -> Any:
        """Read a weight; what is wrong with the name is answered."""
        self.auto_create_handle_loop()
        results = await self.get_weights_by_name_communicator(obj)
        _require_done(results)
        found = [result.parameter for result in results]
        return found[0] if self.server_args.dp_size == 1 else found

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> None:
        """Release memory after the requests that run; SGLang fails while some do."""
        self.auto_create_handle_loop()
        async with self._without_requests():
            _require_done(await self.release_memory_occupation_communicator(obj))

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> None:
        """Take memory again."""
        self.auto_create_handle_loop()
        _require_done(await self.resume_memory_occupation_communicator(obj))

    @asynccontextmanager
    async def _without_requests(self) -> AsyncIterator[None]:
        """Within it no request runs, and new ones wait; paused ones stay where they are."""
        async with self.is_pause_cond:
            is_paused = self.is_pause
        if is_paused:
            yield
            return
        async with self.model_update_lock.writer_lock:
            yield

    async def _tokenize_one_request(self, obj: Any) -> Any:
        # Except in chats, SGLang would ignore media that the model does not support.
        if self.mm_processor is None and obj.contains_mm_input():
            raise ValueError("Model only supports text input; received images, audio or video.")
        return await super()._tokenize_one_request(obj)

    def _validate_mm_limits(self, obj: Any) -> None:
        for name in ("audio_data", "video_data"):
            if has_valid_data(getattr(obj, name)):
                raise ValueError(unsupported.unsupported_media(f"`{name}`"))
        super()._validate_mm_limits(obj)

    async def _execute_profile(self, req: Any) -> Any:
        result = (await self.profile_communicator(req))[0]
        if not result.success:
            raise HTTPException(HTTPStatus.BAD_REQUEST, result.message)
        return result


class PieManager(RefusingManager):
    """The only tokenizer manager of a server, which acknowledges outputs."""

    def __init__(self, *arguments: Any, acknowledger: Acknowledger, **keywords: Any) -> None:
        """As SGLang's manager, with the pipe for acknowledgements."""
        self._acknowledger = acknowledger
        super().__init__(*arguments, **keywords)

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        try:
            await super()._handle_batch_output(recv_obj)
        finally:
            # Of embeddings, which are not acknowledged by replica, it is not known.
            self._acknowledger.handled(getattr(recv_obj, "dp_ranks", None))


class MsgpackWorker(MsgpackManager, TokenizerWorker):
    """One of several tokenizer managers, in front of SGLang's own scheduler."""


class PieWorker(RefusingManager, TokenizerWorker):
    """One of several tokenizer managers, in front of ours."""


def _require_done(results: Any) -> None:
    """Raise for a reply that carries a reason, in the place of an id; see `weight_messages`."""
    for result in results:
        if result.rid:
            raise ValueError(str(result.rid))


def _refuse(reason: str) -> Callable[..., Any]:
    async def refuse(*_: Any, **__: Any) -> None:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST, f"not served: {reason}; {unsupported.USE_SGLANG}"
        )

    return refuse


for _name, _reason in unsupported.CALLS.items():
    if hasattr(TokenizerManager, _name):
        setattr(RefusingManager, _name, _refuse(_reason))


@contextmanager
def _reading_params() -> Iterator[None]:
    """Turn any exception into a ValueError, which is answered 400."""
    try:
        yield
    except (ValueError, HTTPException):
        raise
    except Exception as error:
        # SGLang, tokenizers and `re` raise anything on values of other types and sizes.
        reason = f"{error}" or type(error).__name__
        raise ValueError(f"`sampling_params` cannot be read: {reason:.200}") from error


def _check_params(obj: Any, most_samples: int) -> None:
    """Reject parameters on which SGLang fails before it reads a prompt."""
    if isinstance(obj.text, list) and not obj.text:
        raise ValueError("`text` is a list of 0, it must have at least one prompt")
    if obj.text is None and isinstance(obj.input_ids, list) and not obj.input_ids:
        raise ValueError("`input_ids` is a list of 0, it must have at least one token")
    embeds = getattr(obj, "input_embeds", None)
    if isinstance(embeds, list) and (not embeds or embeds[0] == []):
        raise ValueError("`input_embeds` is empty, it must have a row of numbers for each token")
    check_lists(obj)
    params = obj.sampling_params
    if not isinstance(params, list):
        params = [params or {}]
    elif len(params) != (prompts := count_prompts(obj)) or not params:
        raise ValueError(
            f"`sampling_params` is a list of {len(params)}, which must have one map for each of "
            f"{prompts or 'several'} prompts: name one map for all, or as many as prompts"
        )
    for each in params:
        if "n" in each:
            each["n"] = _read_count(each["n"], most_samples)
    has_one = [each.get("n", 1) for each in params] == [1] and not count_prompts(obj)
    if has_one and isinstance(obj.rid, list) and getattr(obj, "input_embeds", None) is None:
        raise ValueError("`rid` is a list, and there is one prompt: name it by a string")


def _check_prompt(obj: Any, input_ids: Any) -> None:
    """Reject a prompt of no tokens, which ends SGLang's own scheduler since 0.5.23."""
    others = (getattr(obj, name, None) for name in ("input_embeds", "session_params"))
    has_other_input = any(other is not None for other in others) or obj.contains_mm_input()
    if input_ids is not None and len(input_ids) == 0 and not has_other_input:
        raise ValueError("the prompt is empty: give at least one token")


def _read_count(count: Any, most: int) -> int:
    """Validate `n`; a whole float is an integer."""
    if isinstance(count, float) and count.is_integer():
        count = int(count)
    if isinstance(count, bool) or not isinstance(count, int) or abs(count) >= 1 << 31:
        raise ValueError(f"`n` is {count!r}, it must be an integer")
    if count > most:
        raise ValueError(f"`n` is {count}, and one request has up to {most} answers")
    return count


def _characters(texts: Any) -> int:
    """Characters of a text, or of a list of texts."""
    listed = [texts] if isinstance(texts, str) else texts or ()
    return sum(len(text) for text in listed if isinstance(text, str))


def _refuse_grammars(params: Any) -> None:
    """Reject a request with a grammar, as SGLang's scheduler does with `--grammar-backend none`."""
    for name in ("json_schema", "regex", "ebnf", "structural_tag"):
        if isinstance(params, dict) and params.get(name) is not None:
            raise ValueError(
                f"`{name}` needs a grammar backend, and the server was started with "
                "`--grammar-backend none`: start it without the flag"
            )


def _check_labels(asked: dict[str, str], known: dict[str, str]) -> None:
    for name in asked.keys() - known.keys():
        raise ValueError(
            f"`custom_labels` has `{name}`, which this server's metrics do not have: remove it, or "
            "start the server with `--tokenizer-metrics-allowed-custom-labels`"
        )


def _name_status(reason: dict[str, Any] | None) -> None:
    status = (reason or {}).get("status_code")
    if reason is not None and isinstance(status, int):
        reason["status_code"] = HTTPStatus(status)
