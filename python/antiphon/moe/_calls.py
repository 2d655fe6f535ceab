"""The calls by token on torch tensors. They allocate their outputs."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from antiphon._core import Communicator, Moe, MoeByTokenRoutes
from antiphon.moe._arguments import (
    check_routes,
    check_ids,
    check_rows,
    check_scales,
    Routes,
    check_tensors,
    experts,
    router_weights,
    whole,
)

__all__ = ["ByTokenRoutes", "Calls", "Layout", "Received", "Side", "calls_of", "core_of", "is_code", "rows_of_gradient"]


class Side(NamedTuple):
    """A stream beside the current one, for calls. A call waits for the work of the current stream, as the allocator takes the memory of
    new tensors from that stream, whose earlier work may still use it."""

    stream: torch.cuda.Stream
    joins: bool
    """Whether the current stream waits for the end of a call."""

    def keep(self, *tensors: Tensor | None) -> None:
        """The memory of a tensor that is freed is not used again before the stream is done with it."""
        if self.joins:
            return
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self.stream)


def _raw(side: Side | None) -> tuple[int, bool] | None:
    """As the core takes it."""
    return None if side is None else (side.stream.cuda_stream, side.joins)


class Layout(NamedTuple):
    """The counts of a rank's choices of experts; see :meth:`antiphon.moe.ExpertParallel.layout`."""

    tokens_per_rank: Tensor
    """int32 ``[R]``: of each rank, how many of the tokens go there."""
    tokens_per_expert: Tensor
    """int32 ``[E]``: of each expert, how often it was chosen."""
    is_token_in_rank: Tensor
    """bool ``[T, R]``: whether a token goes to a rank."""


class _Fields(NamedTuple):
    rank_prefix_matrix: Tensor
    """int32 ``[R, R]``: how many tokens the ranks up to and with the row's send to the column's."""
    channel_prefix_matrix: Tensor
    """int32 ``[R, 1]``: how many of this rank's tokens go to each."""
    recv_channel_prefix_matrix: Tensor
    """int32 ``[R, 1]``: where the rows of the channel begin among those of each source rank: 0."""
    recv_src_idx: Tensor
    """int32 ``[N]``: the token, on its source rank, of each row. −1 for rows of a capacity that did not arrive."""
    is_token_in_rank: Tensor
    """bool ``[T, R]``: whether a token goes to a rank."""
    send_head: Tensor
    """int32 ``[T, R]``: the number of a token among those of this rank that go to a rank, or −1."""
    overflow_flag: Tensor
    """int32 ``[1]``: 1 if rows were dropped because more were routed here than the capacity, else 0."""


class ByTokenRoutes(Routes, _Fields):
    """The routes of a dispatch by token: which rank gets which rows from which. They are a tuple of tensors as DeepEP's handle, of one
    channel, with ``overflow_flag`` last. They belong to the communicator whose dispatch made them, and serve any number of
    dispatches and combines."""

    core: MoeByTokenRoutes
    #: int32 ``[L]`` on a GPU.
    counts: Tensor | None = None
    #: All that routes with a capacity have on a GPU.
    words: Tensor | None = None

    def __repr__(self) -> str:
        received = "rows of a capacity" if self.num_received is None else "rows"
        return f"<antiphon.moe.ByTokenRoutes: {self.core.num_tokens} tokens, {self.rows} {received}, {self.core.num_experts} experts>"

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """What calls along the routes read on a GPU: a tensor of each part."""
        return () if self.words is None else (self.words, self.recv_src_idx)

    @property
    def num_received(self) -> int | None:
        """How many rows arrive. ``None`` on a GPU with a capacity: only the GPU knows, and ``recv_src_idx`` has no −1."""
        return self.core.num_received

    @property
    def rows(self) -> int:
        """How many rows received tensors have: those that arrive, or the capacity."""
        return self.core.rows

    @property
    def tokens_per_expert(self) -> list[int] | Tensor:
        """How often all ranks' tokens chose each expert of this rank. On a GPU with a capacity, where the host does not know,
        int32 ``[L]``."""
        known = self.core.tokens_per_expert
        if known is not None:
            return known
        assert self.counts is not None
        return self.counts


class Received(NamedTuple):
    """What a dispatch brings."""

    x: Tensor
    scales: Tensor | None
    ids: Tensor | None
    weights: Tensor | None


class Calls:
    """Dispatch and combine of one communicator, which all its objects of this class share."""

    def __init__(self, shared: "_Shared", world_size: int) -> None:
        self._core, self._zeros = shared
        self.world_size = world_size
        #: How many multiprocessors calls of this object on GPUs use, at most.
        self.num_sms = Moe.NUM_SMS
        self._room = _Room()

    def _ready(self) -> Moe:
        self._core.num_sms = self.num_sms
        return self._core

    def tune(self, device: int, hidden: int, smallest: int, largest: int) -> None:
        """Measures how many multiprocessors calls need where :attr:`num_sms` is 0."""
        self._core.tune(device, hidden, smallest, largest)

    def check(self) -> None:
        """Raises what has gone wrong in calls on GPUs that are over by now."""
        self._core.check()

    def layout(self, ids: Tensor, num_experts: int, side: Side | None = None, *, call: str = "layout") -> Layout:
        """The layout of ``ids``, int64 or int32 ``[T, K]``. On a GPU it is made on ``side``, or else in the current stream. Errors
        name ``call``."""
        check_tensors(call, {"ids": ids})
        check_ids(call, ids)
        num_experts = experts(call, num_experts, self.world_size)
        layout = Layout(
            ids.new_empty(self.world_size, dtype=torch.int32),
            ids.new_empty(num_experts, dtype=torch.int32),
            ids.new_empty(len(ids), self.world_size, dtype=torch.bool),
        )
        ids = ids.contiguous()
        self._ready().layout(
            ids,
            num_experts,
            tokens_per_rank=layout.tokens_per_rank,
            tokens_per_expert=layout.tokens_per_expert,
            is_token_in_rank=layout.is_token_in_rank.view(torch.uint8),
            side=_raw(side),
        )
        if side is not None:
            side.keep(ids, *layout)
        return layout

    def dispatch(
        self,
        x: Tensor,
        layout: Layout,
        ids: Tensor | None,
        weights: Tensor | None,
        scales: Tensor | None,
        capacity: int | None,
        side: Side | None = None,
    ) -> tuple[Received, ByTokenRoutes]:
        """Dispatches tokens as a layout says: all ranks agree on how many rows come, and then they do. On a GPU calls are made on
        ``side``, or else in the current stream, where new tensors are made."""
        if (ids is None) != (weights is None):
            raise ValueError("dispatch: ids need weights, and weights need ids")
        check_tensors("dispatch", {"x": x, **layout._asdict()}, {"ids": ids, "weights": weights, "scales": scales})
        check_rows("dispatch", x)
        check_scales("dispatch", x, scales)
        if capacity is not None:
            capacity = whole("dispatch", "the capacity", capacity)
        if ids is not None and weights is not None:
            check_ids("dispatch", ids)
            weights = router_weights("dispatch", weights)
            if ids.shape != weights.shape or len(ids) != len(x):
                shapes = f"{list(ids.shape)} and {list(weights.shape)} for {len(x)} tokens"
                raise ValueError(f"dispatch: ids and weights must both be of shape [T, K], not {shapes}")
        if layout.is_token_in_rank.dtype != torch.bool:
            raise TypeError(f"dispatch: is_token_in_rank must be torch.bool, not {layout.is_token_in_rank.dtype}")
        if list(layout.is_token_in_rank.shape) != [len(x), self.world_size]:
            expected, found = [len(x), self.world_size], list(layout.is_token_in_rank.shape)
            raise ValueError(f"dispatch: is_token_in_rank must be of shape [T, R] = {expected}, not {found}")
        is_token_in_rank = layout.is_token_in_rank.contiguous()
        # Contiguous, as all that is passed on.
        x, scales, ids, weights = x.detach().contiguous(), _contiguous(scales), _contiguous(ids), _contiguous(weights)
        layout = layout._replace(tokens_per_expert=layout.tokens_per_expert.contiguous(), is_token_in_rank=is_token_in_rank)
        if x.is_cuda:
            return self._dispatch_on_gpu(layout, Received(x, scales, ids, weights), capacity, side)
        # What may not find memory comes before what peers wait for.
        received = None if capacity is None else _rows(capacity, x, scales, ids, weights)
        core = self._ready().notify(
            _codes(x),
            is_token_in_rank.view(torch.uint8),
            layout.tokens_per_expert,
            top_k=0 if ids is None else ids.shape[1],
            scales=scales,
            capacity=capacity,
        )
        with on_all_ranks(self._core, "dispatch"):
            if received is None:
                received = _rows(core.rows, x, scales, ids, weights)
            self._move(core, received, x, scales, ids, weights, side)
        return received, _host_routes(core, is_token_in_rank, self.world_size)

    def _dispatch_on_gpu(
        self, layout: Layout, tokens: Received, capacity: int | None, side: Side | None
    ) -> tuple[Received, ByTokenRoutes]:
        """As :meth:`dispatch`, of tensors that are checked. Without a capacity as many rows are made ready as may come, judged by the calls
        before, so that nothing is made while the GPUs wait."""
        x, scales, ids, weights = tokens
        room = self._room.of(len(x)) if capacity is None else capacity
        end = Moe.route_words(self.world_size, len(layout.tokens_per_expert), len(x))[-1][2]
        # Behind the words of routes with a capacity is the token of each row; see `words_of`.
        words = x.new_empty(end + (capacity or 0), dtype=torch.int32)
        sources = words.new_empty(room) if capacity is None else words[end:]
        received = _rows(room, x, scales, ids, weights)
        core, is_moved = self._ready().notify_and_dispatch(
            _codes(x),
            layout.is_token_in_rank.view(torch.uint8),
            layout.tokens_per_expert,
            _codes(received.x),
            words=words if capacity is None else words[:end],
            sources=sources,
            top_k=0 if ids is None else ids.shape[1],
            capacity=capacity,
            scales=scales,
            received_scales=received.scales,
            ids=ids,
            weights=weights,
            received_ids=received.ids,
            received_weights=received.weights,
            side=_raw(side),
        )
        if side is not None:
            side.keep(words, layout.tokens_per_expert, layout.is_token_in_rank, sources, *tokens, *received)
        rows = core.rows
        if not is_moved:
            with on_all_ranks(self._core, "dispatch"):
                sources = words.new_empty(rows)
                core.keep_sources_in(sources)
                received = _rows(rows, x, scales, ids, weights)
                self._move(core, received, x, scales, ids, weights, side)
            if side is not None:
                side.keep(sources)
        elif rows != room:
            sources, received = sources[:rows], _first(rows, received)
        if capacity is None:
            self._room.learn(len(x), rows)
        return received, self._cuda_routes(core, layout, len(x), words, sources)

    def words_of(self, routes: ByTokenRoutes) -> Tensor:
        """Routes with a capacity as a tensor, int32, on their device."""
        if routes.words is None:
            return torch.frombuffer(bytearray(routes.core.words), dtype=torch.int32)
        return routes.words

    def routes_of_words(
        self, words: Tensor, num_experts: int, num_tokens: int, capacity: int, top_k: int
    ) -> MoeByTokenRoutes:
        """The routes of which these are the words."""
        size = words_size(words.device, self.world_size, num_experts, num_tokens, capacity)
        if words.dtype != torch.int32 or list(words.shape) != [size]:
            found = f"{words.dtype} {list(words.shape)}"
            raise ValueError(f"the routes of {num_tokens} tokens and {capacity} rows are int32 [{size}], not {found}")
        if not words.is_cuda:
            return self._core.routes_of(words.contiguous(), num_experts)
        end = size - capacity
        return self._core.routes_of(
            words[:end], num_experts, num_tokens=num_tokens, top_k=top_k, sources=words[end:]
        )

    def _cuda_routes(
        self, core: MoeByTokenRoutes, layout: Layout, num_tokens: int, words: Tensor, sources: Tensor
    ) -> ByTokenRoutes:
        parts = Moe.route_words(self.world_size, len(layout.tokens_per_expert), num_tokens)
        part = {name: words[begin:end] for name, begin, end in parts}
        zeros = self._zeros.get(sources.device)
        if zeros is None:
            zeros = self._zeros[sources.device] = sources.new_zeros(self.world_size, 1)
        routes = ByTokenRoutes(
            part["rank_prefix_matrix"].view(self.world_size, self.world_size),
            part["routed_to_each"].view(self.world_size, 1),
            zeros,
            sources,
            layout.is_token_in_rank,
            part["send_head"].view(-1, self.world_size),
            part["overflow"],
        )
        routes.core, routes.counts, routes.words = core, part["tokens_per_expert"], words
        return routes

    def dispatch_along(
        self, x: Tensor, routes: ByTokenRoutes, scales: Tensor | None = None, side: Side | None = None
    ) -> Received:
        """Dispatches tokens along routes."""
        check_routes("dispatch", routes, ByTokenRoutes)
        check_tensors("dispatch", {"x": x, "the routes": routes.is_token_in_rank}, {"scales": scales})
        check_rows("dispatch", x)
        check_scales("dispatch", x, scales)
        received = self.rows_along(routes.core, x, scales, side=side)
        if side is not None:
            side.keep(*routes.memory)
        return received

    def rows_along(
        self, core: MoeByTokenRoutes, x: Tensor, scales: Tensor | None = None, side: Side | None = None
    ) -> Received:
        """Moves rows along routes, to new tensors."""
        received = _rows(core.rows, x, scales, None, None)
        self._move(core, received, x, scales, None, None, side)
        return received

    def _move(
        self,
        core: MoeByTokenRoutes,
        received: Received,
        x: Tensor,
        scales: Tensor | None,
        ids: Tensor | None,
        weights: Tensor | None,
        side: Side | None,
    ) -> None:
        x, scales, ids, weights = x.detach().contiguous(), _contiguous(scales), _contiguous(ids), _contiguous(weights)
        self._ready().dispatch(
            core,
            _codes(x),
            _codes(received.x),
            scales=scales,
            received_scales=received.scales,
            ids=ids,
            weights=weights,
            received_ids=received.ids,
            received_weights=received.weights,
            side=_raw(side),
        )
        if side is not None:
            side.keep(x, scales, ids, weights, *received)

    def combine(
        self,
        x: Tensor,
        routes: ByTokenRoutes,
        weights: Tensor | None = None,
        biases: Sequence[Tensor] = (),
        side: Side | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Brings rows, ``[N, H]``, back along routes; the sums, ``[T, H]``, and those of ``weights``, ``[N, K]``."""
        check_routes("combine", routes, ByTokenRoutes)
        named = {"x": x, "the routes": routes.is_token_in_rank, **{f"bias {i}": bias for i, bias in enumerate(biases)}}
        check_tensors("combine", named, {"weights": weights})
        sums = self.sum_along(routes.core, x, weights, biases, side)
        if side is not None:
            side.keep(*routes.memory)
        return sums

    def sum_along(
        self,
        core: MoeByTokenRoutes,
        x: Tensor,
        weights: Tensor | None = None,
        biases: Sequence[Tensor] = (),
        side: Side | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sums rows along routes, to new tensors."""
        if len(biases) > 2:
            raise ValueError(f"combine: {len(biases)} biases; at most 2 are added")
        output = x.detach().new_empty(core.num_tokens, *x.shape[1:])
        output_weights = None if weights is None else weights.new_empty(core.num_tokens, *weights.shape[1:])
        first, second = [*(bias.detach().contiguous() for bias in biases), None, None][:2]
        x = x.detach().contiguous()
        weights = None if weights is None else weights.detach().contiguous()
        self._ready().combine(
            core,
            x,
            output,
            weights=weights,
            output_weights=output_weights,
            bias=first,
            second_bias=second,
            side=_raw(side),
        )
        if side is not None:
            side.keep(x, weights, first, second, output, output_weights)
        return output, output_weights


def words_size(device: torch.device, world_size: int, num_experts: int, num_tokens: Any, capacity: Any) -> Any:
    """How many integers the words of routes with a capacity are: of numbers that a compiler does not know yet, too."""

    def size(tokens: int, rows: int) -> int:
        if device.type == "cpu":
            return Moe.host_words(world_size, num_experts, tokens, rows)
        return Moe.route_words(world_size, num_experts, tokens)[-1][2] + rows

    alone = size(0, 0)
    return alone + (size(1, 0) - alone) * num_tokens + (size(0, 1) - alone) * capacity


class on_all_ranks:
    """Between two steps of a call an error of this rank is one of all: the peers go on to the second step, and would wait."""

    __slots__ = ("_call", "_core")

    def __init__(self, core: Moe, call: str) -> None:
        self._core, self._call = core, call

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._core.give_up(f"{self._call}: {type(error).__name__}: {error}")


class _Shared(NamedTuple):
    core: Moe
    zeros: dict[torch.device, Tensor]
    """int32 ``[R, 1]``: where the rows of one channel begin."""


class _Slot:
    """Where the threads of a rank find what its calls share: the first one makes it, together with the peers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: _Shared | None = None

    def get(self, comm: Communicator) -> _Shared:
        with self._lock:
            if self._shared is None:
                self._shared = _Shared(Moe(comm), {})
            return self._shared


_of_communicators: "WeakKeyDictionary[Communicator, _Slot]" = WeakKeyDictionary()
_adding = threading.Lock()


def _shared(comm: Communicator) -> _Shared:
    with _adding:
        slot = _of_communicators.setdefault(comm, _Slot())
    return slot.get(comm)


def core_of(comm: Communicator) -> Moe:
    """What makes the calls of a communicator, whose ranks come together to the first."""
    return _shared(comm).core


def calls_of(comm: Communicator) -> Calls:
    """The calls of a communicator, whose ranks come together to the first."""
    return Calls(_shared(comm), comm.world_size)


def _host_routes(core: MoeByTokenRoutes, is_token_in_rank: Tensor, world_size: int) -> ByTokenRoutes:
    like = is_token_in_rank.device

    assert core.num_received is not None

    def matrix(words: bytes | None, columns: int) -> Tensor:
        flat = torch.frombuffer(bytearray(words), dtype=torch.int32) if words else torch.empty(0, dtype=torch.int32)
        return flat.view(-1, columns).to(like)

    sources = matrix(core.source_tokens, 1).flatten()
    routes = ByTokenRoutes(
        matrix(core.rank_prefix_matrix, world_size),
        matrix(core.routed_to_each, 1),
        torch.zeros(world_size, 1, dtype=torch.int32, device=like),
        torch.nn.functional.pad(sources, (0, core.rows - core.num_received), value=-1),
        is_token_in_rank,
        matrix(core.send_head, world_size),
        torch.tensor([core.overflow], dtype=torch.int32, device=like),
    )
    routes.core = core
    return routes


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().contiguous()


class _Room:
    """How many rows may come, judged by those that came last for about as many tokens."""

    def __init__(self) -> None:
        self._by_tokens: dict[int, int] = {}

    def of(self, tokens: int) -> int:
        return self._by_tokens.get(tokens.bit_length(), 0)

    def learn(self, tokens: int, rows: int) -> None:
        # Few sizes, so that an allocator finds the memory of a call before.
        step = 1 << max(rows.bit_length() - 5, 0)
        self._by_tokens[tokens.bit_length()] = -(-(rows + rows // 32) // step) * step


def _first(count: int, received: Received) -> Received:
    """The first ``count`` rows."""
    _, scales, ids, weights = (None if each is None else each[:count] for each in received)
    return Received(received.x[:count], scales, ids, weights)


def _rows(count: int, x: Tensor, scales: Tensor | None, ids: Tensor | None, weights: Tensor | None) -> Received:
    """Makes new tensors for ``count`` rows."""

    def empty(like: Tensor | None) -> Tensor | None:
        return None if like is None else like.detach().new_empty(count, *like.shape[1:])

    return Received(x.detach().new_empty(count, *x.shape[1:]), empty(scales), empty(ids), empty(weights))


def is_code(x: Tensor) -> bool:
    """Whether the elements are bytes or codes of 8 bits, which are moved and have no sums."""
    return x.element_size() == 1


def rows_of_gradient(grad: Tensor, of_weights: Tensor) -> Tensor:
    """The rows that a combine sums for the gradients of a dispatch: ``grad``, or for codes, which have none, the fewest zeros that
    are a row."""
    return of_weights.new_zeros(len(of_weights), 4) if is_code(grad) else grad


def _codes(x: Tensor) -> Tensor:
    """Elements of 8 bits as bytes, which is what is moved of them."""
    return x.view(torch.uint8) if is_code(x) else x
