"""``HybridEPBuffer``."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from antiphon import Communicator
from antiphon._core import Moe
from antiphon.comm.cuda_ipc import communicator
from antiphon.moe._arguments import check_rows, check_tensors, refuse_derivatives, router_weights, whole
from antiphon.moe._by_expert import ByExpertReceived, ByExpertRoutes, by_expert_calls_of, map_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["HybridEPBuffer"]


class HybridEPBuffer:
    """Dispatch and combine by routing maps between the ranks of a group.

    All ranks make it together, from a torch process group of any backend or an :class:`antiphon.Communicator`. Memory depends on
    none of the numbers, and buffers of one group share it. Tokens may be any number, a different one on each rank; only calls
    with ``num_permuted_tokens`` need to know the most that any rank has, which is ``max_num_of_tokens_per_rank``: the largest
    number that a rank passed, at least 512, as a multiple of 64. It grows with a call of more tokens, which all ranks must have then:
    ranks whose numbers differ get an error.

    These have no effect: ``use_fp8`` (tokens are moved as they are), ``num_sms_preprocessing_api``, ``num_blocks_permute`` and
    ``num_blocks_unpermute`` (rows go to their places without kernels between), ``load_cached_kernels`` (compiled kernels are kept
    always), ``use_shared_buffer``, ``enable_custom_allgather`` and ``use_mnnvl``.

    Calls raise ``ValueError`` for tensors that require grad, unless grad mode is off: they track no gradients.

    Raises ``ValueError`` for numbers below 1, for more than 8 ranks, and unless all of them are in one NVLink domain
    (``num_of_hybrid_ep_ranks_per_nvlink_domain``).
    """

    def __init__(
        self,
        group: "ProcessGroup | Communicator",
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        call = "HybridEPBuffer"
        num_local_experts = whole(call, "num_local_experts", num_local_experts, 1, Moe.MAX_LOCAL_EXPERTS)
        hidden_dim = whole(call, "hidden_dim", hidden_dim, 1)
        max_num_of_tokens_per_rank = whole(call, "max_num_of_tokens_per_rank", max_num_of_tokens_per_rank)
        for name, sms in (("num_sms_dispatch_api", num_sms_dispatch_api), ("num_sms_combine_api", num_sms_combine_api)):
            if sms is not None:
                whole(call, name, sms, 1)
        self.group = group
        self._comm = communicator("HybridEPBuffer", group)
        self.rank, self.group_size = self._comm.rank, self._comm.world_size
        if num_of_hybrid_ep_ranks_per_nvlink_domain not in (None, self.group_size):
            raise ValueError(
                f"{call}: num_of_hybrid_ep_ranks_per_nvlink_domain is {num_of_hybrid_ep_ranks_per_nvlink_domain}; all "
                f"{self.group_size} ranks must be in one domain"
            )
        self.hidden_dim, self.num_local_experts, self.use_fp8 = hidden_dim, num_local_experts, use_fp8
        self.num_sms_dispatch_api = Moe.NUM_SMS if num_sms_dispatch_api is None else num_sms_dispatch_api
        self.num_sms_combine_api = Moe.NUM_SMS if num_sms_combine_api is None else num_sms_combine_api
        most = max(*self._comm.exchange_objects(max_num_of_tokens_per_rank), 512)
        self.max_num_of_tokens_per_rank = -(-most // 64) * 64
        self._calls = by_expert_calls_of(self._comm)
        self._calls.dispatch_sms, self._calls.combine_sms = self.num_sms_dispatch_api, self.num_sms_combine_api

    def __repr__(self) -> str:
        rows = f"{self.num_local_experts} experts of each rank, hidden {self.hidden_dim}"
        return f"<antiphon.moe.deep_ep.HybridEPBuffer: {rows}, rank {self.rank} of {self.group_size}>"

    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: Any = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Any]:
        """Sends tokens (``[T, H]``) to the ranks of their experts, where each has one row, in the order of source rank and token.

        Experts are those of ``routing_map`` (bool ``[T, E]``) with ``probs`` (``[T, E]``, which are cast to float32), or of ``topk_idx`` (``[T, K]``)
        with ``topk_weights``, which needs ``num_of_experts``. Tokens of 8 bits have a ``scaling_factor``, float32
        ``[T, H / 128]``; of others it is ignored. ``num_dispatched_tokens`` and ``num_dispatched_tokens_tensor`` have no effect: a
        handle knows the number.

        Gives the rows ``[N, H]``, their probs ``[N, E]`` (0 but for chosen experts of this rank), their scales, and a handle:
        a tuple of seven, of which ``[3]`` is ``N`` and ``[4]`` the routing map of this rank's experts.
        """
        call = "dispatch"
        probs = _check_given(call, hidden, scaling_factor, topk_idx, topk_weights, routing_map, probs)
        scales = _scales_of(call, hidden, scaling_factor)
        if handle is not None:
            inner = _inner(handle)
            if probs is None and topk_idx is not None and topk_weights is not None:
                probs = map_of(topk_idx, topk_weights, inner.core.num_experts)[1]
            received = self._calls.dispatch_along(hidden, inner, probs, scales)
        else:
            routing_map, probs = self._routing(call, routing_map, probs, topk_idx, topk_weights, num_of_experts)
            received = self._calls.dispatch(hidden, routing_map, probs, scales, pad_multiple=None, call=call)
            handle = HybridTokenHandle.of(received.routes)
        return received.x, self._spread(received.probs), received.scales, handle

    def _spread(self, probs: Tensor | None) -> Tensor | None:
        """Probs of this rank's experts, ``[N, L]``, among those of all."""
        if probs is None:
            return None
        before = self.rank * probs.shape[1]
        after = (self.group_size - self.rank - 1) * probs.shape[1]
        return torch.nn.functional.pad(probs, (before, after))

    def combine(self, hidden: Tensor, probs: Tensor | None = None, handle: Any = None) -> tuple[Tensor, Tensor | None]:
        """Sums what the ranks made of each token (``[N, H]``), in the order of ranks: ``[T, H]``. Of ``probs``, ``[N, E]``, come those
        of each expert back from its rank: ``[T, E]``."""
        check_tensors("combine", {"hidden": hidden}, {"probs": probs})
        refuse_derivatives("combine", hidden, probs)
        check_rows("combine", hidden)
        inner = _inner(handle)
        if inner.pad_multiple is not None:
            raise ValueError("combine: the handle is of dispatch_with_permute: use combine_with_unpermute")
        if probs is not None:
            if list(probs.shape) != [len(hidden), inner.core.num_experts]:
                shape = [len(hidden), inner.core.num_experts]
                raise ValueError(f"combine: the probs must be of shape [N, E] = {shape}, not {list(probs.shape)}")
            probs = probs.tensor_split(self.group_size, 1)[self.rank]
        return self._calls.combine(hidden, inner, probs, call="combine")

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: Any = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, ByExpertRoutes]:
        """Sends tokens (``[T, H]``) to a row for each of their experts: by expert, and of each in the order of source rank and token.
        The rows of each expert are padded to a multiple of ``pad_multiple`` (``None`` and 0: not). Experts are named as in
        :meth:`dispatch`.

        Gives the rows ``[P, H]``, their probs ``[P]``, their scales, how many rows each expert has (int64 ``[L]``), and a handle.
        Rows to which no token comes are 0. Without ``num_permuted_tokens`` the call waits for the counts of all ranks. With it
        ``P`` is that number, and what belongs to later rows is dropped, which ``handle.overflow_flag`` says.

        With a ``handle`` tokens go as they did then. ``non_blocking`` needs ``num_permuted_tokens`` or a handle, and
        ``use_host_meta`` is its opposite under an older name. ``use_fp8`` says whether tokens are of 8 bits, which they must be then.
        ``num_dispatched_tokens`` and ``fuse_permute_dispatch`` have no effect: rows are counted, and go to their places at once.
        """
        call = "dispatch_with_permute"
        probs = _check_given(call, hidden, scaling_factor, topk_idx, topk_weights, routing_map, probs)
        if use_fp8 is not None and use_fp8 != (hidden.element_size() == 1):
            raise ValueError(f"{call}: use_fp8 is {use_fp8}, and the tokens are {hidden.dtype}")
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        scales = _scales_of(call, hidden, scaling_factor)
        received: ByExpertReceived
        if handle is not None:
            inner = _inner(handle)
            self._check_along(call, inner, num_permuted_tokens, pad_multiple)
            if probs is None and topk_idx is not None and topk_weights is not None:
                probs = map_of(topk_idx, topk_weights, inner.core.num_experts)[1]
            received = self._calls.dispatch_along(hidden, inner, probs, scales)
            return received.x, received.probs, received.scales, received.rows_per_expert, inner
        if non_blocking and num_permuted_tokens is None:
            raise ValueError(f"{call}: non_blocking needs num_permuted_tokens")
        if num_of_experts_per_rank is not None:
            whole(call, "num_of_experts_per_rank", num_of_experts_per_rank, 1, Moe.MAX_LOCAL_EXPERTS)
        routing_map, probs = self._routing(
            call, routing_map, probs, topk_idx, topk_weights, num_of_experts, num_of_experts_per_rank
        )
        if num_permuted_tokens is not None:
            num_permuted_tokens = whole(call, "num_permuted_tokens", num_permuted_tokens)
            self.max_num_of_tokens_per_rank = max(self.max_num_of_tokens_per_rank, -(-len(hidden) // 64) * 64)
        received = self._calls.dispatch(
            hidden,
            routing_map,
            probs,
            scales,
            pad_multiple=_multiple(call, pad_multiple),
            capacity=num_permuted_tokens,
            max_tokens=self.max_num_of_tokens_per_rank,
            call=call,
        )
        return received.x, received.probs, received.scales, received.rows_per_expert, received.routes

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: Any = None,
        num_dispatched_tokens: int | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Sums the rows (``[P, H]``) of each token: on each rank in the order of experts, rounded, then in the order of ranks:
        ``[T, H]``. ``probs``, ``[P]``, come back in the places of their experts, ``[T, E]``. Padding is not read.
        ``num_dispatched_tokens`` and ``fuse_unpermute_combine`` have no effect: the handle knows the number, and rows are summed
        where they come."""
        check_tensors("combine_with_unpermute", {"hidden": hidden}, {"probs": probs})
        refuse_derivatives("combine_with_unpermute", hidden, probs)
        inner = _inner(handle)
        self._check_along("combine_with_unpermute", inner, None, pad_multiple)
        return self._calls.combine(hidden, inner, probs, call="combine_with_unpermute")

    def _routing(
        self,
        call: str,
        routing_map: Tensor | None,
        probs: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_of_experts: int | None,
        num_of_experts_per_rank: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        local = num_of_experts_per_rank or self.num_local_experts
        experts = local * self.group_size
        if routing_map is None:
            if topk_idx is None:
                raise ValueError(f"{call}: pass a handle, a routing_map, or topk_idx")
            if num_of_experts is None:
                raise ValueError(f"{call}: topk_idx needs num_of_experts")
            if whole(call, "num_of_experts", num_of_experts, 1) != experts:
                raise ValueError(
                    f"{call}: num_of_experts is {num_of_experts}; {local} experts of each of {self.group_size} ranks are {experts}"
                )
            routing_map, of_choices = map_of(topk_idx, topk_weights, num_of_experts)
            probs = of_choices if probs is None else probs
        if routing_map.dim() != 2 or routing_map.shape[1] != experts:
            raise ValueError(
                f"{call}: {local} experts of each of {self.group_size} ranks need a routing map of shape "
                f"[T, {experts}], not {list(routing_map.shape)}"
            )
        return routing_map, probs

    @staticmethod
    def _check_along(call: str, handle: ByExpertRoutes, rows: Any, pad_multiple: int | None) -> None:
        if isinstance(rows, Tensor) and rows.is_cuda:
            rows = None  # reading it would wait for the GPU
        if handle.pad_multiple is None:
            raise ValueError(f"{call}: the handle is of dispatch, whose rows are by token")
        if rows is not None and whole(call, "num_permuted_tokens", rows) != handle.rows:
            raise ValueError(f"{call}: num_permuted_tokens is {int(rows)}; the handle has {handle.rows} rows")
        if pad_multiple is not None and _multiple(call, pad_multiple) != handle.pad_multiple:
            raise ValueError(f"{call}: pad_multiple is {pad_multiple}; that of the handle is {handle.pad_multiple}")


class HybridTokenHandle(tuple[Any, ...]):
    """The handle of :meth:`HybridEPBuffer.dispatch`: the first five fields of a :class:`ByExpertRoutes`, ``T`` and ``None``."""

    inner: ByExpertRoutes

    @classmethod
    def of(cls, inner: ByExpertRoutes) -> "HybridTokenHandle":
        """The one of these routes."""
        handle = cls((*inner[:5], inner.num_tokens, None))
        handle.inner = inner
        return handle

    def __repr__(self) -> str:
        return f"<antiphon.moe.deep_ep.HybridTokenHandle of {self.inner!r}>"


def _inner(handle: Any) -> ByExpertRoutes:
    if isinstance(handle, HybridTokenHandle):
        return handle.inner
    if isinstance(handle, ByExpertRoutes):
        return handle
    raise TypeError(f"the handle must be one that a dispatch gave, not {type(handle).__name__}")


def _multiple(call: str, pad_multiple: int | None) -> int:
    return 1 if pad_multiple is None else whole(call, "pad_multiple", pad_multiple) or 1


def _check_given(
    call: str,
    hidden: Tensor,
    scaling_factor: Tensor | None,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    routing_map: Tensor | None,
    probs: Tensor | None,
) -> Tensor | None:
    """Refuses what is no tensor of one device, and tensors that require grad. Gives ``probs`` in float32."""
    optional = {
        "scaling_factor": scaling_factor,
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
        "routing_map": routing_map,
        "probs": probs,
    }
    check_tensors(call, {"hidden": hidden}, optional)
    refuse_derivatives(call, hidden, topk_weights, probs)
    return None if probs is None else router_weights(call, probs)


def _scales_of(call: str, hidden: Tensor, scaling_factor: Tensor | None) -> Tensor | None:
    if hidden.element_size() != 1:
        return None
    if scaling_factor is None:
        raise ValueError(f"{call}: tokens of {hidden.dtype} need a scaling_factor")
    return scaling_factor
