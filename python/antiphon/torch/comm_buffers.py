"""Memory that the peers of a rank read directly: where :mod:`antiphon.lowering` puts the operands of compiled calls.

A communicator has one arena on each rank. A compiled program addresses a *comm buffer* by its offset in the arena, which is the
same on all ranks and in every run of the program. Programs of one process run one after the other, so that all of them share
the arena: its size is that of the largest program's plan.
"""

import math
from weakref import WeakKeyDictionary

import torch
import torch.utils.dlpack
from torch import Tensor

import antiphon

__all__ = ["arena_bytes", "comm_buffer", "is_comm_buffer"]

#: What the arena's size is a multiple of, in bytes.
_GRANULARITY = 1 << 20

_arenas: WeakKeyDictionary[antiphon.Communicator, tuple[antiphon.SymmetricBuffer, Tensor]] = WeakKeyDictionary()


def comm_buffer(comm: antiphon.Communicator, shape: list[int], dtype: torch.dtype, offset: int, arena_bytes: int) -> Tensor:
    """The tensor at ``offset`` bytes of an arena that has ``arena_bytes`` at least.

    All ranks of the communicator make the same call at the same point of a program: an arena that is too small is replaced by a
    larger one on all of them. Raises ``ValueError`` for a tensor that does not fit into ``arena_bytes``, and ``RuntimeError``
    with the numbers when the symmetric memory of the communicator is exhausted.
    """
    end = offset + math.prod(shape) * dtype.itemsize
    if offset < 0 or end > arena_bytes:
        raise ValueError(f"comm_buffer: a {dtype} tensor {shape} at {offset} ends at {end} of {arena_bytes} bytes")
    return _arena(comm, arena_bytes)[offset:end].view(dtype).view(shape)


def is_comm_buffer(comm: antiphon.Communicator, x: Tensor) -> bool:
    """Whether a tensor lies in the arena of a communicator."""
    if comm not in _arenas:
        return False
    arena = _arenas[comm][1]
    return bool(x.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr())


def arena_bytes(comm: antiphon.Communicator) -> int:
    """The size of a communicator's arena on each rank."""
    return len(_arenas[comm][0]) if comm in _arenas else 0


def _arena(comm: antiphon.Communicator, least: int) -> Tensor:
    if arena_bytes(comm) < least:
        if comm in _arenas:
            comm.free(_arenas.pop(comm)[0])
        buffer = comm.symmetric(-(-least // _GRANULARITY) * _GRANULARITY)
        _arenas[comm] = buffer, torch.utils.dlpack.from_dlpack(buffer.memory("uint8"))
    return _arenas[comm][1]
