"""Formats of weights, and places of models, that are refused before anything is loaded."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.config import weight_formats
from pie_driver_sglang.config.option_checks import parse_options
from pie_driver_sglang.config.weight_formats import TORCHAO, check_stored_format
from pie_driver_sglang.errors import ConfigError, Unsupported
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.common.model_location import remote_scheme
from pie_driver_sglang.frontends.sglang_server import server_process
from support import versions
from support.models import compressed_checkpoints
from support.models.tiny_models import POCKET
from support.process import drivers


def refusal(options: dict[str, Any], device: str = "cpu") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_options(options, device)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", ["load_format", "quantization"])
def test_bitsandbytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {name: "bitsandbytes"}
    assert "need a GPU" in str(refusal(options))
    monkeypatch.setattr(weight_formats.util, "find_spec", lambda _: None)
    assert "not installed" in str(refusal(options, "cuda:0"))
    monkeypatch.setattr(weight_formats.util, "find_spec", lambda _: object())
    assert parse_options(options, "cuda:0").server_args == options


def test_a_checkpoint_of_bitsandbytes(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(POCKET, model)
    config = json.loads((model / "config.json").read_text())
    stored = {**config, "quantization_config": {"quant_method": "bitsandbytes"}}
    (model / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="the weights are quantized by bitsandbytes"):
        parse_arguments({"model_path": str(model), "device": "cpu"})
    check_stored_format({**stored, "quantization_config": {"quant_method": "fp8"}}, "cpu")


@pytest.mark.engine
@pytest.mark.parametrize("scheme", compressed_checkpoints.SCHEMES)
def test_a_checkpoint_of_compressed_tensors(scheme: str, tmp_path: Path) -> None:
    """SGLang asks for the GPU's compute capability, whatever the scheme is."""
    model = compressed_checkpoints.write(tmp_path / "model", scheme)
    with pytest.raises(ConfigError, match="quantized by compressed-tensors, whose") as refusal:
        parse_arguments({"model_path": str(model), "device": "cpu", "dtype": "bfloat16"})
    assert "cuda:0" in refusal.value.hint
    check_stored_format(json.loads((model / "config.json").read_text()), "cuda:0")
    drivers.start_fork_server()
    with pytest.raises(drivers.StartFailedError) as failed:
        drivers.fork(drivers.write_config(tmp_path, model))
    assert "quantized by compressed-tensors, whose" in failed.value.stderr
    assert "loading" not in failed.value.stderr


@versions.of_the_newest("it has the option")
def test_there_is_no_torchao() -> None:
    assert "unknown option 'torchao_config'" in str(refusal({"torchao_config": "int8wo"}))


@versions.of_the_oldest("it has no torchao")
@pytest.mark.parametrize("installed", [None, "", "float8_dynamic_activation_float8_weight"])
def test_torchao(installed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that SGLang 0.5.17 requires lacks what SGLang imports of it."""
    assert "which SGLang does not know" in str(refusal({"torchao_config": "int3"}))
    spec = None
    if installed is not None:
        (tmp_path / "quantization").mkdir()
        (tmp_path / "quantization" / "__init__.py").write_text(installed)
        spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(weight_formats.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(weight_formats.metadata, "version", lambda _: "0.17.0")
    for name in TORCHAO:
        if installed:
            assert parse_options({"torchao_config": name}, "cuda:0").server_args
        else:
            lacks = "is not installed" if spec is None else "0.17.0 has not"
            assert lacks in str(refusal({"torchao_config": name}, "cuda:0"))


@versions.of_the_oldest("it has no torchao")
@pytest.mark.engine
def test_the_names_of_torchao_are_those_of_sglang() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    [root] = spec.submodule_search_locations or ()
    source = Path(root, "srt", "layers", "torchao_utils.py").read_text()
    assert "float8_dynamic_activation_float8_weight" in source
    for name in TORCHAO:
        assert name.partition("-")[0] in source


@pytest.mark.parametrize("name", ["remote", "remote_instance"])
def test_weights_from_elsewhere_are_sglangs(name: str) -> None:
    assert isinstance(refusal({"load_format": name}), Unsupported)
    for given in ({"load_format": "gguf"}, {"quantization": "gguf"}):
        assert not isinstance(refusal(given), Unsupported)


def test_models_by_url() -> None:
    assert remote_scheme("s3://bucket/model") == "s3"
    for name in ("meta-llama/Llama-3.1-8B", "/models/a", "./s3:/a", "C:/models"):
        assert remote_scheme(name) is None
    own = server_process.split_arguments([])
    for url in ("s3://bucket/model", "gs://bucket/model", "redis://host:6379/model"):
        plan, reason = server_process.choose_scheduler(own, {"model_path": url, "device": "cpu"})
        assert plan is None
        assert f"{url!r} is a URL" in reason
    for url in ("https://host/model", "http://host/model", "ftp://host/model"):
        with pytest.raises(ConfigError, match="is a URL") as caught:
            server_process.choose_scheduler(own, {"model_path": url, "device": "cpu"})
        assert not isinstance(caught.value, Unsupported)
