"""antiphon.moe: dispatch and combine by expert on CUDA tensors against the same calls on the host, whose bits they have."""

from typing import Any

import pytest
import torch
from torch import Tensor

import antiphon
import harness
from antiphon.moe import ExpertParallel, deep_ep, fused_a2a
from harness import Checks

CHECKS = check = Checks()

Comm, Device = antiphon.Communicator, torch.device

H, LOCAL = 256, 4


def tokens_of(rank: int, world: int, seed: int = 0, local: int = LOCAL) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank brings, on the host: ragged numbers of tokens."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    count = [300, 17, 0, 5][rank]
    x = torch.randn(count, H, generator=generator).bfloat16()
    routing_map = torch.rand(count, local * world, generator=generator) < 0.3
    return x, routing_map, torch.rand(count, local * world, generator=generator)


def same(got: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(got.cpu(), expected), (got.cpu(), expected)
    else:
        assert got == expected


@check
def rows_and_sums_have_the_hosts_bits(comm: Comm, device: Device) -> None:
    few = [(LOCAL, multiple, capacity) for multiple, capacity in ((1, None), (16, None), (16, 256), (16, 1600))]
    for local, multiple, capacity in [*few, (200, 16, None), (1024, 1, None), (1024, 16, 4096)]:
        parallel = ExpertParallel(comm, local * comm.world_size, H)
        x, routing_map, probs = tokens_of(comm.rank, comm.world_size, local=local)
        options: dict[str, Any] = {"pad_multiple": multiple, "capacity": capacity, "max_tokens": 300}
        host = parallel.dispatch_by_expert(x, routing_map, probs, **options)
        gpu = parallel.dispatch_by_expert(x.to(device), routing_map.to(device), probs.to(device), **options)
        for name in ("x", "probs", "rows_per_expert"):
            same(getattr(gpu, name), getattr(host, name))
        arrived = len(host.routes.dense_to_expert_map)
        for name in host.routes._fields:
            mine, expected = getattr(gpu.routes, name), getattr(host.routes, name)
            same(mine[:arrived] if name in ("local_expert_routing_map", "dense_to_expert_map") else mine, expected)
        made = torch.randn(host.x.shape, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
        sums = parallel.combine_by_expert(made.to(device), gpu.routes)
        same(sums, parallel.combine_by_expert(made, host.routes))


@check
def beside_an_all_reduce(comm: Comm, device: Device) -> None:
    parallel = ExpertParallel(comm, LOCAL * comm.world_size, H)
    inputs = tokens_of(comm.rank, comm.world_size)
    for capacity in (None, 1600):
        options: dict[str, Any] = {"pad_multiple": 16, "capacity": capacity, "max_tokens": 300}
        host = parallel.dispatch_by_expert(*inputs, **options)
        sums = parallel.combine_by_expert(host.x, host.routes)
        there = [tensor.to(device) for tensor in inputs]

        def call(there: list[Tensor] = there, options: dict[str, Any] = options) -> tuple[Tensor, Tensor]:
            got = parallel.dispatch_by_expert(*there, **options)
            return got.x, parallel.combine_by_expert(got.x, got.routes)

        for rows, combined in harness.beside_an_all_reduce(comm, device, call):
            same(rows, host.x)
            same(combined, sums)


@check
def the_fused_functions_and_their_gradients(comm: Comm, device: Device) -> None:
    x, routing_map, probs = tokens_of(comm.rank, comm.world_size)
    for capacity in (None, 512):
        found: list[list[Any]] = []
        for where in (torch.device("cpu"), device):
            mine, weights = (tensor.detach().clone().to(where).requires_grad_() for tensor in (x, probs))
            rows, row_probs, _, per_expert, handle = fused_a2a.hybrid_ep_dispatch(
                mine, routing_map.to(where), weights, comm, LOCAL, 24, 24, capacity, 16
            )
            sums = fused_a2a.hybrid_ep_combine(rows * 2, handle, capacity, 16)
            ((sums.float() ** 2).sum() + (row_probs * 3).sum()).backward()
            found.append([rows, row_probs, per_expert, handle[-1], sums, mine.grad, weights.grad])
        for got, expected in zip(found[1], found[0], strict=True):
            same(got.detach(), expected.detach())


@check
def the_functions_over_nccl_ep_and_their_gradients(comm: Comm, device: Device) -> None:
    x, routing_map, probs = tokens_of(comm.rank, comm.world_size)
    weights, ids = (probs * routing_map).topk(2, 1)
    for capacity in (None, 512):
        found: list[list[Any]] = []
        fused_a2a.nccl_ep_finalize()
        fused_a2a.ensure_nccl_ep_bootstrapped(comm, LOCAL * comm.world_size, 300, capacity, H, 2)
        for where in (torch.device("cpu"), device):
            buffer = fused_a2a.new_nccl_ep_buffer(2, 300, capacity, H, LOCAL, 16)
            mine, given = (tensor.detach().clone().to(where).requires_grad_() for tensor in (x, weights))
            rows, per_expert, row_weights = fused_a2a.nccl_ep_dispatch(buffer, mine, ids.to(where), given)
            sums = fused_a2a.nccl_ep_combine(buffer, rows * 2, len(x))
            ((sums.float() ** 2).sum() + (row_weights * 3).sum()).backward()
            found.append([rows, row_weights, per_expert, buffer.total_recv_tokens, sums, mine.grad, given.grad])
        for got, expected in zip(found[1], found[0], strict=True):
            same(got.detach(), expected.detach())
    fused_a2a.nccl_ep_finalize()


@check
def a_buffers_rows_by_token(comm: Comm, device: Device) -> None:
    buffer = deep_ep.HybridEPBuffer(comm, H, 300, LOCAL)
    x, routing_map, probs = tokens_of(comm.rank, comm.world_size)
    codes = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    scales = torch.randn(len(x), H // 128)
    for tokens in (x, codes):
        results = []
        for where in (torch.device("cpu"), device):
            given = {"hidden": tokens, "scaling_factor": scales, "routing_map": routing_map, "probs": probs}
            rows, row_probs, row_scales, handle = buffer.dispatch(**{name: one.to(where) for name, one in given.items()})
            sums, sum_probs = buffer.combine(rows.bfloat16(), row_probs, handle)
            results.append([rows, row_probs, row_scales, *handle[:6], sums, sum_probs])
        for got, expected in zip(results[1], results[0], strict=True):
            same(got, expected)


@check
def a_graph_has_the_capacity_form(comm: Comm, device: Device) -> None:
    parallel = ExpertParallel(comm, LOCAL * comm.world_size, H)
    x, routing_map, probs = (tensor.to(device) for tensor in tokens_of(comm.rank, comm.world_size))

    def layer(x: Tensor, routing_map: Tensor, probs: Tensor) -> list[Tensor]:
        got = parallel.dispatch_by_expert(x, routing_map, probs, pad_multiple=16, capacity=480, max_tokens=300)
        assert got.probs is not None
        y = parallel.combine_by_expert((got.x.float() * got.probs[:, None]).bfloat16(), got.routes)
        return [got.x, got.probs, got.rows_per_expert, got.routes.overflow_flag, y]

    layer(x, routing_map, probs)  # loads the kernels
    with pytest.raises(RuntimeError, match="capacity"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            parallel.dispatch_by_expert(x, routing_map, probs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layer(x, routing_map, probs)
    for seed in range(1, 6):
        inputs = tokens_of(comm.rank, comm.world_size, seed)
        for tensor, new in zip((x, routing_map, probs), inputs, strict=True):
            tensor.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(results, layer(*inputs), strict=True):
            same(got, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_on_cuda(name: str, world_size: int) -> None:
    harness.expect("test_moe_by_expert_cuda", name, "cuda", world_size)
