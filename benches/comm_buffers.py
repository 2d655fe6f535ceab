"""What symmetric memory saves an all-reduce on the host: a kernel writes its operand there, or into plain memory.

    antiphon run -n 2 python benches/comm_buffers.py [--record FILE]

Both contenders compute ``x + 1``, sum it over the ranks and leave the sum in plain memory, as compiled programs do. The table decides
`realize="measured"` of `antiphon.lowering`.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import antiphon
import record
import torch
from antiphon.torch.comm_buffers import comm_buffer

SIZES = [1 << power for power in range(12, 25, 2)]
ROUNDS = 40


def rows(comm: antiphon.Communicator) -> list[dict[str, float]]:
    found = []
    for size in SIZES:
        count = size // 4
        x, plain, result = torch.randn(count), torch.empty(count), torch.empty(count)
        symmetric = comm_buffer(comm, [count], torch.float32, 0, SIZES[-1])

        def without() -> None:
            torch.add(x, 1, out=plain)
            comm.all_reduce(plain, out=result)

        def within() -> None:
            torch.add(x, 1, out=symmetric)
            comm.all_reduce(symmetric, out=symmetric)
            result.copy_(symmetric)

        repeats = max(2, min(50, (1 << 22) // size))
        times = [(timed(comm, without, repeats), timed(comm, within, repeats)) for _ in range(ROUNDS)]
        plain_us, symmetric_us = (min(column) for column in zip(*times, strict=True))
        found.append({"bytes": size, "plain_us": plain_us, "symmetric_us": symmetric_us, "ratio": symmetric_us / plain_us})
    return found


def timed(comm: antiphon.Communicator, call: Callable[[], None], repeats: int) -> float:
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path, help="a file for the figures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with antiphon.init() as comm:
        found = rows(comm)
        if comm.rank == 0:
            for row in found:
                print("{bytes} bytes: {plain_us:.1f} µs plain, {symmetric_us:.1f} µs symmetric, {ratio:.2f}".format(**row))
        if comm.rank == 0 and given.record:
            about = {"ranks": comm.world_size, "figures": f"the fastest of {ROUNDS}", "torch": torch.__version__}
            record.write(given.record, about | {"rows": found})


if __name__ == "__main__":
    main()
