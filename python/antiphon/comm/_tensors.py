"""Tensors as the fused calls take them."""

import warnings
from typing import TYPE_CHECKING

from antiphon.comm._integers import QuantizationSFLayout

if TYPE_CHECKING:
    import torch

_has_warned = False


def missing(caller: str, **tensors: object) -> ValueError:
    """The error that names those of some arguments that are not there."""
    names = ", ".join(name for name, tensor in tensors.items() if tensor is None)
    return ValueError(f"{caller}: {names} must be given")


def first(caller: str, name: str, tensor: "torch.Tensor", count: int) -> "torch.Tensor":
    """The first elements: FlashInfer looks at addresses only, so that buffers may be longer."""
    have = tensor.numel()
    if have == count:
        return tensor
    if have < count:
        raise ValueError(f"{caller}: {name} has {have} elements, and {count} are needed")
    return tensor.view(-1)[:count]


def apart(x: "torch.Tensor", *outputs: "torch.Tensor | None") -> "torch.Tensor":
    """The input, or a copy if an output takes its place."""
    at = x.data_ptr()
    for output in outputs:
        if output is not None and output.data_ptr() == at:
            return x.clone()
    return x


def factor(scale: "float | torch.Tensor | None", x: "torch.Tensor") -> "float | torch.Tensor | None":
    """A scale as a number, or as one f32 beside ``x``; the GPU is not waited for."""
    if scale is None or isinstance(scale, (int, float)):
        return scale
    import torch

    if scale.is_cpu and not x.is_cpu:
        return float(scale.flatten()[0])
    if scale.dtype != torch.float32:
        scale = scale.to(torch.float32)
    return scale if scale.numel() == 1 else scale.view(-1)[:1]


def algorithm(use_oneshot: bool | None) -> str | None:
    """The name of a choice."""
    if use_oneshot is None:
        return None
    return "one-shot" if use_oneshot else "two-shot"


def fp4_scale_bytes(tokens: int, hidden: int, layout: int) -> int:
    """The bytes of a layout of scales."""
    tiles = {QuantizationSFLayout.SWIZZLED_128x4: (128, 4), QuantizationSFLayout.SWIZZLED_8x4: (8, 4)}
    rows, columns = tiles.get(layout, (1, 1))
    return -(-tokens // rows) * rows * -(-(hidden // 16) // columns) * columns


def fp4_scales(
    caller: str, scale_out: "torch.Tensor", tokens: int, hidden: int, layout: int, is_meant: bool = True
) -> "torch.Tensor":
    """Where the scales go: ``scale_out``, unless FlashInfer would not write these, and there is no room for them.

    It writes none in ``SWIZZLED_8x4``, so that scripts pass whatever they have. With ``is_meant`` false no layout is
    counted on.
    """
    global _has_warned
    import torch

    needed = fp4_scale_bytes(tokens, hidden, layout)
    have = scale_out.numel() * scale_out.element_size()
    if have >= needed or (is_meant and layout != QuantizationSFLayout.SWIZZLED_8x4):
        return scale_out
    if not _has_warned:
        _has_warned = True
        text = f"{caller}: scale_out has {have} bytes, and the scales take {needed}: it is not written"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    return torch.empty(needed, dtype=torch.uint8, device=scale_out.device)
