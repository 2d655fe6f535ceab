"""antiphon.moe: dispatch and combine by expert, against their definition, and their gradients."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients import check_gradients
from ranks import outcomes, processes, threads
from torch import Tensor

import antiphon
from antiphon.moe import ExpertParallel, deep_ep, fused_a2a

H, LOCAL = 8, 3


def tokens_of(rank: int, world: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank brings: the same on whatever rank it is asked for. Ranks have different numbers of tokens."""
    count = [5, 0, 9, 1][rank]
    seed = torch.Generator().manual_seed(rank)
    x = torch.randn(count, H, generator=seed).to(dtype)
    routing_map = torch.rand(count, LOCAL * world, generator=seed) < 0.4
    return x, routing_map, torch.rand(count, LOCAL * world, generator=seed) * routing_map


def rows_of(rank: int, world: int, multiple: int) -> list[tuple[int, int, int] | None]:
    """The rows of a rank: source rank, token and expert; ``None`` for padding."""
    rows: list[tuple[int, int, int] | None] = []
    for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
        for source in range(world):
            chosen = tokens_of(source, world)[1][:, expert]
            rows += [(source, token, expert) for token in range(len(chosen)) if chosen[token]]
        rows += [None] * (-len(rows) % multiple)
    return rows


def received(rank: int, world: int, multiple: int) -> tuple[Tensor, Tensor]:
    """What must come to a rank."""
    rows = rows_of(rank, world, multiple)
    x = [torch.zeros(H, dtype=torch.bfloat16) if row is None else tokens_of(row[0], world)[0][row[1]] for row in rows]
    probs = [0.0 if row is None else tokens_of(row[0], world)[2][row[1], row[2]].item() for row in rows]
    return torch.stack(x), torch.tensor(probs)


def combined(rank: int, world: int, made: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The sums of a rank's tokens: of the rows on each rank, rounded, then of the ranks."""
    x, routing_map, _ = tokens_of(rank, world)
    total = torch.zeros(len(x), H)
    for holder in range(world):
        part = torch.zeros(len(x), H)
        for expert in range(holder * LOCAL, (holder + 1) * LOCAL):
            part += torch.where(routing_map[:, expert, None], made(holder, x).float(), 0.0)
        total += part.bfloat16().float()
    return total.bfloat16()


def made(holder: int, x: Tensor) -> Tensor:
    return x * (holder + 1.5)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_come_by_expert_and_go_back(world: int) -> None:
    def body(comm: antiphon.Communicator) -> None:
        parallel = ExpertParallel(comm, LOCAL * world, H)
        x, routing_map, probs = tokens_of(comm.rank, world)
        for multiple in (1, 4):
            got = parallel.dispatch_by_expert(x, routing_map, probs, pad_multiple=multiple)
            rows, row_probs = received(comm.rank, world, multiple)
            assert torch.equal(got.x, rows) and got.probs is not None and torch.equal(got.probs, row_probs)
            assert got.rows_per_expert.sum() == len(rows) and all(got.rows_per_expert % multiple == 0)
            assert got.routes.overflow_flag.item() == 0 and got.routes[-1] is got.routes.overflow_flag
            places = got.routes.dense_to_expert_map
            assert torch.equal(places >= 0, got.routes.local_expert_routing_map)
            assert sorted(places[places >= 0].tolist()) == [i for i, row in enumerate(rows_of(comm.rank, world, multiple)) if row]
            sums = parallel.combine_by_expert(made(comm.rank, got.x), got.routes)
            assert torch.equal(sums, combined(comm.rank, world, made))

    threads(world, body)


def test_what_a_capacity_has_no_room_for_is_dropped() -> None:
    def body(comm: antiphon.Communicator) -> None:
        parallel = ExpertParallel(comm, LOCAL * 2, H)
        x, routing_map, probs = tokens_of(comm.rank, 2)
        rows, row_probs = received(comm.rank, 2, 4)
        for capacity, overflows in ((len(rows), False), (len(rows) - 4, True), (len(rows) + 8, False), (0, True)):
            got = parallel.dispatch_by_expert(
                x, routing_map, probs, pad_multiple=4, capacity=capacity, max_tokens=9
            )
            assert len(got.x) == capacity and got.routes.overflow_flag.item() == overflows
            kept = min(capacity, len(rows))
            assert torch.equal(got.x[:kept], rows[:kept]) and not got.x[kept:].any()
            assert got.probs is not None and torch.equal(got.probs[:kept], row_probs[:kept])
            parallel.combine_by_expert(got.x, got.routes)

    threads(2, body)


def test_rows_of_a_hybrid_buffer() -> None:
    """As DeepEP's test of the branch hybrid-ep has it: codes and bfloat16, by token and by expert, with and without probs."""

    def body(comm: antiphon.Communicator) -> None:
        hidden, count, top_k = 512, 33, 4
        seed = torch.Generator().manual_seed(comm.rank)
        buffer = deep_ep.HybridEPBuffer(comm, hidden, count, 4, use_fp8=True)
        topk_idx = torch.stack([torch.randperm(8, generator=seed)[:top_k] for _ in range(count)])
        routing_map = torch.zeros(count, 8, dtype=torch.bool).scatter(1, topk_idx, True)
        probs = routing_map.float()
        scales = torch.randn(count, hidden // 128, generator=seed)
        codes = torch.randint(0, 256, (count, hidden), generator=seed, dtype=torch.uint8)
        for x in (codes, torch.randn(count, hidden, generator=seed).bfloat16()):
            for with_probs in (True, False):
                weights = torch.ones(count, top_k) if with_probs else None
                rows, row_probs, row_scales, handle = buffer.dispatch(
                    hidden=x, scaling_factor=scales, topk_idx=topk_idx, topk_weights=weights, num_of_experts=8
                )
                _, _, _, num_dispatched, local_map, _, _ = handle
                assert num_dispatched.item() == len(rows) and (row_scales is None) == (x is not codes)
                mine = slice(comm.rank * 4, comm.rank * 4 + 4)
                if row_probs is not None:
                    assert torch.equal(row_probs[:, mine], local_map.float()) and row_probs.sum() == local_map.sum()
                copies = local_map.sum(1, keepdim=True)
                sums, sum_probs = buffer.combine(rows.bfloat16() * copies, row_probs, handle)
                torch.testing.assert_close(sums / top_k, x.bfloat16(), atol=2e-5, rtol=1e-2)
                assert sum_probs is None or torch.equal(sum_probs, probs)

                rows, row_probs, row_scales, per_expert, handle = buffer.dispatch_with_permute(
                    hidden=x,
                    routing_map=routing_map,
                    probs=probs if with_probs else None,
                    scaling_factor=scales,
                    pad_multiple=32,
                )
                assert len(rows) == per_expert.sum() and len(handle) == 11
                again = buffer.dispatch_with_permute(
                    hidden=x, scaling_factor=scales, handle=handle, num_permuted_tokens=len(rows), pad_multiple=32
                )
                assert torch.equal(again[0], rows)
                sums, sum_probs = buffer.combine_with_unpermute(
                    hidden=rows.bfloat16(), probs=row_probs, handle=handle, pad_multiple=32
                )
                torch.testing.assert_close(sums / top_k, x.bfloat16(), atol=2e-5, rtol=1e-2)
                assert sum_probs is None or torch.equal(sum_probs, probs)

    threads(2, body)


MAPS = [
    torch.tensor([[1, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]).bool(),
    torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]]).bool(),
]


def test_a_call_may_have_another_number_of_experts_than_the_buffer() -> None:
    """Megatron keeps one buffer for layers of any number of experts, and passes that number with each call."""

    def body(comm: antiphon.Communicator) -> None:
        x, routing_map, probs = tokens_of(comm.rank, 2)
        buffer = deep_ep.HybridEPBuffer(comm, H, len(x), LOCAL + 1)
        rows, row_probs, _, per_expert, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing_map, probs=probs, num_of_experts_per_rank=LOCAL
        )
        expected, expected_probs = received(comm.rank, 2, 1)
        assert per_expert.shape == (LOCAL,)
        assert torch.equal(rows, expected) and row_probs is not None and torch.equal(row_probs, expected_probs)

    threads(2, body)


def gradient_inputs() -> list[Tensor]:
    inputs = []
    for rank, count in enumerate([3, 2]):
        seed = torch.Generator().manual_seed(rank)
        x = torch.randn(count, 2, generator=seed, dtype=torch.float64)
        inputs += [x, torch.randint(0, 64, (count, 4), generator=seed).double() / 64]
    return [tensor.requires_grad_() for tensor in inputs]


@pytest.mark.parametrize("capacity", [None, 8])
def test_gradients_of_expert_parallel(capacity: int | None) -> None:
    """With a capacity some rows are dropped: of the 10 that come with the padding, 8 are there."""

    def body(comm: antiphon.Communicator) -> Callable[..., Sequence[Tensor]]:
        parallel = ExpertParallel(comm, 4, 2)

        def layer(x: Tensor, probs: Tensor) -> Sequence[Tensor]:
            got = parallel.dispatch_by_expert(
                x, MAPS[comm.rank], probs.float(), pad_multiple=2, capacity=capacity, max_tokens=3
            )
            assert got.probs is not None
            y = parallel.combine_by_expert(got.x * (comm.rank + 2), got.routes)
            return got.x, got.probs.double(), y

        return layer

    check_gradients(body, gradient_inputs())


def test_gradients_of_the_fused_functions() -> None:
    def body(comm: antiphon.Communicator) -> Callable[..., Sequence[Tensor]]:
        def layer(x: Tensor, probs: Tensor) -> Sequence[Tensor]:
            rows, row_probs, scales, per_expert, handle = fused_a2a.hybrid_ep_dispatch(
                x, MAPS[comm.rank], probs.float(), comm, 2, pad_multiple=4, fused=True
            )
            assert scales is None
            sums = fused_a2a.hybrid_ep_combine(rows * (comm.rank + 2), handle, per_expert.sum(), 4)
            return sums, row_probs.double()

        return layer

    fused_a2a.reset_hybrid_ep_buffer()
    try:
        check_gradients(body, gradient_inputs())
    finally:
        fused_a2a.reset_hybrid_ep_buffer()


def test_dispatch_and_combine_are_adjoint() -> None:
    """⟨dispatch x, y⟩ over all ranks is ⟨x, combine y⟩."""

    def body(comm: antiphon.Communicator) -> tuple[float, float]:
        parallel = ExpertParallel(comm, LOCAL * 4, H)
        x, routing_map, _ = tokens_of(comm.rank, 4)
        x = x.double().round()
        got = parallel.dispatch_by_expert(x, routing_map, pad_multiple=8)
        y = torch.arange(got.x.numel()).remainder(17).double().view_as(got.x)
        return (got.x * y).sum().item(), (x * parallel.combine_by_expert(y, got.routes)).sum().item()

    there, here = zip(*threads(4, body), strict=True)
    assert sum(there) == sum(here) != 0


def test_a_buffer_grows_with_the_tokens_of_all_ranks() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = deep_ep.HybridEPBuffer(comm, H, 4, LOCAL)
        for count in (4, 513, 700, 20):
            x = torch.ones(count, H, dtype=torch.bfloat16)
            routing_map = torch.ones(count, 2 * LOCAL, dtype=torch.bool)
            rows, *_, handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map, num_permuted_tokens=9000)
            assert handle.tokens_per_expert.tolist() == [2 * count] * LOCAL
            sums, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
            assert torch.equal(sums, x * 2 * LOCAL)
        assert buffer.max_num_of_tokens_per_rank == 704
        # Ranks that differ hear of it.
        count = 900 if comm.rank else 10
        routing_map = torch.ones(count, 2 * LOCAL, dtype=torch.bool)
        x = torch.ones(count, H, dtype=torch.bfloat16)
        buffer.dispatch_with_permute(hidden=x, routing_map=routing_map, num_permuted_tokens=9000)

    for error in outcomes(2, body):
        assert isinstance(error, RuntimeError) and "704" in str(error) and "960" in str(error), error


def test_what_is_refused_is_named_with_its_numbers() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = deep_ep.HybridEPBuffer(comm, H, 4, LOCAL)
        x, routing_map, probs = tokens_of(comm.rank, 1)

        def dispatch(**changed: Any) -> Any:
            return buffer.dispatch_with_permute(**{"hidden": x, "routing_map": routing_map, "probs": probs} | changed)

        for error, text, changed in (
            (TypeError, "the weights must be of a floating-point dtype, not torch.int64", {"probs": probs.long()}),
            (TypeError, "the routing map must be torch.bool, not torch.int64", {"routing_map": routing_map.long()}),
            (ValueError, r"need a routing map of shape \[T, 3\], not \[5, 2\]", {"routing_map": routing_map[:, :2]}),
            (ValueError, r"must be of shape \[T, E\] = \[5, E\], not \[4, 3\]", {"routing_map": routing_map[:4]}),
            (ValueError, r"the probs must be of shape \[T, E\] = \[5, 3\], not \[5, 2\]", {"probs": probs[:, :2]}),
            (ValueError, "rows of 6 × bf16 are 12 bytes, which must be a multiple of 16", {"hidden": x[:, :6]}),
            (
                ValueError,
                "num_permuted_tokens is 9, which is no multiple of pad_multiple, 4",
                {"num_permuted_tokens": 9, "pad_multiple": 4},
            ),
            (ValueError, "pad_multiple must be at least 0, not -4", {"pad_multiple": -4}),
            (ValueError, "num_of_experts_per_rank must be at least 1, not 0", {"num_of_experts_per_rank": 0}),
            (ValueError, r"2 experts of each of 1 ranks need a routing map .* \[T, 2\]", {"num_of_experts_per_rank": 2}),
            (ValueError, "non_blocking needs num_permuted_tokens", {"non_blocking": True}),
            (ValueError, "non_blocking needs num_permuted_tokens", {"use_host_meta": False}),
            (ValueError, "use_fp8 is True, and the tokens are torch.bfloat16", {"use_fp8": True}),
            (ValueError, "pass a handle, a routing_map, or topk_idx", {"routing_map": None}),
            (ValueError, "tokens of torch.uint8 need a scaling_factor", {"hidden": torch.zeros(5, 512, dtype=torch.uint8)}),
        ):
            with pytest.raises(error, match=text):
                dispatch(**changed)
        rows, _, _, _, handle = dispatch()
        with pytest.raises(ValueError, match=f"num_permuted_tokens is 99; the handle has {len(rows)} rows"):
            dispatch(handle=handle, num_permuted_tokens=99)
        with pytest.raises(ValueError, match="pad_multiple is 8; that of the handle is 1"):
            buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=8)
        with pytest.raises(ValueError, match="use combine_with_unpermute"):
            buffer.combine(rows, handle=handle)
        with pytest.raises(TypeError, match="the handle must be one that a dispatch gave, not tuple"):
            buffer.combine(rows, handle=(1, 2))
        with pytest.raises(ValueError, match=f"num_permuted_tokens is 1; the handle has {len(rows)} rows"):
            fused_a2a.hybrid_ep_combine(rows, handle, 1, None)
        with pytest.raises(ValueError, match="per_nvlink_domain is 2; all 1 ranks must be in one domain"):
            deep_ep.HybridEPBuffer(comm, H, 4, LOCAL, num_of_hybrid_ep_ranks_per_nvlink_domain=2)
        with pytest.raises(ValueError, match="fp8_dispatch is not served"):
            fused_a2a.init_hybrid_ep_buffer(comm, H, 4, LOCAL, 24, 24, True)
        shape = [len(rows) + 1, H]
        with pytest.raises(ValueError, match=rf"shape \[P, H\] = \[{len(rows)}, {H}\], not \[{shape[0]}, {H}\]"):
            buffer.combine_with_unpermute(hidden=torch.zeros(shape, dtype=torch.bfloat16), handle=handle)

    threads(1, body)


def test_ranks_that_differ_hear_of_it() -> None:
    def body(comm: antiphon.Communicator) -> None:
        parallel = ExpertParallel(comm, 4, H)
        routing_map = torch.ones(3, 4, dtype=torch.bool)
        parallel.dispatch_by_expert(
            torch.zeros(3, H), routing_map, capacity=None if comm.rank else 64
        )

    for outcome in outcomes(2, body):
        assert isinstance(outcome, RuntimeError) and "dispatch_by_expert" in str(outcome) and "capacity" in str(outcome)


def test_the_pages_example_runs() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "guide" / "moe.md").read_text()
    (program,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "by_expert" in block)

    def body(comm: antiphon.Communicator) -> None:
        x, routing_map, probs = tokens_of(comm.rank, 2)
        names: dict[str, Any] = {
            "experts": ExpertParallel(comm, LOCAL * 2, H),
            "x": x.float(),
            "routing_map": routing_map,
            "probs": probs,
            "grouped_mlp": lambda rows, counts: torch.cat([part * 2 for part in rows.split(counts.tolist())]),
        }
        exec(program, names)
        torch.testing.assert_close(names["x"], x.float() * 2 * probs.sum(1, keepdim=True))

    threads(2, body)


def _of_a_torch_group() -> None:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    x, routing_map, probs = tokens_of(rank, 2)
    for layer in range(2):
        x.grad = None
        x.requires_grad_()
        rows, row_probs, _, _, handle = fused_a2a.hybrid_ep_dispatch(x, routing_map, probs, group, LOCAL, pad_multiple=4)
        expected = received(rank, 2, 4)
        assert torch.equal(rows, expected[0]) and torch.equal(row_probs, expected[1])
        sums = fused_a2a.hybrid_ep_combine(made(rank, rows), handle, None, 4)
        assert torch.equal(sums.detach(), combined(rank, 2, made).detach())
        sums.sum().backward()
        assert fused_a2a._hybrid_ep_buffer is not None and fused_a2a._hybrid_ep_buffer.group is group, layer
    assert fused_a2a.HAVE_HYBRIDEP
    dist.destroy_process_group()


def test_a_torch_group_of_any_backend_will_do() -> None:
    processes(2, _of_a_torch_group)
