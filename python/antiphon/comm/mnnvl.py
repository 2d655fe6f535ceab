"""How ranks meet, under the names of FlashInfer 0.6.18 comm/mnnvl.py.

Of that module, which is about memory that several machines share, there is only what other modules take from it.
"""

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import antiphon
from antiphon import Communicator
from antiphon.comm.cuda_ipc import communicator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CommBackend", "MnnvlMemory", "TorchDistBackend"]

_communicators: "WeakKeyDictionary[Any, Communicator]" = WeakKeyDictionary()


class CommBackend(ABC):
    """How the ranks of a group exchange Python objects. Other packages have adapters of their own for MPI and the
    like."""

    @abstractmethod
    def Get_rank(self) -> int:
        """This rank."""

    @abstractmethod
    def Get_size(self) -> int:
        """How many there are."""

    @abstractmethod
    def allgather(self, data: Any) -> list[Any]:
        """The objects of all ranks, in their order."""

    @abstractmethod
    def bcast(self, data: Any, root: int) -> Any:
        """The object of ``root``, a rank of this group."""

    @abstractmethod
    def barrier(self) -> None:
        """Waits for all."""

    @abstractmethod
    def Split(self, color: int, key: int) -> "CommBackend":
        """One for the ranks of the same ``color``, in the order of ``key``."""


class TorchDistBackend(CommBackend):
    """The ranks of a process group of torch, that of all unless given. ``RuntimeError`` if there is none."""

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("TorchDistBackend: call torch.distributed.init_process_group first")
        self._dist, self._group = dist, group

    @property
    def group(self) -> "ProcessGroup | None":
        """The group, or nothing for that of all ranks."""
        return self._group

    def Get_rank(self) -> int:
        return int(self._dist.get_rank(self._group))

    def Get_size(self) -> int:
        return int(self._dist.get_world_size(self._group))

    def allgather(self, data: Any) -> list[Any]:
        everybody: list[Any] = [None] * self.Get_size()
        self._dist.all_gather_object(everybody, data, group=self._group)
        return everybody

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data if self.Get_rank() == root else None)[root]

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> "TorchDistBackend":
        """One for the ranks of the same ``color``, in the order that they have in the world: torch's groups have no
        other, and ``key`` no effect. All ranks of the world must call it, as torch makes groups."""
        colors: list[int] = [color] * self._dist.get_world_size()
        self._dist.all_gather_object(colors, color)
        members = {each: [rank for rank, other in enumerate(colors) if other == each] for each in sorted(set(colors))}
        groups = {each: self._dist.new_group(ranks) for each, ranks in members.items()}
        return TorchDistBackend(groups[color])


class MnnvlMemory:
    """Memory that the machines of an NVLink domain share. There is none here."""

    @staticmethod
    def initialize() -> None:
        """Does nothing."""

    @staticmethod
    def supports_mnnvl() -> bool:
        """Whether there is such memory: no."""
        return False


def communicator_of(backend: Any) -> Communicator:
    """The communicator of the ranks of a backend, which meet for it the first time."""
    if isinstance(backend, TorchDistBackend):
        return communicator("comm_backend", backend.group)
    comm = _communicators.get(backend)
    if comm is None:
        rank, world_size = backend.Get_rank(), backend.Get_size()
        comm = antiphon.init(rank=rank, world_size=world_size, exchange=backend.allgather)
        _communicators[backend] = comm
    return comm
