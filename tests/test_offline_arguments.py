"""Sampling parameters and arguments of the offline engine, against SGLang's."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pie_driver_sglang import _core
from pie_driver_sglang.config.no_effect import NO_EFFECT
from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common import arguments as engine_arguments
from pie_driver_sglang.frontends.common import model_location
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.offline.sampling import (
    REFUSED_PARAMETERS,
    SERVED_PARAMETERS,
    SamplingParameters,
    parse_sampling,
)
from support import versions
from support.hostile.arbitrary_objects import JUNK
from support.models.tiny_models import POCKET

#: What engines set of themselves.
EMBEDS = {"max_input_embeds_bytes": 2 << 20}


class TestSampling:
    def test_the_defaults_are_sglangs(self) -> None:
        assert parse_sampling(None) == SamplingParameters()
        assert (
            parse_sampling({name: None for name in SERVED_PARAMETERS - {"max_new_tokens"}})
            == SamplingParameters()
        )
        assert SamplingParameters().runtime_arguments(1000)["max_new_tokens"] == 128
        assert SamplingParameters().runtime_arguments(100)["max_new_tokens"] == 100

    def test_every_parameter_of_sglang_is_known(self) -> None:
        spec = importlib.util.find_spec("sglang")
        assert spec is not None and spec.submodule_search_locations
        folder = Path(next(iter(spec.submodule_search_locations)))
        tree = ast.parse((folder / "srt" / "sampling" / "sampling_params.py").read_text())
        (found,) = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
        ]
        fields = {
            node.target.id
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        newer = {"beam_width", "ebnf_full_assistant", "watermark"}
        internal = {
            "ebnf_full_assistant",
            "is_normalized",
            "stop_regex_max_len",
            "stop_regex_strs",
            "stop_str_max_len",
            "stop_strs",
        }
        known = SERVED_PARAMETERS | REFUSED_PARAMETERS.keys() | internal
        assert fields <= known
        # SGLang 0.5.17 has not all of them.
        assert known - fields in (set(), newer)
        assert not SERVED_PARAMETERS & REFUSED_PARAMETERS.keys()

    def test_no_limit_is_the_rest_of_the_context(self) -> None:
        assert (
            parse_sampling({"max_new_tokens": None}).runtime_arguments(77)["max_new_tokens"] == 77
        )

    def test_all_samplers_go_together(self) -> None:
        given = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "sampling_seed": 0}
        penalties = {"frequency_penalty": -2, "presence_penalty": 0.5, "repetition_penalty": 2}
        found = parse_sampling({**given, **penalties, "logit_bias": {"7": 1, 8: -2.5}})
        submitted = found.runtime_arguments(100)
        assert submitted["seed"] == 0
        assert submitted["logit_bias"] == [(7, 1.0), (8, -2.5)]
        assert [submitted[name] for name in penalties] == [-2.0, 0.5, 2.0]

    def test_stops_may_be_one_or_several(self) -> None:
        assert parse_sampling({"stop": "x"}).stop == ("x",)
        assert parse_sampling({"stop": ["x", "", "y"]}).stop == ("x", "y")
        assert parse_sampling({"stop_token_ids": {7}}).stop_token_ids == (7,)

    @pytest.mark.parametrize("name", sorted(REFUSED_PARAMETERS))
    def test_what_is_not_served_is_refused_by_name(self, name: str) -> None:
        neutral, _ = REFUSED_PARAMETERS[name]
        assert parse_sampling({name: neutral}) == SamplingParameters()
        assert parse_sampling({name: None}) == SamplingParameters()
        with pytest.raises(ConfigError, match=f"`{name}` is not served: ") as refusal:
            parse_sampling({name: 0.5})
        assert f"remove `{name}`" in refusal.value.hint

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"max_tokens": 3}, "no sampling parameter 'max_tokens'"),
            ({"temperature": "hot"}, "`temperature` is 'hot'"),
            ({"top_k": True}, "`top_k` is True"),
            ({"min_new_tokens": 2**63}, "`min_new_tokens` is 9223372036854775808"),
            ({"temperature": 10**400}, "`temperature` is 1000"),
            ({"stop_token_ids": [2**70]}, "`stop_token_ids` is"),
            ({"sampling_seed": -1}, "`sampling_seed` is -1"),
            ({"logit_bias": [3]}, "`logit_bias` is [3]"),
            ({"logit_bias": {"x": 1}}, "`logit_bias` is {'x': 1}"),
            ({"ignore_eos": 1}, "`ignore_eos` is 1"),
            ({"stop": 3}, "`stop` is 3"),
            ({"stop_token_ids": ["a"]}, "`stop_token_ids` is"),
        ],
    )
    def test_wrong_values_are_named(self, given: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            parse_sampling(given)
        assert text in str(refusal.value)
        assert refusal.value.hint


class TestArguments:
    def parse(self, **given: Any) -> engine_arguments.EngineArguments:
        return parse_arguments({"model_path": str(POCKET), "device": "cpu", **given})

    def test_the_defaults(self) -> None:
        found = self.parse()
        assert found.runtime["devices"] == ["cpu"]
        assert found.runtime["dtype"] == "float32"
        assert found.runtime["options"] == {"trust_remote_code": False, **EMBEDS}
        assert found.tokenizer == POCKET

    def test_a_model_of_embeddings_reserves_no_memory_for_input_embeds(self) -> None:
        found = self.parse(is_embedding=True)
        assert found.runtime["options"].keys().isdisjoint(EMBEDS)
        assert (found.media_bytes, self.parse().media_bytes) == (0, *EMBEDS.values())
        asked = self.parse(is_embedding=True, max_input_embeds_bytes=1 << 16)
        assert asked.media_bytes == asked.runtime["options"]["max_input_embeds_bytes"] == 1 << 16

    def test_arguments_of_sglang_become_options(self) -> None:
        found = self.parse(
            tp_size=2,
            dp_size=2,
            random_seed=7,
            page_size=32,
            schedule_policy="lpm",
            chunked_prefill_size=512,
            max_total_tokens=3200,
            disable_cuda_graph=None,
            quantization="fp8",
            speculative_algorithm="NGRAM",
            speculative_num_draft_tokens=6,
            skip_tokenizer_init=True,
        )
        runtime = found.runtime
        assert runtime["devices"] == ["cpu", "cpu:1", "cpu:2", "cpu:3"]
        assert (runtime["replicas"], runtime["tensor_parallel_size"]) == (2, 2)
        assert runtime["seed"] == 7
        assert runtime["schedule_policy"] == "lpm"
        assert runtime["chunked_prefill_size"] == 512
        assert runtime["max_total_pages"] == 100
        assert runtime["options"] == {
            "page_size": 32,
            "chunked_prefill_size": 512,
            "quantization": "fp8",
            "spec_ngram_enabled": True,
            "spec_ngram_num_drafts": 6,
            "trust_remote_code": False,
            **EMBEDS,
        }
        assert found.speculates
        assert found.tokenizer is None

    def test_suffix_decoding_has_options_of_its_own(self) -> None:
        found = self.parse(
            speculative_algorithm="suffix",
            speculative_num_draft_tokens=9,
            spec_suffix_min_token_prob=0.2,
        )
        assert found.speculates
        assert found.runtime["options"] == {
            "spec_suffix_enabled": True,
            "spec_suffix_num_drafts": 9,
            "spec_suffix_min_token_prob": 0.2,
            "trust_remote_code": False,
            **EMBEDS,
        }

    def test_steps_are_as_long_as_a_pass_of_the_driver(self) -> None:
        assert "chunked_prefill_size" not in self.parse().runtime
        found = self.parse(chunked_prefill_size=-1)
        assert "chunked_prefill_size" not in found.runtime
        assert found.runtime["options"]["chunked_prefill_size"] == -1
        on_cuda = self.parse(devices=["cuda:0"])
        assert on_cuda.runtime["chunked_prefill_size"] == 16_384
        assert "chunked_prefill_size" not in on_cuda.runtime["options"]

    @pytest.mark.parametrize("given", [{}, {"trust_remote_code": True}])
    def test_a_repositorys_code_runs_only_with_trust_remote_code(
        self, given: dict[str, Any]
    ) -> None:
        assert self.parse(**given).runtime["options"]["trust_remote_code"] is bool(given)

    def test_gpus_are_numbered_as_sglang_does(self) -> None:
        found = self.parse(device="cuda", tp_size=2, base_gpu_id=4, gpu_id_step=2)
        assert found.runtime["devices"] == ["cuda:4", "cuda:6"]
        assert found.runtime["dtype"] == "bfloat16"
        assert self.parse(device=None, devices=["cuda:3"]).runtime["devices"] == ["cuda:3"]

    @pytest.mark.parametrize("has_gpu", [False, True])
    def test_the_device_is_a_gpu_where_there_is_one(
        self, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_arguments, "has_gpu", lambda: has_gpu)
        assert self.parse(device=None).runtime["devices"] == (["cuda:0"] if has_gpu else ["cpu"])

    @pytest.mark.parametrize("name", sorted(SERVER_ARGS))
    def test_every_argument_of_sglang_is_served_or_refused_with_a_reason(self, name: str) -> None:
        known = {*engine_arguments.SCHEDULER, *engine_arguments.READ}
        owner = SERVER_ARGS[name].owner
        if name in {*known, *NO_EFFECT} or owner in (None, "key"):
            return
        with pytest.raises(ConfigError, match=f"`{name}` = ") as refusal:
            self.parse(**{name: "x"})
        assert "is not served: " in str(refusal.value)
        assert "the driver decides it" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"modelpath": "x"}, "no argument 'modelpath'"),
            ({"max_model_len": 4}, "no argument 'max_model_len'"),
            ({"tp_size": 0}, "`tp_size` is 0"),
            ({"device": "tpu"}, "`device` is 'tpu'"),
            ({"devices": ["cpu", "cpu:1"]}, "`tp_size` times `dp_size` is 1"),
            ({"dtype": "int8"}, "`dtype` is 'int8'"),
            ({"page_size": 0}, "option `page_size` is 0"),
            ({"context_length": 10**6}, "option `context_length` is 1000000"),
            ({"speculative_algorithm": "EAGLE"}, "`speculative_algorithm` is 'EAGLE'"),
            (
                {"speculative_algorithm": "NGRAM", "spec_suffix_enabled": True},
                "`speculative_algorithm` is 'NGRAM', and `spec_suffix_enabled` is True",
            ),
            (
                {"speculative_algorithm": "SUFFIX", "spec_suffix_enabled": False},
                "`speculative_algorithm` is 'SUFFIX', and `spec_suffix_enabled` is False",
            ),
            ({"engine": ["vllm"]}, "`engine` is ['vllm'], expected one of sglang, vllm"),
            ({"preferred_sampling_params": "{"}, "`preferred_sampling_params` is '{'"),
            ({"model_path": "/nowhere"}, "the model '/nowhere' is neither"),
            ({"model_path": None}, "`model_path` is missing"),
            ({"tp_size": 3}, "attention heads"),
        ],
    )
    def test_wrong_arguments_are_named(self, given: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            self.parse(**given)
        assert text in str(refusal.value)
        assert refusal.value.hint

    @given(
        name=st.sampled_from(
            sorted({*engine_arguments.READ, *engine_arguments.SCHEDULER, *engine_arguments.OWN})
        ),
        value=JUNK,
    )
    def test_any_value_of_an_argument_is_taken_or_refused_in_a_line(
        self, name: str, value: Any
    ) -> None:
        away = ConfigError("there is no such repository", "name another")
        with mock.patch.object(model_location, "fetch_snapshot", side_effect=away):
            try:
                self.parse(**{name: value})
            except ConfigError as error:
                assert len(str(error).splitlines()) == 1
                assert str(error)

    def test_stops_come_before_the_length_as_in_the_installed_sglang(self) -> None:
        found = self.parse().runtime.get("stop_before_length", False)
        assert found == (not versions.IS_OLDEST)

    def test_the_native_runtime_accepts_every_name(self) -> None:
        names = {*engine_arguments.SCHEDULER, *engine_arguments.OWN}
        assert names <= set(_core.Runtime.setting_names())
