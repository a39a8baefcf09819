"""The process of SGLang's HTTP server: selects the scheduler, and starts the server."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from pie_driver_sglang.backends.sglang.version import check_versions
from pie_driver_sglang.checkpoint.gguf_cache import (
    converted_folder,
    gguf_source,
    present_conversion,
)
from pie_driver_sglang.checkpoint.hub_cache import local_path, uses_modelscope
from pie_driver_sglang.checkpoint.packaged import MODELS, packaged_folder
from pie_driver_sglang.config import option_checks
from pie_driver_sglang.config.api_keys import ApiKeys, take_keys
from pie_driver_sglang.config.arch import takes_images
from pie_driver_sglang.config.config_file import check_weight_files
from pie_driver_sglang.config.flag_names import field_of, pop_flags
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.config.http_limits import HttpSettings, take_http_flags
from pie_driver_sglang.config.model_features import returns_embeddings, unserved_media
from pie_driver_sglang.config.no_effect import no_effect_lines
from pie_driver_sglang.config.option_checks import parse_option
from pie_driver_sglang.config.options import FUSED_LORA
from pie_driver_sglang.console import announce_server, print_notice
from pie_driver_sglang.errors import ConfigError, DriverError, Unsupported
from pie_driver_sglang.fork_server.cuda_properties import answering, read_properties
from pie_driver_sglang.fork_server.starter import fork_server, is_enabled
from pie_driver_sglang.frontends.batches.offline_run import OfflineJob
from pie_driver_sglang.frontends.common import arguments as engine_arguments
from pie_driver_sglang.frontends.common import driver_options, scheduler_values
from pie_driver_sglang.frontends.common.arguments import EngineArguments, parse_arguments
from pie_driver_sglang.frontends.common.flag_values import read_flags
from pie_driver_sglang.frontends.common.lora_adapters import parse_paths
from pie_driver_sglang.frontends.common.model_location import model_folder, remote_scheme
from pie_driver_sglang.frontends.sglang_server.compat import server_environment
from pie_driver_sglang.frontends.sglang_server.served_flags import (
    TRANSPORT,
    WATCHDOG,
    refuse_flags,
    served_arguments,
    unserved_flag,
)
from pie_driver_sglang.memory.gpus import check_gpus, has_gpu, prefers_cpu
from pie_driver_sglang.observability import start_spans
from pie_driver_sglang.observability.spans import check_tracing

OFFLINE: Final = "batch"
"""The first argument of a process that runs a batch."""
SCHEDULERS: Final = ("auto", "pie", "sglang")
_SEVERAL: Final = ("dp_size", "tokenizer_worker_num")
"""Fields of SGLang's by which threads start processes."""
_LORA_BACKEND: Final = "lora_backend"
_MODEL: Final = "model_path"
_LOAD_FORMAT: Final = "load_format"
_OF_FLAGS: Final = (driver_options, engine_arguments, option_checks, scheduler_values)
"""Modules whose warnings are about flags."""
_DEFAULT_ENGINE: Final = "sglang"


class ServeArguments(NamedTuple):
    """The flags of this command, and those of SGLang.

    Attributes:
        scheduler: One of `SCHEDULERS`.
        options: Arguments of the engine that SGLang has no flags for.
        sglang: SGLang's command line.
        http: Limits of the HTTP server.
        keys: API keys.
    """

    scheduler: str
    options: dict[str, Any]
    sglang: list[str]
    http: HttpSettings = HttpSettings()
    keys: ApiKeys = ApiKeys()


def run(arguments: Sequence[str]) -> int:
    """Serve until the server is ended, or run a batch; returns the exit status.

    Args:
        arguments: Flags; `batch`, its input, output and model before them for a batch.
    """
    job = None
    if arguments and arguments[0] == OFFLINE:
        source, output, model = arguments[1:4]
        job, arguments = OfflineJob(Path(source), Path(output), model), arguments[4:]
    try:
        return _serve(split_arguments(with_device(with_packaged_model(arguments))), job)
    except DriverError as error:
        hint = f"\nhint: {error.hint}\n" if error.hint else ""
        sys.stderr.write(f"pie-sglang: {error}\n{hint}")
        return 1


def split_arguments(arguments: Sequence[str]) -> ServeArguments:
    """Take this command's flags out of a command line.

    Raises:
        ConfigError: A flag has no value, or a wrong one.
    """
    keys, rest = take_keys(arguments)
    http, rest = take_http_flags(rest)
    given, rest = pop_flags(rest, lambda flag: flag in ("--scheduler", "--option") or None)
    options = dict(parse_option(value) for flag, value in given if flag == "--option")
    if options.get("engine") == _DEFAULT_ENGINE:
        # What is served anyway does not require our scheduler, as other options do.
        del options["engine"]
    if flag_value(rest, _LORA_BACKEND) == FUSED_LORA:
        # The driver's own, which SGLang's parser refuses.
        _, rest = pop_flags(rest, lambda flag: field_of(flag) == _LORA_BACKEND or None)
        options[_LORA_BACKEND] = FUSED_LORA
    scheduler = next((value for flag, value in reversed(given) if flag == "--scheduler"), "auto")
    if scheduler not in SCHEDULERS:
        raise ConfigError(
            f"`--scheduler` is {scheduler!r}", f"expected one of {', '.join(SCHEDULERS)}"
        )
    return ServeArguments(scheduler, options, rest, http, keys)


def flag_value(arguments: Sequence[str], name: str) -> str | None:
    """The last value of a field of SGLang's, by any flag of it; None if it is not set."""
    found, _ = pop_flags(arguments, lambda flag: field_of(flag) == name or None)
    return found[-1][1] if found else None


def with_packaged_model(arguments: Sequence[str]) -> list[str]:
    """Replace the name of a packaged model by its folder; clients still see the name.

    Raises:
        ConfigError: The model cannot be downloaded.
    """
    name = flag_value(arguments, _MODEL)
    if name is None or name not in MODELS or Path(name).is_dir():
        return list(arguments)
    _, rest = pop_flags(arguments, lambda flag: field_of(flag) == _MODEL or None)
    if flag_value(rest, "served_model_name") is None:
        rest += ["--served-model-name", name]
    return ["--model-path", str(packaged_folder(name)), *rest]


def with_device(arguments: Sequence[str]) -> list[str]:
    """Name the CPU as the device where SGLang's environment variable does so, and no flag.

    SGLang's own parser reads that variable after it has been imported.
    """
    if not prefers_cpu() or flag_value(arguments, "device") is not None:
        return list(arguments)
    return [*arguments, "--device", "cpu"]


def with_converted_model(arguments: Sequence[str]) -> list[str]:
    """Replace a GGUF file, or its folder, by the converted model; clients still see its name.

    SGLang's own scheduler reads such a file by itself.

    Raises:
        ConfigError: It cannot be converted.
    """
    name = flag_value(arguments, _MODEL)
    path = None if name is None else local_path(name)
    load_format = flag_value(arguments, _LOAD_FORMAT)
    source = None if path is None else gguf_source(path, load_format or "auto")
    if source is None:
        return list(arguments)
    replaced = (_MODEL, _LOAD_FORMAT)
    _, rest = pop_flags(arguments, lambda flag: field_of(flag) in replaced or None)
    if flag_value(rest, "served_model_name") is None:
        rest += ["--served-model-name", source.stem]
    return ["--model-path", str(converted_folder(source)), *rest]


def _serve(own: ServeArguments, job: OfflineJob | None) -> int:
    on_cpu = _runs_on_cpu(own)
    architectures = named_architectures(own.sglang)
    check_versions()
    _check_values(own, architectures)
    with _forking_drivers(own, architectures, on_cpu=on_cpu):
        return _launch(own, job, architectures, on_cpu=on_cpu)


def _runs_on_cpu(own: ServeArguments) -> bool:
    """Whether a model runs on the CPU; a GPU that does not exist is an error.

    Raises:
        StartError: There is no GPU, and the CPU is not requested.
    """
    device = flag_value(own.sglang, "device")
    if device == "cpu":
        return True
    if "devices" in own.options:
        # Read later.
        return not has_gpu()
    if device in (None, "cuda"):
        # SGLang requires a device, too: it does not fall back to the CPU.
        check_gpus(["cuda:0"])
    return False


def _check_values(own: ServeArguments, architectures: Sequence[str]) -> None:
    """Report what is wrong before the imports, as far as flags can be read without SGLang's parser.

    Raises:
        ConfigError: A value is wrong, or the model has no weights.
    """
    given = read_flags(own.sglang)
    # Without a class, the model may be a file that is yet to be converted.
    is_remote = remote_scheme(flag_value(own.sglang, _MODEL) or "") is not None
    if given is None or not (architectures or is_remote):
        return
    if takes_images({"architectures": architectures}):
        given.pop("enable_multimodal", None)
    with _without_repeated_warnings():
        plan, _ = choose_scheduler(own, given)
    if plan is not None and plan.engine == _DEFAULT_ENGINE:
        # As the driver does, once it has started.
        check_weight_files(plan.model, plan.runtime["options"].get("load_format", "auto"))


@contextlib.contextmanager
def _without_repeated_warnings() -> Iterator[None]:
    """Within it, warnings about flags are not logged: they are when all is parsed again.

    Those of a download or a conversion are, which happens once.
    """
    loggers = [logging.getLogger(module.__name__) for module in _OF_FLAGS]
    for each in loggers:
        each.addFilter(_nothing)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(_nothing)


def _nothing(_record: logging.LogRecord) -> bool:
    return False


@contextlib.contextmanager
def _forking_drivers(
    own: ServeArguments, architectures: Sequence[str], *, on_cpu: bool
) -> Iterator[None]:
    """Within it, drivers are forks of a process that imports SGLang while this one does."""
    if not _may_be_ours(own) or not architectures or "engine" in own.options:
        yield
        return
    ranks = flag_value(own.sglang, "tp_size") or "1"
    device = "cpu" if on_cpu else "cuda"
    with fork_server(device, architectures, ranks=int(ranks) if ranks.isdecimal() else 1):
        yield


def _may_be_ours(own: ServeArguments) -> bool:
    """Whether no flag selects SGLang's scheduler, as far as its parser is not needed to know."""
    fields = {field_of(word.partition("=")[0]) for word in own.sglang if word.startswith("--")}
    unserved = unserved_flag(dict.fromkeys(filter(None, fields)))
    return own.scheduler != "sglang" and not unserved


def _launch(
    own: ServeArguments, job: OfflineJob | None, architectures: Sequence[str], *, on_cpu: bool
) -> int:
    """Import SGLang and serve; returns the exit status."""
    server_environment.prepare_server(architectures, on_cpu=on_cpu)
    start_spans.rest("settings")
    has_images = takes_images({"architectures": architectures})
    forks = _may_be_ours(own) and (on_cpu or is_enabled("cuda"))
    # This process has no use for CUDA but for images, and then its children may be forks.
    needs_no_cuda = contextlib.ExitStack()
    devices = read_properties() if forks and not (on_cpu or has_images) else []
    capability = max((int(each["major"]) for each in devices), default=None)
    imports = server_environment.importing_server(on_cpu=on_cpu, capability=capability)
    with start_spans.span("imports"), imports:
        if devices:
            needs_no_cuda.enter_context(answering(devices))
        from pie_driver_sglang.frontends.sglang_server.compat import front_forks, http_launch

    given = http_launch.given_flags(own.sglang)
    if has_images:
        # SGLang serves the images of such a model with the flag and without it.
        given.pop("enable_multimodal", None)
    # On a GPU in any case: what follows may start threads there, which forbid later forks.
    early = forks and (not on_cpu or any(int(given.get(name, 1)) > 1 for name in _SEVERAL))
    with front_forks.front_fork_server() if early else contextlib.nullcontext() as context:
        plan, reason = choose_scheduler(own, given)
        if plan is None:
            needs_no_cuda.close()
            arguments, scheduler = _sglang_scheduler(own, given, reason, on_cpu=on_cpu)
        else:
            arguments, scheduler = _own_scheduler(
                own, given, plan, on_cpu=on_cpu, has_images=has_images
            )
        launch = functools.partial(
            http_launch.launch, arguments, scheduler, is_ours=plan is not None, forks=context
        )
        start_spans.rest("flags")
        if job is not None:
            _run_batch(job, launch)
        embeds = returns_embeddings(
            {"architectures": architectures}, is_embedding=arguments.is_embedding
        )
        launch(functools.partial(_announce, arguments, embeds=embeds))
    return 0


def _sglang_scheduler(
    own: ServeArguments, given: Mapping[str, Any], reason: str, *, on_cpu: bool
) -> tuple[Any, Callable[..., None]]:
    """SGLang's settings and its own scheduler.

    Raises:
        ConfigError: It does not serve these flags.
    """
    from pie_driver_sglang.frontends.sglang_server.compat import http_launch

    if _algorithm(given) == "SUFFIX":
        raise ConfigError(
            f"SGLang's own scheduler serves ({reason}), which has no suffix decoding",
            "set `--speculative-algorithm NGRAM`, or remove it",
        )
    index = server_environment.with_prefix_index(given)
    graphs = server_environment.without_prefill_graphs(given) if on_cpu else []
    arguments = http_launch.parse_flags([*own.sglang, *index, *graphs], own.http, own.keys)
    cache = "with our prefix index" if index else "with its own prefix cache"
    print_notice(f"SGLang's own scheduler serves ({reason}), {cache}")
    return arguments, http_launch.sglang_scheduler(reason, on_cpu=on_cpu)


def _own_scheduler(
    own: ServeArguments,
    given: Mapping[str, Any],
    plan: EngineArguments,
    *,
    on_cpu: bool,
    has_images: bool,
) -> tuple[Any, Callable[..., None]]:
    """SGLang's settings and our scheduler.

    Raises:
        ConfigError: SGLang refuses the flags.
        StartError: A GPU does not exist.
    """
    from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    from pie_driver_sglang.frontends.sglang_server.scheduler_process import run_scheduler

    plan.check_devices()
    media = unserved_media(load_hf_config(plan.model))
    for line in [*no_effect_lines(given), *filter(None, [media])]:
        print_notice(line)
    flag, value = TRANSPORT
    transport = [f"--{flag.replace('_', '-')}", value] if has_images else []
    added = [*pinned_revision(plan, given), *transport, *known_algorithm(given)]
    # SGLang refuses it on a CPU, where the driver serves it.
    without = "enable_deterministic_inference" if on_cpu else None
    words = with_converted_model(own.sglang)
    arguments = http_launch.parse_flags([*words, *added], own.http, own.keys, without)
    return arguments, functools.partial(run_scheduler, plan)


def _run_batch(job: OfflineJob, launch: Callable[..., None]) -> NoReturn:
    """Run a batch in place of a server, and end this process."""
    from pie_driver_sglang.frontends.sglang_server.compat import offline_batch

    offline = offline_batch.OfflineServer(job)
    launch(_no_op, offline=offline)
    sys.stderr.flush()
    # Its helpers are killed, which Python would complain about at a usual exit.
    os._exit(offline.status)


def named_architectures(arguments: Sequence[str]) -> Sequence[str]:
    """The classes that the model's `config.json` names; none for URLs and new GGUF files.

    A GGUF file is converted later, once the other flags have been checked.

    Raises:
        ConfigError: There is no such model.
    """
    name = flag_value(arguments, _MODEL)
    if name is None or remote_scheme(name) is not None:
        return ()
    path = local_path(name)
    source = (
        None if path is None else gguf_source(path, flag_value(arguments, _LOAD_FORMAT) or "auto")
    )
    if source is not None:
        present = present_conversion(source)
        return () if present is None else load_hf_config(present).get("architectures") or ()
    place: dict[str, Any] = {"model_path": name}
    for field in ("revision", "download_dir"):
        place[field] = flag_value(arguments, field)
    model = model_folder(place, with_weights=False)
    return load_hf_config(model).get("architectures") or ()


def _no_op() -> None:
    """A batch announces no server."""


def choose_scheduler(
    own: ServeArguments, given: Mapping[str, Any]
) -> tuple[EngineArguments | None, str]:
    """The arguments of our scheduler, or None and the reason why SGLang's own serves.

    Args:
        own: This command's flags.
        given: The flags of SGLang that the user set.

    Raises:
        ConfigError: A value is wrong, the model is unavailable, our scheduler was requested and
            does not support a flag, or tracing is not installed.
    """
    refuse_flags(given)
    if given.get("enable_trace"):
        # SGLang's processes would end one after the other, each with a message of its own.
        check_tracing()
    if own.scheduler == "sglang":
        if own.options:
            named = ", ".join(f"`{name}`" for name in own.options)
            raise ConfigError(
                f"`--scheduler sglang` takes no options of our driver, and {named} is given",
                "remove `--scheduler`, or `--option` and `--engine`",
            )
        return None, "as `--scheduler sglang` says"
    reason = unserved_flag(given)
    if reason is None:
        try:
            scheduler_values.check_scheduler(given)
            plan = parse_arguments({**served_arguments(given), **own.options})
            if WATCHDOG in given:
                plan.runtime["step_timeout_s"] = float(given[WATCHDOG])
            media = unserved_media(load_hf_config(plan.model))
            if media is None or own.scheduler == "pie" or own.options:
                # Ours downloads none, as SGLang's does.
                parse_paths(given.get("lora_paths") or ())
                return plan, ""
            return None, f"{media}; `--scheduler pie` serves its text"
        except Unsupported as error:
            reason = " ".join(str(error).split())
    if own.scheduler == "pie" or own.options:
        other = "start with `--scheduler sglang`, which takes no `--option`"
        if "engine" in own.options:
            other = "start without `--engine`"
        raise ConfigError(f"our scheduler does not serve this: {reason}", f"remove it, or {other}")
    return None, reason


def pinned_revision(plan: EngineArguments, given: Mapping[str, Any]) -> list[str]:
    """Flags that pin SGLang's frontend to the commit of a repository that our driver loads.

    Args:
        plan: The arguments of our scheduler.
        given: The flags of SGLang that the user set.
    """
    # The flag would be that of the tokenizer's repository, too.
    own_tokenizer = given.get("tokenizer_path") not in (None, given["model_path"])
    if own_tokenizer or uses_modelscope() or local_path(given["model_path"]) is not None:
        return []
    return ["--revision", plan.model.name]


def known_algorithm(given: Mapping[str, Any]) -> list[str]:
    """Flags that name SGLang's frontend NGRAM where our driver drafts by SUFFIX or a head.

    The frontend counts accepted drafts of either. SGLang has no other name for SUFFIX, and asks for
    more settings of a head than our driver needs.
    """
    others = ("SUFFIX", "EAGLE", "EAGLE3")
    return ["--speculative-algorithm", "NGRAM"] if _algorithm(given) in others else []


def _algorithm(given: Mapping[str, Any]) -> str:
    return str(given.get("speculative_algorithm")).upper()


def _announce(arguments: Any, *, embeds: bool) -> None:
    spans, origin = start_spans.recorded(), start_spans.origin()
    print_notice(start_spans.summary(spans, origin, time.monotonic()))
    model = arguments.served_model_name or arguments.model_path
    announce_server(arguments.url(), model, embeds=embeds)
