"""``ExecutionPlan`` and ``Executor``."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from antiphon import Communicator, Plan
from antiphon.mscclpp._enums import DataType, PacketType
from antiphon.mscclpp._memory import Span, cuda_driver, whole

__all__ = ["ExecutionPlan", "Executor"]

_PACKETS: dict[PacketType, Literal["ll8", "ll16"]] = {PacketType.LL8: "ll8", PacketType.LL16: "ll16"}


class ExecutionPlan:
    """A plan of a file (JSON), for this rank. The file is read once, and the plan is proved when an executor first executes it.

    Raises ``OSError`` for a file that cannot be read, and ``ValueError`` for one that is no plan, and for a rank that the plan does not have.
    """

    def __init__(self, planPath: str | os.PathLike[str], rank: int) -> None:
        if not isinstance(planPath, (str, os.PathLike)):
            raise TypeError(f"ExecutionPlan: planPath must be the path of a file, not {type(planPath).__name__}")
        self._read(Path(planPath).read_bytes(), os.fspath(planPath), rank)

    @classmethod
    def of_text(cls, text: str, rank: int) -> "ExecutionPlan":
        """The plan of a text, which MSCCL++ has not."""
        plan = cls.__new__(cls)
        plan._read(text.encode(), "the text", rank)
        return plan

    def _read(self, data: bytes, source: str, rank: int) -> None:
        operators: set[str] = set()

        def seen(entry: dict[str, Any]) -> dict[str, Any]:
            if "reduce_op" in entry:
                operators.add(str(entry["reduce_op"]))
            return entry

        try:
            #: The JSON.
            self.text = data.decode()
            plan = json.loads(self.text, object_hook=seen)
            name, collective, gpus = plan.get("name"), plan["collective"], plan["gpus"]
            chunks = [(int(gpu["input_chunks"]), int(gpu["output_chunks"])) for gpu in gpus]
            #: In bytes.
            self.min_message_size = int(plan.get("min_message_size", 0))
            self.max_message_size = int(plan.get("max_message_size", 2**64 - 1))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"ExecutionPlan: {source} is no plan: {type(error).__name__}: {error}") from None
        self.rank = whole("ExecutionPlan", "rank", rank)
        if self.rank >= len(chunks):
            raise ValueError(f"ExecutionPlan: rank {self.rank} of plan {name!r}, which is for {len(chunks)} ranks")
        self.name = "" if name is None else str(name)
        #: ``"allreduce"``, ``"allgather"``, ...
        self.collective = str(collective)
        #: Whether it says that input and output share memory.
        self.inplace = bool(plan.get("inplace", False))
        #: How it combines elements: of ``"sum"``, ``"min"`` and ``"max"``. Empty for one that only moves them.
        self.operators = frozenset(operators)
        self.input_chunks, self.output_chunks = chunks[self.rank]

    def __repr__(self) -> str:
        return f"<ExecutionPlan {self.name!r}: {self.collective}, rank {self.rank}>"


class Executor:
    """Executes plans on the memory that raw addresses name. ``comm`` is ``CommGroup(...).communicator``, or any
    :class:`antiphon.Communicator`. ``TypeError`` for another one."""

    def __init__(self, comm: Communicator) -> None:
        if not isinstance(comm, Communicator):
            kind = type(comm).__name__
            raise TypeError(f"Executor: comm must be an antiphon.Communicator, as CommGroup(...).communicator is, not {kind}")
        self._comm = comm
        #: Loaded plans by text, GPU and packets.
        self._loaded: dict[tuple[str, int | None, PacketType], Plan] = {}

    @property
    def communicator(self) -> Communicator:
        """The communicator of its ranks."""
        return self._comm

    def execute(
        self,
        rank: int,
        send_buff: int,
        recv_buff: int,
        send_buff_size: int,
        recv_buff_size: int,
        data_type: DataType,
        plan: ExecutionPlan,
        stream: int = 0,
        packet_type: PacketType = PacketType.LL16,
    ) -> None:
        """Does what the plan says to ``send_buff_size`` bytes at the address ``send_buff`` and ``recv_buff_size`` at ``recv_buff``, which
        are on the host or on one GPU. All ranks call it together, with the same sizes.

        The two are apart, or the same, or the smaller one is this rank's own part of the larger one. On a GPU the call enqueues its work in
        ``stream`` (a handle, 0 for the default stream) and returns; the memory must stay until the stream has passed it. The first call
        of a plan proves and loads it; the first of a size prepares it, and cannot be captured in a graph.

        Raises ``ValueError`` with the numbers for another rank, addresses that are not memory of this process, memory that is no whole
        number of elements or overlaps in part, sizes that the plan does not serve, a plan that is not proved, and a stream of the
        host; ``TypeError`` for arguments of other types, and elements that cannot be reduced; ``NotImplementedError`` for
        ``float8_e4m3b15``; ``RuntimeError``, ``TimeoutError`` and :class:`antiphon.PeerLostError` as
        :meth:`antiphon.Plan.execute`.
        """
        typed = ("data_type", data_type, DataType), ("plan", plan, ExecutionPlan), ("packet_type", packet_type, PacketType)
        for name, value, kind in typed:
            if not isinstance(value, kind):
                raise TypeError(f"execute: {name} must be of mscclpp.{kind.__name__}, not {type(value).__name__}")
        if whole("execute", "rank", rank) != self._comm.rank:
            raise ValueError(f"execute: rank is {rank}, and this is rank {self._comm.rank} of {self._comm.world_size}")
        if plan.rank != self._comm.rank:
            raise ValueError(f"execute: {plan!r} was made for rank {plan.rank}, and this is rank {self._comm.rank}")
        dtype, size, driver = _elements(data_type, plan), data_type.itemsize, cuda_driver()
        send = Span("execute", "send_buff", send_buff, send_buff_size, dtype, size, False, driver)
        recv = Span("execute", "recv_buff", recv_buff, recv_buff_size, dtype, size, True, driver)
        if send.device != recv.device:
            raise ValueError(f"execute: send_buff is on {send.place}, and recv_buff on {recv.place}")
        stream = whole("execute", "stream", stream)
        if send.device is None and stream:
            raise ValueError(f"execute: the buffers are on the host, which has no stream {stream:#x}")
        if send.overlaps(recv):
            both = self._in_place(send, recv, plan)
            send = recv = Span("execute", both.name, both.address, both.num_bytes, dtype, size, True, driver)
        loaded = self._load(plan, send.device, packet_type)
        loaded.execute(send, recv, stream=None if send.device is None else stream)

    def reset(self) -> None:
        """Gives the memory of all plans back, which the next calls load again. All ranks call it together, when no graph with calls of this
        executor is launched any more. (One that is dropped keeps its memory until its communicator is closed.)"""
        while self._loaded:
            _, plan = self._loaded.popitem()
            plan.close()

    def _load(self, plan: ExecutionPlan, device: int | None, packets: PacketType) -> Plan:
        key = plan.text, device, packets
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._comm.load_plan(plan.text, device=device, packets=_PACKETS[packets])
            self._loaded[key] = loaded
        return loaded

    def _in_place(self, send: Span, recv: Span, plan: ExecutionPlan) -> Span:
        """The memory of both, of which one may be this rank's part."""
        large, small = (send, recv) if send.num_bytes >= recv.num_bytes else (recv, send)
        ranks, rank = self._comm.world_size, self._comm.rank
        sizes = f"send_buff of {send.num_bytes} bytes at {send.address:#x} and recv_buff of {recv.num_bytes} bytes at {recv.address:#x}"
        is_whole = large.num_bytes == small.num_bytes and large.address == small.address
        is_part = large.num_bytes == ranks * small.num_bytes and small.address == large.address + rank * small.num_bytes
        if not is_whole and not is_part:
            raise ValueError(f"execute: {sizes} overlap: they must be apart or the same, or one part {rank} of {ranks} of the other")
        if send.num_bytes * plan.output_chunks != recv.num_bytes * plan.input_chunks:
            chunks = f"{plan.input_chunks} chunks in and {plan.output_chunks} out"
            raise ValueError(f"execute: {sizes} are not as the plan's {chunks}")
        return large


def _elements(data_type: DataType, plan: ExecutionPlan) -> str:
    """The elements that a plan works on, as Antiphon names them."""
    if data_type is DataType.float8_e4m3b15:
        raise NotImplementedError("execute: Antiphon has no arithmetic of float8_e4m3b15: pass DataType.uint8 to a plan that only moves it")
    # A wrapping sum has the same bits.
    return "int32" if data_type is DataType.uint32 and plan.operators == {"sum"} else data_type.name
