"""SGLang's server on the CPU, with the arguments of `python -m sglang.launch_server`.

Its other processes are forks of it where that is safe, so that SGLang is imported once. On a
machine without a GPU its rotary embedding and its logits would ask for CUDA kernels.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

# transformers imports it where it is installed, for what is not needed here: 700 modules.
sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]


def run_scheduler(*arguments: Any) -> None:
    """SGLang's scheduler, whose model runs on the CPU."""
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.managers.scheduler import run_scheduler_process

    from pie_driver_sglang.frontends.sglang_server.compat import forking

    base._is_cpu = logits_processor._is_cpu = True
    forking.run_with_default_signals(run_scheduler_process, *arguments)


def main() -> None:
    """What SGLang's own launcher does."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
    from sglang.srt.server_args import prepare_server_args

    from pie_driver_sglang.frontends.sglang_server.compat import forking

    arguments = prepare_server_args(sys.argv[1:])
    detokenizer = functools.partial(forking.run_with_default_signals, run_detokenizer_process)
    with forking.forks("cpu"):
        launch_server(
            arguments,
            run_scheduler_process_func=run_scheduler,
            run_detokenizer_process_func=detokenizer,
        )


if __name__ == "__main__":
    main()
