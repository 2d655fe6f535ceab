"""Preparing the tensors of fused calls."""

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from antiphon.comm._integers import QuantizationSFLayout

if TYPE_CHECKING:
    import torch

_has_warned = False


def missing(caller: str, **tensors: object) -> ValueError:
    """The error that names the missing ones of some arguments."""
    names = ", ".join(name for name, tensor in tensors.items() if tensor is None)
    return ValueError(f"{caller}: {names} must be given")


def refusing_as(caller: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets a function's refusals, by :meth:`antiphon.Communicator.all_reduce_fused` or a function that calls it, name
    ``caller``, which users called."""

    def decorate(call: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(call)
        def named(*arguments: object) -> None:
            try:
                call(*arguments)
            except (TypeError, ValueError) as error:
                text = str(error)
                if type(error) not in (TypeError, ValueError) or text.startswith(f"{caller}: "):
                    raise
                text = text.removeprefix("all_reduce_fused: ").removeprefix("trtllm_allreduce_fusion: ")
                raise type(error)(f"{caller}: {text}") from error

        return named

    return decorate


def dtype_of(caller: str, dtype: "torch.dtype | str") -> "torch.dtype":
    """A dtype of torch, or the one of this name, such as ``"bfloat16"``."""
    import torch

    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{caller}: dtype must be a torch.dtype or its name, not {dtype!r}")
    return found


def apart(x: "torch.Tensor", *outputs: "torch.Tensor | None") -> "torch.Tensor":
    """The input, or a copy if an output takes its place."""
    at = x.data_ptr()
    for output in outputs:
        if output is not None and output.data_ptr() == at:
            return x.clone()
    return x


def parted(scale: "float | torch.Tensor | None") -> "tuple[torch.Tensor | None, float | None]":
    """A scale as a tensor, or else a number: schemas of operators have no unions."""
    if scale is None:
        return None, None
    import torch

    return (scale, None) if isinstance(scale, torch.Tensor) else (None, float(scale))


def factor(tensor: "torch.Tensor | None", number: float | None, x: "torch.Tensor") -> "float | torch.Tensor | None":
    """A scale as a number, or as one f32 beside ``x``; the GPU is not waited for."""
    if tensor is None:
        return number
    import torch

    if tensor.is_cpu and not x.is_cpu:
        return float(tensor.flatten()[0])
    if tensor.dtype != torch.float32:
        tensor = tensor.to(torch.float32)
    return tensor if tensor.numel() == 1 else tensor.view(-1)[:1]


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
