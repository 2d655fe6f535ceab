"""Expert-parallel training: `python -m antiphon run -n 2 python examples/python/moe_training.py [cuda]`, on the host or on GPUs.

Two layers of experts, of which each token chooses two. Every rank has its part of the tokens and of the experts; what is not an
expert is on all ranks. The loss and every gradient are compared with those of one process that has everything.
"""

import os
import sys

import antiphon
import torch
from antiphon.moe import ExpertParallel
from torch import Tensor

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 48, 32, 64, 8, 2, 2


class Layer(torch.nn.Module):
    """A layer with the experts of one rank, or all of them."""

    def __init__(self, parallel: ExpertParallel | None, first: int, count: int) -> None:
        super().__init__()
        self.parallel = parallel
        self.router = torch.nn.Parameter(torch.randn(HIDDEN, EXPERTS) / HIDDEN**0.5)
        up, down = torch.randn(EXPERTS, HIDDEN, INNER) / HIDDEN**0.5, torch.randn(EXPERTS, INNER, HIDDEN) / INNER**0.5
        self.up = torch.nn.Parameter(up[first : first + count].clone())
        self.down = torch.nn.Parameter(down[first : first + count].clone())

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.router).softmax(1).topk(TOP_K)
        if self.parallel is None:
            return x + self.experts(x, ids, weights)
        received = self.parallel.dispatch(x, ids, weights)
        y = self.experts(received.x, received.ids, received.weights)
        return x + self.parallel.combine(y, received.routes)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, choice = (ids == expert).nonzero(as_tuple=True)
            made = torch.nn.functional.gelu(x[rows] @ up) @ down
            y = y.index_add(0, rows, made * weights[rows, choice, None])
        return y


def model(parallel: ExpertParallel | None, first: int, count: int) -> torch.nn.Sequential:
    torch.manual_seed(0)  # the same weights, whoever keeps which
    return torch.nn.Sequential(*(Layer(parallel, first, count) for _ in range(LAYERS)))


def loss_of(module: torch.nn.Module, x: Tensor) -> Tensor:
    """A part of the loss: the sum over some of the tokens, of a mean over all."""
    loss = (module(x) - x.roll(1, dims=1)).square().sum() / (TOKENS * HIDDEN)
    loss.backward()
    return loss.detach()


if "RANK" not in os.environ:
    raise SystemExit(f"this runs on several ranks: python -m antiphon run -n 2 python {__file__}")
with antiphon.init() as comm:
    rank, world_size = comm.rank, comm.world_size
    local = EXPERTS // world_size
    if sys.argv[1:] == ["cuda"]:
        torch.set_default_device(rank)
        torch.cuda.set_device(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), device="cpu").to(torch.get_default_device())
    together = model(ExpertParallel(comm, EXPERTS, HIDDEN), rank * local, local)
    alone = model(None, 0, EXPERTS)
    loss = comm.all_reduce(loss_of(together, x.tensor_split(world_size)[rank]))
    torch.testing.assert_close(loss, loss_of(alone, x), rtol=1e-5, atol=0)
    largest, count = 0.0, 0
    for (name, mine), whole in zip(together.named_parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None and whole.grad is not None
        if name.endswith("router"):  # of this rank's tokens; an expert has seen those of all ranks
            grad, expected = comm.all_reduce(mine.grad), whole.grad
        else:
            grad, expected = mine.grad, whole.grad[rank * local : (rank + 1) * local]
        # Sums of some tens of products in another order.
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
        largest, count = max(largest, (grad - expected).abs().max().item()), count + 1
    if rank == 0:
        print(f"{world_size} ranks, {local} of {EXPERTS} experts each, loss {loss:.4f}:", end=" ")
        print(f"{count} gradients within {largest:.1e} of one process's")
