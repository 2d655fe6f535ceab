"""antiphon.moe: dispatch and combine, against their definition, and their gradients."""

import gc
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from entries import entries_of
from gradients import check_gradients
from ranks import processes, threads
from torch import Tensor

import antiphon
from antiphon import _core, compat
from antiphon.moe import ExpertParallel, deep_ep, fused_a2a
from antiphon.moe._calls import calls_of
from antiphon.moe._by_expert import by_expert_calls_of
from antiphon.moe._slots import slot_calls_of

H, K = 8, 3


def tokens_of(rank: int, count: int, experts: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank brings: the same on whatever rank it is asked for."""
    seed = torch.Generator().manual_seed(rank * 1000 + count)
    x = torch.randn(count, H, generator=seed, dtype=torch.float64).to(dtype)
    ids = torch.randint(-1, experts, (count, K), generator=seed)
    return x, ids, torch.rand(count, K, generator=seed)


def counts(world_size: int) -> list[int]:
    return [5, 0, 9, 1][:world_size]


class Definition:
    """All ranks' inputs, and what must come of them."""

    def __init__(self, world_size: int, experts: int, dtype: torch.dtype = torch.float32) -> None:
        self.local = experts // world_size
        self.inputs = [tokens_of(rank, count, experts, dtype) for rank, count in enumerate(counts(world_size))]

    def is_here(self, ids: Tensor, rank: int) -> Tensor:
        return (ids >= rank * self.local) & (ids < (rank + 1) * self.local)

    def rows(self, rank: int) -> list[tuple[int, int]]:
        return [
            (source, token)
            for source, (_, ids, _) in enumerate(self.inputs)
            for token in range(len(ids))
            if self.is_here(ids[token], rank).any()
        ]

    def received(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        x, ids, weights = torch.empty(0, H), torch.empty(0, K), torch.empty(0, K)
        if rows := self.rows(rank):
            x = torch.stack([self.inputs[s][0][t] for s, t in rows])
            ids = torch.stack([self.inputs[s][1][t] for s, t in rows])
            weights = torch.stack([self.inputs[s][2][t] for s, t in rows])
        here = self.is_here(ids, rank)
        return x, torch.where(here, ids - rank * self.local, -1).long(), torch.where(here, weights, 0.0)

    def combined(self, rank: int, made: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Of ``made(rank, row)``, in float32 and in the order of ranks."""
        x, ids, _ = self.inputs[rank]
        sums = []
        for token in range(len(x)):
            parts = [made(r, x[token]).float() for r in range(len(self.inputs)) if self.is_here(ids[token], r).any()]
            sums.append(sum(parts[1:], parts[0]).to(x.dtype) if parts else torch.zeros(H, dtype=x.dtype))
        return torch.stack(sums) if sums else x


def made(rank: int, rows: Tensor) -> Tensor:
    """What a rank's experts make of rows."""
    return rows * (rank + 2) + 0.5


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_go_where_their_experts_are_and_come_back(world_size: int, dtype: torch.dtype) -> None:
    experts = 4 * world_size
    definition = Definition(world_size, experts, dtype)

    def body(comm: antiphon.Communicator) -> None:
        parallel = ExpertParallel(comm, experts, H)
        x, ids, weights = definition.inputs[comm.rank]
        strided = x.repeat_interleave(2, dim=1)[:, ::2]
        received = parallel.dispatch(strided, ids.t().contiguous().t(), weights)
        expected = definition.received(comm.rank)
        for got, wanted in zip((received.x, received.ids, received.weights), expected, strict=True):
            assert torch.equal(got, wanted.to(got.dtype))
        assert received.tokens_per_expert == [int((expected[1] == e).sum()) for e in range(4)]
        combined = parallel.combine(made(comm.rank, received.x), received.routes)
        assert torch.equal(combined, definition.combined(comm.rank, made))
        bias = torch.ones_like(x)
        assert torch.allclose(parallel.combine(received.x * 0, received.routes, bias=(bias, bias)).float(), bias.float() * 2)

    threads(world_size, body)


def test_the_routes_are_a_tuple_as_deep_eps_handle() -> None:
    definition = Definition(2, 8)

    def body(comm: antiphon.Communicator) -> None:
        x, ids, weights = definition.inputs[comm.rank]
        routes = ExpertParallel(comm, 8, H).dispatch(x, ids, weights).routes
        prefix, channels, starts, sources, in_rank, heads, overflow = routes
        rows = [definition.rows(rank) for rank in range(2)]
        for source in range(2):
            assert prefix[source].tolist() == [sum(s <= source for s, _ in rows[to]) for to in range(2)]
        assert channels.flatten().tolist() == [sum(s == comm.rank for s, _ in rows[to]) for to in range(2)]
        assert starts.tolist() == [[0], [0]]
        assert sources.tolist() == [token for _, token in rows[comm.rank]]
        expected = torch.stack([definition.is_here(ids, to).any(1) for to in range(2)], 1)
        assert torch.equal(in_rank, expected)
        assert torch.equal(heads, torch.where(expected, expected.cumsum(0) - 1, -1).int())
        assert overflow.tolist() == [0] and routes[-1] is routes.overflow_flag
        assert {tensor.dtype for tensor in routes} == {torch.int32, torch.bool}

    threads(2, body)


def test_rows_beyond_a_capacity_are_absent() -> None:
    definition = Definition(3, 6)
    kept = 4

    def body(comm: antiphon.Communicator) -> None:
        parallel = ExpertParallel(comm, 6, H)
        x, ids, weights = definition.inputs[comm.rank]
        received = parallel.dispatch(x, ids, weights, capacity=kept)
        rows = definition.rows(comm.rank)
        count = min(kept, len(rows))
        assert len(received.x) == kept and len(rows) != kept
        assert torch.equal(received.x[:count], definition.received(comm.rank)[0][:count])
        assert (received.ids[count:] == -1).all()
        assert received.routes.overflow_flag.item() == (len(rows) > kept)
        ones = parallel.combine(torch.ones(kept, H), received.routes)
        arrived = [definition.rows(rank)[:kept] for rank in range(3)]
        here = [sum((comm.rank, token) in rows for rows in arrived) for token in range(len(x))]
        assert ones[:, 0].tolist() == here

    threads(3, body)


def test_codes_take_their_scales_along() -> None:
    def body(comm: antiphon.Communicator) -> None:
        parallel = ExpertParallel(comm, 2, 256)
        x = torch.randn(5, 256).to(torch.float8_e4m3fn)
        ids, weights = torch.tensor([[0, 1]] * 5), torch.ones(5, 2)
        for scales in (torch.randn(5, 2), torch.arange(5, dtype=torch.int32).reshape(5, 1)):
            received = parallel.dispatch(x, ids, weights, scales=scales)
            mine = slice(comm.rank * 5, comm.rank * 5 + 5)
            assert received.x.dtype == x.dtype and received.scales is not None
            assert torch.equal(received.x[mine].view(torch.uint8), x.view(torch.uint8))
            assert torch.equal(received.scales[mine], scales)

    threads(2, body)


# Gradients


def gradient_inputs() -> list[Tensor]:
    """Tokens and weights of two ranks, of which one has none for some of the other's experts."""
    inputs = []
    for rank, count in enumerate([3, 2]):
        x, _, weights = tokens_of(rank, count, 4, torch.float64)
        inputs += [x[:, :2].contiguous(), (weights * 64).round().double() / 64]
    return [tensor.requires_grad_() for tensor in inputs]


IDS = [torch.tensor([[0, 3, -1], [2, 2, 1], [-1, -1, -1]]), torch.tensor([[1, 0, 5], [3, -1, 0]])]


def test_gradients_of_expert_parallel() -> None:
    def body(comm: antiphon.Communicator) -> Callable[..., Sequence[Tensor]]:
        parallel = ExpertParallel(comm, 4, 2)

        def layer(x: Tensor, weights: Tensor) -> Sequence[Tensor]:
            received = parallel.dispatch(x, IDS[comm.rank], weights.float())
            y = parallel.combine(received.x * (comm.rank + 2), received.routes, bias=x)
            # Weights of slots whose expert is elsewhere may be used, too: they are constants.
            return received.x, received.weights.double(), y

        return layer

    check_gradients(body, gradient_inputs())


@pytest.mark.parametrize("is_async", [False, True])
def test_gradients_of_the_fused_functions(is_async: bool) -> None:
    def body(comm: antiphon.Communicator) -> Callable[..., Sequence[Tensor]]:
        def layer(x: Tensor, weights: Tensor) -> Sequence[Tensor]:
            rows, _, probs, _, handle = fused_a2a.fused_dispatch(
                x, IDS[comm.rank], weights.float(), 4, comm, is_async, is_async
            )
            combined, none = fused_a2a.fused_combine(rows * (comm.rank + 2), comm, handle, is_async, is_async)
            assert none is None
            return combined, probs.double()

        return layer

    check_gradients(body, gradient_inputs())


def test_gradients_may_be_missing_or_not_contiguous() -> None:
    def body(comm: antiphon.Communicator) -> None:
        experts = ExpertParallel(comm, 4, H)
        x, ids, weights = tokens_of(0, 5, 4)
        routing_map = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)) < 0.5
        probs = torch.rand(5, 4, generator=torch.Generator().manual_seed(2))

        def by_token(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            got = experts.dispatch(x, ids, weights)
            return got.x, got.weights, experts.combine(got.x, got.routes)

        def fused(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rows, _, row_weights, _, handle = fused_a2a.fused_dispatch(x, ids, weights, 4, comm)
            return rows, row_weights, fused_a2a.fused_combine(rows, comm, handle)[0]

        def by_map(x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            got = experts.dispatch_by_expert(x, routing_map, probs, pad_multiple=4)
            assert got.probs is not None
            return got.x, got.probs, experts.combine_by_expert(got.x, got.routes)

        def fused_by_map(x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rows, row_probs, _, _, handle = fused_a2a.hybrid_ep_dispatch(x, routing_map, probs, comm, 4, pad_multiple=4)
            return rows, row_probs, fused_a2a.hybrid_ep_combine(rows, handle, None, 4)

        forms = ((by_token, weights), (fused, weights), (by_map, probs), (fused_by_map, probs))
        for form, second in forms:
            inputs = x.clone().requires_grad_(), second.clone().requires_grad_()
            outputs = form(*inputs)
            grads = [torch.randn(output.shape[::-1]).permute(*range(output.dim() - 1, -1, -1)) for output in outputs]
            assert not grads[0].is_contiguous() and not grads[2].is_contiguous()

            def gradients(used: Sequence[int], contiguous: bool) -> list[Tensor]:
                given = [grads[n].contiguous() if contiguous else grads[n] for n in used]
                found = torch.autograd.grad([outputs[n] for n in used], inputs, given, retain_graph=True, allow_unused=True)
                return [torch.zeros_like(i) if grad is None else grad for i, grad in zip(inputs, found, strict=True)]

            whole = gradients([0, 1, 2], contiguous=True)
            assert all(map(torch.equal, whole, gradients([0, 1, 2], contiguous=False)))
            # The gradients are linear: what is missing counts as zeros.
            parts = [gradients([n], contiguous=False) for n in range(3)]
            for n, both in enumerate(whole):
                torch.testing.assert_close(sum(part[n] for part in parts), both)

    fused_a2a.reset_hybrid_ep_buffer()
    threads(1, body)


def test_router_weights_of_other_dtypes_are_cast() -> None:
    def body(comm: antiphon.Communicator) -> None:
        x, ids, weights = tokens_of(0, 5, 4)
        weights, routing_map = weights.bfloat16(), torch.ones(5, 4, dtype=torch.bool)
        probs = torch.rand(5, 4).bfloat16()
        hybrid = deep_ep.HybridEPBuffer(comm, H, 5, 4)
        forms: list[tuple[Callable[[Tensor], Any], Tensor]] = [
            (lambda w: fused_a2a.fused_dispatch(x, ids, w, 4, comm)[2], weights),
            (lambda w: fused_a2a.hybrid_ep_dispatch(x, routing_map, w, comm, 4)[1], probs),
        ]
        for form, given in forms:
            mine, same = given.clone().requires_grad_(), given.float().requires_grad_()
            found, expected = form(mine), form(same)
            assert found.dtype == torch.float32 and torch.equal(found, expected)
            found.sum().backward()
            expected.sum().backward()
            assert mine.grad is not None and mine.grad.dtype == torch.bfloat16 and torch.equal(mine.grad.float(), same.grad)
        received = hybrid.dispatch(x, routing_map=routing_map, probs=probs)[1]
        assert received is not None and torch.equal(received, probs.float())

    fused_a2a.reset_hybrid_ep_buffer()
    threads(1, body)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_codes_have_no_gradient_and_their_weights_have(dtype: torch.dtype) -> None:
    def body(comm: antiphon.Communicator) -> None:
        experts = ExpertParallel(comm, 4, 128)
        codes, scales = torch.ones(3, 128).to(dtype), torch.ones(3, 1)
        _, ids, weights = tokens_of(0, 3, 4)
        probs = torch.rand(3, 4)
        routing_map = torch.tensor([[True, False, True, False]] * 3)
        mine, theirs = weights.clone().requires_grad_(), probs.clone().requires_grad_()
        experts.dispatch(codes, ids, mine, scales=scales).weights.sum().backward()
        assert mine.grad is not None and torch.equal(mine.grad, (ids >= 0).float())
        mine.grad = None
        fused_a2a.fused_dispatch(codes, ids, mine, 4, comm)[2].sum().backward()
        assert torch.equal(mine.grad, (ids >= 0).float())
        by_map = experts.dispatch_by_expert(codes, routing_map, theirs, scales=scales)
        assert by_map.probs is not None
        by_map.probs.sum().backward()
        assert theirs.grad is not None and torch.equal(theirs.grad, routing_map.float())

    threads(1, body)


def test_gradients_of_the_calls_to_slots() -> None:
    """Of numbers so few bits long that bfloat16 has all sums of their products."""
    shapes = [(3, 8), (2, 8)]

    def few(shape: tuple[int, ...], seed: int) -> Tensor:
        numbers = torch.Generator().manual_seed(seed)
        return (torch.randint(-4, 5, shape, generator=numbers) / 4).double().requires_grad_()

    inputs = [few(shape, rank) for rank, (count, _) in enumerate(shapes) for shape in [(count, 8), (count, K)]]

    def body(comm: antiphon.Communicator) -> Callable[..., Sequence[Tensor]]:
        parallel = ExpertParallel(comm, 4, 8)
        factors = torch.tensor([1.0, 2.0]).view(2, 1, 1) * (comm.rank + 1)

        def layer(x: Tensor, weights: Tensor) -> Sequence[Tensor]:
            received = parallel.dispatch_to_slots(x.bfloat16(), IDS[comm.rank], max_tokens=3)
            is_filled = torch.arange(6) < received.counts.unsqueeze(1)
            rows = torch.where(is_filled.unsqueeze(2), received.x * factors, 0).bfloat16()
            y = parallel.combine_from_slots(rows, IDS[comm.rank], weights.float(), received.routes)
            return rows.double(), y.double()

        return layer

    check_gradients(body, inputs, step=0.25)


def test_slot_calls_without_a_gradient_say_so() -> None:
    def body(comm: antiphon.Communicator) -> None:
        parallel = ExpertParallel(comm, 2, 128)
        x, ids = torch.ones(2, 128, dtype=torch.bfloat16, requires_grad=True), torch.tensor([[0], [1]])
        with pytest.raises(ValueError, match="rows of fp8 have no gradient"):
            parallel.dispatch_to_slots(x, ids, max_tokens=2, format="fp8")
        received = parallel.dispatch_to_slots(x, ids, max_tokens=2)
        with pytest.raises(ValueError, match="rows of logfmt have no gradient"):
            parallel.combine_from_slots(received.x, ids, torch.ones(2, 1), received.routes, format="logfmt")
        with pytest.raises(ValueError, match="with out there is no gradient"):
            parallel.combine_from_slots(received.x, ids, torch.ones(2, 1), received.routes, out=torch.empty_like(x))

    threads(2, body)


@pytest.mark.parametrize("world_size", [1, 3])
def test_dispatch_and_combine_are_adjoint(world_size: int) -> None:
    """⟨dispatch x, y⟩ = ⟨x, combine y⟩ over all ranks, in float64, and the same of slots."""

    def body(comm: antiphon.Communicator) -> list[tuple[float, float]]:
        experts = 2 * world_size
        parallel = ExpertParallel(comm, experts, H)
        x, ids, weights = tokens_of(comm.rank, counts(world_size)[comm.rank], experts, torch.float64)
        received = parallel.dispatch(x, ids, weights)
        seed = torch.Generator().manual_seed(comm.rank)
        y = torch.randn(received.x.shape, generator=seed, dtype=torch.float64)
        by_token = (received.x * y).sum().item(), (x * parallel.combine(y, received.routes)).sum().item()

        few = torch.randint(1, 4, x.shape, generator=seed).bfloat16()
        ids = ids.masked_fill((ids.unsqueeze(2) == ids.unsqueeze(1)).tril(-1).any(2), -1)  # one slot for each choice
        slots = parallel.dispatch_to_slots(few, ids, max_tokens=9)
        is_filled = torch.arange(9 * world_size) < slots.counts.unsqueeze(1)
        y = torch.randint(1, 4, slots.x.shape, generator=seed).masked_fill(~is_filled.unsqueeze(2), 0).bfloat16()
        sums = parallel.combine_from_slots(y, ids, torch.ones(ids.shape), slots.routes)
        rows = slots.x.masked_fill(~is_filled.unsqueeze(2), 0)
        of_slots = (rows.double() * y.double()).sum().item(), (few.double() * sums.double()).sum().item()
        return [by_token, of_slots]

    ranks = threads(world_size, body)
    for form in range(2):
        there, back = (sum(rank[form][side] for rank in ranks) for side in range(2))
        assert there == pytest.approx(back, rel=1e-12) and there != 0


def test_rows_that_did_not_arrive_have_no_gradient() -> None:
    def body(comm: antiphon.Communicator) -> None:
        parallel = ExpertParallel(comm, 2, H)
        x, ids, weights = torch.ones(2, H, requires_grad=True), torch.tensor([[0], [1]]), torch.ones(2, 1)
        received = parallel.dispatch(x, ids, weights, capacity=7)
        rows = received.x.detach().requires_grad_()
        parallel.combine(rows, received.routes).sum().backward()
        assert rows.grad is not None and rows.grad[:, 0].tolist() == [1, 1, 0, 0, 0, 0, 0]

    threads(2, body)


# Operators


def test_a_gradient_has_no_gradient_and_says_so() -> None:
    def body(comm: antiphon.Communicator) -> None:
        experts = ExpertParallel(comm, 4, H)
        x, ids, weights = tokens_of(0, 3, 4)
        routing_map = torch.ones(3, 4, dtype=torch.bool)
        x.requires_grad_()
        forms: list[Callable[[], Tensor]] = [
            lambda: experts.dispatch(x, ids, weights).x,
            lambda: experts.combine(experts.dispatch(x, ids, weights).x, experts.dispatch(x, ids, weights).routes),
            lambda: experts.dispatch_by_expert(x, routing_map).x,
            lambda: fused_a2a.fused_dispatch(x, ids, weights, 4, comm)[0],
            lambda: fused_a2a.hybrid_ep_dispatch(x, routing_map, None, comm, 4)[0],
        ]
        for form in forms:
            (first,) = torch.autograd.grad(form().square().sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                first.sum().backward()

    threads(1, body)


def operators_are_what_torch_expects() -> None:
    """One rank of two: eager, as operators that a compiler knows, and compiled, with the same gradients."""
    import antiphon.moe.operators
    import antiphon.torch

    with antiphon.init() as comm:
        group = antiphon.torch.ops.register(comm)
        x, ids, weights = tokens_of(comm.rank, 4, 4)
        ops = torch.ops.antiphon
        rows, received_ids, received_weights, routes = ops.moe_dispatch(x, ids, weights, 4, 9, group)
        definition = ExpertParallel(comm, 4, H).dispatch(x, ids, weights, capacity=9)
        kept = definition.routes.num_received
        assert torch.equal(rows[:kept], definition.x[:kept]) and torch.equal(received_ids, definition.ids)
        sums, _ = ops.moe_combine(rows, routes, None, 4, len(x), K, group)
        assert torch.equal(sums, ExpertParallel(comm, 4, H).combine(definition.x, definition.routes))
        with pytest.raises(ValueError, match="routes"):
            ops.moe_combine(rows, routes[1:], None, 4, len(x), K, group)
        with pytest.raises(ValueError, match="words"):
            ops.moe_combine(rows, torch.zeros_like(routes) - 5, None, 4, len(x), K, group)

        def layer(x: Tensor, weights: Tensor) -> Tensor:
            rows, ids, probs, routes = ops.moe_dispatch(x, IDS_OF_OPERATORS, weights, 4, 9, group)
            made = (rows * probs.sum(1, keepdim=True) * (comm.rank + 2)).masked_fill((ids < 0).all(1, keepdim=True), 0)
            return ops.moe_combine(made, routes, None, 4, x.shape[0], K, group)[0] + x

        found = []
        for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            mine, probs = x.clone().requires_grad_(), weights.clone().requires_grad_()
            y = function(mine, probs)
            y.square().sum().backward()
            found.append((y.detach(), mine.grad, probs.grad))
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(eager, compiled, rtol=0, atol=0)

        # A token's sum is a multiple of the token: y = m x. The gradient of the sum of (dy²/dx)² is 8 m⁴ x.
        mine = x.clone().requires_grad_()
        y = layer(mine, weights)
        (gradient,) = torch.autograd.grad(y.square().sum(), mine, create_graph=True)
        (twice,) = torch.autograd.grad(gradient.square().sum(), mine)
        torch.testing.assert_close(twice, (8 * (y / mine) ** 4 * mine).detach())
        with pytest.raises(ValueError, match=r"must be of shape \[capacity, top_k\] = \[9, 2\], not \[9, 3\]"):
            ops.moe_combine(rows, routes, received_weights, 4, len(x), 2, group)
        # With as many rows as arrive: what others hold is undefined.
        torch.library.opcheck(ops.moe_dispatch, (x.clone().requires_grad_(), ids, weights.requires_grad_(), 4, 2, group))
        made = torch.ones(9, H, requires_grad=True)
        torch.library.opcheck(ops.moe_combine, (made, routes, None, 4, len(x), K, group))
        row_weights = received_weights.clone().requires_grad_()
        torch.library.opcheck(ops.moe_combine, (made, routes, row_weights, 4, len(x), K, group))

        def weighed(rows: Tensor, row_weights: Tensor) -> Tensor:
            y, sums = ops.moe_combine(rows, routes, row_weights, 4, len(x), K, group)
            return y.square().sum() + (sums * torch.arange(1, K + 1)).sum()

        of_rows, of_weights = torch.autograd.grad(weighed(made, row_weights), (made, row_weights))
        compiled = torch.compile(weighed, fullgraph=True, backend="aot_eager")
        again = torch.autograd.grad(compiled(made, row_weights), (made, row_weights))
        assert torch.equal(again[0][:kept], of_rows[:kept]) and torch.equal(again[1][:kept], of_weights[:kept])
        assert torch.equal(of_weights[:kept], torch.arange(1.0, K + 1).expand(kept, K))


IDS_OF_OPERATORS = torch.tensor([[0, 3, -1], [2, 2, 1], [-1, -1, -1], [1, 0, 5]])


def test_operators_compile_and_differentiate() -> None:
    processes(2, operators_are_what_torch_expects)


def test_the_pages_example_runs() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "guide" / "moe.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]

    def body(comm: antiphon.Communicator) -> None:
        names: dict[str, Any] = {
            "comm": comm,
            "x": torch.ones(3, 1024),
            "router": lambda x: torch.arange(8.0).expand(len(x), 8),
            "my_experts": lambda x, ids, weights: x * weights.sum(1, keepdim=True),
        }
        exec(program, names)
        # Both choices are of the last rank, and the weights of the two largest of eight do not add up to 1.
        weight = torch.arange(8.0).softmax(0)[-2:].sum()
        assert torch.allclose(names["x"], 1 + weight.expand(3, 1024))

    threads(2, body)


# DeepEP's and Megatron's names


def test_a_buffer_makes_deep_eps_calls() -> None:
    definition = Definition(2, 8, torch.bfloat16)

    def body(comm: antiphon.Communicator) -> None:
        buffer = deep_ep.Buffer(comm, num_nvl_bytes=1 << 20)
        x, ids, weights = definition.inputs[comm.rank]
        per_rank, none, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, 8)
        assert none is None and event.event is None
        assert per_rank.tolist() == in_rank.sum(0).tolist() and per_rank.dtype == torch.int32
        assert per_expert.tolist() == [int((ids == expert).sum()) for expert in range(8)]
        given = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
        }
        rows, received_ids, received_weights, per_local, handle, event = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, expert_alignment=4, async_finish=True, **given
        )
        event.current_stream_wait()
        expected = definition.received(comm.rank)
        assert torch.equal(rows, expected[0]) and torch.equal(received_ids, expected[1])
        assert per_local == [-(-int((expected[1] == e).sum()) // 4) * 4 for e in range(4)]
        again = buffer.dispatch(x, handle=handle)
        assert torch.equal(again[0], rows) and again[1:5] == (None,) * 4
        # Without choices, only rows go.
        assert buffer.dispatch(x, **given)[1:3] == (None, None)
        worst = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_worst_tokens=40, **given)
        assert len(worst[0]) == 40 and worst[3] == [] and (worst[1][len(rows) :] == -1).all()
        # Weights are summed unmasked: those of any slot, from every rank that has the token.
        combined, summed, _ = buffer.combine(rows, handle, topk_weights=torch.ones(len(rows), K))
        count = in_rank.sum(1, keepdim=True)
        assert torch.equal(summed, count.expand(-1, K).float())
        assert torch.equal(combined, (x.float() * count).bfloat16())

    threads(2, body)


def entries_of_dispatches(comm: antiphon.Communicator, device: torch.device) -> None:
    """A dispatch enters the compiled module once, and twice where torch makes the rows after the counts have come: on the host, and on a
    GPU where the calls before do not say how many rows to make ready."""
    experts, buffer = ExpertParallel(comm, 4, H), deep_ep.Buffer(comm)
    x, ids, weights = (tensor.to(device) for tensor in tokens_of(comm.rank, 5, 4))
    layout = experts.layout(ids)
    routes = experts.dispatch(x, ids, weights).routes
    waiting = ["Moe.notify"] if device.type == "cuda" else ["Moe.notify", "Moe.dispatch"]
    dispatches: dict[str, tuple[list[str], Callable[[], Any]]] = {
        "without a capacity": (waiting, lambda: experts.dispatch(x, ids, weights)),
        "of a layout": (waiting, lambda: experts.dispatch(x, ids, weights, layout=layout)),
        "with a capacity": (["Moe.notify"], lambda: experts.dispatch(x, ids, weights, capacity=5 * comm.world_size)),
        "along routes": (["Moe.dispatch"], lambda: buffer.dispatch(x, routes)),
    }
    for name, (expected, dispatch) in dispatches.items():
        with entries_of(_core.Moe, _core.MoeByTokenRoutes) as entered:
            dispatch()
        assert entered == expected, name


def test_a_dispatch_enters_the_compiled_module_once_or_twice() -> None:
    threads(1, entries_of_dispatches, torch.device("cpu"))


def test_numbers_of_multiprocessors_are_those_of_each_object() -> None:
    """The host has none, so what the shared core is told is looked at."""

    def body(comm: antiphon.Communicator) -> None:
        experts, buffer = ExpertParallel(comm, 4, H), deep_ep.Buffer(comm)
        hybrid = deep_ep.HybridEPBuffer(comm, H, 5, 4, num_sms_dispatch_api=16, num_sms_combine_api=64)
        core, (x, ids, weights) = experts._calls._core, tokens_of(0, 5, 4)
        routing_map = torch.ones(5, 4, dtype=torch.bool)
        rows, _, _, _, handle = hybrid.dispatch_with_permute(hidden=x, routing_map=routing_map)
        assert core.num_sms == 16
        fused_a2a.hybrid_ep_combine(rows, handle, None, None)
        assert core.num_sms == 64
        experts.dispatch(x, ids, weights)
        assert core.num_sms == 24
        buffer._calls.num_sms = 8
        buffer.get_dispatch_layout(ids, 4)
        assert core.num_sms == 8
        experts.dispatch_by_expert(x, routing_map)
        assert core.num_sms == 24

    threads(1, body)


def test_sizes_and_configurations_are_deep_eps() -> None:
    for world_size, size in (2, 83_927_552), (4, 167_854_976), (8, 335_709_824):
        config = deep_ep.Buffer.get_dispatch_config(world_size)
        assert config.get_nvl_buffer_size_hint(7168 * 2, world_size) == size
        assert config.get_rdma_buffer_size_hint(7168 * 2, world_size) == 0
    assert fused_a2a.get_hidden_bytes(torch.empty(1, 64, dtype=torch.uint8)) == 128
    assert deep_ep.topk_idx_t == torch.int64
    fused_a2a.set_deepep_num_sms(24)
    try:
        assert deep_ep.Buffer.get_combine_config(2).num_sms == 24
    finally:
        fused_a2a.set_deepep_num_sms(20)
    for wrong, text in ((3,), "even"), ((20, 256, 256), "fewer"), ((20, 6, 256, 8, 8), "fewer"):
        with pytest.raises(ValueError, match=text):
            deep_ep.Config(*wrong)


def test_deep_ep_is_served_by_its_own_name() -> None:
    compat.install("deep_ep")
    try:
        import deep_ep as served  # type: ignore[import-not-found]
    finally:
        compat.uninstall("deep_ep")
    assert served is deep_ep and served.utils.EventOverlap is deep_ep.EventOverlap


def _of_a_torch_group() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    definition = Definition(2, 8)
    x, ids, weights = definition.inputs[dist.get_rank()]
    x.requires_grad_()
    rows, received_ids, probs, per_expert, handle = fused_a2a.fused_dispatch(x, ids, weights, 8, group, True, True)
    expected = definition.received(dist.get_rank())
    assert torch.equal(rows, expected[0]) and torch.equal(received_ids, expected[1]) and torch.equal(probs, expected[2])
    assert per_expert.device.type == "cpu" and per_expert.dtype == torch.int64
    combined, _ = fused_a2a.fused_combine(made(dist.get_rank(), rows), group, handle)
    combined.sum().backward()
    assert torch.equal(combined.detach(), definition.combined(dist.get_rank(), made).detach())
    buffer = fused_a2a._buffer
    assert buffer is fused_a2a.get_buffer(group, fused_a2a.get_hidden_bytes(x))
    # Every group has its own, which is kept while others are used, until it is forgotten.
    other = dist.new_group(list(range(dist.get_world_size())))
    assert fused_a2a.get_buffer(other, 16) is not buffer and fused_a2a.get_buffer(group, 16) is buffer
    fused_a2a._buffer = None
    assert fused_a2a._buffer is None and fused_a2a.get_buffer(group, 16) is not buffer
    with pytest.raises(TypeError, match="_buffer may only be set to None"):
        fused_a2a._buffer = buffer
    dist.destroy_process_group()


def test_a_torch_group_of_any_backend_will_do() -> None:
    processes(2, _of_a_torch_group)


@pytest.mark.parametrize("calls", [calls_of, by_expert_calls_of, slot_calls_of])
def test_calls_do_not_keep_their_communicator(calls: Callable[[antiphon.Communicator], Any], tmp_path: Path) -> None:
    comm = antiphon.init(rank=0, world_size=1, path=str(tmp_path / "world"))
    calls(comm)
    known = weakref.ref(comm)
    del comm
    gc.collect()
    assert known() is None
