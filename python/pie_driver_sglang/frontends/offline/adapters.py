"""`AdapterMethods`: methods of the engine that load LoRA adapters."""

from __future__ import annotations

import asyncio

from pie_driver_sglang.errors import DriverError
from pie_driver_sglang.frontends.common.lora_adapters import (
    AdapterUpdate,
    EngineAdapters,
    parse_paths,
)
from pie_driver_sglang.frontends.offline.requests import OpenRequests


class AdapterMethods:
    """Methods of `Engine`."""

    _requests: OpenRequests
    _adapters: EngineAdapters

    def load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False
    ) -> AdapterUpdate:
        """Load an adapter while requests run; requests select it by `lora_path`.

        Args:
            lora_name: Its name in `lora_path` of requests.
            lora_path: A folder as PEFT saves it, a safetensors file next to its
                `adapter_config.json`, or a repository in the Hugging Face cache.
            pinned: Without effect: the drivers keep every adapter of an engine in memory.

        Returns:
            Whether it was loaded, and the reason if not.
        """
        try:
            [adapter] = parse_paths([{"lora_name": lora_name, "lora_path": lora_path}])
            self._requests.require_own_process()
            self._adapters.load(adapter)
        except DriverError as error:
            return AdapterUpdate(False, error.with_hint, self._adapters.paths)
        return AdapterUpdate(True, "", self._adapters.paths)

    async def async_load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False
    ) -> AdapterUpdate:
        """The coroutine of :meth:`load_lora_adapter`."""
        return await asyncio.to_thread(self.load_lora_adapter, lora_name, lora_path, pinned)
