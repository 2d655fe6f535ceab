"""Tensor-parallel transformer blocks: `python -m antiphon run -n 2 python examples/python/transformer_block.py`.

Heads and inner columns are split over the ranks, so that attention and MLP each end with an all-reduce, whose sum is added to
the residual and normed for what comes next. The blocks run twice: with all of that in one call, and step by step. At every
all-reduce both are compared. `--device cuda` runs on GPUs, where there is one for each rank.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import antiphon
import torch
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention

if "RANK" not in os.environ:
    raise SystemExit(f"this runs on several ranks: python -m antiphon run -n 2 python {__file__}")

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--tokens", type=int, default=16)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--blocks", type=int, default=2)
arguments = parser.parse_args()

TOKENS, HIDDEN, INNER, HEADS = arguments.tokens, arguments.hidden, 4 * arguments.hidden, 8
EPS, ROUNDS = 1e-6, 5

# What follows a matrix product: the sum over the ranks with the residual, and its norm.
Join = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Block:
    """The part of the weights that is this rank's; equal seeds give all ranks the same whole."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        def part(rows: int, columns: int, dim: int) -> torch.Tensor:
            return (torch.randn(rows, columns) / rows**0.5).tensor_split(world_size, dim)[rank].to(device)

        self.qkv = [part(HIDDEN, HIDDEN, 1) for _ in range(3)]
        self.out, self.up, self.down = part(HIDDEN, HIDDEN, 0), part(HIDDEN, INNER, 1), part(INNER, HIDDEN, 0)
        self.weights = [torch.rand(HIDDEN).to(device) + 0.5 for _ in range(2)]

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's heads."""
        q, k, v = ((x @ part).view(TOKENS, -1, HIDDEN // HEADS).transpose(0, 1) for part in self.qkv)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(0, 1).reshape(TOKENS, -1) @ self.out

    def run(self, residual: torch.Tensor, x: torch.Tensor, join: Join) -> tuple[torch.Tensor, torch.Tensor]:
        residual, x = join(self.attention(x), residual, self.weights[0])
        return join(gelu(x @ self.up) @ self.down, residual, self.weights[1])


with antiphon.init() as comm, torch.no_grad():
    assert HEADS % comm.world_size == 0, f"{HEADS} heads are split over the ranks"
    device = torch.device(arguments.device, comm.rank) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    blocks = [Block(comm.rank, comm.world_size, device) for _ in range(arguments.blocks)]
    begin = torch.randn(TOKENS, HIDDEN).to(device)

    def fused(partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, norm = torch.empty_like(partial), torch.empty_like(partial)
        comm.all_reduce_rms_norm(partial, residual, weight, eps=EPS, residual_out=total, out=norm)
        return total, norm

    def unfused(partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        comm.all_reduce(partial, out=partial)
        total = partial + residual
        return total, rms_norm(total, (HIDDEN,), weight, EPS)

    # The sums are equal. A norm is rounded a few times, and its mean of squares once for every addend, of which the root
    # takes half.
    bound, worst = 2**-23 * (HIDDEN / 2 + 4), 0.0

    def both(partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        global worst
        total, norm = fused(partial, residual, weight)
        expected_total, expected = unfused(partial, residual, weight)
        assert total.equal(expected_total), "the sums differ"
        worst = max(worst, ((norm - expected).abs() / expected.abs().clamp(min=1e-30)).max().item())
        assert worst <= bound, f"the norms differ by {worst}, more than {bound}"
        return total, norm

    def model(join: Join) -> torch.Tensor:
        residual, x = begin, rms_norm(begin, (HIDDEN,), eps=EPS)
        for block in blocks:
            residual, x = block.run(residual, x, join)
        return x

    def milliseconds(join: Join) -> float:
        times = []
        for _ in range(ROUNDS + 1):  # of which the first sets things up
            comm.barrier()
            start = time.perf_counter()
            model(join)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() - start) * 1e3)
        return max(comm.exchange_objects(statistics.median(times[1:])))

    model(both)
    comm.check()
    one_call, three = milliseconds(fused), milliseconds(unfused)
    if comm.rank == 0:
        print(f"{comm.world_size} ranks on {device.type}, {len(blocks)} blocks of {TOKENS} × {HIDDEN}:", end=" ")
        print(f"sums equal, norms within {worst:.1e}, allowed {bound:.1e};", end=" ")
        print(f"{one_call:.2f} ms fused, {three:.2f} ms unfused")
