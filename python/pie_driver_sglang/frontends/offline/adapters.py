"""`AdapterMethods`: methods of the engine that load and unload LoRA adapters."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.frontends.common.lora_adapters import (
    AdapterUpdate,
    EngineAdapters,
    parse_paths,
    require_name,
)
from pie_driver_sglang.frontends.offline.requests import OpenRequests
from pie_driver_sglang.frontends.offline.weights import serialized

if TYPE_CHECKING:
    import torch


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

        def load() -> None:
            [adapter] = parse_paths([{"lora_name": lora_name, "lora_path": lora_path}])
            self._adapters.load(adapter)

        return self._result(load)

    def load_lora_adapter_from_tensors(
        self,
        lora_name: str,
        tensors: Mapping[str, torch.Tensor],
        config_dict: Mapping[str, Any],
        load_format: str | None = None,
    ) -> AdapterUpdate:
        """Load an adapter from memory, as :meth:`load_lora_adapter` loads one from files.

        Args:
            lora_name: Its name in `lora_path` of requests.
            tensors: Tensors of torch by the names that PEFT gives them in
                `adapter_model.safetensors`. They are copied into the folder for temporary files,
                where a restarted driver finds them.
            config_dict: PEFT's `adapter_config.json`.
            load_format: None.

        Returns:
            Whether it was loaded, and the reason if not.
        """

        def load() -> None:
            if load_format is not None:
                raise ConfigError(
                    f"`load_format` is {quoted(load_format)}, and tensors come by their names",
                    "leave it out",
                )
            require_name(lora_name)
            write = functools.partial(_write, tensors, config_dict)
            self._adapters.load_tensors(lora_name, write)

        return self._result(load)

    def unload_lora_adapter(self, lora_name: str) -> AdapterUpdate:
        """Unload an adapter, when the requests that use it have ended; new ones are refused.

        Drivers reuse its memory for the next adapters.

        Returns:
            Whether it was unloaded, and the reason if not.
        """

        def unload() -> None:
            adapter_id = self._adapters.adapter_id(lora_name)
            with self._requests.without_adapter(adapter_id):
                self._adapters.unload(adapter_id)

        return self._result(unload)

    async def async_load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False
    ) -> AdapterUpdate:
        """The coroutine of :meth:`load_lora_adapter`."""
        return await asyncio.to_thread(self.load_lora_adapter, lora_name, lora_path, pinned)

    async def async_unload_lora_adapter(self, lora_name: str) -> AdapterUpdate:
        """The coroutine of :meth:`unload_lora_adapter`."""
        return await asyncio.to_thread(self.unload_lora_adapter, lora_name)

    def _result(self, action: Callable[[], None]) -> AdapterUpdate:
        def checked() -> None:
            self._requests.require_own_process()
            action()

        return self._adapters.result(checked)


def _write(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Write an adapter as PEFT saves it.

    Raises:
        ConfigError: The configuration is no JSON.
        WeightsError: A tensor is none of torch.
    """
    try:
        text = json.dumps(dict(config))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`config_dict` cannot be written as JSON: {error}",
            "give PEFT's `adapter_config.json` as a dictionary",
        ) from error
    folder.joinpath("adapter_config.json").write_text(text, encoding="utf-8")
    folder.joinpath("adapter_model.safetensors").write_bytes(serialized(tensors))
