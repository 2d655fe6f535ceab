"""Dispatch and combine of both forms under skew, again and again: the calls end, and each sum has its bits.

    python benches/cuda_moe_skew.py --record benches/results/MACHINE/DATE-cuda-moe-skew.json
    python benches/cuda_moe_skew.py --tokens 512 --hidden 1024 --calls 100000

It starts a process for every GPU, by `antiphon run`, if it is not one of them. Half of a rank's tokens choose experts of the lower half of the
ranks four times as often as others, and the other half of its tokens those of the upper half, so that a ring fills while its neighbours
are empty. Tokens are small integers: a sum is the token times the number of its rows, exactly. Calls are replayed from a graph; before some
replays a rank sleeps for some milliseconds.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_vs_torch
import torch
from torch import Tensor

import antiphon
from antiphon.moe import ExpertParallel

EXPERTS, TOP_K = 256, 8
PREFERENCE = 4
CALLS = 10  # in a graph
LATE = 0.02  # the share of the replays that have a late rank


def skewed(tokens: int, seed: int) -> Tensor:
    """int64 ``[tokens, TOP_K]``: different experts for each token."""
    generator = torch.Generator("cuda").manual_seed(seed)
    liking = torch.ones(tokens, EXPERTS, device="cuda")
    liking[: tokens // 2, : EXPERTS // 2] *= PREFERENCE
    liking[tokens // 2 :, EXPERTS // 2 :] *= PREFERENCE
    return torch.multinomial(liking, TOP_K, generator=generator)


def forms(parallel: ExpertParallel, x: Tensor, ids: Tensor) -> dict[str, tuple[Callable[[], Tensor], Tensor]]:
    """A dispatch with the combine of what arrived, and the sums that it must have, of each form."""
    world_size, tokens = parallel.comm.world_size, len(x)
    weights = torch.ones(ids.shape, device="cuda")
    routing_map = torch.zeros(tokens, EXPERTS, dtype=torch.bool, device="cuda").scatter_(1, ids, True)
    holders = routing_map.view(tokens, world_size, -1).any(2).sum(1, keepdim=True)

    def by_token() -> Tensor:
        got = parallel.dispatch(x, ids, weights, capacity=world_size * tokens)
        return parallel.combine(got.x, got.routes)

    def by_expert() -> Tensor:
        rows = world_size * tokens * TOP_K
        got = parallel.dispatch_by_expert(x, routing_map, capacity=rows, max_tokens=tokens)
        return parallel.combine_by_expert(got.x, got.routes)

    return {"by token": (by_token, x * holders), "by expert": (by_expert, x * TOP_K)}


def soak(comm: antiphon.Communicator, call: Callable[[], Tensor], expected: Tensor, calls: int) -> dict[str, Any]:
    """Replays a graph until that number of calls was made, and compares the sums of the last call of each replay."""
    sums = call()
    assert torch.equal(sums, expected), "the sums of an eager call are wrong"
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            sums = call()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    choice = random.Random(7)  # the same on all ranks
    start = time.monotonic()
    for replay in range(-(-calls // CALLS)):
        if choice.random() < LATE and choice.randrange(comm.world_size) == comm.rank:
            time.sleep(0.003)
        sums.zero_()
        graph.replay()
        wrong += (sums != expected).sum()
        if replay % 16 == 0:
            torch.cuda.synchronize()
            comm.check()
    torch.cuda.synchronize()
    comm.check()
    seconds = time.monotonic() - start
    wrongs = comm.exchange_objects(int(wrong))
    assert not any(wrongs), f"wrong elements on each rank: {wrongs}"
    return {"calls": -(-calls // CALLS) * CALLS, "wrong elements": sum(wrongs), "µs of a dispatch with its combine": round(seconds / calls * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--calls", type=int, default=200, help="of each form")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    cuda_vs_torch.become_ranks()
    with cuda_vs_torch.ranks() as comm:
        x = torch.randint(-8, 9, (arguments.tokens, arguments.hidden), device="cuda").bfloat16()
        ids = skewed(arguments.tokens, comm.rank)
        rows = []
        for form, (call, expected) in forms(ExpertParallel(comm, EXPERTS, arguments.hidden), x, ids).items():
            rows.append({"form": form} | soak(comm, call, expected, arguments.calls))
            if comm.rank == 0:
                print(rows[-1], flush=True)
        if comm.rank == 0 and arguments.record:
            about = {"tokens": arguments.tokens, "hidden": arguments.hidden, "experts": EXPERTS, "top-k": TOP_K, "preference": PREFERENCE}
            cuda_vs_torch.write_record(comm, arguments.record, "dispatch and combine under skew", rows, **about)


if __name__ == "__main__":
    main()
