"""Models of the Hugging Face hub, in its cache or downloaded, and in the cache of ModelScope."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.console import print_notice
from pie_driver_sglang.errors import ConfigError, quoted, reason
from pie_driver_sglang.memory.units import GIB

WEIGHT_FILES: Final = ("*.safetensors", "*.bin")
"""Weights, in SGLang's order: only the first available format is fetched."""
_POOLING: Final = (
    "[0-9]_Pooling/config.json",
    "[0-9]_Dense/config.json",
    "[0-9]_Dense/model.safetensors",
)
"""As sentence-transformers writes it."""
_OTHERS: Final = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
"""Configurations, tokenizers, templates, and code."""
_CONFIGURATIONS: Final = ("config.json", "tokenizer_config.json")


def local_path(name: str | Path) -> Path | None:
    """The existing file or folder of this name; None if there is none."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # Too long, with a zero byte, or of no user.
        return None


def is_repository_name(name: str) -> bool:
    """Whether the hub could have a repository of this name, unlike one of `/a/b` or `./a`."""
    utils: Any = import_module("huggingface_hub.utils")
    try:
        utils.validate_repo_id(name)
    except utils.HFValidationError:
        return False
    return True


def cached_snapshot(
    repository: str, revision: str | None = None, cache: str | None = None
) -> Path | None:
    """The folder of a repository's snapshot in the cache; None if it is not there.

    Args:
        repository: A name as the hub has it.
        revision: A branch, tag or commit; None for `main`.
        cache: The folder of the cache; None for that of the user.
    """
    package: Any = import_module("huggingface_hub")
    for name in _CONFIGURATIONS:
        try:
            path = package.try_to_load_from_cache(
                repository, name, cache_dir=cache, revision=revision
            )
        except package.errors.HFValidationError:  # It is not a repository's name.
            return None
        if isinstance(path, str):
            return Path(path).parent
    return None


def fetch_snapshot(
    repository: str,
    revision: str | None = None,
    cache: str | None = None,
    *,
    with_weights: bool = True,
) -> Path:
    """The folder of a repository's snapshot, downloaded if it is not in the cache.

    A cached snapshot is not compared with the hub.

    Args:
        repository: A name as the hub has it.
        revision: A branch, tag or commit; None for `main`.
        cache: The folder of the cache; None for that of the user.
        with_weights: Whether weights are needed, or only configurations and the tokenizer.

    Raises:
        ConfigError: It does not exist, access is denied, or the hub is unreachable.
    """
    cached = cached_snapshot(repository, revision, cache)
    if cached is not None and (not with_weights or _has_weights(cached)):
        return cached
    hub: Any = import_module("huggingface_hub")
    errors: Any = import_module("huggingface_hub.errors")
    network: Any = import_module("httpx")
    try:
        tree = hub.HfApi().list_repo_tree(repository, revision=revision)
        sizes = {each.path: each.size for each in tree if hasattr(each, "size")}
        names = list(needed_files(list(sizes), with_weights=with_weights))
        size = sum(sizes[name] for name in names) / GIB
        print_notice(f"downloading {repository}: {len(names)} files, {size:.2f} GiB")
        found: str = hub.snapshot_download(
            repository,
            revision=revision,
            cache_dir=cache,
            allow_patterns=names,
            tqdm_class=_bar(),
        )
    except (OSError, network.HTTPError, errors.HFValidationError) as error:
        raise _explained(repository, revision, error) from error
    return Path(found)


def uses_modelscope() -> bool:
    """Whether `SGLANG_USE_MODELSCOPE` names ModelScope as the hub, read as SGLang reads it."""
    return os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("true", "1", "yes", "y")


def modelscope_folder(name: str, cache: str | None = None) -> Path:
    """The folder of a model in the cache of ModelScope, whose client would import torch.

    Args:
        name: The model's, as ModelScope has it.
        cache: A folder to look into after that cache, `download_dir`.

    Raises:
        ConfigError: It has not been downloaded.
    """
    default = Path.home() / ".cache" / "modelscope" / "hub"
    root = Path(os.environ.get("MODELSCOPE_CACHE") or default).expanduser() / "models"
    for folder in (root, *([Path(cache)] if cache else [])):
        found = local_path(folder / name)
        if found is not None and found.is_dir():
            return found
    raise ConfigError(
        f"the model {quoted(name)} is not in the ModelScope cache {root}, and "
        "`SGLANG_USE_MODELSCOPE` is set",
        f"run `modelscope download --model {name}`, or unset the variable for the Hugging Face hub",
    )


def _bar() -> Any:
    """The hub's progress bar without its thread, which would prevent forks of the server."""
    utils: Any = import_module("huggingface_hub.utils")
    return type("_Bar", (utils.tqdm,), {"monitor_interval": 0})


def needed_files(names: Sequence[str], *, with_weights: bool) -> Iterator[str]:
    """The files that a model needs: in the repository's root, and how embeddings are pooled."""
    patterns = list(_OTHERS)
    if with_weights:
        patterns += [each for each in WEIGHT_FILES if fnmatch.filter(names, each)][:1]
    for name in names:
        wanted = patterns if "/" not in name else _POOLING
        if any(fnmatch.fnmatchcase(name, each) for each in wanted):
            yield name


def _has_weights(folder: Path) -> bool:
    """Whether the weights of a snapshot are complete, by its index if it has one."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            names = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
            return all((folder / name).is_file() for name in set(names))
    return any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES)


def _explained(repository: str, revision: str | None, error: Exception) -> ConfigError:
    """An error of the hub's client, with what to do about it."""
    errors: Any = import_module("huggingface_hub.errors")
    hub: str = import_module("huggingface_hub.constants").ENDPOINT
    model = f"the model {quoted(repository)}"
    if isinstance(error, errors.HFValidationError):
        return ConfigError(
            f"{model} is neither a folder nor the name of a repository",
            "name a folder, or a repository as `owner/name`",
        )
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{model} is gated: {hub} gives it to users that it knows and that accepted its terms",
            f"accept them at {hub}/{repository}, then run `hf auth login`, or set `HF_TOKEN`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{model} has no revision {quoted(revision)}", "look at its branches")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"{model} is neither a folder nor a repository at {hub} that you may read",
            "check the name; for a private one run `hf auth login`, or set `HF_TOKEN`",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ConfigError(
            f"{model} is not completely in the Hugging Face cache, and `HF_HUB_OFFLINE` is set",
            f"unset it, or run `hf download {repository}` where there is a network",
        )
    why = " ".join(reason(error).split())
    return ConfigError(
        f"{model} is not completely in the Hugging Face cache, and cannot be downloaded from "
        f"{hub}: {why}",
        "check the network, `HF_ENDPOINT` and the space on the disk, or name a folder",
    )
