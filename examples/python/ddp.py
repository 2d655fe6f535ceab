"""Data-parallel training through torch's DDP: `python -m antiphon run -n 2 python examples/python/ddp.py`.

Every rank trains on its part of each batch. The result is compared with one process that trains on all of it.
"""

import os

import antiphon.torch  # registers the backend
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 20, 64


def train(module: torch.nn.Module, rank: int, world_size: int) -> float:
    """The last loss on this rank's part of the batches."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 8, generator=generator)
        y = x.sin().sum(1, keepdim=True)
        loss = torch.nn.functional.mse_loss(module(x[rank::world_size]), y[rank::world_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


if "RANK" not in os.environ:
    raise SystemExit(f"this runs on several ranks: python -m antiphon run -n 2 python {__file__}")
dist.init_process_group("antiphon")
rank, world_size = dist.get_rank(), dist.get_world_size()
assert BATCH % world_size == 0, f"{world_size} ranks cannot share {BATCH} rows evenly"
together, alone = DistributedDataParallel(model()), model()
train(together, rank, world_size)
loss = train(alone, 0, 1)
for mine, expected in zip(together.parameters(), alone.parameters()):
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
if rank == 0:
    difference = max((a - b).abs().max().item() for a, b in zip(together.parameters(), alone.parameters()))
    print(f"{world_size} ranks, {STEPS} steps, loss {loss:.4f}: weights within {difference:.1e} of training alone")
dist.destroy_process_group()
