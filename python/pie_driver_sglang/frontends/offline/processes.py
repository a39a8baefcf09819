"""`ProcessMethods`: methods of the engine about its processes."""

from __future__ import annotations

import gc
from typing import Any


class ProcessMethods:
    """Methods of `Engine`."""

    _runtime: Any

    def get_all_child_pids(self) -> list[int]:
        """The process ids of the drivers that run, one for each replica.

        A driver that is started again has another id. Further ranks end with their driver.
        """
        # A driver that is being started has none.
        return [pid for pid in self._runtime.stats()["driver_pids"] if pid]

    def freeze_gc(self) -> None:
        """Exclude all objects of this process from garbage collection, as after a warm-up.

        The drivers freeze theirs at the start.
        """
        gc.freeze()
