"""Workspaces of all-reduces. After FlashInfer 0.6.18 comm/trtllm_ar.py.

There a workspace is memory of all ranks, which the kernels are given by address. Here it is a name: the memory belongs
to the communicator of the group, which all its workspaces share, and calls on one group belong to one stream, or to
several that wait for each other. The addresses are numbers that lead nowhere, and say which workspace they are of.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from antiphon import Communicator
from antiphon.comm._integers import MAX_COMM_SIZE, BarrierFlagCount
from antiphon.comm.cuda_ipc import _Group, communicator, uses_cuda
from antiphon.comm.mnnvl import TorchDistBackend, communicator_of

if TYPE_CHECKING:
    import torch

#: From this number on, an address belongs to no memory on any processor. The addresses of a workspace share all but the last bits.
_NOWHERE, _BITS = 0x4160 << 48, 16

_numbers = itertools.count(1)
#: The communicator of each workspace, by its number, and by the address of the tensor that names it.
_found: "WeakValueDictionary[int, Communicator]" = WeakValueDictionary()
#: The communicators of workspaces whose ranks met through a backend of the caller's. The caller may keep neither of the two.
_kept: dict[int, Communicator] = {}
#: The workspaces of a communicator: number, and address of the tensor.
_owned: "WeakKeyDictionary[Communicator, dict[int, int | None]]" = WeakKeyDictionary()


def trtllm_create_ipc_workspace_for_all_reduce(
    rank: int, tp_size: int, max_token_num: int, hidden_dim: int, group: _Group = None
) -> list[list[int]]:
    """A workspace for :func:`trtllm_custom_all_reduce`: seven lists of an address for each rank, to be passed on.

    All ranks of the group call it together. ``group`` is a torch process group (that of all ranks, unless given) or an
    :class:`antiphon.Communicator`. Calls on CUDA tensors use each rank's current device, whatever its rank. How large
    the tensors are does not matter: any fit.

    Raises ``ValueError`` if the group has another ``rank`` or ``tp_size``.
    """
    comm = _meet("trtllm_create_ipc_workspace_for_all_reduce", rank, tp_size, group, None)
    return _addresses(_own(comm, None), 7, tp_size)


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: _Group = None,
    create_metadata: bool = False,
    comm_backend: Any = None,
    use_symm_dev_mem: bool = False,
    *,
    caller: str = "trtllm_create_ipc_workspace_for_all_reduce_fusion",
) -> Any:
    """A workspace for the ``trtllm_…_fusion`` functions: three lists of an address for each rank, and a tensor.

    The tensor, int64 ``[3 * tp_size + 1]`` on the current device, is what the functions take as ``workspace_ptrs``;
    keep it as long as they are called. With ``create_metadata`` a dictionary follows, which lets the functions check
    sizes as FlashInfer's memory would need it; with ``use_symm_dev_mem`` an empty list comes before it. All ranks of
    the group call it together. Without a ``group`` it is that of ``comm_backend``, such as
    :class:`antiphon.comm.mnnvl.TorchDistBackend`; for one of another kind the ranks meet anew, and part when both the
    backend and the workspace are gone. Errors name ``caller``.

    Raises ``ValueError`` if the group has another rank or size, and for ``use_symm_dev_mem`` without
    ``create_metadata``.
    """
    import torch

    if use_symm_dev_mem and not create_metadata:
        raise ValueError(f"{caller}: use_symm_dev_mem needs create_metadata=True")
    comm = _meet(caller, tp_rank, tp_size, group, comm_backend)
    lamport = tp_size * max_token_num * hidden_dim * (4 if use_fp32_lamport else 2)
    if lamport > MAX_COMM_SIZE:
        logging.getLogger(__name__).warning("a workspace of %d bytes counts as one of %d", lamport, MAX_COMM_SIZE)
        lamport = MAX_COMM_SIZE
    device = torch.device("cuda", torch.cuda.current_device()) if uses_cuda() else torch.device("cpu")
    workspace = torch.empty(3 * tp_size + 1, dtype=torch.int64, device=device)
    number = _own(comm, workspace.data_ptr())
    if group is None and comm_backend is not None and not isinstance(comm_backend, TorchDistBackend):
        _kept[number] = comm
    handles = _addresses(number, 3, tp_size)
    control = _address(number, 3, 0)
    workspace.copy_(torch.tensor([*itertools.chain(*handles), control], dtype=torch.int64))
    metadata = {
        "tp_rank": tp_rank,
        "tp_size": tp_size,
        "max_token_num": max_token_num,
        "hidden_dim": hidden_dim,
        "use_fp32_lamport": use_fp32_lamport,
        "buffer_size": _up(tp_size * max_token_num * hidden_dim * 2),
        "flag_size": _up(tp_size * BarrierFlagCount * 4),
        "lamport_comm_size": lamport,
        "lamport_buffer_size": _up(3 * lamport),
        "control_flag_ptr": control,
        "workspace_id": number,
    }
    if use_symm_dev_mem:
        return handles, workspace, [], metadata
    return (handles, workspace, metadata) if create_metadata else (handles, workspace)


def trtllm_destroy_ipc_workspace_for_all_reduce(workspace: Sequence[Sequence[int]], group: _Group = None) -> None:
    """Forgets a workspace of either kind, by its lists of addresses. One that is unknown, or was forgotten, is ignored.

    It does not wait for other ranks. The group's communicator stays.
    """
    for pointer in itertools.chain.from_iterable(workspace):
        number = _number(pointer)
        comm = None if number is None else _found.pop(number, None)
        if comm is None or number is None:
            continue
        _kept.pop(number, None)
        tensor = _owned[comm].pop(number)
        # Another workspace's tensor may be at its address by now.
        if tensor is not None and tensor not in _owned[comm].values() and _found.get(tensor) is comm:
            del _found[tensor]


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
    workspace: Sequence[Sequence[int]], group: _Group = None
) -> None:
    """As :func:`trtllm_destroy_ipc_workspace_for_all_reduce`."""
    trtllm_destroy_ipc_workspace_for_all_reduce(workspace, group)


def trtllm_lamport_initialize(buffer_ptr: int, size: int, dtype: "torch.dtype") -> None:
    """Fills ``size`` elements at an address with −0.0, on the current CUDA device if the process uses one, in its
    current stream. At addresses of workspaces there is nothing to do.

    Raises ``NotImplementedError`` for other dtypes than float32, float16 and bfloat16.
    """
    import torch

    from antiphon.comm.dlpack_utils import pack_strided_memory

    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise NotImplementedError(f"trtllm_lamport_initialize: {dtype} is not float32, float16 or bfloat16")
    if size == 0 or _number(buffer_ptr) is not None:
        return
    device = torch.cuda.current_device() if uses_cuda() else None
    num_bytes = size * dtype.itemsize
    pack_strided_memory(buffer_ptr, num_bytes, num_bytes, 1, dtype, device).fill_(-0.0)


def trtllm_lamport_initialize_all(
    buffer_0_ptr: int, buffer_1_ptr: int, buffer_2_ptr: int, size: int, dtype: "torch.dtype"
) -> None:
    """:func:`trtllm_lamport_initialize` of three buffers of ``size`` elements each; then it waits for the device."""
    import torch

    for pointer in (buffer_0_ptr, buffer_1_ptr, buffer_2_ptr):
        trtllm_lamport_initialize(pointer, size, dtype)
    if uses_cuda():
        torch.cuda.synchronize()


def of_tensor(
    caller: str,
    workspace: "torch.Tensor",
    world_size: int | None,
    world_rank: int | None,
    number: int | None = None,
) -> Communicator:
    """The communicator of a workspace by its tensor, whose values are not looked at.

    A copy of it, such as compiled programs make, is found by ``number``, or else by its values, which waits for the
    GPU.
    """
    comm = _found.get(workspace.data_ptr())
    if comm is None:
        comm = _of_copy(workspace, number)
    if comm is None or (
        (world_size is not None and world_size != comm.world_size)
        or (world_rank is not None and world_rank != comm.rank)
    ):
        raise _unknown(caller, comm, world_size, world_rank)
    return comm


def _of_copy(workspace: "torch.Tensor", number: int | None) -> Communicator | None:
    import torch

    if number is None and workspace.numel() and workspace.dtype == torch.int64:
        if workspace.is_cpu or not torch.cuda.is_current_stream_capturing():
            number = _number(int(workspace.flatten()[0]))
    return None if number is None else _found.get(number)


def of_pointers(caller: str, pointers: "torch.Tensor", world_size: int, rank: int) -> Communicator:
    """The communicator of a workspace by some of its addresses, in a tensor on the host."""
    number = _number(int(pointers[0]))
    comm = None if number is None else _found.get(number)
    if comm is None or (comm.rank, comm.world_size) != (rank, world_size):
        raise _unknown(caller, comm, world_size, rank)
    return comm


def _unknown(caller: str, comm: Communicator | None, world_size: int | None, rank: int | None) -> ValueError:
    if comm is None:
        return ValueError(f"{caller}: this is no workspace, or it was destroyed, or its group was")
    return ValueError(f"{caller}: rank {rank} of {world_size} was passed in, but the workspace is of {comm}")


def _meet(caller: str, rank: int, tp_size: int, group: _Group, comm_backend: Any) -> Communicator:
    import torch

    import antiphon.comm._operators  # noqa: F401  (so that what is compiled from now on finds them)

    comm = communicator(caller, group) if comm_backend is None or group is not None else communicator_of(caller, comm_backend)
    if (comm.rank, comm.world_size) != (rank, tp_size):
        raise ValueError(f"{caller}: rank {rank} of {tp_size} was passed in, but the group has {comm}")
    if uses_cuda() and tp_size > 1:
        comm.prepare_cuda(torch.cuda.current_device(), dtypes=[])
    comm.barrier()
    return comm


def _own(comm: Communicator, tensor: int | None) -> int:
    number = next(_numbers)
    _owned.setdefault(comm, {})[number] = tensor
    _found[number] = comm
    if tensor is not None:
        _found[tensor] = comm
    return number


def _address(number: int, part: int, rank: int) -> int:
    return _NOWHERE | number << _BITS | part << 12 | rank << 4


def _addresses(number: int, parts: int, tp_size: int) -> list[list[int]]:
    return [[_address(number, part, rank) for rank in range(tp_size)] for part in range(parts)]


def _number(pointer: int) -> int | None:
    """The number of the workspace to which an address belongs."""
    return (pointer & (1 << 48) - 1) >> _BITS if pointer >> 48 == _NOWHERE >> 48 else None


def _up(size: int) -> int:
    return -(-size // 16) * 16
