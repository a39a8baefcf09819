"""LoRA adapters: SGLang's `lora_paths` and `lora_path`, and the registry of loaded ones."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.checkpoint.hub_cache import (
    cached_snapshot,
    is_repository_name,
    local_path,
)
from pie_driver_sglang.checkpoint.regular_file import RegularFile
from pie_driver_sglang.errors import ConfigError, DriverError, WeightsError, nearest, quoted
from pie_driver_sglang.frontends.common.control_socket import ControlSocket

_MOST_CONFIG_BYTES: Final = 1 << 20
_LIMIT_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"sglang": "max_loaded_loras", "vllm": "max_cpu_loras"}
)
"""What the drivers' library calls the limit of loaded adapters."""
AS_TENSORS: Final = "__tensor__"
"""SGLang's path of an adapter that came as tensors."""


class AdapterPath(NamedTuple):
    """An adapter to load."""

    name: str
    """What requests call it."""
    path: str
    """A folder as PEFT saves it, or a safetensors file next to its configuration; absolute."""


class AdapterUpdate(NamedTuple):
    """The result of loading or unloading: the fields of SGLang's `LoRAUpdateOutput`."""

    success: bool
    error_message: str
    """Empty after success."""
    loaded_adapters: dict[str, str]
    """Paths by name."""


def parse_paths(given: Any) -> tuple[AdapterPath, ...]:
    """Check `lora_paths`: a list of `path`, `name=path` or dictionaries, or paths by name.

    Dictionaries have `lora_name` and `lora_path` as SGLang's, or `name` and `path` as vLLM's.

    Raises:
        ConfigError: An entry is none of these, two have one name, or there is no such adapter.
    """
    if isinstance(given, Mapping):
        found = [_adapter(name, path) for name, path in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = [_entry(entry) for entry in given]
    else:
        raise ConfigError(
            f"`lora_paths` is {quoted(given)}, expected a list or a dictionary",
            'e.g. `lora_paths=["name=/path/of/adapter"]`',
        )
    names = [adapter.name for adapter in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"`lora_paths` has {quoted(name)} twice", "give each its own name")
    return tuple(found)


def _entry(entry: Any) -> AdapterPath:
    if isinstance(entry, str):
        name, equals, path = entry.partition("=")
        return _adapter(name, path) if equals else _adapter(entry, entry)
    for name, path in (("lora_name", "lora_path"), ("name", "path")):
        if isinstance(entry, Mapping) and {name, path} <= entry.keys():
            return _adapter(entry[name], entry[path])
    raise ConfigError(
        f"`lora_paths` has {quoted(entry)}",
        'write a path, "name=path", or {"lora_name": ..., "lora_path": ...}',
    )


def require_name(name: Any) -> None:
    """Refuse a name of an adapter that is no text.

    Raises:
        ConfigError: It is none, or is empty.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"an adapter's name is {quoted(name)}", "name it by a text")


def _adapter(name: Any, path: Any) -> AdapterPath:
    require_name(name)
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"the path of adapter {quoted(name)} is {quoted(path)}", "name a folder")
    here = local_path(path)
    found = cached_snapshot(str(path)) if here is None else here.resolve()
    if found is None:
        missing = f"adapter {quoted(name)} is not at {quoted(str(path))}"
        if not is_repository_name(str(path)):
            raise ConfigError(missing, "correct the path: there is no such file or folder")
        raise ConfigError(
            f"{missing}, and no such repository is in the Hugging Face cache",
            f"name its folder, or run `hf download {path}`",
        )
    return AdapterPath(name, str(found))


def largest_rank(adapters: Sequence[AdapterPath]) -> int:
    """The largest rank that the adapters' configurations name; 0 where they name none."""
    return max((_rank(Path(adapter.path)) for adapter in adapters), default=0)


def _rank(path: Path) -> int:
    """0 for a configuration that cannot be read: the driver reports what is wrong with it."""
    folder = path if path.is_dir() else path.parent
    try:
        with RegularFile(folder / "adapter_config.json") as file:
            if file.size > _MOST_CONFIG_BYTES:
                return 0
            config = json.loads(b"".join(file.chunks()))
        named = [config.get("r"), *dict(config.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, TypeError, AttributeError):
        return 0
    return max((rank for rank in named if isinstance(rank, int)), default=0)


class _Loaded(NamedTuple):
    """A loaded adapter."""

    adapter_id: int
    shown_path: str
    folder: Path | None
    """Temporary files of an adapter that came as tensors; a restarted driver reads them again."""


class AdapterRegistry:
    """The LoRA adapters that the drivers of a runtime have loaded, by name. Thread-safe.

    No adapter id is used twice, so KV of a former adapter never matches that of a new one.
    """

    rename_hint = "unload it, or give another name"

    def __init__(self, runtime: Any, socket: ControlSocket) -> None:
        """No adapters.

        Args:
            runtime: A `_core.Runtime` whose drivers are ready.
            socket: Connects to these drivers.
        """
        self._runtime, self._socket = runtime, socket
        self._process = os.getpid()
        self._ids = itertools.count(1)
        self._loaded: dict[str, _Loaded] = {}
        self._loading: set[str] = set()
        self._lock = threading.Lock()

    @property
    def paths(self) -> dict[str, str]:
        """Paths of the loaded adapters, by name."""
        with self._lock:
            return {name: loaded.shown_path for name, loaded in self._loaded.items()}

    def load(self, adapter: AdapterPath, shown_path: str | None = None) -> int:
        """Have every driver load an adapter, and return its id; other requests run meanwhile.

        Args:
            adapter: Its name and its files.
            shown_path: What `paths` has instead of the files; None for these.

        Raises:
            ConfigError: The name is taken.
            StartError: A driver rejects the adapter, or there is none.
        """
        return self._load(adapter, shown_path or adapter.path, None)

    def load_tensors(self, name: str, write: Callable[[Path], None]) -> int:
        """Have every driver load an adapter that is not in a file yet, and return its id.

        Args:
            name: Its name.
            write: Writes it into a folder, as PEFT saves it. The folder exists for as long as the
                adapter is loaded.

        Raises:
            ConfigError: The name is taken.
            StartError: A driver rejects the adapter, or there is none.
        """
        folder = Path(tempfile.mkdtemp(prefix="adapter-"))
        try:
            write(folder)
            return self._load(AdapterPath(name, str(folder)), AS_TENSORS, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def unload(self, adapter_id: int) -> None:
        """Have every driver unload an adapter that no request uses.

        Raises:
            ConfigError: It was unloaded before.
        """
        with self._lock:
            found = [name for name, one in self._loaded.items() if one.adapter_id == adapter_id]
            if not found:
                raise ConfigError("the adapter was unloaded before", "unload it once")
            loaded = self._loaded.pop(found[0])
        self._runtime.unload_adapter(adapter_id)
        # A driver on vLLM takes no commands: there the least recently used adapter leaves first.
        with contextlib.suppress(WeightsError):
            self._socket.call({"command": "UnloadAdapter", "adapter_id": adapter_id})
        _remove(loaded)

    def result(self, action: Callable[[], None]) -> AdapterUpdate:
        """Run a load or an unload, whose errors become SGLang's result."""
        error = ""
        try:
            action()
        except DriverError as refusal:
            error = refusal.with_hint
        except (OSError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        return AdapterUpdate(not error, error, self.paths)

    def close(self) -> None:
        """Remove the temporary files, when the drivers have ended; nothing in a forked process."""
        if os.getpid() == self._process:
            for adapter in [*self._loaded.values()]:
                _remove(adapter)

    def _load(self, adapter: AdapterPath, shown_path: str, folder: Path | None) -> int:
        name = adapter.name
        with self._lock:
            self._check(name)
            self._loading.add(name)
            adapter_id = next(self._ids)
        try:
            # Without the lock: a driver may take its time.
            self._runtime.load_adapter(adapter_id, adapter.path)
            with self._lock:
                self._loaded[name] = _Loaded(adapter_id, shown_path, folder)
        finally:
            with self._lock:
                self._loading.discard(name)
        return adapter_id

    def _check(self, name: str) -> None:
        """Raise if an adapter of this name cannot be loaded; called with the lock."""
        if name in self._loaded or name in self._loading:
            raise ConfigError(f"there is an adapter {quoted(name)} already", self.rename_hint)


def _remove(loaded: _Loaded) -> None:
    if loaded.folder is not None:
        shutil.rmtree(loaded.folder, ignore_errors=True)


class EngineAdapters(AdapterRegistry):
    """The adapters of an engine: at most as many as the drivers keep in host memory."""

    rename_hint = "unload it by `unload_lora_adapter`, or give another name"

    def __init__(self, runtime: Any, socket: ControlSocket, most: int, engine: str) -> None:
        """No adapters.

        Args:
            runtime: A `_core.Runtime` whose drivers are ready.
            socket: Connects to these drivers.
            most: How many there may be; 0 where adapters are off.
            engine: The library of the drivers, `sglang` or `vllm`.
        """
        super().__init__(runtime, socket)
        self._most, self._limit_name = most, _LIMIT_NAMES[engine]

    def _check(self, name: str) -> None:
        if not self._most:
            raise ConfigError("adapters are off", "make the engine with `enable_lora=True`")
        super()._check(name)
        if (count := len(self._loaded) + len(self._loading)) >= self._most:
            raise ConfigError(
                f"{count} adapters are loaded, as many as `{self._limit_name}` allows",
                f"raise `{self._limit_name}`, or unload one by `unload_lora_adapter`",
            )

    def adapter_id(self, name: Any) -> int:
        """The id of a loaded adapter.

        Raises:
            ConfigError: There is none of this name.
        """
        if not isinstance(name, str) or (found := self._loaded.get(name)) is None:
            names = ", ".join(self._loaded) or "none"
            hint = nearest(str(name), self._loaded) or "list it in `lora_paths`"
            raise ConfigError(f"no adapter {quoted(name)} is loaded, but {names}", hint)
        return found.adapter_id

    def adapter_ids(self, names: Any, count: int) -> list[int | None]:
        """The ids for `count` prompts: of one name for all, or of a list, where None has none.

        Raises:
            ConfigError: A name is unknown, or the list has another length.
        """
        if names is not None and not isinstance(names, str | list | tuple):
            raise ConfigError(
                f"`lora_path` is {quoted(names)}, expected a name or a list of names",
                "name a loaded adapter",
            )
        listed = [names] * count if isinstance(names, str) or names is None else list(names)
        require_count("lora_path", listed, count)
        return [None if name is None else self.adapter_id(name) for name in listed]


def require_count(name: str, entries: Sequence[Any], prompts: int) -> None:
    """Refuse a list of another length than that of the prompts.

    Raises:
        ConfigError: The lengths differ.
    """
    if len(entries) != prompts:
        raise ConfigError(
            f"`{name}` has {len(entries)} entries for {prompts} prompts",
            "give one for each prompt, or one for all",
        )
