"""``Buffer`` and ``Config``."""

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from antiphon import Communicator
from antiphon._core import Moe
from antiphon.comm.cuda_ipc import communicator
from antiphon.comm.mnnvl import communicator_of
from antiphon.moe._arguments import check_routes, check_tensors, refuse_derivatives, whole
from antiphon.moe._calls import ByTokenRoutes, Layout, calls_of
from antiphon.moe.deep_ep.events import CallOrder, EventHandle, EventOverlap
from antiphon.moe.deep_ep.low_latency import LowLatencyBuffer
from antiphon.moe.deep_ep.shrink import ShrinkingCalls

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Buffer", "Config"]

#: Tokens, or codes with their scales.
_Tokens: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


class Config:
    """How DeepEP's kernels cut their work. Only ``num_sms`` means something here; the sizes of chunks are what size hints are
    computed from, as callers expect, and are otherwise ignored. A ``num_sms`` of 0 leaves the number to each call.

    Raises ``ValueError`` for sizes that DeepEP refuses.
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        chunks = {
            "num_max_nvl_chunked_send_tokens": num_max_nvl_chunked_send_tokens,
            "num_max_nvl_chunked_recv_tokens": num_max_nvl_chunked_recv_tokens,
            "num_max_rdma_chunked_send_tokens": num_max_rdma_chunked_send_tokens,
            "num_max_rdma_chunked_recv_tokens": num_max_rdma_chunked_recv_tokens,
        }
        sizes = [whole("Config", name, size) for name, size in chunks.items()]
        nvl, rdma = (sizes[0], sizes[1]), (sizes[2], sizes[3])
        for send, recv in (nvl, rdma):
            if not 0 < send < recv:
                raise ValueError(f"Config: chunks of {send} tokens to send must be fewer than the {recv} to receive")
        rounded = -(-rdma[1] // rdma[0]) * rdma[0]
        self.num_sms = _even(num_sms)
        self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens = nvl
        self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens = rdma[0], rounded

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """The bytes that DeepEP's ring queues would take. Rows travel through a region of a fixed size here, so a buffer need
        not be so large."""
        hidden_bytes = whole("get_nvl_buffer_size_hint", "hidden_bytes", hidden_bytes)
        num_ranks = whole("get_nvl_buffer_size_hint", "num_ranks", num_ranks, 1)
        per_token = hidden_bytes + 8 + 128 * 8 + 128 * 4 + 128 * 4
        local, nodes = min(num_ranks, 8), max(num_ranks // 8, 1)
        channels = (self.num_sms or Moe.NUM_SMS) // 2 * local
        size = channels * (2 * nodes + 3) * 4 + channels * self.num_max_nvl_chunked_recv_tokens * per_token
        return -(-size // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0, whatever ``hidden_bytes`` and ``num_ranks``: ranks are on one machine."""
        return 0


class Buffer(LowLatencyBuffer):
    """Dispatch and combine between the ranks of a group.

    All ranks make it together, from a torch process group of any backend, an :class:`antiphon.Communicator`, or ``comm``, an
    mpi4py communicator. Memory does not depend on ``num_nvl_bytes``, which is only kept for those who ask. Buffers of one
    group share their memory, and dropping one communicates nothing.

    These have no effect: ``low_latency_mode`` (every buffer has the low-latency calls), ``num_qps_per_rank`` and
    ``allow_nvlink_for_low_latency_mode`` (all ranks are reached by NVLink), ``allow_mnnvl`` and ``use_fabric`` (they are on one
    machine).

    With ``enable_shrink`` low-latency calls go on without ranks that are lost: see
    :class:`antiphon.moe.deep_ep.shrink.ShrinkingCalls`.

    Raises ``ValueError`` without a group, and for what is not served: more than 8 ranks, several machines.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: "ProcessGroup | Communicator | None" = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        if group is None and comm is None:
            raise ValueError("Buffer: pass a group, or an mpi4py communicator as comm")
        for name, size in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            if whole("Buffer", name, size, most=2**63 - 1) % 128:
                raise ValueError(f"Buffer: {name} must be a multiple of 128, not {size}")
        self.group = group if group is not None else comm
        self._comm = communicator("Buffer", group) if group is not None else communicator_of("Buffer", comm)
        self.rank, self.group_size = self._comm.rank, self._comm.world_size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.explicitly_destroy = explicitly_destroy
        self._calls: Any = calls_of(self._comm)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.low_latency_mode = low_latency_mode
        if enable_shrink:
            self._shrinking = ShrinkingCalls(self._comm)

    def __repr__(self) -> str:
        kind = "low latency and normal calls" if self.low_latency_mode else "normal calls"
        state = ", destroyed" if self._calls is None else ""
        return f"<antiphon.moe.deep_ep.Buffer: {kind}, rank {self.rank} of {self.group_size}{state}>"

    @property
    def runtime(self) -> Any:
        """The object that makes the calls; ``None`` when destroyed."""
        return self._calls

    def destroy(self) -> None:
        """Ends the use of this buffer. Nothing is communicated; with ``enable_shrink`` the other ranks go on without this one.

        Raises ``RuntimeError`` unless the buffer was made with ``explicitly_destroy``.
        """
        if not self.explicitly_destroy:
            raise RuntimeError("Buffer.destroy: the buffer was not made with explicitly_destroy=True")
        self._calls = None
        if self._shrinking is not None:
            self._shrinking.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether there are kernels for tensors of FP8: rows of codes are always moved."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets how many SMs kernels use, for all buffers, where a call has no ``config``; on the CPU it changes nothing. With 0, which DeepEP
        has not, each call takes the fewest that cost little time for its size, and so do those with a configuration that is asked for then."""
        Buffer.num_sms = _even(new_num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """The present point of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The default configuration of :meth:`dispatch`."""
        return _config(num_ranks, {2: 24})

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The default configuration of :meth:`combine`."""
        return _config(num_ranks, {2: 10, 4: 9, 8: 4})

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """The counts of the choices ``topk_idx``, ``[T, K]``: ``num_tokens_per_rank`` (int32 ``[R]``), ``None`` (there is one
        machine), ``num_tokens_per_expert`` (int32 ``[E]``), ``is_token_in_rank`` (bool ``[T, R]``), and an event."""
        calls = self._open()
        check_tensors("get_dispatch_layout", {"topk_idx": topk_idx})
        order = self._order("get_dispatch_layout", topk_idx, previous_event, async_finish, allocate_on_comm_stream)
        outputs: list[Any] = []
        with order.run([topk_idx], outputs):
            layout = calls.layout(topk_idx, num_experts, order.side)
            outputs += layout
        return layout.tokens_per_rank, None, layout.tokens_per_expert, layout.is_token_in_rank, order.event

    def dispatch(
        self,
        x: _Tokens,
        handle: ByTokenRoutes | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[_Tokens, Tensor | None, Tensor | None, list[int] | None, ByTokenRoutes | None, EventOverlap]:
        """Sends tokens (``[T, H]``, or codes with their scales) to the ranks of their experts.

        A fresh dispatch takes what :meth:`get_dispatch_layout` gave, and optionally both ``topk_idx`` and ``topk_weights``
        (float32). It gives the rows, ``[N, H]``; the experts of this rank that each chose and their weights, ``[N, K]``, if they
        were passed; how many tokens each expert has, as a list, each rounded up to ``expert_alignment``; a handle; and an
        event. ``num_tokens_per_rdma_rank`` has no effect, as there is one machine. With ``num_worst_tokens`` all tensors have this number of rows, and the list is empty. With a ``handle``, rows go as they did
        then, and the outputs between are ``None``.

        Raises ``ValueError`` for arguments that do not suit each other, and for a tensor that requires grad, unless grad mode is off, as
        this class tracks no gradients; ``TypeError`` for dtypes that are not served.
        """
        calls = self._open()
        if isinstance(x, tuple) and len(x) != 2:
            raise ValueError(f"dispatch: x must be tokens, or codes and their scales, not {len(x)} tensors")
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        refuse_derivatives("dispatch", tokens, topk_weights)
        if handle is not None:
            check_routes("dispatch", handle, ByTokenRoutes, name="handle")
        order = self._order("dispatch", tokens, previous_event, async_finish, allocate_on_comm_stream, config)
        outputs: list[Any] = []
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ValueError("dispatch: a handle has the choices already: pass no topk_idx or topk_weights")
            with order.run([tokens, scales, *handle], outputs):
                received = calls.dispatch_along(tokens, handle, scales, order.side)
                outputs += received
            return _like(x, received.x, received.scales), None, None, None, None, order.event
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise ValueError(
                "dispatch: without a handle pass num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert"
            )
        num_worst_tokens = whole("dispatch", "num_worst_tokens", num_worst_tokens)
        expert_alignment = whole("dispatch", "expert_alignment", expert_alignment, 1)
        if num_worst_tokens and topk_idx is None:
            raise ValueError("dispatch: num_worst_tokens needs topk_idx and topk_weights")
        layout = Layout(num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
        with order.run([tokens, scales, topk_idx, topk_weights, *layout], outputs):
            received, handle = calls.dispatch(
                tokens, layout, topk_idx, topk_weights, scales, num_worst_tokens or None, order.side
            )
            outputs += [*received, *handle]
        counts = []
        if not num_worst_tokens:
            counts = [-(-count // expert_alignment) * expert_alignment for count in handle.tokens_per_expert]
        rows = _like(x, received.x, received.scales)
        return rows, received.ids, received.weights, counts, handle, order.event

    def combine(
        self,
        x: Tensor,
        handle: ByTokenRoutes,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows (``[N, H]``) of each token, and ``topk_weights`` (float32 ``[N, K]``), in the order of ranks: ``[T, H]``
        and ``[T, K]``. ``bias``, one or a pair of tensors ``[T, H]``, is added first."""
        calls = self._open()
        check_routes("combine", handle, ByTokenRoutes, name="handle")
        biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        refuse_derivatives("combine", x, topk_weights, *biases)
        order = self._order("combine", x, previous_event, async_finish, allocate_on_comm_stream, config)
        outputs: list[Any] = []
        with order.run([x, topk_weights, *biases, *handle], outputs):
            combined, weights = calls.combine(x, handle, topk_weights, biases, order.side)
            outputs += [combined, weights]
        return combined, weights, order.event

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of this buffer's calls on the current GPU."""
        return self._stream_of(torch.device("cuda", torch.cuda.current_device()))

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """Raises ``NotImplementedError``, whatever ``dtype``, ``size``, ``offset`` and ``use_rdma_buffer``: a buffer has no memory
        of its own that callers might write."""
        raise NotImplementedError(
            "get_local_buffer_tensor: buffers of a group share the region through which rows travel, and none can be "
            "written: pass tensors to dispatch and combine"
        )

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        return stream

    def _order(
        self,
        call: str,
        x: Tensor,
        previous_event: EventOverlap | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
        config: Config | None = None,
    ) -> CallOrder:
        if not isinstance(x, Tensor):
            raise TypeError(f"{call}: x must be a torch.Tensor, not {type(x).__name__}")
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"{call}: config must be a Config, not {type(config).__name__}")
        if x.is_cuda:
            self._calls.num_sms = Buffer.num_sms if config is None else config.num_sms
        stream = self._stream_of(x.device) if x.is_cuda else None
        return CallOrder(stream, previous_event, async_finish, allocate_on_comm_stream)

    def _open(self) -> Any:
        if self._calls is None:
            raise RuntimeError("this Buffer was destroyed")
        return self._calls


def _even(num_sms: Any) -> int:
    number = whole("Buffer", "num_sms", num_sms)
    if number % 2:
        raise ValueError(f"Buffer: num_sms must be even, not {number}")
    return number


def _config(num_ranks: int, chunks: dict[int, int]) -> Config:
    if num_ranks not in range(1, 9):
        raise ValueError(f"{num_ranks} ranks; 1 to 8 are served")
    return Config(Buffer.num_sms, chunks.get(num_ranks, 6), 256, 6, 128)


def _like(x: _Tokens, rows: Tensor, scales: Tensor | None) -> _Tokens:
    return (rows, scales) if isinstance(x, tuple) and scales is not None else rows
