"""Every setting of SGLang's server has an effect, or one line says why not and what to do."""

from __future__ import annotations

import logging
import os
from collections import Counter
from enum import StrEnum
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang.config.flag_names import flag_of
from pie_driver_sglang.config.no_effect import NO_EFFECT, TRITON_ATTENTION, no_effect_lines
from pie_driver_sglang.config.option_checks import OWNERS, parse_options, valid_names
from pie_driver_sglang.config.options import OPTIONS
from pie_driver_sglang.config.server_args import LISTS, SERVER_ARGS
from pie_driver_sglang.errors import ConfigError, Unsupported
from pie_driver_sglang.frontends.common.argument_names import OWN, READ, SCHEDULER
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.common.scheduler_values import NAMED
from pie_driver_sglang.frontends.sglang_server import served_flags, server_process
from pie_driver_sglang.frontends.sglang_server.compat import server_environment
from pie_driver_sglang.memory.batch_sizes import decode_batch_sizes
from pie_driver_sglang.memory.graphs import GraphKind, graph_specs
from pie_driver_sglang.memory.plan import planned_graphs
from support.models.memory_sizes import QWEN, USUAL
from support.models.tiny_models import POCKET

GPU = "cuda:0"


class Served(StrEnum):
    """Who acts on a flag of `pie-sglang serve`."""

    RUNTIME = "our scheduler or driver"
    FRONT = "SGLang's HTTP server or tokenizer, with our scheduler"
    NO_EFFECT = "none, and the reason is logged"
    SGLANG = "SGLang's scheduler, with the reason"
    NOBODY = "none: it is refused, with the reason"


#: Settings of SGLang's model, loader and layers that the driver passes on to them.
PASSED = {name for name, field in SERVER_ARGS.items() if field.owner is None} - NO_EFFECT.keys()


def classes(name: str) -> set[Served]:
    """All classes of a flag; one of them, if nothing is ambiguous."""
    found = set()
    if name in NO_EFFECT:
        found.add(Served.NO_EFFECT)
    reason = served_flags.unserved_flag({name: "x"})
    if reason is not None:
        found.add(Served.NOBODY if name in served_flags.REFUSED else Served.SGLANG)
        flag, _, why = reason.partition(": ")
        # As SGLang spells it.
        assert flag == (flag_of(name) or name)
        assert why
    elif name in served_flags.RENAMED or served_flags.served_arguments({name: "x"}):
        found.add(Served.RUNTIME)
    elif name not in NO_EFFECT:
        found.add(Served.FRONT)
    return found


@pytest.mark.parametrize("name", sorted(SERVER_ARGS))
def test_a_flag_has_one_class(name: str) -> None:
    [served] = classes(name)
    if served is Served.RUNTIME:
        # It is read by a component: the scheduler, the arguments, the driver, or SGLang's layers.
        renamed = served_flags.RENAMED.get(name, name)
        assert renamed in {*SCHEDULER, *READ, *OPTIONS, *PASSED}
    elif served is Served.FRONT:
        # It is not among what only SGLang's scheduler or runner reads.
        assert SERVER_ARGS[name].owner in {*served_flags._FRONT_OWNERS} or (
            name in served_flags._FRONT
        )
    elif served is Served.NO_EFFECT:
        [line] = no_effect_lines({name: "x"})
        assert line.startswith(f"`{name}` has no effect: ")
        assert len(line.splitlines()) == 1


def test_every_flag_is_counted_once() -> None:
    counts = Counter(served for name in SERVER_ARGS for served in classes(name))
    assert sum(counts.values()) == len(SERVER_ARGS)
    assert counts[Served.NO_EFFECT] == len(NO_EFFECT.keys() & SERVER_ARGS.keys()) > 20
    assert NO_EFFECT.keys() <= {name for version in LISTS.values() for name in version.fields}
    unserved = [name for name in SERVER_ARGS if served_flags.unserved_flag({name: "x"})]
    assert counts[Served.SGLANG] == len(unserved) - len(served_flags.REFUSED)


@pytest.mark.parametrize("name", sorted(SERVER_ARGS))
def test_an_option_of_the_driver_has_an_effect_or_is_refused(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of `[driver.options]`: an option, passed on to SGLang's layers, logged, or refused."""
    field = SERVER_ARGS[name]
    if name in OPTIONS or name in PASSED:
        assert name in valid_names()
    elif field.owner is None:
        value: Any = {"bool": True, "int": 3, "list[int]": [1], "str": "inductor"}[field.type]
        assert name not in parse_options({name: value}, GPU).server_args
        assert f"option `{name}` has no effect: {NO_EFFECT[name]}" in caplog.text
    else:
        with pytest.raises(ConfigError) as refusal:
            parse_options({name: 1}, GPU)
        assert f"`{name}`" in str(refusal.value)
        assert OWNERS.get(str(field.owner), ("", ""))[1] in refusal.value.hint
        assert refusal.value.hint


@pytest.mark.parametrize("name", sorted(SERVER_ARGS))
def test_an_argument_of_the_engine_has_an_effect_or_is_refused(name: str) -> None:
    """Of `Engine` and the gateway; the values themselves are checked by other tests."""
    known = {*SCHEDULER, *READ, *OWN, *NO_EFFECT, *valid_names()}
    if name in known:
        return
    with pytest.raises(Unsupported) as refusal:
        parse_arguments({"model_path": str(POCKET), name: 1})
    assert f"`{name}` = 1 is not served: " in str(refusal.value)
    assert refusal.value.hint == f"remove `{name}`"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # Of `--disable-piecewise-cuda-graph`, too.
        ("cuda_graph_backend_prefill", "disabled"),
        ("delete_ckpt_after_loading", True),
        ("disable_outlines_disk_cache", True),
        ("disable_overlap_schedule", True),
        ("enable_mixed_chunk", True),
        ("enable_p2p_check", True),
        ("enable_torch_compile", True),
        ("load_snapshot_publish_interval", 5),
        ("nccl_port", 29500),
        ("num_continuous_decode_steps", 4),
        ("prefill_delayer_max_delay_passes", 4),
        ("sampling_backend", "pytorch"),
        ("scheduler_recv_interval", 4),
        ("show_time_cost", True),
        ("sleep_on_idle", True),
        ("torch_compile_max_bs", 8),
    ],
)
def test_a_harmless_flag_keeps_our_scheduler(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"model_path": str(POCKET), "device": "cpu", name: value}
    plan, reason = server_process.choose_scheduler(server_process.split_arguments(()), given)
    assert plan is not None, reason
    # The server prints the lines itself, before there is a log.
    assert name not in caplog.text
    assert len(no_effect_lines(given)) == 1
    parsed = parse_arguments(given)
    assert parsed.runtime == plan.runtime
    assert caplog.text.count(f"the argument `{name}` has no effect: ") == 1


@pytest.mark.parametrize(
    ("given", "threshold"),
    [
        # As in SGLang, where priorities preempt unless they are told not to.
        ({"enable_priority_scheduling": True}, 10),
        (
            {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 2},
            2,
        ),
        ({"enable_priority_scheduling": True, "disable_priority_preemption": True}, None),
        ({"disable_priority_preemption": True}, None),
    ],
)
def test_priorities_preempt_as_with_sglang(
    given: dict[str, Any], threshold: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"model_path": str(POCKET), "device": "cpu", **given}
    plan, reason = server_process.choose_scheduler(server_process.split_arguments(()), given)
    assert plan is not None, reason
    assert plan.runtime["priority_scheduling_preemption_threshold"] == threshold
    alone = "enable_priority_scheduling" not in given
    assert ("has no effect without `enable_priority_scheduling`" in caplog.text) == alone


@pytest.mark.parametrize(
    "given",
    [
        {"gc_threshold": [50000]},
        {"soft_watchdog_timeout": 300.0},
        {"enable_lora": True, "max_lora_chunk_size": 32},
        {"mamba_backend": "triton", "mamba_cache_philox_rounds": 7},
        {"disable_flashinfer_autotune": True, "flashinfer_autotune_skip_ops": ["fp4_gemm"]},
    ],
)
def test_flags_of_the_front_end_and_of_sglangs_layers_keep_our_scheduler(
    given: dict[str, Any],
) -> None:
    flags = {"model_path": str(POCKET), "device": "cpu", **given}
    plan, reason = server_process.choose_scheduler(server_process.split_arguments(()), flags)
    assert plan is not None, reason
    passed = {name: value for name, value in given.items() if name in PASSED}
    assert passed.items() <= plan.runtime["options"].items()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gc_threshold", "call `gc.set_threshold`"),
        ("numa_node", "under `numactl"),
        ("prefill_max_requests", "`max_prefill_tokens`"),
        ("soft_watchdog_timeout", "SGLang's processes"),
    ],
)
def test_the_engine_says_what_to_use_instead(name: str, words: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        parse_arguments({"model_path": str(POCKET), name: [1]})
    assert words in str(refusal.value)


def test_drafts_without_an_algorithm_are_said_to_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"model_path": str(POCKET), "device": "cpu", "speculative_num_draft_tokens": 4}
    assert not parse_arguments(given).speculates
    assert "`speculative_num_draft_tokens` has no effect without" in caplog.text
    caplog.clear()
    assert parse_arguments({**given, "speculative_algorithm": "NGRAM"}).speculates
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("option", ["spec_ngram_enabled", "spec_suffix_enabled"])
def test_requests_ask_for_drafts_of_a_driver_that_an_option_makes_draft(option: str) -> None:
    assert parse_arguments({"model_path": str(POCKET), "device": "cpu", option: True}).speculates


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_policy_of_sglang_is_served_or_has_a_reason(name: str) -> None:
    given = {"model_path": str(POCKET), "device": "cpu"}
    for value in {*SERVER_ARGS[name].choices, *NAMED[name]}:
        plan, reason = server_process.choose_scheduler(
            server_process.split_arguments(()), {**given, name: value}
        )
        assert (plan is not None) == (value in NAMED[name])
        assert plan is not None or f"`{name}` is '{value}', which our scheduler" in reason
        if plan is None:
            # The engine refuses it with the same reason.
            with pytest.raises(Unsupported, match=f"`{name}` is '{value}'"):
                parse_arguments({**given, name: value})


@pytest.mark.parametrize("interval", [0, -1, 2.5])
def test_an_interval_of_the_decode_log_is_a_number_of_steps(interval: Any) -> None:
    given = {"model_path": str(POCKET), "device": "cpu"}
    assert parse_arguments({**given, "decode_log_interval": 7}).decode_log_interval == 7
    assert parse_arguments(given).decode_log_interval == 40
    with pytest.raises(
        ConfigError, match=f"`decode_log_interval` is {interval}, expected"
    ) as error:
        parse_arguments({**given, "decode_log_interval": interval})
    assert not isinstance(error.value, Unsupported)


@pytest.mark.parametrize("backend", ["llguidance", "outlines", "xgrammar"])
def test_grammar_backends_keep_our_scheduler(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"model_path": str(POCKET), "device": "cpu", "grammar_backend": backend}
    plan, reason = server_process.choose_scheduler(server_process.split_arguments(()), given)
    assert plan is not None, reason
    lines = [each for each in caplog.messages if "llguidance compiles the grammars" in each]
    assert len(lines) == (backend != "llguidance")


def test_without_grammars_our_scheduler_serves() -> None:
    """The front end rejects requests with one; the engine, which has none, refuses the argument."""
    given = {"model_path": str(POCKET), "device": "cpu", "grammar_backend": "none"}
    plan, reason = server_process.choose_scheduler(server_process.split_arguments(()), given)
    assert plan is not None, reason
    with pytest.raises(Unsupported, match="`grammar_backend` is 'none'") as refusal:
        parse_arguments(given)
    assert refusal.value.hint == "remove `grammar_backend`"


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_requests_with_a_grammar_are_rejected_without_a_backend() -> None:
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import tokenizer_managers
    for name in ("json_schema", "regex", "ebnf", "structural_tag"):
        with pytest.raises(ValueError, match=f"`{name}` needs a grammar backend.*without the flag"):
            tokenizer_managers._refuse_grammars({name: "x", "temperature": 0})
    tokenizer_managers._refuse_grammars({"temperature": 0, "regex": None})
    tokenizer_managers._refuse_grammars(None)


def test_a_wrong_grammar_backend_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="`grammar_backend` is 'xgramar'") as refusal:
        parse_arguments({"model_path": str(POCKET), "grammar_backend": "xgramar"})
    assert not isinstance(refusal.value, Unsupported)
    assert "xgrammar" in refusal.value.hint


def test_graphs_of_size_0_are_disabled() -> None:
    own = server_process.split_arguments(())
    given = {"model_path": str(POCKET), "device": "cpu", "cuda_graph_max_bs_decode": 0}
    plan, reason = server_process.choose_scheduler(own, given)
    assert plan is not None, reason
    options = parse_options(plan.runtime["options"], "cpu")
    assert (options.disable_cuda_graph, options.cuda_graph_max_bs) == (True, None)
    assert parse_options({"cuda_graph_max_bs": 0}, GPU).disable_cuda_graph


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_prefill_tokens": 512}, 512),
        ({"max_prefill_tokens": 512, "chunked_prefill_size": 256}, 256),
        ({"max_prefill_tokens": 10**6}, 2048),
    ],
)
def test_the_prefill_tokens_of_a_step_are_limited(given: dict[str, int], expected: int) -> None:
    plan = parse_arguments({"model_path": str(POCKET), "device": "cpu", **given})
    assert plan.runtime["chunked_prefill_size"] == expected


def test_a_limit_of_no_prefill_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="`max_prefill_tokens` is 0") as refusal:
        parse_arguments({"model_path": str(POCKET), "device": "cpu", "max_prefill_tokens": 0})
    assert "set `max_prefill_tokens`" in refusal.value.hint


@pytest.mark.parametrize("name", TRITON_ATTENTION)
def test_settings_of_triton_attention_say_where_they_act(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    value = True if SERVER_ARGS[name].type == "bool" else 8
    caplog.set_level(logging.WARNING)
    parse_options({name: value, "attention_backend": "triton"}, GPU)
    assert "no effect" not in caplog.text
    parse_options({name: value}, GPU)
    assert f"option `{name}` has no effect where other kernels" in caplog.text
    assert '`attention_backend = "triton"`' in caplog.text


def test_the_sizes_of_decode_graphs_are_the_users() -> None:
    options = parse_options({"cuda_graph_bs_decode": [8, 1, 2, 8]}, GPU)
    assert options.graph_sizes == (8, 1, 2, 8)
    assert options.max_forward_requests == 256
    assert decode_batch_sizes(256, options.graph_sizes) == [1, 2, 8, 256]
    larger = parse_options({"cuda_graph_bs_decode": [1, 512]}, GPU)
    assert larger.max_forward_requests == 512
    assert decode_batch_sizes(512, larger.graph_sizes) == [1, 512]
    specs = graph_specs(
        256, 2048, groups=False, prompts=False, sparse=False, adapters=False, chosen=(1, 2, 8)
    )
    assert [spec.rows for spec in specs if spec.kind is GraphKind.PLAIN] == [1, 2, 8, 256]


def test_the_plan_has_the_graphs_of_the_user() -> None:
    chosen = USUAL._replace(graph_sizes=(1, 2, 8))
    usual = planned_graphs(QWEN, USUAL)
    assert len(planned_graphs(QWEN, chosen)) == len(usual) - 28 + 4


@pytest.mark.parametrize(
    ("table", "limits"),
    [
        ({"cuda_graph_bs_decode": [0, 1]}, "size 0, outside 1 to 4096"),
        ({"cuda_graph_bs_decode": [5000]}, "size 5000, outside 1 to 4096"),
        ({"cuda_graph_bs_decode": [64], "cuda_graph_max_bs": 32}, "size 64, outside 1 to 32"),
    ],
)
def test_sizes_that_no_batch_has_are_refused(table: dict[str, Any], limits: str) -> None:
    with pytest.raises(ConfigError, match=limits) as refusal:
        parse_options(table, GPU)
    assert "`cuda_graph_max_bs`" in refusal.value.hint
