"""Ranks, with their buffers and their own operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from sys import _getframe

from antiphon._core import BaseBuffer, Chunk, ThreadBlockGroup
from antiphon.language.internal.globals import get_program
from antiphon.language.internal.types import BufferType, ChannelType, ReduceOperationType, SyncType

__all__ = [
    "BaseBuffer",
    "Buffer",
    "BufferType",
    "ChannelType",
    "Chunk",
    "Rank",
    "ReduceOperationType",
    "Semaphore",
    "SyncType",
    "ThreadBlockGroup",
    "get_program",
]


@dataclass(init=False, unsafe_hash=True)
class Rank:
    """A rank of the current program: its buffers, and what it does in its own memory.

    Operations are done by thread block ``tb``, or by all of ``tb_group``, each its share of the bytes; ``RuntimeError`` if
    neither is given. So is a chunk of another rank, chunks that differ in size, packets outside scratch, or a call when no
    program is current.
    """

    #: Its number.
    rank: int

    def __init__(self, rank: int) -> None:
        self.rank = get_program()._core.rank(rank)

    def get_input_buffer(self) -> BaseBuffer:
        """The rank's input buffer."""
        return get_program().buffers[self.rank][BufferType.input]

    def get_output_buffer(self) -> BaseBuffer:
        """The rank's output buffer."""
        return get_program().buffers[self.rank][BufferType.output]

    def copy(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Copies chunks (``copy``)."""
        get_program()._core.copy("copy", self.rank, dst_chunk, src_chunk, tb, tb_group, _getframe(1))

    def unpack_packets(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Reads packets in scratch as they arrive, and writes what is in them (``upkt``)."""
        get_program()._core.copy("unpack_packets", self.rank, dst_chunk, src_chunk, tb, tb_group, _getframe(1))

    def copy_packets(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Writes chunks as packets into scratch (``cpkt``)."""
        get_program()._core.copy("copy_packets", self.rank, dst_chunk, src_chunk, tb, tb_group, _getframe(1))

    def reduce(
        self,
        src_chunk: Chunk,
        other_chunks: Sequence[Chunk],
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
        dst_chunk: Chunk | None = None,
        reduce_op: ReduceOperationType = ReduceOperationType.sum,
        packet: bool = False,
    ) -> None:
        """Reduces chunks into ``dst_chunk``, else into ``src_chunk`` (``re``).

        With ``packet``, the others are packets in scratch, which are waited for (``repkt``).
        """
        get_program()._core.reduce(
            self.rank, src_chunk, other_chunks, tb, tb_group, dst_chunk, reduce_op, packet, _getframe(1)
        )

    def barrier(self, tb_list: Sequence[int]) -> None:
        """These thread blocks meet (``barrier``); of one, its threads (``nop``)."""
        get_program()._core.barrier(self.rank, tb_list, _getframe(1))


class Buffer(BaseBuffer):
    """Allocates some chunks of a rank's scratch."""

    def __new__(cls, rank: int, size: int) -> "Buffer":
        core = get_program()._core
        number = core.rank(rank)
        return super().__new__(cls, number, BufferType.scratch, core.scratch(number, size), size)


class Semaphore:
    """A counting semaphore between the thread blocks of a rank."""

    def __init__(self, rank: int, initial_value: int) -> None:
        self.rank, self.id = self._semaphore = get_program()._core.semaphore(rank, initial_value)
        self.initial_value = initial_value

    def acquire(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Waits until the count is positive, and takes one (``sem_acquire``)."""
        get_program()._core.semaphore_op(True, self._semaphore, tb, data_sync, _getframe(1))

    def release(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Adds one to the count (``sem_release``)."""
        get_program()._core.semaphore_op(False, self._semaphore, tb, data_sync, _getframe(1))
