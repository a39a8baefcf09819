"""Corrections of SGLang's OpenAI endpoints."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import jinja2
from sglang.srt.entrypoints.openai import serving_rerank
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_classify import OpenAIServingClassify
from sglang.srt.entrypoints.openai.serving_score import OpenAIServingScore
from sglang.srt.function_call import utils
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from pie_driver_sglang.backends.sglang.compat import selection
from pie_driver_sglang.checkpoint.pooling import has_head
from pie_driver_sglang.errors import reason
from pie_driver_sglang.frontends.sglang_server.bounded_store import BoundedStore
from pie_driver_sglang.frontends.sglang_server.error_responses import short

INPUT_ERRORS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    jinja2.TemplateError,
)
"""Exceptions of handlers over unexpected input."""
_MESSAGES: Final = OpenAIServingChat._process_messages
_SCHEMA: Final = utils._get_tool_schema
_RESOLVE: Final = OpenAIServingBase._resolve_lora_path
_TAKEN: Final = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
} - {"documents", "kwargs"}
"""Arguments of the rendering functions, which do not reach the template."""
_MOST_RESPONSES: Final = 1000
_MOST_BYTES: Final = 256 << 20
_OF_HEADS: Final = {
    OpenAIServingClassify: "/v1/classify",
    OpenAIServingScore: "/v1/score",
    serving_rerank.OpenAIServingRerank: "/v1/rerank",
}
_OBJECT: Final = {"type": "object"}


def bad_request_text(error: BaseException) -> str:
    """The error text for a request that made a handler raise."""
    return f"the request is not taken: {type(error).__name__}: {reason(error)}"


def correct_errors() -> None:
    """Answer 400 with a short text to input that makes a handler raise.

    SGLang answers 500, and repeats the input.
    """
    kinds = [OpenAIServingBase]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name in ("create_error_response", "create_streaming_error_response"):
            if (made := vars(kind).get(name)) and not hasattr(made, "__wrapped__"):
                setattr(kind, name, _refusing(made))


def _refusing(made: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(made)
    def create(self: Any, message: Any, *arguments: Any, **given: Any) -> Any:
        error = sys.exception()
        if given.get("status_code") == HTTPStatus.INTERNAL_SERVER_ERROR and isinstance(
            error, INPUT_ERRORS
        ):
            message = bad_request_text(error)
            given |= {"err_type": "BadRequest", "status_code": 400}
        return made(self, short(str(message)), *arguments, **given)

    return create


def correct_template_arguments() -> None:
    """Reject `chat_template_kwargs` that are arguments of the rendering function.

    SGLang answers 500 to them; a `chat_template` of the client could block the server's loop.
    """
    OpenAIServingChat._process_messages = _process_messages


def _process_messages(
    self: OpenAIServingChat, request: Any, *arguments: Any, **keywords: Any
) -> Any:
    for name in request.chat_template_kwargs or ():
        if name in _TAKEN:
            raise ValueError(
                f"`chat_template_kwargs` has `{name}`, which the server sets itself: remove it"
            )
    return _MESSAGES(self, request, *arguments, **keywords)


def accept_adapter_names() -> None:
    """Accept the name of an adapter as `model`, as vLLM does.

    SGLang supports `served-name:adapter` only, and would use the base model.
    """
    OpenAIServingBase._resolve_lora_path = _resolve_lora_path


def _resolve_lora_path(self: OpenAIServingBase, request_model: str, explicit_lora_path: Any) -> Any:
    manager = self.tokenizer_manager
    values = selection.settings().values(manager.server_args)
    known = manager.lora_ref_cache if values.enable_lora else ()
    if request_model in known and request_model != manager.served_model_name:
        return request_model
    return _RESOLVE(self, request_model, explicit_lora_path)


def require_heads() -> None:
    """Answer 400 to a request for scores or classes of a model without the head that makes them.

    SGLang answers with numbers of an embedding, with the class `Default`, or 500.
    """
    for kind, path in _OF_HEADS.items():
        check = kind._validate_request
        if not hasattr(check, "__wrapped__"):
            kind._validate_request = _requiring_head(check, path)


def missing_head(manager: Any, path: str) -> str | None:
    """Why a path that needs a classification or reward head is not served; None where it is.

    Args:
        manager: SGLang's tokenizer manager.
        path: Of the request.
    """
    architectures = manager.model_config.hf_config.architectures or ()
    if has_head(architectures):
        return None
    found = ", ".join(architectures)
    what = "generates text" if manager.is_generation else "returns embeddings"
    return (
        f"`{path}` needs a model with a classification or reward head, as "
        f"Qwen3ForSequenceClassification, and this one, {found}, {what}: serve another model"
    )


def _requiring_head(check: Callable[..., Any], path: str) -> Callable[..., Any]:
    @functools.wraps(check)
    def validate(self: Any, request: Any) -> Any:
        if not _scores_text(self.tokenizer_manager, request, path) and (
            missing := missing_head(self.tokenizer_manager, path)
        ):
            return missing
        return check(self, request)

    return validate


def _scores_text(manager: Any, request: Any, path: str) -> bool:
    """Whether a model that generates text serves this request by log-probabilities."""
    if not manager.is_generation or path == "/v1/classify":
        return False
    if path == "/v1/score":
        return True
    backend = serving_rerank._detect_rerank_backend(
        request=request,
        chat_template=getattr(manager.tokenizer, "chat_template", None),
        model_path=str(getattr(manager.model_config, "model_path", "")),
    )
    return bool(backend != "cross_encoder")


def correct_tool_schemas() -> None:
    """Add `type: object` to the schema of a named tool's call.

    SGLang's schema has properties only, which by JSON Schema also allows a string; SGLang relies on
    xgrammar, which assumes an object.
    """
    utils._get_tool_schema = _get_tool_schema


def limit_stored_responses() -> None:
    """Bound the store of `/v1/responses`: SGLang's never drops an entry."""
    try:
        from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    except ImportError:
        # Without optional packages SGLang has no such endpoint.
        return
    init = OpenAIServingResponses.__init__

    def with_bounds(self: Any, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self.response_store = BoundedStore(_MOST_RESPONSES, _MOST_BYTES)
        # Messages are larger and stored first, so a stored response has its messages.
        self.msg_store = BoundedStore(2 * _MOST_RESPONSES, 4 * _MOST_BYTES)

    OpenAIServingResponses.__init__ = with_bounds


def _get_tool_schema(tool: Any) -> dict[str, Any]:
    schema = _SCHEMA(tool)
    properties = schema["properties"]
    arguments = {**_OBJECT, **properties["parameters"]}
    return {**_OBJECT, **schema, "properties": {**properties, "parameters": arguments}}
