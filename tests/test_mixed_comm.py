"""``antiphon.comm.mixed_comm`` against plain torch on all ranks' inputs.

Starting ranks with torch takes seconds, so that one world of each backend runs all checks, and the tests look up how a check
went.
"""

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import harness
import needs
import pytest
import ranks
import torch
import torch.distributed as dist

import antiphon.compat
from antiphon.comm import MixedCommHandler, MixedCommMode, MixedCommOp, ParallelInfo, run_mixed_comm
from antiphon.comm.abstractions import CommBackend
from antiphon.comm.mixed_comm import FUSED
from antiphon.comm.mnnvl import TorchDistBackend

WORLD, HIDDEN = 4, 24
Op, Mode = MixedCommOp, MixedCommMode
SCATTERS = (Op.REDUCESCATTER, Op.REDUCESCATTER_ALLREDUCE)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
#: What every rank runs: ``body(device)``.
check = harness.Checks()


def run_checks(backend: str, device: str) -> harness.Outcomes:
    with harness.torch_world(backend):
        place = harness.place(device, dist.get_rank())
        return check.run(lambda body: body(place))


def handler(tp: int, device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> MixedCommHandler:
    rank, dp = dist.get_rank(), WORLD // tp
    return MixedCommHandler(rank, WORLD, rank, WORLD, 0, 1, tp, dp, None, None, dtype, device, **options)


def inputs(op: Op, rows: list[int], tp: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """What each rank passes: equal on all ranks that call this."""
    generator = torch.Generator().manual_seed(sum(rows) + tp)
    counts = [sum(rows) if op in SCATTERS else rows[rank // tp] for rank in range(WORLD)]
    made = [torch.randn(count, HIDDEN, generator=generator) for count in counts]
    return [x.to(dtype).to(device) for x in made]


def expected(op: Op, rows: list[int], tp: int, every: list[torch.Tensor]) -> torch.Tensor:
    """What this rank gets: sums in float32, in the order of the ranks, rounded once."""

    def summed(parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(parts[0].dtype)

    group = dist.get_rank() // tp
    if op in SCATTERS:
        return summed([row.split(rows)[group] for row in every])
    if op == Op.ALLREDUCE:
        return summed(every)
    return torch.cat([summed(every[first : first + tp]) for first in range(0, WORLD, tp)])


@check
def every_operation_in_every_mode(device: torch.device) -> None:
    for tp, dtype in itertools.product((1, 2, 4), DTYPES):
        mixed = handler(tp, device, dtype)
        assert mixed.is_running and mixed.para_info.tp_size == tp and mixed.dtype == dtype
        for op, batch in itertools.product(mixed.valid_op_list, (1, 7, 64)):
            rows = [batch] * mixed.para_info.dp_size
            every = inputs(op, rows, tp, dtype, device)
            mine, wanted = every[dist.get_rank()], expected(op, rows, tp, every)
            before = mine.clone()
            for mode in [*mixed.valid_mode_list, None]:
                found = run_mixed_comm(op, mixed, mine, mode=mode)
                out = torch.full_like(wanted, 7)
                assert run_mixed_comm(op, mixed, mine, out, mode) is out and torch.equal(out, found)
                assert torch.equal(mine, before)
                if mode is None or mode in FUSED:
                    assert torch.equal(found, wanted), (tp, dtype, op, batch, mode)
                else:
                    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=4e-2)
        mixed.shutdown()


@check
def lists_of_operations_and_modes(device: torch.device) -> None:
    waits, bytes1, one, groups, auto = (
        Mode.FUSED_OPT_WAITS_UC,
        Mode.FUSED_OPT_BYTES1_UC,
        Mode.NCCL_ONE,
        Mode.NCCL_TP_DP,
        Mode.AUTOTUNE,
    )
    wanted = {
        4: ([Op.ALLREDUCE], [waits, bytes1, one, auto]),
        2: ([Op.ALLREDUCE_ALLGATHER, Op.REDUCESCATTER_ALLREDUCE], [waits, bytes1, one, groups, auto]),
        1: ([Op.ALLGATHER, Op.REDUCESCATTER], [waits, one, auto]),
    }
    for tp, (ops, modes) in wanted.items():
        mixed = handler(tp, device)
        assert mixed.get_valid_op_list() == mixed.valid_op_list == ops
        assert mixed.get_valid_mode_list() == mixed.valid_mode_list == modes
        assert (mixed.tp_comm_group is None) == (mixed.dp_comm_group is None) == (tp != 2)
        assert mixed.local_comm_group is None
        for group in (mixed.tp_comm_group, mixed.dp_comm_group):
            assert group is None or antiphon._timeout_of(group) == timedelta(seconds=60)  # as the default group's
        if tp == 2:
            assert dist.get_process_group_ranks(mixed.tp_comm_group) == mixed.para_info.tp_ranks()[dist.get_rank() // 2]
            assert dist.get_world_size(mixed.dp_comm_group) == 2
        mixed.init_virtual_memory()
        mixed.init_nvshmem()
        mixed.shutdown()


@check
def uneven_and_empty_batches(device: torch.device) -> None:
    for tp, batches in {
        2: [[3, 5], [0, 4], [4, 0], [0, 0], [1, 300]],
        1: [[3, 5, 0, 1], [0, 0, 0, 4], [0, 0, 0, 0], [1, 300, 2, 2]],
    }.items():
        mixed = handler(tp, device, torch.bfloat16)
        fused = [mode for mode in mixed.valid_mode_list if mode in FUSED]
        for op, rows in itertools.product(mixed.valid_op_list, batches):
            every = inputs(op, rows, tp, torch.bfloat16, device)
            mine, wanted = every[dist.get_rank()], expected(op, rows, tp, every)
            for mode in fused:
                found = run_mixed_comm(op, mixed, mine, mode=mode, local_batches=rows)
                assert torch.equal(found, wanted), (tp, op, rows, mode)
        mixed.shutdown()


@check
def uneven_batches_in_place(device: torch.device) -> None:
    rank = dist.get_rank()
    for tp, rows in {2: [3, 5], 1: [3, 0, 1, 5]}.items():
        mixed, dp_rank = handler(tp, device), rank // tp
        own = slice(sum(rows[:dp_rank]), sum(rows[: dp_rank + 1]))
        gather, scatter = mixed.valid_op_list
        every = inputs(gather, rows, tp, torch.float32, device)
        row = torch.zeros(sum(rows), HIDDEN, device=device)
        row[own] = every[rank]
        run_mixed_comm(gather, mixed, row[own], row, local_batches=rows)
        assert torch.equal(row, expected(gather, rows, tp, every))
        every = inputs(scatter, rows, tp, torch.float32, device)
        row = every[rank].clone()
        run_mixed_comm(scatter, mixed, row, row[own], local_batches=rows)
        assert torch.equal(row[own], expected(scatter, rows, tp, every))
        mixed.shutdown()
    mixed = handler(2, device)
    row = torch.zeros(8, HIDDEN, device=device)
    with pytest.raises(ValueError, match="x_in and x_out overlap"):
        wrong = slice(1, 4) if rank < 2 else slice(2, 7)
        run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, row[wrong], row, local_batches=[3, 5])
    mixed.shutdown()


@check
def in_place(device: torch.device) -> None:
    rank, rows = dist.get_rank(), [6, 6]
    mixed = handler(2, device)
    own = slice(rank // 2 * 6, rank // 2 * 6 + 6)
    for mode in mixed.valid_mode_list:
        gather, scatter = mixed.valid_op_list
        every = inputs(gather, rows, 2, torch.float32, device)
        row = torch.zeros(12, HIDDEN, device=device)
        row[own] = every[rank]
        run_mixed_comm(gather, mixed, row[own], row, mode)
        torch.testing.assert_close(row, expected(gather, rows, 2, every))
        every = inputs(scatter, rows, 2, torch.float32, device)
        row = every[rank].clone()
        run_mixed_comm(scatter, mixed, row, row[own], mode)
        torch.testing.assert_close(row[own], expected(scatter, rows, 2, every))
        with pytest.raises(ValueError, match="x_in and x_out overlap"):
            run_mixed_comm(gather, mixed, row[1:7], row, mode)
    mixed.shutdown()
    mixed = handler(1, device)
    for mode in mixed.valid_mode_list:
        row = torch.zeros(WORLD * 3, HIDDEN, device=device)
        row[rank * 3 : rank * 3 + 3] = rank
        run_mixed_comm(Op.ALLGATHER, mixed, row[rank * 3 : rank * 3 + 3], row, mode)
        assert row.eq(torch.arange(WORLD, device=device).repeat_interleave(3).unsqueeze(1)).all()
        run_mixed_comm(Op.REDUCESCATTER, mixed, row, row[rank * 3 : rank * 3 + 3], mode)
        assert row[rank * 3 : rank * 3 + 3].eq(WORLD * rank).all()
    mixed.shutdown()
    mixed = handler(4, device)
    for mode in mixed.valid_mode_list:
        x = torch.full((3, HIDDEN), float(rank), device=device)
        assert run_mixed_comm(Op.ALLREDUCE, mixed, x, x, mode) is x and x.eq(6).all()
    mixed.shutdown()


@check
def what_is_wrong_with_a_handler(device: torch.device) -> None:
    rank = dist.get_rank()
    good: dict[str, Any] = dict(
        world_rank=rank,
        world_size=WORLD,
        local_rank=rank,
        local_size=WORLD,
        inter_rank=0,
        inter_size=1,
        local_tp_size=2,
        local_dp_size=2,
        inter_tp_size=None,
        inter_dp_size=None,
        dtype=torch.float32,
        device=device,
    )
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        (dict(world_rank=WORLD, local_rank=WORLD), ValueError, "rank 4 is out of range: world_size is 4"),
        (dict(world_size=6), ValueError, "local_size 4"),
        (dict(local_rank=(rank + 1) % WORLD), ValueError, "local_rank is"),
        (dict(local_size=3), ValueError, "local_size 3"),
        (dict(inter_rank=1), ValueError, "inter_rank is 1"),
        (dict(inter_size=2), ValueError, "inter_size 2"),
        (dict(local_tp_size=3), ValueError, "local_tp_size 3"),
        (dict(local_dp_size=4), ValueError, "local_dp_size 4"),
        (dict(inter_tp_size=2), ValueError, "inter_tp_size"),
        (dict(inter_dp_size=3), ValueError, "inter_dp_size"),
        (dict(world_rank=-1), ValueError, "world_rank must not be negative, but it is -1"),
        (dict(local_dp_size=0), ValueError, "local_dp_size"),
        (dict(world_rank=0, world_size=1, local_rank=0, local_size=1, local_tp_size=1, local_dp_size=1), ValueError, "world_size is 1"),
        (dict(world_rank=5, local_rank=5, world_size=8, local_size=8, local_tp_size=4), ValueError, "the default group has rank"),
        (dict(dtype=torch.float64), ValueError, "dtype is torch.float64"),
        (dict(device="meta"), ValueError, "device is meta"),
        (dict(device="cuda:99"), ValueError, "device is cuda:99, and there are"),
        (dict(grid_size=0), ValueError, "grid_size is 0"),
        (dict(max_block_size=100), ValueError, "max_block_size is 100, not a multiple of 32"),
        (dict(min_block_size=33), ValueError, "min_block_size is 33, not a multiple of 32"),
        (dict(max_block_size=128), ValueError, "max_block_size 128 is below min_block_size 256"),
        (dict(min_num_steps=0), ValueError, "min_num_steps is 0"),
        (dict(min_num_steps=1.5), ValueError, "min_num_steps is 1.5"),
        (dict(min_block_size=True), ValueError, "min_block_size is True"),
        (dict(max_block_size=512.0), ValueError, "max_block_size is 512.0"),
        (dict(grid_size=2.0), ValueError, "grid_size is 2.0"),
        (dict(device="foo"), ValueError, "device is 'foo'"),
        (dict(device=None), ValueError, "device is None"),
        (dict(dtype=None), TypeError, "dtype must be a torch.dtype or its name, not None"),
        (dict(world_size=2**70), ValueError, f"{2**70} has more than 64 bits"),
    ]  # fmt: skip
    two = dict(local_size=2, local_rank=rank % 2, inter_size=2, inter_rank=rank // 2, local_dp_size=1)
    both = r"local_size 2 and inter_size 2 the nodes have the ranks \[\[0, 1\], \[2, 3\]\], but those of .* \[\[0, 1, 2, 3\]\]"
    wrong.append((two, ValueError, both))
    for changes, kind, text in wrong:
        with pytest.raises(kind, match=text):
            MixedCommHandler(**{**good, **changes})
    # Nothing is left of a handler that has failed.
    broken = MixedCommHandler.__new__(MixedCommHandler)
    del broken
    MixedCommHandler(**good).shutdown()


@check
def what_is_wrong_on_one_rank_is_an_error_on_all(device: torch.device) -> None:
    is_odd = dist.get_rank() == 1
    for changes, text in (
        (dict(tp=4), "tp_size differs between the ranks: 2 on rank 0, 4 on rank 1"),
        (dict(dtype=torch.bfloat16), "dtype differs between the ranks: torch.float32 on rank 0, torch.bfloat16 on rank 1"),
        (dict(use_autotune=False), "use_autotune differs between the ranks: True on rank 0, False on rank 1"),
        (dict(grid_size=2), "grid_size differs between the ranks: None on rank 0, 2 on rank 1"),
    ):
        with pytest.raises(RuntimeError, match=text):
            handler(**{"tp": 2, "device": device, **(changes if is_odd else {})})
    for changes in (dict(dtype=torch.int32), dict(grid_size=0), dict(min_block_size=33), dict(device="meta"), dict(tp=3)):
        kind, text = (ValueError, "") if is_odd else (RuntimeError, "MixedCommHandler: rank 1 cannot make its handler: ")
        with pytest.raises(kind, match=text):
            handler(**{"tp": 2, "device": device, **(changes if is_odd else {})})
    handler(2, device).shutdown()


@check
def what_is_wrong_with_a_call(device: torch.device) -> None:
    mixed = handler(2, device)
    gather, scatter = mixed.valid_op_list
    x = torch.ones(4, HIDDEN, device=device)

    def refused(text: str, *arguments: Any, **named: Any) -> None:
        with pytest.raises(ValueError, match=text):
            run_mixed_comm(*arguments, **named)

    refused("^Invalid op: ALLREDUCE, valid with tp_size 2, dp_size 2: ALLREDUCE_ALLGATHER", Op.ALLREDUCE, mixed, x)
    refused("^Invalid op: 17", 17, mixed, x)
    refused("^Invalid mode: FUSED_OPT_WAITS_MC .*multicast", gather, mixed, x, mode=Mode.FUSED_OPT_WAITS_MC)
    refused("^Invalid mode: FUSED_OPT_BYTES2_UC", gather, mixed, x, mode=Mode.FUSED_OPT_BYTES2_UC)
    refused("^x_in.ndim should be at least 2", gather, mixed, x[0])
    refused("^x_in.dtype should be torch.float32", gather, mixed, x.double())
    refused("^x_in.device should be", gather, mixed, x.to("meta"))
    refused("^x_in should be contiguous", gather, mixed, x.t())
    refused(r"^x_in.shape\[0\] should be divisible by dp_size", scatter, mixed, x[:3])
    refused(r"^x_out.shape should be \[8, 24\]", gather, mixed, x, torch.ones(7, HIDDEN, device=device))
    refused("^x_out.dtype should be", gather, mixed, x, torch.ones(8, HIDDEN, device=device, dtype=torch.int32))
    refused("^x_out.ndim", gather, mixed, x, torch.ones(8 * HIDDEN, device=device))
    refused("^local_batches are for the fused modes", gather, mixed, x, mode=Mode.NCCL_ONE, local_batches=[4, 4])
    refused("^local_batches should be rows for each of dp_size 2", gather, mixed, x, local_batches=[4])
    refused("^local_batches should be rows for each of dp_size 2", gather, mixed, x, local_batches=[5, -1])
    refused(r"^x_in.shape\[0\] should be 3 on dp_rank", gather, mixed, x, local_batches=[3, 3])
    refused("^Invalid op: 1208925819614629174706176", 2**80, mixed, x)
    refused("^Invalid op: 'sum'", "sum", mixed, x)
    for x_in in (None, [[1.0]]):
        with pytest.raises(TypeError, match="^x_in should be a torch.Tensor, not"):
            run_mixed_comm(gather, mixed, x_in, mode=Mode.NCCL_ONE)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            run_mixed_comm(gather, mixed, x_in)  # type: ignore[arg-type]
    for batches in (4, "44", [4.0, 4.0]):
        with pytest.raises(TypeError, match="^local_batches should be a sequence of integers"):
            run_mixed_comm(gather, mixed, x, local_batches=batches)  # type: ignore[arg-type]
    # What there is not is refused without the check too, and what would touch other memory.
    with pytest.raises(ValueError, match="^Invalid op: ALLGATHER"):
        run_mixed_comm(Op.ALLGATHER, mixed, x, mode=Mode.NCCL_ONE, skip_check=True)
    with pytest.raises(ValueError, match="^Invalid mode: FUSED_OPT_WAITS_MC"):
        run_mixed_comm(gather, mixed, x, mode=Mode.FUSED_OPT_WAITS_MC, skip_check=True)
    for mode in (Mode.NCCL_ONE, Mode.NCCL_TP_DP):
        rows = torch.zeros(4, HIDDEN, device=device)
        for x_in, x_out in ((x[:3], rows[:1]), (x, rows[:1]), (x, rows)):
            with pytest.raises(ValueError, match="elements with dp_size 2"):
                run_mixed_comm(scatter, mixed, x_in, x_out, mode, skip_check=True)
        assert not rows.any()
    with pytest.raises(ValueError, match="elements"):
        run_mixed_comm(gather, mixed, x, torch.ones(7, HIDDEN, device=device), skip_check=True)
    assert run_mixed_comm(gather, mixed, x, skip_check=True).eq(2).all()
    mixed.shutdown()


@check
def choice_of_modes(device: torch.device) -> None:
    mixed = handler(2, device, torch.bfloat16)
    for op in mixed.valid_op_list:
        choices = mixed.autotune_map[op]
        assert len(choices) == 14 and all(FUSED[mode] for mode in choices)
        factor = 2 if op in SCATTERS else 1
        for k in (0, 5, 13):
            x = torch.empty(factor << k, 4096, dtype=torch.bfloat16, device=device)
            assert mixed.select_autotune_mode(op, x) == choices[k]
    assert len(handler(4, device).autotune_map[Op.ALLREDUCE]) == 15
    with pytest.raises(ValueError, match="^Invalid op: ALLGATHER"):
        mixed.select_autotune_mode(Op.ALLGATHER, torch.empty(1, 1, device=device))
    with pytest.raises(TypeError, match="x_in should be a torch.Tensor, not NoneType"):
        mixed.select_autotune_mode(Op.ALLREDUCE_ALLGATHER, None)
    plain = handler(2, device, use_autotune=False)
    assert Mode.AUTOTUNE not in plain.valid_mode_list and plain.autotune_map == {}
    with pytest.raises(RuntimeError, match="use_autotune=False"):
        plain.select_autotune_mode(Op.ALLREDUCE_ALLGATHER, torch.empty(1, 1, device=device))
    assert run_mixed_comm(Op.ALLREDUCE_ALLGATHER, plain, torch.ones(2, 4, device=device)).eq(2).all()
    plain.shutdown()
    mixed.shutdown()


@check
def tables_are_measured_and_kept(device: torch.device) -> None:
    sizes, folder = [8192, 16384], [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTIPHON_CACHE_DIR", str(folder[0]))
        patch.setattr("antiphon.comm._mixed.tuned_sizes", lambda handler: sizes)  # not all sizes up to 128 MiB
        mixed = handler(2, device)
        built_in = dict(mixed.autotune_map)
        with pytest.MonkeyPatch.context() as elsewhere:
            if dist.get_rank() == 0:
                elsewhere.setenv("ANTIPHON_CACHE_DIR", "/dev/null/nowhere")
            with pytest.raises(RuntimeError if dist.get_rank() == 0 else ValueError, match="/dev/null/nowhere"):
                mixed.run_autotune()
        before = time.perf_counter()
        mixed.run_autotune()
        took = time.perf_counter() - before
        again = handler(2, device)
    measured = [mode for mode in mixed.valid_mode_list if mode != Mode.AUTOTUNE]
    assert set(mixed.autotune_times) == set(itertools.product(mixed.valid_op_list, measured))
    assert all(len(times) == len(sizes) and 0 < min(times) <= max(times) < took for times in mixed.autotune_times.values())
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, (mixed.autotune_times, mixed.autotune_map))
    assert all(each == everyone[0] for each in everyone)
    # AUTOTUNE stands for modes of equal bits alone. A new handler finds the table, and one that looks elsewhere does not.
    assert all(len(modes) == 14 and set(modes) <= set(FUSED) for modes in mixed.autotune_map.values())
    assert again.autotune_map == mixed.autotune_map
    elsewhere = handler(2, device)
    assert elsewhere.autotune_map == built_in
    for each in (elsewhere, again, mixed):
        each.shutdown()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))


@check
def two_handlers_and_their_ends(device: torch.device) -> None:
    first, second = handler(2, device), handler(4, device)
    x = torch.ones(2, HIDDEN, device=device)
    for _ in range(3):
        assert run_mixed_comm(Op.ALLREDUCE_ALLGATHER, first, x).eq(2).all()
        assert run_mixed_comm(Op.ALLREDUCE, second, x).eq(4).all()
    first.shutdown()
    assert not first.is_running and first.tp_comm_group is None
    with pytest.raises(RuntimeError, match="Should not call shutdown"):
        first.shutdown()
    for late in (
        lambda: run_mixed_comm(Op.ALLREDUCE_ALLGATHER, first, x),
        first.run_autotune,
        first.checkpoint_prepare,
        lambda: first.select_autotune_mode(Op.ALLREDUCE_ALLGATHER, x),
        lambda: run_mixed_comm(Op.ALLREDUCE_ALLGATHER, first, x, mode=Mode.NCCL_ONE),
        first.init_virtual_memory,
        first.init_nvshmem,
    ):
        with pytest.raises(RuntimeError, match="was shut down"):
            late()
    assert run_mixed_comm(Op.ALLREDUCE, second, x).eq(4).all()
    del second


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The call in a graph, on a GPU."""
    if device.type == "cpu":
        return call
    call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


@check
def checkpoints(device: torch.device) -> None:
    mixed, x = handler(2, device), torch.ones(2, HIDDEN, device=device)
    out = x.new_zeros(4, HIDDEN)
    replay = captured(lambda: run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, x, out), device)
    for _ in range(2):
        mixed.checkpoint_prepare()
        mixed.checkpoint_prepare()
        for early in (lambda: run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, x), mixed.run_autotune, mixed.init_virtual_memory):
            with pytest.raises(RuntimeError, match="call checkpoint_restore first"):
                early()
        backend = TorchDistBackend()
        mixed.checkpoint_restore(backend)
        mixed.checkpoint_restore(backend)
        assert run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, x).eq(2).all()
        out.zero_()
        replay()
        assert out.eq(2).all()
    with pytest.raises(ValueError, match="comm_backend is rank 9 of 10, the handler rank"):
        mixed.checkpoint_restore(Elsewhere())
    # One rank's failure is that of all ranks, which can try again.
    mixed.checkpoint_prepare()
    with pytest.raises(ValueError, match="comm_backend is rank 9 of 10, the handler rank 1 of 4"):
        mixed.checkpoint_restore(Elsewhere() if dist.get_rank() == 1 else TorchDistBackend())
    with pytest.raises(RuntimeError, match="call checkpoint_restore first"):
        run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, x)
    with pytest.raises(ValueError, match="checkpoint_restore: None does not tell its rank and size"):
        mixed.checkpoint_restore(None if dist.get_rank() == 2 else TorchDistBackend())  # type: ignore[arg-type]
    mixed.checkpoint_restore(TorchDistBackend())
    assert run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, x).eq(2).all()
    # The memory is the communicator's: another handler has it again when this one ends.
    mixed.checkpoint_prepare()
    mixed.shutdown()
    mixed = handler(2, device)
    assert run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, x).eq(2).all()
    mixed.shutdown()


class Elsewhere(CommBackend):
    """The backend of another world."""

    def Get_rank(self) -> int:
        return 9

    def Get_size(self) -> int:
        return 10

    def allgather(self, data: Any) -> Any:
        raise AssertionError("nobody is asked")

    def bcast(self, data: Any, root: int) -> Any:
        raise AssertionError("nobody is asked")

    def barrier(self) -> None:
        raise AssertionError("nobody is asked")

    def Split(self, color: int, key: int) -> "Elsewhere":
        raise AssertionError("nobody is asked")


@check
def parameters_and_negated_views(device: torch.device) -> None:
    """No mode loses gradients in silence, or takes bits for numbers."""
    mixed = handler(2, device)
    assert repr(mixed).startswith(f"<antiphon.comm.MixedCommHandler: rank {dist.get_rank()} of {WORLD}, tp_size 2, dp_size ")
    for mode, op in itertools.product(mixed.valid_mode_list, mixed.valid_op_list):
        x = torch.nn.Parameter(torch.ones(4, HIDDEN, device=device))
        wanted = 4.0 if op in SCATTERS else 2.0
        with pytest.raises(ValueError, match="run_mixed_comm: a tensor requires grad"):
            run_mixed_comm(op, mixed, x * 2, mode=mode)
        with torch.no_grad():
            found = run_mixed_comm(op, mixed, x, mode=mode)
        assert found.eq(wanted).all() and not found.requires_grad
        with pytest.raises(ValueError, match=r"is_neg is set\): pass .*resolve_neg\(\)"):
            run_mixed_comm(op, mixed, torch._neg_view(x.detach()), mode=mode)
    mixed.shutdown()


@check
def compiled(device: torch.device) -> None:
    mixed = handler(2, device)

    def layer(x: torch.Tensor) -> torch.Tensor:
        gathered = run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, x * 2)
        return run_mixed_comm(Op.REDUCESCATTER_ALLREDUCE, mixed, gathered + 1) * 3

    x = torch.full((4, HIDDEN), float(dist.get_rank() // 2), device=device)
    wanted = layer(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), wanted)
    torch._dynamo.reset()
    dynamic = torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True)
    for batch in (4, 6, 10):
        x = torch.full((batch, HIDDEN), float(dist.get_rank() // 2), device=device)
        assert torch.equal(dynamic(x), layer(x))
    x, out = x[:4], x.new_empty(8, HIDDEN)
    arguments = (x, out, mixed._number, int(Op.ALLREDUCE_ALLGATHER), int(Mode.AUTOTUNE), None)
    torch.library.opcheck(torch.ops.antiphon.mixed_comm.default, arguments)
    mixed.shutdown()


@check
def unlike_batches_are_an_error_on_all_ranks(device: torch.device) -> None:
    """The last check: the communicator is unusable afterwards, and what the backend is made of."""
    mixed = handler(2, device)
    x = torch.ones(4 if dist.get_rank() else 5, HIDDEN, device=device)
    with pytest.raises(RuntimeError, match="all_reduce_all_gather"):
        # On a GPU a later call says what an earlier one ran into.
        for _ in range(50 if device.type == "cuda" else 1):
            run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, x)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                time.sleep(0.02)
    with pytest.raises(RuntimeError):
        mixed.shutdown()
    assert not mixed.is_running and mixed.tp_comm_group is mixed.dp_comm_group is None
    if dist.get_backend() == "gloo":  # where the communicator is not the group's, there is another one
        mixed = handler(2, device)
        assert run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, torch.ones(4, HIDDEN, device=device)).eq(2).all()
        mixed.shutdown()


@pytest.mark.parametrize("name", check)
@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("gloo", "host"),
        ("antiphon", "host"),
        pytest.param("antiphon", "cuda", marks=pytest.mark.cuda),
        pytest.param("nccl", "cuda", marks=pytest.mark.cuda),
    ],
)
def test_on(name: str, backend: str, device: str) -> None:
    harness.need(device, WORLD)
    if backend == "nccl":  # which has no two ranks on a GPU
        needs.need(f"gpus {WORLD}", torch.cuda.device_count() >= WORLD, f"{torch.cuda.device_count()} found")
    check.expect(name, WORLD, run_checks, backend, device)


def test_there_must_be_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        MixedCommHandler(0, 2, 0, 2, 0, 1, 2, 1, None, None, torch.bfloat16, "cpu")


def test_integers_are_those_of_flashinfer() -> None:
    assert [op.value for op in Op] == list(range(5)) and [mode.value for mode in Mode] == list(range(9))
    assert Mode.FUSED_OPT_BYTES1_UC == 3 and Mode.NCCL_ONE == 6 and Op.REDUCESCATTER_ALLREDUCE == 4


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), (1, 2, 3), (1, 2), (1, 2))))
def test_ranks_have_their_places(sizes: tuple[int, int, int, int]) -> None:
    local_tp, local_dp, inter_tp, inter_dp = sizes
    local, inter = local_tp * local_dp, inter_tp * inter_dp
    for rank in range(local * inter):
        info = ParallelInfo(
            rank, local * inter, rank % local, local, rank // local, inter, local_tp, local_dp, inter_tp, inter_dp
        )
        assert (info.local_tp_rank, info.local_dp_rank) == (rank % local % local_tp, rank % local // local_tp)
        assert info.tp_rank == info.local_tp_rank + info.inter_tp_rank * local_tp
        assert info.dp_rank == info.local_dp_rank + info.inter_dp_rank * local_dp
        assert (info.tp_size, info.dp_size) == (local_tp * inter_tp, local_dp * inter_dp)
        assert info.use_mixed == (info.tp_size > 1 < info.dp_size) and info.use_inter == (inter > 1)
        assert rank in info.tp_ranks()[info.dp_rank] and rank in info.dp_ranks()[info.tp_rank]
        assert rank in info.local_ranks()[info.inter_rank]
        assert info.get_local_full_group_local_ranks() == list(range(local))
        assert rank % local in info.get_local_tp_group_local_ranks()
        assert rank % local in info.get_local_dp_group_local_ranks()
        assert info.get_local_tp_group_local_ranks(0) == list(range(local_tp))
        assert info.get_local_dp_group_local_ranks(0) == list(range(0, local, local_tp))


def test_sizes_that_are_left_open() -> None:
    info = ParallelInfo(0, 8, 0, 8, 0, 1, None, None, None, None)
    assert (info.local_tp_size, info.local_dp_size, info.inter_tp_size) == (8, 1, 1)
    info = ParallelInfo(0, 8, 0, 8, 0, 1, None, 2, None, None)
    assert (info.local_tp_size, info.local_dp_size) == (4, 2)
    with pytest.raises(ValueError, match="local_size is 8, but local_dp_size is 3"):
        ParallelInfo(0, 8, 0, 8, 0, 1, None, 3, None, None)


def test_old_and_new_gpus() -> None:
    supported = [cc for cc in (70, 75, 80, 86, 89, 90, 100, 120) if run_mixed_comm.is_compute_capability_supported(cc)]  # type: ignore[attr-defined]
    assert supported == [80, 86, 89, 90, 100, 120]


def test_scripts_import_it_from_flashinfer() -> None:
    antiphon.compat.install("flashinfer.comm")
    try:
        import flashinfer.comm.mixed_comm as theirs  # type: ignore[import-not-found]

        assert theirs.MixedCommHandler is MixedCommHandler and theirs.run_mixed_comm is run_mixed_comm
    finally:
        antiphon.compat.uninstall("flashinfer.comm")
