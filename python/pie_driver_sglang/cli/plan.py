"""`pie-sglang plan`: plans the memory of a model on any device."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.cli.engine_options import flag_text
from pie_driver_sglang.cli.model_sizes import (
    WeightSizes,
    model_of,
    read_shape,
    read_weights,
    settings_for,
)
from pie_driver_sglang.cli.serve_arguments import (
    known_flags,
    take_config_file,
    values_after,
)
from pie_driver_sglang.config.driver_config import ACTIVATION_DTYPES, MAX_RANKS
from pie_driver_sglang.config.hf_config import check_hf_config, load_hf_config
from pie_driver_sglang.config.option_checks import parse_option, parse_options, valid_names
from pie_driver_sglang.config.options import OPTIONS
from pie_driver_sglang.config.server_args import SERVER_ARGS, SGLANG_FLAGS
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.frontends.common.model_location import model_folder
from pie_driver_sglang.frontends.sglang_server.served_flags import RENAMED, unserved_flag
from pie_driver_sglang.memory.gpus import nvml, query_cuda
from pie_driver_sglang.memory.host import available_bytes
from pie_driver_sglang.memory.plan import plan_memory, table
from pie_driver_sglang.memory.plan_types import Device, MemorySettings, Plan
from pie_driver_sglang.memory.refusal import find_warning, require_fit
from pie_driver_sglang.memory.units import GIB

CONTEXT_BYTES: Final = GIB // 2
"""Memory of the CUDA context. A guess."""


class Planned(NamedTuple):
    """A plan, with its inputs."""

    plan: Plan
    settings: MemorySettings
    architecture: str
    dtype: str
    weights: str
    """Source of the weights' sizes."""
    warning: str | None
    """Why it may run out of memory all the same."""
    refusal: StartError | None
    """Why the model does not fit; None if it does."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status: 1 if the model does not fit."""
    parser = _parser()
    of_file, rest = take_config_file(arguments)
    words = list(itertools.chain.from_iterable(of_file))
    options = parser.parse_args(rest, parser.parse_args(words))
    name = options.first or options.model
    if name is None:
        parser.error("no model is named: `pie-sglang plan Qwen/Qwen3-8B`")
    # Downloads configurations and the index of the weights.
    planned = make_plan(
        model_folder({"model_path": name}, with_weights=False),
        device=_device(options.device_gib, options.cpu or options.device == "cpu"),
        table=_options(options),
        ranks=options.tp,
        dtype=options.dtype,
    )
    sys.stdout.write(_json(planned) if options.json else _text(planned))
    return int(planned.refusal is not None)


def make_plan(
    folder: Path, *, device: Device, table: dict[str, Any], ranks: int, dtype: str
) -> Planned:
    """Plan a model as a driver would.

    Args:
        folder: With the model's `config.json`; weights need not be there.
        device: Where each rank goes.
        table: `[driver.options]`.
        ranks: Devices that share the model.
        dtype: The activations' type.

    Raises:
        ConfigError: The options or the model's config are wrong, or the model cannot be planned
            without SGLang.
    """
    hf_config = load_hf_config(folder)
    options = parse_options(table, device.name)
    check_hf_config(hf_config, options, ranks)
    shape = read_shape(hf_config)
    weights: WeightSizes = read_weights(folder, shape, hf_config, options, dtype)
    model = model_of(shape, weights, options, hf_config, dtype, device.is_host)
    settings = settings_for(options, hf_config, device, ranks)
    refusal = None
    try:
        require_fit(device, model, settings)
    except StartError as error:
        refusal = error
    plan = plan_memory(device, model, settings)
    warning = find_warning(plan, model, settings)
    architecture = hf_config["architectures"][0]
    return Planned(plan, settings, architecture, dtype, weights.source, warning, refusal)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pie-sglang plan",
        description="Plans the memory of a model by the rules of the driver, without loading it. "
        "Of a repository that is not cached, configurations are downloaded and no weights. A "
        "folder needs config.json only; with the weights, or their index, the plan is exact. "
        "The exit status is 1 if the model does not fit.",
        epilog="Flags are those of `serve`, of which some change the memory: --quantization fp8, "
        "--kv-cache-dtype fp8_e4m3, --mem-fraction-static 0.8. "
        "Every option of the driver (docs/options.md) is a flag, too.",
    )
    add = parser.add_argument
    add("first", nargs="?", metavar="MODEL", help="folder, or a repository of the Hugging Face hub")
    add("--model", "--model-path", metavar="MODEL", help="the same")
    add("--device-gib", type=float, metavar="GIB", help="memory of each GPU (default: this one's)")
    add("--cpu", action="store_true", help="plan for the memory of this host instead of a GPU")
    add("--device", choices=("cpu", "cuda"), help="cpu is the same as --cpu")
    add(
        "--tp",
        "--tp-size",
        type=_ranks,
        default=1,
        metavar="N",
        help="GPUs that share the model (default: 1)",
    )
    add("--dp", "--dp-size", type=_ranks, metavar="N", help="replicas: each needs the same")
    help_dtype = "type of the activations (default: %(default)s)"
    add("--dtype", choices=ACTIVATION_DTYPES, default="bfloat16", help=help_dtype)
    help_length = "positions of a context (default: the model's)"
    add("--max-model-len", "--context-length", type=int, metavar="TOKENS", help=help_length)
    help_option = "an option of the driver, e.g. page_size=32; may be given several times"
    add("--option", action="append", default=[], metavar="KEY=VALUE", help=help_option)
    add("--json", action="store_true", help="print one JSON object, sizes in bytes")
    for name in _FLAGS:
        kind = OPTIONS[name].type if name in OPTIONS else SERVER_ARGS[name].type
        flag = f"--{name.replace('_', '-')}"
        if kind == "bool":
            add(flag, action="store_const", const="true", help=argparse.SUPPRESS)
        elif kind.startswith("list"):
            add(flag, nargs="+", help=argparse.SUPPRESS)
        else:
            add(flag, help=argparse.SUPPRESS)
    for name in _other_flags():
        flag = f"--{name.replace('_', '-')}"
        add(flag, action=_Ignored, nargs=_count(name), help=argparse.SUPPRESS)
    for flag in sorted(known_flags() - SGLANG_FLAGS.keys() - {"--engine", "--option"}):
        add(flag, action=_Ignored, nargs=values_after(flag), help=argparse.SUPPRESS)
    for name, own in RENAMED.items():
        add(f"--{name.replace('_', '-')}", dest=own, help=argparse.SUPPRESS)
    return parser


class _Ignored(argparse.Action):
    """A flag of the server that changes no memory of the driver."""

    def __call__(self, *_: Any) -> None:
        """Does nothing."""


def _count(name: str) -> int | str:
    """How many values a flag of SGLang takes, for argparse."""
    kind = SERVER_ARGS[name].type
    if kind == "bool":
        return 0
    return "*" if kind.startswith("list") else 1


def _other_flags() -> list[str]:
    """Flags that `serve` has besides, and that the plan is the same with."""
    own = {*_FLAGS, *RENAMED, *_OF_MEMORY, "context_length", "dp_size", "dtype", "tp_size"}
    others = SERVER_ARGS.keys() - own - {"device", "model_path"}
    return sorted(name for name in others if unserved_flag({name: None}) is None)


_FLAGS: Final = tuple(name for name in valid_names() if name != "context_length")
"""Options that are flags of their own name."""
_OF_MEMORY: Final = ("lora_paths", "max_total_tokens")
"""Flags of the server that change the memory of its driver, and that are not planned."""


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_RANKS}")
    return int(text)


def _device(gib: float | None, cpu: bool) -> Device:
    if cpu:
        import psutil

        total = psutil.virtual_memory().total
        return Device("cpu", total, min(available_bytes(), total))
    if gib is not None:
        if not 0 < gib < 2**20:
            raise ConfigError(f"--device-gib is {gib:g}", "give the memory of one GPU in GiB")
        total = int(gib * GIB)
        return Device("cuda:0", total, max(0, total - CONTEXT_BYTES))
    gpus = query_cuda(nvml()).gpus
    if not gpus:
        raise ConfigError(
            "this machine shows no GPU whose memory could be planned",
            "give its memory, e.g. `--device-gib 80`, or plan for this host with `--cpu`",
        )
    return Device("cuda:0", gpus[0].total, max(0, gpus[0].free - CONTEXT_BYTES))


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in _FLAGS}
    table = dict(
        parse_option(f"{name}={flag_text(value)}")
        for name, value in given.items()
        if value is not None
    )
    table |= map(parse_option, arguments.option)
    if arguments.max_model_len is not None:
        table["context_length"] = arguments.max_model_len
    return table


def _text(planned: Planned) -> str:
    plan, settings = planned.plan, planned.settings
    each = f" on each of {settings.ranks} GPUs" if settings.ranks > 1 else ""
    lines = [
        f"{planned.architecture}, {planned.dtype}{each}; weights by {planned.weights}",
        table(plan),
        "",
    ]
    if planned.refusal is not None:
        lines += [f"does not fit: {planned.refusal}", "", f"hint: {planned.refusal.hint}"]
    else:
        contexts = plan.tokens / settings.context_tokens
        lines.append(f"fits: KV for {contexts:,.1f} contexts of {settings.context_length:,} tokens")
    if planned.warning is not None:
        lines.append(f"warning: {planned.warning}")
    return "\n".join(lines) + "\n"


def _json(planned: Planned) -> str:
    plan, settings, refusal = planned.plan, planned.settings, planned.refusal
    sizes = {name: value for name, value in plan._asdict().items() if name != "device"}
    document = {
        "fits": refusal is None,
        "refusal": None if refusal is None else {"message": str(refusal), "hint": refusal.hint},
        "warning": planned.warning,
        "architecture": planned.architecture,
        "dtype": planned.dtype,
        "weights_by": planned.weights,
        "device": plan.device._asdict(),
        "plan": {**sizes, "kv": plan.kv},
        "settings": settings._asdict(),
    }
    return json.dumps(document, indent=2) + "\n"
