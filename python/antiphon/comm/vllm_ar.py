"""vLLM's custom all-reduce. After FlashInfer 0.6.18 comm/vllm_ar.py, on CUDA and host tensors.

FlashInfer's kernels read the peers' inputs in place, so that every input must be registered with all ranks, or copied
into a buffer that is. Antiphon's send data through memory of the communicator: they need no registration, do not copy into
``reg_buffer``, and choose their own grid. The functions that register check what they are given and remember it, so that
a script fails here where it would fail there; ``num_ctas`` is checked and has no effect. Sums have the bits of
:meth:`antiphon.Communicator.all_reduce`.

A handle belongs to the communicator for which ``create_shared_buffer`` made the pointers that it was given, or, if they
come from elsewhere, to that of the default group of ``torch.distributed``.
"""

import itertools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from antiphon import Communicator
from antiphon.comm.cuda_ipc import communicator, owner

if TYPE_CHECKING:
    import torch

__all__ = [
    "all_reduce",
    "dispose",
    "get_graph_buffer_ipc_meta",
    "init_custom_ar",
    "meta_size",
    "register_buffer",
    "register_graph_buffers",
]

#: The most blocks of FlashInfer's kernels, and the sizes of what its state consists of.
MAX_CTAS, META_BYTES, HANDLE_BYTES, ENTRY_BYTES, MAX_WORLD = 36, 3456, 64, 64, 8


class Refused(ValueError, RuntimeError):
    """What Antiphon calls a ``ValueError``, and FlashInfer a ``RuntimeError``."""


class CustomAllReduce:
    """What a handle stands for."""

    def __init__(self, comm: Communicator, capacity: int) -> None:
        self.comm = comm
        #: How many inputs can be registered, and how many have been.
        self.capacity, self.entries = capacity, 0
        self.registered: set[int] = set()
        #: Inputs of calls that were captured since the last registration.
        self.captured: list[int] = []

    def take_entries(self, count: int) -> None:
        if self.entries + count > self.capacity:
            raise Refused(
                f"rank_data has room for {self.capacity} inputs, and {self.entries} are taken: {count} more do not fit"
            )
        self.entries += count


_handles: dict[int, CustomAllReduce] = {}
_numbers = itertools.count(1)
_dtypes: "frozenset[torch.dtype]" = frozenset()


def meta_size() -> int:
    """The bytes of a rank's signals in FlashInfer, which scripts add to a buffer's size. Antiphon does not use them."""
    return META_BYTES


def init_custom_ar(ipc_tensors: list[int], rank_data: "torch.Tensor", rank: int, full_nvlink: bool) -> int:
    """A handle for all-reduces between the ranks whose addresses ``create_shared_buffer`` gave as ``ipc_tensors``.

    All ranks call it together. ``rank_data`` is a tensor of bytes, on the device that will be used, 64 of which are
    needed for each input that is registered. ``full_nvlink`` has no effect. With a CUDA tensor the GPUs are brought
    together here and kernels loaded, so that calls may be captured at once.

    Raises ``ValueError`` (here a ``RuntimeError`` too) for more than 8 or an odd number of ranks, and a rank that is
    not one of them.
    """
    global _dtypes
    import torch

    world_size = len(ipc_tensors)
    if world_size > MAX_WORLD:
        raise Refused(f"world size > {MAX_WORLD} is not supported: it is {world_size}")
    if world_size % 2 or world_size == 0:
        raise Refused(f"Odd num gpus is not supported for now: there are {world_size}")
    if not 0 <= rank < world_size:
        raise Refused(f"invalid rank passed in: {rank} of {world_size}")
    comm = owner(ipc_tensors, rank) or communicator("vllm_init_custom_ar", None)
    if (comm.rank, comm.world_size) != (rank, world_size):
        raise Refused(f"rank {rank} of {world_size} was passed in, but the default group has {comm}")
    if rank_data.is_cuda:
        comm.prepare_cuda(rank_data.get_device())
    _dtypes = frozenset((torch.float32, torch.float16, torch.bfloat16))
    number = next(_numbers)
    _handles[number] = CustomAllReduce(comm, rank_data.numel() // ENTRY_BYTES)
    return number


def dispose(fa: int) -> None:
    """Ends a handle. The communicator stays, as other handles may be of it."""
    _of(fa)
    del _handles[fa]


def all_reduce(
    fa: int, inp: "torch.Tensor", out: "torch.Tensor", reg_buffer: int, reg_buffer_sz_bytes: int, num_ctas: int
) -> None:
    """``out`` becomes the sum of all ranks' ``inp``: float32, float16 or bfloat16, a multiple of 16 bytes, whose elements
    lie in memory without gaps, in whatever order. On CUDA it is in the order of torch's current stream.

    The input must fit the ``reg_buffer_sz_bytes`` of a ``reg_buffer`` other than 0. That, or else the input, must have been
    registered, unless the stream is captured. Raises ``ValueError`` (here a ``RuntimeError`` too) otherwise, for other
    arguments that make no sense, and for more than 36 ``num_ctas``; and what
    :meth:`antiphon.Communicator.all_reduce` raises.
    """
    import torch

    handle = _of(fa)
    if inp.dtype != out.dtype or inp.numel() != out.numel():
        raise Refused(f"inp has {inp.numel()} elements of {inp.dtype}, out {out.numel()} of {out.dtype}")
    if out.dtype not in _dtypes:
        raise Refused(f"custom allreduce only supports float32, float16 and bfloat16, not {out.dtype}")
    size = inp.numel() * inp.element_size()
    if reg_buffer and size > reg_buffer_sz_bytes:
        raise Refused(f"the input has {size} bytes, the registered buffer {reg_buffer_sz_bytes}")
    if size % 16:
        elements = 16 // inp.element_size()
        raise Refused(f"custom allreduce requires input length to be multiple of {elements}: it is {inp.numel()}")
    if not 0 < num_ctas <= MAX_CTAS:
        raise Refused(f"max supported block limit is {MAX_CTAS}, and at least 1 is needed: num_ctas is {num_ctas}")
    pointer, capturing = reg_buffer or inp.data_ptr(), inp.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and pointer not in handle.registered:
        raise Refused(f"buffer address {pointer:#x} is not registered!")
    handle.comm.all_reduce(_dense("inp", inp), out=_dense("out", out))
    if capturing:
        handle.captured.append(pointer)


def register_buffer(fa: int, fake_ipc_ptrs: list[int]) -> None:
    """Registers an address: this rank's in a list of one for each rank, as ``create_shared_buffer`` gives it."""
    handle = _of(fa)
    if len(fake_ipc_ptrs) != handle.comm.world_size:
        raise Refused(f"{len(fake_ipc_ptrs)} pointers for {handle.comm.world_size} ranks")
    handle.take_entries(1)
    handle.registered.add(fake_ipc_ptrs[handle.comm.rank])


def get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    """The inputs of the calls that were captured and are not registered yet, for :func:`register_graph_buffers` of all
    ranks: 64 bytes for each, in one list, and 0 for each.

    The bytes say whose address it is. They are no handles of CUDA IPC, which Antiphon does not need.
    """
    handle = _of(fa)
    form, rank = f"<8sqq{HANDLE_BYTES - 24}x", handle.comm.rank
    packed = b"".join(struct.pack(form, b"antiphon", rank, pointer) for pointer in handle.captured)
    return list(struct.unpack(f"{len(packed)}b", packed)), [0] * len(handle.captured)


def register_graph_buffers(fa: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
    """Takes what :func:`get_graph_buffer_ipc_meta` gave on each rank, in rank order. Graphs work without it as well.

    Raises ``ValueError`` (here a ``RuntimeError`` too) with the numbers if ranks captured different numbers of calls.
    """
    handle = _of(fa)
    world_size, count = handle.comm.world_size, len(handle.captured)
    if len(handles) != world_size or len(offsets) != world_size:
        raise Refused(f"handles of {len(handles)} and offsets of {len(offsets)} ranks, but there are {world_size}")
    for rank, (packed, starts) in enumerate(zip(handles, offsets)):
        if (len(packed), len(starts)) != (HANDLE_BYTES * count, count):
            raise Refused(
                f"rank {rank} has {len(packed)} bytes of handles and {len(starts)} offsets, but here are {count} inputs"
            )
    handle.take_entries(count)
    handle.captured.clear()


def _of(fa: int) -> CustomAllReduce:
    try:
        return _handles[fa]
    except KeyError:
        raise Refused(f"{fa} is no handle of vllm_init_custom_ar, or was disposed of") from None


def _dense(name: str, tensor: "torch.Tensor") -> "torch.Tensor":
    """The elements in the order in which they lie in memory, which must be without gaps."""
    if tensor.is_contiguous():
        return tensor
    if not _has_no_gaps(tensor.shape, tensor.stride()):
        raise Refused(f"{name} of shape {list(tensor.shape)} with strides {tensor.stride()} has gaps in memory")
    return tensor.as_strided((tensor.numel(),), (1,))


def _has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape) if size != 1):
        if stride != step:
            return False
        step *= size
    return True
