"""``antiphon.comm.mixed_comm`` on two nodes of two ranks, which are processes of this machine that are told so: the counterparts of
FlashInfer's cases between nodes, on the host; ``test_mixed_comm_nodes_cuda.py`` has those on GPUs. As in ``test_mixed_comm.py``, one world of each backend runs all checks.
"""

import itertools
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import needs
import pytest
import ranks
import torch
import torch.distributed as dist

from antiphon.comm import MixedCommHandler, MixedCommMode, MixedCommOp, ParallelInfo, run_mixed_comm
from antiphon.comm.mixed_comm import FUSED, SCATTERS
from antiphon.comm.mnnvl import TorchDistBackend

WORLD, NODE, HIDDEN = 4, 2, 24
Op, Mode = MixedCommOp, MixedCommMode
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NODES = ["a", "a", "b", "b"]
check = harness.Checks()


def run_checks(backend: str) -> harness.Outcomes:
    with harness.torch_world(backend):
        return check.run(lambda body: body())


def place() -> tuple[int, ...]:
    rank = dist.get_rank()
    return rank, WORLD, rank % NODE, NODE, rank // NODE, WORLD // NODE


def handler(local_tp: int, inter_tp: int, dtype: torch.dtype = torch.float32, **options: Any) -> MixedCommHandler:
    return MixedCommHandler(*place(), local_tp, NODE // local_tp, inter_tp, WORLD // NODE // inter_tp, dtype, "cpu", **options)


def inputs(op: Op, rows: list[int], info: ParallelInfo, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(rows) + info.tp_size)
    group = {rank: each for each, members in enumerate(info.tp_ranks()) for rank in members}
    counts = [sum(rows) if op in SCATTERS else rows[group[rank]] for rank in range(WORLD)]
    return [torch.randn(count, HIDDEN, generator=generator).to(dtype) for count in counts]


def expected(op: Op, rows: list[int], info: ParallelInfo, every: list[torch.Tensor]) -> torch.Tensor:
    """What this rank gets: the ranks of each node in ascending order, then the nodes, in float32 and rounded once."""

    def summed(parts: dict[int, torch.Tensor]) -> torch.Tensor:
        sums: dict[int, torch.Tensor] = {}
        for rank, part in parts.items():
            node = rank // NODE
            sums[node] = sums[node] + part.float() if node in sums else part.float()
        first, *others = sums.values()
        for other in others:
            first = first + other
        return first.to(every[0].dtype)

    if op == Op.ALLREDUCE:
        return summed(dict(enumerate(every)))
    if op in SCATTERS:
        return summed({rank: row.split(rows)[info.dp_rank] for rank, row in enumerate(every)})
    return torch.cat([summed({rank: every[rank] for rank in members}) for members in info.tp_ranks()])


@check
def every_layout_in_every_mode() -> None:
    for local_tp, inter_tp, dtype in itertools.product((1, 2), (1, 2), DTYPES):
        mixed = handler(local_tp, inter_tp, dtype)
        info = mixed.para_info
        for op, batch in itertools.product(mixed.valid_op_list, (1, 7, 64)):
            rows = [batch] * info.dp_size
            every = inputs(op, rows, info, dtype)
            mine, wanted = every[dist.get_rank()], expected(op, rows, info, every)
            for mode in [*mixed.valid_mode_list, None]:
                found = run_mixed_comm(op, mixed, mine, mode=mode)
                if mode is None or mode in FUSED:
                    assert torch.equal(found, wanted), (local_tp, inter_tp, dtype, op, batch, mode)
                else:
                    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=4e-2)
        mixed.shutdown()


@check
def uneven_batches_between_nodes() -> None:
    for local_tp, inter_tp in ((1, 1), (2, 1), (1, 2)):
        mixed = handler(local_tp, inter_tp, torch.bfloat16)
        info = mixed.para_info
        for op, rows in itertools.product(mixed.valid_op_list, ([3, 5], [0, 4], [0, 0], [1, 300])):
            rows = (rows * 2)[: info.dp_size]
            every = inputs(op, rows, info, torch.bfloat16)
            wanted = expected(op, rows, info, every)
            for mode in mixed._fused_modes:
                found = run_mixed_comm(op, mixed, every[dist.get_rank()], mode=mode, local_batches=rows)
                assert torch.equal(found, wanted), (local_tp, inter_tp, op, rows, mode)
        mixed.shutdown()


@check
def lists_between_nodes() -> None:
    waits, bytes1, bytes2 = Mode.FUSED_OPT_WAITS_UC, Mode.FUSED_OPT_BYTES1_UC, Mode.FUSED_OPT_BYTES2_UC
    one, groups, auto = Mode.NCCL_ONE, Mode.NCCL_TP_DP, Mode.AUTOTUNE
    wanted = {
        (2, 2): [waits, bytes1, bytes2, one, auto],
        (2, 1): [waits, bytes1, one, groups, auto],
        (1, 2): [waits, bytes2, one, groups, auto],
        (1, 1): [waits, one, auto],
    }
    for (local_tp, inter_tp), modes in wanted.items():
        mixed = handler(local_tp, inter_tp)
        assert mixed.valid_mode_list == modes and all(set(each) <= set(modes) for each in mixed.autotune_map.values())
        assert dist.get_process_group_ranks(mixed.local_comm_group) == mixed.para_info.local_ranks()[dist.get_rank() // NODE]
        if (local_tp, inter_tp) == (1, 2):  # ranks of a group are not neighbours
            assert dist.get_process_group_ranks(mixed.tp_comm_group) == [[0, 2], [1, 3]][dist.get_rank() % 2]
        x = torch.ones(mixed.para_info.dp_size, HIDDEN)
        for mode in {bytes1, bytes2, groups, Mode.FUSED_OPT_WAITS_MC, Mode.FUSED_OPT_BYTES2_MC} - set(modes):
            with pytest.raises(ValueError, match=f"^Invalid mode: {mode.name}"):
                run_mixed_comm(mixed.valid_op_list[0], mixed, x, mode=mode)
        mixed.init_nvshmem()
        for method in (mixed.checkpoint_prepare, lambda: mixed.checkpoint_restore(TorchDistBackend())):
            with pytest.raises(NotImplementedError, match="checkpoints are for one node, and inter_size is 2"):
                method()
        mixed.shutdown()


@check
def what_is_wrong_between_nodes() -> None:
    rank = dist.get_rank()
    rest = (2, 1, 1, 2, torch.float32)
    with pytest.raises(ValueError, match="device is cuda:99, and there are"):
        MixedCommHandler(rank, WORLD, rank % NODE, NODE, rank // NODE, 2, *rest, "cuda:99")
    both = r"local_size 4 and inter_size 1 the nodes have the ranks \[\[0, 1, 2, 3\]\], but those of .* \[\[0, 1\], \[2, 3\]\]"
    with pytest.raises(ValueError, match=both):
        MixedCommHandler(rank, WORLD, rank, WORLD, 0, 1, 2, 2, None, None, torch.float32, "cpu")
    # Both have two groups of two ranks.
    sizes = (1, 2) if rank == 3 else (2, 1)
    with pytest.raises(RuntimeError, match="local_tp_size differs between the ranks: 2 on rank 0, 1 on rank 3"):
        handler(*sizes)
    handler(2, 1).shutdown()


@check
def in_place_and_compiled_between_nodes() -> None:
    mixed = handler(1, 2)
    info = mixed.para_info
    own = slice(info.dp_rank * 6, info.dp_rank * 6 + 6)
    for mode in mixed.valid_mode_list:
        gather, scatter = mixed.valid_op_list
        every = inputs(gather, [6, 6], info, torch.float32)
        row = torch.zeros(12, HIDDEN)
        row[own] = every[dist.get_rank()]
        run_mixed_comm(gather, mixed, row[own], row, mode)
        torch.testing.assert_close(row, expected(gather, [6, 6], info, every))
        every = inputs(scatter, [6, 6], info, torch.float32)
        row = every[dist.get_rank()].clone()
        run_mixed_comm(scatter, mixed, row, row[own], mode)
        torch.testing.assert_close(row[own], expected(scatter, [6, 6], info, every))

    def layer(x: torch.Tensor) -> torch.Tensor:
        gathered = run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, x * 2)
        return run_mixed_comm(Op.REDUCESCATTER_ALLREDUCE, mixed, gathered + 1) * 3

    x = torch.full((4, HIDDEN), float(info.dp_rank))
    wanted = layer(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), wanted)
    mixed.shutdown()


@check
def tables_are_of_the_nodes() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    sizes = [8192, 16384]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTIPHON_CACHE_DIR", str(folder[0]))
        patch.setattr("antiphon.comm._mixed.tuned_sizes", lambda handler: sizes)
        mixed = handler(1, 2)
        mixed.run_autotune()
        again = handler(1, 2)
    assert again.autotune_map == mixed.autotune_map
    measured = [mode for mode in mixed.valid_mode_list if mode != Mode.AUTOTUNE]
    assert set(mixed.autotune_times) == set(itertools.product(mixed.valid_op_list, measured))
    if dist.get_rank() == 0:
        tables = "".join(file.read_text() for file in Path(str(folder[0])).rglob("*") if file.is_file())
        # Each axis has its size, and the nodes are in the key.
        assert "tp 1 × dp 2 on each of tp 2 × dp 1 nodes" in tables and "2 + 2" in tables
        shutil.rmtree(str(folder[0]))
    for each in (again, mixed):
        each.shutdown()


@check
def unlike_modes_are_an_error_between_nodes() -> None:
    """The last check: the communicator is unusable afterwards."""
    mixed = handler(1, 2)
    mode = Mode.FUSED_OPT_BYTES2_UC if dist.get_rank() else Mode.FUSED_OPT_WAITS_UC
    with pytest.raises(RuntimeError, match="all_reduce_all_gather"):
        run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, torch.ones(4, HIDDEN), mode=mode)
    with pytest.raises(RuntimeError):
        mixed.shutdown()


@pytest.mark.parametrize("name", check)
@pytest.mark.parametrize("backend", ["gloo", "antiphon"])
def test_on_nodes(name: str, backend: str) -> None:
    needs.need_ucx()
    check.expect(name, WORLD, run_checks, backend, nodes=NODES)
