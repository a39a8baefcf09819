"""The kernels that the steps of a model ask Triton and NVRTC for.

    PYTHONPATH=tests python tests/support/kernels/asked_kernels.py HOW MODEL

MODEL is a `DryModel` as JSON. HOW is what is printed, as JSON:

- `recorded`: the keys of the kernels that `pie-sglang warm` compiles, with their names.
- `asked`: the keys that Triton's own `JITFunction.run` makes for the launches, and those of
  `CudaKernel`, with SGLang imported as in a driver.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec

from pie_driver_sglang.backends.sglang import compile_ahead
from pie_driver_sglang.cli.warm import GPUS
from pie_driver_sglang.compilation.dry_model import DryModel

GPU = dict(GPUS["h200"])


def recorded(model: DryModel) -> dict[str, str]:
    """Names of the kernels that are compiled ahead, by their keys in order."""
    from pie_driver_sglang.compilation import dry_run
    from pie_driver_sglang.compilation.launch_recorder import UTILITIES

    logging.getLogger(dry_run.__name__).addFilter(_refuse)
    request = compile_ahead.CompileRequest(model, GPU["name"], GPU)
    found = {kernel.key: kernel.name for kernel in compile_ahead.record_kernels(request)}
    return {key: found[key] for key in sorted(found.keys() - {UTILITIES})}


def _refuse(record: logging.LogRecord) -> bool:
    """No step may be left out."""
    raise AssertionError(record.getMessage())


def asked(model: DryModel) -> list[str]:
    """Keys of what launches ask for."""
    import triton.compiler

    from pie_driver_sglang.compilation.launch_recorder import recorded_launches

    keys: set[str] = set()

    def compile_source(src: Any, target: Any, options: dict[str, Any]) -> Any:
        parsed = triton.compiler.make_backend(target).parse_options(options)
        keys.add(f"{src.hash()}{parsed.hash()}")
        return SimpleNamespace()

    with _answering(), recorded_launches("sm_90a") as found:
        # Of kernels in CUDA C++ the recorder itself is asked.
        cuda = mock.patch.object(triton.compiler, "compile", compile_source)
        with cuda, _triton_launches():
            _run(model)
    return sorted(keys | found.keys())


@contextlib.contextmanager
def _answering() -> Any:
    import sglang.srt.utils.common  # noqa: F401

    from pie_driver_sglang.fork_server.cuda_properties import answering

    with answering([GPU]):
        yield


def _run(model: DryModel) -> None:
    import torch

    from pie_driver_sglang.compilation.dry_run import dry_run

    dry_run(model, torch.device("cuda", 0))


@contextlib.contextmanager
def _triton_launches() -> Any:
    """Within it, launches go through Triton's code up to the launch itself."""
    from torch._subclasses.fake_tensor import FakeTensor
    from triton.runtime.jit import JITFunction

    def address(tensor: Any) -> int:
        return 512 + int(tensor.storage_offset()) * int(tensor.element_size())

    run = _ORIGINAL["run"]

    def without_launch(kernel: Any, *args: Any, **options: Any) -> object:
        return run(kernel, *args, **{**options, "warmup": True})

    with (
        mock.patch.object(JITFunction, "run", without_launch),
        mock.patch.object(JITFunction, "_do_compile", _ORIGINAL["_do_compile"]),
        mock.patch.object(FakeTensor, "data_ptr", address),
    ):
        yield


_ORIGINAL: dict[str, Callable[..., Any]] = {}


if __name__ == "__main__":
    # Before anything is imported that looks for GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from triton.runtime.jit import JITFunction as Own

    _ORIGINAL.update({"run": Own.run, "_do_compile": Own._do_compile})
    shape = msgspec.json.decode(sys.argv[2], type=DryModel)
    how = {"recorded": recorded, "asked": asked}[sys.argv[1]]
    print(json.dumps(how(shape)))
