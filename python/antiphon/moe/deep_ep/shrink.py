"""Low-latency calls that go on without ranks that are lost (``enable_shrink``)."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from antiphon import AbortedError, Communicator, PeerLostError
from antiphon.moe._slots import Options, ReceivedSlots, SlotRoutes, check_sent, slot_calls_of

__all__ = ["ShrinkingCalls", "ShrunkHandle"]

_DISPATCH, _COMBINE, _LIMIT = "low_latency_dispatch", "low_latency_combine", "num_max_dispatch_tokens_per_rank"

_T = TypeVar("_T")


class ShrunkHandle(SlotRoutes):
    """A handle of all ranks. ``inner`` is that of the ranks which take part, of which ``members`` are the numbers."""

    inner: SlotRoutes
    members: list[int]
    #: Whether ranks were lost behind the dispatch, so that ``inner`` has other slots.
    is_moved: bool = False


class ShrinkingCalls:
    """Low-latency calls among the ranks of a communicator that are left.

    A call that fails because ranks are lost, or not there at the deadline, is made again by the others: those become a communicator of
    their own. Tensors keep the shapes that they have with all ranks. Experts of a masked rank get no token, tokens of a masked rank
    do not arrive, and a sum leaves out the choices of its experts.

    A call on a GPU is over when it returns, as only then the host knows whether a rank was lost. It cannot be captured in a graph.
    """

    def __init__(self, comm: Communicator) -> None:
        self._whole = comm
        whole = comm.split(0, comm.rank)
        assert whole is not None
        self._comm = whole
        self._members = list(range(comm.world_size))
        self._masked: set[int] = set()
        #: Calls that this rank has finished, which ranks compare before they make one again.
        self._finished = 0

    def close(self) -> None:
        """Leaves the other ranks."""
        self._comm.close()

    def update_mask(self, rank: int, is_masked: bool) -> None:
        """Masks a rank from the next call on, or takes a mask back from a rank that still takes part."""
        if not 0 <= rank < self._whole.world_size or rank == self._whole.rank:
            others = f"another rank than {self._whole.rank} of {self._whole.world_size}"
            raise ValueError(f"low_latency_update_mask_buffer: the rank must be {others}, not {rank}")
        if is_masked:
            self._masked.add(rank)
        elif rank in self._members:
            self._masked.discard(rank)
        else:
            raise RuntimeError(f"low_latency_update_mask_buffer: rank {rank} does not take part any more")

    def clean_mask(self) -> None:
        """Takes back all masks but those of ranks that do not take part any more."""
        self._masked -= set(self._members)

    def mask(self) -> Tensor:
        """int32 ``[R]``: 1 of a rank that is masked."""
        absent = self._masked | (set(range(self._whole.world_size)) - set(self._members))
        return torch.tensor([int(rank in absent) for rank in range(self._whole.world_size)], dtype=torch.int32)

    def _shrink(self) -> None:
        """Goes on with the ranks that are left. All of them come here from the same call."""
        while True:
            left = self._comm.shrink()
            self._comm.close()
            self._comm = left
            try:
                finished = dict(left.exchange_objects((self._whole.rank, self._finished)))
                break
            except (AbortedError, PeerLostError):
                pass  # another rank is lost
        self._members = list(finished)
        if len(set(finished.values())) > 1:
            raise RuntimeError(f"low latency: the ranks left are not at the same call; finished by each: {finished}")
        if still := sorted(self._masked & set(self._members)):
            raise RuntimeError(f"low latency: ranks {still} are masked here, and take part")

    def _call(self, device: torch.device, waits: Tensor | None, call: Callable[[Tensor | None], _T]) -> _T:
        """Makes a call with statistics of waiting, again if ranks are lost meanwhile."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("low latency: with enable_shrink a call ends on the host, and cannot be captured in a CUDA graph")
        if self._masked & set(self._members):
            self._comm.abort()
        while True:
            waited = None if waits is None else waits.new_zeros(len(self._members))
            try:
                result = call(waited)
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
                    slot_calls_of(self._comm).check()
            except (AbortedError, PeerLostError, TimeoutError):
                self._shrink()
                continue
            if waits is not None and waited is not None:
                waits[self._members] += waited
            self._finished += 1
            return result

    def _ids(self, ids: Tensor, num_experts: int) -> Tensor:
        """Experts as the ranks that are left number them; −1 for those of other ranks."""
        local = num_experts // self._whole.world_size
        places = [self._members.index(rank) if rank in self._members else -1 for rank in range(self._whole.world_size)]
        numbers = torch.tensor(places, device=ids.device)
        is_expert = (ids >= 0) & (ids < num_experts)
        rank = numbers[ids.long().div(local, rounding_mode="floor").masked_fill(~is_expert, 0)]
        return (rank * local + ids % local).masked_fill(~is_expert | (rank < 0), -1)

    def dispatch(
        self, x: Tensor, ids: Tensor, max_tokens: int, num_experts: int, format: str, options: Options
    ) -> ReceivedSlots:
        """As :meth:`SlotCalls.dispatch`, over when it returns."""
        world_size = self._whole.world_size
        if num_experts <= 0 or num_experts % world_size:
            raise ValueError(f"low_latency_dispatch: {num_experts} experts cannot be divided among {world_size} ranks")
        local = num_experts // world_size

        def call(waits: Tensor | None) -> ReceivedSlots:
            calls = slot_calls_of(self._comm)
            experts = local * len(self._members)
            mine = self._ids(ids, num_experts)
            return calls.dispatch(x, mine, max_tokens, experts, format, Options(waits=waits), call=_DISPATCH, limit=_LIMIT)[0]

        received = self._call(x.device, options.waits, call)
        if options.statistics is not None:
            options.statistics.add_(received.counts)
        inner = received.routes
        slots = world_size * max_tokens

        def whole(tensor: Tensor, dimension: int) -> Tensor:
            """With the slots of all ranks, of which those of the members come first."""
            if tensor.shape[dimension] == slots:
                return tensor
            shape = list(tensor.shape)
            shape[dimension] = slots
            grown = tensor.new_zeros(shape)
            grown.narrow(dimension, 0, tensor.shape[dimension]).copy_(tensor)
            return grown

        ranges = inner.layout_range.new_zeros(local, world_size)
        ranges[:, self._members] = inner.layout_range
        handle = ShrunkHandle(whole(inner.src_info, 1), ranges, max_tokens, inner.hidden, num_experts)
        handle.inner, handle.members = inner, list(self._members)
        handle.core, handle.engine = inner.core, inner.engine
        scales = None if received.scales is None else whole(received.scales.transpose(1, 2), 2).transpose(1, 2)
        rows = whole(received.x.view(torch.uint8), 1).view(received.x.dtype)
        return ReceivedSlots(rows, scales, received.counts, handle)

    def combine(
        self,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor,
        handle: SlotRoutes,
        out: Tensor | None,
        options: Options,
        *,
        format: str = "bf16",
    ) -> Tensor:
        """As :meth:`SlotCalls.combine`, over when it returns."""
        if not isinstance(handle, ShrunkHandle):
            raise ValueError("low_latency_combine: the handle is of another buffer")
        shape = [*handle.src_info.shape, handle.hidden]
        if list(rows.shape) != shape:
            raise ValueError(f"low_latency_combine: x must be of shape [L, R * M, H] = {shape}, not {list(rows.shape)}")
        check_sent("low_latency_combine", handle, format)

        def call(waits: Tensor | None) -> Tensor:
            if handle.members != self._members:
                self._route_again(ids, handle)
            kept = self._kept(rows, handle)
            inner_ids = self._ids(ids, handle.num_experts)
            calls = slot_calls_of(self._comm)
            options = Options(waits=waits)
            return calls.combine(kept, inner_ids, weights, handle.inner, out, options, format=format, call=_COMBINE)[0]

        return self._call(rows.device, options.waits, call)

    def _route_again(self, ids: Tensor, handle: ShrunkHandle) -> None:
        """Makes the routes of a handle anew, between the ranks that are left."""
        local = handle.num_experts // self._whole.world_size
        nothing = ids.new_zeros(len(ids), handle.hidden, dtype=torch.bfloat16)
        count = handle.num_max_dispatch_tokens_per_rank
        calls = slot_calls_of(self._comm)
        mine, experts = self._ids(ids, handle.num_experts), local * len(self._members)
        received, _ = calls.dispatch(nothing, mine, count, experts, "bf16", call=_DISPATCH, limit=_LIMIT)
        handle.inner, handle.members, handle.is_moved = received.routes, list(self._members), True

    def _kept(self, rows: Tensor, handle: ShrunkHandle) -> Tensor:
        """The rows of the ranks that are left, in their slots: the slots of other ranks' tokens are no more."""
        slots = len(handle.members) * handle.num_max_dispatch_tokens_per_rank
        if not handle.is_moved:
            return rows[:, :slots]
        kept = rows.new_zeros(len(rows), slots, handle.hidden)
        ranges = zip(handle.layout_range.tolist(), handle.inner.layout_range.tolist(), strict=True)
        for expert, (theirs, ours) in enumerate(ranges):
            for rank, packed in zip(handle.members, ours, strict=True):
                begin, count = theirs[rank] >> 32, packed & 0xFFFFFFFF
                kept[expert, packed >> 32 : (packed >> 32) + count] = rows[expert, begin : begin + count]
        return kept
