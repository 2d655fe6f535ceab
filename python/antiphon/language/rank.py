"""What a rank has and does by itself."""

from collections.abc import Sequence
from sys import _getframe

from antiphon._core import BaseBuffer, Chunk, ThreadBlockGroup
from antiphon.language._context import get_program
from antiphon.language._types import BufferType, ReduceOperationType, SyncType

__all__ = [
    "BaseBuffer",
    "Buffer",
    "BufferType",
    "Chunk",
    "Rank",
    "ReduceOperationType",
    "Semaphore",
    "SyncType",
    "ThreadBlockGroup",
    "get_program",
]


class Rank:
    """A rank of the current program: its buffers, and what it does in its own memory.

    Operations are done by thread block ``tb``, or by all of ``tb_group``, each its share of the bytes; ``RuntimeError`` if
    neither is given. So is a chunk of another rank, chunks that differ in size, or packets outside scratch.
    """

    def __init__(self, rank: int) -> None:
        program = get_program()
        self._core = program._core
        #: Its number.
        self.rank = self._core.rank(rank)
        self._buffers = program.buffers[rank]

    def get_input_buffer(self) -> BaseBuffer:
        """What the rank gives."""
        return self._buffers[BufferType.input]

    def get_output_buffer(self) -> BaseBuffer:
        """What the rank gets."""
        return self._buffers[BufferType.output]

    def copy(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Copies chunks (``copy``)."""
        self._core.copy("copy", self.rank, dst_chunk, src_chunk, tb, tb_group, _getframe(1))

    def unpack_packets(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Reads packets in scratch as they arrive, and writes what is in them (``upkt``)."""
        self._core.copy("unpack_packets", self.rank, dst_chunk, src_chunk, tb, tb_group, _getframe(1))

    def copy_packets(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Writes chunks as packets into scratch (``cpkt``)."""
        self._core.copy("copy_packets", self.rank, dst_chunk, src_chunk, tb, tb_group, _getframe(1))

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
        self._core.reduce(
            self.rank, src_chunk, other_chunks, tb, tb_group, dst_chunk, reduce_op, packet, _getframe(1)
        )

    def barrier(self, tb_list: Sequence[int]) -> None:
        """These thread blocks meet (``barrier``); of one, its threads (``nop``)."""
        self._core.barrier(self.rank, tb_list, _getframe(1))


class Buffer(BaseBuffer):
    """Some chunks of a rank's scratch, set aside by this."""

    def __new__(cls, rank: int, size: int) -> "Buffer":
        core = get_program()._core
        number = core.rank(rank)
        return super().__new__(cls, number, BufferType.scratch, core.scratch(number, size), size)


class Semaphore:
    """A counting semaphore between the thread blocks of a rank."""

    def __init__(self, rank: int, initial_value: int) -> None:
        self._core = get_program()._core
        self.rank, self.id = self._semaphore = self._core.semaphore(rank, initial_value)
        self.initial_value = initial_value

    def acquire(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Waits until the count is positive, and takes one (``sem_acquire``)."""
        self._core.semaphore_op(True, self._semaphore, tb, data_sync, _getframe(1))

    def release(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Adds one to the count (``sem_release``)."""
        self._core.semaphore_op(False, self._semaphore, tb, data_sync, _getframe(1))
