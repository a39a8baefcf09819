"""A trainer: rank 0 of a process group, which broadcasts the tensors of a checkpoint.

`trainer.py FOLDER PORT WORLD_SIZE`; the names of the tensors come by stdin, as a list of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file
from sglang.srt.utils import init_custom_process_group


def main(folder: str, port: str, size: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = init_custom_process_group(
        backend="gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=int(size),
        rank=0,
        group_name="g",
    )
    tensors = load_file(Path(folder, "model.safetensors"))
    for name in json.loads(sys.stdin.readline()):
        dist.broadcast(tensors[name], 0, group)


if __name__ == "__main__":
    main(*sys.argv[1:])
