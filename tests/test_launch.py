"""What the driver announces, and how large its request buffers are."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import drivers
import tiny_models
from pie_driver_sglang import __version__, _core
from pie_driver_sglang.config.driver_config import DriverConfig, DriverSection, ModelSection
from pie_driver_sglang.config.option_checks import parse_options
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.driver import startup
from pie_driver_sglang.driver.capabilities import UNLIMITED
from pie_driver_sglang.engine.executor import ModelInfo
from pie_driver_sglang.errors import not_running

DEFAULT_REQUEST_BYTES = 8 << 20


def config_of(**options: Any) -> DriverConfig:
    parsed = parse_options(options, "cpu")
    driver = DriverSection(group_id=0, device=("cpu",), options=parsed)
    return DriverConfig(model=ModelSection(snapshot_dir=Path("snapshot")), driver=driver)


def model_info(**changed: Any) -> ModelInfo:
    info = ModelInfo(
        total_pages=4096,
        page_size=16,
        vocab_size=300,
        context_length=512,
        arch_name="llama3",
        dtype="bfloat16",
        attention_backend="torch_native",
    )
    return info._replace(**changed)


def capacity(config: DriverConfig, info: ModelInfo) -> int:
    """The request buffer that the driver makes for a model."""
    hf_config = {"max_position_embeddings": info.context_length, "vocab_size": info.vocab_size}
    needed = startup.request_bytes(config, hf_config)
    return max(DEFAULT_REQUEST_BYTES, -(-needed // 64) * 64)


MODELS = {
    "tiny": model_info(),
    "one page": model_info(total_pages=1, context_length=16),
    "pages of one token": model_info(page_size=1, total_pages=65_536, context_length=131_072),
    "long context": model_info(context_length=1 << 20, total_pages=1 << 16, vocab_size=152_064),
    "context larger than the pool": model_info(total_pages=8, context_length=131_072),
    "huge pool": model_info(total_pages=1 << 24, context_length=40_960, vocab_size=262_144),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"cuda_graph_max_bs": 1}, {"cuda_graph_max_bs": 2048}])
def test_every_batch_within_the_limits_fits_the_request_buffer(
    name: str, options: dict[str, Any]
) -> None:
    info, config = MODELS[name], config_of(page_size=MODELS[name].page_size, **options)
    request_bytes = capacity(config, info)
    caps = startup.capabilities(config, info, request_bytes)
    needed = 4 * caps.max_page_refs + 32 * caps.max_forward_tokens
    needed += 96 * caps.max_forward_requests + 4 * info.vocab_size + 4096
    assert needed <= request_bytes


@given(
    page_size=st.integers(1, 1024),
    total_pages=st.integers(1, 1 << 22),
    context=st.integers(1, 1 << 20),
    vocabulary=st.integers(1, 262_144),
    requests=st.integers(1, 4096),
)
def test_a_whole_context_always_fits(
    page_size: int, total_pages: int, context: int, vocabulary: int, requests: int
) -> None:
    info = model_info(
        page_size=page_size, total_pages=total_pages, context_length=context, vocab_size=vocabulary
    )
    config = config_of(page_size=page_size, cuda_graph_max_bs=requests)
    request_bytes = capacity(config, info)
    caps = startup.capabilities(config, info, request_bytes)
    assert caps.max_forward_tokens >= context
    assert caps.max_page_refs >= -(-context // page_size)
    needed = 4 * caps.max_page_refs + 32 * caps.max_forward_tokens
    needed += 96 * caps.max_forward_requests + 4 * vocabulary + 4096
    assert needed <= request_bytes


def test_recurrent_state_is_announced() -> None:
    config = config_of()
    caps = startup.capabilities(config, model_info(), DEFAULT_REQUEST_BYTES)
    found = (caps.rs_cache_required, caps.rs_cache_slots, caps.rs_cache_slot_bytes)
    assert found == (False, 0, 0)
    info = model_info(state_slots=256, state_bytes=5 << 32)
    caps = startup.capabilities(config, info, DEFAULT_REQUEST_BYTES)
    found = (caps.rs_cache_required, caps.rs_cache_slots, caps.rs_cache_slot_bytes)
    assert found == (True, 256, 5 << 32)
    # Rejected drafts advance it for good.
    assert not caps.rs_cache_spec_rollback


def requests_of(count: int, tokens: int, pages: int) -> list[_core.Request]:
    """`count` requests of `tokens` tokens, each with `pages` pages and one sampler."""
    sampler = [(tokens - 1, _core.Sampler.greedy())]
    positions = list(range(tokens))
    request = _core.Request(
        [1] * tokens, positions, [2**31] * pages, 16, sampler, context_id=2**60, masks=None
    )
    return [request] * count


def test_the_largest_decode_batch_really_fits() -> None:
    config, info = config_of(), model_info(context_length=131_072)
    room = capacity(config, info)
    caps = startup.capabilities(config, info, room)
    pages = caps.max_page_refs // caps.max_forward_requests
    frame = _core.encode_forward(requests_of(caps.max_forward_requests, 1, pages))
    assert len(frame) <= room


def test_the_largest_prefill_batch_really_fits() -> None:
    config, info = config_of(), model_info(context_length=32_768)
    room = capacity(config, info)
    caps = startup.capabilities(config, info, room)
    count = caps.max_forward_tokens // info.context_length
    frame = _core.encode_forward(
        requests_of(count, info.context_length, caps.max_page_refs // count)
    )
    assert len(frame) <= room


def test_images_fit_beside_the_largest_text_batch() -> None:
    """Text does not eat the room for the pixels and positions of images."""
    config, info = config_of(max_image_tokens=100), model_info(context_length=32_768)
    vision = {"patch_size": 4, "spatial_merge_size": 2}
    hf_config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "vision_config": vision,
        "max_position_embeddings": info.context_length,
        "vocab_size": info.vocab_size,
    }
    config = msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, hf_config=hf_config)
    )
    room = startup.request_bytes(config, hf_config)
    without = startup.request_bytes(config, {**hf_config, "architectures": []})
    caps = startup.capabilities(config, info, room)
    tokens = caps.max_forward_tokens
    pages = caps.max_page_refs
    sampler = [(tokens - 1, _core.Sampler.greedy())]
    patch = bytes(4 * 2 * 4 * 4 * 3)
    images = [
        _core.Image(row, (1, 20, 2), 40 * patch, [0] * 30, patch_positions=[0] * 80)
        for row in range(0, 100, 10)
    ]
    request = _core.Request(
        [0] * tokens, list(range(tokens)), [0] * pages, 16, sampler, images=images
    )
    size = len(_core.encode_forward([request]))
    assert without < size <= room


def test_one_context_of_a_long_model_fits_with_one_token_pages() -> None:
    config = config_of(page_size=1)
    info = model_info(page_size=1, context_length=262_144)
    (request,) = requests_of(1, info.context_length, info.context_length)
    frame = _core.encode_forward([request])
    assert len(frame) > DEFAULT_REQUEST_BYTES
    assert len(frame) <= capacity(config, info)


def test_the_capabilities_repeat_what_the_engine_found() -> None:
    config = config_of(cuda_graph_max_bs=7)
    caps = startup.capabilities(config, model_info(host_pages=90), DEFAULT_REQUEST_BYTES)
    assert (caps.total_pages, caps.kv_page_size, caps.vocab_size) == (4096, 16, 300)
    assert (caps.max_model_len, caps.arch_name) == (512, "llama3")
    assert caps.max_forward_requests == 7
    assert caps.activation_dtype == "bfloat16"
    assert caps.snapshot_dir == "snapshot"
    assert caps.swap_pool_size == 90
    assert caps.system_speculation_supported
    assert not caps.enable_system_speculation


def test_speculation_is_what_the_operator_and_the_model_allow() -> None:
    config = config_of(cuda_graph_max_bs=7, spec_ngram_enabled=True)
    assert startup.capabilities(
        config, model_info(), DEFAULT_REQUEST_BYTES
    ).enable_system_speculation
    recurrent = startup.capabilities(config_of(), model_info(state_slots=4), DEFAULT_REQUEST_BYTES)
    assert not recurrent.system_speculation_supported


@pytest.mark.parametrize(
    "limit",
    [
        "max_logit_rows",
        "max_prob_rows",
        "max_custom_mask_bytes",
        "max_sampler_rows",
        "max_logprob_labels",
    ],
)
def test_what_the_driver_handles_by_itself_is_unlimited(limit: str) -> None:
    caps = startup.capabilities(config_of(), model_info(), DEFAULT_REQUEST_BYTES)
    assert getattr(caps, limit) == UNLIMITED


def test_a_small_pool_bounds_the_tokens_of_a_batch() -> None:
    caps = startup.capabilities(config_of(), model_info(total_pages=64), DEFAULT_REQUEST_BYTES)
    assert caps.max_forward_tokens == 64 * 16


def test_the_tokens_of_a_batch_cover_a_context_that_the_pool_cannot_hold() -> None:
    caps = startup.capabilities(config_of(), model_info(total_pages=8), DEFAULT_REQUEST_BYTES)
    assert caps.max_forward_tokens == 512


class TestRequestBytes:
    HF: dict[str, Any] = {"max_position_embeddings": 8192, "vocab_size": 1000}  # noqa: RUF012

    def test_follows_the_frame_sizes_of_the_protocol(self) -> None:
        pages = 2 * (8192 // 16 + 1)
        expected = 4096 + 96 * 256 + 8 * 1000 + 32 * 8192 + 4 * pages
        assert startup.request_bytes(config_of(), self.HF) == expected

    def test_reads_the_language_model_of_a_multi_modal_config(self) -> None:
        nested = {"text_config": self.HF, "vision_config": {"max_position_embeddings": 9}}
        assert startup.request_bytes(config_of(), nested) == startup.request_bytes(
            config_of(), self.HF
        )

    @pytest.mark.parametrize("hf_config", [{}, {"max_position_embeddings": None}])
    def test_manages_without_the_sizes(self, hf_config: dict[str, Any]) -> None:
        assert startup.request_bytes(config_of(), hf_config) > 0

    def test_the_option_replaces_the_context_of_the_model(self) -> None:
        asked = startup.request_bytes(config_of(context_length=1 << 20), self.HF)
        assert asked > startup.request_bytes(config_of(), self.HF) + 32 * (1 << 19)

    def test_grows_with_smaller_pages_and_more_requests(self) -> None:
        base = startup.request_bytes(config_of(), self.HF)
        assert startup.request_bytes(config_of(page_size=1), self.HF) > base
        assert startup.request_bytes(config_of(cuda_graph_max_bs=1000), self.HF) > base


def test_a_model_that_does_not_run_is_one_line() -> None:
    error = not_running("cuda:0", RuntimeError("failed to dispatch data type Float\nat norm.cu:1"))
    assert str(error).endswith("does not run on cuda:0: failed to dispatch data type Float")
    assert "`activation_dtype`" in error.hint
    compiler = RuntimeError(
        "at 105:8:\n\n    if X:\n        y = f(x)\n        ^\nno float16 here\n"
    )
    assert str(not_running("cuda:0", compiler)).endswith("cuda:0: at 105:8: no float16 here")
    assert str(not_running("cpu", AssertionError())).endswith("cpu: AssertionError")


def test_the_version_is_printed_without_a_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        startup.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("argv", [[], ["--config", "x"], ["--config", "x", "--handshake-fd", "a"]])
def test_a_wrong_command_line_is_an_error_with_the_usage(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        startup.main(argv)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "--handshake-fd" in printed.err


def test_limits_are_counts_that_json_keeps_exact() -> None:
    caps = startup.capabilities(config_of(), model_info(), DEFAULT_REQUEST_BYTES)
    assert json.loads(json.dumps(caps.max_logit_rows)) == 2**32 - 1
    assert isinstance(config_of().driver.options, DriverOptions)


FAILING = """
import os, sys
sys.path.insert(0, sys.argv[3])
import drivers
import tiny_models
from pie_driver_sglang.driver import startup
drivers.watch_handshake(int(sys.argv[2]))
exec(sys.argv[4])
os._exit(startup.main(["--config", sys.argv[1], "--handshake-fd", sys.argv[2]]))
"""
"""A driver that notes whether the handshake is open when it says why the start fails."""

WARMING_UP = """
def start(*arguments): raise not_running("cpu", RuntimeError("no such kernel"))
from pie_driver_sglang.errors import not_running
startup._start = start
"""
A_RANK_ENDS = """
import subprocess, time
from pie_driver_sglang.ranks import parallel
startup._start = lambda *arguments: time.sleep(60)
end = [sys.executable, "-c", "raise SystemExit(3)"]
parallel._start_interpreter = lambda *arguments: subprocess.Popen(end)
"""
FAILURES = {
    "no configuration": ("", "does not exist"),
    "the import": ("def load(*_): import no_such_library\nstartup.load_rank = load", "no_such_lib"),
    "the warm-up": (WARMING_UP, "does not run on cpu: no such kernel"),
    "a rank": (A_RANK_ENDS, "rank 1 on cpu ended with status 3"),
    "an exception": ("startup.load_config = lambda path: 1 // 0", "ZeroDivisionError"),
    "an interrupt": (
        "def stop(path): raise KeyboardInterrupt\nstartup.load_config = stop",
        "Inter",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_reason_is_printed_before_the_handshake_closes(name: str, tmp_path: Path) -> None:
    """Then the runtime terminates the driver. `tests/test_lifecycle.py` has the later stages."""
    change, expected = FAILURES[name]
    path = tmp_path / "none.toml"
    if name != "no configuration":
        path = drivers.write_config(tmp_path, tiny_models.POCKET, **drivers.spread(2))
    reader, writer = os.pipe()
    arguments = [str(path), str(writer), str(drivers.TESTS), change]
    log = tmp_path / "stderr"
    with log.open("wb") as file:
        driver = subprocess.Popen(
            [sys.executable, "-c", FAILING, *arguments], stderr=file, pass_fds=[writer]
        )
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b""
    text = log.read_text()
    assert driver.wait(30.0) == 1
    assert drivers.CLOSED_EARLY not in text
    assert expected in text
    assert "\nhint: " in text


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    """It is the runtime's; `tests/test_ranks.py` has a whole start, with its workers."""
    traps = drivers.set_traps(tmp_path / "traps")
    command = [sys.executable, "-m", "pie_driver_sglang", "--config", "none.toml"]
    ended = subprocess.run(
        [*command, "--handshake-fd", "2"], cwd=traps, stderr=subprocess.PIPE, text=True, check=False
    )
    assert drivers.TRAPPED not in ended.stderr
    assert ended.returncode == 1
    assert "'none.toml' does not exist" in ended.stderr


GUARDED = """
import time
from pie_driver_sglang import _core
guard = _core.ExitGuard()
print("ready", flush=True)
time.sleep(60)
"""


PARENT = """
import ctypes, subprocess, sys, time
bind = lambda: ctypes.CDLL(None).prctl(1, int(sys.argv[1]), 0, 0, 0)
subprocess.Popen([sys.argv[2], "-c", sys.argv[3]], preexec_fn=bind)
time.sleep(60)
"""
"""Starts the rest of its arguments as the runtime does, bound to its life by a signal."""


class TestStoppedFromOutside:
    """The exit guard says why, and waits for nothing."""

    @pytest.fixture
    def pipe(self) -> Iterator[tuple[int, int]]:
        reader, writer = os.pipe()
        yield reader, writer
        os.close(reader)
        os.close(writer)

    @staticmethod
    def stop(stderr: int) -> None:
        command = [sys.executable, "-c", GUARDED]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(5.0) == 0

    def test_a_last_line_names_the_signal(self, pipe: tuple[int, int]) -> None:
        reader, writer = pipe
        self.stop(writer)
        line = os.read(reader, 1000).decode()
        assert line.endswith(" INFO pie_driver_sglang: stopped by SIGTERM\n")
        moment = datetime.strptime(line.partition(" INFO")[0], "%Y-%m-%d %H:%M:%S.%f")
        assert abs((datetime.now() - moment).total_seconds()) < 60

    def test_a_pipe_that_nobody_reads(self, pipe: tuple[int, int]) -> None:
        reader, writer = pipe
        size = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
        os.write(writer, bytes(size))
        self.stop(writer)
        assert os.read(reader, 2 * size) == bytes(size)

    @pytest.mark.parametrize("number", [0, signal.SIGTERM], ids=["no signal", "SIGTERM"])
    def test_the_parent_ends(self, number: int, pipe: tuple[int, int]) -> None:
        """With and without the signal that the runtime has the kernel send."""
        reader, writer = pipe
        command = [sys.executable, "-c", PARENT, str(int(number)), sys.executable, GUARDED]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            parent.kill()
        line = os.read(reader, 1000).decode()
        assert line.endswith("pie_driver_sglang: the runtime that started this driver has ended\n")

    def test_a_failed_start_whose_stderr_nobody_reads(self, pipe: tuple[int, int]) -> None:
        """It ends all the same, and closes the handshake with that."""
        os.write(pipe[1], bytes(fcntl.fcntl(pipe[1], fcntl.F_GETPIPE_SZ)))
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "pie_driver_sglang", "--config", "/none.toml"]
        command += ["--handshake-fd", str(writer)]
        with subprocess.Popen(command, stderr=pipe[1], pass_fds=[writer]) as process:
            os.close(writer)
            assert os.read(reader, 1) == b""
            assert process.wait(10.0) == 1
        os.close(reader)

    def test_a_pipe_that_nobody_can_read(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        self.stop(writer)
        os.close(writer)

    def test_a_terminal(self) -> None:
        primary, secondary = os.openpty()
        self.stop(secondary)
        assert b"stopped by SIGTERM" in os.read(primary, 1000)
        os.close(primary)
        os.close(secondary)

    def test_a_last_line_is_appended_to_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_text("before\n")
        with path.open("a") as file:
            self.stop(file.fileno())
        assert path.read_text().startswith("before\n")
        assert "stopped by SIGTERM" in path.read_text()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a driver that gets as far as its region within a second."""
    return drivers.write_config(tmp_path, tiny_models.POCKET)


@pytest.fixture
def region(config: Path) -> Iterator[Path]:
    path = Path("/dev/shm") / f"pie_shmem_g{config.stem.removeprefix('driver-')}"
    yield path
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link(path: Path) -> None:
    path.symlink_to(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def anothers(path: Path) -> None:
    path.touch(0o000)


UNPRIVILEGED = "os.setuid(65534) if os.getuid() == 0 else None"
TAKEN = {
    "a folder": (a_folder, "", "remove it"),
    "a link": (a_link, "", "remove it"),
    "a socket": (a_socket, "", "remove it"),
    "another user's": (anothers, UNPRIVILEGED, "belongs to another user"),
}
LIMITED = {
    "address space": ("resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))", "`ulimit -v`"),
    "descriptors": ("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", "`ulimit -n`"),
}
MOUNTS = {
    "read-only": ("mount -t tmpfs -o ro t /dev/shm", "make /dev/shm writable"),
    "without inodes": ("mount -t tmpfs -o nr_inodes=1 t /dev/shm", "delete stale files"),
    "small": ("mount -t tmpfs -o size=1m t /dev/shm", "enlarge /dev/shm"),
    "missing": ("mount -t tmpfs t /dev", "mount a tmpfs there"),
}
OPENING = """
import os, resource, sys
from pathlib import Path
from pie_driver_sglang import _core
from pie_driver_sglang.driver import startup
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.errors import DriverError
config, guard = load_config(Path(sys.argv[1])), _core.ExitGuard.inert()
exec(sys.argv[2])
try:
    startup._open_region(config, guard)
except DriverError as error:
    os.write(2, startup.format_failure(error).encode())
"""
NAMESPACE = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "-r", "--mount"]
HAS_NAMESPACES = not subprocess.run([*NAMESPACE, "true"], stderr=subprocess.DEVNULL).returncode


class TestRegionErrors:
    """Each has a remedy of its own."""

    @staticmethod
    def open(config: Path, limit: str, *before: str) -> str:
        command = [*before, sys.executable, "-c", OPENING, str(config), limit]
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr

    @staticmethod
    def check(stderr: str, config: Path, expected: str) -> None:
        line, empty, hint = stderr.splitlines()
        assert line.startswith("pie_driver_sglang: ")
        assert f"pie_shmem_g{config.stem.removeprefix('driver-')}" in line
        assert not empty
        assert hint.startswith("hint: ")
        assert expected in hint
        assert "context_length" not in hint

    @pytest.mark.parametrize("name", TAKEN)
    def test_the_name_is_taken(self, name: str, config: Path, region: Path) -> None:
        make, change, expected = TAKEN[name]
        make(region)
        self.check(self.open(config, change), config, expected)

    @pytest.mark.parametrize("name", LIMITED)
    def test_a_limit_of_the_process(self, name: str, config: Path) -> None:
        limit, expected = LIMITED[name]
        self.check(self.open(config, limit), config, expected)

    @pytest.mark.skipif(not HAS_NAMESPACES, reason="mount namespaces are not allowed here")
    @pytest.mark.parametrize("name", MOUNTS)
    def test_dev_shm_is_not_as_it_should_be(self, name: str, config: Path) -> None:
        mount, expected = MOUNTS[name]
        shell = ["sh", "-c", f'{mount} && exec "$@"', "sh"]
        self.check(self.open(config, "", *NAMESPACE, *shell), config, expected)

    def test_another_server_has_it(self, config: Path, region: Path) -> None:
        with region.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.check(self.open(config, ""), config, "one Pie server per host, or per container")


def test_a_model_with_code_of_its_own_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told(**options: Any) -> list[str]:
        caplog.clear()
        model = ModelSection(snapshot_dir=tmp_path)
        config = msgspec.structs.replace(config_of(**options), model=model)
        startup._warn_of_code(config)
        return caplog.messages

    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    (tmp_path / "tokenizer_config.json").write_text("[broken")
    assert told() == []
    code = {"auto_map": {"AutoModel": "modeling_x.X"}}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(code))
    [line] = told()
    assert "`auto_map` in config.json, tokenizer_config.json" in line
    assert "`trust_remote_code = false`" in line
    assert told(trust_remote_code=False) == []
