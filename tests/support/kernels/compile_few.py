"""Compiles some kernels of a step in two processes; prints each, and whether it was in a cache.

PYTHONPATH=tests python tests/support/kernels/compile_few.py
"""

from __future__ import annotations

from pie_driver_sglang.backends.sglang.compile_ahead import CompileRequest, record_kernels
from pie_driver_sglang.cli.warm import GPUS
from pie_driver_sglang.compilation.dry_model import DryModel

SAMPLING = DryModel(None, "bfloat16", 512, 512, 256, 16, 1, 64, (1,))
"""A model whose layers are the library's, with one graph."""
NAMES = ("cuda_utils", "_copy_rows", "_fetch", "_publish", "_update_table", "_mask_logits")
"""Small ones."""

if __name__ == "__main__":
    gpu = dict(GPUS["h200"])
    found = record_kernels(CompileRequest(SAMPLING, gpu["name"], gpu))
    from pie_driver_sglang.compilation.compile_pool import compile_variants

    for kernel in compile_variants([each for each in found if each.name in NAMES], 2):
        assert not kernel.error, kernel
        print(kernel.name, "compiled" if kernel.is_new else "found", flush=True)
