"""SGLang's test kits: which of their tests run against our server, and why others do not.

Nothing of SGLang is imported before a test runs.
"""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from support.servers.sglang_server import Server

PACKAGE: Final = "sglang.test.kits"


class Kit(NamedTuple):
    """A class of a kit.

    Attributes:
        module: Its module.
        name: Its own.
        quick: Tests that take seconds.
        long: Others.
        needs_knowledge: Tests whose answers a model must know.
        settings: Attributes that the kit lets its user set.
        flags: Of a server of its own; none to share one.
        variables: Of that server's environment.
        is_newer: Whether SGLang 0.5.17 does not have it.
    """

    module: str
    name: str
    quick: tuple[str, ...] = ()
    long: tuple[str, ...] = ()
    needs_knowledge: tuple[str, ...] = ()
    settings: Mapping[str, Any] = MappingProxyType({})
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = MappingProxyType({})
    is_newer: bool = False

    @property
    def tests(self) -> tuple[str, ...]:
        """All tests."""
        return (*self.quick, *self.long, *self.needs_knowledge)

    def found(self) -> set[str]:
        """The tests that the installed kit has."""
        return {name for name in dir(self._mixin()) if name.startswith("test_")}

    def run(self, test: str, served: Mapping[str, Any]) -> None:
        """Runs a test; its failure is an assertion."""
        attributes = {**self.settings, **served}
        cls = type(self.name, (self._mixin(), unittest.TestCase), attributes)
        outcome = unittest.TestResult()
        cls(test).run(outcome)
        wrong = [text for _, text in (*outcome.failures, *outcome.errors)]
        assert not wrong, wrong[0]
        assert outcome.testsRun == 1

    def _mixin(self) -> Any:
        return getattr(import_module(f"{PACKAGE}.{self.module}"), self.name)


KITS: Final = (
    Kit(
        "basic_api_contract_kit",
        "BasicAPIContractMixin",
        quick=(
            "test_get_model_info",
            "test_get_server_info",
            "test_health",
            "test_health_generate",
            "test_openai_chat_completion",
            "test_openai_completion",
        ),
    ),
    Kit(
        "matched_stop_kit",
        "MatchedStopMixin",
        quick=("test_finish_length", "test_finish_stop_str"),
        needs_knowledge=("test_finish_stop_eos", "test_finish_stop_regex_str"),
    ),
    Kit(
        "basic_decode_correctness_kit",
        "BasicDecodeCorrectnessMixin",
        quick=("test_determinism_temp_zero", "test_max_token_one"),
        needs_knowledge=(
            "test_ascii_ratio",
            "test_basic_math",
            "test_capital_france",
            "test_color_completion",
            "test_no_repetition_blowup",
        ),
    ),
    Kit(
        "basic_scheduler_stress_kit",
        "BasicSchedulerStressMixin",
        needs_knowledge=("test_concurrent_requests", "test_long_prompt", "test_streaming_response"),
    ),
    Kit(
        "abort_timeout_kit",
        "AbortAllMixin",
        quick=("test_abort_all",),
        settings={
            "abort_all_num_requests": 12,
            "abort_all_max_new_tokens": 1500,
            "abort_all_sleep": 1.0,
        },
    ),
    Kit(
        "abort_timeout_kit",
        "WaitingTimeoutMixin",
        long=("test_waiting_timeout",),
        settings={"waiting_timeout_max_new_tokens": 1500},
        flags=("--max-running-requests", "1"),
        variables={"SGLANG_REQ_WAITING_TIMEOUT": "0.5"},
    ),
    Kit(
        "abort_timeout_kit",
        "RunningTimeoutTwoWaveMixin",
        long=("test_running_timeout_no_crash",),
        settings={"running_timeout_sleep": 1.0},
        flags=("--watchdog-timeout", "60"),
        variables={"SGLANG_REQ_RUNNING_TIMEOUT": "2"},
    ),
    Kit(
        "pause_generation_kit",
        "PauseResumeInPlaceMixin",
        long=("test_pause_resume_in_place",),
        settings={"pause_num_requests": 8, "pause_duration": 1.0, "pause_max_new_tokens": 800},
    ),
    Kit(
        "streaming_session_kit",
        "StreamingSessionKitMixin",
        quick=(
            "test_first_mid_abort_recovery",
            "test_kv_cache_inheritance",
            "test_nth_mid_abort_recovery",
            "test_preabort_recovery",
        ),
        long=("test_leak_logprob_concurrent", "test_stress_concurrent_sessions"),
        # The KV of a turn's last token is computed by the turn that continues from it.
        settings={"kv_inherit_offsets": (-1,)},
    ),
    Kit(
        "streaming_session_kit",
        "AbortLeakReproKitMixin",
        long=("test_abort_heavy_chunked_prefill_does_not_leak",),
        flags=("--context-length", "512", "--page-size", "16", "--enable-streaming-session"),
    ),
    Kit(
        "json_constrained_kit",
        "JSONConstrainedMixin",
        needs_knowledge=(
            "test_json_generate",
            "test_json_invalid",
            "test_json_openai",
            "test_mix_json_and_other",
        ),
    ),
    Kit(
        "regex_constrained_kit",
        "RegexConstrainedMixin",
        needs_knowledge=(
            "test_regex_generate_complex_json",
            "test_regex_generate_custom_log_format",
            "test_regex_generate_date",
            "test_regex_generate_email",
            "test_regex_generate_greeting",
            "test_regex_generate_hex_color",
            "test_regex_generate_number",
            "test_regex_generate_phone",
        ),
    ),
    Kit(
        "ebnf_constrained_kit",
        "EBNFConstrainedMixin",
        needs_knowledge=(
            "test_ebnf_generate_all_optional_function_params",
            "test_ebnf_generate_complex_json",
            "test_ebnf_generate_custom_log_format",
            "test_ebnf_generate_date",
            "test_ebnf_generate_email",
            "test_ebnf_generate_greeting",
            "test_ebnf_generate_hex_color",
            "test_ebnf_generate_number",
            "test_ebnf_generate_phone",
        ),
    ),
    Kit(
        "anthropic_messages_kit",
        "AnthropicMessagesMixin",
        quick=(
            "test_content_blocks_message",
            "test_count_tokens",
            "test_count_tokens_with_system",
            "test_error_empty_messages",
            "test_error_invalid_max_tokens",
            "test_error_missing_content_type",
            "test_in_messages_system_role",
            "test_max_tokens",
            "test_multi_turn_messages",
            "test_raw_http_non_streaming",
            "test_raw_http_streaming",
            "test_simple_messages",
            "test_simple_messages_stream",
            "test_stop_sequences",
            "test_stream_multi_turn",
            "test_stream_with_system",
            "test_system_message_blocks",
            "test_system_message_string",
            "test_temperature",
            "test_tool_result_image_content_conversion",
            "test_top_p_and_top_k",
        ),
        is_newer=True,
    ),
    Kit(
        "json_mode_kit",
        "JSONModeMixin",
        needs_knowledge=("test_json_mode_response", "test_json_mode_with_streaming"),
        is_newer=True,
    ),
)

#: Conversations that share prefixes: what is cached is exact, and log-probabilities are those of a
#: prefill. Its other tests need data sets.
PREFIXES: Final = Kit(
    "unified_radix_cache_kit",
    "UnifiedRadixTreeTestMixin",
    long=(
        "test_multiturn_decode_cache_hit_branching",
        "test_multiturn_logprobs_match",
        "test_multiturn_prefill_cache_hit_branching",
    ),
    settings={"max_new_tokens": 24},
)

#: Modules of kits of which nothing runs, with the reason.
NOT_RUN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attention_unittest": "SGLang's own attention backends",
        "dsa_metadata_kit": "SGLang's own attention backends",
        "cache_hit_kit": "a function, which `test_conformance.py` calls",
        "eval_accuracy_kit": "data sets, which are downloaded",
        "fwd_occupancy_kit": "a metric of SGLang's device timer",
        "hellaswag_kit": "data sets, which are downloaded",
        "kl_divergence_kit": "data sets, which are downloaded",
        "lm_eval_kit": "data sets, which are downloaded",
        "mmmu_vlm_kit": "data sets, which are downloaded",
        "pd_parity_kit": "prefill and decode on different servers",
        "perf_bench_kit": "a table, no tests",
        "prefix_cache_branching_kit": "caches of recurrent state, which hit at branches alone",
        "radix_cache_server_kit": "prompts of 32,000 tokens and a vocabulary of as many",
        "reasoning_kit": "a model that thinks",
        "spec_decoding_kit": "draft models",
        "spec_server_kits": "draft models",
        "unified_radix_cache": "what SGLang's own tests share, no tests",
        "unified_radix_cache_kit": "`PREFIXES`: it needs a vocabulary of 30,000 tokens",
        "vlm_perf_kit": "times of another model",
    }
)

#: Those of them that SGLang 0.5.17 alone has.
OLDER: Final = frozenset({"hellaswag_kit"})
#: Those that it does not have.
NEWER: Final = frozenset(
    {
        "dsa_metadata_kit",
        "pd_parity_kit",
        "perf_bench_kit",
        "unified_radix_cache",
        "vlm_perf_kit",
    }
)


def installed_modules() -> set[str]:
    """The kits' modules in the installed wheel; imports none of them."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "test/kits"
    names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    return names - {"__init__", "__pycache__"}


def attributes(server: Server, process: Any, model: Path) -> dict[str, Any]:
    """What kits find in their test case."""
    import openai
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return {
        "api_key": "none",
        "base_url": server.url,
        "client": openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"),
        "model": "default",
        "process": process,
        "tokenizer": get_tokenizer(str(model)),
    }
