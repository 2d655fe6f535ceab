"""antiphon.moe.deep_ep.ElasticBuffer on the host: dispatch and combine against a definition in plain loops."""

from typing import Any

import numpy as np
import pytest
import torch
from ranks import outcomes, threads
from torch import Tensor

import antiphon
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
        parts = [torch.arange(len(x) * (hidden // group), dtype=scales).view(len(x), hidden // group) for x in definition.x]
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
            assert expands or (ids is not None and same_ids is not None and torch.equal(same_ids, ids))
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
            options: dict[str, Any] = {"do_expand": expands, "do_zero_padding": expands}
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


def test_ranks_whose_handles_differ_get_an_error() -> None:
    definitions = Definition(2), Definition(2, seed=5)

    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        handles = [buffer.dispatch(**sent(comm, definition))[3] for definition in definitions]
        buffer.combine(torch.ones(handles[comm.rank].rows, H), handles[comm.rank])

    assert all(isinstance(error, RuntimeError) for error in outcomes(2, body))
