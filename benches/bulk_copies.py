"""What one multiprocessor moves by bulk copies, through stages of its shared memory: the floor below which its share of a dispatch cannot come.

    python benches/bulk_copies.py [--record benches/results/MACHINE/DATE-bulk-copies.json]

Warps copy rows, each through two stages, from this GPU's memory to it, to a peer's if there is one, or to both. Loads alone and stores
alone tell what each could reach.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor

ROW, ROWS, ROUNDS = 7168, 16384, 7
FLUSHED = 256 << 20  # bytes, more than the L2 cache has
SOURCE = r"""
typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned char u8;
__device__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ void load(u8* stage, const u8* from, u32 bytes, u64* arrived) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address(arrived)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(address(stage)), "l"(from), "r"(bytes), "r"(address(arrived)) : "memory");
}
__device__ void store(u8* to, const u8* stage, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(to), "r"(address(stage)), "r"(bytes) : "memory");
}
__device__ void wait(u64* arrived, u32 parity) {
    u32 is_there = 0;
    while (!is_there)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_there) : "r"(address(arrived)), "r"(parity) : "memory");
}
extern "C" __global__ void copy(const u8* from, u8* to, u8* also_to, int loads, int stores, int rows, int bytes) {
    extern __shared__ u8 memory[];
    __shared__ u64 arrived[32][2];
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (threadIdx.x % 32 != 0) return;
    u64* const barriers = arrived[warp];
    for (int s = 0; s < 2; ++s) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(barriers + s)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    u8* const stages = memory + (0u - address(memory)) % 128u + warp * 2 * bytes;
    const long step = (long)gridDim.x * warps;
    u32 phases = 0, n = 0;
    long row = blockIdx.x * warps + warp;
    if (loads && row < rows) load(stages, from + row * bytes, bytes, barriers);
    for (; row < rows; row += step, ++n) {
        const u32 s = n % 2;
        if (loads) {
            wait(barriers + s, phases >> s & 1);
            phases ^= 1u << s;
        }
        if (stores > 0) store(to + row * bytes, stages + s * bytes, bytes);
        if (stores > 1) store(also_to + row * bytes, stages + s * bytes, bytes);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        if (loads && row + step < rows) load(stages + (1 - s) * bytes, from + (row + step) * bytes, bytes, barriers + 1 - s);
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    kernel: Any = torch.cuda._compile_kernel(SOURCE, "copy")
    kernel.set_shared_memory_config(220 << 10)
    source, here, also_here = (torch.zeros(ROWS * ROW, dtype=torch.uint8, device="cuda") for _ in range(3))
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    copies: dict[str, tuple[int, int, Tensor, Tensor]] = {
        "load": (1, 0, here, here),
        "store": (0, 1, here, here),
        "load, store": (1, 1, here, here),
        "load, two stores": (1, 2, here, also_here),
    }
    if torch.cuda.device_count() > 1:
        peer = torch.zeros(ROWS * ROW, dtype=torch.uint8, device="cuda:1")
        peer[:16].copy_(source[:16])  # torch lets the GPUs reach each other
        copies |= {"store to a peer": (0, 1, peer, peer), "load, store to a peer": (1, 1, peer, peer), "load, store, store to a peer": (1, 2, here, peer)}

    def time(blocks: int, warps: int, loads: int, stores: int, to: Tensor, also_to: Tensor) -> float:
        times = []
        for _ in range(ROUNDS):
            flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            kernel(
                grid=(blocks, 1, 1),
                block=(warps * 32, 1, 1),
                args=(source, to, also_to, loads, stores, ROWS, ROW),
                shared_mem=warps * 2 * ROW + 128,
            )
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return statistics.median(times)

    rows = []
    for blocks in (1, 8, 24):
        for warps in (3, 7, 14):
            for name, (loads, stores, to, also_to) in copies.items():
                each = ROWS * ROW / time(blocks, warps, loads, stores, to, also_to) / blocks / 1e9
                rows.append({"multiprocessors": blocks, "warps": warps, "copy": name, "loads": round(each * loads, 1), "stores": round(each * stores, 1)})
                print(rows[-1], flush=True)
    if arguments.record:
        figures = f"GB/s of each multiprocessor, rows of {ROW} bytes, two stages a warp, the median of {ROUNDS} behind a flush of the L2 cache"
        record.write(arguments.record, {"figures": figures, "rows": rows})


if __name__ == "__main__":
    main()
