"""Sums of sparse tensors."""

import torch
from torch import Tensor

import antiphon
from antiphon.torch.tensors import Copies, only, op_name, unsupported

#: The name of a method of the communicator, its arguments, and ``out``.
Call = tuple[str, tuple[object, ...], Tensor | None]


class SparseSum(Copies):
    """The sum of all ranks' sparse tensors (COO, on the CPU): their elements are gathered, and added in rank order.

    Ranks have different numbers of elements, so that they exchange those first, which waits for all ranks.
    """

    def __init__(self, comm: antiphon.Communicator, tensors: list[Tensor], op: object) -> None:
        super().__init__()
        self._tensor: Tensor = only("all_reduce", tensors)
        tensor = self._tensor
        if int(op.op) != int(torch.distributed.ReduceOp.SUM):  # type: ignore[attr-defined,call-overload]
            raise unsupported(f"all_reduce of sparse tensors with {op_name(op)}", "use SUM")
        if tensor.layout is not torch.sparse_coo or not tensor.is_cpu:
            kind = f"a {tensor.layout} tensor on {tensor.device}"
            raise unsupported(f"all_reduce of {kind}", "pass dense tensors, or sparse_coo on the CPU")
        mine = tensor.detach().coalesce()
        indices, values = mine.indices(), mine.values()
        shapes = comm.exchange_objects((tuple(tensor.shape), tensor.dtype, indices.shape[0], values.shape[0]))
        for rank, shape in enumerate(shapes):
            if shape[:3] != shapes[comm.rank][:3]:
                text = f"all_reduce: rank {rank} has a sparse tensor of {shape[0]}, {shape[1]}, and this rank one of "
                raise RuntimeError(f"{text}{tuple(tensor.shape)}, {tensor.dtype}")
        self._counts = [shape[3] for shape in shapes]
        longest = max(self._counts)
        self._indices = indices.new_zeros(comm.world_size, longest, indices.shape[0])
        self._values = values.new_zeros(comm.world_size, longest, *values.shape[1:])
        self._mine = self._indices[0].clone(), self._values[0].clone()
        self._mine[0][: self._counts[comm.rank]] = indices.t()
        self._mine[1][: self._counts[comm.rank]] = values

    def calls(self) -> list[Call]:
        """The calls that gather the elements, padded to the largest number of a rank."""
        pairs = zip(self._mine, (self._indices, self._values))
        return [("all_gather", (mine,), all_of_them) for mine, all_of_them in pairs]

    def finish(self) -> None:
        if self._counts:
            counts, self._counts = self._counts, []
            parts = [
                torch.cat([of_rank[:count] for of_rank, count in zip(all_of_them, counts)])
                for all_of_them in (self._indices, self._values)
            ]
            total = torch.sparse_coo_tensor(parts[0].t(), parts[1], self._tensor.shape)
            with torch.no_grad():  # a detached tensor would keep its number of elements
                self._tensor.copy_(total.coalesce())
