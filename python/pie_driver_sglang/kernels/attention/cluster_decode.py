"""Batch-1 decode attention by thread block clusters, in CUDA C++ (``cuda/cluster_decode.cu``).

It computes what `single_decode` does on Hopper with 4 to 8 KV heads, but merges split-KV partial
results in the distributed shared memory of a cluster instead of in global memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from pie_driver_sglang.kernels.attention.single_decode import DecodeToken
from pie_driver_sglang.kernels.constants import LOG2E
from pie_driver_sglang.kernels.gemm.types import Heads

_DIMS = (64, 128)
"""Head sizes."""
_MAX_GQA_GROUP = 8
"""Query heads of a KV head, at most: N of the MMA."""
_HOPPER = 9
_CLUSTERS = {4: 16, 5: 9, 6: 9, 7: 9, 8: 9}
"""CTAs of a cluster by KV heads, each of which has a cluster: the best on an H100. With more CTAs
or heads some clusters would wait for others; with fewer heads too many SMs are idle."""


@dataclass(frozen=True)
class ClusterConfig:
    """Split of the KV."""

    cluster: int
    """CTAs of a cluster, which divide the tokens."""
    threads: int = 256
    """Of a CTA."""


def find_cluster_config(heads: Heads) -> ClusterConfig | None:
    """The best config on an H100; None where other kernels are faster."""
    _, kv_heads, _ = heads.k_cache.shape
    cluster = _CLUSTERS.get(kv_heads)
    return None if cluster is None else ClusterConfig(cluster)


class ClusterDecode:
    """The kernel for one shape of heads."""

    def __init__(self, heads: Heads, dtype: torch.dtype, tuning: ClusterConfig) -> None:
        """Compiles it for heads that :func:`supports_cluster_decode`.

        Args:
            heads: Of any layer.
            dtype: Of rows, and of KV.
            tuning: The config.
        """
        # Takes half a second, for models that need it only.
        from pie_driver_sglang.kernels.cuda.compiled import CudaKernel

        _, kv_heads, dim = heads.k_cache.shape
        group = heads.num_q_heads // kv_heads
        macros = {
            "BF16": int(dtype is torch.bfloat16), "DIM": dim, "GROUP": group,
            "CLUSTER": tuning.cluster, "THREADS": tuning.threads,
            "QK_NORM": int(heads.q_norm is not None),
        }  # fmt: skip
        # The size of `Shared` in the source, rounded up to its alignment.
        floats = (tuning.threads // 32 + tuning.cluster) * group * (dim + 2)
        shared = (group + 2) * dim * dtype.itemsize + 4 * floats + 16
        self._threads = tuning.threads
        self._grid = (tuning.cluster, kv_heads)
        self._kernel = CudaKernel(
            "cluster_decode.cu", macros, heads.k_cache.device,
            shared_bytes=shared, cluster=tuning.cluster,
        )  # fmt: skip

    @property
    def fits(self) -> bool:
        """Whether the clusters of all KV heads run at once on its GPU."""
        _, kv_heads = self._grid
        return self._kernel.max_active_clusters(self._grid, self._threads) >= kv_heads

    def attend(
        self, qkv: torch.Tensor, heads: Heads, row: DecodeToken, scale: float
    ) -> torch.Tensor:
        """Applies q/k norm and rotary embedding, stores K and V, and attends. Can be captured.

        A kernel without PDL must run between those that write `row` and the first one of these.
        Grid: (cluster, kv_heads).

        Args:
            qkv: ``[1, (q_heads + 2 * kv_heads) * dim]``, contiguous: output of the QKV projection.
            heads: Of the shape that it was made for.
            row: The token.
            scale: Softmax scale.

        Returns:
            ``[1, q_heads * dim]``.

        Raises:
            ValueError: Dtypes of the token or of the cos/sin cache differ from the kernel's.
        """
        if heads.cos_sin_cache.dtype is not torch.float32:
            raise ValueError(
                f"a table of rotations in {heads.cos_sin_cache.dtype}: the kernel reads float32"
            )
        table, *numbers = row
        types = [table.dtype, *(number.dtype for number in numbers)]
        if types != [torch.int32] + [torch.int64] * len(numbers):
            raise ValueError(f"a row of {types}: its slots are int32, other numbers int64")
        dim = heads.k_cache.shape[2]
        out = qkv.new_empty(1, heads.num_q_heads * dim)
        norms = (heads.q_norm, heads.k_norm)
        self._kernel.launch(
            self._grid, self._threads, qkv, out, *(qkv if norm is None else norm.weight for norm in
            norms), *(numpy.float32(0.0 if norm is None else norm.epsilon) for norm in norms),
            heads.cos_sin_cache, *row, heads.k_cache, heads.v_cache, numpy.float32(scale *
            LOG2E.value), heads.cos_sin_cache.stride(0), row.table.stride(0),
            heads.k_cache.stride(0), heads.k_cache.stride(1), heads.v_cache.stride(0),
            heads.v_cache.stride(1),
        )  # fmt: skip
        return out


def supports_cluster_decode(heads: Heads, dtype: torch.dtype) -> bool:
    """Whether the kernel supports the heads and their GPU."""
    keys = heads.k_cache
    _, kv_heads, dim = keys.shape
    known = heads.is_neox and heads.num_q_heads <= kv_heads * _MAX_GQA_GROUP and dim in _DIMS
    # SGLang casts the cos/sin cache to the activations' dtype where its own kernel is not used.
    known = known and heads.cos_sin_cache.dtype is torch.float32
    others = [norm.weight.dtype for norm in (heads.q_norm, heads.k_norm) if norm is not None]
    typed = dtype in (torch.bfloat16, torch.float16) and {keys.dtype, *others} == {dtype}
    return (
        known and typed and keys.device.type == "cuda"
        and torch.cuda.get_device_capability(keys.device)[0] == _HOPPER
    )  # fmt: skip


def make_cluster_decode(heads: Heads, dtype: torch.dtype) -> ClusterDecode | None:
    """Compiles the kernel for heads with KV in `dtype`; None where unsupported or slower."""
    tuning = find_cluster_config(heads) if supports_cluster_decode(heads, dtype) else None
    if tuning is None:
        return None
    made = ClusterDecode(heads, dtype, tuning)
    return made if made.fits else None
