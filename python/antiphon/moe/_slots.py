"""The calls to and from slots on torch tensors. They allocate their outputs."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from antiphon._core import Communicator, MoeSlotRoutes, MoeSlots, Pending
from antiphon.moe._arguments import Routes, check_ids, check_routes, check_tensors, experts, router_weights, whole
from antiphon.moe._calls import _codes

__all__ = ["Hook", "Options", "ReceivedSlots", "SlotCalls", "SlotRoutes", "check_sent", "slot_calls_of"]

#: The second half of a started call.
Hook: TypeAlias = Callable[[], None]


#: The formats of received rows, and of how many elements a row is a multiple.
_GROUPS = {"bf16": 8, "fp8": 128, "fp8_powers_of_two": 128, "fp8_packed": 512}
#: The formats in which a combine sends rows, likewise.
_SENT = {"bf16": 8, "logfmt": 128}


class Options(NamedTuple):
    """The optional parts of a call."""

    statistics: Tensor | None = None
    """int32 ``[L]``, to which a dispatch adds its counts."""
    waits: Tensor | None = None
    """int64 ``[R]``, to which a call adds the nanoseconds that this rank waited for each other rank."""
    start: bool = False
    """Whether the call returns before it has received, with a hook that receives."""


class _Fields(NamedTuple):
    src_info: Tensor
    """int32 ``[L, R * M]``: of each slot, its token on the rank that it comes from."""
    layout_range: Tensor
    """int64 ``[L, R]``: the slots that each rank's tokens fill: the first in the upper 32 bits, their number in the lower."""
    num_max_dispatch_tokens_per_rank: int
    """``M``"""
    hidden: int
    """``H``"""
    num_experts: int
    """``E``"""


class SlotRoutes(Routes, _Fields):
    """The routes of a dispatch to slots: which rank gets which rows from which. They are a tuple as the handle of DeepEP's low-latency
    mode, and belong to the communicator whose dispatch made them."""

    core: MoeSlotRoutes
    engine: MoeSlots
    #: What :meth:`antiphon.moe.deep_ep.Buffer.get_next_low_latency_combine_buffer` gave.
    combine_buffer: Tensor | None = None

    def __repr__(self) -> str:
        slots = f"{self.num_max_dispatch_tokens_per_rank} tokens of each rank"
        return f"<antiphon.moe.SlotRoutes: at most {slots}, rows of {self.hidden}, {self.num_experts} experts>"

    def new_rows(self) -> Tensor:
        """A tensor for the experts' outputs: bfloat16 ``[L, R * M, H]``."""
        return self.src_info.new_empty(*self.src_info.shape, self.hidden, dtype=torch.bfloat16)


class ReceivedSlots(NamedTuple):
    """The outputs of a dispatch to slots: the ``R * M`` slots of each expert of this rank. They are filled from the first on, in
    the order of source rank and token. The content of the other slots is undefined."""

    x: Tensor
    """``[L, R * M, H]`` of bfloat16, or of float8_e4m3fn."""
    scales: Tensor | None
    """The scales of codes: float32 ``[L, R * M, H / 128]``, or int32 ``[L, R * M, H / 512]`` with four UE8M0 in each. Scales of neighbouring
    slots are neighbours in memory."""
    counts: Tensor
    """int32 ``[L]``: how many slots of each expert are filled."""
    routes: SlotRoutes
    """The routes, for the combine."""


class SlotCalls:
    """Dispatch to slots, and combine from them, of one communicator. The first call of each size allocates memory; all ranks make it
    together."""

    def __init__(self, comm: Communicator) -> None:
        # The calls live as long as the communicator, and so do not keep it.
        self._comm = weakref.ref(comm)
        self._world_size = comm.world_size
        self._engines: dict[tuple[int, int, int, int, int | None], MoeSlots] = {}
        #: The call of each engine on a GPU that may not have received yet.
        self._started: dict[MoeSlots, Pending[None]] = {}

    def _engine(self, x: Tensor, max_tokens: int, num_experts: int, top_k: int) -> MoeSlots:
        device = x.device.index if x.is_cuda else None
        key = (max_tokens, x.shape[1], num_experts, top_k, device)
        engine = self._engines.get(key)
        if engine is None:
            comm = self._comm()
            if comm is None:
                raise RuntimeError("slots: the communicator is no more")
            engine = self._engines[key] = MoeSlots(
                comm,
                max_tokens=max_tokens,
                hidden=x.shape[1],
                num_experts=num_experts,
                top_k=top_k,
                device=device,
            )
        return engine

    def check(self) -> None:
        """Raises the errors of calls on GPUs that have ended."""
        for engine in self._engines.values():
            engine.check()

    def _receive(self, engine: MoeSlots) -> None:
        """Receives the data of the call before, if its hook has not been called."""
        started = self._started.get(engine)
        if started is None:
            return
        try:
            started.wait()
        except RuntimeError:
            # A refusal leaves the half to a later call or its hook. Outside of a capture none can follow: the half is of a graph.
            if torch.cuda.is_current_stream_capturing():
                raise
            del self._started[engine]
            raise
        del self._started[engine]

    def _hook(self, engine: MoeSlots, started: Pending[None] | None, is_cuda: bool) -> Hook | None:
        if started is None:
            return None
        if is_cuda:
            self._started[engine] = started
        call = started

        def hook() -> None:
            call.wait()

        return hook

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        max_tokens: int,
        num_experts: int,
        format: str,
        options: Options = Options(),
        *,
        call: str = "dispatch_to_slots",
        limit: str = "max_tokens",
    ) -> tuple[ReceivedSlots, Hook | None]:
        """Moves tokens to the slots of their experts. Errors name ``call``, and its argument ``limit``."""
        world_size = self._world_size
        statistics, waits, start = options
        check_tensors(call, {"x": x, "ids": ids}, {"statistics": statistics, "waits": waits})
        check_ids(call, ids)
        if x.dim() != 2 or len(x) != len(ids):
            shapes = f"{list(x.shape)} and {list(ids.shape)}"
            raise ValueError(f"{call}: x and ids must be of shapes [T, H] and [T, K], not {shapes}")
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{call}: x must be torch.bfloat16, not {x.dtype}")
        num_experts = experts(call, num_experts, world_size)
        max_tokens = whole(call, limit, max_tokens)
        if len(x) > max_tokens:
            raise ValueError(f"{call}: {len(x)} tokens; {limit} is {max_tokens}")
        _check_written(call, statistics=statistics, waits=waits)
        group = _GROUPS.get(format)
        if group is None:
            raise ValueError(f"{call}: the format must be one of {', '.join(_GROUPS)}, not {format!r}")
        if x.shape[1] == 0 or x.shape[1] % group:
            raise ValueError(f"{call}: rows of {x.shape[1]} elements, which must be a multiple of {group}")
        local, slots, hidden = num_experts // world_size, world_size * max_tokens, x.shape[1]
        x, ids = _sent(x, start), _sent(ids, start)
        is_coded = format != "bf16"
        rows = x.new_empty(local, slots, hidden, dtype=torch.float8_e4m3fn if is_coded else torch.bfloat16)
        scale_type = torch.int32 if format == "fp8_packed" else torch.float32
        scales = x.new_empty(local, hidden // group, slots, dtype=scale_type) if is_coded else None
        counts = x.new_empty(local, dtype=torch.int32)
        source_tokens = x.new_empty(local, slots, dtype=torch.int32)
        layout_range = x.new_empty(local, world_size, dtype=torch.int64)
        engine = self._engine(x, max_tokens, num_experts, ids.shape[1])
        self._receive(engine)
        core, started = engine.dispatch(
            x,
            ids,
            _codes(rows),
            format=format,
            max_tokens=max_tokens,
            num_experts=num_experts,
            counts=counts,
            source_tokens=source_tokens,
            layout_range=layout_range,
            received_scales=scales,
            statistics=statistics,
            waits=waits,
            start=start,
        )
        routes = SlotRoutes(source_tokens, layout_range, max_tokens, hidden, num_experts)
        routes.core, routes.engine = core, engine
        received = ReceivedSlots(rows, None if scales is None else scales.transpose(1, 2), counts, routes)
        return received, self._hook(engine, started, x.is_cuda)

    def combine(
        self,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor,
        routes: SlotRoutes,
        out: Tensor | None = None,
        options: Options = Options(),
        *,
        format: str = "bf16",
        call: str = "combine_from_slots",
    ) -> tuple[Tensor, Hook | None]:
        """Moves rows back along routes in a format, weighs and sums them. Errors name ``call``."""
        check_routes(call, routes, SlotRoutes)
        check_sent(call, routes, format)
        if not any(routes.engine is engine for engine in self._engines.values()):
            raise ValueError(f"{call}: the routes are of another communicator")
        given = {"x": rows, "ids": ids, "weights": weights, "the routes": routes.src_info}
        check_tensors(call, given, {"out": out, "waits": options.waits})
        check_ids(call, ids)
        _check_written(call, waits=options.waits)
        if rows.dtype != torch.bfloat16:
            raise TypeError(f"{call}: x must be torch.bfloat16, not {rows.dtype}")
        weights = router_weights(call, weights)
        if out is None:
            out = rows.new_empty(len(ids), routes.hidden, dtype=torch.bfloat16)
        elif not out.is_contiguous() or out.dtype != torch.bfloat16:
            raise ValueError(f"{call}: out must be contiguous and torch.bfloat16, as it is written")
        rows, weights = _sent(rows, options.start), weights.detach().contiguous()
        self._receive(routes.engine)
        started = routes.engine.combine(
            routes.core,
            rows,
            ids.contiguous(),
            weights,
            out.detach(),
            format=format,
            waits=options.waits,
            start=options.start,
        )
        return out, self._hook(routes.engine, started, rows.is_cuda)


def _sent(tensor: Tensor, starts: bool) -> Tensor:
    """A tensor that a call sends. On the CPU a started call sends later, when the caller may have written the tensor."""
    tensor = tensor.detach()
    return tensor.clone(memory_format=torch.contiguous_format) if starts and not tensor.is_cuda else tensor.contiguous()


def check_sent(call: str, routes: SlotRoutes, format: str) -> None:
    """Raises ``ValueError`` for a format in which a combine cannot send rows, or not these."""
    unit = _SENT.get(format)
    if unit is None:
        raise ValueError(f"{call}: the format must be one of {', '.join(_SENT)}, not {format!r}")
    if routes.hidden % unit:
        raise ValueError(f"{call}: rows of {routes.hidden} elements, which must be a multiple of {unit} for {format}")


def _check_written(call: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{call}: the {name} must be contiguous, as the call writes to them")


_calls: "weakref.WeakKeyDictionary[Communicator, SlotCalls]" = weakref.WeakKeyDictionary()


def slot_calls_of(comm: Communicator) -> SlotCalls:
    """The calls of a communicator to and from slots."""
    calls: Any = _calls.get(comm)
    if calls is None:
        calls = _calls[comm] = SlotCalls(comm)
    return calls  # type: ignore[no-any-return]
