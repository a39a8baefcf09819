"""LoRA of `wgmma_gemm.cu` on the host: ``lora.cuh`` compiled by g++, 32 lanes as threads.

What lanes do together is replaced: the minimum over a warp, and `mma.sync` by the layouts of its
fragments in the PTX ISA. A warp's sums are compared with float64.
"""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import torch

_HARNESS = r"""
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
typedef unsigned int u32;
#define HOST_LANES
constexpr bool SWIGLU = EPILOGUE == 1;

static thread_local int lane;
static std::barrier<>* warp;
static u32 shared_a[32][4], shared_b[32][2];
static int shared_min[32];

inline int lane_id() { return lane; }
inline void __syncwarp() { warp->arrive_and_wait(); }
inline int warp_min(int x) {
    shared_min[lane] = x;
    __syncwarp();
    for (int other : shared_min) x = other < x ? other : x;
    __syncwarp();
    return x;
}
inline u32 load_values(const unsigned short* from) { return *(const u32*)from; }
inline void prefetch_line(const unsigned short*) {}

inline float half_of(u32 both, int number) {
    u32 bits = (both >> 16 * number & 0xffff) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

// m16n8k16: of a, lane has rows lane / 4 (+ 8 in odd registers), columns lane % 4 * 2 (+ 8 in the
// last two); of b, rows lane % 4 * 2 (+ 8) and column lane / 4.
inline float a_at(int row, int k) {
    return half_of(shared_a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
}
inline float b_at(int k, int column) {
    return half_of(shared_b[column * 4 + k % 8 / 2][k / 8], k % 2);
}
inline void mma_m16n8k16(float* acc, const u32 (&a)[4], const u32 (&b)[2]) {
    memcpy(shared_a[lane], a, sizeof(a));
    memcpy(shared_b[lane], b, sizeof(b));
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) acc[i] += a_at(row, k) * b_at(k, column);
    }
    __syncwarp();
}

#include "lora.cuh"

// sums: [16 outputs, BLOCK_M rows], of all splits.
extern "C" void add_lora(const unsigned short* values, const unsigned short* up, const int* slots,
                         const int* ranks, long long slot_stride, int row_stride, int value_stride,
                         int padded_rank, int count, int upper, int lower, int first_end,
                         int second_end, float* sums) {
    std::barrier<> all(32);
    warp = &all;
    std::vector<std::thread> lanes;
    for (int number = 0; number < 32; number++) {
        lanes.emplace_back([=] {
            lane = number;
            LoraTile tile = {values, up, slots, ranks, slot_stride, row_stride, value_stride,
                             padded_rank, count, upper, lower, first_end, second_end};
            tile.prefetch();
            for (int split = 0; split < SPLIT_K; split++) {
                float acc[BLOCK_M / 2] = {};
                tile.add(acc, split);
                for (int i = 0; i < BLOCK_M / 2; i++) {
                    int output = lane / 4 + i % 4 / 2 * 8, row = i / 4 * 8 + lane % 4 * 2 + i % 2;
                    sums[output * BLOCK_M + row] += acc[i];
                }
            }
        });
    }
    for (auto& each : lanes) each.join();
}
"""


class HostLanes:
    """The device functions for a tile of rows and an epilogue."""

    def __init__(self, folder: Path, block_m: int, split_k: int, *, swiglu: bool) -> None:
        """Compiles them; raises `CalledProcessError` if that fails."""
        self._block_m, self._swiglu = block_m, swiglu
        sources = Path(str(resources.files("pie_driver_sglang.kernels.cuda")))
        source, library = folder / "lanes.cpp", folder / f"lanes-{block_m}-{split_k}-{swiglu}.so"
        source.write_text(_HARNESS)
        macros = [f"-DBLOCK_M={block_m}", f"-DSPLIT_K={split_k}", f"-DEPILOGUE={int(swiglu)}"]
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-DBF16=1", "-w"]
        command += [*macros, "-I", str(sources), str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

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
