"""Preparing torch's tensors and operators for the communicator."""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from antiphon._types import OpName

#: The type is Any, because torch's types distinguish the members of this enum from the operators that hold one.
SUM: Any = dist.ReduceOp(dist.ReduceOp.SUM)
#: The names by the operators' numbers, as comparing operators takes microseconds.
PREMUL_SUM = int(dist.ReduceOp.PREMUL_SUM)  # type: ignore[call-overload]
_NAMES: list[tuple[Any, OpName]] = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
]
OPS = {int(op): name for op, name in _NAMES}
#: The dtypes that are reduced without another view.
NUMERIC = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
#: The operators on booleans, with NCCL's meaning.
BOOL_OPS = {"sum": "max", "max": "max", "prod": "min", "min": "min", "band": "band", "bor": "bor", "bxor": "bxor"}


def unsupported(what: str, instead: str = "") -> NotImplementedError:
    return NotImplementedError(f"antiphon: {what} is not supported" + (instead and f": {instead}"))


def is_plain(tensor: Tensor) -> bool:
    """Whether the values lie in memory one after the other."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


class Copies(list[tuple[Tensor, Tensor]]):
    """Outputs that are not contiguous, each with the contiguous tensor that stands in for it."""

    def output(self, tensor: Tensor) -> Tensor:
        """The tensor to write in place of ``tensor``."""
        if is_plain(tensor):
            return tensor
        return self.stand_in(tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format))

    def in_out(self, tensor: Tensor) -> Tensor:
        """The tensors to read and to write in place of ``tensor``."""
        return tensor if is_plain(tensor) else self.stand_in(tensor, contiguous(tensor))

    def outputs(self, tensors: Sequence[Tensor]) -> Tensor:
        """One flat tensor to write in place of several."""
        sizes = [tensor.numel() for tensor in tensors]
        flat = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
        for tensor, part in zip(tensors, torch.split(flat, sizes)):
            self.stand_in(tensor, part.view(tensor.shape))
        return flat

    def stand_in(self, tensor: Tensor, substitute: Tensor) -> Tensor:
        self.append((tensor, substitute))
        return substitute

    def finish(self) -> None:
        """Copies the results to the outputs that were asked for."""
        for tensor, substitute in self:
            tensor.detach().copy_(substitute)
        self.clear()


#: The calls whose first tensor is written in place: a leaf has no gradient to lose there.
_IN_PLACE = {"all_reduce", "broadcast", "recv", "reduce"}


def warn_of_lost_gradients(what: str, *tensors: Tensor) -> None:
    """Warns, at the caller's line, if a call would lose the gradient of a tensor: it tracks none."""
    if not any(tensor.requires_grad and not (tensor.is_leaf and what in _IN_PLACE) for tensor in tensors) or not torch.is_grad_enabled():
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("antiphon", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{what} of a tensor that requires grad tracks no gradient: use torch.ops.antiphon (antiphon.torch.ops),"
        " torch.distributed.nn or the functional collectives, or call it under torch.no_grad()",
        stacklevel=level,
    )


def untracked(tensor: Any) -> Any:
    """What a call works on in place of a tensor that requires grad: the same memory, outside of autograd."""
    return tensor.detach() if isinstance(tensor, Tensor) and tensor.requires_grad else tensor


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy."""
    return tensor if is_plain(tensor) else tensor.detach().contiguous().resolve_conj().resolve_neg()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def check(what: str, *tensors: Tensor) -> None:
    """Refuses tensors that are not of this backend, or not of one type on one device; warns of those whose gradient is lost."""
    for tensor in tensors:
        served = tensor.is_cpu or tensor.is_cuda
        if not served or tensor.layout is not torch.strided:
            kind = f"{tensor.layout} tensor" if served else f"tensor on device {tensor.device}"
            raise unsupported(f"{what} of a {kind}", "pass dense tensors on the CPU or on CUDA")
        if tensor.device != tensors[0].device:
            raise ValueError(f"{what}: tensors on {tensors[0].device} and on {tensor.device} in one call")
        if tensor.dtype is not tensors[0].dtype:
            raise TypeError(f"{what}: tensors of {tensors[0].dtype} and of {tensor.dtype} in one call")
    warn_of_lost_gradients(what, *tensors)


def only(what: str, items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise unsupported(f"{what} of {len(items)} tensors of one rank", "pass one")
    return items[0]


def reduction(what: str, op: Any, *tensors: Tensor) -> tuple[str, Callable[[Tensor], Tensor], Any]:
    """Our name of a reduction, how to view a plain tensor to reduce it, and the factor of inputs, or ``None``."""
    number = int(op.op)
    name = "sum" if number == PREMUL_SUM else OPS.get(number)
    if name is None:
        raise unsupported(f"{what} with {op_name(op)}")
    check(what, *tensors)
    dtype, factor = tensors[0].dtype, None
    if number == PREMUL_SUM:
        factor = op.__getstate__()[1]  # torch has no other accessor
        if not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(f"{what}: PREMUL_SUM multiplies {dtype} by a factor, which needs floating point")
    if dtype is torch.bool:
        if name not in BOOL_OPS:
            raise TypeError(f"{what}: truth values have no {op_name(op)}")
        return BOOL_OPS[name], as_bytes, factor
    if name in ("band", "bor", "bxor") and dtype not in NUMERIC:
        if dtype.is_floating_point or dtype.is_complex:
            raise TypeError(f"{what}: {op_name(op)} combines the bits of integers, and not of {dtype}")
        return name, as_bytes, factor  # of whatever length
    return name, torch.view_as_real if dtype.is_complex and name in ("sum", "avg") else torch.detach, factor


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def op_name(op: Any) -> str:
    return str(op.op).replace("RedOpType", "ReduceOp")


def scaled(tensor: Tensor, factor: Any) -> Tensor:
    """What to read: a contiguous tensor, multiplied by the factor of PREMUL_SUM if there is one."""
    return contiguous(tensor) if factor is None else contiguous((tensor.detach() * factor).to(tensor.dtype))


def counts(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many elements go to, or come from, each rank, by the rows that do."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"all_to_all_single: {rows} rows cannot be divided among {size} ranks")
        splits = [rows // size] * size
    elif len(splits) != size or sum(splits) != rows:
        raise ValueError(f"all_to_all_single: splits {list(splits)} of {rows} rows for {size} ranks")
    return [split * tensor.numel() // max(rows, 1) for split in splits]
