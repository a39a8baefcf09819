"""The attention of a step of one row by clusters of CTAs, from the product of its layer on.

``cuda/cluster_decode.cu`` has the kernel. It computes what ``single_decode.py`` does, but merges
partial results in the distributed shared memory of a cluster instead of in global memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from pie_driver_sglang.kernels.attention.partial_results import LOG2E
from pie_driver_sglang.kernels.attention.single_decode import LoneRow
from pie_driver_sglang.kernels.gemm.types import Heads

_DIMS = (64, 128)
"""Head sizes."""
_MOST_HEADS = 8
"""Query heads of a KV head, at most: the columns of a matrix instruction."""
_HOPPER = 9
_CLUSTERS = {4: 16, 5: 9, 6: 9, 7: 9, 8: 9}
"""CTAs of a cluster by KV heads, of which each has a cluster: the best on an H100. With more of
them, some clusters would not run at once; and fewer heads leave too much of a GPU idle."""


@dataclass(frozen=True)
class ClusterTuning:
    """How the KV of a row is divided."""

    cluster: int
    """CTAs of a cluster, which divide its tokens."""
    threads: int = 256
    """Of a CTA."""


def cluster_tuning(heads: Heads) -> ClusterTuning | None:
    """The best on an H100; None for heads with which other kernels are faster."""
    _, kv_heads, _ = heads.k_cache.shape
    cluster = _CLUSTERS.get(kv_heads)
    return None if cluster is None else ClusterTuning(cluster)


class ClusterAttention:
    """The kernel for heads of one shape."""

    def __init__(self, heads: Heads, dtype: torch.dtype, tuning: ClusterTuning) -> None:
        """Compiles it for heads for which :func:`knows_heads` says so.

        Args:
            heads: Of any layer.
            dtype: Of rows, and of KV.
            tuning: How KV is divided.
        """
        # Half a second, which other models need not wait for.
        from pie_driver_sglang.kernels.cuda.compiled import CudaKernel

        _, kv_heads, dim = heads.k_cache.shape
        group = heads.num_q_heads // kv_heads
        macros = {
            "BF16": int(dtype is torch.bfloat16), "DIM": dim, "GROUP": group,
            "CLUSTER": tuning.cluster, "THREADS": tuning.threads,
            "QK_NORM": int(heads.q_norm is not None),
        }  # fmt: skip
        # What `Shared` of the source takes, rounded up to its alignment.
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

    def attend(self, qkv: torch.Tensor, heads: Heads, row: LoneRow, scale: float) -> torch.Tensor:
        """Norms and turns heads, stores the new key and value, and attends. Can be captured.

        A kernel that is not launched early must come between those that write `row` and the first
        one of these.

        Args:
            qkv: ``[1, heads]``, contiguous: queries, keys and values of the row.
            heads: Of the shape that it was made for.
            row: The row.
            scale: Of scores.

        Returns:
            ``[1, queries * dim]``.

        Raises:
            ValueError: The row's numbers, or the table of rotations, are of other types, which the
                kernel would misread.
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


def knows_heads(heads: Heads, dtype: torch.dtype) -> bool:
    """Whether the kernel knows such heads, and was measured on GPUs like theirs."""
    keys = heads.k_cache
    _, kv_heads, dim = keys.shape
    known = heads.is_neox and heads.num_q_heads <= kv_heads * _MOST_HEADS and dim in _DIMS
    # SGLang casts the table to the activations' type where its own kernel does not rotate.
    known = known and heads.cos_sin_cache.dtype is torch.float32
    others = [norm.weight.dtype for norm in (heads.q_norm, heads.k_norm) if norm is not None]
    typed = dtype in (torch.bfloat16, torch.float16) and {keys.dtype, *others} == {dtype}
    return (
        known and typed and keys.device.type == "cuda"
        and torch.cuda.get_device_capability(keys.device)[0] == _HOPPER
    )  # fmt: skip


def find_clusters(heads: Heads, dtype: torch.dtype) -> ClusterAttention | None:
    """Compiles the kernel for heads of KV in `dtype`; None where it cannot run, or is slower."""
    tuning = cluster_tuning(heads) if knows_heads(heads, dtype) else None
    if tuning is None:
        return None
    made = ClusterAttention(heads, dtype, tuning)
    return made if made.fits else None
