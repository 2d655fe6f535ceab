"""Groups of torch and of MPI as a :class:`~antiphon.comm.abstractions.CommBackend`. After FlashInfer comm/comm_backend.py
(its main branch of August 2026)."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["MPIBackend", "TorchDistBackend"]


class MPIBackend:
    """The ranks of ``MPI.COMM_WORLD``. mpi4py is imported when a method is called first; ``ImportError`` without it."""

    def __init__(self) -> None:
        self._mpicomm: Any = _World()

    def Get_rank(self) -> int:
        return int(self._mpicomm.Get_rank())

    def Get_size(self) -> int:
        return int(self._mpicomm.Get_size())

    def allgather(self, data: Any) -> tuple[Any, ...]:
        return tuple(self._mpicomm.allgather(data))

    def bcast(self, data: Any, root: int) -> Any:
        return self._mpicomm.bcast(data, root)

    def barrier(self) -> None:
        self._mpicomm.Barrier()

    def Split(self, color: int, key: int) -> "MPIBackend":
        part = MPIBackend()
        part._mpicomm = self._mpicomm.Split(color, key)
        return part


class _World:
    """MPI's communicator of all ranks, from the first use on."""

    def __getattr__(self, name: str) -> Any:
        import importlib

        return getattr(importlib.import_module("mpi4py.MPI").COMM_WORLD, name)


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

    def allgather(self, data: Any) -> tuple[Any, ...]:
        everybody: list[Any] = [None] * self.Get_size()
        self._dist.all_gather_object(everybody, data, group=self._group)
        return tuple(everybody)

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data if self.Get_rank() == root else None)[root]

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> "TorchDistBackend":
        """One for the ranks of the same ``color``. Torch orders a group's ranks as the world does, so that ``key`` has no
        effect. All ranks of the world must call it, as torch makes groups."""
        ranks: list[Any] = [None] * self._dist.get_world_size()
        self._dist.all_gather_object(ranks, (color, key, self._dist.get_rank()))
        mine, _ = self._dist.new_subgroups_by_enumeration(_split_partition(ranks))
        return TorchDistBackend(mine)


def _split_partition(ranks: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """The ranks of each color, in the order of colors, from the ``(color, key, rank)`` of all: by key, then by rank."""
    colors = sorted({color for color, _, _ in ranks})
    return [[rank for _, rank in sorted((key, rank) for of, key, rank in ranks if of == color)] for color in colors]
