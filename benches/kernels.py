"""What programs without fused calls run around their collectives, as one kernel each: the peers' part of the benchmarks."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(total, residual, weight, residual_out, out, eps, scale, hidden: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, block)
    mask = at < hidden
    x = tl.load(total + row + at, mask=mask, other=0).to(tl.float32)
    x += tl.load(residual + row + at, mask=mask, other=0).to(tl.float32)
    tl.store(residual_out + row + at, x.to(residual_out.dtype.element_ty), mask=mask)
    x *= tl.rsqrt(tl.sum(x * x) / hidden + eps)
    x *= tl.load(weight + at, mask=mask, other=0).to(tl.float32)
    if out.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x / scale, -448.0, 448.0)
    tl.store(out + row + at, x.to(out.dtype.element_ty), mask=mask)


def add_norm(total: Tensor, residual: Tensor, weight: Tensor, residual_out: Tensor, out: Tensor, eps: float, scale: float = 1) -> None:
    """``residual_out = total + residual``, and its RMS norm to ``out``, over ``scale`` if that is float8_e4m3fn. A block for each row."""
    rows, hidden = total.shape
    block = triton.next_power_of_2(hidden)
    _add_norm[(rows,)](total, residual, weight, residual_out, out, eps, scale, hidden, block, num_warps=8)


@triton.jit
def _sum_rows(rows, places, out, hidden: tl.constexpr, ranks: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    mask = at < hidden
    total = tl.zeros([block], tl.float32)
    for rank in tl.static_range(ranks):
        place = tl.load(places + token * ranks + rank).to(tl.int64)
        total += tl.load(rows + place * hidden + at, mask=mask & (place >= 0), other=0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * hidden + at, total.to(out.dtype.element_ty), mask=mask)


def sum_rows(rows: Tensor, places: Tensor, out: Tensor) -> None:
    """``out[t]`` is the sum, in float32, of the rows that ``places[t]`` (int32 [T, R], −1 is none) names, rounded once."""
    (tokens, hidden), ranks, block = out.shape, places.shape[1], 1024
    _sum_rows[(tokens, triton.cdiv(hidden, block))](rows, places, out, hidden, ranks, block)


def check() -> None:
    """Compares the kernels with torch's operations."""
    x, residual, weight = (torch.randn(size, 7168, device="cuda", dtype=torch.bfloat16) for size in (5, 5, 1))
    total, out = torch.empty_like(x), torch.empty_like(x)
    add_norm(x, residual, weight[0], total, out, 1e-6)
    torch.testing.assert_close(total, x + residual)
    expected = torch.nn.functional.rms_norm(x.float() + residual.float(), (7168,), weight[0].float(), 1e-6)
    torch.testing.assert_close(out.float(), expected, rtol=1 / 128, atol=1e-3)
    places = torch.tensor([[0, 4], [-1, 3], [2, -1], [-1, -1], [1, 1]], device="cuda", dtype=torch.int32)
    sum_rows(x, places, out)
    padded = torch.cat([x.float(), x.new_zeros(1, 7168).float()])
    torch.testing.assert_close(out, padded[places.long()].sum(1).bfloat16())
