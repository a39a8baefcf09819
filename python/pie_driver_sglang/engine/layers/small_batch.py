"""Layers of small decode steps: six kernels a layer, whose norms are folded into the weights.

GEMMs are `wgmma` on Hopper from 2 rows on, else `small_m`, and `tiled` for more rows of wide
layers. Mixtures of experts are ``kernels/moe/experts.py``. Models whose norms cannot be folded use
`dense`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from pie_driver_sglang.engine.layers.attention import (
    attend_decode,
    attend_folded_norm,
    swiglu_folded_norm,
)
from pie_driver_sglang.engine.layers.gemm_runner import GemmRunner, without_squares
from pie_driver_sglang.engine.layers.gemm_table import GemmTable
from pie_driver_sglang.engine.layers.lora import NO_LORA, LayerLora
from pie_driver_sglang.engine.layers.weights import ExpertLayer, Layer
from pie_driver_sglang.kernels.gemm import small_m, tiled, wgmma
from pie_driver_sglang.kernels.gemm.norm_rope import add_rms_norm
from pie_driver_sglang.kernels.gemm.search_space import GemmConfig, GemmProblem
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    STORE,
    SWIGLU,
    Epilogue,
    LinearWeights,
    Norm,
    Residual,
    TileConfig,
    Workspace,
)
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig, WgmmaGemm
from pie_driver_sglang.kernels.moe import experts, routing

if TYPE_CHECKING:
    from pie_driver_sglang.engine.attention.paged import PagedDecode
    from pie_driver_sglang.engine.backend import Decoder, PassContext

NARROW_WIDTH, _WIDE_WIDTH = 2048, 4096
"""Widths of hidden states between which `small_m` is the fastest up to 32 rows, not 16."""
_TILED_ROWS = (64, 128)
"""Most rows of steps that `tiled` may run."""


class LayerConfigs(NamedTuple):
    """Configs of a layer's GEMMs; None for those that are cuBLAS's."""

    qkv: GemmConfig | None
    out: GemmConfig | None
    gate_up: GemmConfig | None
    """The experts' in a mixture, as is `down`."""
    down: GemmConfig | None

    def consistent(self) -> LayerConfigs:
        """With cuBLAS for GEMMs that apply a norm, where those before leave no sums of squares."""
        return self._replace(
            qkv=None if self.down is None else self.qkv,
            gate_up=None if self.out is None else self.gate_up,
        )

    def with_lora(self) -> LayerConfigs:
        """With cuBLAS for GEMMs whose kernel, `tiled`, does not apply adapters."""
        kept = (None if isinstance(each, TileConfig) and each.tma else each for each in self)
        return LayerConfigs(*kept).consistent()


class SmallBatchLayers:
    """The layers of a model whose norms are folded into the weights after them."""

    def __init__(
        self,
        layers: Sequence[Layer | ExpertLayer],
        norm: Norm,
        attention: PagedDecode,
        max_small_m_rows: int,
        *,
        max_tiled_rows: int = 0,
        wgmma_gemm: WgmmaGemm | None = None,
        table: GemmTable | None = None,
    ) -> None:
        """Takes layers that :meth:`of` supports, and the norm after the last one.

        Args:
            layers: The model's.
            norm: After the last one.
            attention: The decode attention.
            max_small_m_rows: Most rows of a step that `small_m` runs.
            max_tiled_rows: Most rows of a step that `tiled` runs.
            wgmma_gemm: Runs steps from 2 rows on instead.
            table: Measured configs, in place of those by rule.
        """
        self.table = GemmTable("") if table is None else table
        self._max_wgmma_rows = 0 if wgmma_gemm is None else _max_wgmma_rows(layers)
        self.max_rows = max(max_small_m_rows, max_tiled_rows, self._max_wgmma_rows)
        """Most rows of a step."""
        self._max_small_m_rows = max_small_m_rows
        self.layers = layers
        self._norm = norm
        self._attention = attention
        workspace = _make_workspace(layers, norm, max_small_m_rows, max_tiled_rows)
        self.runner = GemmRunner(workspace, wgmma_gemm)

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer | ExpertLayer],
        norm: Norm,
        attention: PagedDecode,
        table: GemmTable | None = None,
    ) -> SmallBatchLayers | None:
        """The layers of a model; None if the kernels do not support its weights."""
        [width], weight = norm.weight.shape, norm.weight
        if weight.device.type == "cuda" and weight.itemsize != 2:
            return None
        max_rows = _max_expert_rows(layers)
        if not max_rows:
            max_rows = 32 if NARROW_WIDTH <= width <= _WIDE_WIDTH else 16
        # One of each bucket of configs.
        steps = [rows for rows in (1, 2, 16, 32, 64, 65, 256) if rows <= max_rows]
        if any(_small_m_configs(rows, layer) is None for rows in steps for layer in layers):
            return None
        max_tiled_rows, wgmma_gemm = 0, None
        if wgmma.supports_wgmma(weight.device) and _max_wgmma_rows(layers):
            wgmma_gemm = WgmmaGemm(weight.dtype, weight.device)
        elif width >= NARROW_WIDTH and weight.itemsize == 2:
            tiled_rows = (rows for rows in _TILED_ROWS if _any_tiled(rows, layers))
            max_tiled_rows = max(tiled_rows, default=0)
        return cls(
            layers, norm, attention, max_rows,
            max_tiled_rows=max_tiled_rows, wgmma_gemm=wgmma_gemm, table=table,
        )  # fmt: skip

    @property
    def has_wgmma(self) -> bool:
        """Whether WGMMA kernels run steps of several rows."""
        return self._max_wgmma_rows > 1

    def run(
        self,
        decoder: Decoder,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        context: PassContext,
        lora: Sequence[LayerLora] | None = None,
    ) -> torch.Tensor:
        """Runs the layers of a decode. Can be captured.

        Args:
            decoder: Is told what each layer gets.
            embedded: ``[rows, width]``, at most `max_rows`; overwritten.
            positions: ``[rows]`` int64.
            context: Of the pass.
            lora: The LoRA adapters of each layer, if they are dense.

        Returns:
            ``[rows, width]``: normalized hidden states.
        """
        residual: Residual | None = None
        adapters = lora or [NO_LORA] * len(self.layers)
        for number, (layer, own) in enumerate(zip(self.layers, adapters, strict=True)):
            configs = self.find_configs(len(embedded), layer)
            if configs is None:
                raise ValueError(f"no GEMM configs for a step of {len(embedded)} rows")
            if lora:
                configs = configs.with_lora()
            if residual is None:
                residual = _start_residual(embedded, configs)
            decoder.keep_input(number, residual.rows)
            residual = self._attention_block(layer, residual, configs, positions, context, own)
            residual = self._mlp_block(layer, residual, configs, own)
        return add_rms_norm(embedded[None], None, self._norm)[0]

    def find_configs(self, rows: int, layer: Layer | ExpertLayer) -> LayerConfigs | None:
        """The configs of a layer's GEMMs: measured ones, where the table has them."""
        found = self.default_configs(rows, layer)
        if found is None or not len(self.table):
            return found
        problems = layer_problems(rows, layer)
        tuned = {name: self.table.get(problem) for name, problem in problems.items()}
        measured = {name: each.config for name, each in tuned.items() if each is not None}
        return found._replace(**measured).consistent()

    def default_configs(self, rows: int, layer: Layer | ExpertLayer) -> LayerConfigs | None:
        """The configs of a layer that was never measured."""
        if 1 < rows <= self._max_wgmma_rows:
            return _wgmma_configs(rows, layer)
        if rows <= self._max_small_m_rows:
            return _small_m_configs(rows, layer)
        return _tiled_configs(rows, layer)

    def _attention_block(
        self,
        layer: Layer | ExpertLayer,
        residual: Residual,
        configs: LayerConfigs,
        positions: torch.Tensor,
        context: PassContext,
        lora: LayerLora,
    ) -> Residual:
        shrunk = lora.shrink(residual.rows, lora.adapters.qkv)
        if configs.qkv is None:
            attended = attend_folded_norm(
                layer, residual.rows, positions, context, self._attention.attend,
                lora=shrunk, out_of_place=False,
            )  # fmt: skip
        else:
            qkv = self.runner.project(residual, layer.before, layer.qkv, configs.qkv, STORE, shrunk)
            attended = attend_decode(qkv, layer, self._attention, positions, context)
        shrunk = lora.shrink(attended, lora.adapters.out)
        return self.runner.project_add(attended, layer.out, configs.out, residual, shrunk)

    def _mlp_block(
        self,
        layer: Layer | ExpertLayer,
        residual: Residual,
        configs: LayerConfigs,
        lora: LayerLora,
    ) -> Residual:
        if isinstance(layer, ExpertLayer):
            workspace = self.runner.workspace
            return experts.add_moe(residual, layer.between, layer.experts, workspace)
        shrunk = lora.shrink(residual.rows, lora.adapters.gate_up)
        if configs.gate_up is None:
            activated = swiglu_folded_norm(layer, residual.rows, shrunk)
        else:
            activated = self.runner.project(
                residual, layer.between, layer.gate_up, configs.gate_up, SWIGLU, shrunk
            )
        shrunk = lora.shrink(activated, lora.adapters.down)
        return self.runner.project_add(activated, layer.down, configs.down, residual, shrunk)


class MoeLayers:
    """The layers of a mixture of experts; larger steps run the library's."""

    def __init__(self, decoder: Decoder, layers: SmallBatchLayers) -> None:
        """Takes a decoder and its layers."""
        self._decoder = decoder
        self._layers = layers

    @property
    def small_batch(self) -> SmallBatchLayers:
        """The layers."""
        return self._layers

    def supports(self, num_rows: int) -> bool:
        """Whether decodes of so many rows run these layers."""
        return num_rows <= self._layers.max_rows

    @contextlib.contextmanager
    def patched_prefill(self) -> Iterator[None]:
        """Patches nothing: prefills run the library's layers."""
        yield

    @contextlib.contextmanager
    def patched_decode(self) -> Iterator[None]:
        """Within, the model's forward of a supported decode runs these layers."""
        with self._decoder.run_instead(self._run):
            yield

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PassContext
    ) -> torch.Tensor:
        embedded = self._decoder.embed(input_ids)
        return self._layers.run(self._decoder, embedded, positions, context)


def _start_residual(embedded: torch.Tensor, configs: LayerConfigs) -> Residual:
    """The residual of embeddings, with as many sums of squares as a layer leaves."""
    if configs.qkv is None or configs.down is None:
        return without_squares(embedded)
    return small_m.start_residual(embedded, embedded.shape[1] // configs.down.block_n)


def layer_problems(rows: int, layer: Layer | ExpertLayer) -> dict[str, GemmProblem]:
    """The GEMMs of a layer whose configs a `GemmTable` may have, by their names.

    Not those of experts.
    """
    matrices = {"qkv": (layer.qkv, STORE), "out": (layer.out, ADD_RESIDUAL)}
    if isinstance(layer, Layer):
        matrices |= {"gate_up": (layer.gate_up, SWIGLU), "down": (layer.down, ADD_RESIDUAL)}
    found = {}
    for name, (matrix, epilogue) in matrices.items():
        height, inputs = matrix.weight.shape
        problem = GemmProblem(epilogue, 1, height, inputs, matrix.weight.itemsize).at(rows)
        if problem is not None:
            found[name] = problem
    return found


def _any_tiled(rows: int, layers: Sequence[Layer | ExpertLayer]) -> bool:
    """Whether `tiled` runs some GEMMs of every layer in steps of so many rows."""
    found = [_tiled_configs(rows, layer) for layer in layers]
    return all(configs is not None and any(configs) for configs in found)


def _tiled_configs(rows: int, layer: Layer | ExpertLayer) -> LayerConfigs | None:
    """The configs of `tiled`.

    A GEMM that applies a norm needs the sums of squares of a GEMM that `tiled` runs.
    """
    if isinstance(layer, ExpertLayer):
        return None
    found = (
        tiled.find_tiled_config(
            rows, len(matrix.weight) // (2 if epilogue == SWIGLU else 1), matrix.weight.shape[1],
            matrix.weight.itemsize, epilogue,
        )
        for matrix, epilogue in (
            (layer.qkv, STORE), (layer.out, ADD_RESIDUAL),
            (layer.gate_up, SWIGLU), (layer.down, ADD_RESIDUAL),
        )
    )  # fmt: skip
    configs = (None if config is None else replace(config, tma=True) for config in found)
    return LayerConfigs(*configs).consistent()


def _max_wgmma_rows(layers: Sequence[Layer | ExpertLayer]) -> int:
    """Most rows for which WGMMA runs all GEMMs; 0 for none."""
    most = _max_expert_rows(layers) or wgmma.MAX_WGMMA_ROWS
    supported = 0
    for rows in (block_m for block_m in wgmma.BLOCK_MS if block_m <= most):
        if any(_wgmma_configs(rows, layer) is None for layer in layers):
            break
        supported = rows
    return supported


def _make_workspace(
    layers: Sequence[Layer | ExpertLayer], norm: Norm, max_rows: int, max_tiled_rows: int
) -> Workspace:
    """The workspace of GEMMs and routers for steps of so many rows."""
    [width], device = norm.weight.shape, norm.weight.device
    outputs = max(width, *(len(layer.qkv.weight) for layer in layers))
    gemm_rows = max(min(max_rows, small_m.MAX_ROWS), max_tiled_rows)
    sizes = [tiled.workspace_sizes(gemm_rows, outputs)]
    sizes += [
        routing.routing_workspace_sizes(max_rows, len(layer.experts.router.weight))
        for layer in layers
        if isinstance(layer, ExpertLayer)
    ]
    floats, semaphores = map(max, zip(*sizes, strict=True))
    return Workspace(
        torch.zeros(floats, device=device),
        torch.zeros(semaphores, dtype=torch.int32, device=device),
    )


def _max_expert_rows(layers: Sequence[Layer | ExpertLayer]) -> int:
    """Most rows of mixtures of experts; 0 for layers without."""
    mixtures = [layer.experts for layer in layers if isinstance(layer, ExpertLayer)]
    return min(map(experts.max_rows, mixtures), default=0)


def _wgmma_configs(rows: int, layer: Layer | ExpertLayer) -> LayerConfigs | None:
    """The configs of WGMMA, and of the experts; None where it does not support one."""

    def config(matrix: LinearWeights, epilogue: Epilogue) -> WgmmaConfig | None:
        height, inputs = matrix.weight.shape
        itemsize = matrix.weight.itemsize
        return wgmma.find_wgmma_config(rows, height, inputs, itemsize, epilogue)

    gate_up: GemmConfig | None
    down: GemmConfig | None
    if isinstance(layer, ExpertLayer):
        gate_up, down = experts.find_expert_configs(rows, layer.experts) or (None, None)
    else:
        gate_up, down = config(layer.gate_up, SWIGLU), config(layer.down, ADD_RESIDUAL)
    found = (config(layer.qkv, STORE), config(layer.out, ADD_RESIDUAL), gate_up, down)
    return None if None in found else LayerConfigs(*found)


def _small_m_configs(rows: int, layer: Layer | ExpertLayer) -> LayerConfigs | None:
    """The configs of `small_m`, and of the experts; None where it does not support one."""

    def config(matrix: LinearWeights, epilogue: Epilogue) -> TileConfig | None:
        outputs, inputs = matrix.weight.shape
        if epilogue == SWIGLU:
            outputs //= 2
        return small_m.find_small_m_config(rows, outputs, inputs, epilogue)

    if isinstance(layer, ExpertLayer):
        own = experts.find_expert_configs(rows, layer.experts)
        if rows > small_m.MAX_ROWS:
            # cuBLAS runs the GEMMs around attention.
            return None if own is None else LayerConfigs(None, None, *own)
        gate_up, down = own or (None, None)
    else:
        gate_up = config(layer.gate_up, SWIGLU)
        down = config(layer.down, ADD_RESIDUAL)
    found = (config(layer.qkv, STORE), config(layer.out, ADD_RESIDUAL), gate_up, down)
    return None if None in found else LayerConfigs(*found)
