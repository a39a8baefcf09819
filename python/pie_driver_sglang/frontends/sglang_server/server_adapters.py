"""LoRA adapters of the server: loaded at the start or while it serves, and unloaded.

SGLang's tokenizer manager keeps the names: it gives each load an id, counts the requests that use
it, and unloads the least recently used adapter where `--max-loaded-loras` is reached.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pie_driver_sglang import _core
from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.frontends.common.control_socket import ControlSocket
from pie_driver_sglang.frontends.common.lora_adapters import AdapterRegistry, parse_paths


class ServerAdapters:
    """The adapters of a server. Calls block until the drivers are done, which serve meanwhile."""

    def __init__(
        self, runtime: _core.Runtime, socket: ControlSocket, front: _core.SglangFrontend
    ) -> None:
        """No adapters.

        Args:
            runtime: Its drivers load them.
            socket: Connects to these drivers.
            front: Maps SGLang's ids in requests to adapter ids.
        """
        self._registry, self._front = AdapterRegistry(runtime, socket), front
        self._ids: dict[str, int] = {}

    def load(self, uid: str, name: str, path: str) -> dict[str, Any]:
        """Have every driver load an adapter.

        Args:
            uid: The tokenizer manager's id of this load.
            name: The client's name.
            path: A folder or file as PEFT saves it, or a repository in the Hugging Face cache.

        Returns:
            The fields of SGLang's ``LoRAUpdateOutput``.
        """

        def load() -> None:
            [adapter] = parse_paths({name: path})
            self._add(uid, self._registry.load(adapter, path))

        return self._registry.result(load)._asdict()

    def load_tensors(self, uid: str, name: str, write: Callable[[Path], None]) -> dict[str, Any]:
        """Have every driver load an adapter that came as tensors.

        Args:
            uid: As for :meth:`load`.
            name: As for :meth:`load`.
            write: Writes it into a folder, as PEFT saves it. The folder stays for as long as the
                adapter is loaded.

        Returns:
            As :meth:`load`.
        """

        def load() -> None:
            self._add(uid, self._registry.load_tensors(name, write))

        return self._registry.result(load)._asdict()

    def unload(self, uid: str | None, name: str) -> dict[str, Any]:
        """Unload an adapter that no request uses.

        Args:
            uid: Of its load.
            name: The client's name.

        Returns:
            As :meth:`load`.
        """

        def unload() -> None:
            # Atomic: of two calls for one load, one finds it.
            found = self._ids.pop(uid or "", None)
            if found is None:
                raise ConfigError(f"no adapter {quoted(name)} is loaded", "see `/v1/models`")
            self._front.set_adapter(uid or "", None)
            self._registry.unload(found)

        return self._registry.result(unload)._asdict()

    def _add(self, uid: str, adapter_id: int) -> None:
        self._front.set_adapter(uid, adapter_id)
        self._ids[uid] = adapter_id
