"""A decoder's step on GPUs as one CUDA graph: what an all-reduce costs where it stands, between products of matrices.

    python benches/decode_step.py --record benches/results/MACHINE/DATE-decode-step.json

Each layer projects, all-reduces with residual and RMS norm, and does so again behind its MLP, as a tensor-parallel model of 70
billion parameters does (hidden 8192, intermediate 28672, 64 heads of which 8 are keys', bf16); attention itself is left out, as it
does not communicate. Steps run freely, one replay behind the other, and each is timed by events: nobody lines the GPUs up. It
starts a process for every GPU, by `antiphon run`, if it is not one of them.
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path

import antiphon
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from cuda_vs_torch import Limited, become_ranks, blocks, ranks, write_record
from kernels import add_norm
from nccl import Nccl
from torch import Tensor
from torch.nn.functional import rms_norm, silu

BATCHES = [1, 4, 16, 64, 128, 256]
HIDDEN, INTERMEDIATE, HEAD, KEYS = 8192, 28672, 128, 8
EPS = 1e-5
#: Turns of each contender.
ROUNDS = 10

#: Sums a layer's contribution into the residual and norms that.
Reduce = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Layer:
    """The weights of a layer that a rank has."""

    def __init__(self, world_size: int) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * columns**-0.5

        self.queries = HIDDEN // world_size
        self.qkv = weight(self.queries + 2 * KEYS * HEAD // world_size, HIDDEN)
        self.out = weight(HIDDEN, self.queries)
        self.gate_up = weight(2 * INTERMEDIATE // world_size, HIDDEN)
        self.down = weight(HIDDEN, INTERMEDIATE // world_size)
        self.norms = [torch.rand(HIDDEN, device="cuda").bfloat16() for _ in range(2)]

    def __call__(self, x: Tensor, residual: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
        attended = (x @ self.qkv.T)[:, : self.queries]
        x, residual = reduce(attended @ self.out.T, residual, self.norms[0])
        gate, up = (x @ self.gate_up.T).chunk(2, dim=-1)
        return reduce((silu(gate) * up) @ self.down.T, residual, self.norms[1])


def contenders(comm: antiphon.Communicator, nccl: Nccl, limited: Nccl, batch: int) -> dict[str, Reduce]:
    """What reduces, adds and norms: ours at once, the others with one kernel behind it, or, as torch does by itself, with two."""

    def norm(total: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out, summed = torch.empty_like(total), torch.empty_like(total)
        add_norm(total, residual, weight, summed, out, EPS)
        return out, summed

    def by(library: Nccl) -> Reduce:
        def reduce(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            library.all_reduce(x, x)
            return norm(x, residual, weight)

        return reduce

    def by_torch(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        dist.all_reduce(x)
        residual = residual + x
        return rms_norm(residual, (HIDDEN,), weight, EPS), residual

    staged = symmetric_memory.empty(batch, HIDDEN, device="cuda", dtype=torch.bfloat16)
    symmetric_memory.rendezvous(staged, dist.group.WORLD)
    is_small = staged.nbytes <= 256 << 10

    def symmetric(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        staged.copy_(x)
        name = dist.group.WORLD.group_name
        if is_small:
            return norm(torch.ops.symm_mem.one_shot_all_reduce(staged, "sum", name), residual, weight)
        return norm(torch.ops.symm_mem.two_shot_all_reduce_(staged, "sum", name), residual, weight)

    peers = {"nccl": by(nccl), "nccl limited": by(limited), "torch.distributed": by_torch, "torch symmetric": symmetric}
    return {"antiphon": fused(comm), **peers}


def fused(comm: antiphon.Communicator) -> Reduce:
    """Ours."""

    def reduce(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out, total = torch.empty_like(x), torch.empty_like(x)
        comm.all_reduce_rms_norm(x, residual, weight, eps=EPS, residual_out=total, out=out)
        return out, total

    return reduce


def blocks_of_ours(comm: antiphon.Communicator, layer: Layer, batch: int) -> list[int]:
    """How many blocks the kernel of a fused call has."""
    x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
    return blocks({"ours": lambda: fused(comm)(x, x, layer.norms[0])})["ours"]


def quantile(times: list[float], part: float) -> float:
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]


def steps(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Replays the graph `count` times without waiting in between, and returns the microseconds of each replay."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for _ in range(5):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1000 for a, b in zip(events, events[1:])]


def capture(layers: list[Layer], batch: int, reduce: Reduce) -> tuple[torch.cuda.CUDAGraph, Tensor, list[Tensor]]:
    """A step's graph, its result and its inputs."""
    torch.manual_seed(batch)
    x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
    residual = x.clone()

    def step() -> Tensor:
        hidden, total = x, residual
        for layer in layers:
            hidden, total = layer(hidden, total, reduce)
        return hidden

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = step()
    graph.replay()
    torch.cuda.synchronize()
    return graph, result, [x, residual]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    become_ranks()
    with ranks() as comm, contextlib.suppress(KeyboardInterrupt):
        torch.manual_seed(comm.rank)
        layers = [Layer(comm.world_size) for _ in range(arguments.layers)]
        rows, nccl, limits = [], Nccl(comm), Limited(comm)
        for batch in arguments.batches:
            of_ours = blocks_of_ours(comm, layers[0], batch)
            row: dict[str, float] = {"batch": batch, "blocks of ours": max(of_ours)}
            ways = contenders(comm, nccl, limits.to(of_ours), batch)  # kept, as are the graphs' inputs: graphs hold no memory
            captured = {name: capture(layers, batch, reduce) for name, reduce in ways.items()}
            expected = captured["nccl"][1].float()
            for name, (_, result, _) in captured.items():
                # Roundings differ between the three, and the layers carry them on.
                close = (result.float() - expected).norm() / expected.norm()
                assert close < 0.1, f"{name} is off by {close}"
            times: dict[str, list[float]] = {name: [] for name in captured}
            # In turn, as GPUs that work hard change their clocks.
            for _ in range(ROUNDS):
                for name, (graph, *_) in captured.items():
                    times[name] += steps(graph, arguments.steps // ROUNDS)
            for name, mine in times.items():
                # A step takes as long as on its slowest rank.
                slowest = [max(step) for step in zip(*comm.exchange_objects(mine))]
                row |= {f"{name} p50": statistics.median(slowest), f"{name} p99": quantile(slowest, 0.99)}
                row[f"{name} max"] = max(slowest)
            del captured, ways
            row["p50 / nccl"] = row["antiphon p50"] / row["nccl p50"]
            row["p99 / p50"] = row["antiphon p99"] / row["antiphon p50"]
            rows.append({key: round(value, 3) for key, value in row.items()})
            if comm.rank == 0:
                print(rows[-1], flush=True)
        if comm.rank == 0 and arguments.record:
            write_record(comm, arguments.record, f"{arguments.layers} layers, bfloat16, µs a step", rows)


if __name__ == "__main__":
    main()
