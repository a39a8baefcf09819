"""Which GPUs, heads and types the CUDA C++ kernels support."""

from __future__ import annotations

import pytest
import torch

from pie_driver_sglang.kernels.attention import cluster_decode
from pie_driver_sglang.kernels.attention.single_decode import DecodeToken
from pie_driver_sglang.kernels.gemm import fp8_gemv, wgmma
from pie_driver_sglang.kernels.gemm.fp8_rows import FP8, QuantizedWeights
from pie_driver_sglang.kernels.gemm.types import Heads, Norm


@pytest.mark.parametrize("device", [(8, 0), (9, 0), (10, 0)])
def test_wgmma_runs_on_hopper_only(
    device: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not wgmma.supports_wgmma(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)
    assert not wgmma.supports_wgmma(torch.device("cpu"))
    assert wgmma.supports_wgmma(torch.device("cuda", 0)) == (device == (9, 0))


def heads(queries: int, kv_heads: int, dim: int) -> Heads:
    storage = torch.zeros(4, kv_heads, dim, dtype=torch.bfloat16)
    return Heads(queries, None, None, torch.zeros(4, dim), True, storage, storage)


def test_nothing_is_supported_without_a_gpu() -> None:
    assert cluster_decode.make_cluster_decode(heads(32, 8, 128), torch.bfloat16) is None
    weights = QuantizedWeights(torch.zeros(64, 4096, dtype=FP8), torch.ones(64))
    assert not fp8_gemv.supports_gemv(weights)


@pytest.mark.parametrize("device", [(8, 0), (9, 0), (10, 0)])
def test_which_heads_are_supported(
    device: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)

    def takes(given: Heads, dtype: torch.dtype = torch.bfloat16) -> bool:
        keys = _OnGpu(given.k_cache)
        return cluster_decode.supports_cluster_decode(given._replace(k_cache=keys), dtype)

    hopper = device == (9, 0)
    assert takes(heads(32, 8, 128)) == hopper
    assert takes(heads(28, 4, 64)) == hopper
    assert not takes(heads(36, 4, 128)), "nine query heads"
    assert not takes(heads(32, 8, 256))
    assert not takes(heads(32, 8, 128)._replace(is_neox=False))
    assert not takes(heads(32, 8, 128), torch.float16), "KV of another type"
    cast = heads(32, 8, 128).cos_sin_cache.bfloat16()
    assert not takes(heads(32, 8, 128)._replace(cos_sin_cache=cast)), "rotations in bfloat16"
    norm = Norm(torch.ones(128), 1e-6)
    assert not takes(heads(32, 8, 128)._replace(q_norm=norm, k_norm=norm)), "float32 norms"
    tunings = {
        count: cluster_decode.find_cluster_config(heads(count, count, 128))
        for count in range(1, 17)
    }
    assert {count for count, tuning in tunings.items() if tuning} == {4, 5, 6, 7, 8}
    for count, tuning in tunings.items():
        assert tuning is None or tuning.cluster * count <= 132, "CTAs that run at once"


def test_a_row_of_other_types_is_refused() -> None:
    kernel = cluster_decode.ClusterDecode.__new__(cluster_decode.ClusterDecode)
    one = torch.zeros(1, dtype=torch.int64)
    table = torch.zeros(2, 8, dtype=torch.int32)
    row = DecodeToken(table, one, one.int(), one, one)
    with pytest.raises(ValueError, match="other numbers int64"):
        kernel.attend(torch.zeros(1, 64), heads(4, 4, 64), row, 1.0)
    row = DecodeToken(table, *[one] * 4)
    cast = heads(4, 4, 64).cos_sin_cache.bfloat16()
    with pytest.raises(ValueError, match=r"rotations in torch\.bfloat16"):
        kernel.attend(torch.zeros(1, 64), heads(4, 4, 64)._replace(cos_sin_cache=cast), row, 1.0)
    with pytest.raises(ValueError, match="slots are int32"):
        kernel.attend(torch.zeros(1, 64), heads(4, 4, 64), DecodeToken(one, *[one] * 4), 1.0)


class _OnGpu:
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
