"""Preloaded by the fork server: everything that a driver imports, once for all of its children.

Importing SGLang and its models takes seconds; a child that is forked from here has them already.
"""

from __future__ import annotations

import os
import sys

# Its command line repeats how the tests were started; see `conftest.py`.
sys.dont_write_bytecode = False

import architectures  # noqa: E402
from pie_driver_sglang.srt import environment  # noqa: E402

ARCHITECTURES = (
    # What SGLang makes of an architecture that it lacks.
    "TransformersForCausalLM",
    "Qwen3VLForConditionalGeneration",
    *(architecture.name for architecture in architectures.ARCHITECTURES.values()),
)
"""Classes that children can load; SGLang's other model modules are not imported."""

# A child inherits the thread pool's bookkeeping but not its threads: there must be none.
os.environ["OMP_NUM_THREADS"] = "1"
environment.prepare("cpu", ARCHITECTURES, spins=False)

import torch.testing._internal.distributed.fake_pg  # noqa: E402, F401

from pie_driver_sglang.srt import load  # noqa: E402, F401
