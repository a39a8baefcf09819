"""Values of a server's `/metrics`, and the dashboard that shows them."""

from __future__ import annotations

import re

from support import REPOSITORY
from support.servers.sglang_server import Server

DASHBOARD = REPOSITORY / "examples/monitoring/grafana-dashboard.json"


def samples(server: Server) -> dict[str, float]:
    """Values by name and labels, those of SGLang's process of requests left out."""
    found = re.findall(
        r"^([a-z0-9_:]+(?:\{[^}]*\})?) (\S+)$", server.fetch("/metrics"), re.MULTILINE
    )
    return {name: float(value) for name, value in found}


def total(server: Server, name: str, **labels: str) -> float:
    """The sum of what has these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for key, value in samples(server).items()
        if key.partition("{")[0] == name and all(word in key for word in wanted)
    )
