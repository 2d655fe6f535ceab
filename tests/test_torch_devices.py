"""The ``torch.distributed`` backend on host memory and on GPUs, by the same checks; test_torch_backend.py has the rest."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import antiphon.torch
import harness
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

Group, Device = dist.ProcessGroup, torch.device


#: What every rank runs: ``body(group, device)``.
check = harness.Checks()


def run_checks(device: str) -> harness.Outcomes:
    def call(body: Callable[..., None]) -> None:
        with harness.torch_group() as group:
            body(group, where)

    with harness.torch_world("antiphon"):
        where = harness.place(device, dist.get_rank())
        return check.run(call)


def inputs(group: Group, device: Device, dtype: torch.dtype = torch.float32, rows: int = 4) -> list[torch.Tensor]:
    count = rows * 3
    values = [(torch.arange(count) * (rank + 2)) % 7 - 3 for rank in range(group.size())]
    return [each.reshape(rows, 3).to(dtype).to(device) for each in values]


def reductions_of(xs: list[torch.Tensor]) -> dict[Any, torch.Tensor]:
    wide, op = torch.stack(xs).double(), dist.ReduceOp
    values = {op.SUM: wide.sum(0), op.AVG: wide.mean(0), op.PRODUCT: wide.prod(0), op.MIN: wide.amin(0), op.MAX: wide.amax(0)}
    return {each: value.to(xs[0].dtype) for each, value in values.items()}


@check
def all_reduce(group: Group, device: Device) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        xs = inputs(group, device, dtype)
        for op, wanted in reductions_of(xs).items():
            found = xs[group.rank()].clone()
            dist.all_reduce(found, op, group=group)
            torch.testing.assert_close(found, wanted)
            transposed = xs[group.rank()].clone().t()
            dist.all_reduce(transposed, op, group=group)
            torch.testing.assert_close(transposed, wanted.t())


@check
def all_gather(group: Group, device: Device) -> None:
    for dtype in (torch.float32, torch.int64, torch.bool):
        xs = inputs(group, device, dtype)
        found = [torch.zeros_like(x) for x in xs]
        dist.all_gather(found, xs[group.rank()], group=group)
        assert all(torch.equal(*pair) for pair in zip(found, xs))
        whole = torch.cat([torch.zeros_like(x) for x in xs])
        dist.all_gather_into_tensor(whole, xs[group.rank()], group=group)
        assert torch.equal(whole, torch.cat(xs))


@check
def reduce_scatter(group: Group, device: Device) -> None:
    xs = inputs(group, device, rows=2 * group.size())
    for op, wanted in reductions_of(xs).items():
        found = torch.zeros(2, 3, device=device)
        dist.reduce_scatter_tensor(found, xs[group.rank()], op, group=group)
        torch.testing.assert_close(found, wanted.chunk(group.size())[group.rank()])
        dist.reduce_scatter(found, list(xs[group.rank()].chunk(group.size())), op, group=group)
        torch.testing.assert_close(found, wanted.chunk(group.size())[group.rank()])


@check
def all_to_all(group: Group, device: Device) -> None:
    size, rank = group.size(), group.rank()
    xs = inputs(group, device, rows=2 * size)
    wanted = torch.cat([x.chunk(size)[rank] for x in xs])
    found = torch.zeros_like(wanted)
    dist.all_to_all_single(found, xs[rank], group=group)
    assert torch.equal(found, wanted)
    dist.all_to_all_single(found, xs[rank], [2] * size, [2] * size, group=group)
    assert torch.equal(found, wanted)
    parts = [torch.zeros(2, 3, device=device) for _ in range(size)]
    dist.all_to_all(parts, list(xs[rank].chunk(size)), group=group)
    assert torch.equal(torch.cat(parts), wanted)


@check
def broadcast_and_barrier(group: Group, device: Device) -> None:
    xs = inputs(group, device)
    for root in range(group.size()):
        found = xs[group.rank()].clone()
        dist.broadcast(found, group_src=root, group=group)
        assert torch.equal(found, xs[root])
        dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    assert work is not None and work.wait()


@check
def works_beside_the_caller(group: Group, device: Device) -> None:
    size, rank = group.size(), group.rank()
    for turn in range(20):
        x = torch.full((100_000,), float(rank + turn), device=device)
        work = dist.all_reduce(x, group=group, async_op=True)
        y = torch.full((1000,), float(rank), device=device)
        gathered = [torch.zeros_like(y) for _ in range(size)]
        second = dist.all_gather(gathered, y, group=group, async_op=True)
        del y  # its memory must not be given to others before the call is over
        z = torch.full((1000,), -1.0, device=device)
        assert work is not None and second is not None
        work.wait()
        assert x.eq(size * (size - 1) / 2 + size * turn).all()
        if turn % 2:
            dist.all_reduce(z, group=group)  # on the caller's stream, after what runs beside it
            assert z.eq(-size).all()
        second.wait(timedelta(seconds=10))
        assert second.is_completed() and second.exception() is None
        assert all(part.eq(each).all() for each, part in enumerate(gathered))
        future = dist.all_reduce(z.fill_(1.0), group=group, async_op=True).get_future()
        assert (future.then(lambda done: done.value()[0] + 1).wait() == size + 1).all()


@check
def calls_on_several_streams(group: Group, device: Device) -> None:
    if device.type == "cpu":
        return
    streams = [torch.cuda.Stream() for _ in range(3)]
    xs = [torch.full((50_000 * (turn % 5 + 1),), float(turn), device=device) for turn in range(30)]
    torch.cuda.synchronize()
    for turn, x in enumerate(xs):
        with torch.cuda.stream(streams[turn % 3]):
            dist.all_reduce(x, group=group, async_op=turn % 4 == 3)
    dist.barrier(group=group)
    for turn, x in enumerate(xs):
        assert x.eq(turn * group.size()).all()


@check
def all_reduce_in_a_graph(group: Group, device: Device) -> None:
    if device.type == "cpu":
        return
    x = torch.ones(1000, device=device)
    antiphon.torch.communicator(group).prepare_cuda()
    dist.all_reduce(x, group=group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x, group=group)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        work.wait()
    x.fill_(1.0)
    for _ in range(3):
        graph.replay()
    assert x.eq(float(group.size() ** 6)).all()


@check
def functional_collectives(group: Group, device: Device) -> None:
    xs = inputs(group, device)
    found = funcol.wait_tensor(funcol.all_reduce(xs[group.rank()], "sum", group))
    assert torch.equal(found, torch.stack(xs).sum(0))
    found = funcol.wait_tensor(funcol.all_gather_tensor(xs[group.rank()], 0, group))
    assert torch.equal(found, torch.cat(xs))
    size, xs = group.size(), inputs(group, device, rows=2 * group.size())
    found = funcol.reduce_scatter_tensor(xs[group.rank()], "sum", 0, group)
    assert torch.equal(found, torch.stack(xs).sum(0).chunk(size)[group.rank()])
    found = funcol.all_to_all_single(xs[group.rank()], None, None, group)
    assert torch.equal(found, torch.cat([x.chunk(size)[group.rank()] for x in xs]))
    assert torch.equal(funcol.broadcast(xs[group.rank()], 0, group), xs[0])
    pair = [xs[group.rank()], xs[group.rank()] + 1]
    for shift, found in enumerate(funcol.all_reduce_coalesced(pair, "max", group)):
        assert torch.equal(found, torch.stack(xs).amax(0) + shift)
    for shift, found in enumerate(funcol.all_gather_into_tensor_coalesced(pair, group)):
        assert torch.equal(found, torch.cat(xs) + shift)
    for shift, found in enumerate(funcol.reduce_scatter_tensor_coalesced(pair, "sum", [0, 0], group)):
        assert torch.equal(found, torch.stack(xs).sum(0).chunk(size)[group.rank()] + shift * size)


@check
def operators_by_the_name_of_a_group(group: Group, device: Device) -> None:
    name, xs = group.group_name, inputs(group, device)
    assert torch.equal(torch.ops.antiphon.all_reduce(xs[group.rank()], name), torch.stack(xs).sum(0))
    for turn in range(20):  # beside the group's own calls, for which nobody has waited yet
        x = torch.full((1_000_000,), float(turn), device=device)
        work = dist.all_reduce(x, group=group, async_op=True)
        found = torch.ops.antiphon.all_gather(xs[group.rank()], name)
        assert work is not None and work.wait()
        assert torch.equal(found, torch.cat(xs)) and x.eq(turn * group.size()).all()


@check
def the_name_of_a_destroyed_group_is_forgotten(group: Group, device: Device) -> None:
    other = dist.new_group(backend="antiphon")
    x, name = torch.ones(3, device=device), other.group_name
    assert torch.ops.antiphon.all_reduce(x, name).eq(group.size()).all()
    dist.destroy_process_group(other)
    with pytest.raises(ValueError, match="there is no group"):
        torch.ops.antiphon.all_reduce(x, name)


@check
def data_parallel_training(group: Group, device: Device) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    alone = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    alone.load_state_dict(module.state_dict())
    together = torch.nn.parallel.DistributedDataParallel(module, process_group=group)
    x = torch.randn(8 * group.size(), 8, device="cpu").to(device)
    for model, mine in ((together, x[group.rank() :: group.size()]), (alone, x)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(mine).square().mean().backward()
            optimizer.step()
    for mine, wanted in zip(module.parameters(), alone.parameters()):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


@check
def rooted_operations(group: Group, device: Device) -> None:
    size, rank, xs = group.size(), group.rank(), inputs(group, device)
    for root in range(size):
        found = xs[rank].clone()
        dist.reduce(found, group_dst=root, group=group)
        if rank == root:
            assert torch.equal(found, torch.stack(xs).sum(0))
        gathered = [torch.zeros_like(x) for x in xs] if rank == root else None
        dist.gather(xs[rank], gathered, group_dst=root, group=group)
        assert gathered is None or all(torch.equal(*pair) for pair in zip(gathered, xs))
        found = torch.zeros_like(xs[0])
        dist.scatter(found, [x + root for x in xs] if rank == root else None, group_src=root, group=group)
        assert torch.equal(found, xs[rank] + root)


@check
def lists_of_uneven_tensors(group: Group, device: Device) -> None:
    size, rank = group.size(), group.rank()
    parts = [torch.full((3 * each, 2), each + 1.0, device=device) for each in range(size)]
    found = [torch.zeros_like(part) for part in parts]
    dist.all_gather(found, parts[rank], group=group)
    assert all(torch.equal(*pair) for pair in zip(found, parts))
    mine = torch.zeros_like(parts[rank])
    dist.reduce_scatter(mine, [part + rank for part in parts], dist.ReduceOp.MAX, group=group)
    assert torch.equal(mine, parts[rank] + size - 1)
    sends, receives = [rank + to for to in range(size)], [source + rank for source in range(size)]
    x = torch.cat([torch.full((n,), 10 * rank + to, device=device) for to, n in enumerate(sends)])
    out = torch.zeros(sum(receives), dtype=x.dtype, device=device)
    dist.all_to_all_single(out, x, receives, sends, group=group)
    wanted = [torch.full((n,), 10 * source + rank, device=device) for source, n in enumerate(receives)]
    assert torch.equal(out, torch.cat(wanted))


@check
def messages(group: Group, device: Device) -> None:
    """Every rank sends before it receives, also more than is buffered."""
    size, rank = group.size(), group.rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (3, 2_000_000):
        x, out = torch.full((count,), float(rank), device=device), torch.zeros(count, device=device)
        sent, received = dist.isend(x, group_dst=after, group=group), dist.irecv(out, group_src=before, group=group)
        assert sent is not None and received is not None
        received.wait()
        assert out.eq(before).all()
        sent.wait()
        ops = [
            dist.P2POp(dist.isend, x + 1, group=group, group_peer=after),
            dist.P2POp(dist.irecv, out, group=group, group_peer=before),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert out.eq(before + 1).all()


@check
def a_pipeline(group: Group, device: Device) -> None:
    """Stages that hand activations on and gradients back, as pipeline schedules do, for several micro-batches."""
    size, rank = group.size(), group.rank()
    torch.manual_seed(0)
    stages = [torch.nn.Linear(4, 4).to(device) for _ in range(size)]
    batches = [torch.randn(2, 4).to(device) for _ in range(3)]
    stage, entered, left = stages[rank], list[torch.Tensor](), list[torch.Tensor]()
    for batch in batches:
        x = batch.clone() if rank == 0 else torch.zeros_like(batch)
        if rank > 0:
            dist.recv(x, group_src=rank - 1, group=group)
        entered.append(x.requires_grad_())
        left.append(torch.tanh(stage(x)))
        if rank < size - 1:
            dist.send(left[-1].detach(), group_dst=rank + 1, group=group)
    for x, y in zip(entered, left):
        gradient = torch.ones_like(y)
        if rank < size - 1:
            dist.recv(gradient, group_src=rank + 1, group=group)
        y.backward(gradient)
        if rank > 0:
            assert x.grad is not None
            dist.send(x.grad, group_dst=rank - 1, group=group)
    found = [parameter.grad for parameter in stage.parameters()]
    stage.zero_grad()
    for batch in batches:
        for each in stages:
            batch = torch.tanh(each(batch))
        batch.sum().backward()
    for mine, parameter in zip(found, stage.parameters()):
        torch.testing.assert_close(mine, parameter.grad)


@check
def distributed_tensors(group: Group, device: Device) -> None:
    mesh = DeviceMesh.from_group(group, device.type)
    size, rank = group.size(), group.rank()
    whole = torch.arange(4.0 * size * 3, device=device).reshape(4 * size, 3)
    for placement in (Shard(0), Shard(1), Replicate()):
        placed = distribute_tensor(whole, mesh, [placement])
        assert torch.equal(placed.full_tensor(), whole)
        assert torch.equal(placed.redistribute(placements=[Shard(0)]).to_local(), whole.chunk(size)[rank])
    partial = DTensor.from_local(whole + rank, mesh, [Partial()])
    assert torch.equal(partial.full_tensor(), whole * size + sum(range(size)))
    assert torch.equal(partial.redistribute(placements=[Shard(0)]).full_tensor(), whole * size + sum(range(size)))
    uneven = distribute_tensor(whole[: 2 * size + 1], mesh, [Shard(0)])
    assert torch.equal(uneven.full_tensor(), whole[: 2 * size + 1])


@check
def fully_sharded_training(group: Group, device: Device) -> None:
    def model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3)).to(device)

    alone, sharded = model(), model()
    mesh = DeviceMesh.from_group(group, device.type)
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    torch.manual_seed(1)
    x = torch.randn(4 * group.size(), 8).to(device)
    for network, mine in ((sharded, x[group.rank() :: group.size()]), (alone, x)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            network(mine).square().mean().backward()
            optimizer.step()
    for found, wanted in zip(sharded.parameters(), alone.parameters()):
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), wanted, rtol=1e-4, atol=1e-5)


@check
def what_is_not_served_says_so(group: Group, device: Device) -> None:
    if device.type == "cpu":
        return
    x, size = torch.ones(12, device=device), group.size()
    with pytest.raises(TypeError, match="cannot be reduced"):
        dist.all_reduce(x.int(), group=group)
    with pytest.raises(ValueError, match="tensors on cuda:. and on cpu in one call"):
        dist.all_gather_into_tensor(torch.ones(12 * size), x, group=group)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("device", harness.DEVICES)
@pytest.mark.parametrize("name", check)
def test_on(name: str, device: str, world_size: int) -> None:
    harness.need(device, world_size)
    check.expect(name, world_size, run_checks, device)
