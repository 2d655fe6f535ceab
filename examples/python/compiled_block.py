"""A tensor-parallel block, compiled with one argument more: its all-reduce, residual and RMS norm become one call.

    antiphon run -n 2 python examples/python/compiled_block.py
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F

import antiphon.lowering

TOKENS, HIDDEN, INNER = 8, 256, 512

if "RANK" not in os.environ:
    sys.exit(f"run it on ranks: antiphon run -n 2 python {sys.argv[0]}")


class Block(torch.nn.Module):
    """A row-parallel layer, with the residual and the norm behind it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(rank)
        self.down = torch.nn.Parameter(torch.randn(INNER, HIDDEN, generator=own) / INNER**0.5)
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = collectives.all_reduce(x @ self.down, "sum", dist.group.WORLD) + residual
        return F.rms_norm(hidden, (HIDDEN,), self.weight, 1e-6), hidden


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
antiphon.lowering.attach()

block = Block(rank)
x, residual = torch.randn(TOKENS, INNER), torch.ones(TOKENS, HIDDEN)
with torch.no_grad():
    wanted = block(x, residual)
    # Without inductor's caches, so that there is a report each time.
    found = torch.compile(block, backend="antiphon", options={"fx_graph_cache": False})(x, residual)
torch.testing.assert_close(found, wanted)

if rank == 0:
    report = antiphon.lowering.reports()[-1]
    print(report, file=sys.stderr)
    print(f"{world} ranks: as in eager, after {', '.join(report.rules)}")
antiphon.lowering.detach()
dist.destroy_process_group()
