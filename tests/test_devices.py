"""The collectives on host memory and on GPUs: the same calls, the same names, the same bits."""

from typing import Any

import pytest
import torch

import antiphon
import harness
from antiphon.comm import create_shared_buffer, free_shared_buffer, pack_strided_memory
from harness import Checks

CHECKS = check = Checks()

Comm, Device = antiphon.Communicator, torch.device

REDUCED = [torch.float32, torch.float16, torch.bfloat16]
MOVED = [*REDUCED, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
OPS = ["sum", "prod", "min", "max", "avg"]


def input_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Whole numbers from -3 to 3, other ones on every rank; sums and products of few are exact in every type."""
    count = torch.Size(shape).numel()
    values = torch.arange(count) * (rank + 2) % 7 - 3
    if dtype in (torch.uint8, torch.bool):
        values = values.abs()
    return values.reshape(shape).to(dtype).to(device)


def inputs(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> list[torch.Tensor]:
    return [input_of(rank, shape, dtype, device) for rank in range(comm.world_size)]


def reduced(tensors: list[torch.Tensor], op: str = "sum") -> torch.Tensor:
    wide = torch.stack(tensors).double()
    results = {"sum": wide.sum(0), "prod": wide.prod(0), "min": wide.amin(0), "max": wide.amax(0), "avg": wide.mean(0)}
    return results[op].to(tensors[0].dtype)


def same(found: Any, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape and found.device == expected.device
    assert torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)))


@check
def all_reduce_of_every_type_operator_and_size(comm: Comm, device: Device) -> None:
    for dtype in REDUCED:
        for op in OPS:
            for count in (1, 7, 4096, 100_003):
                xs = inputs(comm, (count,), dtype, device)
                found = comm.all_reduce(xs[comm.rank], op)
                if op == "avg":
                    torch.testing.assert_close(found, reduced(xs, op))
                else:
                    same(found, reduced(xs, op))


@check
def all_reduce_has_the_bits_of_the_host(comm: Comm, device: Device) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    for dtype in REDUCED:
        for count in (33, 70_001, 1 << 20):
            x = torch.randn(count, generator=generator).to(dtype)
            for algorithm in (None, "one-shot", "two-shot"):
                same(comm.all_reduce(x.to(device), algorithm=algorithm).cpu(), comm.all_reduce(x))
            same(comm.all_reduce(x.to(device), "avg").cpu(), comm.all_reduce(x, "avg"))


@check
def moving_elements_of_any_type(comm: Comm, device: Device) -> None:
    world, rank = comm.world_size, comm.rank
    for dtype in MOVED:
        for rows in (1, 3, 5000):
            xs = inputs(comm, (rows, 2), dtype, device)
            same(comm.all_gather(xs[rank]), torch.cat(xs))
            xs = inputs(comm, (world * rows, 2), dtype, device)
            same(comm.all_to_all(xs[rank]), torch.cat([x.chunk(world)[rank] for x in xs]))
            for root in range(world):
                same(comm.broadcast(xs[rank].clone(), root), xs[root])


@check
def reduce_scatter_of_every_type(comm: Comm, device: Device) -> None:
    world, rank = comm.world_size, comm.rank
    for dtype in REDUCED:
        for op in ("sum", "max"):
            for rows in (1, 3, 5000):
                xs = inputs(comm, (world * rows, 3), dtype, device)
                same(comm.reduce_scatter(xs[rank], op), reduced(xs, op).chunk(world)[rank])


@check
def in_place_and_into_a_given_tensor(comm: Comm, device: Device) -> None:
    world, rank = comm.world_size, comm.rank
    xs = inputs(comm, (6, 5), torch.float32, device)
    x, out = xs[rank].clone(), torch.zeros_like(xs[rank])
    assert comm.all_reduce(x, out=out) is out
    same(out, reduced(xs))
    same(x, xs[rank])
    assert comm.all_reduce(x, out=x) is x
    same(x, reduced(xs))

    whole = torch.zeros(6 * world, 5, device=device)
    own = whole[6 * rank : 6 * rank + 6]
    own.copy_(xs[rank])
    assert comm.all_gather(own, out=whole) is whole
    same(whole, torch.cat(xs))

    rows = torch.cat([xs[rank]] * world)
    own = rows[6 * rank : 6 * rank + 6]
    comm.reduce_scatter(rows, out=own)
    same(own, reduced(xs))

    blocks = inputs(comm, (2 * world,), torch.float32, device)
    mixed = blocks[rank].clone()
    comm.all_to_all(mixed, out=mixed)
    same(mixed, torch.cat([x.chunk(world)[rank] for x in blocks]))

    out = torch.zeros(6, 5, device=device)
    assert comm.broadcast(xs[rank] if rank == 1 else None, 1, out=out) is out
    same(out, xs[1])


@check
def odd_shapes(comm: Comm, device: Device) -> None:
    for shape in ((), (0,), (2, 0, 3), (1, 1, 1)):
        x = torch.full(shape, comm.rank + 1.0, device=device)
        same(comm.all_reduce(x), torch.full(shape, sum(range(1, comm.world_size + 1)) * 1.0, device=device))
        first = shape[0] if shape else 1
        assert comm.all_gather(x).shape == (comm.world_size * first, *shape[1:])


@check
def many_calls_of_every_kind_in_a_row(comm: Comm, device: Device) -> None:
    world, rank = comm.world_size, comm.rank
    for turn in range(200):
        xs = inputs(comm, (world * (1 + turn * 37 % 50), 3), torch.float32, device)
        which = turn % 4
        if which == 0:
            same(comm.all_reduce(xs[rank]), reduced(xs))
        elif which == 1:
            same(comm.all_gather(xs[rank]), torch.cat(xs))
        elif which == 2:
            same(comm.reduce_scatter(xs[rank]), reduced(xs).chunk(world)[rank])
        else:
            same(comm.all_to_all(xs[rank]), torch.cat([x.chunk(world)[rank] for x in xs]))


@check
def groups_of_some(comm: Comm, device: Device) -> None:
    alone = comm.split(comm.rank)
    assert alone is not None
    with alone:
        x = torch.arange(5.0, device=device)
        same(alone.all_reduce(x, "avg"), x)
        same(alone.all_gather(x), x)
        same(alone.reduce_scatter(x, out=torch.zeros_like(x)), x)
    with_key = comm.split(0, key=-comm.rank)
    assert with_key is not None
    with with_key:
        gathered = with_key.all_gather(torch.tensor([comm.rank], device=device))
        assert gathered.tolist() == list(range(comm.world_size))[::-1]


@check
def barriers(comm: Comm, device: Device) -> None:
    for _ in range(10):
        comm.barrier(device=device.index)
    comm.check()


@check
def shared_buffers(comm: Comm, device: Device) -> None:
    rank, world = comm.rank, comm.world_size
    pointers = create_shared_buffer(16 * world, comm, device="cpu" if device.type == "cpu" else device.index)
    assert len(set(pointers)) == world

    def copy_of(each: int) -> torch.Tensor:
        where = -1 if device.type == "cpu" else device.index
        return pack_strided_memory(pointers[each], 16, 16, world, torch.float32, where)

    assert copy_of(rank).eq(0).all()
    settle(comm, device)
    for each in range(world):
        copy_of(each)[rank].fill_(rank + 10 * each)
    settle(comm, device)
    assert copy_of(rank)[:, 0].tolist() == [each + 10 * rank for each in range(world)]
    with pytest.raises(ValueError, match="not the address"):
        free_shared_buffer([pointer + 16 for pointer in pointers], comm)
    free_shared_buffer(pointers, comm)
    with pytest.raises(ValueError, match="not the address"):
        free_shared_buffer(pointers, comm)


def settle(comm: Comm, device: Device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    comm.barrier()


@check
def wrong_arguments_do_no_harm(comm: Comm, device: Device) -> None:
    x = torch.zeros(4, 4, device=device)
    for call, kind, text in (
        (lambda: comm.all_reduce(x.t()), ValueError, "not contiguous"),
        (lambda: comm.all_reduce(x, out=x[:2]), ValueError, "overlap"),
        (lambda: comm.all_reduce(x, out=x.double()), TypeError, "the output is float64"),
        (lambda: comm.all_reduce(x.short()), TypeError, "int16 cannot be reduced"),
        (lambda: comm.reduce_scatter(torch.zeros(comm.world_size + 1, device=device)), ValueError, "cannot be divided"),
        (lambda: comm.broadcast(x, 99), ValueError, "root rank 99"),
    ):
        with pytest.raises(kind, match=text):
            call()
    same(comm.all_reduce(torch.ones(4, device=device)), torch.full((4,), float(comm.world_size), device=device))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("device", harness.DEVICES)
@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str, device: str, world_size: int) -> None:
    harness.expect("test_devices", name, device, world_size)


