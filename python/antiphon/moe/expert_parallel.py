"""Expert parallelism over one communicator."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from antiphon import Communicator
from antiphon._core import Moe
from antiphon.comm.cuda_ipc import communicator
from antiphon.moe._arguments import (
    check_routes,
    check_rows,
    check_tensors,
    experts,
    hidden_size,
    router_weights,
    whole,
)
from antiphon.moe._by_expert import ByExpertReceived, ByExpertRoutes, CombineByMap, DispatchByMap, by_expert_calls_of
from antiphon.moe._calls import ByTokenRoutes, Calls, Layout, calls_of, is_code, rows_of_gradient
from antiphon.moe._slot_gradients import CombineFromSlots, DispatchToSlots, needs_gradient
from antiphon.moe._slots import Options, ReceivedSlots, SlotRoutes, slot_calls_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Dispatched", "ExpertParallel"]


class Dispatched(NamedTuple):
    """What :meth:`ExpertParallel.dispatch` gives. ``N`` rows, in the order of source rank and token."""

    x: Tensor
    """``[N, H]``, of the dtype of the tokens."""
    ids: Tensor
    """``[N, K]``: experts of this rank (``0..L``), or −1 where a choice is another rank's."""
    weights: Tensor
    """float32 ``[N, K]``: their weights, 0 where the id is −1."""
    tokens_per_expert: list[int] | Tensor
    """``[L]``: how often the rows name each expert (before rows were dropped for a capacity). On a GPU with a capacity, where the
    host does not know, an int32 tensor there."""
    routes: ByTokenRoutes
    """The routes, for the combine."""
    scales: Tensor | None
    """``[N, S]``, if tokens have scales."""


class ExpertParallel:
    """The experts of a layer, spread over ranks: rank ``r`` has those from ``r · L`` on, ``L = num_experts / R``.

    ``comm_or_group`` is an :class:`antiphon.Communicator` or a torch process group of any backend, whose ranks meet for the
    first such object of it. Calls are collective: all ranks make the same ones in the same order. Any number of tokens is
    served, a different one on each rank, zero too. Weights of routers may be of any floating-point dtype: they are cast to float32.
    ``num_sms`` is how many multiprocessors of a GPU a call takes at most; with 0 it takes the fewest that cost little time for its
    size (see :meth:`tune`).

    Raises ``ValueError`` if the experts cannot be divided among the ranks, for more than 1024 of each, and for a ``hidden`` below 1 or odd, as rows are whole 16 bytes;
    ``TypeError`` for numbers that are no integers. Methods raise ``TypeError`` for what is no dense tensor, or of a dtype that is
    not served, and ``ValueError`` for shapes and numbers that do not suit each other, before anything is sent.
    """

    def __init__(
        self, comm_or_group: "Communicator | ProcessGroup | None", num_experts: int, hidden: int, *, num_sms: int = Moe.NUM_SMS
    ) -> None:
        self.comm = communicator("ExpertParallel", comm_or_group)
        self.num_experts = experts("ExpertParallel", num_experts, self.comm.world_size)
        self.hidden = hidden_size("ExpertParallel", hidden)
        num_sms = whole("ExpertParallel", "num_sms", num_sms)
        self._calls = calls_of(self.comm)
        self._calls.num_sms = num_sms

    def tune(self, smallest: int, largest: int) -> None:
        """Measures on the current GPU how many multiprocessors dispatches and combines by token need, of tokens of bfloat16 of which each rank
        has a number from ``smallest`` to ``largest``. It keeps that in the cache for all later communicators of as many ranks on such GPUs, and
        takes some seconds. All ranks call it together, with nothing under way."""
        smallest = whole("tune", "smallest", smallest, 1)
        largest = whole("tune", "largest", largest, smallest)
        self._calls.tune(torch.cuda.current_device(), self.hidden, smallest, largest)

    def __repr__(self) -> str:
        place = f"rank {self.comm.rank} of {self.comm.world_size}"
        return f"<antiphon.moe.ExpertParallel: {self.num_experts} experts, hidden {self.hidden}, {place}>"

    def layout(self, ids: Tensor) -> Layout:
        """The counts of this rank's choices (int64 or int32 ``[T, K]``). It does not communicate."""
        return self._calls.layout(ids, self.num_experts)

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        scales: Tensor | None = None,
        capacity: int | None = None,
        layout: Layout | None = None,
    ) -> Dispatched:
        """Sends each token to the ranks of the experts that it chose, once to each of them.

        ``x`` is ``[T, H]`` of float32, float16, bfloat16, float64 or 8-bit codes, with rows of whole 16 bytes; ``ids`` int64 or
        int32 ``[T, K]``, whatever is not in ``0..num_experts`` (−1, say) choosing nothing; ``weights`` float32 ``[T, K]``.
        ``scales`` of codes, float32 ``[T, H / 128]`` or int32 ``[T, H / 512]``, go along as they are.

        Without a ``capacity`` as many rows come as were sent. With one, ``x`` has ``capacity`` rows. Rows to which no token came
        hold anything and have ids −1. Rows beyond the capacity are dropped, ``routes.overflow_flag`` says so, and :meth:`combine`
        treats them as absent. On GPUs such a dispatch waits for nothing, and may be captured in a CUDA graph; one without waits for
        the counts of all ranks.

        Gradients flow to ``x``, unless that is of codes, and ``weights``.
        """
        check_tensors("dispatch", {"x": x, "ids": ids, "weights": weights}, {"scales": scales})
        check_rows("dispatch", x, self.hidden)
        if layout is not None and not isinstance(layout, Layout):
            raise TypeError(f"dispatch: the layout must be one that ExpertParallel.layout gave, not {type(layout).__name__}")
        if layout is not None and len(layout.tokens_per_expert) != self.num_experts:
            raise ValueError(
                f"dispatch: the layout is of {len(layout.tokens_per_expert)} experts; there are {self.num_experts}"
            )
        plain: list[Any] = []
        received_x, received_weights = _Dispatch.apply(  # type: ignore[no-untyped-call]
            x, router_weights("dispatch", weights), self._calls, plain, (layout or self.num_experts, ids, scales, capacity)
        )
        received_ids, received_scales, routes = plain
        return Dispatched(
            received_x, received_ids, received_weights, routes.tokens_per_expert, routes, received_scales
        )

    def combine(self, x: Tensor, routes: ByTokenRoutes, *, bias: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Sums the ranks' outputs for each token: ``[T, H]`` from ``x``, ``[N, H]``, whose rows are those that
        :meth:`dispatch` brought, already summed over this rank's experts with their weights.

        A sum begins with ``bias`` (one or a pair of tensors like the result), adds rows in the order of ranks, in float32
        (float64 of float64), and is rounded once. A token that went nowhere gives its bias, or 0.

        Gradients flow to ``x`` and ``bias``.
        """
        check_routes("combine", routes, ByTokenRoutes)
        biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        result: Tensor = _Combine.apply(x, self._calls, routes, *biases)  # type: ignore[no-untyped-call]
        return result

    def dispatch_by_expert(
        self,
        x: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        *,
        scales: Tensor | None = None,
        pad_multiple: int = 1,
        capacity: int | None = None,
        max_tokens: int | None = None,
    ) -> ByExpertReceived:
        """Sends each token to a row for each expert that it chooses: rows come ordered by expert, and of each in the order of source
        rank and token, as grouped matrix products take them.

        ``x`` and ``scales`` are those of :meth:`dispatch`; ``routing_map``, bool ``[T, E]``, says which experts a token chooses,
        with ``probs``, float32 ``[T, E]``. The rows of each expert are padded to a multiple of ``pad_multiple``.

        Without a ``capacity`` as many rows come as were sent. With one, there are ``capacity`` rows. What belongs to later rows is
        dropped, ``routes.overflow_flag`` says so, and :meth:`combine_by_expert` treats it as absent. ``max_tokens``, equal on all ranks, is
        then the most tokens that any rank has (by default, all ranks have as many tokens as this one).

        Gradients flow to ``x`` and ``probs``.
        """
        name = "dispatch_by_expert"
        check_tensors(name, {"x": x, "routing_map": routing_map}, {"probs": probs, "scales": scales})
        check_rows(name, x, self.hidden)
        if routing_map.dim() != 2 or routing_map.shape[1] != self.num_experts:
            shape = list(routing_map.shape)
            raise ValueError(f"{name}: the routing map must be of shape [T, {self.num_experts}], not {shape}")
        plain: list[ByExpertReceived] = []
        call = {
            "routing_map": routing_map,
            "scales": scales,
            "pad_multiple": pad_multiple,
            "capacity": capacity,
            "max_tokens": max_tokens,
            "call": name,
        }
        calls = by_expert_calls_of(self.comm)
        calls.dispatch_sms = calls.combine_sms = self._calls.num_sms
        probs = None if probs is None else router_weights(name, probs)
        rows, row_probs = DispatchByMap.apply(x, probs, calls, plain, call)  # type: ignore[no-untyped-call]
        return plain[0]._replace(x=rows, probs=row_probs)

    def combine_by_expert(self, x: Tensor, routes: ByExpertRoutes) -> Tensor:
        """Sums what the experts made of each token: ``[T, H]`` from ``x``, ``[P, H]``, whose rows are those that
        :meth:`dispatch_by_expert` brought. Padding is not read.

        Each rank sums the rows of a token in the order of its experts, in float32 (float64 of float64), and rounds; the source
        sums these in the order of ranks, and rounds.

        Gradients flow to ``x``.
        """
        check_routes("combine_by_expert", routes, ByExpertRoutes)
        result: Tensor = CombineByMap.apply(x, routes)  # type: ignore[no-untyped-call]
        return result

    def dispatch_to_slots(
        self,
        x: Tensor,
        ids: Tensor,
        *,
        max_tokens: int,
        format: str = "bf16",
        statistics: Tensor | None = None,
    ) -> ReceivedSlots:
        """Sends few tokens (bfloat16 ``[T, H]``) to slots of the experts that they choose, without waiting for counts.

        ``max_tokens``, equal on all ranks, is the most that any rank has. ``format`` is that of the received rows: ``"bf16"``; ``"fp8"``,
        E4M3 codes with a float32 scale for each 128; ``"fp8_powers_of_two"``, whose scales are rounded up to powers of two;
        ``"fp8_packed"``, which has these as UE8M0, four in an int32. ``statistics``, int32 ``[L]``, has the counts added to it.

        Gradients flow to ``x`` with the format ``"bf16"``. Raises ``ValueError`` for an ``x`` that needs a gradient with another
        one.
        """
        check_tensors("dispatch_to_slots", {"x": x})
        max_tokens = whole("dispatch_to_slots", "max_tokens", max_tokens)
        check_rows("dispatch_to_slots", x, self.hidden)
        calls = slot_calls_of(self.comm)
        call = (max_tokens, self.num_experts, format, Options(statistics))
        if not needs_gradient(x):
            return calls.dispatch(x, ids, *call)[0]
        if format != "bf16":
            raise ValueError(f"dispatch_to_slots: rows of {format} have no gradient: use the format bf16, or pass x.detach()")
        plain: list[Any] = []
        rows = DispatchToSlots.apply(x, ids, calls, plain, call)  # type: ignore[no-untyped-call]
        received: ReceivedSlots = plain[0]._replace(x=rows)
        return received

    def combine_from_slots(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        routes: SlotRoutes,
        *,
        format: str = "bf16",
        out: Tensor | None = None,
    ) -> Tensor:
        """Sums the experts' outputs for each token: bfloat16 ``[T, H]``, from ``x``, bfloat16 ``[L, R * M, H]``, whose slots are
        those that :meth:`dispatch_to_slots` filled.

        A sum begins with 0, adds the products of ``weights`` (float32 ``[T, K]``) and rows, each rounded to float32, in the order
        of the choices, and is rounded once.

        ``format``, equal on all ranks, is that in which rows are sent: ``"bf16"``, or ``"logfmt"``, in which between GPUs an
        element takes 11 bits in place of 16. Its sign and a logarithm remain, of blocks of 128 elements of ``H`` whose magnitudes
        are below 1, with an error of at most 2.2 %, or of 2^-32 of the block's largest magnitude if that is more; other blocks keep
        their numbers.

        Gradients flow to ``x`` and ``weights`` with the format ``"bf16"``. Raises ``ValueError`` for an ``out`` or another format
        where they do.
        """
        check_routes("combine_from_slots", routes, SlotRoutes)
        check_tensors("combine_from_slots", {"x": x, "ids": ids, "weights": weights}, {"out": out})
        calls, weights = slot_calls_of(self.comm), router_weights("combine_from_slots", weights)
        if not needs_gradient(x, weights):
            return calls.combine(x, ids, weights, routes, out, format=format)[0]
        if format != "bf16":
            raise ValueError(
                f"combine_from_slots: rows of {format} have no gradient: use the format bf16, or pass detached tensors"
            )
        if out is not None:
            raise ValueError("combine_from_slots: with out there is no gradient: pass no out, or detached tensors")
        result: Tensor = CombineFromSlots.apply(x, weights, ids, calls, self._calls, routes)  # type: ignore[no-untyped-call]
        return result


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, calls: Calls, plain: list[Any], call: Any) -> Any:
        layout, ids, scales, capacity = call
        received, routes = calls.dispatch(x, layout, ids, weights, scales, capacity)
        plain += [received.ids, received.scales, routes]
        ctx.calls, ctx.routes, ctx.ids = calls, routes, received.ids
        return received.x, received.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> Any:
        # The weight of a choice whose expert is elsewhere is a constant.
        masked = grad_weights.float().masked_fill(ctx.ids < 0, 0)
        of_x, of_weights = ctx.calls.combine(rows_of_gradient(grad_x, masked), ctx.routes, masked)
        return None if is_code(grad_x) else of_x, of_weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: Calls, routes: ByTokenRoutes, *biases: Tensor) -> Any:
        ctx.calls, ctx.routes, ctx.biases = calls, routes, len(biases)
        return calls.combine(x, routes, biases=biases)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x = ctx.calls.dispatch_along(grad, ctx.routes).x
        if ctx.routes.num_received != ctx.routes.rows:
            grad_x.masked_fill_((ctx.routes.recv_src_idx < 0).unsqueeze(1), 0)
        return grad_x, None, None, *[grad] * ctx.biases
