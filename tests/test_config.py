"""`driver.toml`: valid files, and the error of each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.errors import ConfigError, quoted
from support.process.config_files import Write, refused
from support.process.config_files import snapshot as snapshot
from support.process.config_files import write as write


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
        ("max_pages = -1", ("driver.max_pages", "-1", "4294967295")),
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
        (
            {"snapshot_dir": '"/tmp/model.gguf"'},
            ("GGUF", "pie_driver_sglang.checkpoint.gguf FILE FOLDER"),
        ),
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
    refused(tmp_path / "none.toml", "does not exist", "a TOML file")
    refused(tmp_path, "not a regular file")
    refused(Path("/dev/zero"), "not a regular file")
    refused(tmp_path / ("x" * 5000), "cannot read")
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2 << 20))
    refused(large, "larger than 1048576 bytes")


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
    "max_pages",
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


def test_long_values_are_truncated() -> None:
    assert len(quoted("x" * 10_000)) < 100
    assert quoted("a\nb") == r"'a\nb'"
    assert "4300 digits" in quoted(1 << 100_000)
