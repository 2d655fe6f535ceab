"""``antiphon.comm.mixed_comm`` on the GPUs of two nodes of two ranks, which are processes of this machine that are told so, each a PE of
NVSHMEM. With ``ANTIPHON_TEST_RANKS_PER_GPU=4`` one GPU is enough, under MPS. One world runs all checks, in this order.
"""

import functools
import os
from typing import Any

import harness
import needs
import pytest
import ranks
import torch
import torch.distributed as dist
from test_mixed_comm_nodes import DTYPES, HIDDEN, NODE, NODES, WORLD, Op, expected, inputs, place

from antiphon.comm import MixedCommHandler, run_mixed_comm
from antiphon.comm.mnnvl import TorchDistBackend

check = harness.Checks()


def run_checks() -> harness.Outcomes:
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(64 << 20)
    with harness.torch_world("gloo"):
        harness.place("cuda", dist.get_rank())
        return check.run(lambda body: body())


def handler(local_tp: int, inter_tp: int, dtype: torch.dtype = torch.float32, **options: Any) -> MixedCommHandler:
    device = torch.device("cuda", torch.cuda.current_device())
    return MixedCommHandler(*place(), local_tp, NODE // local_tp, inter_tp, WORLD // NODE // inter_tp, dtype, device, **options)


LAYOUTS = [(local_tp, inter_tp) for local_tp in (1, 2) for inter_tp in (1, 2)]


@check
def who_joins_must_have_initialized() -> None:
    with pytest.raises(RuntimeError, match="^Failed to initialize nvshmem: .*has not initialised it"):
        handler(2, 1, should_init_nvshmem=False)


@check
def every_layout_has_the_hosts_bits() -> None:
    for (local_tp, inter_tp), dtype in ((layout, dtype) for layout in LAYOUTS for dtype in DTYPES):
        mixed = handler(local_tp, inter_tp, dtype)
        info = mixed.para_info
        for op in mixed.valid_op_list:
            for rows in ([1, 1, 1, 1], [64] * 4, [3, 0, 5, 2]):
                rows = rows[: info.dp_size]
                uneven = None if len(set(rows)) == 1 or op == Op.ALLREDUCE else rows
                every = inputs(op, rows, info, dtype)
                wanted = expected(op, rows, info, every).to(mixed.device)
                for mode in mixed._fused_modes:
                    mine = every[dist.get_rank()].to(mixed.device)
                    found = run_mixed_comm(op, mixed, mine, mode=mode, local_batches=uneven)
                    torch.cuda.synchronize()
                    assert torch.equal(found, wanted), (local_tp, inter_tp, dtype, op, rows, mode)
        mixed.shutdown()


@check
def graphs_are_replayed_between_eager_calls() -> None:
    for local_tp, inter_tp in LAYOUTS:
        mixed = handler(local_tp, inter_tp)
        info, op = mixed.para_info, mixed.valid_op_list[0]
        rows = [8] * info.dp_size
        every = inputs(op, rows, info, torch.float32)
        mine, wanted = every[dist.get_rank()].to(mixed.device), expected(op, rows, info, every).to(mixed.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once = run_mixed_comm(op, mixed, mine)
            twice = run_mixed_comm(op, mixed, mine)
        for _ in range(3):
            graph.replay()
            eager = run_mixed_comm(op, mixed, mine)
            torch.cuda.synchronize()
            assert all(torch.equal(found, wanted) for found in (once, twice, eager)), (local_tp, inter_tp)
        del graph
        mixed.shutdown()


@check
def what_is_missing_is_named() -> None:
    mixed = handler(1, 2, should_init_nvshmem=False)  # it runs by now
    assert os.environ["NVSHMEM_IB_ENABLE_IBGDA"] == "1" and int(os.environ["NVSHMEM_IBGDA_NUM_RC_PER_PE"]) > 0
    mixed.init_nvshmem()
    restore = functools.partial(mixed.checkpoint_restore, TorchDistBackend())
    for method in (mixed.run_autotune, mixed.checkpoint_prepare, restore):
        with pytest.raises(NotImplementedError):
            method()
    mixed.shutdown()
    with pytest.raises(RuntimeError):
        run_mixed_comm(Op.ALLREDUCE_ALLGATHER, mixed, torch.ones(4, HIDDEN, device=mixed.device))


@pytest.mark.cuda
@pytest.mark.parametrize("name", check)
def test_on_nodes(name: str) -> None:
    harness.need("cuda", WORLD)
    needs.need_ucx()
    check.expect(name, WORLD, run_checks, nodes=NODES)
