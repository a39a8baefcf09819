"""LoRA adapters on disk: a PEFT folder, or its weights, checked against the model before use."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import safetensors
import safetensors.torch
import torch

from pie_driver_sglang.errors import AdapterError, quoted
from pie_driver_sglang.memory import available_bytes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
EMBEDDINGS = ("embed_tokens", "lm_head")

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
    """SGLang's name; of a part of a fused layer with the part in the place of the layer."""
    inputs: int
    outputs: int
    fused: tuple[str, ...]
    """Checkpoint names of all parts of the fused layer; its own name if it is none."""
    base: Base | None = None
    """Of an embedding or an LM head."""


class Source(NamedTuple):
    """The files of an adapter."""

    weights: Path
    digest: bytes
    """Of configuration and weights: the same id must not mean other weights later on."""


class Adapter(NamedTuple):
    """Weights as SGLang wants them: scaled, in the model's dtype, fused layers complete."""

    rank: int
    targets: list[str]
    """Last components of the layers' names."""
    tensors: dict[str, torch.Tensor]
    embeds: bool
    """Whether embeddings or the LM head are among them."""


class _Config(msgspec.Struct):
    """What `adapter_config.json` must say."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str | None = None

    def scaling(self, layer: str, rank: int) -> float:
        """The factor of a layer's product, as PEFT computes it."""
        expected = _by_pattern(self.rank_pattern, layer, self.r)
        if rank != expected:
            raise AdapterError(
                f"`{layer}` has rank {rank}, but {CONFIG} says {expected}",
                "save the adapter with its own configuration",
            )
        alpha = _by_pattern(self.alpha_pattern, layer, self.lora_alpha)
        return float(alpha / rank**0.5 if self.use_rslora else alpha / rank)


def read(
    path: str | Path,
    layers: Mapping[str, Linear],
    max_rank: int,
    dtype: torch.dtype,
    digest: bytes | None = None,
) -> tuple[Source, Adapter]:
    """Reads and checks an adapter.

    Args:
        path: A folder that PEFT saved, or its safetensors file.
        layers: The model's layers that take adapters, by the names that checkpoints have.
        max_rank: Largest rank.
        dtype: Of the model.
        digest: Of the files that are expected; None for any.

    Raises:
        AdapterError: It cannot be read, or does not fit the model.
    """
    weights = Path(path)
    try:
        if weights.is_dir():
            weights /= WEIGHTS
        config_bytes = _read_file(weights.with_name(CONFIG))
        weight_bytes = _read_file(weights)
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"{quoted(str(path))} cannot be read: {getattr(error, 'strerror', None) or error}",
            f"name a folder with {CONFIG} and {WEIGHTS}, or a safetensors file beside its {CONFIG}",
        ) from error
    source = Source(weights, hashlib.sha256(config_bytes + weight_bytes).digest())
    if digest not in (None, source.digest):
        raise AdapterError(f"{quoted(str(weights))} has changed since", "load the adapter again")
    config = _parse_config(config_bytes)
    try:
        # Not mapped: whoever shortens a mapped file ends the process.
        tensors = safetensors.torch.load(weight_bytes)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(
            f"{quoted(str(weights))} is no safetensors file: {error}",
            "save the adapter with PEFT, which writes safetensors",
        ) from error
    found = _scaled(tensors, config, layers, max_rank, dtype)
    return source, assemble(found, layers, dtype)


def assemble(
    found: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    layers: Mapping[str, Linear],
    dtype: torch.dtype,
) -> Adapter:
    """Brings the weights of some layers to one rank and completes fused layers with zeros.

    Args:
        found: ``[rank, inputs]`` and ``[outputs, rank]`` by the layers' names in checkpoints.
        layers: The model's layers that take adapters.
        dtype: Of the weights.
    """
    rank = max(len(down) for down, _ in found.values())
    needed = {part for name in found for part in layers[name].fused}
    embeds = not needed.isdisjoint(EMBEDDINGS)
    if embeds:
        # SGLang leaves what an evicted adapter had in the place of the one that is missing.
        needed |= layers.keys() & EMBEDDINGS
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(needed):
        layer = layers[name]
        down = torch.zeros(rank, layer.inputs, dtype=dtype)
        up = torch.zeros(layer.outputs, rank, dtype=dtype)
        if name in found:
            own_down, own_up = found[name]
            down[: len(own_down)], up[:, : len(own_down)] = own_down, own_up
        tensors |= {f"{layer.name}.lora_A.weight": down, f"{layer.name}.lora_B.weight": up}
    return Adapter(rank, sorted({name.rpartition(".")[2] for name in needed}), tensors, embeds)


def checkpoint_name(layer: str) -> str:
    """The name of a layer without what differs between a checkpoint and SGLang's model."""
    return re.sub(r"^(?:(?:model|language_model)\.)+", "", layer)


def _read_file(path: Path) -> bytes:
    # Devices and pipes have no end.
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is missing or no file")
    if path.stat().st_size > available_bytes() // 2:
        raise OSError(f"{path.name} is larger than half of the memory available")
    return path.read_bytes()


def _parse_config(data: bytes) -> _Config:
    try:
        config = msgspec.json.decode(data, type=_Config, strict=True)
        settings = msgspec.json.decode(data)
    except ValueError as error:
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


def _scaled(
    tensors: Mapping[str, torch.Tensor],
    config: _Config,
    layers: Mapping[str, Linear],
    max_rank: int,
    dtype: torch.dtype,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The weights of each layer, in the model's dtype and with their scaling."""
    found = {}
    for layer, sides in _pairs(tensors, layers).items():
        name = checkpoint_name(layer)
        down, up = _check_shapes(layer, sides, layers[name])
        if len(down) > max_rank:
            raise AdapterError(
                f"`{layer}` has rank {len(down)}, more than `max_lora_rank`, which is {max_rank}",
                f"set `max_lora_rank = {len(down)}` in the options",
            )
        # The product is scaled; patterns give layers factors of their own.
        up = up.float() * config.scaling(layer, len(down))
        found[name] = (down.to(dtype), up.to(dtype))
        if not all(bool(part.isfinite().all()) for part in found[name]):
            raise AdapterError(
                f"the weights of `{layer}` are not all finite in {dtype}",
                "use an adapter that was trained without overflow",
            )
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
        match = _WEIGHT.fullmatch(name)
        if match and checkpoint_name(match["layer"]) in layers:
            pairs.setdefault(match["layer"], {})[match["side"]] = tensor
        elif not _repeats_base(name, tensor, layers):
            unfit.append(name)
    if unfit:
        takes = sorted({name.rpartition(".")[2] for name in layers})
        raise AdapterError(
            f"{len(unfit)} of its {len(tensors)} weights, {quoted(min(unfit))} the first of them, "
            "are no LoRA weights of a layer that takes adapters",
            f"use an adapter of this very model that only targets {', '.join(takes)}; "
            "`lora_target_modules` in the options limits these",
        )
    return pairs


def _repeats_base(name: str, tensor: torch.Tensor, layers: Mapping[str, Linear]) -> bool:
    """Whether a weight only repeats the model's own, as PEFT saves it beside an embedding's."""
    match = _BASE_WEIGHT.fullmatch(name)
    layer = layers.get(checkpoint_name(match["layer"])) if match else None
    if layer is None or layer.base is None:
        return False
    own, first, rows = layer.base
    if tensor.shape != (rows, own.shape[1]):
        return False
    return torch.equal(tensor[first : first + len(own)].to(own), own)


def _check_shapes(
    name: str, sides: Mapping[str, torch.Tensor], layer: Linear
) -> tuple[torch.Tensor, torch.Tensor]:
    missing = {"A", "B"} - sides.keys()
    if missing:
        raise AdapterError(f"`{name}` lacks lora_{missing.pop()}", "save the adapter with PEFT")
    down, up = sides["A"], sides["B"]
    if not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterError(f"the weights of `{name}` are no floats", "save the adapter with PEFT")
    rank = len(down) if down.dim() else 0
    expected = ([rank, layer.inputs], [layer.outputs, rank])
    if rank == 0 or (list(down.shape), list(up.shape)) != expected:
        raise AdapterError(
            f"`{name}` has lora_A {list(down.shape)} and lora_B {list(up.shape)}, but the model's "
            f"layer takes [rank, {layer.inputs}] and [{layer.outputs}, rank]",
            "use an adapter of this very model",
        )
    return down, up


def _by_pattern(patterns: Mapping[str, float] | None, layer: str, default: float) -> float:
    """The value of the first pattern that the layer's name ends with, as PEFT looks it up."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", layer):
                return value
        except re.error as error:
            raise AdapterError(
                f"{CONFIG} has the pattern {quoted(pattern)}: {error}", "save it with PEFT"
            ) from error
    return default


def blank(layers: Mapping[str, Linear], rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Weights of all layers that change nothing."""
    return {
        name: (torch.zeros(rank, layer.inputs), torch.zeros(layer.outputs, rank))
        for name, layer in layers.items()
    }
