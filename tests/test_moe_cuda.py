"""antiphon.moe on CUDA tensors against the same calls on the host, whose bits they have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import antiphon
import harness
from antiphon.moe import ExpertParallel, deep_ep, fused_a2a
from harness import Checks
from test_moe import entries_of_dispatches

CHECKS = check = Checks()

Comm, Device = antiphon.Communicator, torch.device

H, K, EXPERTS = 256, 3, 8


def tokens_of(rank: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank brings, on the host: ragged numbers of tokens, with −1 among their choices."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    count = [300, 17, 0, 5][rank]
    x = torch.randn(count, H, generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS, (count, K), generator=generator)
    return x, ids, torch.rand(count, K, generator=generator)


def same(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None and expected is not None
    assert torch.equal(got.cpu(), expected), (got.cpu(), expected)


@check
def a_dispatch_enters_the_compiled_module_once_or_twice(comm: Comm, device: Device) -> None:
    entries_of_dispatches(comm, device)


@check
def rows_and_sums_have_the_hosts_bits(comm: Comm, device: Device) -> None:
    parallel = ExpertParallel(comm, EXPERTS, H)
    x, ids, weights = tokens_of(comm.rank)
    host = parallel.dispatch(x, ids, weights)
    gpu = parallel.dispatch(x.to(device), ids.to(device), weights.to(device))
    for name in ("x", "ids", "weights"):
        same(getattr(gpu, name), getattr(host, name))
    assert gpu.tokens_per_expert == host.tokens_per_expert and gpu.routes.num_received == host.routes.num_received
    for name in host.routes._fields:
        same(getattr(gpu.routes, name), getattr(host.routes, name))
    made = host.x * (comm.rank + 2)
    for bias in (None, x, (x, x * 2)):
        there = tuple(each.to(device) for each in bias) if isinstance(bias, tuple) else None if bias is None else bias.to(device)
        same(parallel.combine(made.to(device), gpu.routes, bias=there), parallel.combine(made, host.routes, bias=bias))


@check
def codes_take_their_scales_along(comm: Comm, device: Device) -> None:
    parallel = ExpertParallel(comm, EXPERTS, H)
    x, ids, weights = tokens_of(comm.rank)
    codes = x.float().to(torch.float8_e4m3fn)
    for scales in (torch.randn(len(x), H // 128), torch.arange(len(x), dtype=torch.int32).reshape(-1, 1)):
        host = parallel.dispatch(codes, ids, weights, scales=scales)
        gpu = parallel.dispatch(codes.to(device), ids.to(device), weights.to(device), scales=scales.to(device))
        same(gpu.x.view(torch.uint8), host.x.view(torch.uint8))
        same(gpu.scales, host.scales)


@check
def beside_an_all_reduce(comm: Comm, device: Device) -> None:
    parallel = ExpertParallel(comm, EXPERTS, H)
    inputs = tokens_of(comm.rank)
    host = parallel.dispatch(*inputs)
    sums = parallel.combine(host.x, host.routes)
    there = [tensor.to(device) for tensor in inputs]
    for capacity in (None, 1300):

        def call(capacity: int | None = capacity) -> tuple[Tensor, Tensor]:
            got = parallel.dispatch(*there, capacity=capacity)
            return got.x, parallel.combine(got.x, got.routes)

        for rows, combined in harness.beside_an_all_reduce(comm, device, call):
            same(rows[: len(host.x)], host.x)
            same(combined, sums)


@check
def rows_beyond_a_capacity_are_absent(comm: Comm, device: Device) -> None:
    parallel = ExpertParallel(comm, EXPERTS, H)
    x, ids, weights = tokens_of(comm.rank)
    for capacity in (40, 1000):
        host = parallel.dispatch(x, ids, weights, capacity=capacity)
        gpu = parallel.dispatch(x.to(device), ids.to(device), weights.to(device), capacity=capacity)
        kept = host.routes.num_received
        same(gpu.x[:kept], host.x[:kept])
        same(gpu.ids, host.ids)
        same(gpu.routes.recv_src_idx, host.routes.recv_src_idx)
        same(gpu.routes.overflow_flag, host.routes.overflow_flag)
        assert isinstance(gpu.tokens_per_expert, Tensor)
        assert gpu.tokens_per_expert.tolist() == host.tokens_per_expert
        ones = torch.ones(capacity, H).bfloat16()
        same(parallel.combine(ones.to(device), gpu.routes), parallel.combine(ones, host.routes))


def layer(parallel: ExpertParallel, x: Tensor, ids: Tensor, weights: Tensor, capacity: int | None) -> Tensor:
    received = parallel.dispatch(x, ids, weights, capacity=capacity)
    made = received.x * received.weights.sum(1, keepdim=True).to(received.x.dtype)
    if capacity is not None:
        made = made.masked_fill((received.ids < 0).all(1, keepdim=True), 0)
    return parallel.combine(made, received.routes, bias=x)


@check
def gradients_have_the_hosts_bits(comm: Comm, device: Device) -> None:
    parallel = ExpertParallel(comm, EXPERTS, H)
    for capacity in (None, 500):
        found = []
        for where in (torch.device("cpu"), device):
            x, ids, weights = (tensor.to(where) for tensor in tokens_of(comm.rank))
            x, weights = x.float().requires_grad_(), weights.requires_grad_()
            layer(parallel, x, ids, weights, capacity).square().sum().backward()
            found.append((x.grad, weights.grad))
        for got, expected in zip(*reversed(found), strict=True):
            assert got is not None and expected is not None
            torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-4)


@check
def the_fused_functions_on_streams(comm: Comm, device: Device) -> None:
    x, ids, weights = tokens_of(comm.rank)
    for is_async in (False, True):
        found: list[list[Any]] = []
        for where in (torch.device("cpu"), device):
            mine, probs = (tensor.detach().clone().to(where).requires_grad_() for tensor in (x, weights))
            rows, received_ids, received_probs, counts, handle = fused_a2a.fused_dispatch(
                mine, ids.to(where), probs, EXPERTS, comm, is_async, is_async
            )
            combined, _ = fused_a2a.fused_combine(rows * 2, comm, handle, is_async, is_async)
            ((combined.float() ** 2).sum() + (received_probs * 3).sum()).backward()
            found.append([rows, received_ids, received_probs, counts, combined, mine.grad, probs.grad])
        for got, expected in zip(found[1], found[0], strict=True):
            same(got, expected)


@check
def a_buffers_calls_and_its_stream(comm: Comm, device: Device) -> None:
    buffer = deep_ep.Buffer(comm, num_nvl_bytes=1 << 20)
    x, ids, weights = (tensor.to(device) for tensor in tokens_of(comm.rank))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    given = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    rows, _, _, counts, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **given)
    assert counts == handle.tokens_per_expert and buffer.get_comm_stream() != torch.cuda.current_stream()
    torch.cuda._sleep(10_000_000)
    late = x + 1  # the call comes behind it
    again, *_, event = buffer.dispatch(late, handle=handle, async_finish=True)
    event.current_stream_wait()
    same(again, (rows + 1).cpu())
    before = buffer.capture()
    there, *_, event = buffer.dispatch(
        late, handle=handle, previous_event=before, async_finish=True, allocate_on_comm_stream=True,
        config=deep_ep.Config(48),
    )  # fmt: skip
    event.current_stream_wait()
    same(there, again.cpu())
    with pytest.raises(ValueError, match="previous_event"):
        buffer.combine(rows, handle, allocate_on_comm_stream=True)
    combined, summed, _ = buffer.combine(rows, handle, topk_weights=torch.ones(len(rows), K, device=device))
    count = in_rank.sum(1, keepdim=True)
    same(combined, (x.float() * count).bfloat16().cpu())
    same(summed, count.expand(-1, K).float().cpu())


@check
def a_graph_has_the_capacity_form(comm: Comm, device: Device) -> None:
    parallel = ExpertParallel(comm, EXPERTS, H)
    x, ids, weights = (tensor.to(device) for tensor in tokens_of(comm.rank))

    def body() -> Tensor:
        return layer(parallel, x, ids, weights, 400)

    body()  # loads the kernels
    with pytest.raises(RuntimeError, match="capacity"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            parallel.dispatch(x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    for seed in range(1, 6):
        for tensor, new in zip((x, ids, weights), tokens_of(comm.rank, seed), strict=True):
            tensor.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        same(result, layer(parallel, *tokens_of(comm.rank, seed), 400))


@check
def what_is_refused(comm: Comm, device: Device) -> None:
    parallel = ExpertParallel(comm, EXPERTS, H)
    x, ids, weights = (tensor.to(device) for tensor in tokens_of(comm.rank))

    def refused(error: type[Exception], match: str, call: Callable[[], object]) -> None:
        with pytest.raises(error, match=match):
            call()

    refused(TypeError, "one device", lambda: parallel.dispatch(x, ids.cpu(), weights))
    refused(ValueError, "divided", lambda: ExpertParallel(comm, EXPERTS + 1, H))
    received = parallel.dispatch(x, ids, weights)
    refused(ValueError, r"\[N, H\]", lambda: parallel.combine(received.x.new_empty(1 + len(received.x), H), received.routes))
    refused(TypeError, "bf16", lambda: parallel.combine(received.x.double(), received.routes))
    buffer, most = deep_ep.Buffer(comm), torch.cuda.get_device_properties(device).multi_processor_count
    config = deep_ep.Config(most * 2)
    refused(ValueError, f"{most * 2} multiprocessors; kernels may use {most}", lambda: buffer.combine(received.x, received.routes, config=config))
    comm.barrier()


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_on_cuda(name: str, world_size: int) -> None:
    harness.expect("test_moe_cuda", name, "cuda", world_size)
