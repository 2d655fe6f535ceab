"""Dispatch and combine as operators of torch, for ``torch.compile(fullgraph=True)``, ``torch.export`` and activation checkpointing.

    import antiphon.moe.operators

    group = antiphon.torch.ops.register(comm)       # a name for the communicator

    rows, ids, weights, routes = torch.ops.antiphon.moe_dispatch(x, ids, weights, num_experts, capacity, group)
    y, _ = torch.ops.antiphon.moe_combine(made, routes, None, num_experts, len(x), K, group)

``moe_dispatch(Tensor x, Tensor ids, Tensor weights, int num_experts, SymInt capacity, str group) -> (Tensor, Tensor, Tensor,
Tensor)`` is :meth:`antiphon.moe.ExpertParallel.dispatch` with a capacity: ``[capacity, H]``, ``[capacity, K]``, ``[capacity, K]``,
and the routes, int32, which :meth:`moe_combine` takes. ``moe_combine(Tensor rows, Tensor routes, Tensor? weights, int num_experts,
SymInt num_tokens, int top_k, str group) -> (Tensor, Tensor)`` sums the rows of each token, ``[num_tokens, H]``, and ``weights``,
float32 ``[capacity, top_k]``, if there are any: ``[num_tokens, top_k]`` (else empty).

Gradients flow to ``x``, ``weights`` and ``rows``, and through gradients. Routes on a GPU that no dispatch made are not noticed.
"""

from typing import Any

import torch
from torch import Tensor

from antiphon._operators import Operators
from antiphon.moe._arguments import check_rows, whole
from antiphon.moe._calls import Calls, calls_of, words_size
from antiphon.torch.ops import named_communicator, named_world_size

__all__: list[str] = []

_operators = Operators()


def _calls(group: str, x: Tensor) -> Calls:
    return calls_of(named_communicator(group, x))


def _dispatch(x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, capacity: int, group: str) -> Any:
    calls = _calls(group, x)
    received, made = calls.dispatch(x, num_experts, ids, weights, None, capacity)
    return received.x, received.ids, received.weights, calls.words_of(made)


def _dispatch_fake(x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, capacity: int, group: str) -> Any:
    top_k = ids.shape[1]
    size = words_size(x.device, named_world_size(group), num_experts, x.shape[0], capacity)
    return (
        x.new_empty(capacity, x.shape[1]),
        ids.new_empty(capacity, top_k),
        weights.new_empty(capacity, top_k),
        x.new_empty(size, dtype=torch.int32),
    )


def _combine(
    rows: Tensor, routes: Tensor, weights: Tensor | None, num_experts: int, num_tokens: int, top_k: int, group: str
) -> Any:
    calls = _calls(group, rows)
    check_rows("moe_combine", rows)
    whole("moe_combine", "top_k", top_k)
    if weights is not None and list(weights.shape) != [len(rows), top_k]:
        expected, found = [len(rows), top_k], list(weights.shape)
        raise ValueError(f"moe_combine: the weights must be of shape [capacity, top_k] = {expected}, not {found}")
    core = calls.routes_of_words(routes, num_experts, num_tokens, len(rows), top_k)
    sums, weight_sums = calls.sum_along(core, num_tokens, rows, weights)
    return sums, rows.new_empty(0, dtype=torch.float32) if weight_sums is None else weight_sums


def _combine_fake(
    rows: Tensor, routes: Tensor, weights: Tensor | None, num_experts: int, num_tokens: int, top_k: int, group: str
) -> Any:
    shape = (0,) if weights is None else (num_tokens, top_k)
    return rows.new_empty(num_tokens, rows.shape[1]), rows.new_empty(shape, dtype=torch.float32)


def _dispatch_along(
    x: Tensor, routes: Tensor, num_experts: int, capacity: int, top_k: int, group: str
) -> Tensor:
    calls = _calls(group, x)
    core = calls.routes_of_words(routes, num_experts, len(x), capacity, top_k)
    received = calls.rows_along(core, capacity, x).x
    if received.is_cuda:
        # Only the GPU knows which rows arrive: those whose token is not −1.
        received.masked_fill_((routes[-capacity:] < 0).unsqueeze(1), 0)
    elif core.num_received != capacity:
        received[core.num_received :] = 0
    return received


def _dispatch_along_fake(
    x: Tensor, routes: Tensor, num_experts: int, capacity: int, top_k: int, group: str
) -> Tensor:
    return x.new_empty(capacity, x.shape[1])


_operators.define(
    "moe_dispatch(Tensor x, Tensor ids, Tensor weights, int num_experts, SymInt capacity, str group)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
    _dispatch_fake,
)
_operators.define(
    "moe_combine(Tensor rows, Tensor routes, Tensor? weights, int num_experts, SymInt num_tokens, int top_k, str group)"
    " -> (Tensor, Tensor)",
    _combine,
    _combine_fake,
)
_operators.define(
    "_moe_dispatch_along(Tensor x, Tensor routes, int num_experts, SymInt capacity, int top_k, str group) -> Tensor",
    _dispatch_along,
    _dispatch_along_fake,
)


def _save_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    x, ids, _, num_experts, _, group = inputs
    ctx.call = (num_experts, x.shape[0], ids.shape[1], group)
    ctx.save_for_backward(output[1], output[3])
    ctx.mark_non_differentiable(output[1], output[3])


def _dispatch_backward(ctx: Any, grad_x: Tensor, _ids: Any, grad_weights: Tensor, _routes: Any) -> Any:
    ids, routes = ctx.saved_tensors
    # The weight of a choice whose expert is elsewhere is a constant.
    masked = grad_weights.float().masked_fill(ids < 0, 0)
    of_x, of_weights = torch.ops.antiphon.moe_combine(grad_x, routes, masked, *ctx.call)
    return of_x, None, of_weights, None, None, None


def _save_combine(ctx: Any, inputs: Any, output: Any) -> None:
    rows, routes, weights, num_experts, _, top_k, group = inputs
    ctx.call = (num_experts, rows.shape[0], top_k, group)
    ctx.save_for_backward(routes)
    ctx.has_weights = weights is not None
    if weights is None:
        ctx.mark_non_differentiable(output[1])


def _combine_backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> Any:
    (routes,) = ctx.saved_tensors
    of_rows = torch.ops.antiphon._moe_dispatch_along(grad, routes, *ctx.call)
    of_weights = None
    if ctx.has_weights:
        # Sums of weights are those of rows of float32, which are whole vectors of four.
        top_k = grad_weights.shape[1]
        rows = torch.nn.functional.pad(grad_weights, (0, -top_k % 4))
        of_weights = torch.ops.antiphon._moe_dispatch_along(rows, routes, *ctx.call)[:, :top_k]
    return of_rows, None, of_weights, None, None, None, None


def _save_dispatch_along(ctx: Any, inputs: Any, output: Any) -> None:
    x, routes, num_experts, _, top_k, group = inputs
    ctx.call = (num_experts, x.shape[0], top_k, group)
    ctx.save_for_backward(routes)


def _dispatch_along_backward(ctx: Any, grad: Tensor) -> Any:
    (routes,) = ctx.saved_tensors
    num_experts, num_tokens, top_k, group = ctx.call
    of_x, _ = torch.ops.antiphon.moe_combine(grad, routes, None, num_experts, num_tokens, top_k, group)
    return of_x, None, None, None, None, None


_operators.differentiate("moe_dispatch", _dispatch_backward, _save_dispatch)
_operators.differentiate("moe_combine", _combine_backward, _save_combine)
_operators.differentiate("_moe_dispatch_along", _dispatch_along_backward, _save_dispatch_along)
