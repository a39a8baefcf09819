"""Flags of vLLM at `pie-sglang serve` and `Engine`: hints that name the replacement."""

from __future__ import annotations

import re

import pytest

from pie_driver_sglang.cli import serve
from pie_driver_sglang.config import flag_names
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.argument_names import other_engines_flag
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.sglang_server import served_flags
from support import REPOSITORY
from support.models.tiny_models import POCKET


@pytest.mark.parametrize("front", ["sglang", "gateway"])
@pytest.mark.parametrize(
    ("words", "flag", "hint"),
    [
        (["m", "--tokenizer", "t"], "--tokenizer", "SGLang calls `--tokenizer` `--tokenizer-path`"),
        (["--swap-space", "4", "m"], "--swap-space", "set `--option cpu_mem_budget_in_gb=VALUE`"),
        (
            ["m", "--scheduling-policy=priority"],
            "--scheduling-policy",
            "set `--enable-priority-scheduling`, and, as in vLLM, "
            "`--schedule-low-priority-values-first`",
        ),
        (["m", "--enable-auto-tool-choice"], "--enable-auto-tool-choice", "remove it"),
        (["m", "--speculative-config", "{}"], "--speculative-config", "`--speculative-algorithm`"),
        # The hint is more than that no model was found.
        (["--bogus", "m"], "--bogus", "`pie-sglang serve --help` lists all flags"),
        (["--schedular", "pie", "m"], "--schedular", "did you mean `--scheduler`"),
    ],
)
def test_flags_of_vllm_are_answered_before_anything_is_imported(
    front: str, words: list[str], flag: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        serve.main(["--front", front, *words])
    assert str(error.value) == f"there is no flag `{flag}`"
    assert hint in error.value.hint
    assert len(error.value.hint.splitlines()) == 1


def test_the_engine_answers_the_same_names_with_its_arguments() -> None:
    for name, hint in (
        ("swap_space", "`cpu_mem_budget_in_gb`"),
        ("max_loras", "`max_loras_per_batch`"),
        # Of an earlier SGLang.
        ("return_hidden_states", "`enable_return_hidden_states`"),
    ):
        with pytest.raises(ConfigError, match="there is no argument") as error:
            parse_arguments({"model_path": str(POCKET), name: 1})
        assert hint in error.value.hint
        assert "--" not in error.value.hint


def test_flags_that_exist_are_no_flags_of_vllm() -> None:
    served_flags.refuse_other_engines_flags(["--model", "m", "--tensor-parallel-size", "2"])
    # It is one of smg.
    served_flags.refuse_other_engines_flags(["--gateway-arg", "--seed"])


def test_the_migration_page_names_no_flag_that_lacks_a_hint() -> None:
    """Of vLLM's flags that do not exist here."""
    page = (REPOSITORY / "docs/start/from-vllm.md").read_text()
    table = page.partition("## Flags")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    named = {flag for cell in cells for flag in re.findall(r"(?<!\S)`?(--[\w-]+)", cell)}
    assert len(named) > 25
    known = flag_names.SGLANG_FLAGS
    assert [flag for flag in named if flag not in known and not other_engines_flag(flag)] == []
