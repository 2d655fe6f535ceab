"""Tensor-parallel layers that inductor compiles: with NCCL, with its own one-shot all-reduce, and lowered by antiphon.

    python benches/lowering_vs_inductor.py --record benches/results/MACHINE/DATE-lowering.json
    python benches/lowering_vs_inductor.py --train 2048 8192

Layers have the two row-parallel products of a transformer's, behind each a sum over the ranks, the residual and a norm: bf16, hidden
4096, inner 14336. Attention itself is left out, as no contender changes it. All contenders are compiled by `torch.compile` from the
same function, run in the same processes, and are replayed as CUDA graphs; benches/README.md says how times are taken. It starts a
process for every GPU, by `antiphon run`, if it is not one of them.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import antiphon
import antiphon.lowering
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed._symmetric_memory as symmetric
from cuda_vs_torch import become_ranks, measure, ranks, record
from torch import Tensor
from torch.nn.functional import rms_norm, silu

HIDDEN, INNER, EPS = 4096, 14336, 1e-6
TOKENS = [1, 4, 16, 64, 256]
#: What inductor is told, beside nothing: its one-shot all-reduce below 128 KiB; its overlap scheduling with buckets.
INDUCTOR = {
    "nccl": {},
    "auto_select": {"_collective.auto_select": True},
    "overlap": {
        "aten_distributed_optimizations.enable_overlap_scheduling": True,
        "aten_distributed_optimizations.collective_bucketing": True,
        "reorder_for_compute_comm_overlap": True,
    },
}


class Layers:
    """The weights of this rank, and the function that everybody compiles."""

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

    def run(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        norms = iter(self.norms)
        for into, out, up, down in self.weights:
            for partial in (lambda x: (x @ into) @ out, lambda x: _gated(x @ up) @ down):
                residual = residual + collectives.all_reduce(partial(x), "sum", dist.group.WORLD)
                x = rms_norm(residual, (HIDDEN,), next(norms), EPS)
        return x, residual


def _gated(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return silu(gate) * value


def step(run: Callable[..., Any], inputs: tuple[Tensor, Tensor], leaves: list[Tensor]) -> Callable[[], object]:
    """A forward and a backward pass."""

    def both() -> object:
        x, residual = run(*inputs)
        return torch.autograd.grad((x.float().square().mean() + residual.float().square().mean()), leaves)

    return both


def check(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for result, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(result.detach(), expected, rtol=1 / 16, atol=1 / 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="decoding")
    parser.add_argument("--train", type=int, nargs="*", default=[], help="tokens of training steps")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", default=["nccl", "auto_select", "antiphon"])
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    become_ranks()
    torch._dynamo.config.recompile_limit = 64
    with ranks() as comm:
        antiphon.lowering.attach()
        if "auto_select" in arguments.contenders:
            symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        rows = []
        for tokens, trains in [(count, False) for count in arguments.tokens] + [(count, True) for count in arguments.train]:
            row = figures(comm, arguments, tokens, trains)
            rows.append(row)
            if comm.rank == 0:
                print(row, flush=True)
        if comm.rank == 0:
            for report in antiphon.lowering.reports()[-2:]:
                print(report)
            if arguments.record:
                record(comm, arguments.record, "bfloat16, µs of all layers", rows)
        antiphon.lowering.detach()


def figures(comm: antiphon.Communicator, arguments: argparse.Namespace, tokens: int, trains: bool) -> dict[str, Any]:
    layers = Layers(comm, arguments.layers)
    shared = torch.Generator("cuda").manual_seed(99)
    inputs = tuple(torch.randn(tokens, HIDDEN, generator=shared, device="cuda").to(torch.bfloat16) for _ in range(2))
    leaves = [weight for weights in layers.weights for weight in weights] + layers.norms if trains else []
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.no_grad():  # or its graph would tie the gradients to the stream that is not captured
        wanted = layers.run(*inputs)
    calls: dict[str, Callable[[], object]] = {}
    with torch.set_grad_enabled(trains):
        for name in arguments.contenders:
            random.seed(f"{name} {tokens}")  # from which auto_select draws the names of its buffers, again and again the same
            run = (
                torch.compile(layers.run, backend="antiphon", dynamic=False, options={"strict": True})
                if name == "antiphon"
                else torch.compile(layers.run, dynamic=False, options=INDUCTOR[name])
            )
            check(run(*inputs), wanted)
            calls[name] = step(run, inputs, leaves) if trains else lambda run=run: run(*inputs)
        times = measure(comm, calls, arguments.layers << 20)
    row = {"tokens": tokens, "what": "training step" if trains else "decoding", "layers": arguments.layers, **times}
    for peer in (name for name in times if name != "antiphon" and "antiphon" in times):
        row[f"ratio to {peer}"] = round(times["antiphon"] / times[peer], 3)
    return row


if __name__ == "__main__":
    main()
