"""The launcher's file: what is accepted, and what every mistake says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pie_driver_sglang import __version__
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.errors import ConfigError, quoted

ROOT = Path(__file__).parent.parent
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


def test_the_file_of_the_runtime(tmp_path: Path, snapshot: Path) -> None:
    path = tmp_path / "driver.toml"
    path.write_text(f"""
        [model]
        name = "default"
        hf_repo = "Qwen/Qwen3-0.6B"
        snapshot_dir = {json.dumps(str(snapshot))}
        [driver]
        group_id = 3
        device = ["cuda:1"]
        tensor_parallel_size = 1
        activation_dtype = "float16"
        random_seed = -42
        master_port = 29731
        ready_timeout_s = 1200.0
        spin_budget_us = "18446744073709551615"
        [driver.options]
        quantization = "fp8"
    """)
    config = load_config(path)
    assert config.model.name == "default"
    assert config.model.hf_repo == "Qwen/Qwen3-0.6B"
    assert config.model.snapshot_dir == snapshot
    assert config.driver.group_id == 3
    assert config.driver.device == ("cuda:1",)
    assert config.driver.activation_dtype == "float16"
    assert config.driver.random_seed == -42
    assert config.driver.master_port == 29731
    assert config.driver.spin_budget_us == 2**64 - 1
    assert config.driver.options.server_args == {"quantization": "fp8"}
    assert config.driver.options.attention_backend == "triton"


def test_defaults_of_the_contract(write: Write) -> None:
    driver = load_config(write()).driver
    assert driver.tensor_parallel_size == 1
    assert driver.activation_dtype == "bfloat16"
    assert driver.random_seed == 42
    assert driver.ready_timeout_s == 1200.0
    assert driver.spin_budget_us == 1000
    assert driver.options.attention_backend == "torch_native"


def test_configs_are_frozen(write: Write) -> None:
    config = load_config(write())
    assert isinstance(config, DriverConfig)
    with pytest.raises(AttributeError):
        config.driver.group_id = 1  # type: ignore[misc]


def test_unknown_sections_and_keys_are_tolerated(write: Write) -> None:
    path = write('future = "x"', "[telemetry]\nenabled = true\n[model.extra]\na = 1\n")
    assert load_config(path).driver.group_id == 0


def test_a_byte_order_mark_is_tolerated(write: Write) -> None:
    path = write()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_config(path).driver.group_id == 0


@pytest.mark.parametrize(
    ("written", "parsed"),
    [("0", 0), ("1000", 1000), ('"1000"', 1000), ("9223372036854775807", 2**63 - 1), ('"0"', 0)],
)
def test_spin_budget(write: Write, written: str, parsed: int) -> None:
    assert load_config(write(f"spin_budget_us = {written}")).driver.spin_budget_us == parsed


@pytest.mark.parametrize(
    "written", ["-1", '"-1"', '""', '"1e3"', '"18446744073709551616"', '"٣"', f'"{"9" * 5000}"']
)
def test_spin_budget_out_of_range(write: Write, written: str) -> None:
    refused(write(f"spin_budget_us = {written}"), "driver.spin_budget_us", "18446744073709551615")


@pytest.mark.parametrize(
    ("written", "device"),
    [
        ('["cpu"]', "cpu"),
        ('["cpu:0"]', "cpu"),
        ('["cpu:17"]', "cpu"),
        ('["cuda"]', "cuda:0"),
        ('["cuda:7"]', "cuda:7"),
        ('"cpu"', "cpu"),
    ],
)
def test_devices(write: Write, written: str, device: str) -> None:
    assert load_config(write(device=written)).driver.device == (device,)


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        (("cpu", "cpu"), ("cpu", "cpu")),
        (("cpu", "cpu:1"), ("cpu", "cpu")),  # Pie wants names that differ.
        (("cpu:1", "cpu:1"), ("cpu", "cpu")),
        (("cuda:0", "cuda:1"), ("cuda:0", "cuda:1")),
        (("cuda:3", "cuda:1"), ("cuda:3", "cuda:1")),
    ],
)
def test_a_device_for_each_rank(
    write: Write, devices: tuple[str, ...], found: tuple[str, ...]
) -> None:
    driver = load_config(write("tensor_parallel_size = 2", device=json.dumps(devices))).driver
    assert driver.device == found
    assert driver.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("devices", "lines", "parts"),
    [
        (("cpu", "cuda:0"), (), ("'cpu', 'cuda:0'", "not both", "one kind")),
        (("cuda:1", "cuda:1"), (), ("lists cuda:1 more than once", "different GPUs")),
        (("cpu",) * 65, (), ("65", "outside 1 to 64")),
        (("cpu",) * 5, (), ("is 5", "has 24 attention heads", "use 1 or 2 or 4 or 8 devices")),
        (("cpu",) * 3, (), ("over 8 of keys and values", "use 1 or 2 or 4 devices")),
    ],
)
def test_devices_that_do_not_go_together(
    write: Write, devices: tuple[str, ...], lines: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    size = f"tensor_parallel_size = {len(devices)}"
    refused(write("\n".join([size, *lines]), device=json.dumps(devices)), *parts)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("tensor_parallel_size = 0", ("driver.tensor_parallel_size", "outside 1")),
        ("tensor_parallel_size = 2", ("lists 1", "is 2", "each rank", "tensor_parallel_size = 1")),
        ('activation_dtype = "int8"', ("'int8'", "bfloat16, float16, float32")),
        ("activation_dtype = 16", ("driver.activation_dtype", "16", "expected string")),
        ("random_seed = 0xffffffffffffffffff", ("driver.random_seed", "outside")),
        ("random_seed = 1.5", ("driver.random_seed", "expected int, got float")),
        ("kept_pages = -1", ("driver.kept_pages", "-1", "4294967295")),
        ("master_port = 70000", ("driver.master_port", "70000", "65535")),
        ("ready_timeout_s = nan", ("driver.ready_timeout_s", "nan")),
        ("ready_timeout_s = -1", ("driver.ready_timeout_s", "-1")),
        ("spin_budget_us = 1.0", ("driver.spin_budget_us", "expected int | string")),
        ("options = 1", ("driver.options", "expected table")),
        ("options = { atention_backend = 'x' }", ("atention_backend", "`attention_backend`")),
    ],
)
def test_wrong_values(write: Write, line: str, parts: tuple[str, ...]) -> None:
    refused(write(line), *parts)


@pytest.mark.parametrize(
    ("required", "parts"),
    [
        ({"group_id": "-1"}, ("driver.group_id", "-1", "4294967295")),
        ({"group_id": "4294967296"}, ("driver.group_id", "4294967296")),
        ({"group_id": "true"}, ("driver.group_id", "expected int, got bool")),
        ({"device": "[]"}, ("driver.device", "empty")),
        ({"device": '["gpu"]'}, ("'gpu'", "`cpu`, `cpu:N` or `cuda:N`")),
        ({"device": '["cpu:"]'}, ("'cpu:'", "`cpu:N`")),
        ({"device": '["cpu:-1"]'}, ("'cpu:-1'", "`cpu:N`")),
        ({"device": '["cpu:٣"]'}, ("`cpu:N`",)),
        ({"device": '["cuda:-1"]'}, ("'cuda:-1'", "`cuda:N`")),
        ({"device": '["cuda:٣"]'}, ("`cuda:N`",)),
        ({"device": '["cuda:0", "cuda:1"]'}, ("lists 2", "each rank", "tensor_parallel_size = 2")),
        ({"device": "[0]"}, ("driver.device[0]", "expected string")),
        ({"snapshot_dir": '""'}, ("model.snapshot_dir", "names no directory")),
        ({"snapshot_dir": r'"\u0000"'}, ("model.snapshot_dir", "names no directory")),
        ({"snapshot_dir": '"/no/such/place"'}, ("'/no/such/place'", "does not exist")),
        ({"snapshot_dir": '"/tmp/model.gguf"'}, ("GGUF", "Hugging Face snapshot")),
        ({"snapshot_dir": f'"/{"x" * 5000}"'}, ("snapshot",)),
        ({"snapshot_dir": "7"}, ("model.snapshot_dir", "expected string, got int")),
    ],
)
def test_wrong_required_values(
    write: Write, required: dict[str, str], parts: tuple[str, ...]
) -> None:
    refused(write(**required), *parts)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("", "model"),
        ("[driver]\n", "driver.group_id"),
        ("[driver]\ngroup_id = 0\ndevice = 'cpu'\n", "model"),
        ("[model]\n[driver]\n", "model.snapshot_dir"),
        ("[model]\nsnapshot_dir = '/'\n", "driver"),
        ("[model]\nsnapshot_dir = '/'\n[driver]\n", "driver.group_id"),
        ("[model]\nsnapshot_dir = '/'\n[driver]\ngroup_id = 0\n", "driver.device"),
    ],
)
def test_missing_keys(tmp_path: Path, text: str, missing: str) -> None:
    path = tmp_path / "driver.toml"
    path.write_text(text)
    refused(path, f"configuration has no `{missing}`")


def test_invalid_toml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "driver.toml"
    path.write_text("[model]\nname = \n")
    refused(path, str(path), "not valid TOML", "line 2")


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe", b"a = " + b"[" * 100_000, b"a = " + b"1" * 5000, b"a = 1\na = 2", b"\0"],
)
def test_hostile_toml(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "driver.toml"
    path.write_bytes(data)
    refused(path, "not valid TOML")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    refused(tmp_path / "none.toml", "does not exist", "--config")
    refused(tmp_path, "not a regular file")
    refused(Path("/dev/zero"), "not a regular file")
    refused(tmp_path / ("x" * 5000), "cannot read")
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2 << 20))
    refused(large, "larger than 1048576 bytes")


def test_a_snapshot_that_is_a_file(write: Write, snapshot: Path) -> None:
    refused(
        write(snapshot_dir=json.dumps(str(snapshot / "config.json"))), "is a file, not a directory"
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ("has no config.json", "download")),
        ("{", ("cannot read", "config.json")),
        ("[" * 100_000, ("cannot read", "config.json")),
        ("[]", ("not a JSON object",)),
        ('{"architectures": ["A"]}', ("`model_type`", "None")),
        ('{"model_type": 3, "architectures": ["A"]}', ("`model_type`", "3")),
        ('{"model_type": "a"}', ("`architectures`", "None")),
        ('{"model_type": "a", "architectures": []}', ("`architectures`", "[]")),
    ],
)
def test_model_configs(
    write: Write, snapshot: Path, text: str | None, parts: tuple[str, ...]
) -> None:
    (snapshot / "config.json").unlink()
    if text is not None:
        (snapshot / "config.json").write_text(text)
    refused(write(), *parts)


def test_a_model_config_that_could_block(write: Write, snapshot: Path) -> None:
    (snapshot / "config.json").unlink()
    os.mkfifo(snapshot / "config.json")
    refused(write(), "config.json' is not a regular file", "download")


def test_infinity_in_a_model_config(snapshot: Path) -> None:
    config: dict[str, Any] = {**HF_CONFIG, "time_step_limit": [0.0, float("inf")]}
    (snapshot / "config.json").write_text(json.dumps(config))
    assert load_hf_config(snapshot) == config


def test_weights(write: Write, snapshot: Path) -> None:
    weights = snapshot / "model.safetensors"
    weights.rename(snapshot / "adapter_model.safetensors")
    refused(write(), "has no weights", 'load_format = "dummy"')
    load_config(write(after='[driver.options]\nload_format = "dummy"'))
    load_config(write(after='[driver.options]\nload_format = "runai_streamer"'))
    weights.symlink_to(snapshot / "blob-that-was-never-downloaded")
    refused(write(), "has no weights")
    (snapshot / "pytorch_model.bin").write_bytes(b"")
    load_config(write())
    refused(write(after='[driver.options]\nload_format = "safetensors"'), "has no weights")


def test_an_incomplete_download(write: Write, snapshot: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(write(), "lacks 1 of the weight files", "'model-2.safetensors'", "download")
    (snapshot / "model-2.safetensors").write_bytes(b"")
    load_config(write())


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 1}'])
def test_an_unreadable_index_is_left_to_the_loader(
    write: Write, snapshot: Path, index: str
) -> None:
    (snapshot / "model.safetensors.index.json").write_text(index)
    load_config(write())


def test_a_missing_tokenizer(
    write: Write, snapshot: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_config(write())
    assert not caplog.records
    (snapshot / "tokenizer.json").unlink()
    refused(write(), "no tokenizer", "tokenizer.json or tiktoken.model", "download")
    load_config(write(after='[driver.options]\nload_format = "dummy"'))
    (snapshot / "tiktoken.model").touch()
    load_config(write())


def changed(snapshot: Path, **values: Any) -> None:
    (snapshot / "config.json").write_text(json.dumps({**HF_CONFIG, **values}))


class TestSizes:
    """Numbers in `config.json` that no model has."""

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("head_dim", -16),
            ("head_dim", 2**20),
            ("hidden_size", 0),
            ("hidden_size", "64"),
            ("intermediate_size", -1),
            ("intermediate_size", [64, -64]),
            ("max_position_embeddings", 0),
            ("max_position_embeddings", 2**31),
            ("moe_intermediate_size", 2**40),
            ("num_attention_heads", 0),
            ("num_attention_heads", -4),
            ("num_attention_heads", 4.0),
            ("num_experts", -1),
            ("num_hidden_layers", -1),
            ("num_hidden_layers", 0),
            ("num_hidden_layers", 100_000),
            ("num_hidden_layers", True),
            ("num_hidden_layers", {}),
            ("num_key_value_heads", 0),
            ("num_key_value_heads", 10**4000),
            ("n_layer", -1),
            ("vocab_size", 0),
            ("vocab_size", -1),
            ("vocab_size", 2**40),
        ],
    )
    @pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
    def test_refused(
        self, key: str, value: object, nested: bool, write: Write, snapshot: Path
    ) -> None:
        changed(snapshot, **({"text_config": {key: value}} if nested else {key: value}))
        refused(write(), f"`{key}` = ", "expected an integer from ", f"correct `{key}`")

    @pytest.mark.parametrize(
        "sizes",
        [
            {"head_dim": None, "num_key_value_heads": None},
            {"intermediate_size": [64, 128], "num_experts": 0},
            {"text_config": {"num_hidden_layers": 2}, "num_hidden_layers": -1},
        ],
    )
    def test_taken(self, sizes: dict[str, Any], write: Write, snapshot: Path) -> None:
        changed(snapshot, **sizes)
        load_config(write())

    def test_left_to_sglang_when_it_is_told_other_ones(self, write: Write, snapshot: Path) -> None:
        changed(snapshot, num_hidden_layers=-1)
        options = """json_model_override_args = '{"num_hidden_layers": 2}'"""
        load_config(write(after=f"[driver.options]\n{options}"))


class TestArchitectures:
    """Those that SGLang lacks."""

    @pytest.mark.parametrize(
        ("names", "parts"),
        [
            (["UnheardOfForCausalLM"], ("UnheardOfForCausalLM", "`architectures`", "0.5.17")),
            (["Qwen3ForCasualLM"], ("did you mean `Qwen3ForCausalLM`",)),
            (["GPTNeoXForCausalLM"], ("has no GPTNeoXForCausalLM",)),
            (["a\nb" * 100], ("has no 'a\\nb",)),
        ],
    )
    def test_refused(
        self, names: list[str], parts: tuple[str, ...], write: Write, snapshot: Path
    ) -> None:
        changed(snapshot, architectures=names)
        refused(write(), *parts)

    def test_one_of_several_is_enough(self, write: Write, snapshot: Path) -> None:
        changed(snapshot, architectures=["UnheardOfForCausalLM", "Qwen3ForCausalLM"])
        load_config(write())

    def test_those_that_sglang_renames(self, write: Write, snapshot: Path) -> None:
        changed(snapshot, model_type="deepseek_vl_v2", architectures=["DeepseekVLV2ForCausalLM"])
        load_config(write())

    @pytest.mark.parametrize(
        "variable", ["SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_EXTERNAL_MODEL_PACKAGE"]
    )
    def test_those_that_may_be_added(
        self, variable: str, write: Write, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changed(snapshot, architectures=["UnheardOfForCausalLM"])
        monkeypatch.setenv(variable, "ours")
        load_config(write())


class TestContext:
    """More positions than the model has."""

    @pytest.mark.parametrize(
        ("config", "positions", "source"),
        [
            ({}, 2048, "`max_position_embeddings` in"),
            ({"rope_scaling": {"rope_type": "linear", "factor": 5.0}}, 10240, "rope factor 5.0"),
            ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, 8192, "rope factor 4"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048, "in its config.json"),
            (
                {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 512}},
                2048,
                "`max_position_embeddings`",
            ),
            ({"seq_length": 1024}, 1024, "`seq_length`"),
            ({"text_config": {"max_position_embeddings": 4096}}, 4096, "`max_pos"),
        ],
    )
    def test_refused(
        self, config: dict[str, Any], positions: int, source: str, write: Write, snapshot: Path
    ) -> None:
        changed(snapshot, **{"max_position_embeddings": 2048, **config})
        options = f"[driver.options]\ncontext_length = {positions}"
        assert load_config(write(after=options)).driver.options.context_length == positions
        options = f"[driver.options]\ncontext_length = {positions + 1}"
        parts = (f"is {positions + 1}", f"has {positions} positions", source, "at most", "LONGER")
        refused(write(after=options), "`context_length`", *parts)

    @pytest.mark.parametrize("value", ["1", "true", "YES"])
    def test_as_sglang_is_told(
        self, value: str, write: Write, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changed(snapshot, max_position_embeddings=2048)
        monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", value)
        load_config(write(after="[driver.options]\ncontext_length = 10000000"))

    def test_a_length_that_only_the_models_class_knows(self, write: Write) -> None:
        load_config(write(after="[driver.options]\ncontext_length = 10000000"))


class TestUnknownKeys:
    """The protocol wants them to be tolerated."""

    def test_they_are_named(self, write: Write, caplog: pytest.LogCaptureFixture) -> None:
        path = write("devise = 1", "[driver.option]\npage_size = 1\n[telemetry]\nenabled = true\n")
        load_config(path)
        text = caplog.text
        assert "`driver.devise` is unknown and ignored. did you mean `device`?" in text
        assert "`driver.option` is unknown and ignored. did you mean `options`?" in text
        assert "telemetry" not in text

    def test_a_misspelt_section(self, tmp_path: Path) -> None:
        path = tmp_path / "driver.toml"
        path.write_text("[model]\nsnapshot_dir = '/'\n[drivr]\ngroup_id = 0\n")
        refused(path, "configuration has no `driver`, but an unknown `drivr`")
        path.write_text("[model]\nsnapshot_dir = '/'\n[driver]\ngroup = 0\ndevice = 'cpu'\n")
        refused(path, "configuration has no `driver.group_id`, but an unknown `group`")


SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.integers().map(lambda n: n << 20_000),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["cpu", "cuda:0", "float16", "18446744073709551615", "/", "/tmp"]),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
KNOWN = [
    "group_id",
    "device",
    "tensor_parallel_size",
    "activation_dtype",
    "random_seed",
    "master_port",
    "ready_timeout_s",
    "spin_budget_us",
    "kept_pages",
    "snapshot_dir",
    "name",
    "options",
    "page_size",
    "mem_fraction_static",
    "load_format",
    "model_path",
    "quantization",
]
NAMES = st.one_of(
    st.sampled_from(KNOWN),
    st.text(max_size=10),
)


def as_toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) > 2**64:
        return hex(abs(value))
    return json.dumps(value) if isinstance(value, str) else str(value)


def never_anything_but_a_config_error(path: Path) -> None:
    try:
        load_config(path)
    except ConfigError as error:
        assert str(error)
        assert error.hint
        assert len(str(error)) < 1000
        assert "\n" not in str(error)


FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(data=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_garbage(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "garbage.toml"
    path.write_bytes(data)
    never_anything_but_a_config_error(path)


@FUZZ
@given(
    model=st.dictionaries(NAMES, VALUES, max_size=3),
    driver=st.dictionaries(NAMES, VALUES, max_size=8),
    options=st.dictionaries(NAMES, VALUES, max_size=4),
    complete=st.booleans(),
)
def test_well_formed_garbage(
    tmp_path: Path,
    model: dict[str, Any],
    driver: dict[str, Any],
    options: dict[str, Any],
    complete: bool,
) -> None:
    model.setdefault("snapshot_dir", str(tmp_path))
    driver.setdefault("options", 1) if not complete else driver.pop("options", None)
    if complete:
        driver = {"group_id": 0, "device": ["cpu"]} | driver
    tables = {"model": model, "driver": driver, "driver.options": options if complete else None}
    lines = []
    for name, table in tables.items():
        if table is not None:
            lines.append(f"[{name}]")
            lines += [f"{json.dumps(key)} = {as_toml(value)}" for key, value in table.items()]
    path = tmp_path / "garbage.toml"
    path.write_bytes("\n".join(lines).encode("utf-8", "replace"))
    never_anything_but_a_config_error(path)


def test_long_values_are_cut() -> None:
    assert len(quoted("x" * 10_000)) < 100
    assert quoted("a\nb") == r"'a\nb'"
    assert "4300 digits" in quoted(1 << 100_000)


def run_python(code: str) -> str:
    environment = {"PYTHONPATH": str(ROOT / "python")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout


def test_importing_the_package_loads_nothing() -> None:
    loaded = run_python(
        "import sys; before = set(sys.modules); import pie_driver_sglang as p; "
        "assert p.__file__.endswith('__init__.py'); "
        "print(*(set(sys.modules) - before))"
    ).split()
    assert {name.partition(".")[0] for name in loaded} <= {
        "pie_driver_sglang", "importlib", "typing", "collections", "functools", "re", "types",
        "copyreg", "contextlib", "operator", "keyword", "reprlib", "enum", "warnings", "__future__",
        "_collections", "_functools", "_operator", "_sre", "_typing", "itertools",
    }  # fmt: skip


def test_checking_a_configuration_loads_no_library() -> None:
    code = (
        "import sys, pie_driver_sglang as p; p.load_config; p.Capabilities; "
        "import pie_driver_sglang.logs, pie_driver_sglang.config.arch; "
        "print(*[m for m in ('torch', 'sglang', 'numpy', 'transformers') if m in sys.modules])"
    )
    assert run_python(code).split() == []


def test_lazy_names() -> None:
    import pie_driver_sglang as package

    for name in package.__all__:
        assert name in dir(package)
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert __version__ == workspace["package"]["version"] == project["version"]
