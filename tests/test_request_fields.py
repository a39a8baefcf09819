"""Fields of requests: each is read, refused by name, or has no effect; none is dropped silently."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from pie_driver_sglang import _core
from support import REPOSITORY
from support.servers import sglang_frontend

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

READER: Final = REPOSITORY / "rust/frontends/src/sglang_zmq/request.rs"
REFUSED: Final[dict[str, dict[str, Any]]] = {
    "TokenizedGenerateReqInput": {
        "bootstrap_host": "localhost",
        "multi_item_delimiter_indices": [1],
        "positional_embed_overrides": [1],
        "return_indexer_topk": True,
        "return_routed_experts": True,
        "return_sampling_mask": True,
        "token_indices_to_pool": [1],
    },
    "TokenizedEmbeddingReqInput": {
        "decision_layout": [1],
        "multi_item_delimiter_indices": [1],
        "positional_embed_overrides": [1],
        "return_pooled_hidden_states": True,
        "token_indices_to_pool": [1],
    },
    "SamplingParams": {"beam_width": 2, "ebnf_full_assistant": True},
}
"""By class and name, with a value that a client may send."""
_TOKENS: Final = "its tokens are read"
_BOOTSTRAP: Final = "of `bootstrap_host`"
_ENCODER: Final = "of encoders in servers of their own, which flags ask for"
_NAME: Final = "`lora_id` names the adapter"
_REPLICA: Final = "the replica is chosen before"
NO_EFFECT: Final[dict[str, dict[str, str]]] = {
    "TokenizedGenerateReqInput": {
        "bootstrap_pair_key": _BOOTSTRAP,
        "bootstrap_port": _BOOTSTRAP,
        "bootstrap_room": _BOOTSTRAP,
        "cache_salt": "`fold_salt` puts it into `extra_key`",
        "decode_tp_size": _BOOTSTRAP,
        "disagg_prefill_dp_rank": _BOOTSTRAP,
        "encoder_urls": _ENCODER,
        "input_text": _TOKENS,
        "kv_hints": "hints, which SGLang's scheduler does not follow either",
        "lora_name": _NAME,
        "mm_data_mooncake": _ENCODER,
        "need_wait_for_mm_inputs": _ENCODER,
        "no_logs": "our scheduler logs no requests",
        "num_items_assigned": _ENCODER,
        "pp_prefetch_ticketed": "SGLang's scheduler sets it for its other stages",
        "return_bytes": "SGLang's scheduler does not read it",
        "return_entropy": "SGLang's scheduler does not read it",
        "return_flat_raw_top_logprobs": "the tokenizer manager makes them flat",
        "routed_dp_rank": _REPLICA,
        "routed_experts_start_len": "of `return_routed_experts`",
        "sampling_logprobs_mode": "of `return_sampling_mask`",
        "session_id": "of `--enable-session-radix-cache`",
        "token_type_ids": "models with causal attention do not look at them",
    },
    "TokenizedEmbeddingReqInput": {
        "input_text": _TOKENS,
        "lora_name": _NAME,
        "routed_dp_rank": _REPLICA,
        "sampling_params": "nothing is sampled",
        "token_type_ids": "models with causal attention do not look at them",
    },
    "SamplingParams": {
        "is_normalized": "SGLang's own mark",
        "n": "each sample is a request",
        "stop": "`stop_strs` has them",
        "stop_regex": "`stop_regex_strs` has them",
        "stop_regex_max_len": "expressions find their ends",
        "stop_str_max_len": "strings find their ends",
        "watermark": "refused without `--enable-watermark`, which our scheduler does not serve",
    },
    "SessionParams": {},
}
"""By class and name, with the reason."""


def classes() -> dict[str, Any]:
    from sglang.srt.managers.io_struct import (
        SessionParams,
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.sampling.sampling_params import SamplingParams

    found = (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput, SamplingParams, SessionParams)
    return {cls.__name__: cls for cls in found}


@pytest.mark.parametrize("name", NO_EFFECT)
def test_every_field_is_accounted_for(name: str) -> None:
    """A new field of SGLang needs a line in the reader, in its refusals, or here."""
    [read] = re.findall(rf'of "{name}" \{{([^}}]*)\}}', READER.read_text())
    refused = REFUSED.get(name, {})
    groups = [set(re.findall(r"\w+", read)), set(refused), set(NO_EFFECT[name])]
    assert sum(map(len, groups)) == len(set().union(*groups)), "a field has two lines"
    fields = set(classes()[name].__struct_fields__)
    assert fields - set().union(*groups) == set()


@pytest.fixture(scope="module")
def frontend() -> Iterator[tuple[_core.SglangFrontend, Any]]:
    """A frontend, and the compat module of messages."""
    with (
        sglang_frontend.compat_messages() as compat,
        sglang_frontend.ended_runtime() as runtime,
    ):
        yield sglang_frontend.make(runtime, compat), compat


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in REFUSED.items() for field in fields]
)
def test_it_is_refused_by_name(frontend: Any, name: str, field: str) -> None:
    cls = classes()[name]
    if field not in cls.__struct_fields__:
        pytest.skip("a field of another version of SGLang")
    embeds = name == "TokenizedEmbeddingReqInput"
    request = sglang_frontend.embedding() if embeds else sglang_frontend.generation()
    part = request.sampling_params if name == "SamplingParams" else request
    setattr(part, field, REFUSED[name][field])
    [reason] = sglang_frontend.answer(*frontend, request).finished_reasons
    assert reason["status_code"] == 400
    assert reason["message"].startswith(f"the parameter `{field}`")
