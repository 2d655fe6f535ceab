"""The peer through mpi4py: MPI.Allreduce of float32 sums.

Usage: mpirun -n RANKS python mpi_all_reduce.py BYTES CALLS BATCHES private|shared
Prints the microseconds per call of each batch, of the slowest rank.
"""

import sys
import time

import numpy as np
from mpi4py import MPI


def tensor(count: int, shared: bool) -> np.ndarray:
    if not shared:
        return np.empty(count, np.float32)
    window = MPI.Win.Allocate_shared(4 * count, 1, comm=MPI.COMM_WORLD)
    return np.frombuffer(window.tomemory(), np.float32)


def main() -> None:
    count, calls, batches = int(sys.argv[1]) // 4, int(sys.argv[2]), int(sys.argv[3])
    comm = MPI.COMM_WORLD
    source, result = (tensor(count, sys.argv[4] == "shared") for _ in range(2))
    source[:] = np.arange(count) % 16 + comm.rank
    for batch in range(-1, batches):  # the first one warms up
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            comm.Allreduce(source, result)
        mine = (time.perf_counter() - start) * 1e6 / calls
        slowest = comm.reduce(mine, MPI.MAX)
        if comm.rank == 0 and batch >= 0:
            print(f"{slowest:.4f}")


main()
