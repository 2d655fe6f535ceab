"""Gradients of what all ranks compute together, compared with differences."""

import concurrent.futures
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import antiphon


class World(torch.autograd.Function):
    """What all ranks together compute: a function of all ranks' inputs, which are differentiated at once.

    A rank's numerical gradient depends on what the other ranks hold, so no rank can check it alone.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[Callable[[int], Any]], list[Any]], body: Any, size: int, *inputs: Tensor) -> Any:
        ctx.run, ctx.inputs = run, [tensor.detach().requires_grad_() for tensor in inputs]
        ctx.size, width = size, len(inputs) // size

        def rank(number: int) -> Sequence[Tensor]:
            with torch.enable_grad():
                return tuple(body(number, *ctx.inputs[number * width : (number + 1) * width]))

        ctx.outputs, ctx.width = run(rank), width
        return tuple(output.detach() for outputs in ctx.outputs for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        each = len(grads) // ctx.size

        def rank(number: int) -> Sequence[Tensor]:
            mine = ctx.inputs[number * ctx.width : (number + 1) * ctx.width]
            given = grads[number * each : (number + 1) * each]
            return torch.autograd.grad(ctx.outputs[number], mine, given, retain_graph=True)

        return None, None, None, *[grad for grads in ctx.run(rank) for grad in grads]


def check_gradients(
    body: Callable[[antiphon.Communicator], Callable[..., Sequence[Tensor]]],
    inputs: list[Tensor],
    step: float = 2.0**-10,
    size: int = 2,
) -> None:
    """Compares gradients with differences of ``body(comm)(*inputs of the rank)``, a function on each of ``size`` ranks."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(size) as pool:

        def run(rank: Callable[[int], Any]) -> list[Any]:
            return [future.result(60) for future in [pool.submit(rank, number) for number in range(size)]]

        comms = run(lambda rank: antiphon.init(rank=rank, world_size=size, path=f"{folder}/world", timeout=20))
        bodies = run(lambda rank: body(comms[rank]))
        # Differences of a power of two are exact in float32, which weights have: all of this is linear in each input.
        assert torch.autograd.gradcheck(
            lambda *inputs: World.apply(run, lambda rank, *mine: bodies[rank](*mine), size, *inputs), inputs, eps=step, atol=1e-6
        )
        run(lambda rank: comms[rank].close())
