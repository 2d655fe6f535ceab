"""``HybridEPDispatch`` and ``HybridEPCombine``, and the functions around them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from antiphon import Communicator
from antiphon.comm.cuda_ipc import communicator
from antiphon.moe._arguments import check_routes, check_rows, check_tensors, whole
from antiphon.moe._by_expert import ByExpertRoutes, gradients_of_dispatch
from antiphon.moe.deep_ep import HybridEPBuffer

__all__ = [
    "HYBRIDEP_TOKEN_ALIGNMENT",
    "HybridEPCombine",
    "HybridEPDispatch",
    "hybrid_ep_combine",
    "hybrid_ep_dispatch",
    "init_hybrid_ep_buffer",
    "reset_hybrid_ep_buffer",
]

#: What Megatron pads numbers of tokens to that differ by rank. Here they may differ.
HYBRIDEP_TOKEN_ALIGNMENT = 64

#: The last that was made, and those of all groups.
_hybrid_ep_buffer: HybridEPBuffer | None = None
_of_groups: dict[Communicator, HybridEPBuffer] = {}


def init_hybrid_ep_buffer(
    group: Any,
    hidden_dim: int,
    seq_len: int | None = None,
    num_local_experts: int | None = None,
    num_sms_dispatch_api: int | None = None,
    num_sms_combine_api: int | None = None,
    fp8_dispatch: bool = False,
    *,
    num_tokens: int | None = None,
    num_blocks_permute: int | None = None,
    num_blocks_unpermute: int | None = None,
    num_sms_preprocessing_api: int | None = None,
) -> None:
    """Makes the buffer that all layers of a group share; all ranks call it. ``seq_len``, later called ``num_tokens``, is the most tokens of
    this rank in a call with ``num_permuted_tokens``.

    Raises ``ValueError`` for ``fp8_dispatch``, as Megatron does not dispatch FP8 so, and for missing numbers.
    """
    global _hybrid_ep_buffer
    tokens = seq_len if seq_len is not None else num_tokens
    if fp8_dispatch:
        raise ValueError("init_hybrid_ep_buffer: fp8_dispatch is not served: use HybridEPBuffer for rows of FP8")
    if tokens is None or num_local_experts is None:
        raise ValueError("init_hybrid_ep_buffer: pass seq_len (or num_tokens) and num_local_experts")
    _hybrid_ep_buffer = HybridEPBuffer(
        group,
        hidden_dim,
        tokens,
        num_local_experts,
        num_sms_dispatch_api=num_sms_dispatch_api,
        num_sms_combine_api=num_sms_combine_api,
        num_sms_preprocessing_api=num_sms_preprocessing_api,
        num_blocks_permute=num_blocks_permute,
        num_blocks_unpermute=num_blocks_unpermute,
    )
    for closed in [comm for comm in _of_groups if comm.closed]:
        del _of_groups[closed]
    _of_groups[communicator("init_hybrid_ep_buffer", group)] = _hybrid_ep_buffer


def reset_hybrid_ep_buffer() -> None:
    """Forgets the buffers of all groups. Nothing is communicated, and handles stay usable."""
    global _hybrid_ep_buffer
    _hybrid_ep_buffer = None
    _of_groups.clear()


def _buffer_of(group: Any, x: Tensor, num_local_experts: int, sms: tuple[int | None, int | None]) -> HybridEPBuffer:
    """The group's buffer, made by all ranks together if there is none."""
    comm = communicator("hybrid_ep_dispatch", group)
    kept = _of_groups.get(comm)
    if kept is None:
        num_tokens, hidden_dim = x.shape
        init_hybrid_ep_buffer(group, hidden_dim, num_tokens, num_local_experts, *sms, fp8_dispatch=False)
        kept = _of_groups[comm]
    return kept


class HybridEPDispatch(torch.autograd.Function):
    """Tokens to a row for each of their experts. Differentiable in ``x`` and ``probs``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        routing_map: Tensor,
        probs: Tensor | None,
        group: Any,
        num_local_experts: int,
        num_sms_dispatch_api: int | None = 24,
        num_sms_combine_api: int | None = 24,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
    ) -> Any:
        """``x`` ``[T, H]``, ``routing_map`` bool ``[T, E]``, ``probs`` ``[T, E]``, which are cast to float32.

        Gives the rows ``[P, H]``; their probs ``[P]``; ``None`` (rows have no scales); how many rows each expert has, int64
        ``[L]``; and a handle.
        """
        check_tensors("hybrid_ep_dispatch", {"x": x, "routing_map": routing_map}, {"probs": probs})
        check_rows("hybrid_ep_dispatch", x)
        buffer = _buffer_of(group, x, num_local_experts, (num_sms_dispatch_api, num_sms_combine_api))
        rows, row_probs, scales, per_expert, handle = buffer.dispatch_with_permute(
            hidden=x,
            routing_map=routing_map,
            probs=probs,
            num_of_experts_per_rank=num_local_experts,
            num_permuted_tokens=num_permuted_tokens,
            pad_multiple=pad_multiple,
            non_blocking=num_permuted_tokens is not None,
        )
        ctx.handle = handle
        ctx.rows, ctx.dtype, ctx.has_probs = rows.shape, rows.dtype, probs is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(per_expert)
        return rows, row_probs, scales, per_expert, handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_x: Tensor | None,
        grad_probs: Tensor | None,
        grad_scaling_factor: Any,
        grad_tokens_per_expert: Any,
        grad_handle: Any,
    ) -> Any:
        """The gradients of ``x`` and ``probs``: one combine."""
        grad_x, grad_probs = gradients_of_dispatch(ctx.handle, grad_x, grad_probs, ctx)
        return grad_x, None, grad_probs, None, None, None, None, None, None


class HybridEPCombine(torch.autograd.Function):
    """What experts made of their rows, back to the tokens, and summed. Differentiable in ``x``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, handle: ByExpertRoutes, num_permuted_tokens: Any = None, pad_multiple: int | None = None
    ) -> Tensor:
        """``x`` ``[P, H]``. Gives the sums ``[T, H]``. ``num_permuted_tokens``, anything that is an integer, must be ``P``.
        ``pad_multiple`` has no effect: the handle knows it."""
        check_routes("hybrid_ep_combine", handle, ByExpertRoutes, name="handle")
        _check_count(handle, num_permuted_tokens)
        ctx.handle = handle
        return handle.calls.combine(x, handle, call="hybrid_ep_combine")[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor) -> Any:
        """The gradient of ``x``: one dispatch along the handle. That of padding is 0."""
        return ctx.handle.calls.dispatch_along(grad_x, ctx.handle).x, None, None, None


def _check_count(handle: ByExpertRoutes, num_permuted_tokens: Any) -> None:
    # Reading a number of a GPU waits for it.
    if num_permuted_tokens is None or (isinstance(num_permuted_tokens, Tensor) and num_permuted_tokens.is_cuda):
        return
    number = whole("hybrid_ep_combine", "num_permuted_tokens", num_permuted_tokens)
    if number != handle.rows:
        raise ValueError(f"hybrid_ep_combine: num_permuted_tokens is {number}; the handle has {handle.rows} rows")


def hybrid_ep_dispatch(
    x: Tensor,
    routing_map: Tensor,
    probs: Tensor | None,
    group: Any,
    num_local_experts: int,
    num_sms_dispatch_api: int | None = 24,
    num_sms_combine_api: int | None = 24,
    num_permuted_tokens: int | None = None,
    pad_multiple: int | None = None,
    *,
    num_blocks_permute: int | None = None,
    num_blocks_unpermute: int | None = None,
    fused: bool = False,
    num_sms_preprocessing_api: int | None = 108,
) -> Any:
    """:class:`HybridEPDispatch`: a tuple of five. The receiving copy always permutes, so ``fused``, ``num_blocks_permute``,
    ``num_blocks_unpermute`` and ``num_sms_preprocessing_api`` have no effect."""
    return HybridEPDispatch.apply(  # type: ignore[no-untyped-call]
        x,
        routing_map,
        probs,
        group,
        num_local_experts,
        num_sms_dispatch_api,
        num_sms_combine_api,
        num_permuted_tokens,
        pad_multiple,
    )


def hybrid_ep_combine(
    x: Tensor, handle: ByExpertRoutes, num_permuted_tokens: Any, pad_multiple: int | None, fused: bool = False
) -> Tensor:
    """:class:`HybridEPCombine`: the sums. ``fused`` has no effect."""
    result: Tensor = HybridEPCombine.apply(  # type: ignore[no-untyped-call]
        x, handle, num_permuted_tokens, pad_multiple
    )
    return result
