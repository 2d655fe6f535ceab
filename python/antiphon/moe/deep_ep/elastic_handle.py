"""``EPHandle``: along which the rows of an ``ElasticBuffer`` go."""

from functools import cached_property

import torch
from torch import Tensor

from antiphon.moe._calls import ByTokenRoutes, is_code

__all__ = ["EPHandle"]


class EPHandle:
    """The routes of one dispatch of an ``ElasticBuffer``, which serve any number of further dispatches and combines. Only a
    dispatch makes it.

    ``N`` rows arrive, one for each token that chose an expert of this rank, in the order of source rank and token. With
    ``do_expand`` received tensors have ``P`` rows instead, one for each choice, ordered by expert and then as the ``N``; those of
    each expert are padded to a multiple of ``expert_alignment``. Without ``do_cpu_sync`` both numbers are the most that there can be.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    #: The choices of this rank's tokens, ``[T, K]``.
    topk_idx: Tensor
    #: int32 ``[R]``: how many rows come from the ranks up to and with each.
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    #: int32 ``[L]``: where the rows of each expert end, which are padded. With ``do_expand`` the padding of the last one does not count.
    psum_num_recv_tokens_per_expert: Tensor
    #: int32 ``[L]``: how often each expert of this rank was chosen.
    num_unaligned_recv_tokens_per_expert: Tensor
    #: The same, padded; empty without ``do_cpu_sync``.
    num_recv_tokens_per_expert_list: list[int]
    #: ``N``
    num_recv_tokens: int
    #: ``P``, which the handle knows without ``do_expand`` too.
    num_expanded_tokens: int
    #: A field of DeepEP's ways between machines.
    token_metadata_at_forward: None = None
    #: A field of DeepEP's ways between machines.
    channel_linked_list: None = None

    def __init__(
        self,
        routes: ByTokenRoutes,
        rank: int,
        topk_idx: Tensor,
        recv_topk_idx: Tensor,
        *,
        do_expand: bool,
        do_cpu_sync: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
    ) -> None:
        self.do_expand, self.num_experts, self.expert_alignment = do_expand, num_experts, expert_alignment
        self.num_max_tokens_per_rank, self.num_sms = num_max_tokens_per_rank, num_sms
        self.topk_idx, self._recv_topk_idx, self._routes = topk_idx, recv_topk_idx, routes
        counts = routes.counts
        aligned = (counts + (expert_alignment - 1)) // expert_alignment * expert_alignment
        ends = aligned.cumsum(0, dtype=torch.int32)
        self.num_unaligned_recv_tokens_per_expert = counts
        self.psum_num_recv_tokens_per_scaleup_rank = routes.rank_prefix_matrix[:, rank].contiguous()
        self.psum_num_recv_tokens_per_expert = ends - aligned + counts if do_expand else ends
        self.num_recv_tokens = routes.rows
        self.num_recv_tokens_per_expert_list = []
        if do_cpu_sync:
            self.num_recv_tokens_per_expert_list = [self._padded(int(count)) for count in routes.tokens_per_expert]
            self.num_expanded_tokens = sum(self.num_recv_tokens_per_expert_list)
        else:
            most = routes.rows * min(topk_idx.shape[1], len(counts))
            self.num_expanded_tokens = self._padded(most + (expert_alignment - 1) * len(counts))
        if do_expand:
            self._slots, self._sources = self._placed(ends - aligned)

    def __repr__(self) -> str:
        rows = f"{self.num_expanded_tokens} rows by expert" if self.do_expand else f"{self.num_recv_tokens} rows"
        return f"<antiphon.moe.deep_ep.EPHandle: {len(self.topk_idx)} tokens, {rows}, {self.num_experts} experts>"

    def _padded(self, count: int) -> int:
        return -(-count // self.expert_alignment) * self.expert_alignment

    @property
    def rows(self) -> int:
        """How many rows received tensors have: ``P`` or ``N``."""
        return self.num_expanded_tokens if self.do_expand else self.num_recv_tokens

    @cached_property
    def recv_src_metadata(self) -> Tensor:
        """int32 ``[N, 2 + K]``. Of each row: its token, as ``rank * num_max_tokens_per_rank + token``; the rank it comes from times
        ``K`` plus its first choice on this rank; with ``do_expand`` the row of each choice, or −1. Rows that did not arrive are −1."""
        ids, ends = self._recv_topk_idx, self.psum_num_recv_tokens_per_scaleup_rank
        top_k = ids.shape[1]
        numbers = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        source = torch.bucketize(numbers, ends, right=True, out_int32=True)
        first = (ids >= 0).int().argmax(1).int() if top_k else torch.zeros_like(numbers)
        token = source * self.num_max_tokens_per_rank + self._routes.recv_src_idx
        slots = self._slots.int() if self.do_expand else torch.full_like(ids, -1, dtype=torch.int32)
        metadata = torch.cat([torch.stack([token, source * top_k + first], 1), slots], 1)
        return metadata.masked_fill_((numbers >= ends[-1]).unsqueeze(1), -1)

    @cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        """int32 ``[T, K]``: the number of a token among those that this rank sends to the rank of each choice, or −1."""
        ids, local = self.topk_idx.long(), self.num_experts // self._routes.send_head.shape[1]
        is_chosen = (ids >= 0) & (ids < self.num_experts)
        owners = ids.masked_fill(~is_chosen, 0) // local
        return self._routes.send_head.gather(1, owners).masked_fill_(~is_chosen, -1)

    def _tensors(self) -> list[Tensor]:
        """All that calls along the handle read."""
        tensors = [*self._routes, *self._routes.memory, self.topk_idx, self._recv_topk_idx]
        tensors += [self.psum_num_recv_tokens_per_scaleup_rank, self.psum_num_recv_tokens_per_expert]
        tensors.append(self.num_unaligned_recv_tokens_per_expert)
        return [*tensors, self._slots, self._sources] if self.do_expand else tensors

    def _placed(self, begins: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each choice of each token that arrives, int64 ``[N, K]``, and the token of each such row, int64 ``[P]``; −1 where
        there is none. ``begins`` are those of the experts. The host waits for nothing."""
        counts, ids = self.num_unaligned_recv_tokens_per_expert.long(), self._recv_topk_idx
        absent = len(counts)
        experts, order = ids.flatten().long().masked_fill(ids.flatten() < 0, absent).sort(stable=True)
        shifts = torch.nn.functional.pad(begins.long() - (counts.cumsum(0) - counts), (0, 1))
        places = torch.arange(len(order), device=ids.device) + shifts[experts]
        places.masked_fill_(experts == absent, -1)
        slots = torch.empty_like(places).scatter_(0, order, places).view(ids.shape)
        return slots, self._scattered(torch.arange(len(ids), device=ids.device).unsqueeze(1).expand(ids.shape), slots, -1)

    def _scattered(self, values: Tensor, slots: Tensor, padding: float) -> Tensor:
        """``[P]`` of one value for each choice, ``[N, K]``, and ``padding``."""
        rows = self.num_expanded_tokens
        spread = values.new_full((rows + 1,), padding)  # the last one takes what has no place
        return spread.scatter_(0, slots.masked_fill(slots < 0, rows).flatten(), values.flatten())[:rows]

    def _expanded(self, rows: Tensor, fills: bool) -> Tensor:
        """``[P, …]`` of ``[N, …]``. Padding is 0 if it is filled, and anything else."""
        plain = rows.view(torch.uint8) if is_code(rows) else rows
        spread = plain.index_select(0, self._sources.clamp(min=0))
        if fills:
            spread.masked_fill_((self._sources < 0).unsqueeze(1), 0)
        return spread.view(rows.dtype)

    def _expanded_weights(self, weights: Tensor) -> Tensor:
        """``[P]`` of ``[N, K]``, and 0 for padding."""
        return self._scattered(weights, self._slots, 0)

    def _folded(self, rows: Tensor) -> Tensor:
        """``[N, H]`` of ``[P, H]``: the sum of each token's rows in the order of its choices, in float32 (float64 of float64). It begins
        with the first one."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        sums = rows.new_full((len(self._slots), rows.shape[1]), -0.0, dtype=dtype)
        for slots in self._slots.unbind(1):
            terms = rows.index_select(0, slots.clamp(min=0)).to(dtype)
            sums += terms.masked_fill_((slots < 0).unsqueeze(1), -0.0)
        return sums

    def _folded_weights(self, weights: Tensor) -> Tensor:
        """``[N, K]`` of ``[P]``, and 0 where a choice is another rank's."""
        slots = self._slots
        return weights.index_select(0, slots.clamp(min=0).flatten()).view(slots.shape).masked_fill_(slots < 0, 0)
