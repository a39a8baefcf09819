"""`pie-sglang tune`: searches the GEMM configs of a model on this GPU, ahead of its first load."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pie_driver_sglang.cli.model_sizes import read_shape
from pie_driver_sglang.config.hf_config import check_heads, load_hf_config
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.model_location import model_folder
from pie_driver_sglang.memory.gpus import check_gpus

if TYPE_CHECKING:
    from pie_driver_sglang.engine.layers.gemm_search import Gain
    from pie_driver_sglang.engine.layers.random_layers import LayerShape

BUDGET_S: Final = 180.0
"""Seconds of a search that is asked for."""
TUNED_RANKS: Final = (1, 2, 4)
"""Numbers of GPUs with fused layers: `TUNINGS` of `kernels/comm/all_reduce_norm.py`."""
CANDIDATES: Final = 16
"""Configs of a kernel that are measured for each GEMM, twice as many as at a load."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    check_gpus(["cuda:0"])
    folder = model_folder({"model_path": options.model}, with_weights=False)
    shape = layer_shape(load_hf_config(folder), options.tp_size)
    # Takes seconds, and a wrong command line none.
    import torch

    from pie_driver_sglang.engine.layers import gemm_search
    from pie_driver_sglang.engine.layers.gemm_table import GemmTable
    from pie_driver_sglang.engine.layers.random_layers import random_layers
    from pie_driver_sglang.engine.layers.small_batch import SmallBatchLayers

    device = torch.device("cuda", torch.cuda.current_device())
    table = GemmTable.load(torch.cuda.get_device_name(device))
    if options.again:
        for problem in {each for rows in gemm_search.SEARCH_ROWS for each in
                        shape.problems(rows).values()}:  # fmt: skip
            table.remove(problem)
    layers, norm = random_layers(shape, device, gemm_search.CHAIN_BYTES)
    no_attention: Any = None
    small_batch = SmallBatchLayers.of(layers, norm, no_attention, table)
    if small_batch is None:
        raise ConfigError(f"no kernels for {shape}", "models of other shapes run without a search")
    search = gemm_search.GemmSearch(small_batch, budget_s=options.budget_s, most=CANDIDATES)
    sys.stdout.write(f"{table.gpu}: {'rows':>4}  {'GEMM':<8} {'µs of a layer':>13}  gained µs\n")
    for rows in gemm_search.SEARCH_ROWS:
        for gain in search.run([rows]):
            sys.stdout.write(_line(table.gpu, gain))
        sys.stdout.flush()
        table.save()
    sys.stdout.write(f"{search.measured:,} configs measured; kept in {table.path}\n")
    return 0


def layer_shape(hf_config: Mapping[str, Any], ranks: int = 1) -> LayerShape:
    """The sizes of a model's layers, or of the part that each of several GPUs has.

    Raises:
        ConfigError: Its layers are not dense, a size is missing, or heads cannot be divided.
    """
    from pie_driver_sglang.engine.layers.random_layers import LayerShape

    shape = read_shape(hf_config)
    if shape.experts or shape.latent:
        kind = "mixtures of experts" if shape.experts else "latent attention"
        raise ConfigError(
            f"the model's layers have {kind}, and this command knows dense layers",
            "the first load of the model searches what can be searched",
        )
    if ranks not in TUNED_RANKS:
        raise ConfigError(
            f"`--tp-size` is {ranks}: configs are read on 1, 2 or 4 GPUs",
            "other numbers of GPUs run the library's layers",
        )
    check_heads(hf_config, ranks)
    if shape.inner % ranks:
        raise ConfigError(
            f"the model's `intermediate_size` of {shape.inner} cannot be divided by {ranks} GPUs",
            "take fewer",
        )
    return LayerShape(
        shape.hidden_size, shape.heads // ranks, max(shape.kv_heads // ranks, 1), shape.head_dim,
        shape.inner // ranks,
        has_bias=hf_config.get("model_type") == "qwen2",
    )  # fmt: skip


def _line(gpu: str, gain: Gain) -> str:
    name, problem, config, gain_us, chain_us = gain
    kernel = "cuBLAS" if config is None else type(config).__name__.removesuffix("Config").lower()
    kernel = {"tile": "triton"}.get(kernel, kernel)
    indent = " " * len(gpu)
    return (
        f"{indent}  {problem.rows:>4}  {name:<8} {chain_us:>13.1f}  {gain_us:>9.2f}  "
        f"{problem.height} x {problem.inputs} by {kernel}\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pie-sglang tune",
        description="Searches the configs of a dense model's GEMMs on this GPU, by measurement and "
        "with random weights, and keeps them for all later loads. Prints what each GEMM gained "
        "over the configs by rule, in a layer of the model.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, or a repository of the Hugging Face hub")
    add(
        "--tp", "--tp-size", dest="tp_size", type=int, default=1, metavar="N",
        help="the model is spread over N GPUs: search the GEMMs of one of them",
    )  # fmt: skip
    add("--budget-s", type=float, default=BUDGET_S, help="seconds after which it stops")
    add("--again", action="store_true", help="also search what was searched before")
    return parser
