"""What a call costs the caller: `python -m antiphon run -n 2 python examples/python/call_overhead.py`.

On GPUs, where there is one for each rank, calls return when their work is in the stream, so this is what Python and the
launch take; on the CPU it is the whole call. The median of 20 rounds, of the slowest rank.
"""

import os
import statistics
import time
from collections.abc import Callable

import antiphon
import antiphon.torch
import torch

if "RANK" not in os.environ:
    raise SystemExit(f"this runs on several ranks: python -m antiphon run -n 2 python {__file__}")

CALLS, ROUNDS = 100, 20

with antiphon.init() as comm:
    on_gpus = torch.cuda.device_count() >= comm.world_size
    device = torch.device("cuda", comm.rank) if on_gpus else torch.device("cpu")
    x, group = torch.ones(1024, device=device), antiphon.torch.ops.register(comm)
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce, in place": lambda: comm.all_reduce(x, "max", out=x),
        "all_reduce, into out": lambda: comm.all_reduce(x, "max", out=out),
        "all_reduce, new": lambda: comm.all_reduce(x, "max"),
        "torch.ops.antiphon.all_reduce_": lambda: torch.ops.antiphon.all_reduce_(x, group, "max"),
    }
    for name, call in calls.items():
        times = []
        for _ in range(ROUNDS + 1):  # of which the first sets things up
            if on_gpus:
                torch.cuda.synchronize(device)
            comm.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times.append((time.perf_counter() - start) / CALLS * 1e6)
        slowest = max(comm.exchange_objects(statistics.median(times[1:])))
        if comm.rank == 0:
            print(f"{comm.world_size} ranks on {device.type}: {slowest:.1f} µs for each call of {name}")
