"""The gradients of the operators that return a tensor, as ``torch.distributed.nn`` defines them: of the sum of all ranks' losses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import antiphon
from antiphon._operators import Operators

__all__ = ["differentiate"]

#: The communicator of a group for a call on a tensor, and the size of a group.
_Communicator = Callable[[str, Tensor], antiphon.Communicator]
_Size = Callable[[str], int]

_ops: Any = torch.ops.antiphon


def differentiate(operators: Operators, communicator: _Communicator, size: _Size) -> None:
    """Gives the operators of the table, and that of DTensor, their gradients."""
    _define_transposes(operators, communicator, size)
    _gradient(operators, "all_reduce", lambda grad, shape, group, op, site: _ops.all_reduce(grad, group, _linear("all_reduce", op)))
    _gradient(operators, "all_gather", lambda grad, shape, group, site: _ops.reduce_scatter(grad, group))
    _gradient(
        operators,
        "all_gather_v",
        lambda grad, shape, counts, group, site: _ops._all_gather_v_backward(grad, counts, shape[0] if shape else 1, group),
    )

    def of_reduce_scatter(grad: Tensor, shape: Any, group: str, op: str, site: str) -> Tensor:
        averages = _linear("reduce_scatter", op) == "avg"
        gathered: Tensor = _ops.all_gather(grad, group)
        return gathered / size(group) if averages else gathered

    _gradient(operators, "reduce_scatter", of_reduce_scatter)
    _gradient(operators, "all_to_all", lambda grad, shape, group, site: _ops.all_to_all(grad, group))
    _gradient(
        operators,
        "all_to_all_v",
        lambda grad, shape, sends, receives, group, site: _ops.all_to_all_v(grad, receives, sends, group),
    )
    _gradient(operators, "broadcast", lambda grad, shape, group, root, site: _ops._broadcast_backward(grad, group, root))
    _gradient(operators, "scatter", lambda grad, shape, group, root, site: _ops._scatter_backward(grad, group, root))
    _gradient(
        operators,
        "shard_dim_all_to_all",
        lambda grad, shape, gather_dim, shard_dim, group, site: _ops.shard_dim_all_to_all(grad, shard_dim, gather_dim, group),
    )


def _gradient(operators: Operators, name: str, gradient: Callable[..., Tensor]) -> None:
    """``gradient`` of the gradient of the result, the shape of the input, and the arguments behind the input."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.arguments = inputs
        ctx.shape = x.shape

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gradient(grad, ctx.shape, *ctx.arguments).reshape(ctx.shape), *[None] * len(ctx.arguments)

    operators.differentiate(name, backward, save)


def _linear(call: str, op: str) -> str:
    """The operator, if it has a gradient."""
    name = antiphon.ReduceOp(op).value
    if name not in ("sum", "avg"):
        raise NotImplementedError(f"{call}: {name!r} has no gradient, only 'sum' and 'avg' have: pass x.detach()")
    return name


def _define_transposes(operators: Operators, communicator: _Communicator, size: _Size) -> None:
    """The operators that only gradients call. Their results have one shape on all ranks, as the ranks' programs must be equal."""

    def to_the_root(grad: Tensor, group: str, root: int) -> Tensor:
        comm, plain = communicator(group, grad), grad.contiguous()
        total = torch.empty_like(plain) if comm.rank == root else None
        comm.reduce(plain, "sum", root, out=total)
        return torch.zeros_like(plain) if total is None else total

    def like(grad: Tensor, group: str, root: int) -> Tensor:
        return torch.empty_like(grad, memory_format=torch.contiguous_format)

    def gathered_at_the_root(grad: Tensor, group: str, root: int) -> Tensor:
        comm, rows = communicator(group, grad), rows_for_all(grad, group, root)
        comm.gather(grad.contiguous(), root, out=rows if comm.rank == root else None)
        return rows if comm.rank == root else rows.zero_()

    def rows_for_all(grad: Tensor, group: str, root: int) -> Tensor:
        return grad.new_empty(((grad.shape[0] if grad.dim() else 1) * size(group), *grad.shape[1:]))

    def own_rows(grad: Tensor, counts: list[int], rows: int, group: str) -> Tensor:
        mine = empty_rows(grad, counts, rows, group)
        communicator(group, grad).reduce_scatter_v(grad.contiguous(), counts, out=mine)
        return mine

    def empty_rows(grad: Tensor, counts: list[int], rows: int, group: str) -> Tensor:
        return grad.new_empty((rows, *grad.shape[1:]))

    operators.define("_broadcast_backward(Tensor grad, str group, int root) -> Tensor", to_the_root, like)
    operators.define("_scatter_backward(Tensor grad, str group, int root) -> Tensor", gathered_at_the_root, rows_for_all)
    schema = "_all_gather_v_backward(Tensor grad, SymInt[] counts, SymInt rows, str group) -> Tensor"
    operators.define(schema, own_rows, empty_rows)
