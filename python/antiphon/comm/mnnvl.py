"""How ranks meet, under the names of FlashInfer 0.6.18 comm/mnnvl.py.

Of that module, which is about memory that several machines share, there is only what other modules take from it.
"""

from typing import Any
from weakref import WeakKeyDictionary

import antiphon
from antiphon import Communicator
from antiphon.comm.abstractions import CommBackend
from antiphon.comm.comm_backend import MPIBackend, TorchDistBackend
from antiphon.comm.cuda_ipc import communicator

__all__ = ["CommBackend", "MPIBackend", "MnnvlMemory", "TorchDistBackend"]

_communicators: "WeakKeyDictionary[Any, Communicator]" = WeakKeyDictionary()


class MnnvlMemory:
    """Memory that the machines of an NVLink domain share. There is none here."""

    @staticmethod
    def initialize() -> None:
        """Does nothing."""

    @staticmethod
    def supports_mnnvl() -> bool:
        """Whether there is such memory: no."""
        return False


def communicator_of(caller: str, backend: Any) -> Communicator:
    """The communicator of the ranks of a backend, which meet for it the first time. Errors name the caller."""
    if isinstance(backend, TorchDistBackend):
        return communicator(caller, backend.group)
    comm = _communicators.get(backend)
    if comm is None:
        rank, world_size = backend.Get_rank(), backend.Get_size()
        comm = antiphon.init(rank=rank, world_size=world_size, exchange=lambda mine: list(backend.allgather(mine)))
        _communicators[backend] = comm
    return comm
