"""LoRA adapters of the server: loaded at the start or while it serves, and unloaded.

SGLang's tokenizer manager keeps the names: it gives each load an id, counts the requests that use
it, and unloads the least recently used adapter where `--max-loaded-loras` is reached.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang import _core
from pie_driver_sglang.errors import ConfigError, DriverError, quoted
from pie_driver_sglang.frontends.common.lora_adapters import (
    AdapterPath,
    AdapterRegistry,
    parse_paths,
)

AS_TENSORS: Final = "__tensor__"
"""SGLang's path of an adapter that came as tensors."""


class _Load(NamedTuple):
    name: str
    folder: Path | None
    """Files that are removed with the adapter; None where they are the client's own."""


class ServerAdapters:
    """The adapters of a server. Calls block until the drivers are done, which serve meanwhile."""

    def __init__(self, runtime: _core.Runtime, front: _core.SglangFrontend) -> None:
        """No adapters.

        Args:
            runtime: Its drivers load them.
            front: Maps SGLang's ids in requests to adapter ids.
        """
        self._registry, self._front = AdapterRegistry(runtime), front
        self._loads: dict[str, _Load] = {}

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
            self._read(uid, adapter, path, None)

        return self._result(load)

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
            folder = Path(tempfile.mkdtemp(prefix="adapter-"))
            try:
                write(folder)
                self._read(uid, AdapterPath(name, str(folder)), AS_TENSORS, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

        return self._result(load)

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
            found = self._loads.pop(uid or "", None)
            if found is None:
                raise ConfigError(f"no adapter {quoted(name)} is loaded", "see `/v1/models`")
            self._front.set_adapter(uid or "", None)
            self._registry.unload(found.name)
            if found.folder is not None:
                shutil.rmtree(found.folder, ignore_errors=True)

        return self._result(unload)

    def _read(self, uid: str, adapter: AdapterPath, path: str, folder: Path | None) -> None:
        self._front.set_adapter(uid, self._registry.load(adapter, path))
        self._loads[uid] = _Load(adapter.name, folder)

    def _result(self, action: Callable[[], None]) -> dict[str, Any]:
        error = ""
        try:
            action()
        except DriverError as refusal:
            error = refusal.with_hint
        except (OSError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        paths = self._registry.paths
        return {"success": not error, "error_message": error, "loaded_adapters": paths}
