"""Arguments and options for EAGLE heads: which heads are served, and why others are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.cli.model_sizes import model_of, read_shape, read_weights
from pie_driver_sglang.config.hf_config import check_hf_config, load_hf_config
from pie_driver_sglang.config.option_checks import parse_options
from pie_driver_sglang.errors import ConfigError, Unsupported
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.memory.batch_sizes import DRAFTED_ROWS
from pie_driver_sglang.memory.graphs import DRAFTING_KINDS, GraphKind
from pie_driver_sglang.memory.plan import GRAPH_LAYER_BYTES, plan_memory, planned_graphs
from support.models.memory_sizes import H200, QWEN, USUAL
from support.models.tiny_models import POCKET

POCKET_CONFIG = json.loads((POCKET / "config.json").read_text())


def head(folder: Path, **changed: Any) -> str:
    """A folder with the configuration of an EAGLE-3 head for `models/pocket`, and no weights."""
    config = {
        **POCKET_CONFIG,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
        **changed,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def parsed(**arguments: Any) -> dict[str, Any]:
    """The options of the driver that arguments of an engine give."""
    options: dict[str, Any] = parse_arguments(
        {"model_path": str(POCKET), "device": "cpu", **arguments}
    ).runtime["options"]
    return {name: value for name, value in options.items() if name.startswith("spec_")}


@pytest.mark.parametrize(
    ("arguments", "drafts"),
    [
        ({}, None),
        ({"speculative_num_steps": 5}, 5),
        ({"speculative_num_draft_tokens": 5}, 4),
        ({"speculative_num_steps": 2, "speculative_num_draft_tokens": 3}, 2),
        ({"speculative_eagle_topk": 1}, None),
    ],
)
def test_arguments_of_sglang_become_options(
    tmp_path: Path, arguments: dict[str, int], drafts: int | None
) -> None:
    path = head(tmp_path)
    named = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": path, **arguments}
    number = {} if drafts is None else {"spec_eagle_num_drafts": drafts}
    assert parsed(**named) == {"spec_eagle_path": path, **number}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"speculative_eagle_topk": 4}, "`speculative_eagle_topk` is 4: the driver drafts chains"),
        ({"speculative_num_steps": 8}, "is to draft 8 tokens; the driver takes 1 to 7"),
        ({"speculative_num_steps": 0}, "is to draft 0 tokens"),
        ({"speculative_draft_model_path": None}, "without `speculative_draft_model_path`"),
        ({"speculative_algorithm": "STANDALONE"}, "`speculative_draft_model_path` is for an EAGLE"),
        ({"speculative_algorithm": "NGRAM"}, "`speculative_draft_model_path` is for an EAGLE head"),
        ({"tp_size": 2}, "drafts on one device, and the model has 2"),
        ({"device": "cuda"}, "have not run on a GPU yet"),
    ],
)
def test_what_is_not_served_is_left_to_sglangs_scheduler(
    tmp_path: Path, arguments: dict[str, Any], text: str
) -> None:
    named = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": head(tmp_path),
        **arguments,
    }
    with pytest.raises(Unsupported, match=text) as refusal:
        parsed(**named)
    assert refusal.value.hint
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"speculative_algorithm": "EAGLE"}, "is a head of the other kind"),
        (
            {"speculative_num_steps": 3, "speculative_num_draft_tokens": 9},
            "`speculative_num_draft_tokens` is 9, and a chain of `speculative_num_steps` = 3 has 4",
        ),
        ({"speculative_draft_model_path": "/no/head"}, "'/no/head' is neither a folder nor"),
        ({"disable_cuda_graph": True}, "`disable_cuda_graph` is true, and an EAGLE head drafts in"),
        ({"spec_ngram_enabled": True}, "`spec_eagle_path` and `spec_ngram_enabled` are both set"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    named = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": head(tmp_path),
        **arguments,
    }
    with pytest.raises(ConfigError, match=text) as refusal:
        parsed(**named)
    assert not isinstance(refusal.value, Unsupported)


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({"num_hidden_layers": 2}, Unsupported, "has 2 layers"),
        ({"architectures": ["Qwen3ForCausalLM"]}, Unsupported, "is a Qwen3ForCausalLM"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, Unsupported, "use_aux_hidden_state"),
        ({"num_key_value_heads": 4}, Unsupported, "another `num_key_value_heads` than the model"),
        ({"hidden_size": 128, "head_dim": 32}, Unsupported, "another `hidden_size` and `head_dim`"),
        ({"vocab_size": 1 << 20}, Unsupported, "has a vocabulary of 1048576 tokens, and the model"),
        # SGLang's default layers of a model with six are 2, 3 and 3.
        ({"eagle_config": None}, ConfigError, r"layers \[1, 2, 2\] of 6"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}},
            ConfigError,
            "from 0 to 4",
        ),
        ({"architectures": []}, ConfigError, "is not the configuration of an EAGLE head"),
        ({"hidden_size": "wide"}, ConfigError, "is not the configuration of an EAGLE head"),
        ({"vocab_size": None}, ConfigError, "is not the configuration of an EAGLE head"),
    ],
)
def test_heads_that_cannot_draft(
    tmp_path: Path, changed: dict[str, Any], kind: type[ConfigError], text: str
) -> None:
    options = parse_options({"spec_eagle_path": head(tmp_path, **changed)}, "cpu")
    with pytest.raises(kind, match=text) as refusal:
        check_hf_config(load_hf_config(POCKET), options, 1)
    assert type(refusal.value) is kind
    assert refusal.value.hint


def test_a_model_with_images_has_no_head(tmp_path: Path) -> None:
    options = parse_options({"spec_eagle_path": head(tmp_path)}, "cpu")
    images = {**POCKET_CONFIG, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    with pytest.raises(Unsupported, match="the model takes images"):
        check_hf_config(images, options, 1)


def test_the_memory_plan_counts_the_head(tmp_path: Path) -> None:
    """A layer of KV and a hidden state for each token, its files, and pages for its drafts."""
    (tmp_path / "model.safetensors").write_bytes(bytes(1234))
    shape = read_shape(POCKET_CONFIG)
    plain, drafted = (
        model_of(
            shape,
            read_weights(POCKET, shape, POCKET_CONFIG, options, "bfloat16"),
            options,
            POCKET_CONFIG,
            "bfloat16",
            on_host=True,
        )
        for options in (
            parse_options({}, "cpu"),
            parse_options({"spec_eagle_path": head(tmp_path), "page_size": 16}, "cpu"),
        )
    )
    more = drafted.token_bytes.size - plain.token_bytes.size
    assert more == plain.token_bytes.size // shape.layers + 2 * shape.hidden_size
    weights = [sum(part.size for part in sizes.weights) for sizes in (plain, drafted)]
    assert weights[1] - weights[0] == 1234 + DRAFTED_ROWS * 16 * more


@pytest.mark.parametrize("requests", [1, 64, 256])
def test_only_a_driver_with_a_head_captures_graphs_that_draft(requests: int) -> None:
    """The plain and extended sizes in which it drafts; capture and memory plan have one list."""
    settings = USUAL._replace(requests=requests, prompts=True)
    drafting = settings._replace(draft_passes=3)
    plain, specs = planned_graphs(QWEN, settings), planned_graphs(QWEN, drafting)
    more = [spec for spec in specs if spec.kind in DRAFTING_KINDS]
    assert [spec for spec in specs if spec not in more] == plain
    for kind, other in zip(DRAFTING_KINDS, (GraphKind.PLAIN, GraphKind.EXTENDED), strict=True):
        rows = [spec.rows for spec in plain if spec.kind is other and spec.rows <= DRAFTED_ROWS]
        assert [spec.rows for spec in more if spec.kind is kind] == rows
    taken = [plan_memory(H200, QWEN, each).graphs for each in (settings, drafting)]
    assert taken[1] - taken[0] == len(more) * (QWEN.layers + 3) * GRAPH_LAYER_BYTES
