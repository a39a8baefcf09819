"""The capabilities that a driver announces, and the size of its request buffer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pie_driver_sglang import _core
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.driver import startup
from pie_driver_sglang.driver.capabilities import UNLIMITED
from pie_driver_sglang.engine.executor import ModelInfo
from support.process.config_files import config_of

DEFAULT_REQUEST_BYTES = 8 << 20


def model_info(**changed: Any) -> ModelInfo:
    info = ModelInfo(
        total_pages=4096,
        page_size=16,
        vocab_size=300,
        context_length=512,
        arch_name="llama3",
        dtype="bfloat16",
        attention_backend="torch_native",
    )
    return info._replace(**changed)


def capacity(config: DriverConfig, info: ModelInfo) -> int:
    """The request buffer that the driver makes for a model."""
    hf_config = {"max_position_embeddings": info.context_length, "vocab_size": info.vocab_size}
    needed = startup.request_bytes(config, hf_config)
    return max(DEFAULT_REQUEST_BYTES, -(-needed // 64) * 64)


MODELS = {
    "tiny": model_info(),
    "one page": model_info(total_pages=1, context_length=16),
    "pages of one token": model_info(page_size=1, total_pages=65_536, context_length=131_072),
    "long context": model_info(context_length=1 << 20, total_pages=1 << 16, vocab_size=152_064),
    "context larger than the pool": model_info(total_pages=8, context_length=131_072),
    "huge pool": model_info(total_pages=1 << 24, context_length=40_960, vocab_size=262_144),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"cuda_graph_max_bs": 1}, {"cuda_graph_max_bs": 2048}])
def test_every_batch_within_the_limits_fits_the_request_buffer(
    name: str, options: dict[str, Any]
) -> None:
    info, config = MODELS[name], config_of(page_size=MODELS[name].page_size, **options)
    request_bytes = capacity(config, info)
    caps = startup.capabilities(config, info, request_bytes)
    needed = 4 * caps.max_page_refs + 32 * caps.max_forward_tokens
    needed += 96 * caps.max_forward_requests + 4 * info.vocab_size + 4096
    assert needed <= request_bytes


@given(
    page_size=st.integers(1, 1024),
    total_pages=st.integers(1, 1 << 22),
    context=st.integers(1, 1 << 20),
    vocabulary=st.integers(1, 262_144),
    requests=st.integers(1, 4096),
)
def test_a_whole_context_always_fits(
    page_size: int, total_pages: int, context: int, vocabulary: int, requests: int
) -> None:
    info = model_info(
        page_size=page_size, total_pages=total_pages, context_length=context, vocab_size=vocabulary
    )
    config = config_of(page_size=page_size, cuda_graph_max_bs=requests)
    request_bytes = capacity(config, info)
    caps = startup.capabilities(config, info, request_bytes)
    assert caps.max_forward_tokens >= context
    assert caps.max_page_refs >= -(-context // page_size)
    needed = 4 * caps.max_page_refs + 32 * caps.max_forward_tokens
    needed += 96 * caps.max_forward_requests + 4 * vocabulary + 4096
    assert needed <= request_bytes


def test_recurrent_state_is_announced() -> None:
    config = config_of()
    caps = startup.capabilities(config, model_info(), DEFAULT_REQUEST_BYTES)
    found = (caps.rs_cache_required, caps.rs_cache_slots, caps.rs_cache_slot_bytes)
    assert found == (False, 0, 0)
    info = model_info(state_slots=256, state_bytes=5 << 32)
    caps = startup.capabilities(config, info, DEFAULT_REQUEST_BYTES)
    found = (caps.rs_cache_required, caps.rs_cache_slots, caps.rs_cache_slot_bytes)
    assert found == (True, 256, 5 << 32)
    # Rejected drafts advance it for good.
    assert not caps.rs_cache_spec_rollback


def requests_of(count: int, tokens: int, pages: int) -> list[_core.Request]:
    """`count` requests of `tokens` tokens, each with `pages` pages and one sampler."""
    sampler = [(tokens - 1, _core.Sampler.greedy())]
    positions = list(range(tokens))
    request = _core.Request(
        [1] * tokens, positions, [2**31] * pages, 16, sampler, context_id=2**60, masks=None
    )
    return [request] * count


def test_the_largest_decode_batch_really_fits() -> None:
    config, info = config_of(), model_info(context_length=131_072)
    request_bytes = capacity(config, info)
    caps = startup.capabilities(config, info, request_bytes)
    pages = caps.max_page_refs // caps.max_forward_requests
    frame = _core.encode_forward(requests_of(caps.max_forward_requests, 1, pages))
    assert len(frame) <= request_bytes


def test_the_largest_prefill_batch_really_fits() -> None:
    config, info = config_of(), model_info(context_length=32_768)
    request_bytes = capacity(config, info)
    caps = startup.capabilities(config, info, request_bytes)
    count = caps.max_forward_tokens // info.context_length
    frame = _core.encode_forward(
        requests_of(count, info.context_length, caps.max_page_refs // count)
    )
    assert len(frame) <= request_bytes


def test_images_fit_beside_the_largest_text_batch() -> None:
    """Text does not eat the room for the pixels and positions of images."""
    config, info = config_of(max_image_tokens=100), model_info(context_length=32_768)
    vision = {"patch_size": 4, "spatial_merge_size": 2}
    hf_config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "vision_config": vision,
        "max_position_embeddings": info.context_length,
        "vocab_size": info.vocab_size,
    }
    config = msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, hf_config=hf_config)
    )
    request_bytes = startup.request_bytes(config, hf_config)
    without = startup.request_bytes(config, {**hf_config, "architectures": []})
    caps = startup.capabilities(config, info, request_bytes)
    tokens = caps.max_forward_tokens
    pages = caps.max_page_refs
    sampler = [(tokens - 1, _core.Sampler.greedy())]
    patch = bytes(4 * 2 * 4 * 4 * 3)
    images = [
        _core.Image(row, (1, 20, 2), 40 * patch, [0] * 30, patch_positions=[0] * 80)
        for row in range(0, 100, 10)
    ]
    request = _core.Request(
        [0] * tokens, list(range(tokens)), [0] * pages, 16, sampler, images=images
    )
    size = len(_core.encode_forward([request]))
    assert without < size <= request_bytes


def test_one_context_of_a_long_model_fits_with_one_token_pages() -> None:
    config = config_of(page_size=1)
    info = model_info(page_size=1, context_length=262_144)
    (request,) = requests_of(1, info.context_length, info.context_length)
    frame = _core.encode_forward([request])
    assert len(frame) > DEFAULT_REQUEST_BYTES
    assert len(frame) <= capacity(config, info)


def test_the_capabilities_repeat_what_the_engine_found() -> None:
    config = config_of(cuda_graph_max_bs=7)
    caps = startup.capabilities(config, model_info(host_pages=90), DEFAULT_REQUEST_BYTES)
    assert (caps.total_pages, caps.kv_page_size, caps.vocab_size) == (4096, 16, 300)
    assert (caps.max_model_len, caps.arch_name) == (512, "llama3")
    assert caps.max_forward_requests == 7
    assert caps.activation_dtype == "bfloat16"
    assert caps.snapshot_dir == "snapshot"
    assert caps.swap_pool_size == 90
    assert caps.system_speculation_supported
    assert not caps.enable_system_speculation


def test_speculation_is_what_the_operator_and_the_model_allow() -> None:
    config = config_of(cuda_graph_max_bs=7, spec_ngram_enabled=True)
    assert startup.capabilities(
        config, model_info(), DEFAULT_REQUEST_BYTES
    ).enable_system_speculation
    config = config_of(cuda_graph_max_bs=7, spec_suffix_enabled=True)
    assert startup.capabilities(
        config, model_info(), DEFAULT_REQUEST_BYTES
    ).enable_system_speculation
    recurrent = startup.capabilities(config_of(), model_info(state_slots=4), DEFAULT_REQUEST_BYTES)
    assert not recurrent.system_speculation_supported


@pytest.mark.parametrize(
    "limit",
    [
        "max_logit_rows",
        "max_prob_rows",
        "max_custom_mask_bytes",
        "max_sampler_rows",
        "max_logprob_labels",
    ],
)
def test_what_the_driver_handles_by_itself_is_unlimited(limit: str) -> None:
    caps = startup.capabilities(config_of(), model_info(), DEFAULT_REQUEST_BYTES)
    assert getattr(caps, limit) == UNLIMITED


def test_a_small_pool_bounds_the_tokens_of_a_batch() -> None:
    caps = startup.capabilities(config_of(), model_info(total_pages=64), DEFAULT_REQUEST_BYTES)
    assert caps.max_forward_tokens == 64 * 16


def test_the_tokens_of_a_batch_cover_a_context_that_the_pool_cannot_hold() -> None:
    caps = startup.capabilities(config_of(), model_info(total_pages=8), DEFAULT_REQUEST_BYTES)
    assert caps.max_forward_tokens == 512


class TestRequestBytes:
    HF: dict[str, Any] = {"max_position_embeddings": 8192, "vocab_size": 1000}  # noqa: RUF012

    def test_follows_the_frame_sizes_of_the_protocol(self) -> None:
        pages = 2 * (8192 // 16 + 1)
        expected = 4096 + 96 * 256 + 8 * 1000 + 32 * 8192 + 4 * pages
        assert startup.request_bytes(config_of(), self.HF) == expected

    def test_reads_the_language_model_of_a_multi_modal_config(self) -> None:
        nested = {"text_config": self.HF, "vision_config": {"max_position_embeddings": 9}}
        assert startup.request_bytes(config_of(), nested) == startup.request_bytes(
            config_of(), self.HF
        )

    @pytest.mark.parametrize("hf_config", [{}, {"max_position_embeddings": None}])
    def test_manages_without_the_sizes(self, hf_config: dict[str, Any]) -> None:
        assert startup.request_bytes(config_of(), hf_config) > 0

    def test_the_option_replaces_the_context_of_the_model(self) -> None:
        requested = startup.request_bytes(config_of(context_length=1 << 20), self.HF)
        assert requested > startup.request_bytes(config_of(), self.HF) + 32 * (1 << 19)

    def test_grows_with_smaller_pages_and_more_requests(self) -> None:
        base = startup.request_bytes(config_of(), self.HF)
        assert startup.request_bytes(config_of(page_size=1), self.HF) > base
        assert startup.request_bytes(config_of(cuda_graph_max_bs=1000), self.HF) > base


def test_limits_are_counts_that_json_keeps_exact() -> None:
    caps = startup.capabilities(config_of(), model_info(), DEFAULT_REQUEST_BYTES)
    assert json.loads(json.dumps(caps.max_logit_rows)) == 2**32 - 1
    assert isinstance(config_of().driver.options, DriverOptions)
