"""What mixed collectives check, what they are in terms of ``torch.distributed``, and how long their modes take."""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from antiphon._operators import Operators
from antiphon.comm._tensors import dtype_of
from antiphon.comm.mixed_comm import (
    FUSED,
    SCATTERS,
    MixedCommHandler,
    MixedCommMode,
    MixedCommOp,
    ParallelInfo,
    _name,
    _output_shape,
    _run,
)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WARP = 32
#: The largest blocks that are measured, in bytes.
_LARGEST = {"cuda": 128 << 20, "cpu": 4 << 20}


def _nothing(*arguments: Any) -> None:
    pass


_operators = Operators()
_operators.define(
    # No argument may be called `mode`: torch passes arguments on by name, to functions that have one of their own.
    "mixed_comm(Tensor x_in, Tensor(a!) x_out, int handler, int op_code, int mode_code, int[]? local_batches) -> ()",
    _run,
    _nothing,
)


def check_world(info: ParallelInfo) -> None:
    """Refuses a layout that is not that of the default group, if there is one."""
    if info.world_size == 1:
        raise ValueError("MixedCommHandler: world_size is 1, and there is nothing to communicate")
    if not dist.is_available() or not dist.is_initialized():
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    if (info.world_rank, info.world_size) != (rank, size):
        raise ValueError(
            f"MixedCommHandler: world_rank {info.world_rank} of world_size {info.world_size} was passed in, but the default group "
            f"has rank {rank} of {size}"
        )


def check_kind(dtype: torch.dtype | str, device: "torch.device | str") -> tuple[torch.dtype, torch.device]:
    dtype = dtype_of("MixedCommHandler", dtype)
    if dtype not in _DTYPES:
        raise ValueError(f"MixedCommHandler: dtype is {dtype}, not float16, bfloat16 or float32")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"MixedCommHandler: device is {device!r}, neither a CUDA device nor the CPU") from None
    if place.type not in _LARGEST:
        raise ValueError(f"MixedCommHandler: device is {place}, neither a CUDA device nor the CPU")
    if place.type == "cpu":
        return dtype, torch.device("cpu")
    found = torch.cuda.device_count()
    index = torch.cuda.current_device() if place.index is None and found else place.index or 0
    if index >= found:
        raise ValueError(f"MixedCommHandler: device is {place}, and there are {found} CUDA devices")
    return dtype, torch.device("cuda", index)


def check_grid(device: torch.device, grid_size: int | None) -> tuple[int, int | None]:
    """Blocks of a call, at most, for the caller and for the handler: on the host there are none, and any number will do."""
    most = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else None
    if grid_size is None:
        return most or 1, None
    if not _is_whole(grid_size) or grid_size < 1 or (most is not None and grid_size > most):
        raise ValueError(f"MixedCommHandler: grid_size is {grid_size!r}, not 1 to {most or 'any number'} (multiprocessors)")
    return grid_size, None if most is None else grid_size


def _is_whole(number: object) -> bool:
    return hasattr(number, "__index__") and not isinstance(number, bool)


def check_blocks(max_block_size: int | None, min_block_size: int, min_num_steps: int) -> None:
    most = min_block_size if max_block_size is None else max_block_size
    for name, size in (("min_block_size", min_block_size), ("max_block_size", most)):
        if not _is_whole(size) or size < _WARP or size % _WARP:
            raise ValueError(f"MixedCommHandler: {name} is {size!r}, not a multiple of {_WARP}")
    if most < min_block_size:
        raise ValueError(f"MixedCommHandler: max_block_size {most} is below min_block_size {min_block_size}")
    if not _is_whole(min_num_steps) or min_num_steps < 1:
        raise ValueError(f"MixedCommHandler: min_num_steps is {min_num_steps!r}, not 1 or more")


def check_tensor(name: str, tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} should be a torch.Tensor, not {type(tensor).__name__}")
    return tensor


def check_call(
    op: MixedCommOp,
    handler: MixedCommHandler,
    x_in: Tensor,
    x_out: Tensor | None,
    mode: MixedCommMode,
    local_batches: Sequence[int] | None,
) -> None:
    """Refuses what does not suit the handler. Texts begin as FlashInfer's."""
    info = handler.para_info

    def sizes() -> str:  # made for errors alone: a compiler cannot print every number
        return f"tp_size {info.tp_size}, dp_size {info.dp_size}"

    if op not in handler.valid_op_list:
        names = ", ".join(each.name for each in handler.valid_op_list)
        raise ValueError(f"Invalid op: {_name(MixedCommOp, op)}, valid with {sizes()}: {names}")
    if mode not in handler.valid_mode_list:
        names, called = ", ".join(each.name for each in handler.valid_mode_list), _name(MixedCommMode, mode)
        why = " (it needs NVLink multicast, which Antiphon does not use)" if called.endswith("_MC") else ""
        raise ValueError(f"Invalid mode: {called}{why}, valid with {sizes()}: {names}")
    for name, given in (("x_in", x_in), ("x_out", x_out)):
        if given is None and name == "x_out":
            continue
        tensor = check_tensor(name, given)
        if tensor.ndim < 2:
            raise ValueError(f"{name}.ndim should be at least 2, but it is {tensor.ndim}")
        if tensor.dtype != handler.dtype:
            raise ValueError(f"{name}.dtype should be {handler.dtype}, but it is {tensor.dtype}")
        if tensor.device != handler.device:
            raise ValueError(f"{name}.device should be {handler.device}, but it is {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} should be contiguous, but its strides are {tuple(tensor.stride())}")
        if not torch.compiler.is_compiling() and tensor.is_neg():
            raise ValueError(f"{name}: its values are not what is in memory (is_neg is set): pass {name}.resolve_neg()")
    if local_batches is not None:
        _check_batches(op, info, x_in, mode, local_batches)
    elif op in SCATTERS and x_in.shape[0] % info.dp_size:
        raise ValueError(f"x_in.shape[0] should be divisible by dp_size, but it is {x_in.shape[0]}, with {sizes()}")
    if x_out is not None:
        expected = _output_shape(op, info, x_in.shape, local_batches)
        if list(x_out.shape) != expected:
            raise ValueError(
                f"x_out.shape should be {expected} for x_in.shape {list(x_in.shape)} with {sizes()}, but it is {list(x_out.shape)}"
            )
        if not torch.compiler.is_compiling():
            _check_overlap(op, info, x_in, x_out, local_batches)


def _check_batches(
    op: MixedCommOp, info: ParallelInfo, x_in: Tensor, mode: MixedCommMode, local_batches: Sequence[int]
) -> None:
    if op == MixedCommOp.ALLREDUCE or mode not in FUSED:
        raise ValueError(
            f"local_batches are for the fused modes of operations that gather or scatter, not {op.name} by {mode.name}"
        )
    if not isinstance(local_batches, Sequence) or not all(_is_whole(rows) for rows in local_batches):
        raise TypeError(f"local_batches should be a sequence of integers, but they are {local_batches!r}")
    if len(local_batches) != info.dp_size or any(rows < 0 for rows in local_batches):
        raise ValueError(f"local_batches should be rows for each of dp_size {info.dp_size}, but they are {list(local_batches)}")
    rows = sum(local_batches) if op in SCATTERS else local_batches[info.dp_rank]
    if x_in.shape[0] != rows:
        raise ValueError(
            f"x_in.shape[0] should be {rows} on dp_rank {info.dp_rank} with local_batches {list(local_batches)}, but it is "
            f"{x_in.shape[0]}"
        )


def _check_overlap(
    op: MixedCommOp, info: ParallelInfo, x_in: Tensor, x_out: Tensor, local_batches: Sequence[int] | None
) -> None:
    first, second = x_in.data_ptr(), x_out.data_ptr()
    in_bytes, out_bytes = x_in.numel() * x_in.element_size(), x_out.numel() * x_out.element_size()
    if first >= second + out_bytes or second >= first + in_bytes:
        return
    if op == MixedCommOp.ALLREDUCE:
        is_in_place = first == second
    else:
        whole, block = (x_in, x_out) if op in SCATTERS else (x_out, x_in)
        dp_rank = info.dp_rank
        before = dp_rank * block.shape[0] if local_batches is None else sum(local_batches[:dp_rank])
        is_in_place = block.data_ptr() == whole[before:].data_ptr()
    if is_in_place:
        return
    raise ValueError("x_in and x_out overlap: they should be apart, or the smaller the rank's own block of the larger")


@torch.no_grad()  # as the fused modes, which no gradient passes
def run_by_torch(handler: MixedCommHandler, op: MixedCommOp, mode: MixedCommMode, x_in: Tensor, x_out: Tensor) -> None:
    """An operation as one collective of ``torch.distributed``, or as one in each of the handler's groups."""
    info = handler.para_info
    # Where nothing was checked before, too: no other memory is written.
    count = math.prod(_output_shape(op, info, x_in.shape, None))
    if x_out.numel() != count or (op in SCATTERS and x_in.shape[0] % info.dp_size):
        raise ValueError(f"x_in.shape {list(x_in.shape)} gives {count} elements with dp_size {info.dp_size}, x_out has {x_out.numel()}")
    by_groups = mode == MixedCommMode.NCCL_TP_DP
    if op == MixedCommOp.ALLREDUCE:
        if x_out.data_ptr() != x_in.data_ptr():
            x_out.copy_(x_in)
        dist.all_reduce(x_out)
    elif op == MixedCommOp.ALLGATHER:
        dist.all_gather_into_tensor(x_out, x_in)
    elif op == MixedCommOp.REDUCESCATTER:
        dist.reduce_scatter_tensor(x_out, x_in)
    elif op == MixedCommOp.ALLREDUCE_ALLGATHER and by_groups:
        summed = x_in.clone()
        dist.all_reduce(summed, group=handler.tp_comm_group)
        dist.all_gather_into_tensor(x_out, summed, group=handler.dp_comm_group)
    elif op == MixedCommOp.ALLREDUCE_ALLGATHER:
        gathered = x_in.new_empty(info.world_size * x_in.shape[0], *x_in.shape[1:])
        dist.all_gather_into_tensor(gathered, x_in)
        summed = gathered.view(info.inter_dp_size, info.inter_tp_size, info.local_dp_size, info.local_tp_size, -1).sum((1, 3))
        x_out.view(info.dp_size, -1).copy_(summed.view(info.dp_size, -1))
    elif by_groups:
        scattered = torch.empty_like(x_out)  # the output may be a block of the input
        dist.reduce_scatter_tensor(scattered, x_in, group=handler.dp_comm_group)
        dist.all_reduce(scattered, group=handler.tp_comm_group)
        x_out.copy_(scattered)
    else:
        # Every rank gets the block of its group from all ranks.
        blocks = x_in.view(info.inter_dp_size, 1, info.local_dp_size, 1, -1)
        row = blocks.expand(-1, info.inter_tp_size, -1, info.local_tp_size, -1).reshape(info.world_size, -1)
        received = torch.empty_like(row)
        dist.all_to_all_single(received, row)
        x_out.view(-1).copy_(received.sum(0))


def tuned_sizes(handler: MixedCommHandler) -> list[int]:
    """The bytes of blocks that are measured: of ``autotune_map``'s, those that the device makes short work of."""
    base = handler.autotune_base_bytes
    sizes = [base << k for k in range(handler.autotune_max_coef)]
    return [size for size in sizes if size <= _LARGEST[handler.device.type]]


def measure(
    handler: MixedCommHandler, sizes: Sequence[int]
) -> dict[tuple[MixedCommOp, MixedCommMode], list[float]]:
    """Seconds of every mode but ``AUTOTUNE`` at these sizes: the median over a few samples of the slowest rank."""
    times: dict[tuple[MixedCommOp, MixedCommMode], list[list[float]]] = {}
    width = sizes[0] // handler.dtype.itemsize
    for op, size in itertools.product(handler.valid_op_list, sizes):
        rows = size // sizes[0] * (handler.para_info.dp_size if op in SCATTERS else 1)
        x_in = torch.zeros(rows, width, dtype=handler.dtype, device=handler.device)
        x_out = x_in.new_empty(_output_shape(op, handler.para_info, x_in.shape, None))
        for mode in handler.valid_mode_list:
            if mode != MixedCommMode.AUTOTUNE:
                samples = _samples(handler, functools.partial(handler._run, op, mode, x_in, x_out, None))
                times.setdefault((op, mode), []).append(samples)
    everyone: list[Any] = [None] * handler.para_info.world_size
    dist.all_gather_object(everyone, times)

    def slowest(op: MixedCommOp, mode: MixedCommMode, k: int) -> float:
        samples = [max(of_rank) for of_rank in zip(*(each[op, mode][k] for each in everyone))]
        return float(statistics.median(samples))

    return {(op, mode): [slowest(op, mode, k) for k in range(len(sizes))] for op, mode in times}


def _samples(handler: MixedCommHandler, call: Callable[[], None], samples: int = 3) -> list[float]:
    """Seconds of one call: means of several, which are in a graph on a GPU if the default group's backend can be captured."""
    device = handler.device
    calls = 5 if device.type == "cpu" else 20

    def several() -> None:
        for _ in range(calls):
            call()

    several()  # the first calls connect the ranks
    if device.type == "cpu":
        return [_host_seconds(several) / calls for _ in range(samples)]
    with torch.cuda.device(device):
        replay = _captured(several) if _backend_of(device) in ("nccl", "antiphon") else several
        return [_gpu_seconds(handler, replay) / calls for _ in range(samples)]


def _backend_of(device: torch.device) -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD._get_backend(device).name())


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog is another thread
        work()
    return graph.replay


def _host_seconds(work: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _gpu_seconds(handler: MixedCommHandler, work: Callable[[], None]) -> float:
    start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    dist.barrier()
    assert handler._comm is not None
    handler._comm.barrier(device=handler.device.index)  # the GPUs start together, behind their hosts
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
