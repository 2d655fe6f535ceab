"""Attention that runs data parallel, an MLP that runs tensor parallel: `python -m antiphon run -n 4 python examples/python/mixed_tp_dp.py`.

Ranks are in groups of two (of one, if their number is odd), each with tokens of its own, of which some groups have more. A rank of a
group has half of the attention's heads, so that the group's outputs must be summed before all tokens go to the MLP, which is cut
among all ranks: all-reduce + all-gather. On the way back the MLP's outputs are summed over all ranks, and each group gets its
tokens: reduce-scatter + all-reduce. Each is one call. Where there is no group of two, or one group alone, half of it is left.
"""

import os

import torch
import torch.distributed as dist

import antiphon.torch
from antiphon.comm import MixedCommHandler, MixedCommOp, run_mixed_comm

if "RANK" not in os.environ:
    raise SystemExit(f"this runs on several ranks: python -m antiphon run -n 2 python {__file__}, or on 4 or 6")

HIDDEN, INNER, ROWS = 64, 256, 8

dist.init_process_group("antiphon")
rank, world = dist.get_rank(), dist.get_world_size()
tp = 2 if world % 2 == 0 else 1
dp = world // tp
group, lane = rank // tp, rank % tp


def silu_mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x @ up) @ down


# Equal on all ranks; a real model would load its part only.
torch.manual_seed(0)
rows = [ROWS + 3 * each if 1 < tp < world else ROWS for each in range(dp)]  # fused calls take uneven batches
tokens = [torch.randn(count, HIDDEN) for count in rows]
heads = torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5  # Stands for attention: only the placement of the heads matters here.
up, down = torch.randn(HIDDEN, INNER) / HIDDEN**0.5, torch.randn(INNER, HIDDEN) / INNER**0.5

with torch.no_grad():
    attention = tokens[group].tensor_split(tp, 1)[lane] @ heads.tensor_split(tp, 0)[lane]
    up_part, down_part = up.tensor_split(world, 1)[rank], down.tensor_split(world, 0)[rank]
    if world == 1:
        output, names = silu_mlp(attention, up_part, down_part), ["nothing", "nothing"]
    else:
        handler = MixedCommHandler(rank, world, rank, world, 0, 1, tp, dp, None, None, torch.float32, "cpu")
        ops = handler.valid_op_list
        gather, scatter = ops[0], ops[-1]
        batches = rows if len(set(rows)) > 1 else None
        everybody = run_mixed_comm(gather, handler, attention, local_batches=batches)
        partial = silu_mlp(everybody, up_part, down_part)
        output = run_mixed_comm(scatter, handler, partial, local_batches=batches)
        handler.shutdown()
        names = [MixedCommOp(op).name for op in (gather, scatter)]

    x, weights = tokens[group].double(), [weight.double() for weight in (heads, up, down)]
    expected = silu_mlp(x @ weights[0], *weights[1:])
    # A sum has INNER products. Each addition rounds to within half of 2**-23 of the sum so far, which these bound.
    bound = 2**-23 * INNER * (x.abs() @ weights[0].abs() @ weights[1].abs() @ weights[2].abs()).max().item()
    error = (output.double() - expected).abs().max().item()
    assert error <= bound, f"error {error} exceeds {bound}"
if rank == 0:
    print(f"{dp} groups of {tp}, {sum(rows)} tokens: {names[0]} and {names[1]} fused,", end=" ")
    print(f"largest error {error:.1e}, allowed {bound:.1e}")
dist.destroy_process_group()
