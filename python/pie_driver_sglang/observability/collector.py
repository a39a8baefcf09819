"""A collector of `prometheus_client`, which is imported only where metrics are exported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry


class MetricsCollector(ABC):
    """Metrics that a registry collects."""

    def registry(self) -> CollectorRegistry:
        """A registry with these metrics alone."""
        from prometheus_client.registry import CollectorRegistry

        found = CollectorRegistry(auto_describe=False)
        found.register(self)
        return found

    @abstractmethod
    def collect(self) -> Iterator[Any]:
        """The metric families, for the registry."""
