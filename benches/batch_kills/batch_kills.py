"""Runs a batch over kills of its server by SIGKILL, and checks that each line comes out once.

    python benches/batch_kills/batch_kills.py [--lines 10000] [--kills 2] [--offline] [FLAG ...]

The server is `pie-sglang serve`, or the command `pie-sglang batch` with `--offline`; it is killed
when it has done a part of the lines, and started again. Flags go to it; `models/pocket` runs on the
CPU without any. The checks: every `custom_id` is in the output once and in the order of the input,
and every result that was committed before a kill is in the output as it was. It prints how long
each start ran, and how many of its lines had to run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
URL = "/v1/chat/completions"
START_S = 600


def write_input(path: Path, count: int) -> list[str]:
    """Write the input, and return its names."""
    names = [f"line-{number:06}" for number in range(count)]
    with path.open("w") as file:
        for name in names:
            messages = [{"role": "user", "content": f"What is {name}?"}]
            body = {"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0}
            line = {"custom_id": name, "method": "POST", "url": URL, "body": body}
            file.write(f"{json.dumps(line)}\n")
    return names


def committed(folder: Path) -> list[str]:
    """The results so far, as lines."""
    try:
        path = folder / "batches.sqlite3"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return [text for (text,) in database.execute("SELECT text FROM results")]
    except sqlite3.Error:
        return []


def count_committed(folder: Path) -> int:
    """The number of results so far."""
    try:
        path = folder / "batches.sqlite3"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            [count] = database.execute("SELECT count(*) FROM results").fetchone()
            return int(count)
    except sqlite3.Error:
        return 0


class Server:
    """`pie-sglang serve`, or `pie-sglang batch`, of one folder; it may be killed and started."""

    def __init__(self, folder: Path, flags: list[str], *, offline: bool) -> None:
        """Do not start it."""
        self.folder, self.offline = folder, offline
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.storage = folder / ("out.jsonl.progress" if offline else "storage")
        self._flags = flags or ["--model-path", str(ROOT / "models/pocket"), "--device", "cpu"]
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def start(self) -> None:
        """Start it; the server is ready then."""
        words = ["batch", str(self.input), "--output", str(self.output)]
        if not self.offline:
            words = ["serve", "--port", str(self.port), "--file-storage-path", str(self.storage)]
        log = self.folder / "log"
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pie_driver_sglang", *words, *self._flags],
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
            )
        until = time.monotonic() + START_S
        while not self.offline and b"curl" not in log.read_bytes():
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(log.read_text(errors="replace")[-4000:])
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill its first process, with which all others end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def parts(total: int, kills: int) -> Iterator[int]:
    """The numbers of results at which it is killed, and all of them at last."""
    yield from (total * (number + 1) // (kills + 1) for number in range(kills))


def main() -> None:
    """Run the batch, and check its output."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--offline", action="store_true", help="`pie-sglang batch`")
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="batch-kills-") as name:
        server = Server(Path(name), flags, offline=options.offline)
        names = write_input(server.input, options.lines)
        run(server, names, options.kills)


def run(server: Server, names: list[str], kills: int) -> None:
    """Run all lines over kills."""
    batch, before = "", set[str]()
    begun = time.monotonic()
    server.start()
    if not server.offline:
        batch = submit(server)
    for number, part in enumerate(parts(len(names), kills), start=1):
        at = time.monotonic()
        while count_committed(server.storage) < part:
            if server.process is None or server.process.poll() is not None:
                raise SystemExit((server.folder / "log").read_text(errors="replace")[-4000:])
            time.sleep(0.05)
        server.kill()
        before |= set(committed(server.storage))
        text = f"kill {number}: {len(before)} results, {time.monotonic() - at:.1f} s"
        print(text, flush=True)
        time.sleep(1)
        server.start()
    at = time.monotonic()
    lines = finished(server, batch)
    print(f"last start: {len(names) - len(before)} results, {time.monotonic() - at:.1f} s")
    print(f"in all {time.monotonic() - begun:.1f} s, starts included")
    found = [json.loads(line)["custom_id"] for line in lines]
    twice = [name for name, count in Counter(found).items() if count > 1]
    missing = sorted(set(names) - set(found))
    assert not twice, f"doubled: {twice[:5]}"
    assert not missing, f"lost: {missing[:5]}"
    assert found == names
    assert before <= set(lines), "a committed result was replaced"
    print(f"{len(names)} lines came out once each, over {kills} kills")


def submit(server: Server) -> str:
    """Upload the input and create the batch; its id."""
    import openai

    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        with server.input.open("rb") as file:
            uploaded = client.files.create(file=file, purpose="batch")
        batch = client.batches.create(
            input_file_id=uploaded.id, endpoint=URL, completion_window="24h"
        )
        return str(batch.id)


def finished(server: Server, batch_id: str) -> list[str]:
    """Wait until all lines are done; the output."""
    assert server.process is not None
    if server.offline:
        status = server.process.wait()
        assert status == 0, (server.folder / "log").read_text(errors="replace")[-4000:]
        return server.output.read_text().splitlines()
    import openai

    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        while (batch := client.batches.retrieve(batch_id)).status != "completed":
            assert batch.status in ("in_progress", "finalizing"), batch
            time.sleep(0.5)
        lines = client.files.content(str(batch.output_file_id)).text.splitlines()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    return lines


if __name__ == "__main__":
    main()
