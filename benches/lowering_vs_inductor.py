"""Tensor-parallel layers that inductor compiles: with NCCL, with each of its own ways to communicate, and lowered by antiphon.

    python benches/lowering_vs_inductor.py --record benches/results/MACHINE/DATE-lowering-vs-inductor.json
    python benches/lowering_vs_inductor.py --sections training --train 2048

Layers have the two row-parallel products of a transformer's, behind each a sum over the ranks, the residual and a norm: bf16, hidden
4096, inner 14336. Attention itself is left out, as no contender changes it. A `sequence` contender divides the tokens between the
products among the ranks: an all-gather comes before each pair of products and a reduce-scatter behind it. The section `fused` has one
sum with residual and norm, compiled, beside the same call without a compiler.

All contenders of a section are compiled by `torch.compile`, run in the same processes, and are replayed as CUDA graphs;
benches/README.md says how times are taken. The results are compared first, and the gradients too. It starts a process for every GPU,
by `antiphon run`, if it is not one of them.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import antiphon
import antiphon.lowering
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed._symmetric_memory as symmetric
from cuda_vs_torch import become_ranks, calls_for, measure, ranks, record
from torch import Tensor
from torch.nn.functional import rms_norm, silu

HIDDEN, INNER, EPS = 4096, 14336, 1e-6
#: The width of the fused calls.
WIDE = 7168
TOKENS = {"decoding": [1, 4, 16, 64, 256], "training": [2048, 8192], "fused": [1, 4, 16, 64, 256, 512, 2048]}
OURS: dict[str, Any] = {"backend": "antiphon"}
#: The arguments of `torch.compile`. A contender `NAME sequence` compiles the layers whose tokens are divided.
COMPILERS: dict[str, dict[str, Any]] = {
    "nccl": {"options": {}},
    "auto_select": {"options": {"_collective.auto_select": True}},
    "overlap": {
        "options": {
            "aten_distributed_optimizations.enable_overlap_scheduling": True,
            "aten_distributed_optimizations.collective_bucketing": True,
            "aten_distributed_optimizations.insert_overlap_deps": True,
            "reorder_for_compute_comm_overlap": True,
        }
    },
    "antiphon": OURS | {"options": {"strict": True}},
    "antiphon overlap": OURS | {"options": {"strict": True, "overlap": True}},
    "nccl sequence": {"options": {}},
    "async_tp sequence": {"options": {"_micro_pipeline_tp": True}},
    "antiphon sequence": OURS | {"options": {"strict": True}},
}
CONTENDERS = {"decoding": ["nccl", "auto_select", "antiphon", "antiphon overlap"], "training": list(COMPILERS)}


class Layers:
    """The weights of this rank, and the functions that the contenders compile."""

    def __init__(self, comm: antiphon.Communicator, layers: int) -> None:
        own, world = torch.Generator("cuda").manual_seed(comm.rank), comm.world_size

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=own, device="cuda") * rows**-0.5).to(torch.bfloat16)

        self.weights = [
            (
                weight(HIDDEN, HIDDEN // world),
                weight(HIDDEN // world, HIDDEN),
                weight(HIDDEN, 2 * INNER // world),
                weight(INNER // world, HIDDEN),
            )
            for _ in range(layers)
        ]
        self.norms = [torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2 * layers)]

    def products(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """What comes between two norms: this rank's part of a sum."""
        for into, out, up, down in self.weights:
            yield lambda x, into=into, out=out: (x @ into) @ out
            yield lambda x, up=up, down=down: _gated(x @ up) @ down

    def run(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        for product, weight in zip(self.products(), self.norms, strict=True):
            residual = residual + collectives.all_reduce(product(x), "sum", dist.group.WORLD)
            x = rms_norm(residual, (HIDDEN,), weight, EPS)
        return x, residual

    def run_sequence(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The same of this rank's tokens."""
        for product, weight in zip(self.products(), self.norms, strict=True):
            partial = product(collectives.all_gather_tensor(x, 0, dist.group.WORLD))
            residual = residual + collectives.reduce_scatter_tensor(partial, "sum", 0, dist.group.WORLD)
            x = rms_norm(residual, (HIDDEN,), weight, EPS)
        return x, residual


def _gated(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return silu(gate) * value


def step(run: Callable[..., Any], inputs: list[Tensor], leaves: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """A forward and a backward pass, which returns the gradients."""

    def both() -> tuple[Tensor, ...]:
        x, residual = run(*inputs)
        return torch.autograd.grad((x.float().square().mean() + residual.float().square().mean()), leaves)

    return both


def check(what: str, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Compares by the norm of the difference: roundings differ."""
    for index, (result, expected) in enumerate(zip(found, wanted, strict=True)):
        error = (result.detach().float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.03, f"{what}: result {index} is wrong by {error:.4f} of its norm"


def summed(gradients: tuple[Tensor, ...], norms: int) -> tuple[Tensor, ...]:
    """The gradients of the norms' weights summed over the ranks: each rank has those of its tokens, or of its part of the products."""
    of_norms = [gradient.float() for gradient in gradients[-norms:]]
    for gradient in of_norms:
        dist.all_reduce(gradient)
    return (*(gradient.clone() for gradient in gradients[:-norms]), *of_norms)


def outside() -> int:
    """The bytes of this GPU that are not in torch's allocator: buffers of collectives, and what CUDA itself takes."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def mebibytes(grown: int) -> float:
    return round(grown / 2**20, 1)


class Bench:
    def __init__(self, comm: antiphon.Communicator, arguments: argparse.Namespace) -> None:
        self.comm, self.arguments = comm, arguments

    def compiled(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False, **COMPILERS[name])

    def layers(self, what: str, tokens: int) -> dict[str, Any]:
        """Times of decoding or of a training step, and how much memory outside torch's allocator each contender took first."""
        comm, count, trains = self.comm, self.arguments.layers, what == "training"
        layers = Layers(comm, count)
        shared = torch.Generator("cuda").manual_seed(99)
        inputs = [torch.randn(tokens, HIDDEN, generator=shared, device="cuda").to(torch.bfloat16) for _ in range(2)]
        leaves = [weight for weights in layers.weights for weight in weights] + layers.norms if trains else []
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.no_grad():  # or its graph would tie the gradients to the stream that is not captured
            wanted = layers.run(*inputs)
        calls: dict[str, Callable[[], object]] = {}
        memory: dict[str, float] = {}
        gradients: tuple[Tensor, ...] | None = None
        with torch.set_grad_enabled(trains):
            for name in self.arguments.contenders or CONTENDERS[what]:
                started, before = time.monotonic(), outside()
                random.seed(f"{name} {tokens}")  # from which auto_select draws the names of its buffers, again and again the same
                sequence = name.endswith("sequence")
                run = self.compiled(layers.run_sequence if sequence else layers.run, name)
                own = [x.chunk(comm.world_size)[comm.rank].clone() if sequence else x for x in inputs]
                expected = tuple(x.chunk(comm.world_size)[comm.rank] if sequence else x for x in wanted)
                check(f"{what} {tokens} {name}", run(*own), expected)
                calls[name] = step(run, own, leaves) if trains else lambda run=run, own=own: run(*own)
                if trains:
                    found = summed(calls[name](), len(layers.norms))
                    gradients = gradients or found
                    check(f"gradients {tokens} {name}", found, gradients)
                memory[name] = mebibytes(outside() - before)
                self.log(f"{what} {tokens} {name}: compiled in {time.monotonic() - started:.1f} s")
            row: dict[str, Any] = {"what": "training step" if trains else what, "tokens": tokens, "layers": count}
            if not self.arguments.check:
                times = measure(comm, calls, 6 if trains else 40)
                row |= times | ratios(times)
        return row | {"MiB outside torch's allocator": memory}

    def fused(self, _: str, tokens: int) -> dict[str, Any]:
        """Times of a sum with residual and norm, compiled and not."""
        comm, own, shared = self.comm, torch.Generator("cuda").manual_seed(self.comm.rank), torch.Generator("cuda").manual_seed(99)
        x, residual = (torch.randn(tokens, WIDE, generator=each, device="cuda").to(torch.bfloat16) for each in (own, shared))
        weight = torch.rand(WIDE, generator=shared, device="cuda").to(torch.bfloat16)
        norm, total = torch.empty_like(x), torch.empty_like(x)

        def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            total = residual + collectives.all_reduce(x, "sum", dist.group.WORLD)
            return rms_norm(total, (WIDE,), weight, EPS), total

        def bare() -> None:
            comm.all_reduce_rms_norm(x, residual, weight, eps=EPS, residual_out=total, out=norm)

        wanted = model(x, residual, weight)
        contenders: dict[str, Callable[[], object]] = {"bare": bare}
        bare()
        check(f"fused {tokens}, bare", (norm, total), wanted)
        for name in ("antiphon", "nccl"):
            run = self.compiled(model, name)
            check(f"fused {tokens}, {name}", run(x, residual, weight), wanted)
            contenders[name] = lambda run=run: run(x, residual, weight)
        row: dict[str, Any] = {"what": "fused", "tokens": tokens, "hidden": WIDE}
        if self.arguments.check:
            return row
        times = measure(comm, contenders, calls_for(2 * tokens * WIDE))
        return row | times | ratios(times)

    def log(self, text: str) -> None:
        if self.comm.rank == 0:
            print(text, flush=True)

    def section(self, name: str) -> Iterator[dict[str, Any]]:
        """The rows of a section, until its time is over."""
        end = time.monotonic() + self.arguments.limit
        for tokens in self.arguments.tokens or TOKENS[name]:
            if any(self.comm.exchange_objects(time.monotonic() > end)):
                yield {"what": name, "tokens": tokens, "skipped": f"{self.arguments.limit:g} s were over"}
                continue
            torch.compiler.reset()
            row = (self.fused if name == "fused" else self.layers)(name, tokens)
            self.log(str(row))
            yield row


def ratios(times: dict[str, float]) -> dict[str, float]:
    """Our time by that of each peer."""
    return {
        f"{ours} to {peer}": round(times[ours] / times[peer], 3)
        for ours in times
        for peer in times
        if ours.startswith("antiphon") and not peer.startswith("antiphon")
    }


def communicators(comm: antiphon.Communicator) -> dict[str, Any]:
    """The memory that a communicator takes on each GPU: another one of NCCL's, and the one that `attach` makes."""
    before = outside()
    group = dist.new_group()
    dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=group)
    after = outside()
    antiphon.lowering.attach()
    own = torch.ops.antiphon.all_reduce(torch.ones(1 << 20, device="cuda"), dist.group.WORLD.group_name)
    assert own.eq(comm.world_size).all()
    return {"what": "MiB of a communicator", "nccl": mebibytes(after - before), "antiphon": mebibytes(outside() - after)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(TOKENS), default=list(TOKENS))
    parser.add_argument("--tokens", type=int, nargs="+", help="of each section that is run; by default each section has its own")
    parser.add_argument("--contenders", nargs="+", choices=list(COMPILERS), help="of layers; by default each section has its own")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a section starts no further row")
    parser.add_argument("--check", action="store_true", help="compile and compare without times: it fills inductor's caches")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    become_ranks()
    torch._dynamo.config.recompile_limit = 64
    with ranks() as comm:
        bench, rows = Bench(comm, arguments), [communicators(comm)]
        bench.log(str(rows[0]))
        symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        for name in arguments.sections:
            rows.extend(bench.section(name))
            if arguments.check:
                for report in {str(report): None for report in antiphon.lowering.reports()}:
                    bench.log(report)
        if comm.rank == 0 and arguments.record:
            record(comm, arguments.record, "bfloat16, µs of all layers or of a fused call", rows)
        antiphon.lowering.detach()


if __name__ == "__main__":
    main()
