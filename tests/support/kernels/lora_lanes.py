"""LoRA in CUDA C++ on the host: ``lora.cuh`` and ``lora_shrink.cu`` by g++, with lanes as threads.

What the lanes of a warp do together is replaced: minimum and ballot, and `mma.sync` by the layouts
of its fragments in the PTX ISA.
"""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import torch

_LANES = r"""
#include <algorithm>
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
typedef unsigned int u32;
#define HOST_LANES
using std::max;
using std::min;
struct uint4 { u32 x, y, z, w; };
struct Index { int x, y; };
static thread_local Index threadIdx, blockIdx, gridDim;
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline int __popc(u32 x) { return __builtin_popcount(x); }

struct Warp {
    std::barrier<> all{32};
    u32 a[32][4], b[32][2];
    int ints[32];
};
static Warp warps[8];
static std::barrier<>* threads;

inline int lane_id() { return threadIdx.x % 32; }
inline int warp_id() { return threadIdx.x / 32; }
inline Warp& warp() { return warps[warp_id()]; }
inline void __syncwarp() { warp().all.arrive_and_wait(); }
inline void __syncthreads() { threads->arrive_and_wait(); }
inline void pdl_wait() {}
inline void pdl_trigger() {}
inline void fence() {}
inline void prefetch_line(const unsigned short*) {}
inline int warp_min(int x) {
    warp().ints[lane_id()] = x;
    __syncwarp();
    for (int other : warp().ints) x = std::min(x, other);
    __syncwarp();
    return x;
}
inline u32 warp_ballot(bool x) {
    warp().ints[lane_id()] = x;
    __syncwarp();
    u32 out = 0;
    for (int i = 0; i < 32; i++) out |= (u32)warp().ints[i] << i;
    __syncwarp();
    return out;
}
inline u32 load_values(const unsigned short* from) { return *(const u32*)from; }
inline u32 narrow(float low, float) {
    u32 bits;
    memcpy(&bits, &low, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float half_of(u32 both, int number) {
    u32 bits = (both >> 16 * number & 0xffff) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

// m16n8k16: of a, lane has rows lane / 4 (+ 8 in odd registers), columns lane % 4 * 2 (+ 8 in the
// last two); of b, rows lane % 4 * 2 (+ 8) and column lane / 4.
inline float a_at(int row, int k) {
    return half_of(warp().a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
}
inline float b_at(int k, int column) {
    return half_of(warp().b[column * 4 + k % 8 / 2][k / 8], k % 2);
}
inline void mma_m16n8k16(float* acc, const u32 (&a)[4], const u32 (&b)[2]) {
    int lane = lane_id();
    memcpy(warp().a[lane], a, sizeof(a));
    memcpy(warp().b[lane], b, sizeof(b));
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) acc[i] += a_at(row, k) * b_at(k, column);
    }
    __syncwarp();
}
"""

_EXPAND = r"""
constexpr bool SWIGLU = EPILOGUE == 1;
#include "lora.cuh"

// sums: [16 outputs, BLOCK_M rows], of all splits.
extern "C" void add_lora(const unsigned short* values, const unsigned short* up, const int* slots,
                         const int* ranks, long long slot_stride, int row_stride, int value_stride,
                         int padded_rank, int count, int upper, int lower, int first_end,
                         int second_end, float* sums) {
    std::vector<std::thread> lanes;
    for (int number = 0; number < 32; number++) {
        lanes.emplace_back([=] {
            threadIdx = {number, 0};
            LoraTile tile = {values, up, slots, ranks, slot_stride, row_stride, value_stride,
                             padded_rank, count, upper, lower, first_end, second_end};
            tile.prefetch();
            for (int split = 0; split < SPLIT_K; split++) {
                float acc[BLOCK_M / 2] = {};
                tile.add(acc, tile.load_group(-1, split));
                for (int i = 0; i < BLOCK_M / 2; i++) {
                    int output = number / 4 + i % 4 / 2 * 8;
                    sums[output * BLOCK_M + i / 4 * 8 + number % 4 * 2 + i % 2] += acc[i];
                }
            }
        });
    }
    for (auto& each : lanes) each.join();
}
"""

_SHRINK = r"""
#include "lora_shrink.cu"

extern "C" void shrink(int columns, int tiles, const unsigned short* x, const unsigned short* down,
                       unsigned short* values, const int* slots, const int* ranks,
                       long long slot_stride, long long row_stride, int count, int inputs,
                       int padded_rank) {
    std::barrier<> all(THREADS);
    threads = &all;
    std::vector<std::thread> lanes;
    for (int number = 0; number < THREADS; number++) {
        lanes.emplace_back([=] {
            threadIdx = {number, 0};
            gridDim = {columns, tiles};
            for (int cta = 0; cta < columns * tiles; cta++) {
                blockIdx = {cta % columns, cta / columns};
                lora_shrink(x, down, values, slots, ranks, slot_stride, row_stride, count, inputs,
                            padded_rank);
                __syncthreads();
            }
        });
    }
    for (auto& each : lanes) each.join();
}
"""


def _compiled(folder: Path, name: str, code: str, macros: dict[str, int]) -> ctypes.CDLL:
    """A library of device functions; raises `CalledProcessError` if they do not compile."""
    sources = Path(str(resources.files("pie_driver_sglang.kernels.cuda")))
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(_LANES + code)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-DBF16=1", "-w"]
    command += [f"-D{key}={value}" for key, value in macros.items()]
    command += ["-I", str(sources), str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


class HostShrinkKernel:
    """``lora_shrink.cu`` in the place of its `CudaKernel`."""

    def __init__(self, folder: Path) -> None:
        """Compiles it."""
        self._library = _compiled(folder, "shrink", _SHRINK, {})

    def launch(self, grid: tuple[int, int], threads: int, *arguments: object) -> None:
        """Runs the CTAs one after the other."""
        assert threads == 256
        values: list[object] = [ctypes.c_int(size) for size in grid]
        for each in arguments:
            if isinstance(each, torch.Tensor):
                values.append(ctypes.c_void_p(each.data_ptr()))
            elif isinstance(each, np.int32):
                values.append(ctypes.c_int(int(each)))
            else:
                values.append(ctypes.c_longlong(each))  # type: ignore[arg-type]
        self._library.shrink(*values)


class HostLanes:
    """``lora.cuh`` for a tile of rows and an epilogue."""

    def __init__(self, folder: Path, block_m: int, split_k: int, *, swiglu: bool) -> None:
        """Compiles them."""
        self._block_m, self._swiglu = block_m, swiglu
        macros = {"BLOCK_M": block_m, "SPLIT_K": split_k, "EPILOGUE": int(swiglu)}
        self._library = _compiled(folder, f"expand-{block_m}-{split_k}", _EXPAND, macros)

    def sums(
        self,
        values: torch.Tensor,
        up: torch.Tensor,
        slots: torch.Tensor,
        ranks: torch.Tensor,
        upper: int,
        ends: tuple[int, int],
        padded_rank: int,
    ) -> torch.Tensor:
        """What is added to 16 outputs from `upper` on, or to 8 of a gate and of its up projection.

        Args:
            values: ``[rows, parts * padded_rank]`` bfloat16, as in `Shrunk`.
            up: ``[slots, outputs, max_rank]`` bfloat16.
            slots: ``[rows]`` int32.
            ranks: ``[slots]`` int32.
            upper: The first output.
            ends: Where the first and the second part end.
            padded_rank: Columns of a part.

        Returns:
            ``[16, rows]`` float32.
        """
        lower = upper + (up.shape[1] // 2 if self._swiglu else 8)
        out = np.zeros((16, self._block_m), np.float32)
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (values, up, slots, ranks)]
        sizes = [up.stride(1), values.stride(0), padded_rank, len(slots), upper, lower, *ends]
        self._library.add_lora(
            *pointers, ctypes.c_longlong(up.stride(0)), *map(ctypes.c_int, sizes),
            ctypes.c_void_p(out.ctypes.data),
        )  # fmt: skip
        return torch.from_numpy(out)[:, : len(slots)]
