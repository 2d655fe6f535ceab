"""The ``torch.distributed`` backend against plain torch on all ranks' inputs.

Starting ranks with torch takes seconds, so that one world runs all checks, each in a group of its own, and the tests
look up how a check went.
"""

import functools
import os
import time
import warnings
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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

NUMERIC = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8]
MOVED = [*NUMERIC, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.uint16]

Group = dist.ProcessGroup
#: What every rank runs: ``body(rank, world_size, group)``.
check = harness.Checks()


def run_checks() -> harness.Outcomes:
    def call(body: Callable[..., None]) -> None:
        with harness.torch_group() as group:
            body(group.rank(), group.size(), group)

    with harness.torch_world("antiphon"):
        return check.run(call)


def everybody(
    world_size: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4, 3)
) -> list[torch.Tensor]:
    """Each rank's input: small whole numbers, whose sums and products are exact in every type."""
    generator = torch.Generator().manual_seed(7)
    low = 0 if dtype in (torch.uint8, torch.uint16, torch.bool) else -3
    return [torch.randint(low, 4, shape, generator=generator).to(dtype) for _ in range(world_size)]


def reduced(tensors: list[torch.Tensor], op: Any) -> torch.Tensor:
    """The reference, in the widest type."""
    dtype = tensors[0].dtype
    wide = torch.stack(tensors).to(torch.float64 if dtype.is_floating_point else torch.int64)
    result = {
        dist.ReduceOp.SUM: lambda: wide.sum(0),
        dist.ReduceOp.PRODUCT: lambda: wide.prod(0),
        dist.ReduceOp.MIN: lambda: wide.amin(0),
        dist.ReduceOp.MAX: lambda: wide.amax(0),
        dist.ReduceOp.AVG: lambda: torch.div(
            wide.sum(0), len(tensors), rounding_mode=None if dtype.is_floating_point else "trunc"
        ),
    }[op]()
    return result.to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype is expected.dtype and found.shape == expected.shape, (found, expected)
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    assert torch.equal(*bits), (found, expected)


def raises(kind: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=text):
        call()


# Collectives


@check
def all_reduce_of_every_type_and_operator(rank: int, world: int, group: Group) -> None:
    op = dist.ReduceOp
    for dtype in NUMERIC:
        for each in (op.SUM, op.PRODUCT, op.MIN, op.MAX, op.AVG):
            inputs = everybody(world, dtype)
            found = inputs[rank].clone()
            dist.all_reduce(found, each, group=group)
            if each == op.AVG and dtype.is_floating_point:
                torch.testing.assert_close(found, reduced(inputs, each))
            else:
                same(found, reduced(inputs, each))


@check
def all_reduce_of_truth_values(rank: int, world: int, group: Group) -> None:
    op = dist.ReduceOp
    inputs = everybody(world, torch.bool)
    for each, expected in [
        (op.SUM, torch.stack(inputs).any(0)),
        (op.MAX, torch.stack(inputs).any(0)),
        (op.PRODUCT, torch.stack(inputs).all(0)),
        (op.MIN, torch.stack(inputs).all(0)),
    ]:
        found = inputs[rank].clone()
        dist.all_reduce(found, each, group=group)
        same(found, expected)
    raises(TypeError, "no ReduceOp.AVG", lambda: dist.all_reduce(inputs[rank], op.AVG, group=group))


@check
def reductions_of_complex_numbers(rank: int, world: int, group: Group) -> None:
    inputs = [tensor * (1 + 2j) for tensor in everybody(world, torch.complex64)]
    total = torch.stack(inputs).sum(0)
    found = inputs[rank].clone()
    dist.all_reduce(found, group=group)
    same(found, total)
    found = inputs[rank].clone()
    dist.reduce(found, group_dst=0, group=group)
    same(found, total if rank == 0 else inputs[rank])
    raises(TypeError, "complex", lambda: dist.reduce(found, 0, dist.ReduceOp.MAX, group=group))


@check
def a_sum_of_scaled_inputs(rank: int, world: int, group: Group) -> None:
    inputs = everybody(world)
    found, op = inputs[rank].clone(), dist._make_nccl_premul_sum(0.5)
    dist.all_reduce(found, op, group=group)
    same(found, torch.stack(inputs).mul(0.5).sum(0))
    whole = torch.cat([inputs[rank]] * world)
    dist.reduce_scatter_tensor(found, whole, op, group=group)
    same(found, torch.stack(inputs).mul(0.5).sum(0))
    same(whole, torch.cat([inputs[rank]] * world))


@check
def all_reduce_of_bits(rank: int, world: int, group: Group) -> None:
    op = dist.ReduceOp
    combine = {op.BAND: torch.bitwise_and, op.BOR: torch.bitwise_or, op.BXOR: torch.bitwise_xor}
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        inputs = everybody(world, dtype)
        for each, function in combine.items():
            found = inputs[rank].clone()
            dist.all_reduce(found, each, group=group)
            same(found, functools.reduce(function, inputs))
            whole = torch.cat([inputs[rank]] * world)
            dist.reduce_scatter_tensor(found, whole, each, group=group)
            same(found, functools.reduce(function, inputs))
    for dtype in (torch.float32, torch.float8_e4m3fn):
        tensor = torch.zeros(3, dtype=dtype)
        raises(TypeError, "combines the bits of integers", lambda: dist.all_reduce(tensor, op.BOR, group=group))


@check
def all_reduce_of_sparse_tensors(rank: int, world: int, group: Group) -> None:
    def of(rank: int) -> torch.Tensor:
        """Some rows, which overlap; one of them twice, and none of rank 0."""
        rows = torch.tensor([[rank, (rank + 1) % world, rank]] if rank else [[]], dtype=torch.int64)
        return torch.sparse_coo_tensor(rows, torch.arange(2.0 * rows.shape[1]).reshape(-1, 2) + rank, (world, 2))

    total = torch.stack([of(each).to_dense() for each in range(world)]).sum(0)
    for async_op in (False, True):
        found = of(rank)
        work = dist.all_reduce(found, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        assert found.is_sparse
        same(found.to_dense(), total)
    other = torch.zeros(3 + rank).to_sparse()
    raises(RuntimeError, "has a sparse tensor of", lambda: dist.all_reduce(other, group=group))
    raises(NotImplementedError, "sparse tensors with ReduceOp.MAX", lambda: dist.all_reduce(of(rank), dist.ReduceOp.MAX, group=group))
    raises(NotImplementedError, "sparse_csr tensor", lambda: dist.all_reduce(torch.eye(2).to_sparse_csr(), group=group))


@check
def types_without_arithmetic_are_refused_by_reductions(rank: int, world: int, group: Group) -> None:
    for dtype in (torch.int16, torch.float8_e4m3fn):
        tensor = torch.zeros(3, dtype=dtype)
        raises(TypeError, "cannot be reduced", lambda: dist.all_reduce(tensor, group=group))


@check
def broadcast_of_every_type(rank: int, world: int, group: Group) -> None:
    for dtype in MOVED:
        for root in range(world):
            inputs = everybody(world, dtype)
            found = inputs[rank].clone()
            dist.broadcast(found, group_src=root, group=group)
            same(found, inputs[root])


@check
def reduce_changes_the_root_alone(rank: int, world: int, group: Group) -> None:
    for root in range(world):
        inputs = everybody(world)
        found = inputs[rank].clone()
        dist.reduce(found, group_dst=root, op=dist.ReduceOp.MAX, group=group)
        same(found, reduced(inputs, dist.ReduceOp.MAX) if rank == root else inputs[rank])


@check
def all_gather_into_a_list(rank: int, world: int, group: Group) -> None:
    for dtype in MOVED:
        inputs = everybody(world, dtype)
        found = [torch.zeros_like(tensor) for tensor in inputs]
        dist.all_gather(found, inputs[rank], group=group)
        for mine, expected in zip(found, inputs):
            same(mine, expected)


@check
def all_gather_of_uneven_shapes(rank: int, world: int, group: Group) -> None:
    inputs = [torch.arange(5.0 * each) + each for each in range(world)]  # none of rank 0
    found = [torch.zeros_like(tensor) for tensor in inputs]
    dist.all_gather(found, inputs[rank], group=group)
    for mine, expected in zip(found, inputs):
        same(mine, expected)


@check
def all_gather_into_a_tensor(rank: int, world: int, group: Group) -> None:
    inputs = everybody(world)
    for expected in (torch.cat(inputs), torch.stack(inputs)):
        found = torch.zeros_like(expected)
        dist.all_gather_into_tensor(found, inputs[rank], group=group)
        same(found, expected)
    found = torch.zeros_like(torch.stack(inputs))
    found[rank] = inputs[rank]
    dist.all_gather_into_tensor(found, found[rank], group=group)  # in place
    same(found, torch.stack(inputs))


@check
def reduce_scatter_of_a_list(rank: int, world: int, group: Group) -> None:
    for rows in ([2] * world, list(range(world))):  # even, and uneven with nothing for rank 0
        lists = [[torch.full((n, 3), float(10 * r + i)) for i, n in enumerate(rows)] for r in range(world)]
        found = torch.zeros(rows[rank], 3)
        dist.reduce_scatter(found, lists[rank], group=group)
        same(found, torch.stack([of_rank[rank] for of_rank in lists]).sum(0))


@check
def reduce_scatter_of_a_tensor(rank: int, world: int, group: Group) -> None:
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        inputs = everybody(world, shape=(2 * world, 3))
        found = torch.zeros(2, 3)
        dist.reduce_scatter_tensor(found, inputs[rank], op, group=group)
        same(found, reduced(inputs, op).chunk(world)[rank])


@check
def all_to_all_of_lists(rank: int, world: int, group: Group) -> None:
    def sent(source: int, to: int) -> torch.Tensor:
        return torch.full((source, to + 1), float(10 * source + to))

    found = [torch.zeros_like(sent(source, rank)) for source in range(world)]
    dist.all_to_all(found, [sent(rank, to) for to in range(world)], group=group)
    for source, mine in enumerate(found):
        same(mine, sent(source, rank))


@check
def all_to_all_of_a_tensor(rank: int, world: int, group: Group) -> None:
    for dtype in MOVED:
        inputs = everybody(world, dtype, (2 * world, 3))
        found = torch.zeros_like(inputs[rank])
        dist.all_to_all_single(found, inputs[rank], group=group)
        same(found, torch.cat([tensor.chunk(world)[rank] for tensor in inputs]))
        dist.all_to_all_single(inputs[rank], inputs[rank], group=group)  # in place
        same(inputs[rank], found)


@check
def all_to_all_with_splits(rank: int, world: int, group: Group) -> None:
    rows = [[(source + to) % 3 for to in range(world)] for source in range(world)]  # some are 0
    inputs = [everybody(world, shape=(sum(rows[source]), 2))[source] for source in range(world)]
    receives = [rows[source][rank] for source in range(world)]
    found = torch.zeros(sum(receives), 2)
    dist.all_to_all_single(found, inputs[rank], receives, rows[rank], group=group)
    same(found, torch.cat([inputs[source].split(rows[source])[rank] for source in range(world)]))
    raises(ValueError, "splits", lambda: dist.all_to_all_single(found, found, [99] * world, [99] * world, group=group))


@check
def all_to_all_with_splits_on_one_rank(rank: int, world: int, group: Group) -> None:
    inputs = everybody(world, shape=(2 * world, 3))
    expected = torch.cat([tensor.chunk(world)[rank] for tensor in inputs])
    found, splits = torch.zeros_like(expected), [2] * world if rank == 0 else None
    dist.all_to_all_single(found, inputs[rank], splits, splits, group=group)
    same(found, expected)
    found = torch.zeros(6 * world)  # another shape, which is another size of rows
    dist.all_to_all_single(found, inputs[rank], [6] * world if rank == 0 else None, group=group)
    same(found, expected.reshape(-1))


@check
def gather_and_scatter(rank: int, world: int, group: Group) -> None:
    root, inputs = world - 1, everybody(world)
    found = [torch.zeros_like(tensor) for tensor in inputs] if rank == root else None
    dist.gather(inputs[rank], found, group_dst=root, group=group)
    for mine, expected in zip(found or [], inputs):
        same(mine, expected)
    back = torch.zeros_like(inputs[rank])
    dist.scatter(back, found, group_src=root, group=group)
    same(back, inputs[rank])


@check
def barriers(rank: int, world: int, group: Group) -> None:
    dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    assert work.wait()


@check
def coalesced_forms(rank: int, world: int, group: Group) -> None:
    pairs = [everybody(world), everybody(world, shape=(5,))]
    mine = [inputs[rank].clone() for inputs in pairs]
    dist.all_reduce_coalesced(mine, group=group)
    for found, inputs in zip(mine, pairs):
        same(found, torch.stack(inputs).sum(0))

    outputs = [torch.zeros_like(torch.cat(inputs)) for inputs in pairs]
    with dist._coalescing_manager(group, async_ops=True) as work:
        for found, inputs in zip(outputs, pairs):
            dist.all_gather_into_tensor(found, inputs[rank], group=group)
    work.wait()
    for found, inputs in zip(outputs, pairs):
        same(found, torch.cat(inputs))

    with dist._coalescing_manager(group):
        for found, whole in zip(mine, outputs):
            dist.reduce_scatter_tensor(found, whole, group=group)
    for found, inputs in zip(mine, pairs):
        same(found, inputs[rank] * world)

    lists = [[torch.zeros_like(inputs[each]) for inputs in pairs] for each in range(world)]
    dist.all_gather_coalesced(lists, [inputs[rank] for inputs in pairs], group=group)
    for each, of_rank in enumerate(lists):
        for found, inputs in zip(of_rank, pairs):
            same(found, inputs[each])

    from_root = [inputs[rank].clone() for inputs in pairs]
    dist._broadcast_coalesced(group, from_root, 1 << 20, 0)
    for found, inputs in zip(from_root, pairs):
        same(found, inputs[0])


@check
def objects(rank: int, world: int, group: Group) -> None:
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank}, group=group)
    assert gathered == [{"rank": each, "text": "x" * each} for each in range(world)]
    shared = ["from rank 0", 7] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, group_src=0, group=group)
    assert shared == ["from rank 0", 7]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"to {each}" for each in range(world)] if rank == 0 else None, 0, group=group)
    assert mine == [f"to {rank}"]
    on_root = [None] * world if rank == 0 else None
    dist.gather_object(rank, on_root, group_dst=0, group=group)
    assert on_root == (list(range(world)) if rank == 0 else None)


# Messages


@check
def messages(rank: int, world: int, group: Group) -> None:
    inputs, after, before = everybody(world), (rank + 1) % world, (rank - 1) % world
    found = torch.zeros_like(inputs[rank])
    if rank == 0:
        dist.send(inputs[0], group_dst=1, group=group)
    if rank == 1:
        assert dist.recv(found, group_src=0, group=group) is not None
        same(found, inputs[0])
    sent = dist.isend(inputs[rank], group_dst=after, group=group)
    received = dist.irecv(found, group_src=before, group=group)
    assert sent is not None and received is not None
    assert received.wait() and sent.wait()
    same(found, inputs[before])
    found.zero_()
    ring = [
        dist.P2POp(dist.isend, inputs[rank], group=group, group_peer=after),
        dist.P2POp(dist.irecv, found, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    same(found, inputs[before])


@check
def a_wait_with_a_timeout_can_be_repeated(rank: int, world: int, group: Group) -> None:
    found = torch.zeros(3)
    if rank == 0:
        work = dist.irecv(found, group_src=1, group=group)
        assert work is not None and not work.is_completed() and not work.is_success() and work.exception() is None
        raises(TimeoutError, "still under way", lambda: work.wait(timedelta(milliseconds=20)))
        future = work.get_future()
    dist.barrier(group=group)
    if rank == 1:
        dist.send(torch.ones(3), group_dst=0, group=group)
    if rank == 0:
        assert work.wait() and work.is_success() and work._source_rank() == 1
        same(found, torch.ones(3))
        assert future.wait() is work.result() or torch.equal(future.wait()[0], found)


@check
def a_destroyed_group_has_sent_what_was_started(rank: int, world: int, group: Group) -> None:
    other = dist.new_group(backend="antiphon")
    if rank == 0:
        for each in range(20):  # none of which is waited for; too many, and too large, not to wait for the receiver
            dist.isend(torch.full((20_000,), float(each)), group_dst=1, group=other)
    if rank == 1:
        time.sleep(0.2)
        for each in range(20):
            found = torch.zeros(20_000)
            dist.recv(found, group_src=0, group=other)
            same(found, torch.full((20_000,), float(each)))
    if rank == 0:
        dist.irecv(torch.zeros(1), group_src=1, group=other)  # which is not waited for
    dist.destroy_process_group(other)


@check
def works_of_messages_that_are_polled(rank: int, world: int, group: Group) -> None:
    if rank == 0:
        dist.send(torch.arange(6.0), group_dst=1, group=group)
    if rank == 1:
        found = torch.zeros(3, 2).t()
        polled(dist.irecv(found, group_src=0, group=group))
        same(found, torch.arange(6.0).view(2, 3))


# Work


@check
def works_and_futures(rank: int, world: int, group: Group) -> None:
    inputs = everybody(world)
    works = []
    for _ in range(5):
        found = inputs[rank].clone()
        works.append((found, dist.all_reduce(found, group=group, async_op=True)))
    futures = [work.get_future() for _, work in works]
    for (found, work), future in zip(works, futures):
        (result,) = future.wait()
        same(result, torch.stack(inputs).sum(0))
        assert result.data_ptr() == found.data_ptr() and work.wait() and work.is_success()
    doubled = works[0][1].get_future().then(lambda done: done.value()[0] * 2).wait()
    same(doubled, torch.stack(inputs).sum(0) * 2)


@check
def callbacks_that_wait(rank: int, world: int, group: Group) -> None:
    """For a future that comes later, for one of their own, and for one of torch's: none of them for ever."""
    inputs = everybody(world)
    expected = torch.stack(inputs).sum(0)
    for waits_for in range(3):
        if rank:
            time.sleep(0.1)  # so that nothing is over when rank 0 adds its callback
        works = [dist.all_reduce(inputs[rank].clone(), group=group, async_op=True) for _ in range(2)]
        first, second = (work.get_future() for work in works)

        def callback(done: Any) -> torch.Tensor:
            if waits_for == 0:
                return second.wait()[0]  # type: ignore[no-any-return]
            if waits_for == 1:
                work = dist.all_reduce(done.value()[0], group=group, async_op=True)
                return work.get_future().wait()[0]  # type: ignore[no-any-return]
            return torch.futures.collect_all([second]).wait()[0].value()[0]  # type: ignore[no-any-return]

        same(first.then(callback).wait(), expected * (world if waits_for == 1 else 1))


def polled(work: Any) -> None:
    """Sees a work through without a wait."""
    end = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.001)


@check
def outputs_of_works_that_are_polled(rank: int, world: int, group: Group) -> None:
    inputs = everybody(world)
    found = [torch.zeros_like(tensor) for tensor in inputs]
    polled(dist.all_gather(found, inputs[rank], group=group, async_op=True))
    for mine, expected in zip(found, inputs):
        same(mine, expected)
    transposed = inputs[rank].t().contiguous().t()
    polled(dist.all_reduce(transposed, group=group, async_op=True))
    same(transposed, torch.stack(inputs).sum(0))
    found = [torch.zeros_like(tensor) for tensor in inputs]
    polled(dist.all_to_all(found, [inputs[rank]] * world, group=group, async_op=True))
    for mine, expected in zip(found, inputs):
        same(mine, expected)


@check
def failed_works_that_are_polled(rank: int, world: int, group: Group) -> None:
    found = [torch.zeros(3 + rank) for _ in range(world)]
    work = dist.all_gather(found, torch.ones(3 + rank), group=group, async_op=True)
    polled(work)
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), RuntimeError)
    raises(RuntimeError, "all_gather", work.wait)
    for mine in found:
        same(mine, torch.zeros(3 + rank))


@check
def futures_asked_for_once_the_group_is_gone(rank: int, world: int, group: Group) -> None:
    other = dist.new_group(backend="antiphon")
    futures = antiphon.torch.work.Futures()
    for close in (lambda: None, futures.close, futures.close):  # before, after, and after that again
        close()
        found = torch.zeros(2)
        if rank == 0:
            work = dist.irecv(found, group_src=1, group=other)
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            assert not work.is_completed()
            futures.complete(work, done)
        dist.barrier(group=other)
        if rank == 1:
            dist.send(torch.ones(2), group_dst=0, group=other)
        if rank == 0:
            same(done.wait()[0], torch.ones(2))
    dist.destroy_process_group(other)


@check
def blocking_and_started_calls_are_one_sequence(rank: int, world: int, group: Group) -> None:
    inputs = everybody(world)
    found = [inputs[rank].clone() for _ in range(6)]
    works = [dist.all_reduce(each, group=group, async_op=(index + rank) % 2 == 0) for index, each in enumerate(found)]
    for each, work in zip(found, works):
        if work is not None:
            work.wait()
        same(each, torch.stack(inputs).sum(0))


# Tensors of all kinds


@check
def tensors_that_are_not_contiguous(rank: int, world: int, group: Group) -> None:
    for async_op in (False, True):

        def finish(work: Any) -> None:
            if async_op:
                work.wait()

        inputs = everybody(world)
        total, whole = torch.stack(inputs).sum(0), torch.cat(inputs)

        def strided(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.t().contiguous().t()

        found = strided(inputs[rank])
        assert not found.is_contiguous()
        finish(dist.all_reduce(found, group=group, async_op=async_op))
        same(found, total)
        found = strided(inputs[rank])
        finish(dist.broadcast(found, group_src=0, group=group, async_op=async_op))
        same(found, inputs[0])
        found = strided(torch.zeros_like(whole))
        finish(dist.all_gather_into_tensor(found, strided(inputs[rank]), group=group, async_op=async_op))
        same(found, whole)
        back = strided(torch.zeros_like(inputs[rank]))
        finish(dist.reduce_scatter_tensor(back, found, group=group, async_op=async_op))
        same(back, inputs[rank] * world)
        lists = [strided(torch.zeros_like(tensor)) for tensor in inputs]
        finish(dist.all_gather(lists, strided(inputs[rank]), group=group, async_op=async_op))
        for mine, expected in zip(lists, inputs):
            same(mine, expected)
        grid = torch.arange(world * 6.0).reshape(world, 6)
        found = strided(torch.zeros(world, 6))
        finish(dist.all_to_all_single(found, strided(grid), group=group, async_op=async_op))
        same(found, grid[rank].expand(world, 6))


@check
def views_that_only_promise_to_negate(rank: int, world: int, group: Group) -> None:
    conjugate = torch.full((2,), 1 + 2j).conj()
    negative = conjugate.imag
    assert negative.is_neg()
    found = torch.zeros(2 * world)
    dist.all_gather_into_tensor(found, negative, group=group)
    same(found, torch.full((2 * world,), -2.0))


def lazy(values: torch.Tensor) -> list[torch.Tensor]:
    """Views of these values over memory with others: conjugate, negative, both, and not contiguous either."""
    return [
        values.conj().resolve_conj().conj(),
        torch._neg_view(-values),
        torch._neg_view(-values.conj().resolve_conj()).conj(),
        values.t().conj().resolve_conj().conj().t(),
    ]


@check
def outputs_that_only_promise_to_conjugate(rank: int, world: int, group: Group) -> None:
    inputs = [tensor * (1 + 2j) for tensor in everybody(world, torch.complex64)]
    total, whole, nothing = torch.stack(inputs).sum(0), torch.cat(inputs), torch.zeros_like(inputs[0])
    assert [(each.is_conj(), each.is_neg()) for each in lazy(total)] == [
        (True, False),
        (False, True),
        (True, True),
        (True, False),
    ]

    def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.equal(found.resolve_conj().resolve_neg(), expected), (found, expected)

    # Methods of the group are called where torch's functions refuse conjugates.
    for kind in range(4):

        def mine() -> torch.Tensor:
            return lazy(inputs[rank])[kind]

        def empty(like: torch.Tensor) -> torch.Tensor:
            return lazy(torch.zeros_like(like))[kind]

        equal(mine(), inputs[rank])
        for op, expected in ((dist.ReduceOp.SUM, total), (dist._make_nccl_premul_sum(0.5), total * 0.5)):
            options = dist.AllreduceOptions()
            options.reduceOp = op
            polled(group.allreduce([found := mine()], options))
            equal(found, expected)
        dist.reduce(found := mine(), group_dst=0, group=group)
        equal(found, total if rank == 0 else inputs[rank])
        group.broadcast([found := mine()], dist.BroadcastOptions()).wait()  # of rank 0
        equal(found, inputs[0])
        group._allgather_base(found := empty(whole), mine()).wait()
        equal(found, whole)
        dist.reduce_scatter_tensor(back := empty(nothing), found, group=group)
        equal(back, inputs[rank] * world)
        dist.reduce_scatter(back := empty(nothing), [mine()] * world, group=group)
        equal(back, total)
        uneven = [torch.zeros(each, 3, dtype=torch.complex64) + (each + 1j) for each in range(world)]
        ours = [lazy(tensor)[kind] for tensor in uneven]
        dist.reduce_scatter(back := empty(uneven[rank]), ours, group=group)
        equal(back, uneven[rank] * world)
        for of_ranks in (inputs, uneven):
            gathered = [empty(tensor) for tensor in of_ranks]
            group.allgather([gathered], [lazy(of_ranks[rank])[kind]]).wait()
            for each, expected in zip(gathered, of_ranks):
                equal(each, expected)
        gathered = [empty(nothing) for _ in inputs]
        dist.gather(mine(), gathered if rank == 1 else None, group_dst=1, group=group)
        for each, expected in zip(gathered if rank == 1 else [], inputs):
            equal(each, expected)


@check
def parameters(rank: int, world: int, group: Group) -> None:
    inputs = everybody(world)
    leaf = torch.nn.Parameter(inputs[rank].clone())
    dist.broadcast(leaf, group_src=0, group=group)
    same(leaf, inputs[0])
    dist.all_reduce(leaf, group=group, async_op=True).wait()
    same(leaf, inputs[0] * world)
    strided = torch.nn.Parameter(inputs[rank].clone().t())
    dist.all_reduce(strided, group=group)
    same(strided, torch.stack(inputs).sum(0).t())
    result = leaf * 2  # has a history
    dist.all_reduce(result, group=group)
    same(result, inputs[0] * world * 2 * world)


@check
def nothing_at_all(rank: int, world: int, group: Group) -> None:
    empty = torch.zeros(0, 3)
    dist.all_reduce(empty, group=group)
    dist.broadcast(empty, group_src=0, group=group)
    dist.all_gather_into_tensor(torch.zeros(0, 3), empty, group=group)
    dist.all_gather([torch.zeros(0, 3) for _ in range(world)], empty, group=group)
    dist.reduce_scatter_tensor(torch.zeros(0, 3), empty, group=group)
    dist.all_to_all_single(torch.zeros(0, 3), empty, group=group)
    dist.reduce(empty, group_dst=0, group=group)


@check
def scalars(rank: int, world: int, group: Group) -> None:
    found = torch.tensor(float(rank))
    dist.all_reduce(found, group=group)
    same(found, torch.tensor(float(sum(range(world)))))
    gathered = torch.zeros(world)
    dist.all_gather_into_tensor(gathered, torch.tensor(float(rank)), group=group)
    same(gathered, torch.arange(float(world)))


# Groups


@check
def the_group_says_what_it_is(rank: int, world: int, group: Group) -> None:
    assert dist.get_backend() == dist.get_backend(group) == "antiphon"
    assert (group.rank(), group.size(), group.name()) == (rank, world, "antiphon")
    assert group.group_name and group.group_name != dist.group.WORLD.group_name
    assert str(rank) in repr(group)


@check
def a_group_lends_its_communicator(rank: int, world: int, group: Group) -> None:
    comm = antiphon.torch.communicator(group)
    assert (comm.rank, comm.world_size, comm.timeout) == (rank, world, 60.0)
    same(comm.all_reduce(torch.ones(3)), torch.full((3,), float(world)))
    assert antiphon.torch.communicator() is antiphon.torch.communicator(dist.group.WORLD) is not comm
    gloo = dist.new_group(backend="gloo")
    raises(ValueError, '"gloo", not "antiphon"', lambda: antiphon.torch.communicator(gloo))
    dist.destroy_process_group(gloo)


@check
def subgroups(rank: int, world: int, group: Group) -> None:
    pair = dist.new_group([world - 2, world - 1], backend="antiphon")
    if rank >= world - 2:
        found = torch.tensor([float(rank)])
        dist.all_reduce(found, group=pair)
        assert found.item() == 2 * world - 3
        dist.broadcast(found, src=world - 1, group=pair)  # a global rank
        dist.destroy_process_group(pair)
    else:
        raises(ValueError, "is this process in it", lambda: antiphon.torch.communicator(pair))


@check
def subgroups_name_the_ranks_of_the_world(rank: int, world: int, group: Group) -> None:
    """And hold no descriptor."""
    held = len(os.listdir("/proc/self/fd"))
    pairs = [dist.new_group([world - 2, world - 1], backend="antiphon", timeout=timedelta(seconds=2)) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) < held + 3
    if rank == world - 2:
        raises(TimeoutError, rf"ranks \[1\] of 2 in the group, \[{world - 1}\] of the world", lambda: dist.barrier(pairs[0]))
    dist.barrier(group)


@check
def groups_come_and_go(rank: int, world: int, group: Group) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(open("/proc/self/maps").readlines())

    def come_and_go() -> None:
        new = dist.new_group(backend="antiphon")
        work = dist.all_reduce(torch.ones(1000), group=new, async_op=True)
        work.get_future().wait()
        dist.destroy_process_group(new)

    for _ in range(3):
        come_and_go()
    descriptors, mappings = held()
    for _ in range(50):
        come_and_go()
    for _ in range(50):  # a lost connection is closed in the background
        now = held()
        if now[0] <= descriptors and now[1] <= mappings + 10:  # malloc's arenas vary
            return
        time.sleep(0.1)
    raise AssertionError(f"{descriptors} descriptors and {mappings} mappings became {now}")


# Errors


@check
def what_is_not_supported_says_so(rank: int, world: int, group: Group) -> None:
    tensor = torch.ones(2, dtype=torch.int32)
    for what, call in {
        "all_reduce of a tensor on device meta": lambda: dist.all_reduce(tensor.to("meta"), group=group),
        "broadcast of a torch.sparse_coo tensor": lambda: dist.broadcast(tensor.to_sparse(), 0, group=group),
        "broadcast of a tensor on device meta": lambda: dist.broadcast(tensor.to("meta"), 0, group=group),
        "all_reduce of 2 tensors": lambda: group.allreduce([tensor, tensor]),
        "monitored_barrier": lambda: group.monitored_barrier(timedelta(1)),
        "merge_remote_group": lambda: group.merge_remote_group(None, 2, timedelta(1)),
        "pg_options": lambda: dist.new_group(backend="antiphon", pg_options=object()),
    }.items():
        raises(NotImplementedError, f"antiphon: {what}.* is not supported", call)


@check
def ranks_that_disagree_all_hear_of_it(rank: int, world: int, group: Group) -> None:
    mismatch = r"all_reduce\(\d × f32, sum\)"
    raises(RuntimeError, mismatch, lambda: dist.all_reduce(torch.ones(3 + rank), group=group))
    other = dist.new_group(backend="antiphon")
    work = dist.all_reduce(torch.ones(3 + rank), group=other, async_op=True)
    raises(RuntimeError, mismatch, work.wait)
    assert isinstance(work.exception(), RuntimeError) and not work.is_success()
    raises(RuntimeError, type(work.exception()).__name__, work.get_future().wait)


@check
def ranks_that_pass_other_types_hear_of_it(rank: int, world: int, group: Group) -> None:
    """Also of types that are only moved, and have the same size."""
    for mine, other, names in [
        (torch.int16, torch.uint16, r"\d × [iu]16"),
        (torch.bool, torch.uint8, r"\d × (bool|u8)"),
        (torch.complex64, torch.float64, r"\d × (complex64|f64)"),
        (torch.float8_e4m3fn, torch.float8_e5m2, r"\d × float8_e"),
    ]:
        fresh = dist.new_group(backend="antiphon")
        tensor = torch.zeros(4, dtype=other if rank else mine)
        raises(RuntimeError, names, lambda: fresh._allgather_base(tensor.repeat(world), tensor).wait())
        dist.destroy_process_group(fresh)


@check
def a_timeout_can_be_changed(rank: int, world: int, group: Group) -> None:
    before = antiphon.torch.communicator(group).timeout
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), group)
    assert antiphon.torch.communicator(group).timeout == 0.3 and before == 60.0
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=0.3)
    if rank == 0:
        start = time.monotonic()
        raises(TimeoutError, "timed out", lambda: dist.barrier(group))
        assert time.monotonic() - start < 20
    dist.barrier()
    with warnings.catch_warnings(record=True):  # others are as before
        gloo = dist.new_group(backend="gloo")
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=9), gloo)
        dist.destroy_process_group(gloo)


@check
def a_late_rank_hears_of_its_own_call(rank: int, world: int, group: Group) -> None:
    group.set_timeout(timedelta(seconds=0.3))
    if rank == 0:
        raises(TimeoutError, r"all_reduce\(3 × f32, sum\) timed out", lambda: dist.all_reduce(torch.ones(3), group=group))
        dist.barrier()
        return
    dist.barrier()
    raises(RuntimeError, r"^all_reduce\(3 × f32, sum\) was aborted: rank 0 .*gave up", lambda: dist.all_reduce(torch.ones(3), group=group))


@check
def an_abort_ends_all_waits(rank: int, world: int, group: Group) -> None:
    work = group.recv([torch.zeros(1)], (rank + 1) % world, 0)
    if rank == 0:
        group.abort()
    raises(antiphon.AbortedError, "rank 0 .*called abort", work.wait)
    raises(antiphon.AbortedError, "rank 0 .*called abort", lambda: dist.barrier(group))
    left = antiphon.torch.communicator(group).shrink()
    assert left.world_size == world
    left.close()


@check
def a_group_splits(rank: int, world: int, group: Group) -> None:
    ranks_of = [[*range(world - 1)], [world - 1]]
    mine = ranks_of[rank == world - 1]
    part = group.split_group(mine, timedelta(seconds=7), None, f"part of {mine}", "a part")
    assert (part.rank(), part.size(), part.group_name) == (mine.index(rank), len(mine), f"part of {mine}")
    assert antiphon.torch.communicator(part).timeout == 7
    dist.all_reduce(found := torch.tensor([rank]), group=part)
    assert found.item() == sum(mine)
    backwards = group.split_group([1, 0], None, None, "two", None)
    assert (backwards is None) == (rank > 1) and (backwards is None or backwards.rank() == 1 - rank)


# Messages


@check
def messages_go_by_their_tags(rank: int, world: int, group: Group) -> None:
    """In whatever order they are received, beyond what a ring of packets holds."""
    sizes = {1: 3, 2: 300_000, 3: 0, 4: 5}
    if rank == 0:
        works = [dist.isend(torch.full((size,), float(tag)), 1, group, tag) for tag, size in sizes.items()]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in (4, 2, 3, 1):
            found = torch.zeros(sizes[tag])
            assert dist.recv(found, 0, group, tag) == 0
            same(found, torch.full((sizes[tag],), float(tag)))
    raises(ValueError, "tag -1", lambda: dist.isend(torch.ones(1), (rank + 1) % world, group, tag=-1))


@check
def messages_come_from_any_rank(rank: int, world: int, group: Group) -> None:
    if rank:
        for tag in (0, 7):
            dist.send(torch.tensor([rank]), 0, group, tag)
        return
    for tag in (7, 0):
        senders = []
        for _ in range(world - 1):
            found = torch.zeros(1, dtype=torch.int64)
            senders.append(dist.recv(found, None, group, tag))
            assert found.item() == senders[-1]
        assert sorted(senders) == list(range(1, world))


# Profilers


@check
def profilers_see_calls(rank: int, world: int, group: Group) -> None:
    tensor, whole = torch.ones(4, 3), torch.ones(4 * world, 3)
    with torch.profiler.profile(record_shapes=True) as profiler:
        dist.all_reduce(tensor, group=group)
        dist.all_gather_into_tensor(whole, tensor, group=group, async_op=True).wait()
        dist.barrier(group)
        work = dist.isend(tensor, (rank + 1) % world, group)
        dist.recv(tensor, (rank - 1) % world, group)
        work.wait()
    events = {event.name: event for event in profiler.events() if event.name.startswith("antiphon:")}
    for name in ("all_reduce", "all_gather", "send", "recv"):
        event = events[f"antiphon:{name}"]
        assert event.input_shapes[0] == [4, 3] and event.kwinputs["bytes"] == 48, name
        assert event.kwinputs["group"] == (group.group_desc or group.group_name)
    assert "antiphon:all_gather:async" in events and "antiphon:all_reduce:async" not in events
    assert events["antiphon:barrier"].kwinputs["bytes"] == 0


@check
def tools_see_ranges_of_nvtx(rank: int, world: int, group: Group) -> None:
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(antiphon.torch.events, "NVTX", True)
        patch.setattr(torch.cuda.nvtx, "range_push", seen.append)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
        dist.all_reduce(torch.ones(5), group=group)
    name = group.group_desc or group.group_name
    assert seen == [f"antiphon:all_reduce (20 bytes, group {name})", "end"]


# What is built on it


def placed(mesh: Any, placement: Any, rank: int, world: int) -> tuple[DTensor, torch.Tensor]:
    """A distributed tensor, and the whole of it."""
    inputs = everybody(world, shape=(2 * world, world))
    if isinstance(placement, Partial):
        return DTensor.from_local(inputs[rank], mesh, [placement]), torch.stack(inputs).sum(0)
    return distribute_tensor(inputs[0], mesh, [placement]), inputs[0]


@check
def dtensors_move_between_all_placements(rank: int, world: int, group: Group) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for source in (Shard(0), Shard(1), Replicate(), Partial()):
        for target in (Shard(0), Shard(1), Replicate()):
            tensor, whole = placed(mesh, source, rank, world)
            found = tensor.redistribute(placements=[target])
            same(found.full_tensor(), whole)
            same(found.to_local(), whole.chunk(world, target.dim)[rank] if isinstance(target, Shard) else whole)


@check
def dtensors_multiply(rank: int, world: int, group: Group) -> None:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    x, weight = everybody(world, shape=(3, 2 * world))[0], everybody(world, shape=(2 * world, 5))[0]
    product = distribute_tensor(x, mesh["tp"], [Shard(1)]) @ distribute_tensor(weight, mesh["tp"], [Shard(0)])
    same(product.full_tensor(), x @ weight)


def chain(x: torch.Tensor, group: Group, world: int) -> torch.Tensor:
    """Every functional collective, one after the other."""
    x = funcol.all_reduce(x, "sum", group)
    x = funcol.all_gather_tensor(x * 2, 0, group)
    x = funcol.reduce_scatter_tensor(x + 1, "sum", 0, group)
    x = funcol.all_to_all_single(x, None, None, group)
    x = funcol.broadcast(x, 0, group)
    first, second = funcol.all_reduce_coalesced([x, x + 1], "avg", group)
    first, second = funcol.all_gather_into_tensor_coalesced([first, second], group)
    first, second = funcol.reduce_scatter_tensor_coalesced([first, second], "max", [0, 0], group)
    return first * second / world


def chain_alone(inputs: list[torch.Tensor]) -> torch.Tensor:
    """What the chain gives on every rank, as a plain computation."""
    world = len(inputs)
    x = (torch.stack(inputs).sum(0) * 2 + 1) * world  # equal on all ranks
    x = torch.cat([x.chunk(world)[0]] * world)  # of rank 0, which got everybody's first block
    return x * (x + 1) / world


@check
def functional_collectives(rank: int, world: int, group: Group) -> None:
    inputs = everybody(world, shape=(2 * world, 3))
    torch.testing.assert_close(chain(inputs[rank], group, world), chain_alone(inputs))


@check
def functional_collectives_compiled(rank: int, world: int, group: Group) -> None:
    inputs = everybody(world, shape=(2 * world, 3))
    compiled = torch.compile(functools.partial(chain, group=group, world=world), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs[rank]), chain_alone(inputs))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def legacy(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        return x + 1

    same(legacy(inputs[rank].clone()), torch.stack(inputs).sum(0) + 1)


@check
def exchange_of_init_works_over_a_group(rank: int, world: int, group: Group) -> None:
    with antiphon.init(group=group) as comm:
        assert comm.exchange_objects(rank) == list(range(world))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", check)
def test_torch(name: str, world_size: int) -> None:
    check.expect(name, world_size, run_checks)
