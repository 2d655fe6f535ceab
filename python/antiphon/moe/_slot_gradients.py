"""Gradients of the calls to and from slots.

A combine's gradient goes to the experts by a dispatch by token, which takes the weights along. Both forms order an expert's rows by
source rank and token, so a received row's slot of an expert is the number of rows before it that chose the expert.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from antiphon.moe._calls import Calls
from antiphon.moe._slots import SlotCalls, SlotRoutes

__all__ = ["CombineFromSlots", "DispatchToSlots", "needs_gradient"]


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a call on these tensors is part of a graph of gradients."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class DispatchToSlots(torch.autograd.Function):
    """A dispatch of bfloat16 rows: a token's gradient is the sum of its slots', which a combine makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, calls: SlotCalls, plain: list[Any], call: tuple[Any, ...]) -> Tensor:
        received, _ = calls.dispatch(x, ids, *call)
        plain.append(received)
        ctx.calls, ctx.routes, ctx.ids = calls, received.routes, ids
        return received.x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> Any:
        ids = ctx.ids
        # An expert that a token names twice has one slot for it.
        is_repeated = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril(-1).any(2)
        ids = ids.masked_fill(is_repeated, -1)
        ones = torch.ones_like(ids, dtype=torch.float32)
        return ctx.calls.combine(grad_rows, ids, ones, ctx.routes)[0], None, None, None, None


class _Slots(NamedTuple):
    """The slots that the rows of a dispatch by token have."""

    rows: Tensor
    """int64 ``[L, R * M]``: the row of each slot; ``N`` for one that is not filled."""
    places: Tensor
    """int64 ``[N, K]``: the slot of each choice, ``expert * R * M + slot``; anything where the choice is elsewhere."""


def _slots(ids: Tensor, local: int, num_slots: int) -> _Slots:
    """The slots of rows with these ids of this rank's experts, ``[N, K]``, −1 where the choice is elsewhere."""
    count = len(ids)
    expert = ids.masked_fill(ids < 0, local).long()
    chose = torch.zeros(count, local + 1, dtype=torch.int64, device=ids.device).scatter_(1, expert, 1)
    slot = chose.cumsum(0) - 1
    rows = torch.full((local, num_slots + 1), count, device=ids.device)
    numbers = torch.arange(count, device=ids.device).expand(local, count)
    is_filled = chose.t()[:local].bool()
    rows.scatter_(1, slot.t()[:local].masked_fill(~is_filled, num_slots), numbers)
    return _Slots(rows[:, :num_slots].contiguous(), expert * num_slots + slot.gather(1, expert))


class CombineFromSlots(torch.autograd.Function):
    """A combine: the gradient of a slot is its token's times the weight; that of a weight, the product of the token's gradient and
    the slot's row, which the expert's rank computes and sends back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        ids: Tensor,
        slots: SlotCalls,
        by_token: Calls,
        routes: SlotRoutes,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, ids)
        ctx.by_token, ctx.routes = by_token, routes
        return slots.combine(rows, ids, weights, routes)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weights, ids = ctx.saved_tensors
        calls, routes = ctx.by_token, ctx.routes
        local, num_slots, hidden = rows.shape
        # As many rows as slots are enough, and nothing waits for the number of those that come.
        received, along = calls.dispatch(grad.contiguous(), routes.num_experts, ids, weights, None, num_slots)
        slots = _slots(received.ids, local, num_slots)
        gradient = torch.cat([received.x, received.x.new_zeros(1, hidden)])[slots.rows].float()
        expert = received.ids.masked_fill(received.ids < 0, local).long()
        weight = torch.zeros(num_slots + 1, local + 1, device=grad.device)
        weight[:-1].scatter_add_(1, expert, received.weights.masked_fill(received.ids < 0, 0))
        of_slot = weight.t()[:local].gather(1, slots.rows).unsqueeze(2)
        products = (gradient * rows.float()).sum(2)
        # The place behind the last slot is that of no choice.
        products = torch.cat([products.flatten(), products.new_zeros(1)])
        places = slots.places.masked_fill(received.ids < 0, local * num_slots)
        _, grad_weights = calls.combine(grad.new_zeros(num_slots, 8), along, products[places])
        return (gradient * of_slot).to(rows.dtype), grad_weights, None, None, None, None
