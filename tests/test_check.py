"""`pie-sglang check` on valid and invalid configurations."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang.cli import check, main, pie_config
from pie_driver_sglang.cli.machine import Shm
from pie_driver_sglang.cli.report import Finding, exit_status
from pie_driver_sglang.config.config_file import read_table
from pie_driver_sglang.config.driver_config import NEVER_PARK
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.memory.units import GIB
from support.models.tiny_models import POCKET
from support.process import drivers

FREE_SHM = Shm(GIB, GIB, "tmpfs")


def table(options: Mapping[str, Any] | None = None, **driver: Any) -> dict[str, Any]:
    section = {
        "group_id": 0,
        "device": ["cpu"],
        "activation_dtype": "float32",
        "options": dict(options or {}),
        **driver,
    }
    return {"model": {"name": "pocket", "snapshot_dir": str(POCKET)}, "driver": section}


def texts(found: list[Finding], status: str) -> list[str]:
    return [finding.text for finding in found if finding.status == status]


def test_a_good_configuration_is_described() -> None:
    found = list(check.check_table(table(), FREE_SHM))
    assert exit_status(found) == 0
    assert [finding.name for finding in found] == ["configuration", "region"]
    assert found[0].text == (
        "pocket (Qwen3ForCausalLM) on cpu: float32, contexts of 2,048 tokens, "
        "up to 256 requests at once"
    )
    assert found[1].values["bytes"] == _core.region_bytes()


def test_every_wrong_option_is_named_at_once() -> None:
    options = {
        "pagesize": 32,
        "kv_cache_dtype": 3,
        "tp_size": 2,
        "context_length": 0,
        # These are right, but only together.
        "max_loras_per_batch": 64,
        "max_loaded_loras": 64,
        "spec_ngram_min_n": 20,
        "spec_ngram_max_depth": 30,
    }
    found = list(check.check_table(table(options), FREE_SHM))
    failed = texts(found, "fail")
    assert len(failed) == 4
    for part in ("'pagesize'", "`kv_cache_dtype` is 3", "`tp_size`", "`context_length` is 0"):
        assert any(part in text for text in failed), part
    assert all(finding.hint for finding in found)
    assert exit_status(found) == 1


def test_options_that_are_wrong_together_are_one_error() -> None:
    found = list(check.check_table(table({"spec_ngram_min_n": 9, "spec_ngram_max_n": 3}), FREE_SHM))
    (text,) = texts(found, "fail")
    assert "`spec_ngram_min_n` is 9" in text


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        ({"device": ["cpu", "cuda:0"]}, "each rank needs one device"),
        ({"device": ["gpu"]}, "names 'gpu'"),
        ({"device": []}, "`driver.device` is empty"),
        ({"activation_dtype": "int8"}, "`driver.activation_dtype` is 'int8'"),
        ({"options": 3}, "`driver.options` is 3"),
    ],
)
def test_a_wrong_section_is_one_error(driver: dict[str, Any], text: str) -> None:
    wrong = table()
    wrong["driver"] |= driver
    found = list(check.check_table(wrong, FREE_SHM))
    assert len(found) == 1
    assert text in found[0].text
    assert found[0].hint


def test_weights_in_host_memory_must_fit_it() -> None:
    options = {"cpu_offload_gb": 2**20}
    for device in (["cuda:0"], ["cuda:0", "cuda:1"]):
        wrong = table(options, device=device, tensor_parallel_size=len(device))
        found = list(check.check_table(wrong, FREE_SHM))
        assert any("`cpu_offload_gb` is 1048576" in text for text in texts(found, "fail"))
    assert exit_status(list(check.check_table(table(options), FREE_SHM))) == 0


def test_what_is_ignored_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = list(check.check_table(table(spin_budget=3), FREE_SHM))
    (text,) = texts(found, "warn")
    assert "`driver.spin_budget` is unknown and ignored" in text
    assert exit_status(found) == 0
    # It is shown once, by the command.
    assert not caplog.records
    assert logging.getLogger("pie_driver_sglang").propagate


def test_a_region_without_free_shared_memory() -> None:
    small = Shm(64 << 20, 8 << 20, "tmpfs")
    (finding,) = [f for f in check.check_table(table(), small) if f.name == "region"]
    assert finding.status == "fail"
    assert "48.0 MiB of /dev/shm, which has 8.0 MiB free" in finding.text
    assert "--shm-size" in finding.hint


def test_a_request_that_no_region_can_hold(tmp_path: Path) -> None:
    model = json.loads((POCKET / "config.json").read_text())
    model["max_position_embeddings"] = 2**28
    (tmp_path / "config.json").write_text(json.dumps(model))
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(POCKET / name)
    long = table()
    long["model"]["snapshot_dir"] = str(tmp_path)
    (finding,) = [f for f in check.check_table(long, FREE_SHM) if f.name == "region"]
    assert finding.status == "fail"
    assert "4294967296 bytes" in finding.text
    assert "context_length" in finding.hint


def test_a_trace_file_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("kept")
    for path in (new, old):
        found = list(check.check_table(table({"trace_file": str(path)}), FREE_SHM))
        assert exit_status(found) == 0
    assert not new.exists()
    assert old.read_text() == "kept"
    nowhere = str(tmp_path / "none" / "trace.json")
    found = list(check.check_table(table({"trace_file": nowhere}), FREE_SHM))
    assert any("`trace_file`: cannot write" in text for text in texts(found, "fail"))


def test_memory_for_swapping_that_the_host_lacks() -> None:
    found = list(check.check_table(table({"cpu_mem_budget_in_gb": 2**20}), FREE_SHM))
    (text,) = texts(found, "fail")
    assert "`cpu_mem_budget_in_gb` is 1048576" in text


def test_other_packages_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> None:
        raise StartError("sglang is 0.5.23", "install 0.5.17")

    monkeypatch.setattr(check, "check_versions", refuse)
    config = drivers.write_config(tmp_path, POCKET)
    found = list(check.check_file(config))
    assert found[0] == Finding("packages", "fail", "sglang is 0.5.23", "install 0.5.17")
    # The rest is checked all the same.
    assert [finding.name for finding in found[1:]] == ["configuration", "region"]


SERVER_FILE = """
[[model]]
name = "a"
hf_repo = "{pocket}"

[model.driver]
type = "sglang"
device = ["cpu", "cpu:1"]
tensor_parallel_size = 1
activation_dtype = "float32"
ipc_profile = "{profile}"

[model.driver.options]
page_size = {page}

[[model]]
name = "b"
hf_repo = "{pocket}"

[model.driver]
type = "{type}"
device = ["cpu"]
activation_dtype = "float32"
"""


def server_file(folder: Path, **values: Any) -> Path:
    defaults = {"pocket": POCKET, "profile": "latency", "page": 16, "type": "sglang"}
    path = folder / "pie.toml"
    path.write_text(SERVER_FILE.format(**{**defaults, **values}))
    return path


class TestServerFile:
    def test_every_model_of_this_driver_is_checked(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main.main(["check", str(server_file(tmp_path)), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        names = [finding["name"] for finding in document["findings"]]
        assert names == [
            "packages",
            "a: configuration",
            "a: region",
            "b: configuration",
            "b: region",
        ]

    def test_other_drivers_are_left_out(self, tmp_path: Path) -> None:
        path = server_file(tmp_path, type="vllm")
        found = pie_config.driver_tables(read_table(path))
        assert [driver.model for driver in found] == ["a"]

    def test_the_first_group_of_several_is_written(self, tmp_path: Path) -> None:
        first, _ = pie_config.driver_tables(read_table(server_file(tmp_path)))
        driver = first.table["driver"]
        assert driver["device"] == ["cpu"]
        assert driver["spin_budget_us"] == NEVER_PARK
        assert driver["options"] == {"page_size": 16}
        assert first.table["model"]["snapshot_dir"] == str(POCKET)

    def test_what_is_wrong_in_it_is_found(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main.main(["check", str(server_file(tmp_path, page=0))]) == 1
        printed = capsys.readouterr().out
        assert "option `page_size` is 0, outside 1 to 1024" in printed
        assert "hint: set `page_size`" in printed
        assert printed.splitlines()[-1] == "1 problem"

    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"profile": "fast"}, "`ipc_profile` is 'fast'"),
            ({"pocket": "no/such-model"}, "neither a folder nor in the Hugging Face cache"),
            ({"pocket": "/no/such"}, "neither a folder nor the name of a repository"),
        ],
    )
    def test_wrong_values_are_named(
        self, tmp_path: Path, values: dict[str, Any], text: str
    ) -> None:
        found = list(check.check_file(server_file(tmp_path, **values)))
        assert any(text in line for line in texts(found, "fail"))

    def test_a_model_without_a_driver(self) -> None:
        with pytest.raises(ConfigError, match=r"has no \[model\.driver\]"):
            list(pie_config.driver_tables({"model": [{"hf_repo": "a/b"}]}))

    def test_a_file_without_a_model_of_this_driver(self, tmp_path: Path) -> None:
        path = tmp_path / "pie.toml"
        path.write_text('[[model]]\nhf_repo = "a/b"\n[model.driver]\ntype = "vllm"\n')
        found = list(check.check_file(path))
        assert texts(found, "fail") == ["no model of the file has a driver of this type"]

    def test_a_cached_model_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pie_config, "cached_snapshot", lambda name: tmp_path / name)
        path = server_file(tmp_path, pocket="org/name")
        first, _ = pie_config.driver_tables(read_table(path))
        assert first.table["model"]["snapshot_dir"] == str(tmp_path / "org" / "name")


@pytest.mark.parametrize("text", ["", "[model", "x = 1"])
def test_a_file_that_is_none_is_one_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "driver.toml"
    path.write_text(text)
    assert main.main(["check", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "fail  configuration  " in printed
    assert "Traceback" not in printed


def test_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    config = drivers.write_config(tmp_path, POCKET)
    list(check.check_file(config))
    group = read_table(config)["driver"]["group_id"]
    assert not Path(f"/dev/shm/pie_shmem_g{group}").exists()
