"""The operators ``torch.ops.antiphon``, eager and compiled, on host memory and on GPUs."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import antiphon.torch
import harness
import pytest
import torch
from antiphon._core import operations
from harness import Checks

CHECKS = check = Checks()

Comm, Device = antiphon.Communicator, torch.device
ops = torch.ops.antiphon


def layer(x: torch.Tensor, group: str) -> tuple[torch.Tensor, ...]:
    """All operators, with something before and after each that a compiler may fuse or move."""
    doubled = x * 2
    ops.all_reduce_(doubled, group)  # whose result is read below
    total = ops.all_reduce(x.t(), group, "max") + 1  # not contiguous
    gathered = ops.all_gather(x, group).sum(0)
    scattered = ops.reduce_scatter(ops.all_gather(x, group), group)
    mixed = ops.all_to_all(ops.all_gather(x, group), group)
    return doubled + 1, total, gathered, scattered, mixed


def expected(world: int, rank: int, device: Device) -> tuple[torch.Tensor, ...]:
    xs = [x_of(each, device) for each in range(world)]
    total = torch.stack(xs).sum(0)
    largest, mixed = torch.stack(xs).amax(0), torch.cat([xs[rank]] * world)
    return total * 2 + 1, largest.t() + 1, torch.cat(xs).sum(0), xs[rank] * world, mixed


def x_of(rank: int, device: Device) -> torch.Tensor:
    return (torch.arange(12.0, device=device).reshape(4, 3) + 1) * (rank + 1)


@check
def eager(comm: Comm, device: Device) -> None:
    group = antiphon.torch.ops.register(comm)
    for found, wanted in zip(layer(x_of(comm.rank, device), group), expected(comm.world_size, comm.rank, device)):
        assert torch.equal(found, wanted)


@check
def compiled_by_aot_eager(comm: Comm, device: Device) -> None:
    compiled(comm, device, "aot_eager")


@check
def compiled_by_inductor(comm: Comm, device: Device) -> None:
    compiled(comm, device, "inductor")


def compiled(comm: Comm, device: Device, backend: str) -> None:
    torch._dynamo.reset()
    group = antiphon.torch.ops.register(comm, f"of {backend}")
    program = torch.compile(layer, fullgraph=True, backend=backend)
    if device.type == "cuda":
        comm.prepare_cuda(ops=["sum", "max"])
    for _ in range(3):
        found = program(x_of(comm.rank, device), group)
        for mine, wanted in zip(found, expected(comm.world_size, comm.rank, device)):
            torch.testing.assert_close(mine, wanted)


# These operators have no gradient, and refuse a tensor that requires one.
def in_place(x: torch.Tensor, group: str) -> torch.Tensor:
    x = x.detach() + 1
    ops.all_reduce_(x, group=group, op="max")
    return x


def from_the_root(x: torch.Tensor, group: str) -> torch.Tensor:
    x = x.detach() + 1
    ops.broadcast_(x, group, root=1)
    return x


def norm(x: torch.Tensor, group: str) -> torch.Tensor:
    return ops.all_reduce_rms_norm(x.detach(), group)[0]  # type: ignore[no-any-return]


def halves(x: torch.Tensor, group: str) -> torch.Tensor:
    half = [x.shape[0] // 2] * 2
    return ops.all_to_all_v(x, half, half, group)  # type: ignore[no-any-return]


#: A call of every operator, on 2 ranks.
CALLS: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "all_reduce_": in_place,
    "all_reduce": lambda x, group: ops.all_reduce(x, group),  # type: ignore[no-any-return]
    "all_gather": lambda x, group: ops.all_gather(x, group),  # type: ignore[no-any-return]
    "reduce_scatter": lambda x, group: ops.reduce_scatter(x, group),  # type: ignore[no-any-return]
    "all_to_all": lambda x, group: ops.all_to_all(x, group),  # type: ignore[no-any-return]
    "all_gather_v": lambda x, group: ops.all_gather_v(x, [x.shape[0]] * 2, group),  # type: ignore[no-any-return]
    "all_to_all_v": halves,
    "broadcast_": from_the_root,
    "shard_dim_all_to_all": lambda x, group: ops.shard_dim_all_to_all(x, 0, 1, group),  # type: ignore[no-any-return]
    "broadcast": lambda x, group: ops.broadcast(x, group),  # type: ignore[no-any-return]
    "scatter": lambda x, group: ops.scatter(x, group),  # type: ignore[no-any-return]
    "all_reduce_rms_norm": norm,
}


def both_orders(x: torch.Tensor, y: torch.Tensor, group: str, reverse: bool) -> list[torch.Tensor]:
    """Every operator twice. The results are used in the order of the calls, or the other way round."""
    results = [call(tensor, group) for call in CALLS.values() for tensor in (y, x)]
    return [result.sum() for result in (reversed(results) if reverse else results)]


@check
def calls_keep_their_order(comm: Comm, device: Device) -> None:
    group = antiphon.torch.ops.register(comm)
    for dynamic, has_gradients in (False, False), (True, False), (False, True):
        x = torch.arange(32.0, device=device).reshape(4, 8).cos()
        y = (x * (10 + comm.rank)).requires_grad_(has_gradients)
        wanted = both_orders(x, y.detach(), group, False)
        torch._dynamo.reset()
        program = torch.compile(both_orders, fullgraph=True, dynamic=dynamic)
        found = program(x, y * 1, group, reverse=comm.rank == 1)
        found = found[::-1] if comm.rank == 1 else found
        for name, mine, other in zip([name for name in CALLS for _ in "yx"], found, wanted):
            torch.testing.assert_close(mine.detach(), other, msg=lambda text: f"{name}, {dynamic=}, {has_gradients=}: {text}")


def others(x: torch.Tensor, group: str) -> tuple[torch.Tensor, ...]:
    """The operators whose parts are uneven, or which have a root, on 2 ranks."""
    mine, row = x[: x.shape[0] - 1], torch.cat([x, x * 10])
    gathered = ops.all_gather_v(mine, [x.shape[0] - 1, x.shape[0] - 1], group)
    mixed = ops.all_to_all_v(row, [x.shape[0], x.shape[0]], [x.shape[0], x.shape[0]], group)
    rooted = ops.broadcast(x, group, 1), ops.scatter(row, group, 1)
    return gathered, mixed, *rooted


def unused(x: torch.Tensor, group: str) -> torch.Tensor:
    """Unused results, around one that is used."""
    ops.all_reduce(x, group)
    ops.all_gather(x, group)
    ops.reduce_scatter(x, group)
    mixed = ops.all_to_all(x, group)
    ops.all_reduce_(x * 3, group)
    return mixed  # type: ignore[no-any-return]


@check
def uneven_and_rooted_operators(comm: Comm, device: Device) -> None:
    group, xs = antiphon.torch.ops.register(comm), [x_of(rank, device) for rank in range(2)]
    rows, me = [torch.cat([x, x * 10]) for x in xs], slice(4 * comm.rank, 4 * comm.rank + 4)
    wanted = (
        torch.cat([x[:3] for x in xs]),
        torch.cat([row[me] for row in rows]),
        xs[1],
        rows[1][me],
    )
    torch._dynamo.reset()
    for program in others, torch.compile(others, fullgraph=True, dynamic=True):
        for found, expected in zip(program(xs[comm.rank], group), wanted, strict=True):
            assert torch.equal(found, expected)


@check
def calls_that_nobody_uses_are_kept(comm: Comm, device: Device) -> None:
    group, x = antiphon.torch.ops.register(comm), x_of(comm.rank, device)
    wanted = torch.cat([x_of(rank, device).chunk(comm.world_size)[comm.rank] for rank in range(comm.world_size)])
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        program = torch.compile(unused, fullgraph=True, backend=backend)
        call = program if comm.rank else unused  # ranks disagree if one of the two lacks a call
        assert torch.equal(call(x, group), wanted)
        comm.barrier()  # which another call of a rank would meet


@check
def other_dimensions_are_sharded(comm: Comm, device: Device) -> None:
    group, world = antiphon.torch.ops.register(comm), comm.world_size
    whole = torch.arange(3.0 * world * 2 * world * 5, device=device).reshape(3 * world, 2 * world, 5)
    mine = whole.chunk(world, 0)[comm.rank]
    assert torch.equal(ops.shard_dim_all_to_all(mine, 0, 1, group), whole.chunk(world, 1)[comm.rank])
    assert torch.equal(ops.shard_dim_all_to_all(whole.chunk(world, 1)[comm.rank], 1, 0, group), mine)
    with pytest.raises(ValueError, match="5 along 2 cannot be divided among 2 ranks"):
        ops.shard_dim_all_to_all(mine, 0, 2, group)
    with pytest.raises(ValueError, match="dimensions 1 and 1 of 3"):
        ops.shard_dim_all_to_all(mine, 1, 1, group)


@check
def names_of_groups(comm: Comm, device: Device) -> None:
    name = antiphon.torch.ops.register(comm, "mine")
    assert antiphon.torch.ops.register(comm, "mine") == name
    assert antiphon.torch.ops.register(comm) != antiphon.torch.ops.register(comm)
    other = comm.split(0)
    with pytest.raises(ValueError, match="'mine' is the name of <antiphon.Communicator"):
        antiphon.torch.ops.register(other, "mine")
    with pytest.raises(ValueError, match="no group 'nobody' of antiphon"):
        ops.all_reduce(torch.ones(1, device=device), "nobody")


def test_the_order_of_every_operator_is_tested() -> None:
    """Here, and in ``test_trtllm_family`` those of ``antiphon.comm``. Two are ordered by the same definition and used elsewhere:
    ``mixed_comm`` needs a handler of process groups, and ``all_reduce_fused`` is what lowering puts into a program."""
    names = [name.removeprefix("antiphon::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("antiphon::")]
    elsewhere = {"all_reduce_fused", "mixed_comm"}
    fused = {"allreduce_fusion", "moe_allreduce_fusion", "moe_finalize_allreduce_fusion", "custom_all_reduce"}
    mine = {name for name in names if not name.startswith(("_", "trtllm_"))}
    assert mine - elsewhere == set(CALLS)
    assert {name.removeprefix("trtllm_") for name in names if name.startswith("trtllm_")} <= fused
    assert {name.removeprefix("_ordered_") for name in names if name.startswith("_ordered_")} >= mine


@pytest.mark.parametrize("device", harness.DEVICES)
@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str, device: str) -> None:
    harness.expect("test_ops", name, device, 2)


def arguments(row: tuple[str, str, str, bool, str | None], x: torch.Tensor, group: str) -> tuple[object, ...]:
    """Of an operation of the table, for a world of one."""
    parts = (row[1], row[2]).count("parts")
    return (x, *[[x.shape[0]]] * parts, group)


@pytest.mark.parametrize("row", [row for row in operations() if hasattr(ops, row[0])], ids=lambda row: row[0])
@pytest.mark.parametrize("device", harness.DEVICES)
def test_torch_finds_no_fault_with_an_operation_of_the_table(row: tuple[str, str, str, bool, str | None], device: str) -> None:
    harness.need(device, 1)
    with tempfile.TemporaryDirectory() as folder:
        with antiphon.init(rank=0, world_size=1, path=Path(folder) / "world") as comm:
            x = torch.ones(4, 4, device="cpu" if device == "host" else "cuda:0")
            group = antiphon.torch.ops.register(comm)
            torch.library.opcheck(getattr(ops, row[0]).default, arguments(row, x, group))


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "host") for name in ("all_reduce_", "broadcast_", "all_reduce_rms_norm")),
        pytest.param("all_reduce_", "cuda", marks=pytest.mark.cuda),
    ],
)
def test_torch_finds_no_fault_with_an_operator(name: str, device: str) -> None:
    harness.need(device, 1)
    with tempfile.TemporaryDirectory() as folder:
        with antiphon.init(rank=0, world_size=1, path=Path(folder) / "world") as comm:
            x = torch.ones(4, 4, device="cpu" if device == "host" else "cuda:0")
            torch.library.opcheck(getattr(ops, name).default, (x, antiphon.torch.ops.register(comm)))


@pytest.mark.cuda
def test_a_fused_operator_on_gpus_is_for_two_ranks_or_more() -> None:
    harness.need("cuda", 1)
    with tempfile.TemporaryDirectory() as folder:
        with antiphon.init(rank=0, world_size=1, path=Path(folder) / "world") as comm:
            group = antiphon.torch.ops.register(comm)
            with pytest.raises(ValueError, match="all_reduce_fused on CUDA needs 2 ranks or more"):
                ops.all_reduce_rms_norm(torch.ones(4, 4, device="cuda:0"), group)
