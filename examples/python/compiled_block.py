"""A feed-forward block that DTensor divides among ranks, compiled with one argument more: its all-reduce, the residual and the RMS
norm become one call. The block itself knows nothing of ranks.

    antiphon run -n 2 python examples/python/compiled_block.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import antiphon.lowering

TOKENS, HIDDEN, INNER = 8, 256, 512

if "RANK" not in os.environ:
    sys.exit(f"run it on ranks: antiphon run -n 2 python {sys.argv[0]}")


class Block(nn.Module):
    """Two products between two norms, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(HIDDEN, eps=1e-6), nn.RMSNorm(HIDDEN, eps=1e-6)
        self.up, self.down = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.down(nn.functional.silu(self.up(self.before(x)))))  # type: ignore[no-any-return]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
antiphon.lowering.attach(mesh.get_group())

torch.manual_seed(7)  # equal weights and inputs on all ranks
block = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
x = torch.randn(TOKENS, HIDDEN)
with torch.no_grad():
    wanted = block(x)
    # Without inductor's caches, so that there is a report each time.
    found = torch.compile(block, backend="antiphon", options={"fx_graph_cache": False})(x)
torch.testing.assert_close(found, wanted)

if rank == 0:
    reports = antiphon.lowering.reports()  # none of a single rank, which has no collectives
    print(*reports, sep="\n")
    rules = [rule for report in reports for rule in report.rules]
    print(f"{world} ranks: as in eager, after {', '.join(rules) or 'no rewrite'}")
antiphon.lowering.detach(mesh.get_group())
dist.destroy_process_group()
