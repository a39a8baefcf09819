"""LoRA adapters on disk: a PEFT folder, or its weights, checked against the model before use."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec
import safetensors
import safetensors.torch
import torch

from pie_driver_sglang._core import LayerPatterns
from pie_driver_sglang.checkpoint.regular_file import RegularFile
from pie_driver_sglang.errors import AdapterError, quoted
from pie_driver_sglang.memory.host import Budget

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
EMBEDDINGS = ("embed_tokens", "lm_head")
MOST_CONFIG_BYTES = 1 << 20
MOST_HEADER_BYTES = 4 << 20
"""Of a safetensors file: names, types and shapes of some 20,000 weights."""
MOST_NAME_CHARS = 512
"""Of a weight."""
_COMPARED_ROWS = 8192
"""Rows of an embedding that are compared at once, where the model's are."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

T = TypeVar("T")

_WEIGHT = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?"
)
_BASE_WEIGHT = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.base_layer\.weight")
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
)
"""Settings of PEFT that change what the weights mean, or add others."""


class Base(NamedTuple):
    """The weight of an embedding or an LM head without adapters, which PEFT saves along."""

    weight: torch.Tensor
    """``[rows, hidden]``: the rows of this rank."""
    first: int
    """Which row of the vocabulary is the first of them."""
    rows: int
    """Of the whole vocabulary."""


class Linear(NamedTuple):
    """A layer of the model that takes adapters, under the name that a checkpoint has for it.

    Its LoRA weights are ``[rank, inputs]`` and ``[outputs, rank]``.
    """

    name: str
    """The library's name; of a part of a fused layer with the part in the place of the layer."""
    inputs: int
    outputs: int
    fused: tuple[str, ...]
    """Checkpoint names of all parts of the fused layer; its own name if it is not fused."""
    base: Base | None = None
    """Of an embedding or an LM head."""


class Source(NamedTuple):
    """The files of an adapter."""

    weights: Path
    digest: bytes
    """Of configuration and weights: the same id must not mean other weights later on."""


class Adapter(NamedTuple):
    """Weights as the library wants them: scaled, in the model's dtype, fused layers complete."""

    rank: int
    targets: list[str]
    """Last components of the layers' names."""
    tensors: dict[str, torch.Tensor]
    embeds: bool
    """Whether embeddings or the LM head are among them."""


class Weights(NamedTuple):
    """What an adapter adds to a layer: the product of two matrices, and a factor."""

    down: torch.Tensor
    """``[rank, inputs]``."""
    up: torch.Tensor
    """``[outputs, rank]``."""
    factor: float = 1.0


class _Config(msgspec.Struct):
    """What `adapter_config.json` must say."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str | None = None


class _ByLayer(Generic[T]):
    """A setting that patterns change for some layers, as PEFT looks it up."""

    def __init__(self, key: str, values: Mapping[str, T] | None, default: T) -> None:
        self._values = dict(values or {})
        self._in_order = list(self._values.values())
        self._default = default
        try:
            self._patterns = LayerPatterns(list(self._values))
        except ValueError as error:
            raise AdapterError(
                f"{CONFIG} has a `{key}` that is not taken: {error}",
                "name the layers in full, or by patterns without look-around, flags and references",
            ) from error

    def of(self, layer: str) -> T:
        number = self._patterns.first(layer)
        if number is None:
            return self._values.get(layer, self._default)
        return self._in_order[number]


class _Scaling:
    """The factor of each layer's product, as PEFT computes it."""

    def __init__(self, config: _Config) -> None:
        self._ranks = _ByLayer("rank_pattern", config.rank_pattern, config.r)
        self._alphas = _ByLayer("alpha_pattern", config.alpha_pattern, config.lora_alpha)
        self._stabilised = config.use_rslora

    def of(self, layer: str, rank: int) -> float:
        expected = self._ranks.of(layer)
        if rank != expected:
            raise AdapterError(
                f"`{layer}` has rank {rank}, but {CONFIG} says {expected}",
                "save the adapter with its own configuration",
            )
        alpha = self._alphas.of(layer)
        return float(alpha / rank**0.5 if self._stabilised else alpha / rank)


def _below(path: Path, root: Path | None) -> Path:
    """Where a path leads; with `root`, a resolved folder, only below it.

    Raises:
        AdapterError: It lies elsewhere. Whether it exists there is not said.
    """
    if root is None:
        return path
    try:
        found = Path(path).resolve()
    except (OSError, RuntimeError, ValueError):
        found = None
    if found is None or not found.is_relative_to(root):
        raise AdapterError(
            f"{quoted(str(path))} is not in {quoted(str(root))}, the option `lora_root`",
            "put the adapter there, or start the driver with another `lora_root`",
        )
    return found


@contextlib.contextmanager
def read(
    path: str | Path,
    layers: Mapping[str, Linear],
    max_rank: int,
    dtype: torch.dtype,
    budget: Budget,
    digest: bytes | None = None,
    root: Path | None = None,
) -> Iterator[tuple[Source, Adapter]]:
    """Reads and checks an adapter; may be called from any thread.

    Args:
        path: A folder that PEFT saved, or its safetensors file.
        layers: The model's layers that take adapters, by the names that checkpoints have.
        max_rank: Largest rank.
        dtype: Of the model.
        budget: Counts, until the end of the context, the file and two copies of the weights, the
            second of which is the library's.
        digest: Of the files that are expected; None for any.
        root: A resolved folder below which all files must lie; None for any place.

    Raises:
        AdapterError: It cannot be read, or does not fit the model or the memory.
    """
    try:
        with contextlib.ExitStack() as taken:
            with _opened(path, budget, taken, root) as files:
                source = files.source
                if digest not in (None, source.digest):
                    raise AdapterError(
                        f"{quoted(str(source.weights))} has changed since", "load the adapter again"
                    )
                config = _parse_config(files.config)
                found = _checked(files.tensors(), config, layers, max_rank)
                taken.enter_context(budget.take(*_needed(found, layers, dtype)))
                adapter = assemble(found, layers, dtype)
                del found
            yield source, adapter
    except MemoryError as error:
        raise AdapterError(
            f"{quoted(str(path))} does not fit the host's memory: {error}",
            "free memory on the host, or use a smaller adapter",
        ) from error


def assemble(
    found: Mapping[str, Weights],
    layers: Mapping[str, Linear],
    dtype: torch.dtype,
) -> Adapter:
    """Scales the weights of some layers, brings them to one rank, and completes fused layers.

    What is completed is zero.

    Args:
        found: By the layers' names in checkpoints.
        layers: The model's layers that take adapters.
        dtype: Of the weights to be.

    Raises:
        AdapterError: Some weights are not finite in this type.
    """
    rank, needed = _extent(found, layers)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(needed):
        layer = layers[name]
        down = torch.zeros(rank, layer.inputs, dtype=dtype)
        up = torch.zeros(layer.outputs, rank, dtype=dtype)
        if name in found:
            own = found[name]
            down[: len(own.down)] = own.down
            # A library has one factor for all layers; patterns give each its own.
            up[:, : len(own.down)] = own.up.float() * own.factor
            if not (bool(down.isfinite().all()) and bool(up.isfinite().all())):
                raise AdapterError(
                    f"the weights of `{name}` are not all finite in {dtype}",
                    "use an adapter that was trained without overflow",
                )
        tensors |= {f"{layer.name}.lora_A.weight": down, f"{layer.name}.lora_B.weight": up}
    embeds = not needed.isdisjoint(EMBEDDINGS)
    return Adapter(rank, sorted({name.rpartition(".")[2] for name in needed}), tensors, embeds)


def _extent(found: Mapping[str, Weights], layers: Mapping[str, Linear]) -> tuple[int, set[str]]:
    """The rank of an adapter, and the layers that it has weights for when it is complete."""
    needed = {part for name in found for part in layers[name].fused}
    if not needed.isdisjoint(EMBEDDINGS):
        # The library leaves what an evicted adapter had in the place of the one that is missing.
        needed |= layers.keys() & EMBEDDINGS
    return max(len(weights.down) for weights in found.values()), needed


def _needed(
    found: Mapping[str, Weights], layers: Mapping[str, Linear], dtype: torch.dtype
) -> tuple[int, str]:
    """The most memory that the weights take on their way, besides their file; and what they are."""
    rank, needed = _extent(found, layers)
    weights = sum(layers[name].inputs + layers[name].outputs for name in needed) * rank
    complete = weights * dtype.itemsize
    # One layer at a time is scaled in float32; the library joins fused layers when that is over.
    scaled = 2 * torch.float32.itemsize * max(weights.up.numel() for weights in found.values())
    return complete + max(complete, scaled), f"an adapter of rank {rank} in {dtype}"


def checkpoint_name(layer: str) -> str:
    """The name of a layer without what differs between a checkpoint and the library's model."""
    return re.sub(r"^(?:(?:model|language_model)\.)+", "", layer)


class _Files(NamedTuple):
    """An adapter's files as they were when they were read."""

    source: Source
    config: bytes
    weights: int
    """Descriptor of a sealed copy in memory."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights, as views of the copy.

        The file itself is not mapped: shortening a mapped file would end the process.
        """
        try:
            header = int.from_bytes(os.pread(self.weights, 8, 0), "little")
            if header > MOST_HEADER_BYTES:
                raise ValueError(f"its header has {header} bytes, more than {MOST_HEADER_BYTES}")
            return safetensors.torch.load_file(f"/proc/self/fd/{self.weights}")
        except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise AdapterError(
                f"{quoted(str(self.source.weights))} is not a safetensors file: {error}",
                "save the adapter with PEFT, which writes safetensors",
            ) from error


@contextlib.contextmanager
def _opened(
    path: str | Path, budget: Budget, taken: contextlib.ExitStack, root: Path | None
) -> Iterator[_Files]:
    """Reads the files into memory, which `taken` counts."""
    weights, digest = Path(path), hashlib.sha256()
    copy = os.memfd_create("pie-adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        try:
            if _below(weights, root).is_dir():
                weights /= WEIGHTS
            config = _read_config(_below(weights.with_name(CONFIG), root))
            digest.update(config)
            with (
                RegularFile(_below(weights, root)) as file,
                open(copy, "wb", closefd=False) as target,
            ):
                taken.enter_context(budget.take(file.size, file.name))
                for chunk in file.chunks():
                    digest.update(chunk)
                    target.write(chunk)
        except (OSError, ValueError) as error:
            raise AdapterError(
                f"{quoted(str(path))} cannot be read: {getattr(error, 'strerror', None) or error}",
                f"name a folder with {CONFIG} and {WEIGHTS}, or a safetensors file next to its "
                f"{CONFIG}",
            ) from error
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
        yield _Files(Source(weights, digest.digest()), config, copy)
    finally:
        os.close(copy)


def _read_config(path: Path) -> bytes:
    with RegularFile(path) as file:
        if file.size > MOST_CONFIG_BYTES:
            raise OSError(f"{path.name} has {file.size} bytes, more than {MOST_CONFIG_BYTES}")
        return b"".join(bytes(chunk) for chunk in file.chunks())


def _parse_config(data: bytes) -> _Config:
    try:
        config = msgspec.json.decode(data, type=_Config, strict=True)
        settings = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(
            f"{CONFIG} is not what PEFT writes: {error}", "save the adapter with PEFT"
        ) from error
    used = [name for name in _UNSUPPORTED if settings.get(name)]
    if config.bias not in (None, "none"):
        used.append("bias")
    if config.peft_type != "LORA":
        used.append("peft_type")
    if used:
        names = ", ".join(f"{name} = {quoted(settings[name])}" for name in used)
        raise AdapterError(
            f"{CONFIG} asks for more than plain LoRA: {names}",
            "train it as plain LoRA, or merge it into the model",
        )
    if config.r < 1:
        raise AdapterError(f"{CONFIG} has r = {config.r}", "save the adapter with PEFT")
    return config


def _checked(
    tensors: Mapping[str, torch.Tensor],
    config: _Config,
    layers: Mapping[str, Linear],
    max_rank: int,
) -> dict[str, Weights]:
    """The weights of each layer, by its name in checkpoints."""
    scaling = _Scaling(config)
    found: dict[str, Weights] = {}
    for layer, sides in _pairs(tensors, layers).items():
        name = checkpoint_name(layer)
        if name in found:
            raise AdapterError(f"it has `{name}` under two names", "save the adapter with PEFT")
        down, up = _check_shapes(layer, sides, layers[name])
        if len(down) > max_rank:
            raise AdapterError(
                f"`{layer}` has rank {len(down)}, more than `max_lora_rank`, which is {max_rank}",
                f"set `max_lora_rank = {len(down)}` in the options",
            )
        found[name] = Weights(down, up, scaling.of(layer, len(down)))
    if not found:
        raise AdapterError("it holds no LoRA weights", "save the adapter with PEFT")
    return found


def _pairs(
    tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Linear]
) -> dict[str, dict[str, torch.Tensor]]:
    """Both sides of every layer, by the checkpoint's full name."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    unfit = []
    for name, tensor in tensors.items():
        if len(name) > MOST_NAME_CHARS:
            raise AdapterError(
                f"the weight {quoted(name)} has a name of {len(name)} characters, more than "
                f"{MOST_NAME_CHARS}",
                "save the adapter with PEFT",
            )
        match = _WEIGHT.fullmatch(name)
        if match and checkpoint_name(match["layer"]) in layers:
            pairs.setdefault(match["layer"], {})[match["side"]] = tensor
        elif not _repeats_base(name, tensor, layers):
            unfit.append(name)
    if unfit:
        takes = sorted({name.rpartition(".")[2] for name in layers})
        raise AdapterError(
            f"{len(unfit)} of its {len(tensors)} weights, {quoted(min(unfit))} the first of them, "
            "are not LoRA weights of a layer that takes adapters",
            f"use an adapter of this very model that only targets {', '.join(takes)}; "
            "`lora_target_modules` in the options limits these",
        )
    return pairs


def _repeats_base(name: str, tensor: torch.Tensor, layers: Mapping[str, Linear]) -> bool:
    """Whether a weight only repeats the model's own, as PEFT saves it next to an embedding's."""
    match = _BASE_WEIGHT.fullmatch(name)
    layer = layers.get(checkpoint_name(match["layer"])) if match else None
    if layer is None or layer.base is None:
        return False
    own, first, rows = layer.base
    if tensor.shape != (rows, own.shape[1]):
        return False
    for start in range(0, len(own), _COMPARED_ROWS):
        part = own[start : start + _COMPARED_ROWS]
        other = tensor[first + start : first + start + len(part)]
        if not torch.equal(other.to(part), part):
            return False
    return True


def _check_shapes(
    name: str, sides: Mapping[str, torch.Tensor], layer: Linear
) -> tuple[torch.Tensor, torch.Tensor]:
    missing = {"A", "B"} - sides.keys()
    if missing:
        raise AdapterError(f"`{name}` lacks lora_{missing.pop()}", "save the adapter with PEFT")
    down, up = sides["A"], sides["B"]
    if not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterError(f"the weights of `{name}` are not floats", "save the adapter with PEFT")
    rank = len(down) if down.dim() else 0
    expected = ([rank, layer.inputs], [layer.outputs, rank])
    if rank == 0 or (list(down.shape), list(up.shape)) != expected:
        raise AdapterError(
            f"`{name}` has lora_A {list(down.shape)} and lora_B {list(up.shape)}, but the model's "
            f"layer takes [rank, {layer.inputs}] and [{layer.outputs}, rank]",
            "use an adapter of this very model",
        )
    return down, up


def blank(layers: Mapping[str, Linear], rank: int) -> dict[str, Weights]:
    """Weights of all layers that change nothing."""
    return {
        name: Weights(torch.zeros(rank, layer.inputs), torch.zeros(layer.outputs, rank))
        for name, layer in layers.items()
    }
