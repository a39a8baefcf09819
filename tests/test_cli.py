"""`pie-sglang`: finding a command, its errors, the version, and the memory plan."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import pie_driver_sglang
from pie_driver_sglang import _core
from pie_driver_sglang.cli import main, plan, version
from pie_driver_sglang.config import option_checks
from pie_driver_sglang.config.server_args import SGLANG_VERSION
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.memory.plan_types import Device
from pie_driver_sglang.memory.units import GIB
from support import REPOSITORY
from support.models.tiny_models import POCKET

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_8B_BYTES = 16_060_522_496
"""What the index of the published checkpoint says."""


def run(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `python -m pie_driver_sglang`."""
    command = [sys.executable, "-m", "pie_driver_sglang", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)


def write_model(folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, **changed}))
    return folder


class TestProgram:
    @pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
    def test_help_names_every_command(
        self, words: Sequence[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main.main(words) == 0
        printed = capsys.readouterr().out
        for name, command in main.COMMANDS.items():
            assert f"  {name}" in printed
            assert command.summary in printed

    def test_without_a_command_the_help_is_an_error(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main.main([]) == main.USAGE
        printed = capsys.readouterr()
        assert not printed.out
        assert printed.err == main.usage()

    def test_a_misspelt_command_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["docter"]) == main.USAGE
        printed = capsys.readouterr().err
        assert "there is no command 'docter'" in printed
        assert "did you mean `doctor`?" in printed

    @pytest.mark.parametrize("name", main.COMMANDS)
    def test_every_command_explains_itself(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main.main([name, "--help"])
        assert ended.value.code == 0
        assert f"pie-sglang {name}" in capsys.readouterr().out

    def test_an_error_is_a_line_and_a_hint(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["plan", "--model", "/nowhere", "--device-gib", "8"]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("pie-sglang: the model '/nowhere' is neither a folder nor")
        assert lines[1:2] == [""]
        assert lines[2].startswith("hint: ")

    def test_a_value_with_dashes_has_its_spelling_in_the_hint(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main.main(["generate", "--max-new-tokens", "--x"])
        assert "`--option=VALUE`" in capsys.readouterr().err

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError()])
    def test_other_ends_have_a_status(
        self,
        error: BaseException,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        def fail(arguments: Sequence[str]) -> int:
            raise error

        monkeypatch.setattr(plan, "main", fail)
        monkeypatch.setattr("os.dup2", lambda *_: 0)
        status = main.main(["plan"])
        assert status == (main.INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)

    def test_a_closed_pipe_is_no_traceback(self) -> None:
        command = f"{sys.executable} -m pie_driver_sglang doctor --json | true"
        result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in result.stderr
        assert "Exception" not in result.stderr


class TestModule:
    def test_an_argument_is_a_command(self) -> None:
        result = run("--version")
        assert result.returncode == 0
        assert result.stdout.strip() == version.version_line()
        assert run("doctro").returncode == main.USAGE

    def test_the_runtimes_call_is_the_driver(self, tmp_path: Path) -> None:
        result = run("--config", str(tmp_path / "none.toml"), "--handshake-fd", "1")
        assert result.returncode == 1
        assert "none.toml' does not exist" in result.stderr

    def test_nothing_comes_from_the_working_directory(self, tmp_path: Path) -> None:
        (tmp_path / "json.py").write_text("raise SystemExit(99)")
        (tmp_path / "argparse.py").write_text("raise SystemExit(99)")
        assert run("--version", folder=tmp_path).returncode == 0
        assert run("plan", "--help", folder=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["plan", "--model", str(POCKET), "--device-gib", "8"],
        ["check", "/nowhere.toml"],
        ["doctor"],
    ],
    ids=lambda words: words[0],
)
def test_neither_torch_nor_sglang_is_imported(words: list[str]) -> None:
    text = (
        "import sys\n"
        "from pie_driver_sglang.cli.main import main\n"
        f"main({words!r})\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(','.join(names & {'torch', 'sglang', 'triton', 'transformers'}) or 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


class TestVersion:
    def test_it_names_the_release_and_the_build(self) -> None:
        line = version.version_line()
        assert line.startswith(f"pie-driver-sglang {pie_driver_sglang.__version__} (")
        assert _core.build_info()["profile"] in line

    def test_the_commit_is_read_from_a_checkout(self, tmp_path: Path) -> None:
        package = tmp_path / "python" / "pie_driver_sglang"
        package.mkdir(parents=True)
        file = package / "__init__.py"
        assert version._checkout_commit(file) == ""
        for words in (
            ["init", "--quiet"],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-qm", "x"],
        ):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
        head = subprocess.check_output(
            ["git", "-C", str(tmp_path), "rev-parse", "HEAD"], text=True
        ).strip()
        found = version._checkout_commit(file)
        assert len(found) >= 7
        assert head.startswith(found)

    def test_a_broken_checkout_has_none(self, tmp_path: Path) -> None:
        (tmp_path / ".git").write_text("gitdir: /nowhere")
        assert version._checkout_commit(tmp_path / "python" / "p" / "__init__.py") == ""

    def test_the_makefile_passes_the_commit_on(self) -> None:
        assert "PIE_DRIVER_COMMIT" in (REPOSITORY / "Makefile").read_text()


def planned(folder: Path, gib: float = 80, ranks: int = 1, **table: Any) -> plan.Planned:
    device = Device("cuda:0", int(gib * GIB), int(gib * GIB) - plan.CONTEXT_BYTES)
    return plan.make_plan(folder, device=device, table=table, ranks=ranks, dtype="bfloat16")


class TestPlan:
    def test_a_shape_alone_is_planned(self, tmp_path: Path) -> None:
        found = planned(write_model(tmp_path / "model"))
        assert found.weights == "the shape in config.json: an estimate"
        # 30 MB are tables of positions.
        tables = (131072 + 256) * 128 * 4
        assert found.plan.weights - tables == pytest.approx(LLAMA_8B_BYTES, rel=1e-3)
        assert found.plan.token_bytes == 32 * 8 * 2 * 128 * 2
        assert found.refusal is None
        assert found.plan.tokens * found.plan.token_bytes + found.plan.weights < 80 * GIB

    def test_an_index_is_exact(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model")
        index = {"metadata": {"total_size": LLAMA_8B_BYTES}, "weight_map": {}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        found = planned(folder)
        assert found.weights == "the index of its files"
        assert found.plan.weights == LLAMA_8B_BYTES + (131072 + 256) * 128 * 4

    def test_the_headers_of_the_weights_come_first(self) -> None:
        found = planned(POCKET)
        assert found.weights == "the headers of its files"
        assert 11 << 20 < found.plan.weights < 12 << 20

    def test_ranks_divide_the_weights(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model")
        whole, half = planned(folder), planned(folder, ranks=2)
        assert half.plan.token_bytes == whole.plan.token_bytes // 2
        assert half.plan.weights == pytest.approx(whole.plan.weights / 2, rel=0.01)

    def test_what_does_not_fit_names_a_key_that_helps(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_model(tmp_path / "model")
        words = ["plan", "--model", str(folder), "--device-gib", "28"]
        assert main.main(words) == 1
        printed = capsys.readouterr().out
        assert "does not fit: the model needs more than" in printed
        length = int(printed.partition("hint: set `context_length = ")[2].partition("`")[0])
        assert main.main([*words, "--max-model-len", str(length)]) == 0
        assert f"contexts of {length:,} tokens" in capsys.readouterr().out
        assert main.main([*words, "--option", f"context_length={length + 16}"]) == 1

    def test_json_has_the_plan_in_bytes(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["plan", "--model", str(POCKET), "--device-gib", "8", "--json"]
        assert main.main(words) == 0
        document = json.loads(capsys.readouterr().out)
        parts = ("weights", "activations", "graphs", "tables", "reserve", "kv")
        assert sum(document["plan"][part] for part in parts) == document["device"]["free"]
        assert document["fits"] is True

    def test_options_change_it(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model")
        usual = planned(folder).plan
        assert planned(folder, kv_cache_dtype="fp8_e4m3").plan.token_bytes * 2 == usual.token_bytes
        assert planned(folder, disable_cuda_graph=True).plan.graphs == 0
        assert planned(folder, enable_lora=True).plan.adapters > GIB
        # All that is linear, in one byte; the vocabulary stays.
        less = usual.weights - planned(folder, quantization="fp8").plan.weights
        assert less == pytest.approx(32 * 218_103_808, rel=0.01)
        warning = planned(folder, mem_fraction_static=0.97).warning
        assert warning is not None
        assert "may run out of memory" in warning

    def test_a_model_in_front_and_flags_of_the_server(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = str(write_model(tmp_path / "model"))

        def settings(*words: str) -> Any:
            main.main(["plan", *words, "--device-gib", "80", "--json"])
            return json.loads(capsys.readouterr().out)

        words = ["--quantization", "fp8", "--kv-cache-dtype=fp8_e4m3", "--context-length", "4096"]
        words += ["--mem-fraction-static", "0.8", "--disable-cuda-graph"]
        options = ["quantization=fp8", "kv_cache_dtype=fp8_e4m3", "context_length=4096"]
        options += ["mem_fraction_static=0.8", "disable_cuda_graph=true"]
        by_options = [word for each in options for word in ("--option", each)]
        planned = settings("--model", folder, *by_options)
        assert settings(folder, *words) == settings(*words, folder) == planned
        assert planned["plan"] != settings(folder)["plan"]
        with pytest.raises(SystemExit):
            main.main(["plan", "--device-gib", "80"])
        assert "no model is named" in capsys.readouterr().err

    def test_this_host_can_be_planned_for(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["plan", "--model", str(POCKET), "--cpu", "--dtype", "float32"]) == 0
        assert "memory planned for cpu" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("changed", "text"),
        [
            ({"hidden_size": None}, "no usable `hidden_size`"),
            ({"layer_types": ["linear_attention"]}, "keeps recurrent state"),
            ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "latent attention does not give"),
            ({"architectures": ["NoSuchForCausalLM"]}, f"SGLang {SGLANG_VERSION} has no NoSuch"),
        ],
    )
    def test_what_cannot_be_planned_has_a_reason(
        self, tmp_path: Path, changed: dict[str, Any], text: str
    ) -> None:
        with pytest.raises(ConfigError, match=text) as refusal:
            planned(write_model(tmp_path / "model", **changed))
        assert refusal.value.hint

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["--option", "page_size"], "is not KEY=VALUE"),
            (["--option", "pagesize=3"], "unknown option 'pagesize'"),
            (["--option", "page_size=many"], "option `page_size` is 'many'"),
            (["--device-gib", "-3"], "--device-gib is -3"),
            (["--max-model-len", "4096"], "option `context_length` is 4096"),
        ],
    )
    def test_wrong_arguments_of_the_command_are_named(
        self, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = ["plan", "--model", str(POCKET), "--device-gib", "8", *words]
        assert main.main(given) == 1
        assert text in capsys.readouterr().err

    def test_values_of_options_are_toml_or_text(self) -> None:
        assert option_checks.parse_option("a=3") == ("a", 3)
        assert option_checks.parse_option("a = true") == ("a", True)
        assert option_checks.parse_option('a=["x", "y"]') == ("a", ["x", "y"])
        assert option_checks.parse_option("a=triton,pie") == ("a", "triton,pie")
        assert option_checks.parse_option("a=b=c") == ("a", "b=c")


class TestDocument:
    TEXT = (REPOSITORY / "docs" / "commands.md").read_text()

    def test_it_lists_every_command(self) -> None:
        listed = set(re.findall(r"^\| `pie-sglang ([a-z]+)\b", self.TEXT, re.MULTILINE))
        assert listed == set(main.COMMANDS)

    @pytest.mark.parametrize("name", main.COMMANDS)
    def test_it_has_every_option(
        self, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Help texts of a narrow terminal wrap within flags.
        monkeypatch.setenv("COLUMNS", "400")
        with pytest.raises(SystemExit):
            main.main([name, "--help"])
        _, _, section = self.TEXT.partition(f"\n## `{name}`\n")
        section, _, _ = section.partition("\n## ")
        # `serve --help` ends with SGLang's flags, which its documentation explains.
        text, _, _ = capsys.readouterr().out.partition("\nSGLang's flags")
        options = set(re.findall(r"--[a-z][a-z-]*", text)) - {"--help"}
        assert {option for option in options if f"`{option}" not in section} == set()
        words = re.findall(r"`(--[a-z][a-z-]*)", section)
        assert {word for word in words if word not in options} == set()
