"""The calls by expert on torch tensors. They allocate their outputs."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from antiphon._core import Communicator, Moe, MoeByExpert, MoeByExpertRoutes
from antiphon.moe._arguments import Routes, check_routes, check_rows, check_scales, check_tensors, whole
from antiphon.moe._calls import _codes, core_of, on_all_ranks

__all__ = ["ByExpertCalls", "ByExpertReceived", "ByExpertRoutes", "by_expert_calls_of", "map_of"]


class _Fields(NamedTuple):
    sparse_to_dense_map: Tensor
    """int32 ``[T, R]``: the number of a token among those that a rank receives, or −1."""
    rdma_to_attn_map: None
    """Of several machines."""
    attn_to_rdma_map: None
    """Of several machines."""
    num_dispatched_tokens: Tensor
    """int32 ``[1]``: ``N``, how many tokens arrive."""
    local_expert_routing_map: Tensor
    """bool ``[N, L]``: which of this rank's experts have a row of an arriving token. On a GPU with a capacity there are more rows,
    which mean nothing."""
    dense_chunk_layout: None
    """Of DeepEP's transport."""
    dense_to_expert_map: Tensor
    """int32 ``[N, L]``: that row, or −1; likewise."""
    tokens_per_expert: Tensor
    """int32 ``[L]``: how many tokens each expert gets, without padding and without what is dropped."""
    num_tokens: int
    """``T``"""
    config: None
    """Of DeepEP's kernels."""
    overflow_flag: Tensor
    """int32 ``[1]``: 1 if rows were dropped because there are more than the capacity, else 0."""


class ByExpertRoutes(Routes, _Fields):
    """The routes of a dispatch by expert: which rank gets which rows from which. They are a tuple as the handle of DeepEP's HybridEP,
    with ``overflow_flag`` last. They belong to the communicator whose dispatch made them, and serve any number of dispatches and
    combines."""

    core: MoeByExpertRoutes
    calls: "ByExpertCalls"
    #: The rows of each expert are padded to a multiple of this; ``None`` for rows by token.
    pad_multiple: int | None
    #: int64 ``[L]``: on the CPU, or on a GPU with a capacity there.
    rows_per_expert: Tensor
    #: What the routes keep on a GPU.
    words: Tensor | None = None
    #: A part of these, int32 ``[1]``: how many rows by expert there would be without a capacity.
    needed: Tensor | None = None

    def __repr__(self) -> str:
        order = "token" if self.pad_multiple is None else "expert"
        return f"<antiphon.moe.ByExpertRoutes: {self.num_tokens} tokens, {self.rows} rows by {order}, {self.core.num_experts} experts>"

    @property
    def rows(self) -> int:
        """How many rows received tensors have."""
        return self.core.rows

    @property
    def rows_needed(self) -> Tensor:
        """int64 ``[1]``, on the device of the routes: how many rows by expert there would be without a capacity, with the padding."""
        return torch.tensor([self.core.rows_needed]) if self.needed is None else self.needed.long()


class ByExpertReceived(NamedTuple):
    """What a dispatch by a routing map brings, ordered by expert. Rows to which no token comes are 0."""

    x: Tensor
    """``[P, H]``"""
    probs: Tensor | None
    """float32 ``[P]``, if tokens have them."""
    scales: Tensor | None
    """``[P, S]``, if tokens have them."""
    rows_per_expert: Tensor
    """int64 ``[L]``: how many rows each expert has, with the padding. On the CPU; on a GPU with a capacity there."""
    routes: ByExpertRoutes
    """The routes, for the combine."""


class ByExpertCalls:
    """Dispatch and combine by routing maps, of one communicator, which all its objects of this class share."""

    def __init__(self, core: MoeByExpert, moe: Moe, comm: Communicator) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self._moe, self._core = moe, core
        #: How many multiprocessors calls of this object on GPUs use, at most.
        self.dispatch_sms = self.combine_sms = Moe.NUM_SMS

    def dispatch(
        self,
        x: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        scales: Tensor | None = None,
        *,
        pad_multiple: int | None,
        capacity: int | None = None,
        max_tokens: int | None = None,
        into: "tuple[Tensor | None, Tensor | None]" = (None, None),
        call: str = "dispatch_by_expert",
    ) -> ByExpertReceived:
        """Dispatches tokens as a routing map, bool ``[T, E]``, says. ``pad_multiple`` is ``None`` for rows by token, of which
        ``probs`` are ``[N, L]``. With a capacity, rows and probs are written ``into`` tensors that are given. Errors name ``call``."""
        check_tensors(call, {"x": x, "routing_map": routing_map}, {"probs": probs, "scales": scales})
        check_rows(call, x)
        check_scales(call, x, scales)
        if pad_multiple is not None:
            pad_multiple = whole(call, "pad_multiple", pad_multiple, 1)
        if capacity is not None:
            capacity = whole(call, "the capacity", capacity)
        max_tokens = len(x) if max_tokens is None else whole(call, "max_tokens", max_tokens)
        if routing_map.dtype != torch.bool:
            raise TypeError(f"{call}: the routing map must be torch.bool, not {routing_map.dtype}")
        if routing_map.dim() != 2 or len(routing_map) != len(x):
            shape = list(routing_map.shape)
            raise ValueError(f"{call}: the routing map must be of shape [T, E] = [{len(x)}, E], not {shape}")
        self._check_probs(call, probs, routing_map.shape)
        routing_map = routing_map.contiguous()
        parts: dict[str, Tensor] = {}
        if x.is_cuda:
            named = MoeByExpert.route_words(self.world_size, routing_map.shape[1], len(x))
            words = x.new_empty(named[-1][2], dtype=torch.int32)
            parts = {name: words[begin:end] for name, begin, end in named}
        # What may not find memory comes before what peers wait for.
        is_by_token = pad_multiple is None
        received = None if capacity is None else _rows(capacity, 0, x, probs, scales, into)
        self._moe.num_sms = self.dispatch_sms
        core = self._core.notify(
            _codes(x.detach().contiguous()),
            routing_map.view(torch.uint8),
            pad_multiple=pad_multiple,
            scales=None if scales is None else scales.contiguous(),
            capacity=capacity,
            max_tokens=max_tokens,
            words=parts.get("all"),
        )
        places = None
        with on_all_ranks(self._moe, call):
            if parts:
                places = x.new_empty(core.num_places, core.num_experts // self.world_size, dtype=torch.int32)
                core.keep_places_in(places)
            if received is None:
                local = core.num_experts // self.world_size if is_by_token else 0
                received = _rows(core.rows, local, x, probs, scales)
            self._move(core, received, x, probs, scales)
        world_size = self.world_size
        routes = _host_routes(core, world_size) if places is None else _cuda_routes(core, parts, places, self.rank, world_size)
        routes.core, routes.calls, routes.pad_multiple = core, self, pad_multiple
        routes.words, routes.needed = parts.get("all"), parts.get("rows_needed")
        if core.rows_per_expert is None:
            routes.rows_per_expert = parts["rows_per_expert"].long()
        else:
            routes.rows_per_expert = torch.tensor(core.rows_per_expert, dtype=torch.int64)
        return ByExpertReceived(*received, routes.rows_per_expert, routes)

    def dispatch_along(
        self,
        x: Tensor,
        routes: ByExpertRoutes,
        probs: Tensor | None = None,
        scales: Tensor | None = None,
        into: Tensor | None = None,
    ) -> ByExpertReceived:
        """Dispatches tokens along routes; the rows are written ``into`` a tensor that is given."""
        call = "dispatch_by_expert"
        self._check_routes(call, routes)
        check_tensors(call, {"x": x}, {"probs": probs, "scales": scales})
        check_rows(call, x)
        check_scales(call, x, scales)
        self._check_probs(call, probs, (routes.num_tokens, routes.core.num_experts))
        local = routes.core.num_experts // self.world_size if routes.pad_multiple is None else 0
        received = _rows(routes.rows, local, x, probs, scales, (into, None))
        self._move(routes.core, received, x, probs, scales)
        return ByExpertReceived(*received, routes.rows_per_expert, routes)

    def _move(
        self, core: MoeByExpertRoutes, received: "_Rows", x: Tensor, probs: Tensor | None, scales: Tensor | None
    ) -> None:
        self._moe.num_sms = self.dispatch_sms
        self._core.dispatch(
            core,
            _codes(x.detach().contiguous()),
            _codes(received.x),
            scales=_contiguous(scales),
            received_scales=received.scales,
            probs=_contiguous(probs),
            received_probs=received.probs,
        )

    def combine(
        self, x: Tensor, routes: ByExpertRoutes, probs: Tensor | None = None, *, call: str = "combine_by_expert"
    ) -> tuple[Tensor, Tensor | None]:
        """Brings rows back along routes; the sums, ``[T, H]``, and ``probs`` in their places, ``[T, E]``. Errors name ``call``."""
        self._check_routes(call, routes)
        check_tensors(call, {"x": x}, {"probs": probs})
        check_rows(call, x)
        if probs is not None and probs.dtype != torch.float32:
            raise TypeError(f"{call}: the probs must be torch.float32, not {probs.dtype}")
        x, probs = x.detach().contiguous(), _contiguous(probs)
        output = x.new_empty(routes.num_tokens, x.shape[1])
        output_probs = None if probs is None else probs.new_empty(routes.num_tokens, routes.core.num_experts)
        self._moe.num_sms = self.combine_sms
        self._core.combine(routes.core, x, output, probs=probs, output_probs=output_probs)
        return output, output_probs

    def _check_routes(self, call: str, routes: ByExpertRoutes) -> None:
        check_routes(call, routes, ByExpertRoutes)
        if routes.calls._core is not self._core:
            raise ValueError(f"{call}: the routes are of another communicator")

    @staticmethod
    def _check_probs(call: str, probs: Tensor | None, shape: Sequence[int]) -> None:
        if probs is None:
            return
        if probs.dtype != torch.float32:
            raise TypeError(f"{call}: the probs must be torch.float32, not {probs.dtype}")
        if list(probs.shape) != list(shape):
            raise ValueError(f"{call}: the probs must be of shape [T, E] = {list(shape)}, not {list(probs.shape)}")


class _Rows(NamedTuple):
    x: Tensor
    probs: Tensor | None
    scales: Tensor | None


def _rows(
    count: int,
    local: int,
    x: Tensor,
    probs: Tensor | None,
    scales: Tensor | None,
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> _Rows:
    """Tensors for ``count`` rows: new ones, or those of ``into``. Rows by token have probs of ``local`` experts; rows by expert have
    one prob."""
    x = x.detach()
    to_x, to_probs = into
    if probs is not None and to_probs is None:
        to_probs = probs.detach().new_empty((count, local) if local else (count,))
    return _Rows(
        x.new_empty(count, x.shape[1]) if to_x is None else to_x.detach(),
        None if to_probs is None else to_probs.detach(),
        None if scales is None else scales.detach().new_empty(count, scales.shape[1]),
    )


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().contiguous()


def _cuda_routes(
    core: MoeByExpertRoutes, parts: dict[str, Tensor], places: Tensor, rank: int, world_size: int
) -> ByExpertRoutes:
    heads = parts["send_head"].view(-1, world_size)
    if rank > 0:
        before = parts["rank_prefix_matrix"].view(world_size, -1)[rank - 1]
        heads = torch.where(heads < 0, heads, heads + before)
    return ByExpertRoutes(
        heads,
        None,
        None,
        parts["num_received"],
        places >= 0,
        None,
        places,
        parts["tokens_per_expert"],
        core.num_tokens,
        None,
        parts["overflow"],
    )


def _host_routes(core: MoeByExpertRoutes, world_size: int) -> ByExpertRoutes:
    def matrix(words: bytes, columns: int) -> Tensor:
        flat = torch.frombuffer(bytearray(words), dtype=torch.int32) if words else torch.empty(0, dtype=torch.int32)
        return flat.view(-1, columns)

    places = matrix(core.places or b"", core.num_experts // world_size)
    assert core.num_received is not None and core.tokens_per_expert is not None
    return ByExpertRoutes(
        matrix(core.received_as, world_size),
        None,
        None,
        torch.tensor([core.num_received], dtype=torch.int32),
        places >= 0,
        None,
        places,
        torch.tensor(core.tokens_per_expert, dtype=torch.int32),
        core.num_tokens,
        None,
        torch.tensor([core.overflow], dtype=torch.int32),
    )


_cores: "WeakKeyDictionary[Communicator, tuple[MoeByExpert, Moe]]" = WeakKeyDictionary()


def by_expert_calls_of(comm: Communicator) -> ByExpertCalls:
    """The calls of a communicator by routing maps, whose ranks come together to the first."""
    cores = _cores.get(comm)
    if cores is None:
        moe = core_of(comm)
        cores = _cores[comm] = MoeByExpert(moe), moe
    return ByExpertCalls(*cores, comm)


def map_of(topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor | None]:
    """The routing map of choices, and their weights in its places. What is outside of ``0..num_experts`` chooses nothing; the
    weights of an expert that is chosen twice are added."""
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int64, torch.int32, torch.int16):
        raise TypeError(f"topk_idx must be integers of shape [T, K], not {topk_idx.dtype} {list(topk_idx.shape)}")
    if topk_weights is not None and topk_weights.shape != topk_idx.shape:
        shapes = f"{list(topk_idx.shape)} and {list(topk_weights.shape)}"
        raise ValueError(f"topk_idx and topk_weights must both be of shape [T, K], not {shapes}")
    places = topk_idx.long().masked_fill((topk_idx < 0) | (topk_idx >= num_experts), num_experts)
    zeros = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.float32, device=topk_idx.device)
    routing_map = zeros.bool().scatter(1, places, True)[:, :num_experts]
    if topk_weights is None:
        return routing_map, None
    return routing_map, zeros.scatter_add(1, places, topk_weights.float())[:, :num_experts]


class DispatchByMap(torch.autograd.Function):
    """Differentiable in ``x`` and ``probs``. ``plain`` gets what is not."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, calls: ByExpertCalls, plain: list[Any], call: dict[str, Any]
    ) -> Any:
        received = calls.dispatch(x, probs=probs, **call)
        plain.append(received)
        ctx.routes = received.routes
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.dtype, ctx.has_probs = received.x.shape, received.x.dtype, probs is not None
        return received.x, received.probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor | None, grad_probs: Tensor | None) -> Any:
        grad_x, grad_probs = gradients_of_dispatch(ctx.routes, grad_x, grad_probs, ctx)
        return grad_x, grad_probs, None, None, None


def gradients_of_dispatch(
    routes: ByExpertRoutes, grad_x: Tensor | None, grad_probs: Tensor | None, ctx: Any
) -> tuple[Tensor | None, Tensor | None]:
    """One combine of what comes; of what does not come, zeros, as all ranks call alike. Codes have no gradient."""
    like = routes.overflow_flag
    has_codes = ctx.dtype.itemsize == 1
    if has_codes:
        grad_x = like.new_zeros(routes.rows, 4, dtype=torch.float32)
    elif grad_x is None:
        grad_x = like.new_zeros(ctx.rows, dtype=ctx.dtype)
    if grad_probs is None and ctx.has_probs:
        grad_probs = like.new_zeros(routes.rows, dtype=torch.float32)
    of_x, of_probs = routes.calls.combine(grad_x, routes, None if grad_probs is None else grad_probs.float())
    return None if has_codes else of_x, of_probs


class CombineByMap(torch.autograd.Function):
    """Differentiable in ``x``, whose gradient is written into ``to_grad`` if that is given. Errors name ``call``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, routes: ByExpertRoutes, to_grad: Tensor | None = None, call: str = "combine_by_expert"
    ) -> Any:
        ctx.routes, ctx.to_grad = routes, to_grad
        return routes.calls.combine(x, routes, call=call)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.routes.calls.dispatch_along(grad, ctx.routes, into=ctx.to_grad).x, None, None, None
