"""docs/start/deploy.md, and what it refers to: files for Compose and Kubernetes, and alerts."""

from __future__ import annotations

import http.server
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from pie_driver_sglang.config.api_keys import take_keys
from tiny_models import REPOSITORY

PAGE: Final = (REPOSITORY / "docs/start/deploy.md").read_text()
COMPOSE: Final = REPOSITORY / "examples/gpu/compose.yaml"
MANIFEST: Final = REPOSITORY / "examples/kubernetes/server.yaml"
ALERTS: Final = REPOSITORY / "examples/monitoring/alerts.yaml"


def load_manifest() -> dict[str, Any]:
    """The objects by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


@pytest.mark.parametrize("name", ["gpu", "replicas"])
def test_compose_files_follow_their_schema(name: str) -> None:
    path = REPOSITORY / "examples" / name / "compose.yaml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_file_has_what_the_page_says(composed: dict[str, Any]) -> None:
    server = composed["services"]["server"]
    assert (COMPOSE.parent / server["build"] / "Dockerfile").is_file()
    [device] = server["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert server["shm_size"] == "1gb"
    assert "--shm-size 1g " in PAGE
    volumes = dict(volume.split(":")[::-1] for volume in server["volumes"])
    assert set(volumes.values()) == composed["volumes"].keys()
    # As in the manifest.
    assert all(f"`{path}`" in PAGE for path in volumes)
    for name in ("restart", "stop_grace_period"):
        assert f"`{name}: {server[name]}`" in PAGE


def test_the_compose_file_gives_the_key_as_a_secret(
    composed: dict[str, Any], tmp_path: Path
) -> None:
    server = composed["services"]["server"]
    [(name, secret)] = composed["secrets"].items()
    assert server["secrets"] == [name]
    assert f'export {secret["environment"]}="' in PAGE
    mounted = f"/run/secrets/{name}"
    (tmp_path / name).write_text("abc\n")
    words = [
        str(tmp_path / name) if word == mounted else word for word in shlex.split(server["command"])
    ]
    keys, rest = take_keys(words, {})
    assert keys.api == "abc"
    assert len(rest) == len(words) - 2
    assert secret["environment"] not in server["environment"]


@pytest.mark.parametrize("status", [200, 503])
def test_the_compose_file_asks_for_health(composed: dict[str, Any], status: int) -> None:
    """Its check, at a port of this machine."""
    server = composed["services"]["server"]
    words = shlex.split(server["command"])
    port = words[words.index("--port") + 1]
    [published] = server["ports"]
    assert published == f"127.0.0.1:{port}:{port}"
    check = server["healthcheck"]
    assert check["start_period"] == "30m"
    assert check["retries"] * int(check["interval"].removesuffix("s")) == 2 * 60
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    kind, python, *rest = check["test"]
    assert (kind, python) == ("CMD", "python")
    with http.server.HTTPServer(("localhost", 0), Handler) as answers:
        threading.Thread(target=answers.serve_forever, daemon=True).start()
        here = [word.replace(f":{port}/", f":{answers.server_port}/") for word in rest]
        done = subprocess.run([sys.executable, *here], capture_output=True, timeout=60)
        answers.shutdown()
    assert asked == ["/health"]
    assert (done.returncode == 0) == (status == 200), done.stderr


def test_the_manifest_has_what_the_page_says() -> None:
    objects = load_manifest()
    pod = objects["Deployment"]["spec"]["template"]
    spec = pod["spec"]
    [container] = spec["containers"]
    assert pod["metadata"]["labels"] == objects["Service"]["spec"]["selector"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    claim = mounts["/root/.cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]
    [port] = container["ports"]
    assert str(port["containerPort"]) == container["args"][container["args"].index("--port") + 1]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": port["name"]}
    start, live = container["startupProbe"], container["livenessProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] == 30 * 60
    assert live["periodSeconds"] * live["failureThreshold"] == 2 * 60
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert f"| sleep {pause} |" in PAGE
    grace = spec["terminationGracePeriodSeconds"]
    assert f"| `terminationGracePeriodSeconds` | {grace} |" in PAGE
    assert grace > pause


def test_every_alert_is_explained() -> None:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    names = {rule["alert"] for rule in group["rules"]}
    table = PAGE.partition("## Alerts")[2].partition("## ")[0]
    assert names == set(re.findall(r"`(Pie\w+)`", table))
    assert all(rule["annotations"]["summary"] for rule in group["rules"])
    # Who runs Prometheus names the jobs.
    assert not any("job=" in rule["expr"] for rule in group["rules"])
