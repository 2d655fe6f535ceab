"""Dispatch and combine of mixtures of experts beside NCCL and DeepEP, in the same processes; benches/README.md says how to read it.

    python benches/cuda_moe.py --record benches/results/MACHINE/DATE-cuda-moe.json

It starts a process for every GPU, by `antiphon run`, if it is not one of them. NCCL: `all_to_all_single`, behind an index_select and
before an index_add_. DeepEP (version 1) is measured where it is installed, with the best of several sizes of chunks.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_vs_torch
import torch
import torch.distributed as dist
from antiphon.moe import deep_ep as ours
from torch import Tensor

import antiphon

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
FLUSHED = 256 << 20  # bytes, more than the L2 cache has
WARM, ROUNDS = 3, 20
CHUNKS = (4, 8, 16, 24, 32)

Call = Callable[[], object]


class World:
    def __init__(self, comm: antiphon.Communicator) -> None:
        self.comm = comm
        self.flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
        self.rows: list[dict[str, Any]] = []

    def measure(self, call: Call, rounds: int = ROUNDS) -> float:
        """Microseconds of a call behind a flush of the L2 cache and a barrier of the GPUs: the slowest rank of each round, the
        median of the rounds."""
        times = []
        for round_ in range(WARM + rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flushed.zero_()
            self.comm.barrier()
            torch.cuda._sleep(400_000)  # while it lasts, everything is submitted
            self.comm.barrier(device=torch.cuda.current_device(), stream=torch.cuda.current_stream().cuda_stream)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            slowest = max(self.comm.exchange_objects(begin.elapsed_time(end) * 1e3))
            if round_ >= WARM:
                times.append(slowest)
        return round(statistics.median(times), 1)

    def add(self, what: str, sms: int, wire: int, floor: float, **contenders: Call | None) -> None:
        row: dict[str, Any] = {"call": what, "sms": sms, "wire MB": round(wire / 1e6, 1), "floor": round(floor, 1)}
        row |= {name.replace("_", " "): self.measure(call) for name, call in contenders.items() if call is not None}
        self.rows.append(row)
        if self.comm.rank == 0:
            print(row, flush=True)


class ByNccl:
    """The same by one all-to-all: rows in the order of ranks, and sums in any."""

    def __init__(self, in_rank: Tensor) -> None:
        sent = in_rank.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        self.sent, self.received = sent.tolist(), received.tolist()
        self.tokens = torch.cat([column.nonzero().flatten() for column in in_rank.unbind(1)])

    def dispatch(self, x: Tensor) -> Tensor:
        rows = x.new_empty(sum(self.received), x.shape[1])
        dist.all_to_all_single(rows, x.index_select(0, self.tokens), self.received, self.sent)
        return rows

    def combine(self, rows: Tensor, tokens: int) -> Tensor:
        back = rows.new_empty(len(self.tokens), rows.shape[1])
        dist.all_to_all_single(back, rows, self.sent, self.received)
        return rows.new_zeros(tokens, rows.shape[1]).index_add_(0, self.tokens, back)


class Buffer:
    """Ours, or DeepEP's: the same names."""

    def __init__(self, world: World, package: Any, buffer: Any, ids: Tensor, weights: Tensor) -> None:
        self.world, self.package, self.buffer, self.ids = world, package, buffer, ids
        per_rank, _, per_expert, self.in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        self.fresh = {"num_tokens_per_rank": per_rank, "is_token_in_rank": self.in_rank, "num_tokens_per_expert": per_expert}
        self.fresh |= {"topk_idx": ids, "topk_weights": weights}

    def with_sms(self, sms: int, x: Tensor, fp8: tuple[Tensor, Tensor]) -> dict[str, Call]:
        buffer, package = self.buffer, self.package
        package.Buffer.set_num_sms(sms)
        rows, _, _, _, handle, _ = buffer.dispatch(x, **self.fresh, config=package.Config(sms, 8, 256))
        self.rows = rows

        def best(call: Callable[[Any], object]) -> Any:
            """The configuration with the best size of chunks, which means nothing to ours."""
            if package is ours:
                return package.Config(sms)
            times = {chunk: self.world.measure(lambda c=chunk: call(package.Config(sms, c, 256)), 5) for chunk in CHUNKS}
            return package.Config(sms, min(times, key=times.__getitem__), 256)

        of_rows = best(lambda config: buffer.dispatch(x, handle=handle, config=config))
        of_codes = best(lambda config: buffer.dispatch(fp8, handle=handle, config=config))
        of_sums = best(lambda config: buffer.combine(rows, handle, config=config))
        worst = len(x) * self.world.comm.world_size
        return {
            "layout": lambda: buffer.get_dispatch_layout(self.ids, EXPERTS),
            "dispatch bf16": lambda: buffer.dispatch(x, handle=handle, config=of_rows),
            "dispatch bf16, blocking": lambda: buffer.dispatch(x, **self.fresh, config=of_rows),
            "dispatch bf16, capacity": lambda: buffer.dispatch(x, **self.fresh, num_worst_tokens=worst, config=of_rows),
            "dispatch fp8": lambda: buffer.dispatch(fp8, handle=handle, config=of_codes),
            "combine bf16": lambda: buffer.combine(rows, handle, config=of_sums),
        }


def routing(kind: str, tokens: int, rank: int) -> Tensor:
    """Choices of all experts, or of those in the best 4 of 8 groups."""
    scores = torch.rand(tokens, EXPERTS, device="cuda", generator=torch.Generator("cuda").manual_seed(1 + rank))
    if kind == "limited":
        best = scores.view(tokens, 8, -1).topk(2).values.sum(-1).topk(4).indices
        keep = torch.zeros(tokens, 8, dtype=torch.bool, device="cuda").scatter_(1, best, True)
        scores = scores.view(tokens, 8, -1).masked_fill(~keep.unsqueeze(-1), -1).view(tokens, EXPERTS)
    return scores.topk(TOP_K).indices


def measure(world: World, kind: str, tokens: int, all_sms: list[int]) -> None:
    comm = world.comm
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    fp8 = (x.to(torch.float8_e4m3fn), torch.rand(tokens, HIDDEN // 128, device="cuda"))
    ids, weights = routing(kind, tokens, comm.rank), torch.rand(tokens, TOP_K, device="cuda")
    buffer = Buffer(world, ours, ours.Buffer(comm), ids, weights)
    peer = None
    if importlib.util.find_spec("deep_ep"):
        import deep_ep

        group = dist.new_group(list(range(comm.world_size)))
        peer = Buffer(world, deep_ep, deep_ep.Buffer(group, int(1e9), 0, explicitly_destroy=True), ids, weights)
    nccl = ByNccl(buffer.in_rank)
    remote = int(buffer.in_rank.sum() - buffer.in_rank[:, comm.rank].sum())
    most = max(comm.exchange_objects(remote))
    bandwidth = 365e3 if comm.world_size == 2 else 352e3  # bytes a microsecond: docs/cuda.md
    for sms in all_sms:
        mine = buffer.with_sms(sms, x, fp8)
        theirs = peer.with_sms(sms, x, fp8) if peer else {}
        rows = nccl.dispatch(x)
        assert torch.equal(rows, buffer.rows), "the rows are wrong"
        by_nccl = {"dispatch bf16": lambda: nccl.dispatch(x), "combine bf16": lambda: nccl.combine(rows, tokens)}
        for what, call in mine.items():
            row = 0 if what == "layout" else HIDDEN + HIDDEN // 32 if "fp8" in what else 2 * HIDDEN
            wire = most * row
            others = {"deep_ep": theirs.get(what), "nccl": by_nccl.get(what)}
            world.add(f"{what} ({kind})", sms, wire, wire / bandwidth, antiphon=call, **others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--sms", type=int, nargs="+", default=[24, 48])
    parser.add_argument("--routes", nargs="+", default=["uniform"], help="uniform, limited")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    cuda_vs_torch.become_ranks()
    with cuda_vs_torch.ranks() as comm:
        world = World(comm)
        for route in arguments.routes:
            measure(world, route, arguments.tokens, arguments.sms)
        if comm.rank == 0 and arguments.record:
            what = f"{arguments.tokens} tokens a rank of {HIDDEN}, {EXPERTS} experts, top-{TOP_K}, µs"
            cuda_vs_torch.record(comm, arguments.record, what, world.rows)


if __name__ == "__main__":
    main()
