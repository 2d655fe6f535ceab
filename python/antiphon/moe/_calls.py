"""The calls by token on torch tensors. They allocate their outputs."""

import functools
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
    #: How many tokens this rank has.
    num_tokens: int
    #: How many rows received tensors have: those that arrive, or the capacity.
    rows: int
    #: How many rows arrive. ``None`` on a GPU with a capacity: only the GPU knows, and ``recv_src_idx`` has no −1.
    num_received: int | None
    #: How often all ranks' tokens chose each expert of this rank. On a GPU with a capacity, where the host does not know, int32 ``[L]``.
    tokens_per_expert: list[int] | Tensor
    #: The same as int32 ``[L]``, on the device of the routes.
    counts: Tensor
    #: All that routes with a capacity have on a GPU.
    words: Tensor | None = None

    def __repr__(self) -> str:
        received = "rows of a capacity" if self.num_received is None else "rows"
        return f"<antiphon.moe.ByTokenRoutes: {self.num_tokens} tokens, {self.rows} {received}, {self.core.num_experts} experts>"

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """What calls along the routes read on a GPU: a tensor of each part."""
        return () if self.words is None else (self.words, self.recv_src_idx)


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

    def tune(self, device: int, hidden: int, smallest: int, largest: int) -> None:
        """Measures how many multiprocessors calls need where :attr:`num_sms` is 0."""
        self._core.tune(device, hidden, smallest, largest)

    def check(self) -> None:
        """Raises what has gone wrong in calls on GPUs that are over by now."""
        self._core.check()

    def layout(self, ids: Tensor, num_experts: int, side: Side | None = None, *, call: str = "layout") -> Layout:
        """The layout of ``ids``, int64 or int32 ``[T, K]``. On a GPU it is made on ``side``, or else in the current stream. Errors
        name ``call``."""
        layout = self._new_layout(call, ids, num_experts)
        ids = ids.contiguous()
        self._core.layout(ids, _counts(layout), side=_raw(side), num_sms=self.num_sms)
        if side is not None:
            side.keep(ids, *layout)
        return layout

    def _new_layout(self, call: str, ids: Tensor, num_experts: int) -> Layout:
        """Tensors for the layout of ``ids``."""
        check_tensors(call, {"ids": ids})
        check_ids(call, ids)
        num_experts = experts(call, num_experts, self.world_size)
        return Layout(
            ids.new_empty(self.world_size, dtype=torch.int32),
            ids.new_empty(num_experts, dtype=torch.int32),
            ids.new_empty(len(ids), self.world_size, dtype=torch.bool),
        )

    def dispatch(
        self,
        x: Tensor,
        layout: Layout | int,
        ids: Tensor | None,
        weights: Tensor | None,
        scales: Tensor | None,
        capacity: int | None,
        side: Side | None = None,
    ) -> tuple[Received, ByTokenRoutes]:
        """Dispatches tokens as a layout says, or as ``ids`` do, given the number of experts: all ranks agree on how many rows come, and
        then they do. On a GPU calls are made on ``side``, or else in the current stream, where new tensors are made."""
        if (ids is None) != (weights is None):
            raise ValueError("dispatch: ids need weights, and weights need ids")
        counts = not isinstance(layout, Layout)
        if not isinstance(layout, Layout):
            layout = self._new_layout("dispatch", ids, layout)  # type: ignore[arg-type]
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
        if not counts:
            per_rank, per_expert, in_rank = layout
            layout = Layout(per_rank, per_expert.contiguous(), in_rank.contiguous())
        tokens = _sent(x, scales, ids, weights)
        # What may not find memory comes before what peers wait for. On a GPU that is as many rows as may come, so that nothing is made
        # while the GPUs wait.
        parts = _parts(self.world_size, len(layout.tokens_per_expert), len(x))
        end = parts["all"].stop
        words = x.new_empty(end + (capacity or 0), dtype=torch.int32)
        room = self._room.of(len(x)) if capacity is None and x.is_cuda else capacity
        received = None if room is None else _rows(room, *tokens)
        # Behind the words of routes with a capacity is the token of each row; see `words_of`.
        sources = words[end:] if room is None or capacity is not None else words.new_empty(room)
        options: dict[str, Any] = {"side": _raw(side), "num_sms": self.num_sms}
        core, is_moved, rows, num_received, known = self._core.notify(
            _codes_of(tokens),
            _counts(layout),
            counts=counts,
            capacity=capacity,
            words=words[:end],
            sources=sources,
            received=None if received is None else _codes_of(received),
            **options,
        )
        if side is not None:
            side.keep(words, sources, *layout, *tokens, *(received or ()))
        if not is_moved or received is None:
            with on_all_ranks(self._core, "dispatch"):
                sources = words.new_empty(rows)
                received = _rows(rows, *tokens)
                self._core.dispatch(core, _codes_of(tokens), _codes_of(received), sources=sources, **options)
            if side is not None:
                side.keep(sources, *received)
        elif rows != room:
            sources, received = sources[:rows], _first(rows, received)
        if capacity is None and x.is_cuda:
            self._room.learn(len(x), rows)
        routes = self._routes(words, parts, sources, layout.is_token_in_rank)
        routes.core, routes.rows, routes.num_received = core, rows, num_received
        routes.tokens_per_expert = routes.counts if known is None else known
        return received, routes

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

    def _routes(
        self,
        words: Tensor,
        parts: dict[str, slice],
        sources: Tensor,
        is_token_in_rank: Tensor,
    ) -> ByTokenRoutes:
        zeros = self._zeros.get(words.device)
        if zeros is None:
            zeros = self._zeros[words.device] = words.new_zeros(self.world_size, 1)
        routes = ByTokenRoutes(
            words[parts["rank_prefix_matrix"]].view(self.world_size, self.world_size),
            words[parts["routed_to_each"]].view(self.world_size, 1),
            zeros,
            sources,
            is_token_in_rank,
            words[parts["send_head"]].view(-1, self.world_size),
            words[parts["overflow"]],
        )
        routes.num_tokens = len(is_token_in_rank)
        routes.counts = words[parts["tokens_per_expert"]]
        routes.words = words if words.is_cuda else None
        return routes

    def dispatch_along(
        self, x: Tensor, routes: ByTokenRoutes, scales: Tensor | None = None, side: Side | None = None
    ) -> Received:
        """Dispatches tokens along routes."""
        check_routes("dispatch", routes, ByTokenRoutes)
        check_tensors("dispatch", {"x": x, "the routes": routes.is_token_in_rank}, {"scales": scales})
        check_rows("dispatch", x)
        check_scales("dispatch", x, scales)
        received = self.rows_along(routes.core, routes.rows, x, scales, side)
        if side is not None:
            side.keep(*routes.memory)
        return received

    def rows_along(
        self, core: MoeByTokenRoutes, count: int, x: Tensor, scales: Tensor | None = None, side: Side | None = None
    ) -> Received:
        """Moves rows along routes, to new tensors of ``count`` rows."""
        tokens = _sent(x, scales, None, None)
        received = _rows(count, *tokens)
        self._core.dispatch(core, _codes_of(tokens), _codes_of(received), side=_raw(side), num_sms=self.num_sms)
        if side is not None:
            side.keep(*tokens, *received)
        return received

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
        sums = self.sum_along(routes.core, routes.num_tokens, x, weights, biases, side)
        if side is not None:
            side.keep(*routes.memory)
        return sums

    def sum_along(
        self,
        core: MoeByTokenRoutes,
        num_tokens: int,
        x: Tensor,
        weights: Tensor | None = None,
        biases: Sequence[Tensor] = (),
        side: Side | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sums rows along routes, to new tensors of ``num_tokens`` rows."""
        if len(biases) > 2:
            raise ValueError(f"combine: {len(biases)} biases; at most 2 are added")
        output = x.detach().new_empty(num_tokens, *x.shape[1:])
        output_weights = None if weights is None else weights.new_empty(num_tokens, *weights.shape[1:])
        first, second = [*(bias.detach().contiguous() for bias in biases), None, None][:2]
        x = x.detach().contiguous()
        weights = None if weights is None else weights.detach().contiguous()
        self._core.combine(
            core,
            x,
            output,
            weights=weights,
            output_weights=output_weights,
            bias=first,
            second_bias=second,
            side=_raw(side),
            num_sms=self.num_sms,
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


@functools.lru_cache(maxsize=1024)
def _parts(world_size: int, num_experts: int, num_tokens: int) -> dict[str, slice]:
    """Where the parts of routes lie among their words, and all."""
    return {name: slice(begin, end) for name, begin, end in Moe.route_words(world_size, num_experts, num_tokens)}


def _sent(x: Tensor, scales: Tensor | None, ids: Tensor | None, weights: Tensor | None) -> Received:
    """Tokens as the core takes them."""
    return Received(x.detach().contiguous(), _contiguous(scales), _contiguous(ids), _contiguous(weights))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().contiguous()


def _codes_of(rows: Received) -> Received:
    """Rows whose elements of 8 bits are bytes, which is what is moved of them."""
    return rows._replace(x=_codes(rows.x)) if is_code(rows.x) else rows


def _counts(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """A layout as the core takes it."""
    return layout.tokens_per_rank, layout.tokens_per_expert, layout.is_token_in_rank.view(torch.uint8)


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
    return Received(*(None if each is None else each[:count] for each in received))  # type: ignore[arg-type]


def _rows(count: int, x: Tensor, scales: Tensor | None, ids: Tensor | None, weights: Tensor | None) -> Received:
    """Makes new tensors for ``count`` rows."""
    return Received(
        x.detach().new_empty(count, *x.shape[1:]), _empty(count, scales), _empty(count, ids), _empty(count, weights)
    )


def _empty(count: int, like: Tensor | None) -> Tensor | None:
    return None if like is None else like.detach().new_empty(count, *like.shape[1:])


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
