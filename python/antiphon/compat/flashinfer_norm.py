"""What scripts for ``flashinfer.comm`` take from ``flashinfer.norm``, where that is not installed: norms to compare with,
after FlashInfer 0.6.18, of torch's own operations, in float32 inside."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "rmsnorm"]


def rmsnorm(
    input: "torch.Tensor",
    weight: "torch.Tensor",
    eps: float = 1e-6,
    out: "torch.Tensor | None" = None,
    enable_pdl: bool | None = None,
) -> "torch.Tensor":
    """The rows of ``input`` divided by the root of their mean square, times ``weight``; into ``out`` if that is given.

    ``enable_pdl`` has no effect, here and below.
    """
    return _norm(input, weight, eps, 0.0, out)


def gemma_rmsnorm(
    input: "torch.Tensor",
    weight: "torch.Tensor",
    eps: float = 1e-6,
    out: "torch.Tensor | None" = None,
    enable_pdl: bool | None = None,
) -> "torch.Tensor":
    """:func:`rmsnorm` times ``1 + weight``."""
    return _norm(input, weight, eps, 1.0, out)


def fused_add_rmsnorm(
    input: "torch.Tensor",
    residual: "torch.Tensor",
    weight: "torch.Tensor",
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Adds ``input`` to ``residual``, in its place, and puts the norm of that into ``input``."""
    _norm(residual.add_(input), weight, eps, 0.0, input)


def gemma_fused_add_rmsnorm(
    input: "torch.Tensor",
    residual: "torch.Tensor",
    weight: "torch.Tensor",
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """:func:`fused_add_rmsnorm` times ``1 + weight``."""
    _norm(residual.add_(input), weight, eps, 1.0, input)


def _norm(
    x: "torch.Tensor", weight: "torch.Tensor", eps: float, weight_bias: float, out: "torch.Tensor | None"
) -> "torch.Tensor":
    import torch

    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight_bias + weight.float())
    return normed.to(x.dtype) if out is None else out.copy_(normed)
