"""Channels between ranks."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from sys import _getframe
from typing import Dict, List

from antiphon._core import Chunk, ThreadBlockGroup
from antiphon.language.internal.globals import get_program
from antiphon.language.internal.types import BufferType, ChannelType, RankGroup, ReduceOperationType, SyncType

# Scripts import further names from this module, by star imports.
__all__ = [
    "BufferType",
    "ChannelType",
    "Chunk",
    "Dict",
    "List",
    "MemoryChannel",
    "PortChannel",
    "RankGroup",
    "ReduceOperationType",
    "SwitchChannel",
    "SyncType",
    "ThreadBlockGroup",
    "dataclass",
    "defaultdict",
    "get_program",
]


class MemoryChannel:
    """A channel through which ``src_rank`` accesses memory of ``dst_rank``. Every object is a channel of its own.

    Operations are the source's, done by thread block ``tb``, or by all of ``tb_group``, each its share of the bytes.
    ``RuntimeError`` if neither is given, for a chunk of another rank than the operation takes, chunks that differ in size,
    or packets outside scratch.
    """

    channel_type = ChannelType.memory

    def __init__(self, dst_rank: int, src_rank: int) -> None:
        self._channel = get_program()._core.memory_channel(dst_rank, src_rank)
        self.dst_rank, self.src_rank = self._channel.dst, self._channel.src
        #: Its number among the source's memory channels.
        self.channel_id = self._channel.id

    def __eq__(self, other: object) -> bool:
        # As in MSCCL++ 0.9.0, where channels are dataclasses without fields; so they have no hash either.
        return type(other) is type(self)

    def signal(self, tb: int, data_sync: SyncType = SyncType.both, relaxed: bool = False) -> None:
        """One is added to the peer's count (``signal``). What this rank wrote before is there when the peer sees it,
        unless ``relaxed`` (``rlxsignal``)."""
        self._channel.notify(get_program()._core, "signal", tb, data_sync, relaxed, _getframe(1))

    def wait(self, tb: int, data_sync: SyncType = SyncType.both, relaxed: bool = False) -> None:
        """Waits for one more signal of the peer (``wait``). What that one wrote before can be read then, unless
        ``relaxed`` (``rlxwait``)."""
        self._channel.notify(get_program()._core, "wait", tb, data_sync, relaxed, _getframe(1))

    def put(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Writes chunks of the source into the destination's memory (``put``)."""
        self._channel.put(get_program()._core, "put", dst_chunk, src_chunk, tb, tb_group, _getframe(1))

    def put_packets(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Writes chunks as packets into the destination's scratch (``ppkt``): a reader waits for each packet."""
        self._channel.put(get_program()._core, "put_packets", dst_chunk, src_chunk, tb, tb_group, _getframe(1))

    def read_put_packets(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Reads packets in the source's scratch as they arrive, and writes them to the destination's (``rppkt``).

        ``ValueError`` if neither ``tb`` nor ``tb_group`` is given."""
        self._channel.put(
            get_program()._core, "read_put_packets", dst_chunk, src_chunk, tb, tb_group, _getframe(1)
        )

    def get(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Reads chunks of the destination's memory (``src_chunk``) into the source's (``get``)."""
        self._channel.put(get_program()._core, "get", dst_chunk, src_chunk, tb, tb_group, _getframe(1))

    def reduce(
        self,
        local_src_chunk: Chunk,
        remote_src_chunks: Sequence[Chunk],
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
        local_dst_chunk: Chunk | None = None,
        reduce_op: ReduceOperationType = ReduceOperationType.sum,
    ) -> None:
        """Reduces a chunk of the source with chunks of the destination into ``local_dst_chunk``, else into
        ``local_src_chunk`` (``rre``)."""
        self._channel.reduce(
            get_program()._core,
            local_src_chunk,
            remote_src_chunks,
            tb,
            tb_group,
            local_dst_chunk,
            reduce_op,
            _getframe(1),
        )


class PortChannel:
    """A channel through which an engine moves bytes from ``src_rank`` to ``dst_rank``. Every object is a channel of its own.

    Operations are the source's, done by thread block ``tb``; ``RuntimeError`` for chunks that a
    :class:`MemoryChannel` would not take either.
    """

    channel_type = ChannelType.port

    def __init__(self, dst_rank: int, src_rank: int) -> None:
        self._channel = get_program()._core.port_channel(dst_rank, src_rank)
        self.dst_rank, self.src_rank = self._channel.dst, self._channel.src
        #: Its number among the source's port channels.
        self.channel_id = self._channel.id

    def __eq__(self, other: object) -> bool:
        # See MemoryChannel.
        return type(other) is type(self)

    def signal(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """One is added to the peer's count, behind all that was put before (``signal``)."""
        self._channel.notify(get_program()._core, "signal", tb, data_sync, False, _getframe(1))

    def wait(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Waits for one more signal of the peer; what that one put before can be read then (``wait``)."""
        self._channel.notify(get_program()._core, "wait", tb, data_sync, False, _getframe(1))

    def flush(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Waits until what was put has left, so that its source may be written again (``flush``)."""
        self._channel.notify(get_program()._core, "flush", tb, data_sync, False, _getframe(1))

    def put(self, dst_chunk: Chunk, src_chunk: Chunk, tb: int) -> None:
        """Has chunks of the source written into the destination's memory (``put``)."""
        self._channel.put(get_program()._core, "put", dst_chunk, src_chunk, tb, None, _getframe(1))

    def put_with_signal(self, dst_chunk: Chunk, src_chunk: Chunk, tb: int) -> None:
        """The same with a signal behind it (``pws``)."""
        self._channel.put(get_program()._core, "put_with_signal", dst_chunk, src_chunk, tb, None, _getframe(1))

    def put_with_signal_and_flush(self, dst_chunk: Chunk, src_chunk: Chunk, tb: int) -> None:
        """The same with a signal and a flush behind it (``pwsf``)."""
        self._channel.put(
            get_program()._core, "put_with_signal_and_flush", dst_chunk, src_chunk, tb, None, _getframe(1)
        )

    def put_packets(self, dst_chunk: Chunk, src_chunk: Chunk, tb: int) -> None:
        """Has chunks written as packets into the destination's scratch (``ppkt``)."""
        self._channel.put(get_program()._core, "put_packets", dst_chunk, src_chunk, tb, None, _getframe(1))

    def read_put_packets(
        self, dst_chunk: Chunk, src_chunk: Chunk, tb: int | None = None, tb_group: ThreadBlockGroup | None = None
    ) -> None:
        """Waits for packets in the source's scratch, and has them written to the destination's (``rppkt``).

        ``ValueError`` if neither ``tb`` nor ``tb_group`` is given."""
        self._channel.put(
            get_program()._core, "read_put_packets", dst_chunk, src_chunk, tb, tb_group, _getframe(1)
        )


class SwitchChannel:
    """A channel through which the switch between ranks reduces and broadcasts one of their buffers.

    ``RuntimeError`` for chunks of other ranks, sizes that differ, or chunks that a member's buffer does not have (of
    scratch: has not yet). ``KeyError`` if ``rank`` is no member.
    """

    channel_type = ChannelType.switch

    def __init__(self, rank_list: Sequence[int], buffer_type: BufferType) -> None:
        self._switch = get_program()._core.switch_channel(rank_list, buffer_type)
        self.buffer_type = buffer_type
        #: Its number among the switch channels of each member.
        self.channel_ids = self._switch.ids
        self.rank_group = RankGroup(len(self._switch.ranks), self._switch.ranks)

    def at_rank(self, rank: int) -> "SwitchChannelRankView":
        """The channel as a member uses it; ``RuntimeError`` if ``rank`` is none."""
        return SwitchChannelRankView(self, self._switch.member(get_program()._core, rank))

    def reduce(
        self,
        rank: int,
        buffer_offset: int,
        size: int,
        dst_chunk: Chunk,
        tb: int,
        reduce_op: ReduceOperationType = ReduceOperationType.sum,
    ) -> None:
        """The switch reduces ``size`` chunks from ``buffer_offset`` on of every member's buffer into ``dst_chunk``
        (``glre``)."""
        self._switch.reduce(
            get_program()._core, rank, buffer_offset, size, dst_chunk, tb, reduce_op, _getframe(1)
        )

    def broadcast(self, rank: int, src_chunk: Chunk, buffer_offset: int, size: int, tb: int) -> None:
        """The switch stores ``src_chunk`` as ``size`` chunks from ``buffer_offset`` on in every member's buffer
        (``gstore``)."""
        self._switch.broadcast(
            get_program()._core, False, rank, src_chunk, buffer_offset, size, tb, _getframe(1)
        )

    def broadcast_packets(self, rank: int, src_chunk: Chunk, buffer_offset: int, size: int, tb: int) -> None:
        """The same of packets, from scratch to scratch (``gstorepkt``)."""
        self._switch.broadcast(
            get_program()._core, True, rank, src_chunk, buffer_offset, size, tb, _getframe(1)
        )


class SwitchChannelRankView:
    """A switch channel as one of its ranks uses it: its methods without ``rank``."""

    def __init__(self, channel: SwitchChannel, rank: int) -> None:
        self._switch, self._rank = channel._switch, rank

    def reduce(
        self,
        buffer_offset: int,
        size: int,
        dst_chunk: Chunk,
        tb: int,
        reduce_op: ReduceOperationType = ReduceOperationType.sum,
    ) -> None:
        """See :meth:`SwitchChannel.reduce`."""
        self._switch.reduce(
            get_program()._core, self._rank, buffer_offset, size, dst_chunk, tb, reduce_op, _getframe(1)
        )

    def broadcast(self, src_chunk: Chunk, buffer_offset: int, size: int, tb: int) -> None:
        """See :meth:`SwitchChannel.broadcast`."""
        self._switch.broadcast(
            get_program()._core, False, self._rank, src_chunk, buffer_offset, size, tb, _getframe(1)
        )

    def broadcast_packets(self, src_chunk: Chunk, buffer_offset: int, size: int, tb: int) -> None:
        """See :meth:`SwitchChannel.broadcast_packets`."""
        self._switch.broadcast(
            get_program()._core, True, self._rank, src_chunk, buffer_offset, size, tb, _getframe(1)
        )
