"""The prefix index in SGLang: equal to SGLang's radix trees, in its scheduler and over HTTP."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from pie_driver_sglang.config.sglang_versions import adapter_version
from pie_driver_sglang.sglang_plugins import radix
from support import REPOSITORY, versions
from support.models import reference
from support.process import scripts
from support.servers import sglang_server

of_0517 = pytest.mark.skipif(adapter_version().sglang != "0.5.17", reason="of SGLang 0.5.17")
of_0523 = pytest.mark.skipif(adapter_version().sglang == "0.5.17", reason="of SGLang 0.5.23")

POCKET = REPOSITORY / "models/pocket"
PAGE = REPOSITORY / "docs/start/parts.md"
POOL = 600
"""Tokens of the server's KV pool."""
CHUNK = 64
FLAGS = (
    *("--model-path", str(POCKET), "--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--skip-server-warmup", "--context-length", "512"),
)


def settings(**changes: Any) -> SimpleNamespace:
    """As much of SGLang's settings as the plugin looks at."""
    names = dict.fromkeys(radix.REFUSED_SETTINGS, False)
    return SimpleNamespace(
        **{**names, "radix_cache_backend": "pie", "disaggregation_mode": "null", **changes}
    )


def context(**changes: Any) -> SimpleNamespace:
    """As much of SGLang's build context as the plugin looks at before it makes the cache."""
    names = dict.fromkeys(("is_hybrid_swa", "is_hybrid_ssm", "disable_radix_cache"), False)
    return SimpleNamespace(**{**names, "server_args": settings(), **changes})


class TestRefused:
    @pytest.mark.parametrize("setting", radix.REFUSED_SETTINGS)
    def test_a_flag_is_named(self, setting: str) -> None:
        with pytest.raises(ValueError, match=r"drop --\S+ or --radix-cache-backend pie$") as error:
            radix.check_settings(settings(**{setting: True}))
        flag = f"--{setting.replace('_', '-')}"
        assert flag in str(error.value)
        assert "\n" not in str(error.value)

    def test_other_servers_are_named(self) -> None:
        with pytest.raises(ValueError, match="drop --disaggregation-mode decode or"):
            radix.check_settings(settings(disaggregation_mode="decode"))

    @pytest.mark.parametrize("what", ["is_hybrid_swa", "is_hybrid_ssm", "disable_radix_cache"])
    def test_a_model_that_does_not_fit(self, what: str) -> None:
        with pytest.raises(ValueError, match="drop --radix-cache-backend pie") as error:
            radix.make(context(**{what: True}))
        assert "\n" not in str(error.value)

    def test_the_shortest_prefix_is_a_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert radix.min_hit() == 1
        monkeypatch.setenv(radix.MIN_HIT, "500")
        assert radix.min_hit() == 500
        for text in ("", "0", "-3", "many"):
            monkeypatch.setenv(radix.MIN_HIT, text)
            with pytest.raises(ValueError, match=r"PIE_RADIX_MIN_HIT is .*; set it from 1"):
                radix.min_hit()

    def test_others_are_left_alone(self) -> None:
        radix.check_settings(settings(radix_cache_backend=None, enable_hierarchical_cache=True))


@pytest.mark.engine
class TestInSglang:
    def test_sglang_finds_it(self) -> None:
        entries = entry_points(group="sglang.srt.plugins")
        found = [entry.value for entry in entries if entry.name == radix.NAME]
        assert found == ["pie_driver_sglang.sglang_plugins.radix:register"]

    @of_0523
    def test_it_does_what_sglangs_tree_cores_do(self) -> None:
        """SGLang's cores in Python and in Rust, and ours, each in SGLang's unified cache."""
        out = scripts.run("tests/support/sglang_scripts/tree_core.py")
        found = json.loads(out.splitlines()[-1])
        assert sum(found["moves"].values()) == 28 * 80
        assert min(found["moves"].values()) > 3, found["moves"]
        # The games tell a core with a fault from SGLang's.
        assert found["faults"] == ["WithoutNamespaces", "MruInstead", "KeepsLocks", "KeepsTwice"]

    @of_0523
    def test_events_are_refused_at_start(self) -> None:
        flags = (*FLAGS, "--radix-cache-backend", "pie", "--kv-events-config", "{}")
        # The scheduler fails, and has SGLang's launcher kill its tree of processes, itself
        # included, unless the launcher has found its pipe closed before.
        log = scripts.fail(
            "tests/support/servers/launch_sglang.py",
            *flags,
            plugins=radix.NAME,
            statuses=(1, -signal.SIGKILL),
        )
        assert "ValueError: pie_radix sends no KV events; drop --kv-events-config, or" in log

    @of_0517
    def test_it_does_what_sglangs_tree_does(self) -> None:
        out = scripts.run("tests/support/sglang_scripts/radix_cache.py")
        found = json.loads(out.splitlines()[-1])
        assert sum(found["moves"].values()) == 28 * 80
        assert min(found["moves"].values()) > 3, found["moves"]
        # The games tell a cache with a fault from SGLang's.
        assert found["faults"] == [
            "MruInstead",
            "WithoutNamespaces",
            "KeepsLocks",
            "SilentRemovals",
        ]
        theirs, ours = found["dfs"]
        assert ours == theirs
        # Short prefixes are computed again, and what is there twice is freed.
        assert found["declined"] == {"matches": [0, 6, 20], "lost": [0, 0, 0]}

    def test_a_flag_is_refused_at_start(self) -> None:
        flags = (*FLAGS, "--radix-cache-backend", "pie", "--disable-radix-cache")
        log = scripts.fail("tests/support/servers/launch_sglang.py", *flags, plugins=radix.NAME)
        assert log.splitlines()[-1].endswith(
            "--radix-cache-backend pie does not take --disable-radix-cache: it is a radix cache; "
            "drop --disable-radix-cache or --radix-cache-backend pie"
        )


@pytest.fixture(scope="module")
def router() -> Iterator[zmq.Socket[bytes]]:
    """Gets the events of the server's cache, from its start on."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.rcvhwm = 0
        subscriber.subscribe(b"")
        [port] = sglang_server.free_ports(1)
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        yield subscriber


@pytest.fixture(scope="module")
def server(router: zmq.Socket[bytes]) -> Iterator[sglang_server.Server]:
    """SGLang's server with the plugin's cache, which tests share."""
    port = router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    events = {"publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    with_events = ("--kv-events-config", json.dumps(events))
    if adapter_version().sglang != "0.5.17":
        with_events = ()
    with sglang_server.serve(
        *(*FLAGS, "--radix-cache-backend", "pie", "--max-total-tokens", str(POOL)),
        *("--chunked-prefill-size", str(CHUNK), "--max-running-requests", "8", "--enable-metrics"),
        *("--schedule-conservativeness", "0.01", *with_events),
    ) as server:
        yield server


@pytest.fixture(scope="module")
def model() -> reference.Reference:
    """The same model by transformers."""
    return reference.Reference(POCKET)


def text(seed: int, tokens: int) -> list[int]:
    """A prompt."""
    return random.Random(seed).choices(range(1000, 4000), k=tokens)


@pytest.mark.engine
class TestServer:
    """SGLang's HTTP server, tokenizer manager, scheduler and model, with the plugin's cache."""

    def same(
        self, model: reference.Reference, prompt: Sequence[int], tokens: Sequence[int]
    ) -> bool:
        """Whether these are the model's greedy tokens, or one of two that are as good."""
        expected, gap = model.greedy(prompt, len(tokens))
        return list(tokens) == expected or gap < reference.GAP

    def test_prefixes_are_shared(
        self, server: sglang_server.Server, model: reference.Reference
    ) -> None:
        # What the page for users of SGLang has them look for.
        [line] = re.findall(r"`(Tree cache [^`]+)`", PAGE.read_text())
        assert line in server.log.read_text()
        server.flush()
        # Two chunks, then from the cache: the whole prompt except its last token.
        prompt = text(1, 100)
        first, cached = server.generate(prompt, 12)
        assert cached == 0
        assert self.same(model, prompt, first)
        assert server.generate(prompt, 12) == (first, 99)
        # A prompt that begins as the first one does.
        other = [*prompt[:50], *text(2, 30)]
        tokens, cached = server.generate(other, 12)
        assert cached == 50
        assert self.same(model, other, tokens)
        # The next turn of a conversation. The step after the last token has begun before that is
        # known: its KV is there, too, and the oldest version keeps it.
        turn = [*prompt, *first, *text(3, 20)]
        tokens, cached = server.generate(turn, 12)
        assert cached == len(prompt) + len(first) - (0 if versions.IS_OLDEST else 1)
        assert self.same(model, turn, tokens)

    def test_a_stream(self, server: sglang_server.Server) -> None:
        prompt = text(4, 80)
        parts = list(server.stream(prompt, 10))
        tokens, cached = server.generate(prompt, 10)
        assert len(parts) > 1
        assert (parts[-1], cached) == (tokens, 79)

    def test_namespaces_share_nothing(self, server: sglang_server.Server) -> None:
        prompt = text(5, 40)
        found = [server.generate(prompt, 4, extra_key=key)[1] for key in ("a", "b", "a", "b", None)]
        assert found == [0, 0, 39, 39, 0]

    def test_an_abort_leaves_nothing_behind(
        self, server: sglang_server.Server, model: reference.Reference
    ) -> None:
        prompt = text(6, 90)
        parts = server.stream(prompt, 300, rid="to-abort")
        next(parts)
        server.fetch("/abort_request", {"rid": "to-abort"})
        assert len(list(parts)[-1]) < 300
        tokens, cached = server.generate(prompt, 8)
        assert cached == 89
        assert self.same(model, prompt, tokens)

    def test_more_than_the_pool_holds(
        self, server: sglang_server.Server, model: reference.Reference
    ) -> None:
        """Requests are retracted and come back, prefixes are evicted, and nothing else changes."""
        prompts = [[*text(7, 30), *text(10 + number, 20)] for number in range(8)]

        def generate(prompt: Sequence[int]) -> list[int]:
            """SGLang 0.5.23 reserves all tokens of a request that ignores ends."""
            params = {"temperature": 0, "max_new_tokens": 80, "min_new_tokens": 80}
            return server.generate(prompt, 80, sampling_params=params)[0]

        with ThreadPoolExecutor(len(prompts)) as threads:
            both = list(threads.map(generate, prompts))
        for prompt, tokens in zip(prompts, both, strict=True):
            alone, _ = server.generate(prompt, 80)
            assert len(tokens) == 80
            assert tokens == alone or self.same(model, prompt, tokens)
        assert self.same(model, prompts[0], both[0][:20])
        assert server.metric("sglang:evicted_tokens_total") > 0
        assert "retracted" in server.log.read_text().lower()

    def test_flush(self, server: sglang_server.Server) -> None:
        prompt = text(8, 40)
        assert [server.generate(prompt, 2)[1] for _ in range(2)] == [0, 39]
        server.flush()
        assert server.generate(prompt, 2)[1] == 0

    @of_0517
    def test_events_reach_a_router(
        self, server: sglang_server.Server, router: zmq.Socket[bytes]
    ) -> None:
        server.flush()
        prompt = text(9, 70)
        tokens, _ = server.generate(prompt, 5)
        # SGLang sends what a request's end brings with the next step.
        server.generate(text(10, 5), 1)
        digest, stored = b"", []
        for token in [*prompt, *tokens]:
            digest = sha256(digest + token.to_bytes(4, "little")).digest()
            block = int.from_bytes(digest[:8], "big", signed=True)
            parent = stored[-1][1][0] if stored else None
            stored.append(["BlockStored", [block], parent, [token], 1, None, "GPU"])
        # What other tests did comes first.
        seen: list[list[Any]] = []
        while stored[-1] not in seen:
            assert router.poll(20_000), f"no more events after {seen[-1:]}"
            seen.extend(msgspec.msgpack.decode(router.recv_multipart()[-1])[1])
        start = seen.index(stored[0])
        assert seen[start - 1] == ["AllBlocksCleared"]
        assert seen[start : start + len(stored)] == stored
