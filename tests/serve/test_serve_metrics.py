"""The server's metrics: SGLang's names, and ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support import REPOSITORY
from support.servers.pie_server import generate, wait_until
from support.servers.server_metrics import DASHBOARD, samples, total
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class TestMetrics:
    def test_the_scheduler_has_sglangs_names(self, server: Server) -> None:
        before = total(server, "sglang:realtime_tokens_total", mode="decode")
        generate(server, max_new_tokens=12, ignore_eos=True)

        def counted() -> bool:
            return total(server, "sglang:realtime_tokens_total", mode="decode") >= before + 12

        wait_until(counted, 60, "tokens are counted")
        wanted = {
            "sglang:num_running_reqs",
            "sglang:num_queue_reqs",
            "sglang:token_usage",
            "sglang:gen_throughput",
            "sglang:cache_hit_rate",
            "sglang:queue_time_seconds_count",
            "sglang:per_stage_req_latency_seconds_count",
            "sglang:max_total_num_tokens",
            "sglang:time_to_first_token_seconds_count",
            "sglang:e2e_request_latency_seconds_count",
            "sglang:prompt_tokens_total",
            "pie_runtime:host_seconds_total",
            "pie_runtime:driver_seconds_total",
            "pie_runtime:restarts_total",
        }
        assert not wanted - {key.partition("{")[0] for key in samples(server)}
        assert total(server, "sglang:page_size") == 16
        wait_until(lambda: total(server, "sglang:num_running_reqs") == 0, 60, "nothing runs")
        info = json.loads(server.fetch("/server_info"))
        assert total(server, "sglang:max_total_num_tokens") == info["max_total_num_tokens"]
        assert total(server, "pie_runtime:driver_seconds_total") > 0
        assert total(server, "pie_runtime:steps_total") > 0

    def test_a_hit_is_counted_by_its_tier(self, server: Server) -> None:
        server.flush()
        prompt = list(range(500, 564))
        server.generate(prompt, 2)
        before = total(server, "pie_runtime:cached_tokens_total", tier="device")
        source = total(server, "sglang:cached_tokens_total", cache_source="device")
        answer: Any = json.loads(server.fetch("/generate", server.body(prompt, 2)))
        meta = answer["meta_info"]
        assert meta["cached_tokens_details"] == {"device": meta["cached_tokens"], "host": 0}

        def counted() -> bool:
            now = total(server, "pie_runtime:cached_tokens_total", tier="device")
            return now == before + meta["cached_tokens"]

        wait_until(counted, 60, "the hit is counted")
        now = total(server, "sglang:cached_tokens_total", cache_source="device")
        assert now == source + meta["cached_tokens"]

    def test_a_request_has_its_times(self, server: Server) -> None:
        before = total(server, "sglang:queue_time_seconds_count")
        meta = generate(server, max_new_tokens=3)["meta_info"]
        assert 0 <= meta["queue_time"] < 60
        order = [
            meta["request_received_ts"],
            meta["forward_entry_time"],
            meta["prefill_finished_time"],
            meta["request_finished_ts"],
        ]
        assert order == sorted(order)
        wait_until(
            lambda: total(server, "sglang:queue_time_seconds_count") > before, 60, "it is observed"
        )


class TestDashboard:
    def test_every_panel_queries_existing_metrics(self, server: Server) -> None:
        assert len(list(server.stream([5, 6], 8))) > 1
        wait_until(lambda: total(server, "pie_runtime:steps_total") > 0, 60, "metrics")
        known = {key.partition("{")[0] for key in samples(server)}
        panels = json.loads(Path(DASHBOARD).read_text())["panels"]
        requested = [target["expr"] for panel in panels for target in panel.get("targets", ())]
        assert len(requested) > 12
        for expression in requested:
            names = re.findall(r"\b(?:sglang|pie_runtime):[a-z0-9_]+", expression)
            assert names, expression
            missing = set(names) - known
            assert not missing, (expression, missing)

    def test_it_is_one_that_grafana_imports(self) -> None:
        dashboard = json.loads(Path(DASHBOARD).read_text())
        assert {"title", "panels", "schemaVersion", "templating", "uid"} <= dashboard.keys()
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(ids) == len(set(ids))
        for panel in dashboard["panels"]:
            assert panel["type"] in ("timeseries", "stat", "heatmap", "row")
            assert {"x", "y", "w", "h"} == panel["gridPos"].keys()


class TestQueries:
    def test_alerts_and_queries_name_metrics_that_there_are(self, server: Server) -> None:
        list(server.stream([1, 2, 3], 8))
        known = {key.partition("{")[0] for key in samples(server)}
        page = (REPOSITORY / "docs/start/deploy.md").read_text()
        alerts = (REPOSITORY / "examples/monitoring/alerts.yaml").read_text()
        named = set(re.findall(r"\b(?:sglang|pie_runtime):\w+", page + alerts))
        assert len(named) > 12
        wait_until(
            lambda: named <= {key.partition("{")[0] for key in samples(server)},
            10,
            str(named - known),
        )
