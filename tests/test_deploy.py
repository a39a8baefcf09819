"""docs/start/deploy.md, and what it refers to: a manifest for Kubernetes and alerts."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from tiny_models import REPOSITORY

PAGE: Final = (REPOSITORY / "docs/start/deploy.md").read_text()
MANIFEST: Final = REPOSITORY / "examples/kubernetes/server.yaml"
ALERTS: Final = REPOSITORY / "examples/monitoring/alerts.yaml"


def load_manifest() -> dict[str, Any]:
    """The objects by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


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
