"""A sum over tensor parallel ranks and a gather or scatter over data parallel ranks in one call. After FlashInfer 0.6.18
comm/mixed_comm.py, on CUDA and host tensors.

Attention that runs data parallel beside an MLP that runs tensor parallel needs an all-reduce and an all-gather on the way into
the MLP, and a reduce-scatter and an all-reduce on the way back. FlashInfer's kernels for both need NVLink multicast and NVSHMEM;
Antiphon's need no multicast, and NVSHMEM only for the GPUs of several nodes. What NVSHMEM carries between machines was tried on none:
see the guide's page on clusters. The fused modes accumulate in float32 in the
order of the ranks, on several nodes those of each node first and then the nodes' sums, and round once, so that they give the same bits,
whatever the batch; the ``NCCL`` modes are ``torch.distributed``, of whatever backend, and round more often.
"""

import enum
import itertools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from antiphon import _core, _timeout_of
from antiphon.comm.cuda_ipc import communicator, forget

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from antiphon import Communicator
    from antiphon.comm.abstractions import CommBackend
    from antiphon.torch.cuda import Streams

__all__ = ["MixedCommHandler", "MixedCommMode", "MixedCommOp", "ParallelInfo", "run_mixed_comm"]


class MixedCommOp(enum.IntEnum):
    """The operations. With ``B`` rows on each of ``dp`` data parallel ranks:

    ``ALLREDUCE`` (``[B, …]`` to ``[B, …]``, the sum over all ranks), ``ALLGATHER`` (``[B, …]`` to ``[B * dp, …]``),
    ``REDUCESCATTER`` (``[B * dp, …]`` to ``[B, …]``), ``ALLREDUCE_ALLGATHER`` (``[B, …]`` to ``[B * dp, …]``, whose block ``d`` is
    the sum over the tensor parallel group of data parallel rank ``d``) and ``REDUCESCATTER_ALLREDUCE`` (``[B * dp, …]`` to
    ``[B, …]``, this data parallel rank's block of the sum over all ranks).
    """

    ALLREDUCE = 0
    ALLGATHER = 1
    REDUCESCATTER = 2
    ALLREDUCE_ALLGATHER = 3
    REDUCESCATTER_ALLREDUCE = 4


class MixedCommMode(enum.IntEnum):
    """How an operation is carried out. Those that end in ``MC`` need NVLink multicast, which Antiphon does not use."""

    FUSED_OPT_WAITS_MC = 0
    FUSED_OPT_WAITS_UC = 1
    FUSED_OPT_BYTES1_MC = 2
    FUSED_OPT_BYTES1_UC = 3
    FUSED_OPT_BYTES2_MC = 4
    FUSED_OPT_BYTES2_UC = 5
    NCCL_ONE = 6
    NCCL_TP_DP = 7
    AUTOTUNE = 8


_Op, _Mode = MixedCommOp, MixedCommMode
#: Our names of the fused modes.
FUSED: dict[int, str | None] = {
    _Mode.FUSED_OPT_WAITS_UC: "waits",
    _Mode.FUSED_OPT_BYTES1_UC: "bytes1",
    _Mode.FUSED_OPT_BYTES2_UC: "bytes2",
    _Mode.AUTOTUNE: None,
}
_OF_NAME = {name: _Mode(mode) for mode, name in FUSED.items() if name is not None}
#: What makes a layout.
_SIZES = ("local_tp_size", "inter_tp_size", "local_dp_size", "inter_dp_size")
#: The bytes of each GPU for data under way: with what else a communicator has there it takes less than 100 MB.
_STAGING_BYTES = 64 << 20
SCATTERS = (_Op.REDUCESCATTER, _Op.REDUCESCATTER_ALLREDUCE)
#: The bytes at which FlashInfer's tables begin, and of which it measures the doubles up to 128 MiB.
_BASE_BYTES, _DOUBLES = 8192, 15
#: Blocks of a call between nodes, at most.
_MOST_BLOCKS_BETWEEN_NODES = 16
#: Threads of a block of Antiphon's kernels, on one node and between nodes.
_THREADS, _THREADS_BETWEEN_NODES = 128, 256

_handlers: "WeakValueDictionary[int, MixedCommHandler]" = WeakValueDictionary()
_numbers = itertools.count(1)


class ParallelInfo(_core.ParallelInfo):
    """The ranks and their groups: ranks of a node (local) and nodes (inter), each cut into tensor and data parallel parts.

    ``world_rank = local_rank + local_size * inter_rank``, ``local_rank = local_tp_rank + local_tp_size * local_dp_rank`` and
    ``inter_rank = inter_tp_rank + inter_tp_size * inter_dp_rank``. Of a pair of sizes that are ``None`` the tensor parallel one takes
    all; one alone follows from the other. ``ValueError`` with names and numbers if sizes or ranks do not fit.
    """

    def get_local_comm_group(self) -> "ProcessGroup":
        """A new group of this node's ranks. All ranks of the world call it together, as the two below."""
        return _new_group(self.local_ranks(), self.world_rank)

    def get_tp_comm_group(self) -> "ProcessGroup":
        """A new group of the ranks that share tensors with this one."""
        return _new_group(self.tp_ranks(), self.world_rank)

    def get_dp_comm_group(self) -> "ProcessGroup":
        """A new group of the data parallel ranks of this one."""
        return _new_group(self.dp_ranks(), self.world_rank)

    def get_local_full_group_local_ranks(self) -> list[int]:
        """The local ranks of a node."""
        return list(range(self.local_size))

    def get_local_tp_group_local_ranks(self, local_dp_rank: int | None = None) -> list[int]:
        """The local ranks that share tensors, of this or another ``local_dp_rank``."""
        first = _below(self.local_dp_size, self.local_dp_rank, local_dp_rank=local_dp_rank) * self.local_tp_size
        return list(range(first, first + self.local_tp_size))

    def get_local_dp_group_local_ranks(self, local_tp_rank: int | None = None) -> list[int]:
        """The local data parallel ranks, of this or another ``local_tp_rank``."""
        first = _below(self.local_tp_size, self.local_tp_rank, local_tp_rank=local_tp_rank)
        return list(range(first, self.local_size, self.local_tp_size))


def _below(size: int, own: int, **rank: int | None) -> int:
    """A rank that was passed, or this rank's own."""
    ((name, value),) = rank.items()
    if value is not None and not 0 <= value < size:
        raise ValueError(f"{name} is {value}, not 0 to {size - 1}")
    return own if value is None else value


def _new_group(partition: list[list[int]], rank: int) -> "ProcessGroup":
    """A new group of this rank's part. It waits as long as the default group."""
    import torch.distributed as dist

    world, own = dist.group.WORLD, None
    timeout = None if world is None else _timeout_of(world)
    for ranks in partition:
        group: ProcessGroup = dist.new_group(ranks, timeout=timeout)
        own = group if rank in ranks else own
    assert own is not None, "every rank is in a part"
    return own


class MixedCommHandler:
    """The mixed collectives of the default group of ``torch.distributed``, of any backend. All ranks make one together.

    ``local_tp_size`` to ``inter_dp_size`` are as in :class:`ParallelInfo`; tensors are of ``dtype`` (float16, bfloat16 or float32)
    and on ``device`` (``"cuda:i"`` or ``"cpu"``). On CUDA, a fused operation has at most ``grid_size`` blocks (and at least one for
    each peer), if that is given. ``max_block_size``, ``min_block_size`` and ``min_num_steps`` are checked and change nothing, as the
    blocks of Antiphon's kernels are fixed. On several nodes with CUDA, ``ib_enable_ibgda`` is whether NVSHMEM sends from the GPU
    (``NVSHMEM_IB_ENABLE_IBGDA``, unless the environment has it), and without ``should_init_nvshmem`` the program has initialised it,
    as PE ``world_rank`` of ``world_size``; in other cases both have no effect. With ``use_autotune``, calls without a mode take the fastest of the fused modes: as :meth:`run_autotune` measured on this machine, or
    else by a built-in table.

    The ranks compare their arguments. Raises ``ValueError`` for sizes and ranks that do not fit, nodes that are not those of the ranks
    (:attr:`antiphon.Communicator.nodes`), a world of one rank, dtypes and devices that are not served, and blocks that FlashInfer would
    refuse; ``RuntimeError`` that begins with "Failed to initialize nvshmem" on all ranks, if one cannot use it on several nodes with CUDA; ``RuntimeError`` without a process group, on ranks whose arguments are right while another rank's are not, and on all ranks if
    their layouts, dtypes, kinds of device, ``grid_size`` or ``use_autotune`` differ.
    """

    #: Whether calls are possible: from the end of the constructor to :meth:`shutdown`.
    is_running = False

    def __init__(
        self,
        world_rank: int,
        world_size: int,
        local_rank: int,
        local_size: int,
        inter_rank: int,
        inter_size: int,
        local_tp_size: int | None,
        local_dp_size: int | None,
        inter_tp_size: int | None,
        inter_dp_size: int | None,
        dtype: "torch.dtype | str",
        device: "torch.device | str",
        grid_size: int | None = None,
        max_block_size: int | None = None,
        min_block_size: int = 256,
        min_num_steps: int = 4,
        ib_enable_ibgda: bool = True,
        should_init_nvshmem: bool = True,
        use_autotune: bool = True,
    ) -> None:
        import torch

        from antiphon.comm import _mixed

        layout = world_rank, world_size, local_rank, local_size, inter_rank, inter_size
        parts = local_tp_size, local_dp_size, inter_tp_size, inter_dp_size
        problem: Exception | None = None
        try:
            self.para_info = ParallelInfo(*layout, *parts)
            _mixed.check_world(self.para_info)
            self.dtype, self.device = _mixed.check_kind(dtype, device)
            self.grid_size, self._most_blocks = _mixed.check_grid(self.device, grid_size)
            _mixed.check_blocks(max_block_size, min_block_size, min_num_steps)
            self.use_autotune = bool(use_autotune)
        except Exception as error:
            problem = error
        self._comm, self._group = self._agree(problem, grid_size)
        info = self.para_info
        self.min_block_size, self.min_num_steps = min_block_size, min_num_steps
        #: The choice at ``8192 << k`` bytes of each data parallel rank, for each operation: a list as FlashInfer's, by ``k``.
        self.autotune_map: dict[MixedCommOp, list[MixedCommMode]] = {}
        #: Seconds at those sizes, as far as :meth:`run_autotune` measured them, for each operation and mode.
        self.autotune_times: dict[tuple[MixedCommOp, MixedCommMode], list[float]] = {}
        self.autotune_base_bytes = _BASE_BYTES
        self.autotune_max_coef = max(_DOUBLES - (info.dp_size.bit_length() - 1), 1)
        self.valid_op_list, self.valid_mode_list = self.get_valid_op_list(), self.get_valid_mode_list()
        self._fused_modes = frozenset(self.valid_mode_list) & FUSED.keys()
        # Found once: each call asks, and importing torch there takes as long as the answer.
        self._is_compiling = torch.compiler.is_compiling
        by_torch = _Mode.NCCL_TP_DP if info.use_mixed else _Mode.NCCL_ONE
        self._default_mode = _Mode.AUTOTUNE if self.use_autotune else by_torch
        on_gpu = [mode for mode in self.valid_mode_list if FUSED.get(mode) and self.device.type == "cuda"]
        #: The threads of a block, by what FlashInfer calls ``block_size_y``. On the host there are no blocks.
        threads = _THREADS_BETWEEN_NODES if info.use_inter else _THREADS
        self.max_block_size_dict = {(op, mode): {1: threads} for op in self.valid_op_list for mode in on_gpu}
        self._is_prepared = False
        self._streams: Streams | None = None
        index = self.device.index
        self._uses_nvshmem = self.device.type == "cuda" and info.use_inter
        if self._uses_nvshmem:
            blocks = min(self.grid_size, _MOST_BLOCKS_BETWEEN_NODES)
            os.environ.setdefault("NVSHMEM_IB_ENABLE_IBGDA", str(int(bool(ib_enable_ibgda))))
            os.environ.setdefault("NVSHMEM_IBGDA_NUM_RC_PER_PE", str(blocks))
        if self.device.type == "cuda":
            if self._group is not None:
                self._streams = self._group.streams_on(index)
            elif not self._uses_nvshmem:
                self._comm.prepare_cuda(index, dtypes=[], staging_bytes=_STAGING_BYTES)
        of_dtype = str(self.dtype).removeprefix("torch.")
        self._core: _core.MixedHandler | None = _core.MixedHandler(
            self._comm, info, index, of_dtype, self._most_blocks, join_nvshmem=not should_init_nvshmem
        )
        # In this order on all ranks.
        self.local_comm_group = info.get_local_comm_group() if info.use_inter else None
        self.tp_comm_group = info.get_tp_comm_group() if info.use_mixed else None
        self.dp_comm_group = info.get_dp_comm_group() if info.use_mixed else None
        self._number = next(_numbers)
        _handlers[self._number] = self
        self.is_running = True
        if self.use_autotune:
            self._read_tables()

    def __repr__(self) -> str:
        info = self.para_info
        state = "" if self.is_running else ", not running"
        sizes = f"rank {info.world_rank} of {info.world_size}, tp_size {info.tp_size}, dp_size {info.dp_size}"
        return f"<antiphon.comm.MixedCommHandler: {sizes}, {self.dtype} on {self.device}{state}>"

    def _agree(self, problem: Exception | None, grid_size: int | None) -> "tuple[Communicator, Any]":
        """The communicator of the default group, with the group if that is ours. Raises on all ranks if one has a problem, or they
        differ."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise problem or RuntimeError("MixedCommHandler: call torch.distributed.init_process_group first")
        mine: dict[str, Any] = {}
        if problem is None:
            info = self.para_info
            mine = {name: getattr(info, name) for name in _SIZES} | {"dtype": str(self.dtype), "device": self.device.type}
            mine |= {"grid_size": grid_size, "use_autotune": self.use_autotune}
        try:
            comm, group = _communicator()
            every = comm.exchange_objects((None if problem is None else str(problem), mine))
        except (RuntimeError, TimeoutError):
            forget(dist.group.WORLD)
            if problem is not None:  # where there is no communicator either
                raise problem from None
            raise
        if problem is not None:
            raise problem
        for rank, (text, _) in enumerate(every):
            if text is not None:
                raise RuntimeError(f"MixedCommHandler: rank {rank} cannot make its handler: {text}")
        for (rank, (_, theirs)), name in itertools.product(enumerate(every), mine):
            if theirs[name] != (first := every[0][1][name]):
                values = f"{first} on rank 0, {theirs[name]} on rank {rank}"
                raise RuntimeError(f"MixedCommHandler: {name} differs between the ranks: {values}")
        if comm.nodes != info.local_ranks():
            raise ValueError(
                f"MixedCommHandler: with local_size {info.local_size} and inter_size {info.inter_size} the nodes have the ranks "
                f"{info.local_ranks()}, but those of the communicator are {comm.nodes}"
            )
        return comm, group

    def get_valid_op_list(self) -> list[MixedCommOp]:
        """The operations of the layout: fused ones if it is both tensor and data parallel."""
        return [MixedCommOp(op) for op in self.para_info.valid_ops()]

    def get_valid_mode_list(self) -> list[MixedCommMode]:
        """The modes of the layout, in FlashInfer's order, without those that need multicast."""
        info = self.para_info
        modes = {
            _Mode.FUSED_OPT_WAITS_UC: True,
            _Mode.FUSED_OPT_BYTES1_UC: info.use_local_tp,
            _Mode.FUSED_OPT_BYTES2_UC: info.use_inter_tp,
            _Mode.NCCL_ONE: True,
            _Mode.NCCL_TP_DP: info.use_mixed,
            _Mode.AUTOTUNE: self.use_autotune,
        }
        return [mode for mode, is_valid in modes.items() if is_valid]

    def init_virtual_memory(self) -> None:
        """Does nothing: the constructor has brought the ranks together. ``RuntimeError`` after :meth:`shutdown`, and while the handler
        is prepared for a checkpoint."""
        self._running()

    def init_nvshmem(self) -> None:
        """Does nothing: the constructor has initialised NVSHMEM, if the layout and the device need it. ``RuntimeError`` as
        :meth:`init_virtual_memory`."""
        self._running()

    def run_autotune(self) -> None:
        """Measures every mode but ``AUTOTUNE``, and keeps the fused ones' table where every handler on this machine finds it.

        All ranks call it together. ``AUTOTUNE`` goes by the fused modes alone, whose bits are equal; the times of the
        ``NCCL`` modes are in ``autotune_times``. ``NotImplementedError`` on several nodes with CUDA, where ``AUTOTUNE`` goes by a
        built-in table.
        """
        from antiphon.comm import _mixed

        core = self._running()
        sizes = _mixed.tuned_sizes(self)
        core.tune(sizes[0], sizes[-1])
        self.autotune_times = _mixed.measure(self, sizes)
        self._read_tables()

    def _read_tables(self) -> None:
        sizes = [_BASE_BYTES << k for k in range(self.autotune_max_coef)]
        for op in self.valid_op_list:
            self.autotune_map[op] = [self._select(op, size) for size in sizes]

    def _select(self, op: MixedCommOp, num_bytes: int) -> MixedCommMode:
        return _OF_NAME[self._running().select(op, num_bytes)]

    def select_autotune_mode(self, op: MixedCommOp, x_in: "torch.Tensor") -> MixedCommMode:
        """The mode that ``AUTOTUNE`` stands for, for such an input. ``RuntimeError`` without ``use_autotune``."""
        if not self.use_autotune:
            raise RuntimeError("select_autotune_mode: the handler was made with use_autotune=False")
        if op not in self.valid_op_list:
            raise ValueError(f"Invalid op: {_name(MixedCommOp, op)}")
        from antiphon.comm import _mixed

        _mixed.check_tensor("x_in", x_in)
        num_bytes = x_in.numel() * x_in.element_size()
        return self._select(op, num_bytes // (self.para_info.dp_size if op in SCATTERS else 1))

    def shutdown(self) -> None:
        """Ends the handler and the groups that it made. All ranks call it together, once: ``RuntimeError`` after that."""
        import torch.distributed as dist

        if not self.is_running:
            raise RuntimeError("Should not call shutdown() more than once.")
        core, self._core, self.is_running = self._core, None, False
        try:
            if not self._comm.closed:
                if self._is_prepared and core is not None:  # the memory is the communicator's, which goes on
                    core.restore_memory()
                self._comm.barrier()
                if core is not None:
                    core.close()
        except (RuntimeError, TimeoutError):
            # The ranks of a communicator that has failed need another one.
            forget(dist.group.WORLD)
            raise
        finally:
            for name in ("local_comm_group", "tp_comm_group", "dp_comm_group"):
                group = getattr(self, name)
                if group is not None and dist.is_initialized():
                    dist.destroy_process_group(group)
                setattr(self, name, None)

    def __del__(self) -> None:
        # The other ranks may be elsewhere, so that this one waits for none: what it holds goes with it.
        self.is_running = False

    def checkpoint_prepare(self) -> None:
        """Gives the memory of the GPU back, and keeps its addresses. All ranks call it together, with nothing under way; a second
        time it does nothing.

        It is the memory of the communicator, which other handlers on it share, as its other CUDA calls do: none of these may be made
        before :meth:`checkpoint_restore`, nor graphs launched that hold some; calls of this handler raise ``RuntimeError``. On
        the host there is nothing to give back. If one rank fails, all raise. ``NotImplementedError`` on several nodes.
        """
        core = self._running(even_prepared=True)
        self._refuse_nodes("checkpoint_prepare")
        if not self._is_prepared:
            core.release_memory()
            self._is_prepared = True

    def checkpoint_restore(self, comm_backend: "CommBackend") -> None:
        """Undoes :meth:`checkpoint_prepare`: graphs that were captured before go on. All ranks call it together; a second time it does
        nothing.

        Raises ``ValueError`` if the backend has another rank or size than the handler, or does not tell them. If one rank fails, for that or for too little
        memory, all raise, and it can be called again. ``NotImplementedError`` on several nodes.
        """
        core = self._running(even_prepared=True)
        self._refuse_nodes("checkpoint_restore")
        info, problem = self.para_info, None
        try:
            rank, size = comm_backend.Get_rank(), comm_backend.Get_size()
        except Exception as error:
            problem = f"checkpoint_restore: {comm_backend!r} does not tell its rank and size: {error}"
        else:
            if (rank, size) != (info.world_rank, info.world_size):
                mine = f"rank {info.world_rank} of {info.world_size}"
                problem = f"checkpoint_restore: comm_backend is rank {rank} of {size}, the handler {mine}"
        if self._is_prepared:
            core.restore_memory(problem)  # the other ranks wait there
            self._is_prepared = False
        elif problem is not None:
            raise ValueError(problem)

    def _refuse_nodes(self, method: str) -> None:
        if self.para_info.use_inter:
            raise NotImplementedError(f"{method}: checkpoints are for one node, and inter_size is {self.para_info.inter_size}")

    def _running(self, even_prepared: bool = False) -> _core.MixedHandler:
        if not self.is_running or self._core is None:
            raise RuntimeError("the handler was shut down")
        if self._is_prepared and not even_prepared:
            raise RuntimeError("the handler is prepared for a checkpoint: call checkpoint_restore first")
        return self._core

    def _run_fused(
        self,
        op: int,
        mode: int,
        x_in: "torch.Tensor",
        x_out: "torch.Tensor | None",
        local_batches: Sequence[int] | None,
        strict: bool = False,
    ) -> "torch.Tensor":
        core = self._core
        if core is None or self._is_prepared or not self.is_running:
            core = self._running()
        if self._streams is not None:
            self._streams.enter()  # behind the calls that were made on our group itself
        result: torch.Tensor = core.run(op, x_in, x_out, mode=FUSED[mode], rows=local_batches, strict=strict)
        return result

    def _run(
        self, op: int, mode: int, x_in: "torch.Tensor", x_out: "torch.Tensor", local_batches: Sequence[int] | None
    ) -> None:
        if mode in FUSED:
            self._run_fused(op, mode, x_in, x_out, local_batches)
        else:
            from antiphon.comm import _mixed

            self._running()
            if op not in self.valid_op_list or mode not in self.valid_mode_list:
                _mixed.check_call(MixedCommOp(op), self, x_in, x_out, MixedCommMode(mode), local_batches)
            _mixed.run_by_torch(self, MixedCommOp(op), MixedCommMode(mode), x_in, x_out)


def run_mixed_comm(
    op: MixedCommOp,
    handler: MixedCommHandler,
    x_in: "torch.Tensor",
    x_out: "torch.Tensor | None" = None,
    mode: MixedCommMode | None = None,
    *,
    skip_check: bool = False,
    local_batches: Sequence[int] | None = None,
) -> "torch.Tensor":
    """Runs an operation on ``x_in`` and returns ``x_out``, which is made unless given. Shapes are in :class:`MixedCommOp`.

    Without a ``mode`` it is ``AUTOTUNE`` if the handler has that, else ``NCCL_TP_DP`` if that is valid, else ``NCCL_ONE``.
    ``local_batches``, which FlashInfer does not have, are the rows of each data parallel rank, 0 allowed, where they are not equal:
    equal lists on all ranks, for the fused modes of all operations but ``ALLREDUCE``. ``x_out`` may be ``x_in`` for ``ALLREDUCE``; for
    the others the smaller tensor may be this rank's own block of the larger one.

    Raises ``ValueError`` for arguments that do not suit the handler, unless ``skip_check`` (what would touch other memory is refused
    in any case), and for a tensor that requires grad, unless grad mode is off: no gradient is tracked; ``RuntimeError`` on all ranks that call something else, or with other rows, than another rank. Only the fused modes
    compare: what unlike calls of the ``NCCL`` modes do, or of a fused mode on one rank and of ``NCCL`` on another, is up to the
    backend of the default group, and to its timeout.
    """
    if mode is None:
        mode = handler._default_mode
    is_compiling = handler._is_compiling()
    if mode in handler._fused_modes and not is_compiling:
        # What is wrong is found in compiled code, and explained here.
        try:
            return handler._run_fused(op, mode, x_in, x_out, local_batches, not skip_check)
        except (OverflowError, TypeError, ValueError):
            if not skip_check:
                _check(op, handler, x_in, x_out, mode, local_batches)
            raise
    if not is_compiling:
        from antiphon._operators import refuse_gradients

        refuse_gradients("run_mixed_comm", (x_in, x_out))
    if not skip_check:
        _check(op, handler, x_in, x_out, mode, local_batches)
    if x_out is None:
        x_out = x_in.new_empty(_output_shape(op, handler.para_info, x_in.shape, local_batches))
    if is_compiling:
        import torch

        torch.ops.antiphon.mixed_comm(x_in, x_out, handler._number, int(op), int(mode), local_batches)
    else:
        handler._run(op, mode, x_in, x_out, local_batches)
    return x_out


def _check(*arguments: Any) -> None:
    from antiphon.comm import _mixed

    _mixed.check_call(*arguments)


def _is_compute_capability_supported(compute_capability: int) -> bool:
    """Whether GPUs of this compute capability (90 for 9.0) are served: those from 8.0 on."""
    return compute_capability >= 80


run_mixed_comm.is_compute_capability_supported = _is_compute_capability_supported  # type: ignore[attr-defined]


def _output_shape(
    op: MixedCommOp, info: ParallelInfo, shape: Sequence[int], local_batches: Sequence[int] | None
) -> list[int]:
    rows, *rest = shape
    if op != _Op.ALLREDUCE:
        if local_batches is not None:
            rows = local_batches[info.dp_rank] if op in SCATTERS else sum(local_batches)
        else:
            rows = rows // info.dp_size if op in SCATTERS else rows * info.dp_size
    return [rows, *rest]


def _run(
    x_in: "torch.Tensor",
    x_out: "torch.Tensor",
    handler: int,
    op_code: int,
    mode_code: int,
    local_batches: Sequence[int] | None,
) -> None:
    """What the operator ``torch.ops.antiphon.mixed_comm`` does."""
    found = _handlers.get(handler)
    if found is None:
        raise RuntimeError(f"mixed_comm: handler {handler} is gone")
    found._run(op_code, mode_code, x_in, x_out, local_batches)


def _name(kind: type[enum.IntEnum], value: Any) -> str:
    return value.name if isinstance(value, kind) else repr(value)


def _communicator() -> "tuple[Communicator, Any]":
    """That of the default group: its own, if its backend is ours, with the group then."""
    group_module = sys.modules.get("antiphon.torch.group")
    if group_module is not None:
        import torch.distributed as dist

        world = dist.group.WORLD
        if isinstance(world, group_module.Group):
            return world.comm, world
    return communicator("MixedCommHandler", None), None
