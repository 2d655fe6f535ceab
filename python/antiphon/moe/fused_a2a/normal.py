"""``FusedDispatch`` and ``FusedCombine``, and the functions around them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from antiphon import Communicator
from antiphon.comm.cuda_ipc import communicator
from antiphon.moe._arguments import check_routes, check_rows, check_tensors, router_weights, whole
from antiphon.moe._calls import ByTokenRoutes, is_code, rows_of_gradient
from antiphon.moe.deep_ep import Buffer, EventHandle, EventOverlap

__all__ = [
    "FusedCombine",
    "FusedDispatch",
    "fused_combine",
    "fused_dispatch",
    "get_buffer",
    "get_hidden_bytes",
    "set_deepep_num_sms",
]

#: The last that was made, and those of all groups.
_buffer: Buffer | None = None
_of_groups: dict[Communicator, Buffer] = {}


def get_hidden_bytes(x: Tensor) -> int:
    """The bytes of a row of ``x``, ``[T, H]``, with at least 2 for each element: so a buffer for FP8 serves bfloat16 too.

    Raises ``ValueError`` for fewer than 2 dimensions.
    """
    check_tensors("get_hidden_bytes", {"x": x})
    if x.dim() < 2:
        raise ValueError(f"get_hidden_bytes: x must be of shape [T, H], not {list(x.shape)}")
    return x.size(1) * max(x.element_size(), 2)


def get_buffer(group: Any, hidden_bytes: int) -> Buffer:
    """The buffer of a group, for rows of ``hidden_bytes`` bytes. All ranks make it together if there is none, or if its sizes are
    smaller than DeepEP's would need."""
    global _buffer
    hidden_bytes = whole("get_buffer", "hidden_bytes", hidden_bytes)
    comm = communicator("get_buffer", group)
    size = comm.world_size
    configs = [Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)]
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs)
    kept = _of_groups.get(comm)
    if kept is None or kept.num_nvl_bytes < nvl or kept.num_rdma_bytes < rdma:
        for closed in [other for other in _of_groups if other.closed]:
            del _of_groups[closed]
        kept = _of_groups[comm] = Buffer(group, nvl, rdma)
    _buffer = kept
    return kept


def reset_buffer() -> None:
    """Forgets the buffers of all groups."""
    global _buffer
    _buffer = None
    _of_groups.clear()


def _event(async_finish: bool) -> EventOverlap | None:
    return EventOverlap(EventHandle()) if async_finish else None


class FusedDispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts. Differentiable in ``x`` and ``token_probs``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token_indices: Tensor,
        token_probs: Tensor,
        num_experts: int,
        group: Any,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """``x`` ``[T, H]``, ``token_indices`` int64 ``[T, K]`` (−1: nothing), ``token_probs`` ``[T, K]``, which
        are cast to float32.

        Gives the rows ``[N, H]``; the experts of this rank that they chose, ``[N, K]``, −1 elsewhere; their probs, 0 elsewhere;
        how often they chose each of this rank's experts, int64 ``[L]`` on the CPU; and a handle.
        """
        check_tensors("fused_dispatch", {"x": x, "token_indices": token_indices, "token_probs": token_probs})
        check_rows("fused_dispatch", x)
        token_probs = router_weights("fused_dispatch", token_probs)
        event = _event(async_finish)
        buffer = get_buffer(group, get_hidden_bytes(x))
        per_rank, per_rdma_rank, per_expert, in_rank, event_of_layout = buffer.get_dispatch_layout(
            token_indices, num_experts, event, async_finish, allocate_on_comm_stream
        )
        rows, ids, probs, counts, handle, after = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=token_indices,
            topk_weights=token_probs,
            previous_event=event_of_layout if async_finish else None,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        _finish(after, async_finish)
        ctx.buffer, ctx.handle, ctx.ids = buffer, handle, ids
        ctx.group, ctx.async_finish, ctx.allocate_on_comm_stream = group, async_finish, allocate_on_comm_stream
        per_local_expert = torch.tensor(counts, dtype=torch.int64)
        ctx.mark_non_differentiable(ids, per_local_expert)
        return rows, ids, probs, per_local_expert, handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_output: Tensor,
        grad_token_indices: Any,
        grad_token_probs: Tensor,
        grad_tokens_per_expert: Any,
        grad_handle: Any,
    ) -> Any:
        """The gradients of ``x`` and ``token_probs``: one combine."""
        masked = grad_token_probs.float().masked_fill(ctx.ids < 0, 0)
        grad_x, grad_probs, after = ctx.buffer.combine(
            rows_of_gradient(grad_output, masked).contiguous(),
            ctx.handle,
            topk_weights=masked,
            previous_event=_event(ctx.async_finish),
            async_finish=ctx.async_finish,
            allocate_on_comm_stream=ctx.allocate_on_comm_stream,
        )
        _finish(after, ctx.async_finish)
        return None if is_code(grad_output) else grad_x, None, grad_probs, None, None, None, None


class FusedCombine(torch.autograd.Function):
    """Sends the experts' outputs back to their tokens, and sums them. Differentiable in ``x``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Any,
        handle: ByTokenRoutes,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """``x`` ``[N, H]``: row ``i`` is what this rank made of received row ``i``. Gives the sums ``[T, H]``, and ``None``."""
        check_tensors("fused_combine", {"x": x})
        check_rows("fused_combine", x)
        check_routes("fused_combine", handle, ByTokenRoutes, name="handle")
        buffer = get_buffer(group, get_hidden_bytes(x))
        combined, _, after = buffer.combine(
            x.contiguous(),
            handle,
            previous_event=_event(async_finish),
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        _finish(after, async_finish)
        ctx.buffer, ctx.handle = buffer, handle
        ctx.group, ctx.async_finish, ctx.allocate_on_comm_stream = group, async_finish, allocate_on_comm_stream
        return combined, None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, previous_event: Any = None) -> Any:
        """The gradient of ``x``: one dispatch along the handle. ``previous_event`` is the gradient of the ``None``, and is
        ignored."""
        grad_x, _, _, _, _, after = ctx.buffer.dispatch(
            grad_output.contiguous(),
            handle=ctx.handle,
            previous_event=_event(ctx.async_finish),
            async_finish=ctx.async_finish,
            allocate_on_comm_stream=ctx.allocate_on_comm_stream,
        )
        _finish(after, ctx.async_finish)
        return grad_x, None, None, None, None


def _finish(event: EventOverlap, async_finish: bool) -> None:
    if async_finish:
        event.current_stream_wait()


def fused_dispatch(
    x: Tensor,
    token_indices: Tensor,
    token_probs: Tensor,
    num_experts: int,
    group: Any,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> Any:
    """:class:`FusedDispatch` of contiguous tokens: a tuple of five."""
    check_tensors("fused_dispatch", {"x": x})
    return FusedDispatch.apply(  # type: ignore[no-untyped-call]
        x.contiguous(), token_indices, token_probs, num_experts, group, async_finish, allocate_on_comm_stream
    )


def fused_combine(
    x: Tensor, group: Any, handle: ByTokenRoutes, async_finish: bool = False, allocate_on_comm_stream: bool = False
) -> Any:
    """:class:`FusedCombine`: the sums, and ``None``."""
    return FusedCombine.apply(  # type: ignore[no-untyped-call]
        x, group, handle, async_finish, allocate_on_comm_stream
    )


def set_deepep_num_sms(num_sms: int) -> None:
    """Sets how many SMs the kernels use, for all buffers. Raises ``ValueError`` unless it is even."""
    Buffer.set_num_sms(num_sms)
