"""The functions of Megatron-Core over NCCL EP, against what they mean, and their gradients."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients import check_gradients
from ranks import outcomes, processes, threads
from torch import Tensor

import antiphon
from antiphon.moe import fused_a2a

H, LOCAL, K, MOST = 8, 3, 2, 12


@pytest.fixture(autouse=True)
def nothing_is_prepared() -> Iterator[None]:
    fused_a2a.nccl_ep_finalize()
    yield
    fused_a2a.nccl_ep_finalize()


def tokens_of(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank brings: ids that name no expert, and in the last row one that is named twice."""
    count = [5, 0, 9, 1][rank]
    seed = torch.Generator().manual_seed(rank)
    x = torch.randn(count, H, generator=seed).bfloat16()
    ids = torch.stack([torch.randperm(LOCAL * world, generator=seed)[:K] for _ in range(count)] or [torch.zeros(0, K)]).view(-1, K).long()
    ids[1::4, 0] = -1
    ids[2::4, 1] = LOCAL * world
    ids[count - 1 :] = 1
    return x, ids, torch.randint(1, 64, (count, K), generator=seed) / 64


def rows_of(rank: int, world: int, multiple: int) -> list[tuple[int, int, int] | None]:
    """The rows of a rank without a capacity: source rank, token and expert; ``None`` for padding."""
    rows: list[tuple[int, int, int] | None] = []
    for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
        for source in range(world):
            chosen = (tokens_of(source, world)[1] == expert).any(1)
            rows += [(source, int(token), expert) for token in chosen.nonzero()]
        rows += [None] * (-len(rows) % multiple)
    return rows


def received(rows: Sequence[tuple[int, int, int] | None], world: int) -> tuple[Tensor, Tensor]:
    """What must be in these rows."""
    x, weights = torch.zeros(len(rows), H, dtype=torch.bfloat16), torch.zeros(len(rows))
    for i, row in enumerate(rows):
        if row is not None:
            source, token, expert = row
            tokens, ids, of_ids = tokens_of(source, world)
            x[i], weights[i] = tokens[token], of_ids[token][ids[token] == expert].sum()
    return x, weights


def combined(rank: int, world: int, capacity: int | None, multiple: int) -> Tensor:
    """The sums of a rank's tokens: of the rows that each rank kept, times the rank + 1.5, rounded; then of the ranks."""
    x = tokens_of(rank, world)[0]
    total = torch.zeros(len(x), H)
    for holder in range(world):
        part = torch.zeros(len(x), H)
        for row in rows_of(holder, world, multiple)[:capacity]:
            if row is not None and row[0] == rank:
                part[row[1]] += (x[row[1]] * (holder + 1.5)).float()
        total += part.bfloat16().float()
    return total.bfloat16()


def prepare(comm: Any, capacity: int | None, hidden: int = H, experts: int = LOCAL, **changed: Any) -> None:
    world = comm.world_size
    options: dict[str, Any] = {
        "num_experts": experts * world,
        "max_tokens_per_rank": MOST,
        "recv_capacity_per_rank": capacity,
        "hidden_dim": hidden,
        "num_topk": K,
    }
    fused_a2a.ensure_nccl_ep_bootstrapped(comm, **options | changed)


def buffer_of(comm: Any, capacity: int | None, alignment: int = 0, hidden: int = H, experts: int = LOCAL) -> Any:
    return fused_a2a.new_nccl_ep_buffer(K, MOST, capacity, hidden, experts, alignment, ep_group=comm)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_come_by_expert_and_go_back(world: int) -> None:
    def body(comm: antiphon.Communicator) -> None:
        prepare(comm, None)
        x, ids, weights = tokens_of(comm.rank, world)
        for alignment in (0, 1, 4):
            multiple = max(alignment, 1)
            buffer = buffer_of(comm, None, alignment)
            rows, per_expert, row_weights = fused_a2a.nccl_ep_dispatch(buffer, x, ids, weights)
            expected, expected_weights = received(rows_of(comm.rank, world, multiple), world)
            assert torch.equal(rows, expected) and torch.equal(row_weights, expected_weights)
            assert per_expert.dtype == torch.int64 and per_expert.shape == (LOCAL,) and all(per_expert % multiple == 0)
            assert buffer.total_recv_tokens.tolist() == [len(expected)] == [per_expert.sum()]
            assert buffer.tokens_per_expert is per_expert and buffer.eager
            made = rows * (comm.rank + 1.5)
            sums = combined(comm.rank, world, None, multiple)
            assert torch.equal(fused_a2a.nccl_ep_combine(buffer, made, len(x)), sums)
            whole = fused_a2a.nccl_ep_combine(buffer, made)
            assert torch.equal(whole[: len(x)], sums) and whole.shape == (MOST, H) and not whole[len(x) :].any()

    threads(world, body)


@pytest.mark.parametrize("world", [2, 4])
def test_a_capacity_drops_rows_and_tells_how_many_there_are(world: int) -> None:
    def body(comm: antiphon.Communicator) -> None:
        prepare(comm, 64)
        x, ids, weights = tokens_of(comm.rank, world)
        needed = rows_of(comm.rank, world, 4)
        for capacity in (64, 12, 4, 0):
            buffer = buffer_of(comm, capacity, 4)
            to_rows, to_weights = torch.full((capacity, H), 7.0).bfloat16(), torch.full((capacity,), 7.0)
            rows, per_expert, row_weights = fused_a2a.nccl_ep_dispatch(buffer, x, ids, weights, to_rows, to_weights)
            assert rows.data_ptr() == to_rows.data_ptr() and row_weights.data_ptr() == to_weights.data_ptr()
            there = (needed + [None] * capacity)[:capacity]
            expected, expected_weights = received(there, world)
            assert torch.equal(to_rows, expected) and torch.equal(to_weights, expected_weights)
            assert buffer.total_recv_tokens.tolist() == [len(needed)] and per_expert.sum() <= capacity
            sums = fused_a2a.nccl_ep_combine(buffer, rows * (comm.rank + 1.5), len(x))
            assert torch.equal(sums, combined(comm.rank, world, capacity, 4))

    threads(world, body)


IDS = [torch.tensor([[0, 3], [2, -1], [1, 1]]), torch.tensor([[3, 2], [9, 0]])]


@pytest.mark.parametrize("capacity", [None, 2])
def test_gradients(capacity: int | None) -> None:
    """With a capacity, rows are dropped: each rank needs 4 with the padding."""

    def body(comm: antiphon.Communicator) -> Callable[..., Sequence[Tensor]]:
        prepare(comm, capacity, hidden=2, experts=2)

        def layer(x: Tensor, weights: Tensor) -> Sequence[Tensor]:
            buffer = buffer_of(comm, capacity, 2, hidden=2, experts=2)
            to_grad = None if capacity is None else torch.empty(capacity, 2, dtype=torch.float64)
            rows, _, row_weights = fused_a2a.nccl_ep_dispatch(buffer, x, IDS[comm.rank], weights.float())
            sums = fused_a2a.nccl_ep_combine(buffer, rows * (comm.rank + 2), len(x) + 1, to_grad)
            return rows, row_weights.double(), sums

        return layer

    inputs = []
    for rank, ids in enumerate(IDS):
        seed = torch.Generator().manual_seed(rank)
        inputs += [torch.randn(len(ids), 2, generator=seed, dtype=torch.float64)]
        inputs += [torch.randint(0, 64, ids.shape, generator=seed).double() / 64]
    check_gradients(body, [tensor.requires_grad_() for tensor in inputs])


def test_the_gradient_of_a_combine_is_written_where_it_was_asked_for() -> None:
    def body(comm: antiphon.Communicator) -> None:
        prepare(comm, 32)
        buffer = buffer_of(comm, 32)
        x, ids, weights = tokens_of(comm.rank, 2)
        rows = fused_a2a.nccl_ep_dispatch(buffer, x, ids, weights)[0].requires_grad_()
        to_grad = torch.full_like(rows, 7.0)
        fused_a2a.nccl_ep_combine(buffer, rows, len(x), to_grad.detach()).float().sum().backward()
        there = torch.tensor([row is not None for row in rows_of(comm.rank, 2, 1)] + [False] * 32)[:32]
        assert torch.equal(to_grad, there.bfloat16()[:, None].expand(32, H)) and torch.equal(rows.grad, to_grad)  # type: ignore[arg-type]

    threads(2, body)


def test_what_is_refused_is_named_with_its_numbers() -> None:
    def body(comm: antiphon.Communicator) -> None:
        with pytest.raises(RuntimeError, match="call ensure_nccl_ep_bootstrapped first"):
            buffer_of(comm, None)
        for error, text, changed in (
            (ValueError, "max_tokens_per_rank must be at least 1, not 0", {"max_tokens_per_rank": 0}),
            (TypeError, "num_topk must be an integer, not float", {"num_topk": 2.0}),
            (ValueError, "hidden must be even, as rows are whole 16 bytes, not 7", {"hidden_dim": 7}),
            (ValueError, "num_sms must be at least 0, not -1", {"num_sms": -1}),
            (ValueError, "zero_copy needs recv_capacity_per_rank", {"zero_copy": True}),
        ):
            with pytest.raises(error, match=text):
                prepare(comm, None, **changed)
        assert not fused_a2a.is_nccl_ep_bootstrapped()
        prepare(comm, 16)
        prepare(comm, None, num_topk=-1)  # which nobody looks at any more
        new = fused_a2a.new_nccl_ep_buffer
        for error, text, arguments in (
            (ValueError, "top_k must be at most 2, not 3", (3, MOST, 16, H, LOCAL)),
            (ValueError, "max_tokens_per_rank must be at most 12, not 13", (K, 13, 16, H, LOCAL)),
            (ValueError, "recv_capacity_per_rank must be at most 16, not 17", (K, MOST, 17, H, LOCAL)),
            (ValueError, "recv_capacity_per_rank is None; the group was prepared for 16", (K, MOST, None, H, LOCAL)),
            (ValueError, "hidden_dim must be at most 8, not 16", (K, MOST, 16, 16, LOCAL)),
            (ValueError, "num_local_experts is 2; the group was prepared for 3", (K, MOST, 16, H, 2)),
            (ValueError, "alignment must be 0 or a power of two, not 3", (K, MOST, 16, H, LOCAL, 3)),
            (ValueError, "recv_capacity_per_rank is 9, which is no multiple of alignment, 2", (K, MOST, 9, H, LOCAL, 2)),
            (NotImplementedError, "dispatch_fwd_quant_recipe is not served", (K, MOST, 16, H, LOCAL, 0, object())),
            (NotImplementedError, "combine_bwd_quant_recipe is not served", (K, MOST, 16, H, LOCAL, 0, None, object())),
        ):
            with pytest.raises(error, match=text):
                new(*arguments, ep_group=comm)  # type: ignore[arg-type]
        buffer = buffer_of(comm, 16)
        x, ids, weights = tokens_of(0, 1)
        with pytest.raises(ValueError, match="the buffer has no dispatch"):
            fused_a2a.nccl_ep_combine(buffer, x)
        given = {"tokens": x, "topk_idx": ids, "topk_weights": weights}
        many = torch.ones(13, K)
        for error, text, changed in (
            (ValueError, r"tokens must be of shape \[5, 8\], not \[5, 6\]", {"tokens": x[:, :6]}),
            (TypeError, "floating-point dtype of at least 16 bits, not torch.uint8", {"tokens": x.byte()}),
            (ValueError, r"topk_idx must be of shape \[5, 2\], not \[5, 1\]", {"topk_idx": ids[:, :1]}),
            (TypeError, "the ids must be torch.int64 or torch.int32, not torch.int16", {"topk_idx": ids.short()}),
            (ValueError, r"topk_weights must be of shape \[5, 2\], not \[4, 2\]", {"topk_weights": weights[:4]}),
            (TypeError, "floating-point dtype, not torch.int64", {"topk_weights": ids}),
            (
                ValueError,
                "13 tokens; max_tokens_per_rank is 12",
                {"tokens": torch.ones(13, H), "topk_idx": many.long(), "topk_weights": many},
            ),
            (TypeError, "recv_tokens must be torch.bfloat16, not torch.float32", {"recv_tokens": torch.ones(16, H)}),
            (
                ValueError,
                r"recv_topk_weights must be of shape \[16\], not \[15\]",
                {"recv_topk_weights": torch.ones(15)},
            ),
            (ValueError, "recv_topk_weights must be contiguous", {"recv_topk_weights": torch.ones(32)[::2]}),
        ):
            with pytest.raises(error, match=text):
                fused_a2a.nccl_ep_dispatch(buffer, **given | changed)  # type: ignore[arg-type]
        rows = fused_a2a.nccl_ep_dispatch(buffer, **given)[0]
        for error, text, options in (
            (ValueError, "num_local_tokens must be at least 5, not 4", {"num_local_tokens": 4}),
            (ValueError, "num_local_tokens must be at most 12, not 13", {"num_local_tokens": 13}),
            (ValueError, r"grad_out must be of shape \[16, 8\], not \[5, 8\]", {"grad_out": x}),
        ):
            with pytest.raises(error, match=text):
                fused_a2a.nccl_ep_combine(buffer, rows, **options)
        with pytest.raises(ValueError, match=r"expert_out must be of shape \[16, 8\], not \[5, 8\]"):
            fused_a2a.nccl_ep_combine(buffer, x)
        with pytest.raises(TypeError, match="must be one that new_nccl_ep_buffer gave, not NoneType"):
            fused_a2a.nccl_ep_combine(None, x)  # type: ignore[arg-type]
        fused_a2a.nccl_ep_finalize()
        prepare(comm, None)
        eager = buffer_of(comm, None)
        with pytest.raises(ValueError, match="recv_tokens needs a buffer with recv_capacity_per_rank"):
            fused_a2a.nccl_ep_dispatch(eager, **given, recv_tokens=rows)
        rows = fused_a2a.nccl_ep_dispatch(eager, **given)[0]
        with pytest.raises(ValueError, match="grad_out needs a buffer with recv_capacity_per_rank"):
            fused_a2a.nccl_ep_combine(eager, rows, grad_out=rows)

    threads(1, body)


def test_ranks_that_differ_hear_of_it() -> None:
    def body(comm: antiphon.Communicator) -> None:
        prepare(comm, 16 + comm.rank)

    for outcome in outcomes(2, body):
        assert isinstance(outcome, ValueError) and "16" in str(outcome) and "rank 1 passed" in str(outcome), outcome


def _as_megatron_calls_them() -> None:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    x, ids, weights = tokens_of(rank, 2)
    for _ in range(2):
        if not fused_a2a.is_nccl_ep_bootstrapped():
            fused_a2a.ensure_nccl_ep_bootstrapped(
                group, num_experts=2 * LOCAL, max_tokens_per_rank=MOST, recv_capacity_per_rank=32, hidden_dim=H, num_topk=K
            )
        to_rows = fused_a2a.alloc_ep_symm_buffer((32, H), torch.bfloat16, group, device="cpu")
        buffer = fused_a2a.new_nccl_ep_buffer(
            top_k=K, max_tokens_per_rank=MOST, recv_capacity_per_rank=32, hidden_dim=H, num_local_experts=LOCAL, alignment=4
        )
        tokens = x.clone().requires_grad_()
        rows, _, _ = fused_a2a.nccl_ep_dispatch(buffer, tokens, ids, weights, recv_tokens=to_rows)
        assert torch.equal(to_rows, received((rows_of(rank, 2, 4) + [None] * 32)[:32], 2)[0])
        sums = fused_a2a.nccl_ep_combine(buffer, rows * (rank + 1.5), num_local_tokens=len(x))
        assert torch.equal(sums, combined(rank, 2, None, 4))
        sums.float().sum().backward()
        assert tokens.grad is not None and tokens.grad.shape == x.shape
    fused_a2a.nccl_ep_finalize()
    assert not fused_a2a.is_nccl_ep_bootstrapped() and fused_a2a.HAVE_TE_EP
    dist.destroy_process_group()


def test_a_torch_group_as_megatron_uses_it() -> None:
    processes(2, _as_megatron_calls_them)
