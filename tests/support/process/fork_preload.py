"""Preloaded by the fork server: everything that a driver imports.

Importing SGLang and its models takes seconds; a child that is forked from here has them already.
"""

from __future__ import annotations

import functools
import gc
import os
import sys

# Its command line repeats how the tests were started; see `conftest.py`.
sys.dont_write_bytecode = False
# Nothing is garbage yet, and a child need not look through what is imported here.
gc.disable()

from pie_driver_sglang.backends.sglang import environment  # noqa: E402
from support.models import architectures, embedding_models  # noqa: E402

ARCHITECTURES = (
    # What SGLang makes of an architecture that it lacks.
    "TransformersForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    *(architecture.name for architecture in architectures.all_architectures().values()),
    *(model.architecture for model in embedding_models.MODELS.values()),
)
"""Classes that children can load; SGLang's other model modules are not imported."""

# A child inherits the thread pool's bookkeeping but not its threads: there must be none.
os.environ["OMP_NUM_THREADS"] = "1"
environment.prepare("cpu", ARCHITECTURES, spins=False)
# Read once, by an import: what `pie-sglang serve` sets. A driver sends none of these messages.
os.environ["SGLANG_USE_PICKLE_IPC"] = "0"

import setproctitle  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401
import torch.testing._internal.distributed.fake_pg  # noqa: E402, F401
from sglang.srt import plugins  # noqa: E402
from sglang.srt.arg_groups import arg_utils  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.utils import common  # noqa: E402

del os.environ["SGLANG_USE_PICKLE_IPC"]

# It can rename children only if it has seen the arguments and the environment of this process.
setproctitle.getproctitle()

# What each start asks again: the types of SGLang's settings, and ten times the program `lscpu`.
arg_utils.namespace_of(ServerArgs)
arg_utils.resolvable_fields(ServerArgs)
common.parse_lscpu_topology = functools.cache(common.parse_lscpu_topology)

# Each start loads the plugins that are installed. Once they have changed SGLang nothing is left to
# change: the search through all modules for what they replace touches most of this process's
# memory, which a child would have to copy.
plugins.load_plugins()
plugins._plugins_loaded = False

gc.freeze()
gc.enable()
