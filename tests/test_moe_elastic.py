"""antiphon.moe.deep_ep.ElasticBuffer on the host: against a definition in plain loops, and what it refuses."""

import inspect
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from needs import need_ucx
from ranks import outcomes, processes, threads
from torch import Tensor

import antiphon
from antiphon import compat
from antiphon.moe import deep_ep
from antiphon.moe.deep_ep import ElasticBuffer, EPHandle

H, K, LOCAL, MOST = 16, 3, 3, 9
#: Tokens of each rank, none among them.
COUNTS = [5, 0, 9, 1]
WORLDS = [1, 2, 3, 4]

Choice = tuple[int, int, int]
"""A rank, one of its tokens, and one of the token's choices."""


def align(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Definition:
    """All ranks' inputs, and what must come of them, choice by choice."""

    def __init__(self, world_size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, top_k: int = K) -> None:
        self.world_size, self.experts = world_size, LOCAL * world_size
        self.x, self.ids, self.weights = [], [], []
        for rank, count in enumerate(COUNTS[:world_size]):
            generator = torch.Generator().manual_seed(seed * 100 + rank)
            self.x.append(torch.randn(count, H, generator=generator).to(dtype))
            # Beyond both ends, and now and then one expert twice.
            self.ids.append(torch.randint(-2, self.experts + 1, (count, top_k), generator=generator))
            self.weights.append(torch.rand(count, top_k, generator=generator))

    def owner(self, expert: int) -> int:
        return expert // LOCAL if 0 <= expert < self.experts else -1

    def choices(self, rank: int) -> list[Choice]:
        """Of a rank's experts, in the order of source rank, token and choice."""
        return [
            (source, token, k)
            for source, ids in enumerate(self.ids)
            for token, chosen in enumerate(ids.tolist())
            for k, expert in enumerate(chosen)
            if self.owner(expert) == rank
        ]

    def rows(self, rank: int) -> list[tuple[int, int]]:
        """The tokens that a rank receives."""
        return sorted({(source, token) for source, token, _ in self.choices(rank)})

    def expert(self, choice: Choice) -> int:
        source, token, k = choice
        return int(self.ids[source][token, k])

    def by_expert(self, rank: int, alignment: int) -> list[Choice | None]:
        """The choice of each row by expert; ``None`` is padding."""
        rows: list[Choice | None] = []
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
            mine = [choice for choice in self.choices(rank) if self.expert(choice) == expert]
            rows += mine + [None] * (align(len(mine), alignment) - len(mine))
        return rows

    def counts(self, rank: int) -> list[int]:
        experts = [self.expert(choice) - rank * LOCAL for choice in self.choices(rank)]
        return [experts.count(expert) for expert in range(LOCAL)]

    def first_rows(self, rank: int, alignment: int) -> list[int]:
        begins = [0]
        for count in self.counts(rank):
            begins.append(begins[-1] + align(count, alignment))
        return begins


def stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows) if rows else like.new_empty(0, *like.shape[1:])


def same_bits(got: Tensor | None, expected: Tensor) -> None:
    """Equal, with −0 unlike 0 and any NaN like another."""
    assert got is not None and got.dtype == expected.dtype and got.shape == expected.shape, (got, expected)
    if got.dtype.is_floating_point and got.element_size() > 1:
        assert torch.equal(got.isnan(), expected.isnan()), (got, expected)
        got, expected = got.nan_to_num(7.0), expected.nan_to_num(7.0)
        assert torch.equal(got.signbit(), expected.signbit()), (got, expected)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), (got, expected)


def added(terms: list[Tensor], dtype: torch.dtype) -> Tensor:
    """A sum in NumPy's float32 that begins with its first term; none is 0."""
    total = terms[0].float().numpy() if terms else np.zeros(H, np.float32)
    for term in terms[1:]:
        total = total + term.float().numpy()
    return torch.from_numpy(np.array(total)).to(dtype)


def buffer_of(comm: antiphon.Communicator, **options: Any) -> ElasticBuffer:
    return ElasticBuffer(comm, num_max_tokens_per_rank=MOST, hidden=H, num_topk=K, **options)


def sent(comm: antiphon.Communicator, definition: Definition, **options: Any) -> dict[str, Any]:
    rank = comm.rank
    return {"x": definition.x[rank], "topk_idx": definition.ids[rank], "num_experts": definition.experts} | options


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_rows_by_token(world_size: int, dtype: torch.dtype) -> None:
    definition = Definition(world_size, dtype)

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        tokens = definition.rows(rank)
        for alignment in (1, 4):
            for waits in (True, False):
                given = sent(comm, definition, topk_weights=definition.weights[rank], expert_alignment=alignment)
                rows, ids, weights, handle, event = buffer.dispatch(**given, do_cpu_sync=waits)
                assert isinstance(rows, Tensor) and ids is not None and weights is not None and event.event is None
                size = len(tokens) if waits else world_size * MOST
                assert len(rows) == len(ids) == len(weights) == size == handle.num_recv_tokens
                count = len(tokens)
                same_bits(rows[:count], stacked([definition.x[s][t] for s, t in tokens], rows))
                here = [[definition.owner(e) == rank for e in definition.ids[s][t].tolist()] for s, t in tokens]
                mask = torch.tensor(here, dtype=torch.bool).view(count, K)
                chosen = stacked([definition.ids[s][t] for s, t in tokens], ids) - rank * LOCAL
                assert torch.equal(ids[:count], torch.where(mask, chosen, -1)) and (ids[count:] == -1).all()
                wanted = stacked([definition.weights[s][t] for s, t in tokens], weights)
                same_bits(weights[:count], torch.where(mask, wanted, 0.0))
                padded = [align(each, alignment) for each in definition.counts(rank)]
                assert handle.num_recv_tokens_per_expert_list == (padded if waits else [])
                assert handle.psum_num_recv_tokens_per_expert.tolist() == np.cumsum(padded).tolist()
                assert handle.num_unaligned_recv_tokens_per_expert.tolist() == definition.counts(rank)

    threads(world_size, body)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("alignment", [1, 4, 128])
def test_rows_by_expert(world_size: int, alignment: int) -> None:
    definition = Definition(world_size)

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        choices = definition.by_expert(rank, alignment)
        for waits in (True, False):
            given = sent(comm, definition, topk_weights=definition.weights[rank], expert_alignment=alignment)
            rows, ids, weights, handle, _ = buffer.dispatch(**given, do_expand=True, do_zero_padding=True, do_cpu_sync=waits)
            assert isinstance(rows, Tensor) and ids is None and weights is not None
            most = align(world_size * MOST * min(K, LOCAL) + (alignment - 1) * LOCAL, alignment)
            assert len(rows) == len(weights) == (len(choices) if waits else most) == handle.num_expanded_tokens
            nothing = torch.zeros(H).bfloat16()
            wanted = [nothing if choice is None else definition.x[choice[0]][choice[1]] for choice in choices]
            same_bits(rows[: len(choices)], stacked(wanted, rows))
            expected = [0.0 if choice is None else float(definition.weights[choice[0]][choice[1], choice[2]]) for choice in choices]
            same_bits(weights[: len(choices)], torch.tensor(expected, dtype=torch.float32))
            assert not rows[len(choices) :].any() and not weights[len(choices) :].any()
            begins, counts = definition.first_rows(rank, alignment), definition.counts(rank)
            assert handle.psum_num_recv_tokens_per_expert.tolist() == [b + c for b, c in zip(begins, counts)]
            loose, *_ = buffer.dispatch(**given, do_expand=True, do_cpu_sync=waits)
            for place, choice in enumerate(choices):
                assert choice is None or torch.equal(loose[place], rows[place])
            bare = buffer.dispatch(**sent(comm, definition, expert_alignment=alignment), do_expand=True, do_cpu_sync=waits)
            assert bare[2] is None and len(bare[0]) == len(rows)

    threads(world_size, body)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_a_handle_tells(world_size: int) -> None:
    definition, alignment = Definition(world_size), 4

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        tokens, choices = definition.rows(rank), definition.by_expert(rank, alignment)
        for expands in (False, True):
            for waits in (True, False):
                given = sent(comm, definition, expert_alignment=alignment, do_expand=expands, do_cpu_sync=waits)
                handle = buffer.dispatch(**given, num_sms=6)[3]
                ends = [sum(source <= rank for source, _ in tokens) for rank in range(world_size)]
                assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends
                expected = []
                for source, token in tokens:
                    places = [choices.index((source, token, k)) if (source, token, k) in choices else -1 for k in range(K)]
                    first = next(k for k, place in enumerate(places) if place >= 0)
                    expected.append([source * MOST + token, source * K + first, *(places if expands else [-1] * K)])
                expected += [[-1] * (2 + K)] * (handle.num_recv_tokens - len(tokens))
                assert handle.recv_src_metadata.dtype == torch.int32
                assert handle.recv_src_metadata.tolist() == expected
                owners = [[definition.owner(expert) for expert in chosen] for chosen in definition.ids[rank].tolist()]
                slots = [
                    [-1 if owner < 0 else sum(owner in earlier for earlier in owners[:token]) for owner in chosen]
                    for token, chosen in enumerate(owners)
                ]
                assert handle.dst_buffer_slot_idx.tolist() == slots
                assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None
                about = handle.do_expand, handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank
                assert about == (expands, definition.experts, alignment, MOST) and handle.num_sms == 6
                assert "by expert" in repr(handle) if expands else "rows, " in repr(handle)

    threads(world_size, body)


def made(rank: int, x: Tensor, k: int = 0) -> Tensor:
    """What a rank's experts make of a row, or of one for a choice."""
    return x * (rank + 2) + 0.5 + k


def biases_of(rank: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank + 77)
    first, second = torch.randn(2, count, H, generator=generator).to(dtype)
    return first, second


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_rows_by_token(world_size: int, dtype: torch.dtype) -> None:
    definition = Definition(world_size, dtype)

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        x, mine = definition.x[rank], definition.ids[rank].tolist()
        biases = biases_of(rank, len(x), dtype)
        for waits in (True, False):
            given = sent(comm, definition, topk_weights=definition.weights[rank], do_cpu_sync=waits)
            rows, ids, weights, handle, _ = buffer.dispatch(**given)
            assert isinstance(rows, Tensor) and ids is not None and weights is not None
            # What stands where a choice is another rank's does not count.
            noise = torch.where(ids < 0, torch.nan, weights)
            options: list[Any] = [None, biases[0], biases]
            for bias in options:
                before = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
                combined, summed, _ = buffer.combine(made(rank, rows), handle, topk_weights=noise, bias=bias)
                for token, chosen in enumerate(mine):
                    owners = sorted({definition.owner(expert) for expert in chosen} - {-1})
                    terms = [each[token] for each in before] + [made(owner, x[token]) for owner in owners]
                    same_bits(combined[token], added(terms, dtype))
                is_chosen = torch.tensor([[definition.owner(e) >= 0 for e in chosen] for chosen in mine], dtype=torch.bool)
                same_bits(summed, definition.weights[rank].masked_fill(~is_chosen.view(-1, K), 0))
            plain, nothing, _ = buffer.combine(made(rank, rows), handle)
            assert nothing is None and plain.shape == x.shape

    threads(world_size, body)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("rounds_on_ranks", [True, False])
def test_sums_of_rows_by_expert(world_size: int, rounds_on_ranks: bool) -> None:
    definition, dtype = Definition(world_size), torch.bfloat16

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm, allow_multiple_reduction=rounds_on_ranks), comm.rank
        x, mine = definition.x[rank], definition.ids[rank].tolist()
        biases = biases_of(rank, len(x), dtype)
        for alignment, waits in ((1, True), (4, True), (4, False)):
            given = sent(comm, definition, topk_weights=definition.weights[rank], expert_alignment=alignment)
            rows, _, weights, handle, _ = buffer.dispatch(**given, do_expand=True, do_cpu_sync=waits)
            assert isinstance(rows, Tensor) and weights is not None
            choices = definition.by_expert(rank, alignment)
            output = torch.full_like(rows, torch.nan)  # padding is not read
            for place, choice in enumerate(choices):
                if choice is not None:
                    output[place] = made(rank, rows[place], choice[2])
            for bias in (None, biases):
                combined, summed, _ = buffer.combine(output, handle, weights, bias)
                for token, chosen in enumerate(mine):
                    terms = [] if bias is None else [each[token] for each in bias]
                    for owner in sorted({definition.owner(expert) for expert in chosen} - {-1}):
                        there = [made(owner, x[token], k) for k, e in enumerate(chosen) if definition.owner(e) == owner]
                        terms.append(added(there, dtype if rounds_on_ranks else torch.float32))
                    same_bits(combined[token], added(terms, dtype))
                is_chosen = torch.tensor([[definition.owner(e) >= 0 for e in chosen] for chosen in mine], dtype=torch.bool)
                same_bits(summed, definition.weights[rank].masked_fill(~is_chosen.view(-1, K), 0))

    threads(world_size, body)


def test_wider_sums_are_of_float64() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        ids = torch.tensor([[0, 1]])
        rows, _, _, handle, _ = buffer.dispatch(torch.zeros(1, H, dtype=torch.float64), ids, num_experts=2, do_expand=True)
        assert isinstance(rows, Tensor)
        rows[0], rows[1] = 1.0, 2.0**-40
        assert (buffer.combine(rows, handle)[0] == 1 + 2.0**-40).all()

    threads(1, body)


@pytest.mark.parametrize("expands", [False, True])
def test_minus_zero_and_nan_arrive_and_come_back(expands: bool) -> None:
    x = torch.full((4, H), -0.0).bfloat16()
    x[1], x[2, ::2], x[3] = torch.nan, -torch.inf, torch.tensor(torch.finfo(torch.bfloat16).smallest_normal / 2)
    ids = torch.tensor([[0], [1], [0], [-1]])

    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        weights = torch.tensor([[-0.0], [torch.nan], [torch.inf], [1.0]])
        rows, _, row_weights, handle, _ = buffer.dispatch(x, ids, weights, num_experts=2, do_expand=expands)
        assert isinstance(rows, Tensor) and row_weights is not None
        expected = x[[0, 2]] if comm.rank == 0 else x[[1]]
        same_bits(rows, torch.cat([expected, expected]))
        combined, summed, _ = buffer.combine(rows, handle, row_weights)
        same_bits(combined[:3], x[:3])
        same_bits(combined[3], torch.zeros(H).bfloat16())  # it went nowhere
        assert summed is not None
        assert torch.equal(summed.nan_to_num(5.0), weights.masked_fill(ids < 0, 0).nan_to_num(5.0))

    threads(2, body)


@pytest.mark.parametrize("scales", [torch.float32, torch.int32])
@pytest.mark.parametrize("expands", [False, True])
def test_codes_take_their_scales_along(scales: torch.dtype, expands: bool) -> None:
    definition, hidden = Definition(3), 512
    group = 128 if scales == torch.float32 else 512

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        codes = [torch.randint(0, 256, (len(x), hidden), dtype=torch.uint8).view(torch.float8_e4m3fn) for x in definition.x]
        parts = [torch.arange(len(x) * (hidden // group), dtype=scales).view(len(x), -1) for x in definition.x]
        everything = comm.exchange_objects((codes[rank].view(torch.uint8), parts[rank]))
        strided = parts[rank].t().contiguous().t()
        tokens, choices = definition.rows(rank), definition.by_expert(rank, 4)
        given = sent(comm, definition, x=(codes[rank], strided), expert_alignment=4, do_expand=expands)
        handle: EPHandle | None = None
        for by_columns in (False, True):
            call = given if handle is None else {"x": given["x"], "handle": handle, "do_expand": expands}
            (rows, row_scales), _, _, handle, _ = buffer.dispatch(
                **call, do_zero_padding=expands, use_tma_aligned_col_major_sf=by_columns
            )
            assert rows.dtype == torch.float8_e4m3fn and row_scales.dtype == scales
            places: list[tuple[int, int] | None] = [None if c is None else c[:2] for c in choices] if expands else list(tokens)
            assert len(rows) == len(row_scales) == len(places)
            for row, scale, place in zip(rows.view(torch.uint8), row_scales, places, strict=True):
                if place is None:
                    assert not row.any() and not scale.any()
                else:
                    theirs = everything[place[0]]
                    assert torch.equal(row, theirs[0][place[1]]) and torch.equal(scale, theirs[1][place[1]])
            if by_columns:
                assert row_scales.stride() == (1, max(align(len(rows), 4), 1))
            else:
                assert row_scales.is_contiguous()

    threads(3, body)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("waits", [True, False])
def test_a_handle_serves_again(world_size: int, waits: bool) -> None:
    definition = Definition(world_size)

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        other = buffer_of(comm)  # buffers of one group share their handles
        x, weights = definition.x[rank], definition.weights[rank]
        for expands in (False, True):
            given = sent(comm, definition, topk_weights=weights, expert_alignment=4, do_expand=expands, do_cpu_sync=waits)
            rows, ids, row_weights, handle, _ = buffer.dispatch(**given)
            assert isinstance(rows, Tensor) and row_weights is not None
            count = len(definition.by_expert(rank, 4)) if expands else len(definition.rows(rank))
            valid = torch.ones(count, dtype=torch.bool)
            if expands:
                valid = torch.tensor([choice is not None for choice in definition.by_expert(rank, 4)], dtype=torch.bool)
            again, same_ids, same_weights, same, _ = other.dispatch(
                x * 2, topk_weights=weights * 4, handle=handle, do_expand=expands, num_experts=definition.experts
            )
            assert isinstance(again, Tensor) and same is handle and same_weights is not None
            same_bits(again[:count][valid], rows[:count][valid] * 2)
            same_bits(same_weights[:count], row_weights[:count] * 4)
            assert expands or (ids is not None and torch.equal(same_ids, ids))
            bare = other.dispatch(x, handle=handle, do_expand=expands)
            assert bare[2] is None
            combined = buffer.combine(rows, handle)[0]
            same_bits(other.combine(rows, handle)[0], combined)

    threads(world_size, body)


def test_what_callers_write_does_not_reach_the_handle() -> None:
    definition = Definition(2)

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        mine = definition.ids[rank].clone()
        given = sent(comm, definition, topk_idx=mine, topk_weights=definition.weights[rank])
        rows, ids, weights, handle, _ = buffer.dispatch(**given)
        assert isinstance(rows, Tensor) and ids is not None
        expected = buffer.combine(rows, handle, weights)
        ids_before = ids.clone()
        mine.fill_(-1)
        ids.fill_(-1)
        got = buffer.combine(rows, handle, weights)
        same_bits(got[0], expected[0])
        assert expected[1] is not None
        same_bits(got[1], expected[1])
        along = buffer.dispatch(definition.x[rank], handle=handle)[1]
        assert along is not None and torch.equal(along, ids_before)
        assert torch.equal(handle.topk_idx, definition.ids[rank])
        shared = buffer.dispatch(**sent(comm, definition), do_handle_copy=False)[3]
        assert shared.topk_idx is definition.ids[rank]

    threads(2, body)


def test_statistics_are_added() -> None:
    definition = Definition(2)

    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        counted = torch.full((LOCAL,), 10, dtype=torch.int32)
        for waits in (True, False):
            given = sent(comm, definition, cumulative_local_expert_recv_stats=counted, do_cpu_sync=waits)
            buffer.dispatch(**given)
        assert counted.tolist() == [10 + 2 * count for count in definition.counts(comm.rank)]

    threads(2, body)


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("waits", [True, False])
def test_nothing_to_send(expands: bool, waits: bool) -> None:
    """Ranks without tokens, tokens without experts, and no choices at all."""

    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        for count, top_k in ((0, 2), (4, 2), (4, 0), (0, 0)):
            x, ids = torch.ones(count, H).bfloat16(), torch.full((count, top_k), -1)
            weights = torch.ones(count, top_k)
            options = {"do_expand": expands, "do_zero_padding": expands}
            rows, _, row_weights, handle, _ = buffer.dispatch(
                x, ids, weights, num_experts=4, expert_alignment=8, do_cpu_sync=waits, **options
            )
            assert isinstance(rows, Tensor) and (len(rows) == 0 or not waits)
            assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == [0, 0]
            assert (handle.recv_src_metadata == -1).all()
            combined, summed, _ = buffer.combine(rows, handle, row_weights)
            same_bits(combined, torch.zeros(count, H).bfloat16())
            same_bits(summed, torch.zeros(count, top_k))
            assert len(buffer.dispatch(x, topk_weights=weights, handle=handle, **options)[0]) == len(rows)

    threads(2, body)


def test_all_tokens_to_one_rank_and_one_expert_many_times() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        x = torch.full((4, H), comm.rank + 1.0).bfloat16()
        ids = torch.full((4, 5), 3, dtype=torch.int32)  # more choices than experts of a rank
        rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=4, do_expand=True)
        assert isinstance(rows, Tensor)
        assert len(rows) == (40 if comm.rank == 1 else 0)
        assert handle.num_recv_tokens_per_expert_list == ([0, 40] if comm.rank == 1 else [0, 0])
        assert torch.equal(buffer.combine(rows, handle)[0], x * 5)

    threads(2, body)


def test_events_on_the_host_are_reached() -> None:
    definition = Definition(2)

    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        given = sent(comm, definition, allocate_on_comm_stream=True, async_with_compute_stream=True)
        for previous in (buffer.capture(), deep_ep.Buffer.capture(), deep_ep.EventOverlap()):
            *_, handle, event = buffer.dispatch(**given, previous_event=previous, previous_event_before_epilogue=previous)
            event.current_stream_wait()
            with event(release_handle=True) as same:
                assert same is event and event.event is not None
            assert event.event is None
            event = buffer.combine(torch.ones(handle.rows, H), handle, async_with_compute_stream=True)[2]
            event.current_stream_wait(release_handle=True)
            with pytest.raises(RuntimeError, match="no event"):
                event.current_stream_wait()

    threads(2, body)


def refused(calls: list[tuple[type[Exception], str, Callable[[], Any]]]) -> None:
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()


def test_a_dispatch_refuses_wrong_arguments() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        x, ids, weights = torch.ones(4, H).bfloat16(), torch.zeros(4, K, dtype=torch.int64), torch.ones(4, K)
        good: dict[str, Any] = {"x": x, "topk_idx": ids, "topk_weights": weights, "num_experts": 6}
        unsized = ElasticBuffer(comm, num_bytes=2 << 20)
        codes, needs_grad = torch.zeros(4, H, dtype=torch.uint8), torch.ones(4, H, requires_grad=True)
        stats = torch.zeros(3, dtype=torch.int32)

        def call(**changed: Any) -> Callable[[], Any]:
            return lambda: buffer.dispatch(**(good | changed))

        refused([
            (TypeError, "x must be a torch.Tensor, not ndarray", call(x=np.ones((4, H)))),
            (ValueError, "not 3 tensors", call(x=(x, x, x))),
            (TypeError, "scales must be a torch.Tensor", call(x=(codes, 1.0)) if False else call(x=(codes, np.ones(1)))),
            (ValueError, r"\[T, H\], not \[4\]", call(x=x[:, 0])),
            (ValueError, r"scales must be .* = \[4, 1\], not \[4, 2\]", call(x=(codes, torch.ones(4, 2)))),
            (TypeError, "must be dense", call(x=torch.ones(4, H).to_sparse())),
            (NotImplementedError, "served on the CPU and on CUDA", call(x=x.to("meta"))),
            (TypeError, "all must be on one device", call(topk_weights=weights.to("meta")) if False else call(topk_idx=ids.to("meta"))) if False else (ValueError, "pass topk_idx and num_experts", call(topk_idx=None)),
            (ValueError, "pass topk_idx and num_experts", call(num_experts=None)),
            (TypeError, "ids must be torch.int64 or torch.int32, not torch.float32", call(topk_idx=ids.float())),
            (ValueError, r"\[T, K\], not \[4\]", call(topk_idx=ids[:, 0])),
            (ValueError, "x has 4 tokens, and there are choices of 3", call(topk_idx=ids[:3])),
            (ValueError, "5 experts cannot be divided among 2 ranks", call(num_experts=5)),
            (ValueError, "num_experts must be at least 1, not 0", call(num_experts=0)),
            (TypeError, "num_experts must be an integer, not float", call(num_experts=6.0)),
            (ValueError, r"topk_weights must be of shape \[T, K\] = \[4, 3\], not \[4, 2\]", call(topk_weights=weights[:, :2])),
            (TypeError, "floating-point dtype, not torch.int64", call(topk_weights=ids)),
            (ValueError, "4 tokens are more than num_max_tokens_per_rank, 3", call(num_max_tokens_per_rank=3)),
            (ValueError, "num_max_tokens_per_rank must be at least 1, not 0", call(num_max_tokens_per_rank=0)),
            (ValueError, "num_max_tokens_per_rank must be at least 1, not 0", lambda: unsized.dispatch(**good)),
            (ValueError, "expert_alignment must be at least 1, not 0", call(expert_alignment=0)),
            (TypeError, "expert_alignment must be an integer, not str", call(expert_alignment="4")),
            (ValueError, "num_sms must be at least 0, not -2", call(num_sms=-2)),
            (TypeError, "num_sms must be an integer, not bool", call(num_sms=True)),
            (ValueError, "num_qps must be at most 129, not 130", call(num_qps=130)),
            (TypeError, "statistics must be torch.int32, not torch.int64", call(cumulative_local_expert_recv_stats=stats.long())),
            (ValueError, r"statistics must be of shape \[L\] = \[3\], not \[6\]", call(cumulative_local_expert_recv_stats=stats.repeat(2))),
            (ValueError, "do_zero_padding needs do_expand", call(do_zero_padding=True)),
            (ValueError, "previous_event needs allocate_on_comm_stream", call(previous_event=buffer.capture())),
            (TypeError, "previous_event must be an EventHandle or an EventOverlap, not int", call(previous_event=1)),
            (TypeError, "before_epilogue must be .* not str", call(previous_event_before_epilogue="now")),
            (ValueError, "requires grad", call(x=needs_grad)),
            (TypeError, "handle must be the EPHandle that a dispatch gave, not int", call(handle=7)),
            (ValueError, "multiple of 16", call(x=torch.ones(4, 6).bfloat16())),
            (TypeError, "i64", call(x=torch.ones(4, H, dtype=torch.int64))),
        ])  # fmt: skip
        # None of it was heard by the others.
        comm.barrier()
        assert len(buffer.dispatch(**good)[0]) in (0, 8)

    threads(2, body)


def test_a_call_along_a_handle_refuses_what_is_not_the_handles() -> None:
    definition = Definition(2)

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        x, weights = definition.x[rank], definition.weights[rank]
        rows, _, row_weights, handle, _ = buffer.dispatch(**sent(comm, definition, topk_weights=weights))
        spread, _, _, by_expert, _ = buffer.dispatch(**sent(comm, definition, expert_alignment=4), do_expand=True)
        assert isinstance(rows, Tensor) and isinstance(spread, Tensor)
        (n, p), t = (len(rows), len(spread)), len(x)

        def dispatch(**changed: Any) -> Callable[[], Any]:
            return lambda: buffer.dispatch(**({"x": x, "handle": handle} | changed))

        def combine(*arguments: Any, **named: Any) -> Callable[[], Any]:
            return lambda: buffer.combine(*arguments, **named)

        bias = torch.zeros(t, H).bfloat16()
        nothing: Any = None
        v1: Any = deep_ep.Buffer(comm)
        refused([
            (ValueError, "pass no topk_idx", dispatch(topk_idx=definition.ids[rank])),
            (ValueError, "pass no do_cpu_sync", dispatch(do_cpu_sync=True)),
            (ValueError, "num_experts is 12, and 6 of the handle", dispatch(num_experts=12)),
            (ValueError, "expert_alignment is 4, and 1 of the handle", dispatch(expert_alignment=4)),
            (ValueError, f"num_max_tokens_per_rank is 8, and {MOST} of the handle", dispatch(num_max_tokens_per_rank=8)),
            (ValueError, "do_expand is True, and False of the handle", dispatch(do_expand=True)),
            (ValueError, "do_expand is False, and True of the handle", dispatch(handle=by_expert)),
            (ValueError, f"x has {t + 1} tokens, and there are choices of {t}", dispatch(x=torch.ones(t + 1, H).bfloat16())),
            (ValueError, rf"\[{t}, 3\], not \[{t + 1}, 3\]", dispatch(topk_weights=torch.ones(t + 1, K))),
            (TypeError, "EPHandle that a dispatch gave, not NoneType", combine(rows, nothing)),
            (TypeError, "EPHandle that a dispatch gave, not Buffer", combine(rows, v1)),
            (ValueError, rf"\[N, H\] = \[{n}, H\], not \[{n + 1}, {H}\]", combine(torch.ones(n + 1, H), handle)),
            (ValueError, rf"\[P, H\] = \[{p}, H\], not \[{p + 4}, {H}\]", combine(torch.ones(p + 4, H), by_expert)),
            (ValueError, r"\[N, H\]", combine(torch.ones(n), handle)),
            (TypeError, "whose rows have sums, not torch.int32", combine(rows.int(), handle)),
            (TypeError, "not torch.float8_e4m3fn", combine(spread.to(torch.float8_e4m3fn), by_expert)),
            (TypeError, "x must be a torch.Tensor", combine(rows.numpy(force=True) if False else [rows], handle)),
            (ValueError, rf"\[N, K\] = \[{n}, 3\], not \[{n}, 2\]", combine(rows, handle, torch.ones(n, 2))),
            (ValueError, rf"\[P\] = \[{p}\], not \[{p}, 3\]", combine(spread, by_expert, torch.ones(p, 3))),
            (TypeError, "floating-point", combine(rows, handle, torch.ones(n, K, dtype=torch.int64))),
            (TypeError, "bias must be a tensor or a pair of tensors, not list", combine(rows, handle, bias=[bias])),
            (ValueError, "pair of tensors, not 3 of them", combine(rows, handle, bias=(bias, bias, bias))),
            (TypeError, "a bias must be torch.bfloat16 as x is, not torch.float32", combine(rows, handle, bias=bias.float())),
            (ValueError, rf"a bias must be of shape \[T, H\] = \[{t}, {H}\], not \[{t + 1}, {H}\]",
             combine(rows, handle, bias=torch.zeros(t + 1, H).bfloat16())),
            (ValueError, "requires grad", combine(rows, handle, bias=bias.clone().requires_grad_())),
            (ValueError, "num_sms must be at least 0, not -1", combine(rows, handle, num_sms=-1)),
            (ValueError, "num_qps must be at most 129", combine(rows, handle, num_qps=200)),
            (ValueError, "needs allocate_on_comm_stream", combine(rows, handle, previous_event=buffer.capture())),
        ])  # fmt: skip
        comm.barrier()
        same_bits(buffer.combine(rows, handle, row_weights)[1], weights.masked_fill(buffer_mask(definition, rank), 0))
        group = comm.split(0)
        assert group is not None
        with group, pytest.raises(ValueError, match="another communicator"):
            buffer_of(group).combine(rows, handle)
        comm.barrier()

    threads(2, body)


def buffer_mask(definition: Definition, rank: int) -> Tensor:
    """Which choices are of no expert."""
    ids = definition.ids[rank]
    return (ids < 0) | (ids >= definition.experts)


def test_ranks_whose_handles_differ_get_an_error() -> None:
    definitions = Definition(2), Definition(2, seed=5)

    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        handles = [buffer.dispatch(**sent(comm, definition))[3] for definition in definitions]
        buffer.combine(torch.ones(handles[comm.rank].rows, H), handles[comm.rank])

    assert all(isinstance(error, RuntimeError) for error in outcomes(2, body))


def test_sizes_and_numbers() -> None:
    def body(comm: antiphon.Communicator) -> None:
        count = comm.world_size
        buffer = buffer_of(comm)
        assert (buffer.rank_idx, buffer.num_ranks, buffer.group) == (comm.rank, count, comm)
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, count)
        assert deep_ep.get_physical_domain_size(comm) == deep_ep.get_logical_domain_size(comm, False) == (1, count)
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks, buffer.scaleup_rank_idx) == (1, count, comm.rank)
        mib = 2 << 20
        # 4096 tokens of 7168 bfloat16 with 8 choices: 14,448 bytes, in 32s, of each rank, or 14,368 for each rank of a token.
        sent_row, returned_row = 14464, 14368
        most = 4096 * max(count * sent_row, min(count, 8) * returned_row)
        assert ElasticBuffer.get_buffer_size_hint(comm, 4096, 7168, 8) == align(most, mib)
        single = 4096 * max(count * sent_row, 8 * returned_row)
        assert ElasticBuffer.get_buffer_size_hint(comm, 4096, 7168, 8, allow_multiple_reduction=False) == align(single, mib)
        fp8 = 4096 * max(count * align(7168 + 4 * 224 + 8 * 12 + 16, 32), min(count, 8) * returned_row)
        assert ElasticBuffer.get_buffer_size_hint(comm, 4096, 7168, 8, use_fp8_dispatch=True) == align(fp8, mib)
        assert ElasticBuffer.get_buffer_size_hint(comm, 1, 8) == mib == buffer.num_bytes
        assert ElasticBuffer.get_pp_buffer_size_hint(1000, 3) == mib
        assert ElasticBuffer.get_pp_buffer_size_hint(1 << 20, 3) == 12 << 20
        sizes = ElasticBuffer.get_agrs_num_max_session_bytes
        assert sizes(comm, (3, 5), torch.bfloat16) == align(count * 30, 32)
        assert sizes(comm, [(3, 5), torch.Size([7])], torch.float32) == align(count * 60, 32) + align(count * 28, 32)
        assert ElasticBuffer.get_agrs_buffer_size_hint(comm, 5 << 20) == 6 << 20

        for num_experts, top_k in ((16, 2), (64, 8), (8, 8)):
            if count > 1:
                missed = math.prod((num_experts - num_experts // count - i) / (num_experts - i) for i in range(top_k))
                ranks_of_a_token, rows = count * (1 - max(missed, 0)), 430 / (1 - 1 / count)
                number = align(max(4, math.ceil(1.25 * max(rows / ranks_of_a_token / 200, rows / 50) - 1e-9)), 2)
            else:
                number = 24
            assert buffer.get_theoretical_num_sms(num_experts, top_k) == number
        busy = buffer_of(comm, prefer_overlap_with_compute=False)
        assert busy.get_theoretical_num_sms(16, 2) == (64 if count > 1 else 24)
        slow = buffer.get_theoretical_num_sms(16, 2, nvlink_gbs=1)
        assert slow == (4 if count > 1 else 24)
        assert [buffer.get_theoretical_num_qps(n) for n in (1, 4, 100)] == [17, 65, 129]
        direct = buffer_of(comm, allow_hybrid_mode=False)
        assert [direct.get_theoretical_num_qps(n) for n in (1, 9, 100)] == [1, 9, 9] and direct.num_allocated_qps == 17
        assert buffer_of(comm, num_allocated_qps=4).get_theoretical_num_qps(64) == 4
        wrong: Any = "fast"
        refused([
            (ValueError, "num_topk must be at most 16, not 17", lambda: buffer.get_theoretical_num_sms(16, 17)),
            (ValueError, "num_topk must be at least 1, not 0", lambda: buffer.get_theoretical_num_sms(16, 0)),
            (ValueError, "num_scaleout_topk must be at most 0, not 2", lambda: buffer.get_theoretical_num_sms(16, 2, 2)),
            (ValueError, "sm_read_gbs must be a positive number, not 0", lambda: buffer.get_theoretical_num_sms(16, 2, sm_read_gbs=0)),
            (ValueError, "nvlink_gbs must be a positive number, not -1", lambda: buffer.get_theoretical_num_sms(16, 2, nvlink_gbs=-1)),
            (ValueError, "sm_write_gbs must be a positive number, not inf",
             lambda: buffer.get_theoretical_num_sms(16, 2, sm_write_gbs=math.inf)),
            (TypeError, "sm_write_gbs must be a number, not str", lambda: buffer.get_theoretical_num_sms(16, 2, sm_write_gbs=wrong)),
            (ValueError, "num_sms must be at least 1, not 0", lambda: buffer.get_theoretical_num_qps(0)),
            (ValueError, "hidden must be at least 1, not 0", lambda: ElasticBuffer.get_buffer_size_hint(comm, 4, 0)),
            (ValueError, "num_topk must be at most 32, not 33", lambda: ElasticBuffer.get_buffer_size_hint(comm, 4, 8, 33)),
            (TypeError, "shapes must be", lambda: sizes(comm, wrong, torch.float32)),
            (TypeError, "shapes must be", lambda: sizes(comm, [], torch.float32)),
            (ValueError, "a size of a shape must be at least 0, not -1", lambda: sizes(comm, (2, -1), torch.float32)),
        ])  # fmt: skip

    for world_size in WORLDS:
        threads(world_size, body)


def test_a_buffer_refuses_wrong_sizes() -> None:
    def body(comm: antiphon.Communicator) -> None:
        mib = 2 << 20
        wrong: Any = "a group"
        refused([
            (ValueError, "num_max_tokens_per_rank must be at least 1, not 0", lambda: ElasticBuffer(comm)),
            (ValueError, f"num_bytes must be a multiple of {mib}, not 100", lambda: ElasticBuffer(comm, 100)),
            (ValueError, "num_bytes must be at least 1, not 0", lambda: ElasticBuffer(comm, 0)),
            (ValueError, f"num_cpu_bytes must be a multiple of {mib}, not 7", lambda: ElasticBuffer(comm, mib, 7)),
            (ValueError, f"{2 * mib} num_cpu_bytes cannot be part of {mib}", lambda: ElasticBuffer(comm, mib, 2 * mib)),
            (TypeError, "num_bytes must be an integer, not float", lambda: ElasticBuffer(comm, 2e6)),  # type: ignore[arg-type]
            (ValueError, "num_gpu_timeout_secs must be at least 1", lambda: ElasticBuffer(comm, mib, num_gpu_timeout_secs=0)),
            (ValueError, "num_cpu_timeout_secs must be at least 1", lambda: ElasticBuffer(comm, mib, num_cpu_timeout_secs=-1)),
            (ValueError, "num_allocated_qps must be at least 0", lambda: ElasticBuffer(comm, mib, num_allocated_qps=-1)),
            (ValueError, "sl_idx must be at least 0", lambda: ElasticBuffer(comm, mib, sl_idx=-1)),
            (TypeError, "the group must be", lambda: ElasticBuffer(wrong, mib)),
        ])  # fmt: skip
        kept = ElasticBuffer(comm, mib)
        with pytest.raises(RuntimeError, match="explicitly_destroy"):
            kept.destroy()
        buffer = ElasticBuffer(comm, mib, explicitly_destroy=True)
        assert buffer.runtime is not None and "destroyed" not in repr(buffer)
        buffer.destroy()
        assert buffer.runtime is None and "destroyed" in repr(buffer)
        x, ids = torch.ones(1, H), torch.zeros(1, 1, dtype=torch.int64)
        for call in (
            lambda: buffer.dispatch(x, ids, num_experts=2),
            buffer.barrier,
            buffer.create_agrs_session,
            lambda: buffer.all_gather(x),
            lambda: buffer.pp_send(x, 0),
            lambda: buffer.pp_set_config(1, 1),
            lambda: buffer.agrs_set_config(1, 1),
        ):
            with pytest.raises(RuntimeError, match="destroyed"):
                call()
        refused([
            (NotImplementedError, "engram_write: Engram", lambda: kept.engram_write(x)),
            (NotImplementedError, "engram_fetch: Engram", lambda: kept.engram_fetch(ids.int())),
            (NotImplementedError, "hint: Engram", lambda: ElasticBuffer.get_engram_storage_size_hint(1, 1, 1)),
        ])  # fmt: skip

    threads(2, body)


def on_two_nodes() -> str:
    with antiphon.init() as comm:
        try:
            ElasticBuffer(comm, 2 << 20)
        except NotImplementedError as error:
            return str(error)
    return "made"


def test_ranks_on_several_nodes_are_refused() -> None:
    need_ucx()
    for text in processes(2, on_two_nodes, nodes=["a", "b"]):
        assert "the ranks are on 2 nodes" in text


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages_go_around_both_ways(world_size: int) -> None:
    """All send before anybody receives, as many as may be under way, and what was sent may be overwritten."""
    inflight = 3

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        buffer.pp_set_config(4 << 20, inflight)
        behind, before = (rank + 1) % world_size, (rank - 1) % world_size
        # Below and above what is sent without a receiver.
        for count in (0, 5, 300_000):
            for _ in range(2):
                for number in range(inflight):
                    for to in sorted({behind, before}):
                        message = torch.full((count,), rank * 100.0 + number)
                        buffer.pp_send(message, to)
                        message.fill_(-1)
                for number in range(inflight):
                    for source in sorted({behind, before}, reverse=True):
                        got = torch.empty(count)
                        buffer.pp_recv(got, source)
                        assert (got == source * 100.0 + number).all()
        codes = torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn)
        buffer.pp_send(codes, behind, num_sms=4)
        buffer.pp_recv(got := torch.empty_like(codes), before, num_sms=4)
        assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8))
        buffer.pp_set_config(64, 1)  # waits for what was sent

    threads(world_size, body)


def test_a_message_beyond_those_under_way_waits_for_its_receiver() -> None:
    sent_all, may_receive = threading.Event(), threading.Event()

    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        buffer.pp_set_config(4 << 20, 2)
        message = torch.ones(1 << 20)
        if comm.rank == 0:
            buffer.pp_send(message, 1)
            buffer.pp_send(message, 1)
            may_receive.set()
            buffer.pp_send(message, 1)
            sent_all.set()
        else:
            assert may_receive.wait(20)
            assert not sent_all.wait(0.2)
            for _ in range(3):
                buffer.pp_recv(message, 0)
            assert sent_all.wait(20)

    threads(2, body)


def test_wrong_messages_are_refused() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        x = torch.ones(4)
        wrong: Any = [1.0]
        refused([
            (RuntimeError, "call pp_set_config first", lambda: buffer.pp_send(x, 1)),
            (RuntimeError, "call pp_set_config first", lambda: buffer.pp_recv(x, 1)),
            (ValueError, "num_max_tensor_bytes must be at least 1, not 0", lambda: buffer.pp_set_config(0, 1)),
            (ValueError, "num_max_inflight_tensors must be at least 1, not 0", lambda: buffer.pp_set_config(1, 0)),
        ])  # fmt: skip
        with pytest.raises(ValueError, match=r"rank 0 passes \(16, 1\), and rank 1 \(16, 2\)"):
            buffer.pp_set_config(16, 1 + (rank > 0))
        with pytest.raises(RuntimeError, match="call pp_set_config first"):
            buffer.pp_send(x, 1)
        buffer.pp_set_config(16, 1)
        behind, across = (rank + 1) % 4, (rank + 2) % 4
        ends = sorted({(rank - 1) % 4, behind})
        refused([
            (ValueError, "t has 20 bytes; pp_set_config allows 16", lambda: buffer.pp_send(torch.ones(5), behind)),
            (ValueError, "t must be contiguous; its strides are", lambda: buffer.pp_send(torch.ones(2, 2).t(), behind)),
            (ValueError, "t must be contiguous; its strides are", lambda: buffer.pp_recv(torch.ones(2, 2).t(), behind)),
            (TypeError, "t must be a torch.Tensor, not list", lambda: buffer.pp_send(wrong, behind)),
            (ValueError, f"dst_rank_idx is {across}; the neighbours of rank {rank} of 4 are {ends[0]} and {ends[1]}",
             lambda: buffer.pp_send(x, across)),
            (ValueError, f"src_rank_idx is {rank}; the neighbours", lambda: buffer.pp_recv(x, rank)),
            (ValueError, "dst_rank_idx must be at least 0, not -1", lambda: buffer.pp_send(x, -1)),
            (ValueError, "requires grad", lambda: buffer.pp_send(torch.ones(1, requires_grad=True), behind)),
            (ValueError, "num_sms must be at least 0", lambda: buffer.pp_send(x, behind, -1)),
        ])  # fmt: skip
        comm.barrier()
        buffer.pp_send(x, behind)
        buffer.pp_recv(x, (rank - 1) % 4)

    threads(4, body)

    def alone(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        buffer.pp_set_config(16, 1)
        with pytest.raises(ValueError, match="rank 0 is alone and has no neighbour"):
            buffer.pp_send(torch.ones(1), 0)

    threads(1, alone)


@pytest.mark.parametrize("world_size", WORLDS)
def test_sessions_of_all_gathers(world_size: int) -> None:
    """Random sessions: batches and single tensors, in place and not, awaited in any order."""
    most = 4

    def value(rank: int, number: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(number * 10 + rank)).bfloat16()

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        shapes = [(3, 5), (64, 70), (), (0, 4)]
        size = ElasticBuffer.get_agrs_num_max_session_bytes(comm, [shapes[1]] * most, torch.bfloat16)
        buffer.agrs_set_config(size, most)
        choose = random.Random(7)  # alike on all ranks
        number, kept = 0, []
        for _ in range(12):
            with buffer.agrs_new_session():
                waits = []
                for _ in range(choose.randint(1, most)):
                    chosen = [choose.choice(shapes) for _ in range(choose.randint(1, 2) if len(waits) < most - 2 else 1)]
                    numbers = list(range(number, number + len(chosen)))
                    number += len(chosen)
                    mine = [value(rank, n, shape) for n, shape in zip(numbers, chosen, strict=True)]
                    if choose.random() < 0.5:
                        places = buffer.agrs_get_inplace_tensor(chosen, torch.bfloat16)
                        for place, source in zip(places, mine, strict=True):
                            place.copy_(source)
                        mine = list(places)
                    if len(mine) == 1 and choose.random() < 0.7:
                        *results, wait = buffer.all_gather(mine[0])
                    else:
                        *results, wait = buffer.all_gather(tuple(mine))
                    waits.append((numbers, chosen, results, wait))
                choose.shuffle(waits)
                for numbers, chosen, results, wait in waits[1:]:
                    wait()
                    for n, shape, result in zip(numbers, chosen, results, strict=True):
                        same_bits(result, torch.stack([value(r, n, shape) for r in range(world_size)]))
                kept.append(waits[0])  # the end of the session waits for it
        for numbers, chosen, results, wait in kept:
            for n, shape, result in zip(numbers, chosen, results, strict=True):
                same_bits(result, torch.stack([value(r, n, shape) for r in range(world_size)]))
            with pytest.raises(RuntimeError, match="the session is over"):
                wait()

    threads(world_size, body)


def test_an_all_gather_in_place_copies_nothing() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        buffer.agrs_set_config(1 << 20, 2)
        buffer.create_agrs_session()
        place = buffer.agrs_get_inplace_tensor((4, 2), torch.float32)
        assert isinstance(place, Tensor) and place.shape == (4, 2) and place.device.type == "cpu"
        place.fill_(rank)
        result, wait = buffer.all_gather(place)
        wait()
        assert result[rank].data_ptr() == place.data_ptr()
        assert result[:, 0, 0].tolist() == list(range(comm.world_size))
        # A part of it, or the same memory as another dtype, is a tensor like any other.
        part, wait = buffer.all_gather(place.view(torch.int32))
        wait()
        assert part.dtype == torch.int32 and torch.equal(part.view(torch.float32), result)
        buffer.destroy_agrs_session()
        with buffer.agrs_new_session(enabled=False):
            with pytest.raises(RuntimeError, match="there is no session"):
                buffer.all_gather(place)

    threads(3, body)


def test_sessions_refuse_what_does_not_fit() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        x = torch.ones(8)  # 64 bytes of both ranks
        wrong: Any = "x"
        refused([
            (RuntimeError, "call agrs_set_config first", buffer.create_agrs_session),
            (RuntimeError, "there is no session", buffer.destroy_agrs_session),
            (RuntimeError, "there is no session", lambda: buffer.all_gather(x)),
            (RuntimeError, "there is no session", lambda: buffer.agrs_get_inplace_tensor((1,), torch.float32)),
            (ValueError, "num_max_session_bytes must be at least 1, not 0", lambda: buffer.agrs_set_config(0, 1)),
            (ValueError, "num_max_all_gathers_per_session must be at least 1", lambda: buffer.agrs_set_config(1, 0)),
        ])  # fmt: skip
        with pytest.raises(ValueError, match=r"agrs_set_config: rank 0 passes \(64, 1\), and rank 1 \(65, 1\)"):
            buffer.agrs_set_config(64 + comm.rank, 1)
        buffer.agrs_set_config(160, 2)
        with buffer.agrs_new_session():
            refused([
                (RuntimeError, "there is a session already", buffer.create_agrs_session),
                (RuntimeError, "destroy the session first", lambda: buffer.agrs_set_config(64, 1)),
                (ValueError, "no tensors", lambda: buffer.all_gather([])),
                (TypeError, r"t\[1\] must be a torch.Tensor, not str", lambda: buffer.all_gather([x, wrong])),
                (ValueError, "t must be contiguous", lambda: buffer.all_gather(torch.ones(2, 2).t())),
                (ValueError, "requires grad", lambda: buffer.all_gather(torch.ones(2, requires_grad=True))),
                (ValueError, "192 bytes, behind 0 of this session; agrs_set_config allows 160", lambda: buffer.all_gather([x, x, x])),
                (ValueError, "192 bytes, behind 0", lambda: buffer.agrs_get_inplace_tensor((24,), torch.float32)),
                (TypeError, "shapes must be", lambda: buffer.agrs_get_inplace_tensor(wrong, torch.float32)),
            ])  # fmt: skip
            buffer.all_gather([x, x])[-1]()
            with pytest.raises(ValueError, match="64 bytes, behind 128 of this session"):
                buffer.all_gather(x)
            buffer.all_gather(x[:4])[-1]()
            with pytest.raises(ValueError, match="has had 2 all-gathers; agrs_set_config allows 2"):
                buffer.all_gather(x[:0])
        with buffer.agrs_new_session():  # which begins anew
            buffer.all_gather([x, x])[-1]()

    threads(2, body)


def test_a_session_ends_with_its_block() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        buffer.agrs_set_config(64, 1)
        with pytest.raises(KeyError):
            with buffer.agrs_new_session():
                raise KeyError
        buffer.create_agrs_session()
        buffer.destroy_agrs_session()

    threads(2, body)


@pytest.mark.parametrize("arguments", [(), (False, True), (True, True, False)])
def test_a_barrier_waits_for_all(arguments: tuple[bool, ...]) -> None:
    entered = [threading.Event() for _ in range(3)]

    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        entered[comm.rank].set()
        buffer.barrier(*arguments)
        assert all(event.is_set() for event in entered)

    threads(3, body)


#: The arguments of the public methods at DeepEP's dd758ca.
ARGUMENTS = {
    "__init__": "group num_bytes num_cpu_bytes num_max_tokens_per_rank hidden num_topk use_fp8_dispatch deterministic allow_hybrid_mode"
    " allow_multiple_reduction prefer_overlap_with_compute sl_idx num_allocated_qps num_cpu_timeout_secs num_gpu_timeout_secs"
    " explicitly_destroy",
    "destroy": "",
    "get_buffer_size_hint": "group num_max_tokens_per_rank hidden num_topk use_fp8_dispatch allow_hybrid_mode allow_multiple_reduction",
    "get_engram_storage_size_hint": "num_entries hidden num_max_tokens_per_rank dtype",
    "get_pp_buffer_size_hint": "num_max_tensor_bytes num_max_inflight_tensors",
    "get_agrs_num_max_session_bytes": "group shapes dtype",
    "get_agrs_buffer_size_hint": "group num_max_session_bytes",
    "barrier": "use_comm_stream with_cpu_sync sequential",
    "capture": "",
    "get_comm_stream": "",
    "get_physical_domain_size": "",
    "get_logical_domain_size": "",
    "engram_write": "storage sf",
    "engram_fetch": "indices num_qps use_tma_aligned_col_major_sf",
    "pp_set_config": "num_max_tensor_bytes num_max_inflight_tensors",
    "pp_send": "t dst_rank_idx num_sms",
    "pp_recv": "t src_rank_idx num_sms",
    "create_agrs_session": "",
    "destroy_agrs_session": "",
    "agrs_new_session": "enabled",
    "agrs_set_config": "num_max_session_bytes num_max_all_gathers_per_session",
    "agrs_get_inplace_tensor": "shapes dtype",
    "all_gather": "t",
    "get_theoretical_num_sms": "num_experts num_topk num_scaleout_topk rdma_gbs nvlink_gbs sm_read_gbs sm_write_gbs",
    "get_theoretical_num_qps": "num_sms",
    "dispatch": "x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts num_max_tokens_per_rank expert_alignment num_sms"
    " num_qps previous_event previous_event_before_epilogue async_with_compute_stream allocate_on_comm_stream handle do_handle_copy"
    " do_cpu_sync do_expand do_zero_padding use_tma_aligned_col_major_sf",
    "combine": "x handle topk_weights bias num_sms num_qps previous_event previous_event_before_epilogue async_with_compute_stream"
    " allocate_on_comm_stream",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_deep_eps(name: str) -> None:
    found = [each for each in inspect.signature(getattr(ElasticBuffer, name)).parameters if each != "self"]
    expected = ARGUMENTS[name].split()
    assert found[: len(expected)] == expected


def test_compat_has_the_names() -> None:
    compat.install("deep_ep")
    try:
        from deep_ep import ElasticBuffer as buffer
        from deep_ep import EPHandle as handle
        from deep_ep import EventHandle, EventOverlap, get_logical_domain_size, get_physical_domain_size, topk_idx_t

        assert buffer is ElasticBuffer and handle is EPHandle and topk_idx_t == torch.int64
        assert EventHandle and EventOverlap and get_logical_domain_size and get_physical_domain_size
    finally:
        compat.uninstall("deep_ep")
