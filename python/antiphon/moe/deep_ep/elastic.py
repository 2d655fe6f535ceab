"""``ElasticBuffer``: the buffer of DeepEP's version 2."""

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from antiphon._core import Moe
from antiphon.comm.cuda_ipc import communicator, uses_cuda
from antiphon.moe._arguments import (
    check_routes,
    check_ids,
    check_rows,
    check_scales,
    check_tensors,
    experts,
    refuse_derivatives,
    router_weights,
    whole,
)
from antiphon.moe._calls import ByTokenRoutes, Calls, Received, calls_of
from antiphon.moe.deep_ep.elastic_handle import EPHandle
from antiphon.moe.deep_ep.elastic_sessions import ElasticSessions
from antiphon.moe.deep_ep.elastic_sizes import Group, aligned, buffer_bytes, busy_sms, no_engram, of_one_node, rate, size_hint
from antiphon.moe.deep_ep.events import AnyEvent, EventHandle, EventOverlap, StreamOrder

__all__ = ["ElasticBuffer"]

#: Tokens, or codes with their scales.
_Tokens: TypeAlias = "Tensor | tuple[Tensor, Tensor]"

#: GB/s of all NVLinks of an H100 or H200 in one direction: 90 % of 18 links of 26.562.
_NVLINK_GBS = 430.0
#: Elements of 32 bits that begin each column of scales at 16 bytes.
_SCALES_OF_16_BYTES = 4


class ElasticBuffer(ElasticSessions):
    """Dispatch and combine between the ranks of a group, with the names of DeepEP's version 2; pipelines and all-gathers besides.

    All ranks make it together, from a torch process group of any backend or an :class:`antiphon.Communicator`. It takes ``num_bytes``,
    of which ``num_cpu_bytes`` would be on the host, or else the sizes that :meth:`get_buffer_size_hint` takes. They are only kept for
    those who ask: memory does not depend on them, and buffers of one group share it. ``num_max_tokens_per_rank`` is also the default of
    :meth:`dispatch`.

    Received rows are always in the order of source rank and token, ``deterministic`` or not. Without ``allow_multiple_reduction`` a sum over
    rows of ``do_expand`` is rounded once, and rows travel in float32; with it each rank rounds what it sends. Without
    ``prefer_overlap_with_compute`` calls take at least 64 SMs unless told how many.

    These have no effect: ``sl_idx`` and ``num_allocated_qps`` but for limits (nothing goes over RDMA), and ``num_cpu_timeout_secs`` and
    ``num_gpu_timeout_secs`` (every wait has the communicator's deadline). ``allow_hybrid_mode`` only changes what
    :meth:`get_theoretical_num_qps` answers.

    On a GPU a call is in the current stream, or with ``async_with_compute_stream`` or ``allocate_on_comm_stream`` in the buffer's. On the
    CPU calls are over when they return. Calls raise ``ValueError`` for tensors that require grad, unless grad mode is off: they track
    no gradients.

    Raises ``NotImplementedError`` for ranks on several nodes, and ``ValueError`` for more than 8 and for sizes that do not suit each other.
    """

    def __init__(
        self,
        group: Group,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        call = "ElasticBuffer"
        num_max_tokens_per_rank = whole(call, "num_max_tokens_per_rank", num_max_tokens_per_rank)
        whole(call, "sl_idx", sl_idx)
        num_allocated_qps = whole(call, "num_allocated_qps", num_allocated_qps)
        whole(call, "num_cpu_timeout_secs", num_cpu_timeout_secs, 1)
        whole(call, "num_gpu_timeout_secs", num_gpu_timeout_secs, 1)
        if num_bytes is not None:
            num_bytes = buffer_bytes("num_bytes", num_bytes, 1)
        num_cpu_bytes = buffer_bytes("num_cpu_bytes", num_cpu_bytes, 0)
        if num_cpu_bytes > (num_bytes or 0):
            raise ValueError(f"{call}: {num_cpu_bytes} num_cpu_bytes cannot be part of {num_bytes} num_bytes")
        self.group = group
        self._comm = of_one_node(call, group)
        if num_bytes is None:
            sizes = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction)
            num_bytes = size_hint(call, self._comm.world_size, *sizes)
        self.rank_idx, self.num_ranks = self._comm.rank, self._comm.world_size
        self.num_bytes, self.num_cpu_bytes = num_bytes, num_cpu_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        self.num_allocated_qps = num_allocated_qps or (129 if allow_hybrid_mode else 17)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.num_rdma_ranks, self.num_nvlink_ranks = 1, self.num_ranks
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self._calls: Calls | None = calls_of(self._comm)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._sends = {}

    def __repr__(self) -> str:
        state = ", destroyed" if self._calls is None else ""
        return f"<antiphon.moe.deep_ep.ElasticBuffer: rank {self.rank_idx} of {self.num_ranks}{state}>"

    @property
    def runtime(self) -> Calls | None:
        """The object that makes the calls; ``None`` when destroyed."""
        return self._calls

    def destroy(self) -> None:
        """Ends the use of this buffer. Nothing is communicated.

        Raises ``RuntimeError`` unless the buffer was made with ``explicitly_destroy``.
        """
        if not self.explicitly_destroy:
            raise RuntimeError("ElasticBuffer.destroy: the buffer was not made with explicitly_destroy=True")
        self._calls = None

    @staticmethod
    def get_buffer_size_hint(
        group: Group,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """The bytes that all rows of a dispatch or a combine of these sizes come to on a rank, a multiple of 2 MiB: the larger number of
        ``R * num_max_tokens_per_rank`` tokens, and ``min(R, num_topk)`` rows of bfloat16 (``num_topk`` of them without
        ``allow_multiple_reduction``) for each of ``num_max_tokens_per_rank`` tokens, all with what travels beside them. A ``num_topk`` of 0
        stands for 32. ``allow_hybrid_mode`` has no effect, and a buffer need not be so large: rows travel through a region of a fixed size."""
        call = "get_buffer_size_hint"
        count = communicator(call, group).world_size
        return size_hint(call, count, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction)

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """Raises ``NotImplementedError``, whatever ``num_entries``, ``hidden``, ``num_max_tokens_per_rank`` and ``dtype``, as
        :meth:`engram_write` does."""
        no_engram("get_engram_storage_size_hint")

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        """Raises ``NotImplementedError``, whatever ``storage`` and ``sf``: a rank cannot read entries of another one's memory."""
        no_engram("engram_write")

    def engram_fetch(self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False) -> Any:
        """Raises ``NotImplementedError``, whatever ``indices``, ``num_qps`` and ``use_tma_aligned_col_major_sf``, as
        :meth:`engram_write` does."""
        no_engram("engram_fetch")

    def get_physical_domain_size(self) -> tuple[int, int]:
        """How many ranks are reached by RDMA, and by NVLink: 1 and ``R``."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """How many domains ranks are divided into, and how many ranks each has: 1 and ``R``."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """How many SMs keep the links busy, if all experts are chosen as often: an even number from 4 to that of the GPU.

        A token goes to ``e = R (1 - C(E - L, K) / C(E, K))`` ranks, and ``1 - 1 / R`` of the rows cross the links. While these carry
        ``nvlink_gbs`` (0 stands for 430, of an H100), SMs write all rows, each ``sm_write_gbs``, and read an ``e``-th of them, each
        ``sm_read_gbs``; the larger number of SMs is taken, and a quarter more. Without ``prefer_overlap_with_compute`` it is at least 64. A
        rank alone has no links, and gets all SMs of its GPU (24 without one). ``rdma_gbs`` has no effect, and ``num_scaleout_topk`` must be 0.
        """
        call = "get_theoretical_num_sms"
        num_experts = experts(call, num_experts, self.num_ranks)
        num_topk = whole(call, "num_topk", num_topk, 1, num_experts)
        whole(call, "num_scaleout_topk", num_scaleout_topk, 0, 0)
        rates = rate(call, "nvlink_gbs", nvlink_gbs or _NVLINK_GBS), rate(call, "sm_read_gbs", sm_read_gbs)
        number = busy_sms(self.num_ranks, num_experts, num_topk, *rates, rate(call, "sm_write_gbs", sm_write_gbs))
        if not self.prefer_overlap_with_compute:
            number = max(number, 64)
        if not uses_cuda():
            return Moe.NUM_SMS if self.num_ranks == 1 else number
        room = int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
        return room if self.num_ranks == 1 else min(number, room)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """A number of queue pairs that calls with ``num_sms`` SMs take as ``num_qps``, where it has no effect."""
        num_sms = whole("get_theoretical_num_qps", "num_sms", num_sms, 1)
        return min(num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9), self.num_allocated_qps)

    @staticmethod
    def capture() -> EventHandle:
        """The present point of the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of this buffer's asynchronous calls on the current GPU."""
        return self._stream_of(torch.device("cuda", torch.cuda.current_device()))

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Waits for all ranks: if torch has initialised CUDA in this process a stream does, the buffer's, behind which the current one
        then is, or the current one alone; else the host. With ``with_cpu_sync`` the host also waits for the GPU before and after.
        ``sequential`` has no effect."""
        self._open()
        if not uses_cuda():
            return self._comm.barrier()
        device = torch.cuda.current_device()
        if with_cpu_sync:
            torch.cuda.synchronize(device)
        current = torch.cuda.current_stream(device)
        stream = self.get_comm_stream() if use_comm_stream else current
        if use_comm_stream:
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._comm.barrier(device=device)
        if use_comm_stream:
            current.wait_stream(stream)
        if with_cpu_sync:
            torch.cuda.synchronize(device)

    def dispatch(
        self,
        x: _Tokens,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: AnyEvent = None,
        previous_event_before_epilogue: AnyEvent = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[_Tokens, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends tokens (``[T, H]``, or codes with their scales) to the ranks of their experts.

        A fresh dispatch takes ``topk_idx`` (``[T, K]``, whatever is not in ``0..num_experts`` choosing nothing), ``num_experts``, and
        ``topk_weights`` (``[T, K]``) if they are wanted. No rank has more than ``num_max_tokens_per_rank`` tokens, which all ranks pass alike.
        With a ``handle`` rows go as they did then: without ``topk_idx``, with or without weights, and with its other numbers.

        It gives the rows, ``[N, H]``; the experts of this rank that each chose, or −1, and the weights of these, or 0, both ``[N, K]``; an
        :class:`EPHandle`; and an event, of calls with ``async_with_compute_stream``. With ``do_expand`` there is a row for each choice,
        ``[P, H]``, with its weight, ``[P]``, and no ids; see :class:`EPHandle` for their order. Rows of padding hold anything, or 0 with
        ``do_zero_padding``; their weights are 0. With ``use_tma_aligned_col_major_sf`` scales come by columns, each of which begins at a
        multiple of 16 bytes.

        Without ``do_cpu_sync`` (by default it is on, but for a handle) the host waits for nothing, and tensors have as many rows as there
        can be; the handle's ``psum_…`` say how many mean something. On a GPU such a call may be captured in a graph.

        ``cumulative_local_expert_recv_stats`` (int32 ``[L]``) has the numbers of choices added. ``do_handle_copy`` keeps what is written to
        ``topk_idx``, and to the ids that come, from the handle. ``num_sms`` is the most SMs that a call on a GPU takes; 0 stands for
        :meth:`get_theoretical_num_sms`. ``num_qps`` has no effect.

        ``previous_event`` (with ``allocate_on_comm_stream``) is what the call waits for instead of the current stream, and
        ``previous_event_before_epilogue`` what it waits for besides, from the start.

        Raises ``ValueError`` for arguments that do not suit each other or the handle, and ``TypeError`` for dtypes that are not served,
        before anything is sent.
        """
        calls, call = self._open(), "dispatch"
        if isinstance(x, tuple) and len(x) != 2:
            raise ValueError(f"{call}: x must be tokens, or codes and their scales, not {len(x)} tensors")
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        stats = cumulative_local_expert_recv_stats
        optional = {"scales": scales, "topk_idx": topk_idx, "topk_weights": topk_weights, "the statistics": stats}
        check_tensors(call, {"x": tokens}, optional)
        refuse_derivatives(call, tokens, topk_weights)
        check_rows(call, tokens)
        check_scales(call, tokens, scales)
        if do_zero_padding and not do_expand:
            raise ValueError(f"{call}: do_zero_padding needs do_expand")
        if handle is None:
            sizes = self._sizes(len(tokens), topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment)
        else:
            check_routes(call, handle, EPHandle, name="handle")
            if do_cpu_sync:
                raise ValueError(f"{call}: with a handle there is nothing to wait for: pass no do_cpu_sync")
            sizes = _sizes_along(handle, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_expand)
        topk_weights = self._check_beside(len(tokens), sizes, topk_weights, stats)
        num_sms = self._check_numbers(call, num_sms, num_qps)
        order = self._order(
            call, tokens, previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream
        )
        if not num_sms:
            top_k = sizes.choices.shape[1]
            num_sms = self.get_theoretical_num_sms(sizes.num_experts, min(max(top_k, 1), sizes.num_experts))
        calls.num_sms = num_sms
        inputs = [tokens, scales, topk_idx, topk_weights, stats, *([] if handle is None else handle._tensors())]
        outputs: list[Any] = []
        with order.run(inputs, outputs):
            ids: Tensor | None
            if handle is None:
                waits = do_cpu_sync is None or do_cpu_sync
                received, routes = self._fresh(calls, tokens, scales, sizes, topk_weights, waits)
                ids, weights = received.ids, None if topk_weights is None else received.weights
                assert ids is not None
                copies = do_handle_copy
                handle = EPHandle(
                    routes,
                    self.rank_idx,
                    sizes.choices.clone() if copies else sizes.choices,
                    ids.clone() if copies and not do_expand else ids,
                    do_expand=do_expand,
                    do_cpu_sync=waits,
                    num_experts=sizes.num_experts,
                    expert_alignment=sizes.expert_alignment,
                    num_max_tokens_per_rank=sizes.num_max_tokens_per_rank,
                    num_sms=num_sms,
                )
            else:
                received = calls.dispatch_along(tokens, handle._routes, scales)
                ids = handle._recv_topk_idx.clone()
                weights = None if topk_weights is None else _weights_along(calls, handle, topk_weights)
            rows, row_scales = received.x, received.scales
            if do_expand:
                ids = None
                rows = handle._expanded(rows, do_zero_padding)
                row_scales = None if row_scales is None else handle._expanded(row_scales, do_zero_padding)
                weights = None if weights is None else handle._expanded_weights(weights)
            if row_scales is not None and use_tma_aligned_col_major_sf:
                row_scales = _by_columns(row_scales)
            if stats is not None:
                stats.add_(handle.num_unaligned_recv_tokens_per_expert)
            outputs += [*received, rows, row_scales, ids, weights, *handle._tensors()]
        brought: _Tokens = rows if row_scales is None else (rows, row_scales)
        return brought, ids, weights, handle, order.event

    def _sizes(
        self, count: int, topk_idx: Tensor | None, num_experts: Any, num_max_tokens_per_rank: Any, expert_alignment: Any
    ) -> "_Sizes":
        """The checked arguments of a fresh dispatch."""
        call = "dispatch"
        if topk_idx is None or num_experts is None:
            raise ValueError(f"{call}: without a handle pass topk_idx and num_experts")
        check_ids(call, topk_idx)
        if num_max_tokens_per_rank is None:
            num_max_tokens_per_rank = self.num_max_tokens_per_rank
        sizes = _Sizes(
            topk_idx,
            experts(call, num_experts, self.num_ranks),
            whole(call, "num_max_tokens_per_rank", num_max_tokens_per_rank, 1),
            whole(call, "expert_alignment", 1 if expert_alignment is None else expert_alignment, 1),
        )
        if count > sizes.num_max_tokens_per_rank:
            raise ValueError(f"{call}: {count} tokens are more than num_max_tokens_per_rank, {sizes.num_max_tokens_per_rank}")
        return sizes

    def _check_beside(self, count: int, sizes: "_Sizes", weights: Tensor | None, stats: Tensor | None) -> Tensor | None:
        """The weights of a dispatch, after the checks of all that goes with these."""
        call, shape, local = "dispatch", [count, sizes.choices.shape[1]], sizes.num_experts // self.num_ranks
        if len(sizes.choices) != count:
            raise ValueError(f"{call}: x has {count} tokens, and there are choices of {len(sizes.choices)}")
        if weights is not None and list(weights.shape) != shape:
            raise ValueError(f"{call}: topk_weights must be of shape [T, K] = {shape}, not {list(weights.shape)}")
        if stats is not None and stats.dtype != torch.int32:
            raise TypeError(f"{call}: the statistics must be torch.int32, not {stats.dtype}")
        if stats is not None and list(stats.shape) != [local]:
            raise ValueError(f"{call}: the statistics must be of shape [L] = [{local}], not {list(stats.shape)}")
        return None if weights is None else router_weights(call, weights)

    def _fresh(
        self, calls: Calls, x: Tensor, scales: Tensor | None, sizes: "_Sizes", weights: Tensor | None, waits: bool
    ) -> tuple[Received, ByTokenRoutes]:
        """Sends tokens by their choices, with weights of 0 where there are none."""
        if weights is None:
            weights = sizes.choices.new_zeros(sizes.choices.shape, dtype=torch.float32)
        capacity = None if waits else self.num_ranks * sizes.num_max_tokens_per_rank
        return calls.dispatch(x, sizes.num_experts, sizes.choices, weights, scales, capacity)

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: AnyEvent = None,
        previous_event_before_epilogue: AnyEvent = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows of each token, ``[N, H]`` or with ``do_expand`` ``[P, H]``: ``[T, H]``. Of ``topk_weights`` (``[N, K]`` or ``[P]``) come
        those of each choice back from its rank, and 0 where there is none: float32 ``[T, K]``. The third result is an event, as of
        :meth:`dispatch`.

        A sum begins with ``bias``, one or a pair of tensors ``[T, H]``, and adds the rows in the order of ranks, in float32 (float64 of
        float64). Rows of ``do_expand`` are added up on their rank before, in the order of a token's choices, and rounded unless the
        buffer was made without ``allow_multiple_reduction``. Rows of padding are not read.

        A ``num_sms`` of 0 stands for that of the dispatch. ``num_qps`` has no effect, and the other arguments are those of :meth:`dispatch`.
        """
        calls, call = self._open(), "combine"
        check_routes(call, handle, EPHandle, name="handle")
        if bias is not None and not isinstance(bias, (Tensor, tuple)):
            raise TypeError(f"{call}: bias must be a tensor or a pair of tensors, not {type(bias).__name__}")
        biases: tuple[Tensor, ...] = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        if isinstance(bias, tuple) and len(biases) != 2:
            raise ValueError(f"{call}: bias must be a tensor or a pair of tensors, not {len(biases)} of them")
        named = {"x": x, "the handle": handle.topk_idx, **{f"bias {index}": each for index, each in enumerate(biases)}}
        check_tensors(call, named, {"topk_weights": topk_weights})
        refuse_derivatives(call, x, topk_weights, *biases)
        if not x.dtype.is_floating_point or x.element_size() == 1:
            raise TypeError(f"{call}: x must be of float32, float16, bfloat16 or float64, whose rows have sums, not {x.dtype}")
        size = handle.rows
        tokens, top_k = handle.topk_idx.shape
        if x.dim() != 2 or len(x) != size:
            name = "[P, H]" if handle.do_expand else "[N, H]"
            raise ValueError(f"{call}: x must be of shape {name} = [{size}, H], not {list(x.shape)}")
        if topk_weights is not None:
            topk_weights = router_weights(call, topk_weights)
            shape, name = ([size], "[P]") if handle.do_expand else ([size, top_k], "[N, K]")
            if list(topk_weights.shape) != shape:
                raise ValueError(f"{call}: topk_weights must be of shape {name} = {shape}, not {list(topk_weights.shape)}")
        for each in biases:
            if each.dtype != x.dtype:
                raise TypeError(f"{call}: a bias must be {x.dtype} as x is, not {each.dtype}")
            if list(each.shape) != [tokens, x.shape[1]]:
                raise ValueError(f"{call}: a bias must be of shape [T, H] = {[tokens, x.shape[1]]}, not {list(each.shape)}")
        num_sms = self._check_numbers(call, num_sms, num_qps)
        order = self._order(call, x, previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream)
        calls.num_sms = num_sms or handle.num_sms
        outputs: list[Any] = []
        with order.run([x, topk_weights, *biases, *handle._tensors()], outputs):
            rows, weights, dtype = x, topk_weights, x.dtype
            if handle.do_expand:
                rows = handle._folded(x)
                if self.allow_multiple_reduction:
                    rows = rows.to(dtype)
                biases = tuple(each.to(rows.dtype) for each in biases)
                weights = None if weights is None else handle._folded_weights(weights)
            elif weights is not None:
                weights = weights.masked_fill(handle._recv_topk_idx < 0, 0)
            combined, combined_weights = calls.combine(rows, handle._routes, weights, biases)
            combined = combined.to(dtype)
            outputs += [rows, weights, *biases, combined, combined_weights]
        return combined, combined_weights, order.event

    def _open(self) -> Calls:
        if self._calls is None:
            raise RuntimeError("this ElasticBuffer was destroyed")
        return self._calls

    def _check_numbers(self, call: str, num_sms: int, num_qps: int) -> int:
        whole(call, "num_qps", num_qps, 0, self.num_allocated_qps)
        return whole(call, "num_sms", num_sms)

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        return stream

    def _order(
        self, call: str, x: Tensor, previous: AnyEvent, before_epilogue: AnyEvent, is_async: bool, allocates_there: bool
    ) -> StreamOrder:
        events = {"previous_event": previous, "previous_event_before_epilogue": before_epilogue}
        for name, event in events.items():
            if event is not None and not isinstance(event, (EventHandle, EventOverlap)):
                raise TypeError(f"{call}: {name} must be an EventHandle or an EventOverlap, not {type(event).__name__}")
        if previous is not None and not allocates_there:
            raise ValueError(f"{call}: previous_event needs allocate_on_comm_stream")
        stream = self._stream_of(x.device) if x.is_cuda and (is_async or allocates_there) else None
        return StreamOrder(x.device, stream, previous, before_epilogue, is_async)


class _Sizes(NamedTuple):
    """What a dispatch goes by."""

    choices: Tensor
    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int


def _sizes_along(
    handle: EPHandle,
    topk_idx: Tensor | None,
    num_experts: int | None,
    num_max_tokens_per_rank: int | None,
    expert_alignment: int | None,
    do_expand: bool,
) -> _Sizes:
    """Those of a handle, which others must equal."""
    if topk_idx is not None:
        raise ValueError("dispatch: a handle has the choices already: pass no topk_idx")
    given = {
        "num_experts": num_experts,
        "num_max_tokens_per_rank": num_max_tokens_per_rank,
        "expert_alignment": expert_alignment,
        "do_expand": do_expand,
    }
    for name, value in given.items():
        if value is not None and value != getattr(handle, name):
            raise ValueError(f"dispatch: {name} is {value}, and {getattr(handle, name)} of the handle")
    return _Sizes(handle.topk_idx, handle.num_experts, handle.num_max_tokens_per_rank, handle.expert_alignment)


def _weights_along(calls: Calls, handle: EPHandle, weights: Tensor) -> Tensor:
    """Weights, ``[T, K]``, along a handle: ``[N, K]``, and 0 where a choice is another rank's."""
    ids = handle._recv_topk_idx
    top_k = ids.shape[1]
    if not top_k:
        return weights.new_empty(ids.shape)
    rows = torch.nn.functional.pad(weights, (0, -top_k % 4))  # whole 16 bytes
    return calls.rows_along(handle._routes.core, handle._routes.rows, rows).x[:, :top_k].masked_fill(ids < 0, 0)


def _by_columns(scales: Tensor) -> Tensor:
    """The same scales, whose columns begin at multiples of 16 bytes."""
    rows, columns = scales.shape
    placed = scales.new_empty_strided((rows, columns), (1, max(aligned(rows, _SCALES_OF_16_BYTES), 1)))
    return placed.copy_(scales)
