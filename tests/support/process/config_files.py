"""A minimal `driver.toml` with a snapshot, for tests of the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig, DriverSection, ModelSection
from pie_driver_sglang.config.option_checks import parse_options
from pie_driver_sglang.errors import ConfigError

HF_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
}
Write = Callable[..., Path]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(HF_CONFIG))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def write(tmp_path: Path, snapshot: Path) -> Write:
    """Write a file with the required keys, given lines of [driver] and text after it."""

    def write_file(driver: str = "", after: str = "", **required: str) -> Path:
        keys = {"group_id": "0", "device": '["cpu"]', "snapshot_dir": json.dumps(str(snapshot))}
        keys |= required
        path = tmp_path / "driver.toml"
        path.write_text(
            f"[model]\nsnapshot_dir = {keys['snapshot_dir']}\n"
            f"[driver]\ngroup_id = {keys['group_id']}\ndevice = {keys['device']}\n{driver}\n{after}"
        )
        return path

    return write_file


def refused(path: Path, *parts: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    error = caught.value
    for part in parts:
        assert part in f"{error} {error.hint}"
    assert error.hint
    assert "\n" not in str(error)
    return error


def config_of(**options: Any) -> DriverConfig:
    """A configuration with these options, of a snapshot that need not exist."""
    parsed = parse_options(options, "cpu")
    driver = DriverSection(group_id=0, device=("cpu",), options=parsed)
    return DriverConfig(model=ModelSection(snapshot_dir=Path("snapshot")), driver=driver)
