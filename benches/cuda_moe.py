"""Dispatch and combine of mixtures of experts beside NCCL, torch and DeepEP, in the same processes; benches/README.md says how to read it.

    python benches/cuda_moe.py --record benches/results/MACHINE/DATE-cuda-moe.json

It starts a process for every GPU, by `antiphon run`, if it is not one of them. Contenders take turns round by round, each as an eager
call and as a graph of calls, behind a flush of the L2 cache and a barrier of the GPUs:

    antiphon        as many multiprocessors as the row says
    deep_ep         DeepEP (version 1), where it is installed, with as many and the best of several sizes of chunks
    nccl            libnccl with its defaults: sends and receives, a gather before a dispatch, a kernel that sums behind a combine
    nccl limited    the same with as many blocks as the row says
    torch           `all_to_all_single` with an index_select before it or new_zeros and an index_add_ behind it
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_vs_torch
import kernels
import torch
import torch.distributed as dist
from antiphon.moe import deep_ep as ours
from nccl import Nccl, grids
from torch import Tensor

import antiphon

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
FLUSHED = 256 << 20  # bytes, more than the L2 cache has
WARM, ROUNDS = 3, 20
CALLS = 5  # in a graph
CHUNKS = (4, 8, 16, 24, 32)
MOST_TOKENS = 128  # of a call to slots, DeepEP's low-latency mode

Call = Callable[[], object]
#: The calls of a contender by what they do.
Calls = dict[str, Call]


class World:
    def __init__(self, comm: antiphon.Communicator) -> None:
        self.comm = comm
        self.flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
        self.rows: list[dict[str, Any]] = []

    def once(self, call: Call) -> float:
        """Microseconds of a call behind a flush of the L2 cache and a barrier of the GPUs, of the slowest rank."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.zero_()
        self.comm.barrier()
        torch.cuda._sleep(400_000)  # while it lasts, everything is submitted
        self.comm.barrier(device=torch.cuda.current_device(), stream=torch.cuda.current_stream().cuda_stream)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return max(self.comm.exchange_objects(begin.elapsed_time(end) * 1e3))

    def measure(self, calls: dict[str, Call], rounds: int = ROUNDS) -> dict[str, float]:
        """The median of the rounds, in which all take turns."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for round_ in range(WARM + rounds):
            for name, call in calls.items():
                time = self.once(call)
                if round_ >= WARM:
                    times[name].append(time)
        return {name: round(statistics.median(found), 1) for name, found in times.items()}

    def add(self, row: dict[str, Any], calls: dict[str, Call], captured: bool) -> None:
        """Adds the eager times of the contenders and, if their calls can be captured, those in graphs and the blocks of their kernels."""
        row["eager"] = self.measure(calls)
        if captured:
            graphs = {name: cuda_vs_torch.capture(call, CALLS) for name, call in calls.items()}
            replayed = self.measure({name: graph.replay for name, graph in graphs.items()})
            row["graph"] = {name: round(time / CALLS, 1) for name, time in replayed.items()}
            row["blocks"] = {name: grids(cuda_vs_torch.capture(call, 1, keep_graph=True)) for name, call in calls.items()}
        self.rows.append(row)
        if self.comm.rank == 0:
            print(row, flush=True)


class Exchange:
    """What an all-to-all needs to stand for a dispatch and a combine: rows in the order of ranks."""

    def __init__(self, in_rank: Tensor, x: Tensor) -> None:
        sent = in_rank.sum(0, dtype=torch.int64)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        self.sent, self.received = sent.tolist(), received.tolist()
        self.tokens = torch.cat([column.nonzero().flatten() for column in in_rank.unbind(1)])
        # The number of a token's row for a rank among all that this rank sends, or −1.
        before = torch.tensor([sum(self.sent[:rank]) for rank in range(len(self.sent))], device=x.device)
        self.places = torch.where(in_rank, in_rank.cumsum(0) - 1 + before, -1).to(torch.int32)
        self.x, self.summed = x, torch.empty_like(x)
        self.staged = x.new_empty(len(self.tokens), HIDDEN)
        self.rows = x.new_empty(sum(self.received), HIDDEN)

    def by_nccl(self, nccl: Nccl) -> Calls:
        def dispatch() -> Tensor:
            torch.index_select(self.x, 0, self.tokens, out=self.staged)
            nccl.all_to_all(self.staged, self.sent, self.rows, self.received)
            return self.rows

        def combine() -> Tensor:
            nccl.all_to_all(self.rows, self.received, self.staged, self.sent)
            kernels.sum_rows(self.staged, self.places, self.summed)
            return self.summed

        return {"dispatch bf16": dispatch, "combine bf16": combine}

    def by_torch(self) -> Calls:
        def dispatch() -> Tensor:
            rows = self.x.new_empty(sum(self.received), HIDDEN)
            dist.all_to_all_single(rows, self.x.index_select(0, self.tokens), self.received, self.sent)
            return rows

        def combine() -> Tensor:
            back = self.x.new_empty(len(self.tokens), HIDDEN)
            dist.all_to_all_single(back, self.rows, self.sent, self.received)
            return torch.zeros_like(self.x).index_add_(0, self.tokens, back)

        return {"dispatch bf16": dispatch, "combine bf16": combine}


class Buffer:
    """Ours, or DeepEP's: the same names."""

    def __init__(self, world: World, package: Any, buffer: Any, low_latency: Any) -> None:
        self.world, self.package, self.buffer, self.low_latency = world, package, buffer, low_latency

    def by_token(self, sms: int, x: Tensor, fp8: tuple[Tensor, Tensor], ids: Tensor, weights: Tensor) -> Calls:
        """The calls by token."""
        buffer, package = self.buffer, self.package
        per_rank, _, per_expert, self.in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        fresh = {"num_tokens_per_rank": per_rank, "is_token_in_rank": self.in_rank, "num_tokens_per_expert": per_expert}
        fresh |= {"topk_idx": ids, "topk_weights": weights}
        package.Buffer.set_num_sms(sms)
        rows, _, _, _, handle, _ = buffer.dispatch(x, **fresh, config=package.Config(sms, 8, 256))
        self.rows = rows

        def best(call: Callable[[Any], object]) -> Any:
            """The configuration with the best size of chunks, which means nothing to ours."""
            if package is ours:
                return package.Config(sms)
            configs = {chunk: package.Config(sms, chunk, 256) for chunk in CHUNKS}
            times = {
                chunk: statistics.median(self.world.once(lambda c=config: call(c)) for _ in range(5))  # type: ignore[misc]
                for chunk, config in configs.items()
            }
            return configs[min(times, key=times.__getitem__)]

        of_rows = best(lambda config: buffer.dispatch(x, handle=handle, config=config))
        of_codes = best(lambda config: buffer.dispatch(fp8, handle=handle, config=config))
        of_sums = best(lambda config: buffer.combine(rows, handle, config=config))
        worst = len(x) * self.world.comm.world_size
        return {
            "layout": lambda: buffer.get_dispatch_layout(ids, EXPERTS),
            "dispatch bf16": lambda: buffer.dispatch(x, handle=handle, config=of_rows),
            "dispatch bf16, blocking": lambda: buffer.dispatch(x, **fresh, config=of_rows),
            "dispatch bf16, capacity": lambda: buffer.dispatch(x, **fresh, num_worst_tokens=worst, config=of_rows),
            "dispatch fp8": lambda: buffer.dispatch(fp8, handle=handle, config=of_codes),
            "combine bf16": lambda: buffer.combine(rows, handle, config=of_sums),
        }

    def to_slots(self, x: Tensor, ids: Tensor, weights: Tensor) -> Calls:
        """The calls to slots."""
        buffer = self.low_latency
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST_TOKENS, EXPERTS, use_fp8=False)
        return {
            "dispatch to slots fp8": lambda: buffer.low_latency_dispatch(x, ids, MOST_TOKENS, EXPERTS, use_fp8=True),
            "combine from slots bf16": lambda: buffer.low_latency_combine(rows, ids, weights, handle),
        }


def of_deep_ep(world: World) -> Buffer | None:
    """DeepEP's, if it is installed."""
    if not importlib.util.find_spec("deep_ep"):
        return None
    import deep_ep

    ranks = world.comm.world_size
    groups = [dist.new_group(list(range(ranks))) for _ in range(2)]
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS, HIDDEN, ranks, EXPERTS)
    normal = deep_ep.Buffer(groups[0], int(1e9), 0, explicitly_destroy=True)
    low = deep_ep.Buffer(groups[1], 1 << 20, size, low_latency_mode=True, explicitly_destroy=True)
    return Buffer(world, deep_ep, normal, low)


def routing(kind: str, tokens: int, rank: int) -> Tensor:
    """Choices of all experts, or of those in the best 4 of 8 groups."""
    scores = torch.rand(tokens, EXPERTS, device="cuda", generator=torch.Generator("cuda").manual_seed(1 + rank))
    if kind == "limited":
        best = scores.view(tokens, 8, -1).topk(2).values.sum(-1).topk(4).indices
        keep = torch.zeros(tokens, 8, dtype=torch.bool, device="cuda").scatter_(1, best, True)
        scores = scores.view(tokens, 8, -1).masked_fill(~keep.unsqueeze(-1), -1).view(tokens, EXPERTS)
    return scores.topk(TOP_K).indices


class Bench:
    def __init__(self, world: World) -> None:
        comm = world.comm
        self.world, self.peer = world, of_deep_ep(world)
        self.ours = Buffer(world, ours, ours.Buffer(comm), ours.Buffer(comm, low_latency_mode=True))
        self.nccl, self.limited = Nccl(comm), dict[int, Nccl]()

    def by_token(self, route: str, tokens: int, sms: int) -> None:
        comm = self.world.comm
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        fp8 = x.to(torch.float8_e4m3fn), torch.rand(tokens, HIDDEN // 128, device="cuda")
        ids, weights = routing(route, tokens, comm.rank), torch.rand(tokens, TOP_K, device="cuda")
        if sms not in self.limited:
            self.limited[sms] = Nccl(comm, sms)
        mine = self.ours.by_token(sms, x, fp8, ids, weights)
        exchange = Exchange(self.ours.in_rank, x)
        contenders: dict[str, Calls] = {"antiphon": mine}
        if self.peer:
            contenders["deep_ep"] = self.peer.by_token(sms, x, fp8, ids, weights)
        contenders["nccl"] = exchange.by_nccl(self.nccl)
        contenders["nccl limited"] = exchange.by_nccl(self.limited[sms])
        contenders["torch"] = exchange.by_torch()
        expected = x.float() * self.ours.in_rank.sum(1, keepdim=True)
        for name in ("nccl", "nccl limited", "torch"):
            assert torch.equal(contenders[name]["dispatch bf16"](), self.ours.rows), f"the rows of {name} are wrong"  # type: ignore[arg-type]
            torch.testing.assert_close(contenders[name]["combine bf16"](), expected.bfloat16())
        remote = int(self.ours.in_rank.sum() - self.ours.in_rank[:, comm.rank].sum())
        most = max(comm.exchange_objects(remote))
        for what in mine:
            row = 0 if what == "layout" else HIDDEN + HIDDEN // 32 if "fp8" in what else 2 * HIDDEN
            about = {"call": what, "route": route, "tokens": tokens, "sms": sms, "wire MB": round(most * row / 1e6, 1)}
            calls = {name: calls[what] for name, calls in contenders.items() if what in calls}
            self.world.add(about, calls, captured="blocking" not in what)

    def to_slots(self, tokens: int) -> None:
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        ids = routing("uniform", tokens, self.world.comm.rank)
        weights = torch.rand(tokens, TOP_K, device="cuda")
        contenders = {"antiphon": self.ours.to_slots(x, ids, weights)}
        if self.peer:
            contenders["deep_ep"] = self.peer.to_slots(x, ids, weights)
        for what in contenders["antiphon"]:
            calls = {name: calls[what] for name, calls in contenders.items()}
            self.world.add({"call": what, "route": "uniform", "tokens": tokens}, calls, captured=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096], help="of each rank")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32, 64, 128], help="tokens of calls to slots")
    parser.add_argument("--sms", type=int, nargs="+", default=[24, 48], help="all for the last number of tokens, else the first")
    parser.add_argument("--routes", nargs="+", default=["uniform"], help="uniform, limited")
    parser.add_argument("--deep-ep", metavar="VERSION", help="of what is installed as deep_ep, for the record")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    cuda_vs_torch.become_ranks()
    with cuda_vs_torch.ranks() as comm:
        kernels.check()
        world = World(comm)
        bench = Bench(world)
        what = f"µs of a call, rows of {HIDDEN}, {EXPERTS} experts, top-{TOP_K}: the slowest rank, the median of {ROUNDS} rounds"

        def save() -> None:
            if comm.rank == 0 and arguments.record:
                about = {"deep_ep": arguments.deep_ep if bench.peer else None, "calls in a graph": CALLS}
                cuda_vs_torch.write_record(comm, arguments.record, what, world.rows, **about)

        for route in arguments.routes:
            for tokens in arguments.tokens:
                for sms in arguments.sms if tokens == arguments.tokens[-1] else arguments.sms[:1]:
                    bench.by_token(route, tokens, sms)
                save()
        for tokens in arguments.slots:
            bench.to_slots(tokens)
            save()


if __name__ == "__main__":
    main()
