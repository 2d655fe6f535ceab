"""``nccl_ep_dispatch``, ``nccl_ep_combine``, and the functions around them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from antiphon import Communicator
from antiphon._core import Moe
from antiphon.comm.cuda_ipc import communicator
from antiphon.moe._arguments import check_ids, check_tensors, experts, hidden_size, router_weights, whole
from antiphon.moe._by_expert import ByExpertReceived, ByExpertRoutes, CombineByMap, DispatchByMap, by_expert_calls_of, map_of

__all__ = [
    "EpBuffer",
    "alloc_ep_symm_buffer",
    "ensure_nccl_ep_bootstrapped",
    "is_nccl_ep_bootstrapped",
    "nccl_ep_combine",
    "nccl_ep_dispatch",
    "nccl_ep_finalize",
    "new_nccl_ep_buffer",
]


class _Limits(NamedTuple):
    """What buffers must not exceed; equal on all ranks."""

    num_experts: int
    max_tokens_per_rank: int
    recv_capacity_per_rank: int | None
    hidden_dim: int
    num_topk: int


class _Context(NamedTuple):
    comm: Communicator
    limits: _Limits
    num_sms: int
    zero_copy: bool


#: The last that was made, and those of all groups.
_context: _Context | None = None
_of_groups: dict[Communicator, _Context] = {}


def ensure_nccl_ep_bootstrapped(
    ep_group: Any,
    num_experts: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int | None,
    hidden_dim: int,
    num_topk: int,
    num_sms: int = 0,
    zero_copy: bool = False,
) -> None:
    """Prepares a group for buffers of at most these sizes; all ranks call it together. Of a group that is prepared it returns at once.

    ``num_experts`` is the number of all ranks. ``recv_capacity_per_rank`` is the number of rows that a rank receives; with ``None`` it
    receives what is sent, and the host waits for the counts. Calls use at most ``num_sms`` multiprocessors, 0 being
    :attr:`antiphon.Moe.NUM_SMS`. ``zero_copy`` needs a capacity and changes nothing else: any memory serves.

    Raises ``TypeError`` and ``ValueError`` for numbers that are not served, and ``ValueError`` if ranks pass different ones.
    """
    global _context
    call = "ensure_nccl_ep_bootstrapped"
    comm = communicator(call, ep_group)
    if comm in _of_groups:
        return
    capacity = recv_capacity_per_rank
    limits = _Limits(
        experts(call, num_experts, comm.world_size),
        whole(call, "max_tokens_per_rank", max_tokens_per_rank, 1),
        None if capacity is None else whole(call, "recv_capacity_per_rank", capacity),
        hidden_size(call, hidden_dim),
        whole(call, "num_topk", num_topk, 1),
    )
    num_sms = whole(call, "num_sms", num_sms) or Moe.NUM_SMS
    if zero_copy and capacity is None:
        raise ValueError(f"{call}: zero_copy needs recv_capacity_per_rank")
    of_ranks = comm.exchange_objects(limits)
    for rank, theirs in enumerate(of_ranks):
        if theirs != of_ranks[0]:
            raise ValueError(f"{call}: rank 0 passed {of_ranks[0]._asdict()}; rank {rank} passed {theirs._asdict()}")
    by_expert_calls_of(comm)
    for closed in [other for other in _of_groups if other.closed]:
        del _of_groups[closed]
    _context = _of_groups[comm] = _Context(comm, limits, num_sms, bool(zero_copy))


def is_nccl_ep_bootstrapped() -> bool:
    """Whether a group is prepared, and its communicator open."""
    return _context is not None and not _context.comm.closed


def nccl_ep_finalize() -> None:
    """Forgets all groups. Nothing is communicated, and buffers stay usable."""
    global _context
    _context = None
    _of_groups.clear()


def alloc_ep_symm_buffer(
    shape: Sequence[int], dtype: torch.dtype, ep_group: Any, *, device: "torch.device | str | None" = None
) -> Tensor:
    """A tensor for the received rows of a call, or for gradients: by default on the current GPU, or without one on the CPU. Calls write
    to any memory, so ranks do not wait for each other here, and ``ep_group`` is only checked."""
    communicator("alloc_ep_symm_buffer", ep_group)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    return torch.empty(tuple(shape), dtype=dtype, device=device)


class EpBuffer:
    """What a dispatch and its combine share: :func:`new_nccl_ep_buffer` makes it. A combine goes along the last dispatch."""

    #: int64 ``[L]``, of the last dispatch: how many rows each expert of this rank has, with the padding.
    tokens_per_expert: Tensor
    #: int64 ``[1]``, of the last dispatch: how many rows there would be without a capacity, with the padding.
    total_recv_tokens: Tensor

    def __init__(self, context: _Context, top_k: int, limits: _Limits, alignment: int) -> None:
        self.top_k, self.alignment, self.eager = top_k, alignment, limits.recv_capacity_per_rank is None
        self.max_tokens_per_rank, self.recv_capacity_per_rank = limits.max_tokens_per_rank, limits.recv_capacity_per_rank
        self.hidden_dim, self.zero_copy = limits.hidden_dim, context.zero_copy
        self.num_local_experts = limits.num_experts // context.comm.world_size
        self._num_experts = limits.num_experts
        self._calls = by_expert_calls_of(context.comm)
        self._calls.dispatch_sms = self._calls.combine_sms = context.num_sms
        self._handle: ByExpertRoutes | None = None

    def __repr__(self) -> str:
        capacity = "as many rows as are sent" if self.eager else f"{self.recv_capacity_per_rank} rows"
        return f"<antiphon.moe.fused_a2a.EpBuffer: top-{self.top_k}, hidden {self.hidden_dim}, {capacity}>"


def new_nccl_ep_buffer(
    top_k: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int | None,
    hidden_dim: int,
    num_local_experts: int,
    alignment: int = 0,
    dispatch_fwd_quant_recipe: Any = None,
    combine_bwd_quant_recipe: Any = None,
    *,
    ep_group: Any = None,
) -> EpBuffer:
    """A buffer for one dispatch and its combine, between the ranks of ``ep_group``, by default the last that was prepared. It
    communicates nothing. The rows of each expert are padded to a multiple of ``alignment``, 0 or a power of two.

    Raises ``RuntimeError`` for a group that :func:`ensure_nccl_ep_bootstrapped` has not prepared; ``ValueError`` for numbers that
    exceed what it was prepared for, or do not suit each other; ``NotImplementedError`` for recipes: rows are moved as they are, and
    Transformer Engine's tensors of MXFP8 are not made.
    """
    call = "new_nccl_ep_buffer"
    context = _context if ep_group is None else _of_groups.get(communicator(call, ep_group))
    if context is None or context.comm.closed:
        raise RuntimeError(f"{call}: call ensure_nccl_ep_bootstrapped first")
    for name, recipe in (
        ("dispatch_fwd_quant_recipe", dispatch_fwd_quant_recipe),
        ("combine_bwd_quant_recipe", combine_bwd_quant_recipe),
    ):
        if recipe is not None:
            raise NotImplementedError(f"{call}: {name} is not served: rows are moved as they are. Pass None")
    most = context.limits
    local = most.num_experts // context.comm.world_size
    if whole(call, "num_local_experts", num_local_experts, 1) != local:
        raise ValueError(f"{call}: num_local_experts is {num_local_experts}; the group was prepared for {local}")
    top_k = whole(call, "top_k", top_k, 1, most.num_topk)
    max_tokens = whole(call, "max_tokens_per_rank", max_tokens_per_rank, 1, most.max_tokens_per_rank)
    hidden = hidden_size(call, whole(call, "hidden_dim", hidden_dim, 1, most.hidden_dim))
    alignment = whole(call, "alignment", alignment)
    if alignment & (alignment - 1):
        raise ValueError(f"{call}: alignment must be 0 or a power of two, not {alignment}")
    capacity = recv_capacity_per_rank
    if (capacity is None) != (most.recv_capacity_per_rank is None):
        raise ValueError(
            f"{call}: recv_capacity_per_rank is {capacity}; the group was prepared for {most.recv_capacity_per_rank}"
        )
    if capacity is not None and most.recv_capacity_per_rank is not None:
        capacity = whole(call, "recv_capacity_per_rank", capacity, 0, most.recv_capacity_per_rank)
        if capacity % max(alignment, 1):
            raise ValueError(f"{call}: recv_capacity_per_rank is {capacity}, which is no multiple of alignment, {alignment}")
    return EpBuffer(context, top_k, _Limits(most.num_experts, max_tokens, capacity, hidden, top_k), alignment)


def nccl_ep_dispatch(
    buffer: EpBuffer,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    recv_tokens: Tensor | None = None,
    recv_topk_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sends each token (``tokens``, ``[T, H]`` of bfloat16, float16, float32, or on the CPU float64) to a row for each expert that
    ``topk_idx`` (int64 or int32 ``[T, K]``) names. An id outside ``0..E`` names none. An expert that a token names twice has one row,
    with the sum of the weights.

    Gives the rows ``[P, H]``, ordered by expert, source rank and token; how many each expert has, with the padding, int64 ``[L]``;
    and the weights of the rows, float32 ``[P]``, from ``topk_weights`` ``[T, K]``. Rows to which no token comes are 0. With a
    capacity there are as many rows as that; what belongs to later rows is dropped, ``buffer.total_recv_tokens`` exceeds the
    capacity, and counts leave out what was dropped. Then rows and weights are written to ``recv_tokens`` and ``recv_topk_weights``
    if these are given.

    Gradients flow to ``tokens`` and ``topk_weights``. Raises ``TypeError`` and ``ValueError`` for tensors that do not suit the buffer.
    """
    call = "nccl_ep_dispatch"
    _check_buffer(call, buffer)
    given = {"tokens": tokens, "topk_idx": topk_idx, "topk_weights": topk_weights}
    check_tensors(call, given, {"recv_tokens": recv_tokens, "recv_topk_weights": recv_topk_weights})
    check_ids(call, topk_idx)
    if not tokens.dtype.is_floating_point or tokens.dtype.itemsize < 2:
        raise TypeError(f"{call}: tokens must be of a floating-point dtype of at least 16 bits, not {tokens.dtype}")
    count = len(tokens) if tokens.dim() else 0
    _check_shape(call, "tokens", tokens, [count, buffer.hidden_dim])
    _check_shape(call, "topk_idx", topk_idx, [count, buffer.top_k])
    _check_shape(call, "topk_weights", topk_weights, [count, buffer.top_k])
    if count > buffer.max_tokens_per_rank:
        raise ValueError(f"{call}: {count} tokens; max_tokens_per_rank is {buffer.max_tokens_per_rank}")
    capacity = buffer.recv_capacity_per_rank
    for name, tensor, dtype, shape in (
        ("recv_tokens", recv_tokens, tokens.dtype, [capacity, buffer.hidden_dim]),
        ("recv_topk_weights", recv_topk_weights, torch.float32, [capacity]),
    ):
        if tensor is not None and capacity is None:
            raise ValueError(f"{call}: {name} needs a buffer with recv_capacity_per_rank")
        _check_written(call, name, tensor, dtype, shape)
    routing_map, probs = map_of(topk_idx, router_weights(call, topk_weights), buffer._num_experts)
    plain: list[ByExpertReceived] = []
    to_call = {
        "routing_map": routing_map,
        "pad_multiple": max(buffer.alignment, 1),
        "capacity": capacity,
        "max_tokens": buffer.max_tokens_per_rank,
        "into": (recv_tokens, recv_topk_weights),
        "call": call,
    }
    rows, row_weights = DispatchByMap.apply(tokens, probs, buffer._calls, plain, to_call)  # type: ignore[no-untyped-call]
    handle = buffer._handle = plain[0].routes
    buffer.tokens_per_expert = handle.rows_per_expert.to(tokens.device)
    buffer.total_recv_tokens = handle.rows_needed
    return rows, buffer.tokens_per_expert, row_weights


def nccl_ep_combine(
    buffer: EpBuffer, expert_out: Tensor, num_local_tokens: int | None = None, grad_out: Tensor | None = None
) -> Tensor:
    """Sums what the experts made of each token (``expert_out``, ``[P, H]``, in which weights are applied): ``[num_local_tokens, H]``, by
    default of ``max_tokens_per_rank``. Rows behind those of the tokens are 0. Sums are those of
    :meth:`antiphon.moe.ExpertParallel.combine_by_expert`.

    Gradients flow to ``expert_out``. With a capacity the gradient is written to ``grad_out``, like ``expert_out``, if that is given. Raises
    ``ValueError`` for a buffer without a dispatch, for tensors that do not suit it, and for fewer rows than tokens.
    """
    call = "nccl_ep_combine"
    _check_buffer(call, buffer)
    handle = buffer._handle
    if handle is None:
        raise ValueError(f"{call}: the buffer has no dispatch: call nccl_ep_dispatch first")
    check_tensors(call, {"expert_out": expert_out}, {"grad_out": grad_out})
    _check_shape(call, "expert_out", expert_out, [handle.rows, buffer.hidden_dim])
    if grad_out is not None and buffer.eager:
        raise ValueError(f"{call}: grad_out needs a buffer with recv_capacity_per_rank")
    _check_written(call, "grad_out", grad_out, expert_out.dtype, list(expert_out.shape))
    tokens = handle.num_tokens
    count = buffer.max_tokens_per_rank if num_local_tokens is None else num_local_tokens
    count = whole(call, "num_local_tokens", count, tokens, buffer.max_tokens_per_rank)
    sums: Tensor = CombineByMap.apply(expert_out, handle, grad_out, call)  # type: ignore[no-untyped-call]
    return sums if count == tokens else torch.nn.functional.pad(sums, (0, 0, 0, count - tokens))


def _check_buffer(call: str, buffer: Any) -> None:
    if not isinstance(buffer, EpBuffer):
        raise TypeError(f"{call}: the buffer must be one that new_nccl_ep_buffer gave, not {type(buffer).__name__}")


def _check_shape(call: str, name: str, tensor: Tensor, shape: Sequence[int | None]) -> None:
    if list(tensor.shape) != shape:
        raise ValueError(f"{call}: {name} must be of shape {shape}, not {list(tensor.shape)}")


def _check_written(call: str, name: str, tensor: Tensor | None, dtype: torch.dtype, shape: Sequence[int | None]) -> None:
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise TypeError(f"{call}: {name} must be {dtype}, not {tensor.dtype}")
    _check_shape(call, name, tensor, shape)
    if not tensor.is_contiguous():
        raise ValueError(f"{call}: {name} must be contiguous, as the call writes to it")
