"""How long the host takes to make the calls of mixtures of experts on a GPU, which is what eager programs wait for.

    python benches/moe_host_time.py [--record benches/results/MACHINE/DATE-moe-host-time.json]

It runs on any number of GPUs, by `antiphon run` if it is not one of the ranks; one is enough. Few tokens of a small row leave the GPUs
little to do, and calls are made a hundred at a time, so that none of them waits for the GPU: the time is the host's own.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_vs_torch
import torch
from antiphon.moe import ExpertParallel, deep_ep

import antiphon

TOKENS, HIDDEN, EXPERTS, TOP_K = 8, 512, 16, 4
CALLS, ROUNDS = 100, 21


def host_time(comm: antiphon.Communicator, call: Callable[[], object]) -> float:
    """Microseconds of a call: the slowest rank of each round, the median of the rounds."""
    times = []
    for _ in range(ROUNDS):
        call()
        torch.cuda.synchronize()
        comm.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append(max(comm.exchange_objects((time.perf_counter() - start) / CALLS * 1e6)))
        torch.cuda.synchronize()
    return round(statistics.median(times), 1)


def calls(comm: antiphon.Communicator) -> dict[str, Callable[[], object]]:
    """The calls by their names."""
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    fp8 = x.to(torch.float8_e4m3fn), torch.ones(TOKENS, HIDDEN // 128, device="cuda")
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).cuda()
    weights = torch.rand(TOKENS, TOP_K, device="cuda")
    normal, low = deep_ep.Buffer(comm), deep_ep.Buffer(comm, low_latency_mode=True)
    of_ranks, _, of_experts, in_rank, _ = normal.get_dispatch_layout(ids, EXPERTS)
    fresh: dict[str, Any] = {"num_tokens_per_rank": of_ranks, "is_token_in_rank": in_rank, "num_tokens_per_expert": of_experts}
    rows, _, _, _, handle, _ = normal.dispatch(x, **fresh, topk_idx=ids, topk_weights=weights)
    slots, _, routes, _, _ = low.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
    layer = ExpertParallel(comm, EXPERTS, HIDDEN)
    worst = TOKENS * comm.world_size
    return {
        "Buffer.get_dispatch_layout": lambda: normal.get_dispatch_layout(ids, EXPERTS),
        "Buffer.dispatch, handle": lambda: normal.dispatch(x, handle=handle),
        "Buffer.dispatch, handle, FP8": lambda: normal.dispatch(fp8, handle=handle),
        "Buffer.dispatch, capacity": lambda: normal.dispatch(
            x, **fresh, topk_idx=ids, topk_weights=weights, num_worst_tokens=worst
        ),
        "Buffer.combine": lambda: normal.combine(rows, handle),
        "Buffer.low_latency_dispatch": lambda: low.low_latency_dispatch(x, ids, TOKENS, EXPERTS),
        "Buffer.low_latency_combine": lambda: low.low_latency_combine(slots, ids, weights, routes),
        "ExpertParallel.dispatch_to_slots": lambda: layer.dispatch_to_slots(x, ids, max_tokens=TOKENS),
        "comm.all_reduce": lambda: comm.all_reduce(x),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    cuda_vs_torch.become_ranks()
    with cuda_vs_torch.ranks() as comm:
        rows = []
        for name, call in calls(comm).items():
            rows.append({"call": name, "host µs": host_time(comm, call)})
            if comm.rank == 0:
                print(rows[-1], flush=True)
        if comm.rank == 0 and arguments.record:
            what = f"{TOKENS} tokens a rank of {HIDDEN}, {EXPERTS} experts, top-{TOP_K}: µs of the host for a call"
            cuda_vs_torch.write_record(comm, arguments.record, what, rows)


if __name__ == "__main__":
    main()
