"""A tensor-parallel MLP: `python -m antiphon run -n 2 python examples/python/tensor_parallel_mlp.py`.

The first weight is split by columns and the second by rows, so that a layer needs one all-reduce (Megatron-LM, Shoeybi
et al., 2019, section 3). The result is compared with that of the whole weights.
"""

import os

import antiphon
import torch

if "RANK" not in os.environ:
    raise SystemExit(f"this runs on several ranks: python -m antiphon run -n 2 python {__file__}")

TOKENS, HIDDEN, INNER = 16, 256, 1024

with antiphon.init() as comm, torch.no_grad():
    # Equal on all ranks; a real model would load its part only.
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN)
    up = torch.randn(HIDDEN, INNER) / HIDDEN**0.5
    down = torch.randn(INNER, HIDDEN) / INNER**0.5

    up_part = up.tensor_split(comm.world_size, dim=1)[comm.rank]
    down_part = down.tensor_split(comm.world_size, dim=0)[comm.rank]
    y = torch.nn.functional.gelu(x @ up_part) @ down_part
    comm.all_reduce(y, out=y)

    # A sum of INNER products in another order: each addition rounds to within half of 2**-23 of the sum so far, of
    # which there are INNER, and the sums of absolute values bound all of them.
    inner = torch.nn.functional.gelu(x.double() @ up.double())
    expected = inner @ down.double()
    bound = 2**-23 * INNER * (inner.abs() @ down.double().abs()).max().item()
    error = (y.double() - expected).abs().max().item()
    assert error <= bound, f"error {error} exceeds {bound}"
    if comm.rank == 0:
        print(f"{comm.world_size} ranks, {INNER // comm.world_size} of {INNER} columns each:", end=" ")
        print(f"largest error {error:.1e}, allowed {bound:.1e}")
