"""The collectives that programs implement."""

from typing import TYPE_CHECKING, Any

from antiphon._core import BaseBuffer
from antiphon.language.internal.types import BufferType

if TYPE_CHECKING:
    from antiphon.language.program import CollectiveProgram

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BaseBuffer",
    "BufferType",
    "Collective",
    "ReduceScatter",
    "SendRecv",
    "TestCollective",
]

Buffers = dict[BufferType, BaseBuffer]


class Collective:
    """What a program is to do; a base for one's own.

    Each rank's part of a message is divided into ``chunk_factor`` chunks. ``inplace`` says that input and output share
    memory; it stands in the plan, and the program's buffers remain two. A subclass has a ``name`` and says in
    :meth:`init_buffers` which buffers ranks have.
    """

    def __init__(self, num_ranks: int, chunk_factor: int, inplace: bool) -> None:
        self.num_ranks = num_ranks
        self.chunk_factor = chunk_factor
        self.inplace = inplace
        #: What the plan calls it.
        self.name = "custom"

    def init_buffers(self) -> Any:
        """For each rank, a ``BaseBuffer`` under ``BufferType.input`` and one under ``BufferType.output``."""

    def check(self, prog: "CollectiveProgram") -> Any:
        """For subclasses that check a program themselves. Antiphon does not call it."""

    def _uniform(self, input_chunks: int, output_chunks: int) -> list[Buffers]:
        sizes = (BufferType.input, input_chunks), (BufferType.output, output_chunks)
        return [{kind: BaseBuffer(rank, kind, 0, size) for kind, size in sizes} for rank in range(self.num_ranks)]


class TestCollective(Collective):
    """Any number of chunks in and out, the same at every rank."""

    __test__ = False  # otherwise pytest would collect it as a test

    def __init__(self, num_ranks: int, input_size: int, output_size: int) -> None:
        super().__init__(num_ranks, 1, False)
        self.name = "test"
        self.input_size, self.output_size = input_size, output_size

    def init_buffers(self) -> list[Buffers]:
        return self._uniform(self.input_size, self.output_size)


class AllGather(Collective):
    """Every rank gets the parts of all ranks: ``chunk_factor`` chunks in, of all ranks out."""

    def __init__(self, num_ranks: int, chunk_factor: int, inplace: bool) -> None:
        super().__init__(num_ranks, chunk_factor, inplace)
        self.name = "allgather"

    def init_buffers(self) -> list[Buffers]:
        return self._uniform(self.chunk_factor, self.num_ranks * self.chunk_factor)


class AllReduce(Collective):
    """Every rank gets the reduction of all inputs: ``num_ranks * chunk_factor`` chunks in and out."""

    def __init__(self, num_ranks: int, chunk_factor: int, inplace: bool) -> None:
        super().__init__(num_ranks, chunk_factor, inplace)
        self.name = "allreduce"

    def init_buffers(self) -> list[Buffers]:
        chunks = self.num_ranks * self.chunk_factor
        return self._uniform(chunks, chunks)


class ReduceScatter(Collective):
    """Every rank gets its part of the reduction: ``num_ranks * chunk_factor`` chunks in, ``chunk_factor`` out."""

    def __init__(self, num_ranks: int, chunk_factor: int, inplace: bool) -> None:
        super().__init__(num_ranks, chunk_factor, inplace)
        self.name = "reducescatter"

    def init_buffers(self) -> list[Buffers]:
        return self._uniform(self.num_ranks * self.chunk_factor, self.chunk_factor)


class AllToAll(Collective):
    """Every rank gets a part of each: ``num_ranks * chunk_factor`` chunks in and out."""

    def __init__(self, num_ranks: int, chunk_factor: int, inplace: bool) -> None:
        super().__init__(num_ranks, chunk_factor, inplace)
        self.name = "alltoall"

    def init_buffers(self) -> list[Buffers]:
        chunks = self.num_ranks * self.chunk_factor
        return self._uniform(chunks, chunks)


class SendRecv(Collective):
    """Some ranks send to others: ``chunk_factor`` chunks in and out."""

    def __init__(self, num_ranks: int, chunk_factor: int, inplace: bool) -> None:
        super().__init__(num_ranks, chunk_factor, inplace)
        self.name = "sendrecv"

    def init_buffers(self) -> list[Buffers]:
        return self._uniform(self.chunk_factor, self.chunk_factor)
