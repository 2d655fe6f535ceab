"""Fused all-reduces on GPUs beside NCCL's with one kernel behind it, and torch's path, in the same processes, all in CUDA graphs.

    python benches/fusion_vs_torch.py --record benches/results/MACHINE/DATE-cuda-fusion.json

Sum, residual and RMS norm, with and without static FP8, of bf16 tokens; benches/README.md says how times are taken. It starts
a process for every GPU, by `antiphon run`, if it is not one of them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import antiphon
import torch
import torch.distributed as dist
from cuda_vs_torch import Limited, become_ranks, blocks, calls_for, measure, ranks, write_record
from kernels import add_norm
from kernels import check as check_kernels
from nccl import Nccl
from torch.nn.functional import rms_norm

TOKENS = [1, 4, 16, 64, 256, 512, 2048]
EPS, SCALE = 1e-6, 1 / 64


class Layer:
    """The tensors between two matrix products, and what is done with them."""

    def __init__(self, comm: antiphon.Communicator, tokens: int, hidden: int) -> None:
        torch.manual_seed(comm.rank)
        shape = (tokens, hidden)
        self.comm = comm
        self.x, self.residual = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(2))
        self.weight = torch.rand(hidden, device="cuda").to(torch.bfloat16)
        self.norm, self.sum = torch.empty_like(self.x), torch.empty_like(self.x)
        self.codes = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
        self.for_torch, self.total = self.x.clone(), torch.empty_like(self.x)

    def fused(self, quantize: str | None = None) -> None:
        if quantize:
            self.comm.all_reduce_rms_norm(
                self.x, self.residual, self.weight, eps=EPS, residual_out=self.sum, quantize=quantize, scale=SCALE,
                codes=self.codes,
            )  # fmt: skip
        else:
            self.comm.all_reduce_rms_norm(self.x, self.residual, self.weight, eps=EPS, residual_out=self.sum, out=self.norm)

    def after_the_sum(self, total: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """What a model without fusion runs: three kernels, four with FP8."""
        total = total + self.residual
        norm = rms_norm(total, (total.shape[-1],), self.weight, EPS)
        return total, (norm * (1 / SCALE)).to(torch.float8_e4m3fn) if fp8 else norm

    def by_torch(self, fp8: bool = False) -> None:
        dist.all_reduce(self.for_torch)
        self.after_the_sum(self.for_torch, fp8)

    def by_nccl(self, nccl: Nccl, fp8: bool = False) -> None:
        """The all-reduce of libnccl, and one kernel for all behind it."""
        nccl.all_reduce(self.x, self.total)
        out = self.codes if fp8 else self.norm
        add_norm(self.total, self.residual, self.weight, self.sum, out, EPS, SCALE)

    def check(self, nccl: Nccl) -> None:
        """The same but for roundings: of the norm one by each, and of the codes what that makes of them."""
        summed = self.comm.all_reduce(self.x)
        for fp8 in (False, True):
            total, expected = self.after_the_sum(summed, fp8)
            for is_ours in (True, False):
                if is_ours:
                    self.fused("fp8" if fp8 else None)
                    assert self.sum.equal(total), "the sum is wrong"
                else:
                    self.by_nccl(nccl, fp8)
                    torch.testing.assert_close(self.sum, total, rtol=1 / 64, atol=1 / 16)
                found = self.codes if fp8 else self.norm
                # NCCL rounds the sum of each step of its ring; codes are that difference by the scale.
                by_nccl = 1 / 32 / SCALE if fp8 else 1 / 32
                torch.testing.assert_close(
                    found.float(), expected.float(), rtol=1 / 8 if fp8 else 1 / 64, atol=1 / 512 if is_ours else by_nccl
                )

    def contenders(self, nccl: Nccl, limited: Nccl) -> dict[str, Callable[[], object]]:
        return {
            "antiphon norm": self.fused,
            "nccl norm": lambda: self.by_nccl(nccl),
            "nccl limited norm": lambda: self.by_nccl(limited),
            "torch.distributed norm": self.by_torch,
            "antiphon fp8": lambda: self.fused("fp8"),
            "nccl fp8": lambda: self.by_nccl(nccl, fp8=True),
            "nccl limited fp8": lambda: self.by_nccl(limited, fp8=True),
            "torch.distributed fp8": lambda: self.by_torch(fp8=True),
            "antiphon sum": lambda: self.comm.all_reduce(self.x, out=self.sum),
            "nccl sum": lambda: nccl.all_reduce(self.x, self.total),
            "nccl limited sum": lambda: limited.all_reduce(self.x, self.total),
            "torch.distributed sum": lambda: dist.all_reduce(self.for_torch),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    become_ranks()
    with ranks() as comm:
        check_kernels()
        rows, nccl, limits = [], Nccl(comm), Limited(comm)
        for tokens in arguments.tokens:
            layer = Layer(comm, tokens, arguments.hidden)
            layer.check(nccl)
            limited = limits.to(blocks({"ours": layer.fused})["ours"])
            contenders = layer.contenders(nccl, limited)
            times = measure(comm, contenders, calls_for(2 * tokens * arguments.hidden))
            row: dict[str, Any] = {"tokens": tokens, "hidden": arguments.hidden, **times}
            for what in ("norm", "fp8", "sum"):
                row[f"ratio {what}"] = round(times[f"antiphon {what}"] / times[f"nccl {what}"], 3)
            row["blocks"] = blocks(contenders)
            rows.append(row)
            if comm.rank == 0:
                print(row, flush=True)
        if comm.rank == 0 and arguments.record:
            write_record(comm, arguments.record, "bfloat16, µs", rows)


if __name__ == "__main__":
    main()
