"""SGLang's message classes: their table for Rust, encoding, and replies."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, Final, get_args, get_origin

import msgspec
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.environ import envs
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams

from pie_driver_sglang.frontends.sglang_server.compat.selection import scheduler_compat

PROBE_PREFIX: Final[str] = HEALTH_CHECK_RID_PREFIX
"""Prefix of the ids of health probes."""

MessageTable = list[tuple[str, list[tuple[str, bytes | None]]]]
"""Name and fields of each class, in order, with defaults as msgpack."""

_NEEDED: Final = (
    io_struct.TokenizedGenerateReqInput,
    io_struct.BatchTokenizedGenerateReqInput,
    io_struct.TokenizedEmbeddingReqInput,
    io_struct.BatchTokenizedEmbeddingReqInput,
    io_struct.AbortReq,
    io_struct.BatchTokenIDOutput,
    io_struct.BatchEmbeddingOutput,
    io_struct.HealthCheckOutput,
    SamplingParams,
    io_struct.SessionParams,
)
_LORA_ANSWERS: Final = ("LoadLoRA", "UnloadLoRA")


def message_table() -> MessageTable:
    """The classes that Rust decodes and encodes, as installed."""
    classes = (*_NEEDED, *scheduler_compat().media_classes())
    return [
        (cls.__name__, [_field(field) for field in msgspec.structs.fields(cls)]) for cls in classes
    ]


def _field(field: Any) -> tuple[str, bytes | None]:
    if field.required:
        return field.name, None
    has_value = field.default is not msgspec.NODEFAULT
    default = field.default if has_value else field.default_factory()
    return field.name, io_struct._msgpack_encoder.encode(default)


def other_interval() -> int:
    """Tokens between two outputs of a request that does not stream."""
    return int(envs.SGLANG_FORCE_STREAM_INTERVAL.get())


def original_logprobs() -> bool:
    """Whether log-probabilities are those before the temperature."""
    return bool(envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get())


def decode_message(data: bytes) -> Any:
    """Decode a message of any class."""
    return io_struct.msgpack_decode(data)


def encode_message(message: Any) -> bytes:
    """Encode a message."""
    data: bytes = io_struct.msgpack_encode(message)
    return data


def reply_to(message: Any, fields: Mapping[str, Any]) -> Any | None:
    """The reply that SGLang waits for; None for a message without one.

    Args:
        message: The received message.
        fields: Values by name; those that the reply's class lacks are ignored, and other required
            fields are empty.
    """
    cls = _reply_class(type(message).__name__)
    if cls is None:
        return None
    known = {f.name: f for f in msgspec.structs.fields(cls)}
    values = {name: value for name, value in fields.items() if name in known}
    for name, field in known.items():
        if field.required and name not in values:
            values[name] = _empty(field.type)
    answer = cls(**values)
    if answer.http_worker_ipc is None:
        answer.http_worker_ipc = message.http_worker_ipc
    return answer


def _empty(type_: Any) -> Any:
    """An empty value of a field's type."""
    if NoneType in get_args(type_):
        return None
    made = get_origin(type_) or type_
    return made() if made in (bool, int, float, str, list, dict) else None


def _reply_class(name: str) -> Any | None:
    if name.startswith(_LORA_ANSWERS):
        return io_struct.LoRAUpdateOutput
    return getattr(io_struct, name.removesuffix("Input") + "Output", None)


def starts_profile(message: Any) -> bool:
    """Whether a ``ProfileReq`` starts or stops a profile."""
    return bool(message.req_type == io_struct.ProfileReqType.START_PROFILE)


def end_of_thinking(parser: str) -> str:
    """The text that ends a model's reasoning, by SGLang's name of its reasoning parser."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    detector = ReasoningParser(model_type=parser, stream_reasoning=False).detector
    text: str = detector.think_end_token
    return text
