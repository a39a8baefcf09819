"""SGLang's server on the CPU, with the arguments of `python -m sglang.launch_server`.

SGLang starts its other processes afresh, and each imports this file: on a machine without a GPU its
rotary embedding and its logits would ask for CUDA kernels.
"""

from __future__ import annotations

import sys

# transformers imports it where it is installed, for what is not needed here: 700 modules.
sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]


def without_a_gpu() -> None:
    """Lets the model run on the CPU."""
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.rotary_embedding import base

    base._is_cpu = logits_processor._is_cpu = True


def main() -> None:
    """What SGLang's own launcher does."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    without_a_gpu()
