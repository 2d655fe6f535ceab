"""antiphon.moe: dispatch to slots and combine from them, against their definition."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from ranks import outcomes, threads
from torch import Tensor

import antiphon
from antiphon.moe import ExpertParallel, ReceivedSlots, deep_ep

H, K, M = 512, 3, 6
CHECKS = harness.Checks()
FORMATS = ["bf16", "fp8", "fp8_powers_of_two", "fp8_packed"]


def inputs(rank: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank brings: the same on whatever rank it is asked for."""
    seed = torch.Generator().manual_seed(rank + 7)
    count = [5, 0, 6][rank]
    x = torch.randn(count, H, generator=seed).bfloat16()
    return x, torch.randint(-1, experts, (count, K), generator=seed), torch.rand(count, K, generator=seed)


def slots(world_size: int, experts: int, expert: int) -> list[tuple[int, int]]:
    chosen = [inputs(rank, experts)[1] for rank in range(world_size)]
    return [(rank, token) for rank, ids in enumerate(chosen) for token in range(len(ids)) if expert in ids[token]]


def quantised(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    groups = x.float().view(-1, 128)
    amax = groups.abs().amax(1, keepdim=True).clamp(1e-4)
    if format == "fp8":
        return (groups * (448.0 / amax)).to(torch.float8_e4m3fn).view(H), (amax * (1 / 448.0)).view(-1)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    codes, scale = (groups / scale).to(torch.float8_e4m3fn).view(H), scale.view(-1)
    if format == "fp8_packed":
        scale = (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    return codes, scale


def check_slots(received: ReceivedSlots, rank: int, world_size: int, experts: int, format: str) -> None:
    local = experts // world_size
    for expert in range(local):
        filled = slots(world_size, experts, rank * local + expert)
        assert received.counts[expert] == len(filled)
        assert received.routes.src_info[expert, : len(filled)].tolist() == [token for _, token in filled]
        for source in range(world_size):
            packed = int(received.routes.layout_range[expert, source])
            mine = range(packed >> 32, (packed >> 32) + (packed & 0xFFFFFFFF))
            assert [i for i, (rank, _) in enumerate(filled) if rank == source] == list(mine)
        for slot, (source, token) in enumerate(filled):
            x = inputs(source, experts)[0][token]
            if format == "bf16":
                assert torch.equal(received.x[expert, slot], x)
                continue
            codes, scales = quantised(x, format)
            assert received.scales is not None
            assert torch.equal(received.x[expert, slot].view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(received.scales[expert, slot], scales)


def made(received: ReceivedSlots, rank: int, experts: int, world_size: int) -> Tensor:
    """What experts make of bf16 slots: each something of its own."""
    first = rank * (experts // world_size)
    factors = torch.arange(first + 1, first + 1 + len(received.x)).view(-1, 1, 1)
    return (received.x.float() * factors).bfloat16()


def sums(rank: int, experts: int) -> Tensor:
    x, ids, weights = inputs(rank, experts)
    result = torch.zeros(len(x), H)
    for k in range(K):
        rows = (x.float() * (ids[:, k : k + 1] + 1)).bfloat16().float()
        result = torch.where(ids[:, k : k + 1] >= 0, result + weights[:, k : k + 1] * rows, result)
    return result.bfloat16()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tokens_go_to_the_slots_of_their_experts(world_size: int, format: str) -> None:
    experts = 2 * world_size

    def body(comm: antiphon.Communicator) -> None:
        layer = ExpertParallel(comm, experts, H)
        x, ids, _ = inputs(comm.rank, experts)
        statistics = torch.full((2,), 5, dtype=torch.int32)
        received = layer.dispatch_to_slots(x, ids, max_tokens=M, format=format, statistics=statistics)
        assert received.x.shape == (2, world_size * M, H)
        check_slots(received, comm.rank, world_size, experts, format)
        assert torch.equal(statistics, received.counts + 5)

    threads(world_size, body)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_experts_make_of_them_is_weighed_and_summed(world_size: int) -> None:
    experts = 2 * world_size

    def body(comm: antiphon.Communicator) -> None:
        layer = ExpertParallel(comm, experts, H)
        x, ids, weights = inputs(comm.rank, experts)
        received = layer.dispatch_to_slots(x, ids, max_tokens=M)
        out = torch.empty_like(x)
        rows = made(received, comm.rank, experts, world_size)
        result = layer.combine_from_slots(rows, ids, weights, received.routes, out=out)
        assert result is out and torch.equal(out, sums(comm.rank, experts))

    threads(world_size, body)


def in_logfmt(row: Tensor) -> Tensor:
    """What the format makes of a row, from its definition in float64: of the values that a block has, each element becomes the nearest."""
    blocks = []
    for block in row.double().view(-1, 128):
        largest, smallest = block.abs().max(), block.abs().min()
        if largest >= 1 or smallest == largest:
            blocks.append(block)
            continue
        least = torch.maximum(smallest, largest * 2.0**-32)
        step = torch.log2(largest / least) / 510
        values = torch.exp2(torch.log2(least) + torch.arange(-1, 511) * step)
        nearest = (block.abs().unsqueeze(1) - values).abs().argmin(1)
        blocks.append(torch.where(nearest == 0, 0, values[nearest]) * block.sign())
    return torch.cat(blocks)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_in_logfmt_are_those_of_its_definition(world_size: int) -> None:
    """The first block is coded, the second has magnitudes of more than 1, the third zeros and a wide range, the last equal ones."""
    experts = 2 * world_size

    def rows_of(x: Tensor, factor: Any) -> Tensor:
        x = x.float() * factor
        wide = torch.where(torch.arange(128) % 5 > 0, x[..., 256:384] * 2.0 ** -(torch.arange(128) % 40), 0)
        return torch.cat([x[..., :128] / 64, x[..., 128:256], wide / 64, torch.full_like(wide, 0.25)], -1).bfloat16()

    def body(comm: antiphon.Communicator) -> None:
        layer, buffer = ExpertParallel(comm, experts, H), deep_ep.Buffer(comm, low_latency_mode=True)
        x, ids, weights = inputs(comm.rank, experts)
        expected, least = torch.zeros(len(x), H, dtype=torch.float64), torch.zeros(len(x), H, dtype=torch.float64)
        for token, choice in [(token, choice) for token in range(len(x)) for choice in range(K) if ids[token, choice] >= 0]:
            row = rows_of(x[token], ids[token, choice] + 1)
            expected[token] += weights[token, choice] * in_logfmt(row)
            least[token] += weights[token, choice] * row.double().abs()
        received = layer.dispatch_to_slots(x, ids, max_tokens=M)
        first = comm.rank * 2
        rows = rows_of(received.x, torch.arange(first + 1, first + 3).view(-1, 1, 1))
        exact = layer.combine_from_slots(rows, ids, weights, received.routes)
        result = layer.combine_from_slots(rows, ids, weights, received.routes, format="logfmt")
        # A bfloat16 has 8 bits; terms of different signs leave what each of them was off by.
        assert ((result.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-16 * least + 1e-30).all()
        assert torch.equal(result[:, 128:256], exact[:, 128:256]) and torch.equal(result[:, 384:], exact[:, 384:])
        assert len(x) == 0 or not (ids >= 0).any() or not torch.equal(result, exact)
        _, _, handle, _, hook = buffer.low_latency_dispatch(x, ids, M, experts, use_fp8=False, return_recv_hook=True)
        assert hook is not None
        hook()
        for hook_wanted in (False, True):
            same, _, hook = buffer.low_latency_combine(
                rows, ids, weights, handle, use_logfmt=True, return_recv_hook=hook_wanted
            )
            hook() if hook else None
            assert torch.equal(same, result)

    threads(world_size, body)


def test_a_buffer_makes_deep_eps_low_latency_calls() -> None:
    def body(comm: antiphon.Communicator) -> None:
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(M, H, 2, 4)
        buffer = deep_ep.Buffer(comm, 0, size, low_latency_mode=True, num_qps_per_rank=2)
        buffer.clean_low_latency_buffer(M, H, 4)
        x, ids, weights = inputs(comm.rank, 4)
        for hook_wanted in (False, True):
            rows, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, M, 4, use_fp8=False, async_finish=not hook_wanted, return_recv_hook=hook_wanted
            )
            assert (hook is not None) == hook_wanted
            hook() if hook else event.current_stream_wait()
            assert isinstance(rows, Tensor) and handle[2:] == (M, H, 4)
            received = ReceivedSlots(rows, None, counts, handle)
            check_slots(received, comm.rank, 2, 4, "bf16")
            buffer.get_next_low_latency_combine_buffer(handle)[:] = made(received, comm.rank, 4, 2)
            result, _, hook = buffer.low_latency_combine(
                torch.empty(0), ids, weights, handle, zero_copy=True, return_recv_hook=hook_wanted
            )
            hook() if hook else None
            assert torch.equal(result, sums(comm.rank, 4))
        packed, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, M, 4, round_scale=True, use_ue8m0=True)
        codes, scales = packed
        assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.int32
        assert scales.shape == (2, 2 * M, H // 512) and scales.stride(1) == 1
        check_slots(ReceivedSlots(codes, scales, counts, handle), comm.rank, 2, 4, "fp8_packed")

    threads(2, body)


def test_a_hook_receives_while_its_rank_goes_on() -> None:
    """Rank 1 makes its dispatch after rank 0 has got its own back, and rank 0 waits no earlier than in the hook."""
    called = threading.Event()

    def body(comm: antiphon.Communicator) -> None:
        buffer = deep_ep.Buffer(comm, low_latency_mode=True)
        x, ids, weights = inputs(comm.rank, 4)
        for calls in range(2):  # of which the first makes what calls need
            if calls and comm.rank == 1:
                assert called.wait(20)
            rows, counts, handle, _, hook = buffer.low_latency_dispatch(x, ids, M, 4, use_fp8=False, return_recv_hook=True)
            if calls and comm.rank == 0:
                called.set()
            assert hook is not None and isinstance(rows, Tensor)
            hook()
            check_slots(ReceivedSlots(rows, None, counts, handle), comm.rank, 2, 4, "bf16")
            hook()  # once more does nothing
        # A combine behind a dispatch whose hook nobody has called.
        rows, _, handle, _, first = buffer.low_latency_dispatch(x, ids, M, 4, use_fp8=False, return_recv_hook=True)
        assert first is not None and isinstance(rows, Tensor)
        first()
        made_rows = made(ReceivedSlots(rows, None, counts, handle), comm.rank, 4, 2)
        result, _, second = buffer.low_latency_combine(made_rows, ids, weights, handle, return_recv_hook=True)
        buffer.low_latency_dispatch(x, ids, M, 4, use_fp8=False)
        assert second is not None
        second()
        assert torch.equal(result, sums(comm.rank, 4))

    threads(2, body)


def test_a_hook_tells_of_a_rank_that_does_not_come() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = deep_ep.Buffer(comm, low_latency_mode=True)
        x, ids, _ = inputs(comm.rank, 4)
        buffer.low_latency_dispatch(x, ids, M, 4)
        if comm.rank == 0:
            *_, hook = buffer.low_latency_dispatch(x, ids, M, 4, return_recv_hook=True)
            hook()
        else:
            time.sleep(1.5)

    first, _ = outcomes(2, body, timeout=0.5)
    assert isinstance(first, TimeoutError) and "dispatch_to_slots" in str(first) and "ranks [1]" in str(first)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_waits_name_the_late_rank(late: int) -> None:
    begun = threading.Semaphore(0), threading.Semaphore(0)

    def body(comm: antiphon.Communicator) -> None:
        buffer = deep_ep.Buffer(comm, low_latency_mode=True)
        x, ids, weights = inputs(comm.rank, 6)
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, M, 6, use_fp8=False)
        waits = torch.full((3,), 7, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)

        def timed(turn: int, call: Callable[[], Any]) -> tuple[Any, int]:
            """What a call gives and its nanoseconds. The late rank comes when the others have been in it for a while."""
            if comm.rank == late:
                for _ in range(2):
                    assert begun[turn].acquire(timeout=20)
                time.sleep(0.2)
            begun[turn].release()
            start = time.monotonic_ns()
            return call(), time.monotonic_ns() - start

        (_, _, handle, _, _), dispatched = timed(
            0, lambda: buffer.low_latency_dispatch(x, ids, M, 6, use_fp8=False, dispatch_wait_recv_cost_stats=waits[0])
        )
        rows = handle.new_rows().zero_()
        _, combined = timed(
            1, lambda: buffer.low_latency_combine(rows, ids, weights, handle, combine_wait_recv_cost_stats=waits[1])
        )
        for own, measured, took in zip((7, 0), waits, (dispatched, combined), strict=True):
            assert measured[comm.rank] == own
            assert measured.sum() - 3 * own <= took
            if comm.rank != late:
                assert measured.argmax() == late and measured[late] > took / 2

    threads(3, body)


def without(rank: int, lost: int, experts: int) -> Tensor:
    """``sums`` of which the choices of a rank's experts are left out."""
    x, ids, weights = inputs(rank, experts)
    weights = weights.masked_fill(ids // 2 == lost, 0)
    result = torch.zeros(len(x), H)
    for k in range(K):
        rows = (x.float() * (ids[:, k : k + 1] + 1)).bfloat16().float()
        result = torch.where((ids[:, k : k + 1] >= 0) & (weights[:, k : k + 1] > 0), result + weights[:, k : k + 1] * rows, result)
    return result.bfloat16()


LEAVES = ["before dispatch", "before combine", "masked"]


def go_on_without(comm: antiphon.Communicator, device: torch.device, lost: int, leaves: str) -> None:
    world_size, experts = comm.world_size, 2 * comm.world_size
    buffer = deep_ep.Buffer(comm, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)
    x, ids, weights = (tensor.to(device) for tensor in inputs(comm.rank, experts))

    def dispatched() -> ReceivedSlots:
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, M, experts, use_fp8=False)
        assert isinstance(rows, Tensor)
        return ReceivedSlots(rows, None, counts, handle)

    def mask() -> list[int]:
        status = torch.full((world_size,), 7, dtype=torch.int32, device=device)
        buffer.low_latency_query_mask_buffer(status)
        return status.tolist()

    def combined(received: ReceivedSlots) -> Tensor:
        rows = made(on_host(received), comm.rank, experts, world_size).to(device)
        return buffer.low_latency_combine(rows, ids, weights, received.routes)[0].cpu()

    received = dispatched()
    check_slots(on_host(received), comm.rank, world_size, experts, "bf16")
    assert torch.equal(combined(received), sums(comm.rank, experts)) and mask() == [0] * world_size
    if leaves == "before combine":
        received = dispatched()
    if comm.rank == lost:
        return buffer.destroy()
    if leaves == "masked":
        buffer.low_latency_update_mask_buffer(lost, True)
        assert mask()[lost] == 1
    if leaves != "before combine":
        statistics = torch.zeros(2, dtype=torch.int32, device=device)
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, M, experts, statistics, use_fp8=False, return_recv_hook=True
        )
        assert hook is not None and isinstance(rows, Tensor)
        hook()
        received = ReceivedSlots(rows, None, counts, handle)
        for expert in range(2):
            chose = [source for source, _ in slots(world_size, experts, comm.rank * 2 + expert) if source != lost]
            assert counts[expert] == statistics[expert] == len(chose)
            assert (handle.layout_range[expert] & 0xFFFFFFFF).tolist() == [chose.count(rank) for rank in range(world_size)]
    assert torch.equal(combined(received), without(comm.rank, lost, experts))
    assert mask() == [int(rank == lost) for rank in range(world_size)]
    with pytest.raises(RuntimeError, match=f"rank {lost} does not take part any more"):
        buffer.low_latency_update_mask_buffer(lost, False)
    buffer.low_latency_clean_mask_buffer()
    assert mask()[lost] == 1
    assert torch.equal(combined(dispatched()), without(comm.rank, lost, experts))


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("lost", [0, 1])
def test_calls_go_on_without_a_lost_rank(lost: int, leaves: str) -> None:
    threads(3, lambda comm: go_on_without(comm, torch.device("cpu"), lost, leaves))


def test_arguments_of_slots_are_refused_with_their_numbers() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = deep_ep.Buffer(comm, low_latency_mode=True)
        x, ids, weights = inputs(0, 4)
        with pytest.raises(ValueError, match="5 tokens; num_max_dispatch_tokens_per_rank is 4"):
            buffer.low_latency_dispatch(x, ids, 4, 4)
        with pytest.raises(ValueError, match="3 experts cannot be divided among 2 ranks"):
            buffer.low_latency_dispatch(x, ids, M, 3)
        with pytest.raises(TypeError, match="x must be torch.bfloat16, not torch.float32"):
            buffer.low_latency_dispatch(x.float(), ids, M, 4)
        with pytest.raises(ValueError, match="rows of 64 elements, which must be a multiple of 128"):
            buffer.low_latency_dispatch(x[:, :64], ids, M, 4)
        with pytest.raises(ValueError, match="use_ue8m0 needs round_scale"):
            buffer.low_latency_dispatch(x, ids, M, 4, use_ue8m0=True)
        with pytest.raises(ValueError, match="async_finish or return_recv_hook, not both"):
            buffer.low_latency_dispatch(x, ids, M, 4, async_finish=True, return_recv_hook=True)
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, M, 4)
        with pytest.raises(ValueError, match="use_logfmt or zero_copy, not both"):
            buffer.low_latency_combine(handle.new_rows(), ids, weights, handle, use_logfmt=True, zero_copy=True)
        _, _, narrow, _, _ = buffer.low_latency_dispatch(x[:, :64], ids, M, 4, use_fp8=False)
        with pytest.raises(ValueError, match="rows of 64 elements, which must be a multiple of 128 for logfmt"):
            buffer.low_latency_combine(narrow.new_rows(), ids, weights, narrow, use_logfmt=True)
        with pytest.raises(ValueError, match="the format must be one of bf16, logfmt, not 'fp8'"):
            ExpertParallel(comm, 4, H).combine_from_slots(handle.new_rows(), ids, weights, handle, format="fp8")
        with pytest.raises(ValueError, match="zero_copy needs"):
            buffer.low_latency_combine(x, ids, weights, handle, zero_copy=True)
        with pytest.raises(ValueError, match=r"the rows must be of shape \[L, R·M, H\] = \[2, 12, 512\]"):
            buffer.low_latency_combine(x, ids, weights, handle)

    threads(2, body)


def test_the_pages_example_of_slots_runs() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "guide" / "moe.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1]

    def body(comm: antiphon.Communicator) -> None:
        names: dict[str, Any] = {
            "experts": ExpertParallel(comm, 4, H),
            "x": torch.ones(5, H).bfloat16(),
            "ids": torch.tensor([[0, 3]] * 5),
            "weights": torch.tensor([[0.25, 0.5]] * 5),
            "my_experts": lambda x, scales, counts: (x.float() * scales.repeat_interleave(128, 2)).bfloat16(),
        }
        exec(program, names)
        assert torch.allclose(names["x"].float(), torch.tensor(0.75))

    threads(2, body)


def on_host(received: ReceivedSlots) -> ReceivedSlots:
    """What was received, in host memory."""
    src_info, layout_range = (tensor.cpu() for tensor in received.routes[:2])
    handle = type(received.routes)(src_info, layout_range, *received.routes[2:])
    scales = None if received.scales is None else received.scales.cpu()
    return ReceivedSlots(received.x.cpu(), scales, received.counts.cpu(), handle)


@CHECKS
def slots_and_sums(comm: antiphon.Communicator, device: torch.device) -> None:
    experts = 2 * comm.world_size
    layer = ExpertParallel(comm, experts, H)
    x, ids, weights = (tensor.to(device) for tensor in inputs(comm.rank, experts))
    for format in FORMATS:
        received = layer.dispatch_to_slots(x, ids, max_tokens=M, format=format)
        check_slots(on_host(received), comm.rank, comm.world_size, experts, format)
        if format == "bf16":
            rows = made(on_host(received), comm.rank, experts, comm.world_size).to(device)
            result = layer.combine_from_slots(rows, ids, weights, received.routes)
            assert torch.equal(result.cpu(), sums(comm.rank, experts))
            small = (rows / 256).bfloat16()
            host = layer.dispatch_to_slots(*(tensor.cpu() for tensor in (x, ids)), max_tokens=M)
            expected = layer.combine_from_slots(small.cpu(), ids.cpu(), weights.cpu(), host.routes, format="logfmt")
            result = layer.combine_from_slots(small, ids, weights, received.routes, format="logfmt")
            assert torch.equal(result.cpu(), expected)


@CHECKS
def gradients(comm: antiphon.Communicator, device: torch.device) -> None:
    """Of ``sums`` to tokens and weights, to the precision of bfloat16."""
    experts = 2 * comm.world_size
    layer = ExpertParallel(comm, experts, H)
    x, ids, weights = (tensor.to(device) for tensor in inputs(comm.rank, experts))
    tokens, factors = x.clone().requires_grad_(), weights.clone().requires_grad_()
    received = layer.dispatch_to_slots(tokens, ids, max_tokens=M)
    of_expert = torch.arange(comm.rank * 2 + 1, comm.rank * 2 + 3, device=device).view(-1, 1, 1)
    result = layer.combine_from_slots((received.x * of_expert).bfloat16(), ids, factors, received.routes)
    given = torch.randn(result.shape, device=device).bfloat16()
    result.backward(given)
    scale = (weights * (ids + 1)).masked_fill(ids < 0, 0).sum(1, keepdim=True)
    assert tokens.grad is not None and torch.allclose(tokens.grad.float(), given.float() * scale, rtol=3e-2, atol=3e-2)
    products = (x.float() * given.float()).sum(1, keepdim=True) * (ids + 1)
    assert factors.grad is not None and torch.allclose(factors.grad, products.masked_fill(ids < 0, 0), rtol=1e-2, atol=2.0)


@CHECKS
def hooks(comm: antiphon.Communicator, device: torch.device) -> None:
    """Calls of two launches; the tokens are overwritten before the second, and a hook that nobody calls is called by the next."""
    buffer = deep_ep.Buffer(comm, low_latency_mode=True)
    x, ids, weights = (tensor.to(device) for tensor in inputs(comm.rank, 2 * comm.world_size))
    experts = 2 * comm.world_size
    for calls_hook in (True, False, True):
        tokens = x.clone()
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            tokens, ids, M, experts, use_fp8=False, return_recv_hook=True
        )
        assert hook is not None and isinstance(rows, Tensor)
        tokens.fill_(9)
        hook()
        received = on_host(ReceivedSlots(rows, None, counts, handle))
        check_slots(received, comm.rank, comm.world_size, experts, "bf16")
        buffer.get_next_low_latency_combine_buffer(handle)[:] = made(received, comm.rank, experts, comm.world_size).to(device)
        result, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, zero_copy=True, return_recv_hook=True)
        assert hook is not None
        if calls_hook:
            hook()
        else:
            buffer.low_latency_dispatch(x, ids, M, experts, use_fp8=False)
            hook()
        assert torch.equal(result.cpu(), sums(comm.rank, experts))


@CHECKS
def waits(comm: antiphon.Communicator, device: torch.device) -> None:
    buffer = deep_ep.Buffer(comm, low_latency_mode=True)
    experts = 2 * comm.world_size
    x, ids, _ = (tensor.to(device) for tensor in inputs(comm.rank, experts))
    buffer.low_latency_dispatch(x, ids, M, experts)
    measured = torch.zeros(comm.world_size, dtype=torch.int64, device=device)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.2)
    buffer.low_latency_dispatch(x, ids, M, experts, dispatch_wait_recv_cost_stats=measured)
    if comm.rank == 0:
        assert measured.argmax() == 1 and measured[0] == 0 and measured[1] > 50_000_000


@CHECKS
def beside_an_all_reduce(comm: antiphon.Communicator, device: torch.device) -> None:
    if device.type == "cpu":
        return
    experts = 2 * comm.world_size
    layer = ExpertParallel(comm, experts, H)
    x, ids, _ = (tensor.to(device) for tensor in inputs(comm.rank, experts))
    for received in harness.beside_an_all_reduce(comm, device, lambda: layer.dispatch_to_slots(x, ids, max_tokens=M)):
        check_slots(on_host(received), comm.rank, comm.world_size, experts, "bf16")


@CHECKS
def goes_on_without_a_lost_rank(comm: antiphon.Communicator, device: torch.device) -> None:
    for leaves in LEAVES:
        go_on_without(comm, device, comm.world_size - 1, leaves)


@CHECKS
def graphs(comm: antiphon.Communicator, device: torch.device) -> None:
    """A CUDA graph of both calls, replayed with other choices."""
    if device.type == "cpu":
        return
    layer = ExpertParallel(comm, 4, H)
    x, ids, weights = (tensor.to(device) for tensor in inputs(comm.rank, 4))
    layer.dispatch_to_slots(x, ids, max_tokens=M)  # makes what calls need
    shrinking = deep_ep.Buffer(comm, low_latency_mode=True, enable_shrink=True)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        shrinking.low_latency_dispatch(x, ids, M, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        received = layer.dispatch_to_slots(x, ids, max_tokens=M)
        result = layer.combine_from_slots(received.x, ids, weights, received.routes)
    for shift in range(4):
        ids.copy_((inputs(comm.rank, 4)[1] + shift) % 4)
        graph.replay()
        torch.cuda.synchronize()
        expected = torch.zeros(x.shape, device=device)
        for k in range(K):
            expected = expected + weights[:, k : k + 1] * x.float()
        assert torch.equal(result, expected.bfloat16())


@pytest.mark.parametrize("name", list(CHECKS))
@pytest.mark.parametrize("device, world_size", [("host", 2), pytest.param("cuda", 2, marks=pytest.mark.cuda)])
def test_on_processes(name: str, device: str, world_size: int) -> None:
    harness.expect(__name__, name, device, world_size)
