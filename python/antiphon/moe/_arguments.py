"""What callers pass, checked before anything is sent. Errors name the call, the argument, and what was found."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from antiphon._core import Moe
from antiphon._numbers import whole
from antiphon._operators import refuse_gradients

__all__ = [
    "Routes",
    "check_routes",
    "check_ids",
    "check_rows",
    "check_scales",
    "check_tensors",
    "experts",
    "hidden_size",
    "refuse_derivatives",
    "router_weights",
    "whole",
]


def experts(call: str, num_experts: Any, world_size: int) -> int:
    """A number of experts that are spread over ranks, as many on each."""
    number = whole(call, "num_experts", num_experts, 1, Moe.MAX_LOCAL_EXPERTS * world_size)
    if number % world_size:
        raise ValueError(f"{call}: {number} experts cannot be divided among {world_size} ranks")
    return number


def hidden_size(call: str, hidden: Any) -> int:
    """The elements of a row. Rows are whole 16 bytes: no dtype has a row of an odd number."""
    number = whole(call, "hidden", hidden, 1)
    if number % 2:
        raise ValueError(f"{call}: hidden must be even, as rows are whole 16 bytes, not {number}")
    return number


def router_weights(call: str, weights: Tensor) -> Tensor:
    """Weights of a router as calls take them, in float32. Raises ``TypeError`` for weights that are no floating-point numbers."""
    if weights.dtype == torch.float32:
        return weights
    if not weights.dtype.is_floating_point:
        raise TypeError(f"{call}: the weights must be of a floating-point dtype, not {weights.dtype}")
    return weights.float()


def refuse_derivatives(call: str, *tensors: Any) -> None:
    """Raises ``ValueError`` for a tensor that requires grad, unless grad mode is off. Megatron calls DeepEP's names where it is."""
    refuse_gradients(call, tensors, "antiphon.moe.ExpertParallel or antiphon.moe.fused_a2a, whose calls have gradients")


class Routes:
    """What the routes of all forms have in common: they are tuples, whose fields tell which rank gets which rows from which."""

    def _replace(self, **fields: Any) -> Any:
        """Raises ``ValueError``: a call along the routes would not see other fields."""
        raise ValueError(f"{type(self).__name__}: {', '.join(fields) or 'a copy'}: the routes are those of one dispatch and cannot be replaced")

    @classmethod
    def _make(cls, *fields: Any, **named: Any) -> Any:
        """Raises ``ValueError``: only a dispatch makes routes."""
        raise ValueError(f"{cls.__name__}: the routes are those of one dispatch and cannot be made from fields")


def check_tensors(call: str, tensors: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> None:
    """Raises ``TypeError`` for what is no dense tensor (of ``optional``, ``None`` is not passed), or on another device than the
    others; ``NotImplementedError`` for devices that are not served."""
    # A call that launches a kernel has few microseconds, so this looks at each tensor once.
    first = None
    for named in (tensors, optional or {}):
        for name, tensor in named.items():
            if tensor is None and named is optional:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{call}: {name} must be a torch.Tensor, not {type(tensor).__name__}")
            if tensor.layout is not torch.strided:
                raise TypeError(f"{call}: {name} must be dense, not {tensor.layout}")
            if not (tensor.is_cpu or tensor.is_cuda):
                served = "mixtures of experts are served on the CPU and on CUDA GPUs"
                raise NotImplementedError(f"{call}: {name} is on {tensor.device}; {served}")
            if first is None:
                first = tensor.device
            elif tensor.device != first:
                raise TypeError(f"{call}: tensors on {first} and {tensor.device}; all must be on one device")


def check_routes(call: str, routes: Any, expected: type, *, name: str = "routes") -> None:
    """Raises ``TypeError`` for routes that are of another form, or none. Errors name the argument ``name``."""
    if not isinstance(routes, expected):
        found = type(routes).__name__
        raise TypeError(f"{call}: the {name} must be the {expected.__name__} that a dispatch gave, not {found}")


def check_ids(call: str, ids: Tensor) -> None:
    """Raises for ids that are not int64 or int32 ``[T, K]``."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{call}: the ids must be torch.int64 or torch.int32, not {ids.dtype}")
    if ids.dim() != 2:
        raise ValueError(f"{call}: the ids must be of shape [T, K], not {list(ids.shape)}")


def check_rows(call: str, x: Tensor, hidden: int | None = None) -> None:
    """Raises for an ``x`` that is not ``[T, H]``."""
    if x.dim() == 2 and hidden in (None, x.shape[1]):
        return
    shape = "[T, H]" if hidden is None else f"[T, H] = [T, {hidden}]"
    raise ValueError(f"{call}: x must be of shape {shape}, not {list(x.shape)}")


def check_scales(call: str, x: Tensor, scales: Tensor | None) -> None:
    """Raises for scales that are not one of each group of the elements of ``x``."""
    if scales is None:
        return
    group = 512 if scales.dtype == torch.int32 else 128
    expected = [len(x), -(-x.shape[1] // group)]
    if list(scales.shape) != expected:
        raise ValueError(f"{call}: scales must be of shape [T, H / {group}] = {expected}, not {list(scales.shape)}")
