"""Memory that every rank of a group can read and write. After FlashInfer 0.6.18 comm/cuda_ipc.py.

On the GPUs of the ranks in a process that uses CUDA through torch, on host memory otherwise. The group meets once, in its
first call; what Antiphon keeps for it lives as long as the group.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

import antiphon
from antiphon import Communicator, SymmetricBuffer
from antiphon.comm._cudart import CudaRTLibrary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CudaRTLibrary", "create_shared_buffer", "free_shared_buffer"]

_Group: TypeAlias = "ProcessGroup | Communicator | None"

# State of torch's groups and of our communicators, which have no attribute for it.
_communicators: "WeakKeyDictionary[ProcessGroup, Communicator]" = WeakKeyDictionary()
_buffers: "WeakKeyDictionary[Communicator, dict[int, SymmetricBuffer]]" = WeakKeyDictionary()


def create_shared_buffer(
    size_in_bytes: int, group: _Group = None, *, device: int | str | None = None
) -> list[int]:
    """Makes a buffer on every rank and returns the address of each rank's copy, in this process, in the group's order.

    All ranks of the group must call it, with the same size. The copies are zero. ``group`` is a torch process group of
    any backend (that of all ranks, unless given) or an :class:`antiphon.Communicator`. The copies are on the current CUDA
    device of each rank if torch has initialised CUDA in this process (``torch.cuda.set_device`` does), else on the host;
    ``device``, which FlashInfer does not have, says which: the number of a GPU, or ``"cpu"``.

    Raises ``ValueError`` if there is no group, ``RuntimeError`` with the numbers when the symmetric memory is used up
    (``ANTIPHON_ARENA_BYTES`` sets its size on the host), and what a collective raises when a peer is lost or late.
    """
    if size_in_bytes < 0:
        raise ValueError(f"create_shared_buffer: size_in_bytes must not be negative, but it is {size_in_bytes}")
    if isinstance(device, str) and device != "cpu":
        raise ValueError(f'create_shared_buffer: device is {device!r}: pass the number of a GPU, or "cpu"')
    comm = communicator("create_shared_buffer", group)
    if device is None:
        device = "cuda" if uses_cuda() else "cpu"
    buffer = comm.symmetric(size_in_bytes, device)
    pointers = [buffer.pointer(rank) for rank in range(comm.world_size)]
    _buffers.setdefault(comm, {})[pointers[comm.rank]] = buffer
    return pointers


def free_shared_buffer(pointers: Sequence[int | None] | None, group: _Group = None) -> None:
    """Frees what :func:`create_shared_buffer` made, on all ranks of the group, which must all call it.

    No rank may use any copy any more; the call waits for work on the GPU. Without this rank's own address, in a list that is
    ``None`` or too short, on all ranks, it only waits for the others, as FlashInfer does.

    Raises ``ValueError`` naming the address if that is not of a buffer of this group, or was freed already.
    """
    comm = communicator("free_shared_buffer", group)
    given = {rank: pointer for rank, pointer in enumerate(pointers or ()) if pointer is not None}
    if comm.rank not in given:
        return comm.barrier()
    buffers = _buffers.get(comm, {})
    buffer = buffers.get(given[comm.rank])
    for rank, pointer in given.items():
        if buffer is None or rank >= comm.world_size or buffer.pointer(rank) != pointer:
            raise ValueError(
                f"free_shared_buffer: {pointer:#x}, given for rank {rank}, is not the address of a buffer of {comm}"
            )
    comm.free(buffers.pop(given[comm.rank]))


def owner(pointers: Sequence[int], rank: int) -> Communicator | None:
    """The communicator whose buffer has these addresses, this process being that rank of it."""
    for comm, buffers in _buffers.items():
        buffer = buffers.get(pointers[rank]) if (comm.rank, comm.world_size) == (rank, len(pointers)) else None
        if buffer is not None and pointers == [buffer.pointer(each) for each in range(comm.world_size)]:
            return comm
    return None


def communicator(caller: str, group: _Group) -> Communicator:
    """The communicator of a group; in the first call the ranks meet."""
    if isinstance(group, Communicator):
        return group
    if group is None:
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                f"{caller}: no group: pass an antiphon.Communicator, or call torch.distributed.init_process_group first"
            )
        world: ProcessGroup = dist.group.WORLD
        group = world
    if isinstance(group, int):  # what torch returns to a rank outside the group
        raise ValueError(f"{caller}: this process is not in the group")
    try:
        comm = _communicators.get(group)
    except TypeError:  # what has no weak references, such as a string
        kinds = "an antiphon.Communicator or a torch process group"
        raise TypeError(f"{caller}: the group must be {kinds}, not {group!r}") from None
    if comm is None:
        comm = _communicators[group] = antiphon.init(group=group)
    return comm


def forget(group: "ProcessGroup | None") -> None:
    """The next call makes a new communicator of the group, as this one has failed."""
    if group is not None:
        _communicators.pop(group, None)


def uses_cuda() -> bool:
    """Whether this process uses CUDA through torch."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
