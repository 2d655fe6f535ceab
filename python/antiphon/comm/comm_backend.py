"""Groups of torch and of MPI as a :class:`~antiphon.comm.abstractions.CommBackend`, under the names of FlashInfer's
comm/comm_backend.py."""

import importlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["MPIBackend", "TorchDistBackend"]


class MPIBackend:
    """Ranks of MPI: those of a communicator of mpi4py, or all. mpi4py is imported when a method is called first; ``ImportError``
    without it."""

    def __init__(self, comm: Any = None) -> None:
        self._given = comm

    @property
    def _comm(self) -> Any:
        if self._given is None:
            self._given = importlib.import_module("mpi4py.MPI").COMM_WORLD
        return self._given

    def Get_rank(self) -> int:
        return int(self._comm.Get_rank())

    def Get_size(self) -> int:
        return int(self._comm.Get_size())

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """What each rank passed, in rank order; it is pickled."""
        return (*self._comm.allgather(data),)

    def bcast(self, data: Any, root: int) -> Any:
        """What the root passed."""
        return self._comm.bcast(data, root=root)

    def barrier(self) -> None:
        self._comm.Barrier()

    def Split(self, color: int, key: int) -> "MPIBackend":
        """One for the ranks of the same ``color``, ordered by ``key``."""
        return MPIBackend(self._comm.Split(color, key))


class TorchDistBackend:
    """The ranks of a process group of torch, by default of the group of all ranks. ``RuntimeError`` if there is no such group."""

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

    def _exchanged(self, data: Any, group: "ProcessGroup | None") -> list[Any]:
        """What each rank of a group passed."""
        size = self._dist.get_world_size(group)
        room: list[Any] = [None] * size
        self._dist.all_gather_object(room, data, group)
        return room

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """What each rank passed, in rank order; it is pickled."""
        return (*self._exchanged(data, self._group),)

    def bcast(self, data: Any, root: int) -> Any:
        """What the root passed."""
        return self.allgather(data if self.Get_rank() == root else None)[root]

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> "TorchDistBackend":
        """One for the ranks of the same ``color``. Torch orders a group's ranks as the world does, so that ``key`` has no
        effect. All ranks of the world must call it, as torch makes groups."""
        everyone = self._exchanged((color, key, self._dist.get_rank()), None)
        mine, _ = self._dist.new_subgroups_by_enumeration(_split_partition(everyone))
        return TorchDistBackend(mine)


def _split_partition(ranks: Iterable[tuple[int, int, int]]) -> list[list[int]]:
    """The ranks of each color from the ``(color, key, rank)`` of all. Colors ascend, and within a color keys, then ranks. FlashInfer's
    own tests look for this name."""
    parts: dict[int, list[int]] = {}
    for color, _, rank in sorted(ranks):
        parts.setdefault(color, []).append(rank)
    return list(parts.values())
