"""LoRA adapters of the server: loaded by name at the start or while it serves, and unloaded.

SGLang's tokenizer manager keeps the names: it gives each load an id, counts the requests that use
it, and unloads the one that was not used for longest where `--max-loaded-loras` is reached. Here an
id becomes a number of the runtime, which no other load ever has, so KV of a former adapter is
never taken for that of a new one.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang import _core
from pie_driver_sglang.errors import ConfigError, DriverError, quoted
from pie_driver_sglang.frontends.common.adapters import parse_paths

AS_TENSORS: Final = "__tensor__"
"""What SGLang writes for the path of an adapter that came as tensors."""


class _Loaded(NamedTuple):
    """An adapter that requests may name.

    Attributes:
        number: The runtime's.
        name: The client's.
        path: Where its files are, as the client wrote it.
        folder: Files that go with it; None where they are the client's own.
    """

    number: int
    name: str
    path: str
    folder: Path | None


class ServerAdapters:
    """The adapters of a server. Calls wait for the drivers, which serve requests meanwhile."""

    def __init__(self, runtime: _core.Runtime, front: _core.SglangFrontend) -> None:
        """No adapters.

        Args:
            runtime: What computes.
            front: Its requests.
        """
        self._runtime, self._front = runtime, front
        self._numbers = itertools.count(1)
        self._loaded: dict[str, _Loaded] = {}
        self._loading: set[str] = set()
        self._lock = threading.Lock()

    def load(self, uid: str, name: str, path: str) -> dict[str, Any]:
        """Has every driver read an adapter.

        Args:
            uid: The tokenizer manager's id of this load.
            name: The client's name.
            path: A folder or file as PEFT saves it, or a repository in the Hugging Face cache.

        Returns:
            The fields of SGLang's ``LoRAUpdateOutput``.
        """

        def load() -> None:
            [adapter] = parse_paths({name: path})
            self._read(uid, name, path, adapter.path, None)

        return self._outcome(load)

    def load_tensors(self, uid: str, name: str, write: Callable[[Path], None]) -> dict[str, Any]:
        """Has every driver read an adapter that came as tensors.

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
                self._read(uid, name, AS_TENSORS, str(folder), folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

        return self._outcome(load)

    def unload(self, uid: str | None, name: str) -> dict[str, Any]:
        """Forgets an adapter that no request uses.

        Args:
            uid: Of its load.
            name: The client's name.

        Returns:
            As :meth:`load`.
        """

        def unload() -> None:
            with self._lock:
                found = self._loaded.pop(uid or "", None)
            if found is None:
                raise ConfigError(f"no adapter {quoted(name)} is loaded", "see `/v1/models`")
            self._front.set_adapter(uid or "", None)
            self._runtime.unload_adapter(found.number)
            if found.folder is not None:
                shutil.rmtree(found.folder, ignore_errors=True)

        return self._outcome(unload)

    def _read(self, uid: str, name: str, path: str, files: str, folder: Path | None) -> None:
        with self._lock:
            taken = {other.name for other in self._loaded.values()} | self._loading
            if name in taken:
                raise ConfigError(
                    f"there is an adapter {quoted(name)} already", "unload it, or give another name"
                )
            self._loading.add(name)
            number = next(self._numbers)
        try:
            # Without the lock: a driver may take its time.
            self._runtime.load_adapter(number, files)
            self._front.set_adapter(uid, number)
            with self._lock:
                self._loaded[uid] = _Loaded(number, name, path, folder)
        finally:
            with self._lock:
                self._loading.discard(name)

    def _outcome(self, action: Callable[[], None]) -> dict[str, Any]:
        error = ""
        try:
            action()
        except DriverError as refusal:
            error = "; ".join(filter(None, (str(refusal), refusal.hint)))
        except (OSError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            loaded = {each.name: each.path for each in self._loaded.values()}
        return {"success": not error, "error_message": error, "loaded_adapters": loaded}
