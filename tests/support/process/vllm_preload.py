"""Everything that a driver on vLLM imports, for the process that drivers are forked from."""

from __future__ import annotations

import os
import sys

sys.dont_write_bytecode = False

from pie_driver_sglang.backends import environment  # noqa: E402
from pie_driver_sglang.backends.vllm.compat import process  # noqa: E402

# A child inherits the thread pool's bookkeeping but not its threads: there must be none.
os.environ["OMP_NUM_THREADS"] = "1"
environment.prepare_host(spins=False, ranks=1)
environment.prepare_libraries(process.VLLM_FOLDERS)
process.set_variables()

with environment.importing(process.UNNEEDED):
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen3  # noqa: F401

    import pie_driver_sglang.backends.vllm.boot
    import pie_driver_sglang.backends.vllm.lora
    import pie_driver_sglang.backends.vllm.model_backend
    import pie_driver_sglang.driver.startup
    import pie_driver_sglang.engine.build  # noqa: F401


def check() -> None:
    """Fails where a thread runs, which a fork would not have, or where SGLang was imported."""
    threads = os.listdir("/proc/self/task")  # noqa: PTH208 - numbers
    assert len(threads) == 1, threads
    assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]
