"""Loads a snapshot on the CPU as a driver does, and again with other tensors.

Prints why the snapshot is refused, or null, and for each change its kind, its tensor and the
refusal. Models that a driver serves on a GPU alone are loaded, too.

Arguments: the snapshot, on how many ranks, how many changes, and of which kinds; of all by default.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.models import deepseek_v2

from pie_driver_sglang.backends.sglang import boot, environment, load_check, support
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.ranks.types import ALONE, Rank
from support.process import drivers

Weights = list[tuple[str, torch.Tensor]]

CHANGES: dict[str, Callable[[str, torch.Tensor], Weights]] = {
    "without": lambda name, tensor: [],
    "longer": lambda name, tensor: [(name, torch.cat([tensor, tensor[:1]]))],
    "shorter": lambda name, tensor: [(name, tensor[:-1])],
    "double": lambda name, tensor: [(name, torch.cat([tensor, tensor]))],
    "half": lambda name, tensor: [(name, tensor[: (len(tensor) + 1) // 2 - (len(tensor) == 1)])],
    "wider": lambda name, tensor: [(name, torch.cat([tensor, tensor[..., :1]], -1))],
    "narrower": lambda name, tensor: [(name, tensor[..., :-1])],
    "integers": lambda name, tensor: [(name, tensor.long())],
}


def load_all(check: load_check.LoadCheck, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """In the place of the check's own: loads the weights once as they are, and with changes."""
    stored = [(name, tensor.clone()) for name, tensor in weights]
    sound = refusal(check, stored)
    draw = random.Random(len(stored))
    changes = []
    for _ in range(int(sys.argv[3])):
        index = draw.randrange(len(stored))
        what = draw.choice(sys.argv[4:] or list(CHANGES))
        name, tensor = stored[index]
        changed = CHANGES[what](name, tensor)
        again = load_check.LoadCheck(check._folder, check._model, check._config, check._unwritten)
        refused = refusal(again, [*stored[:index], *changed, *stored[index + 1 :]])
        changes.append((what, name, refused))
    if RANK.number == 0:
        print(json.dumps((sound, changes)))
        sys.stdout.flush()
    os._exit(0)


def refusal(check: load_check.LoadCheck, weights: Weights) -> str | None:
    """What the driver would end with: of several ranks the first that cannot load them says why."""

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights

    own = check._load

    def load(*args: Any, **kwargs: Any) -> Any:
        """A rank that fails ends the others; here they must continue."""
        failure, result = None, None
        try:
            result = own(*args, **kwargs)
        except Exception as error:
            failure = error
        if any(process_groups.gathered(failure is not None)):
            raise failure or ElsewhereError
        return result

    check._load = load
    said = None
    try:
        LOAD(check, read())
    except ElsewhereError:
        pass
    except StartError as error:
        said = str(error)
    return next(filter(None, process_groups.gathered(said)), None)


class ElsewhereError(Exception):
    """Another rank could not load the weights."""


def with_triton(config: Any, device: str) -> Any:
    """The arguments for SGLang where the CPU's attention backend would be refused."""
    options = msgspec.structs.replace(config.driver.options, attention_backend="triton")
    driver = msgspec.structs.replace(config.driver, options=options)
    return ARGUMENTS(msgspec.structs.replace(config, driver=driver), device)


def rope(*args: Any, device: Any = None, **kwargs: Any) -> Any:
    """Latent attention's, which SGLang has for Intel's processors alone where there is no GPU."""
    return factory.get_rope(*args, **kwargs)


RANK = ALONE
LOAD, ARGUMENTS = load_check.LoadCheck.load, boot._server_args


def start_ranks(count: int) -> Rank:
    """Forks the other ranks; returns this process's."""
    if count == 1:
        return ALONE
    rendezvous = os.memfd_create("rendezvous")
    for number in range(1, count):
        if os.fork() == 0:
            return Rank(number, count, rendezvous)
    return Rank(0, count, rendezvous)


if __name__ == "__main__":
    load_check.LoadCheck.load = load_all  # type: ignore[method-assign, assignment]
    boot._server_args = with_triton
    support.check_config = lambda *_: None
    deepseek_v2.get_rope_wrapper = rope
    snapshot, ranks = Path(sys.argv[1]), int(sys.argv[2])
    written = json.loads((snapshot / "config.json").read_text())
    dtype = written.get("dtype") or written["torch_dtype"]
    with tempfile.TemporaryDirectory() as folder:
        spread = drivers.spread(ranks)
        path = drivers.write_config(Path(folder), snapshot, activation_dtype=dtype, **spread)
        config = load_config(path)
        RANK = start_ranks(ranks)
        names = config.model.hf_config["architectures"]
        environment.prepare("cpu", names, spins=False, ranks=ranks)
        boot.boot(config, RANK)
    raise SystemExit("the weights were not loaded")
