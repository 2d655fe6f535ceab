"""The low-latency calls of ``Buffer``."""

from torch import Tensor

from antiphon import Communicator
from antiphon._core import MoeSlots
from antiphon.moe._arguments import check_routes, check_tensors, experts, refuse_derivatives, whole
from antiphon.moe._slots import Hook, Options, SlotCalls, SlotRoutes, slot_calls_of
from antiphon.moe.deep_ep.events import EventHandle, EventOverlap
from antiphon.moe.deep_ep.shrink import ShrinkingCalls

__all__ = ["LowLatencyBuffer"]

class LowLatencyBuffer:
    """A ``Buffer``'s calls for few tokens: at most ``num_max_dispatch_tokens_per_rank`` (``M``) of each rank.

    With ``return_recv_hook`` a call returns before it has received, and the hook that it returns receives. On a GPU the call
    is a kernel that sends, and the hook puts one that receives into the current stream; the communicator's deadline starts
    then. On the CPU the operation goes on beside the caller, and the hook waits for its end. The results may be read after the
    hook, and until then a combine's ``topk_idx`` and ``topk_weights`` may not be written. The next low-latency call of these
    sizes receives first if the hook was not called.
    """

    _comm: Communicator
    #: With ``enable_shrink``.
    _shrinking: ShrinkingCalls | None = None

    def _low_latency(self) -> SlotCalls:
        return slot_calls_of(self._comm)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """The bytes of each GPU that calls of these sizes and up to 8 choices take, a multiple of 128. They are taken by the
        first call; a buffer need not be so large."""
        call = "get_low_latency_rdma_size_hint"
        num_ranks = whole(call, "num_ranks", num_ranks, 1, 8)
        taken = MoeSlots.bytes(
            num_ranks,
            max_tokens=whole(call, "num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank),
            hidden=whole(call, "hidden", hidden),
            num_experts=experts(call, num_experts, num_ranks),
            top_k=8,
        )
        return -(-taken // 128) * 128

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing, whatever ``num_max_dispatch_tokens_per_rank``, ``hidden`` and ``num_experts``: normal and low-latency calls
        share no memory, so nothing needs to be cleaned between them."""

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, SlotRoutes, EventOverlap, Hook | None]:
        """Sends tokens (bfloat16 ``[T, H]``, ``T <= M``) to the slots of the experts ``topk_idx`` (``[T, K]``) that they choose.

        Gives the slots, bfloat16 ``[L, R * M, H]``, or codes with their scales (see
        :class:`antiphon.moe.ReceivedSlots`); how many of them are filled, int32 ``[L]``, which is added to
        ``cumulative_local_expert_recv_stats``; a handle, an event, and a hook. Slots of an expert are in the order of source rank
        and token. To ``dispatch_wait_recv_cost_stats``, int64 ``[R]``, the nanoseconds are added that this rank waited for each
        other rank: one after the other, so that the number of the latest rank is large and those of the ranks behind it are not.

        Raises ``ValueError`` for arguments that do not suit each other, and for a tensor that requires grad, unless grad mode is off;
        ``TypeError`` for dtypes that are not served.
        """
        _check_hook("low_latency_dispatch", async_finish, return_recv_hook)
        refuse_derivatives("low_latency_dispatch", x)
        if use_ue8m0 and not round_scale:
            raise ValueError("low_latency_dispatch: use_ue8m0 needs round_scale")
        format = "bf16" if not use_fp8 else "fp8_packed" if use_ue8m0 else "fp8_powers_of_two" if round_scale else "fp8"
        options = Options(cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, return_recv_hook)
        arguments = (x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, format, options)
        if self._shrinking is not None:
            received, hook = self._shrinking.dispatch(*arguments), _over if return_recv_hook else None
        else:
            limit = "num_max_dispatch_tokens_per_rank"
            received, hook = self._low_latency().dispatch(*arguments, call="low_latency_dispatch", limit=limit)
        rows = received.x if received.scales is None else (received.x, received.scales)
        return rows, received.counts, received.routes, _event(async_finish), hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: SlotRoutes,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Sends the experts' outputs (bfloat16 ``[L, R * M, H]``) back, and sums them for each token with the
        weights ``topk_weights`` (float32 ``[T, K]``), in the order of the choices: bfloat16 ``[T, H]``, in ``out`` if that is
        given. With ``zero_copy`` the rows are those in what :meth:`get_next_low_latency_combine_buffer` gave, whatever ``x``
        holds. With ``use_logfmt`` rows are sent in the format ``"logfmt"`` of
        :meth:`antiphon.moe.ExpertParallel.combine_from_slots`, which loses digits.

        ``combine_wait_recv_cost_stats`` is as ``dispatch_wait_recv_cost_stats`` of a dispatch.

        Raises as :meth:`low_latency_dispatch`, and ``ValueError`` for ``use_logfmt`` with ``zero_copy``, or with an ``H``
        that is no multiple of 128.
        """
        _check_hook("low_latency_combine", async_finish, return_recv_hook)
        refuse_derivatives("low_latency_combine", x, topk_weights)
        if use_logfmt and zero_copy:
            raise ValueError("low_latency_combine: pass use_logfmt or zero_copy, not both")
        check_routes("low_latency_combine", handle, SlotRoutes, name="handle")
        if zero_copy:
            if handle.combine_buffer is None:
                raise ValueError("low_latency_combine: zero_copy needs a call of get_next_low_latency_combine_buffer before")
            x = handle.combine_buffer
        options = Options(waits=combine_wait_recv_cost_stats, start=return_recv_hook)
        arguments = (x, topk_idx, topk_weights, handle, out, options)
        format = "logfmt" if use_logfmt else "bf16"
        if self._shrinking is not None:
            combined, hook = self._shrinking.combine(*arguments, format=format), _over if return_recv_hook else None
        else:
            combined, hook = self._low_latency().combine(*arguments, format=format, call="low_latency_combine")
        return combined, _event(async_finish), hook

    def get_next_low_latency_combine_buffer(self, handle: SlotRoutes) -> Tensor:
        """The tensor, bfloat16 ``[L, R * M, H]``, from which a combine along the handle with ``zero_copy`` takes its rows."""
        check_routes("get_next_low_latency_combine_buffer", handle, SlotRoutes, name="handle")
        if handle.combine_buffer is None:
            handle.combine_buffer = handle.new_rows()
        return handle.combine_buffer


    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leaves a rank out from the next low-latency call on, or with ``mask=False`` no longer.

        All other ranks call it alike. The rank must be lost, or have closed its communicator: a rank that lives is waited for
        until the deadline, and a ``TimeoutError`` names it. Raises ``RuntimeError`` without ``enable_shrink``, and to take the mask
        back from a rank that was left out already.
        """
        calls = self._shrinkable()
        last = self._comm.world_size - 1
        calls.update_mask(whole("low_latency_update_mask_buffer", "rank_to_mask", rank_to_mask, 0, last), mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for each rank that is left out, else 0, to ``mask_status``, int32 ``[R]``. Raises ``RuntimeError`` without
        ``enable_shrink``."""
        mask = self._shrinkable().mask()
        call = "low_latency_query_mask_buffer"
        check_tensors(call, {"mask_status": mask_status})
        if mask_status.dtype != mask.dtype:
            raise TypeError(f"{call}: mask_status must be {mask.dtype}, not {mask_status.dtype}")
        if mask_status.shape != mask.shape:
            raise ValueError(f"{call}: mask_status must be of shape {list(mask.shape)}, not {list(mask_status.shape)}")
        mask_status.copy_(mask)

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes back all masks but those of ranks that were left out already. Raises ``RuntimeError`` without ``enable_shrink``."""
        self._shrinkable().clean_mask()

    def _shrinkable(self) -> ShrinkingCalls:
        if self._shrinking is None:
            raise RuntimeError("the mask of ranks: the Buffer was made without enable_shrink=True")
        return self._shrinking


def _over() -> None:
    """The hook of a call that was over when it returned."""


def _check_hook(call: str, async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ValueError(f"{call}: pass async_finish or return_recv_hook, not both")


def _event(async_finish: bool) -> EventOverlap:
    return EventOverlap(EventHandle() if async_finish else None)

