"""Ranks on several nodes: processes of this machine that are told so, between which UCX carries messages."""

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import antiphon
import antiphon.torch
import needs
import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ports import free_port
from torch.nn.parallel import DistributedDataParallel

LAYOUTS = [["a", "b"], ["a", "a", "b", "b"], ["a", "b", "b"], ["a", "b", "a", "b"]]


@pytest.fixture(autouse=True)
def ucx() -> None:
    needs.need_ucx()


def contribution(rank: int, count: int) -> np.ndarray:
    return np.sin(np.arange(count, dtype=np.float32) * np.float32(0.37) + rank) * np.float32(rank + 0.1)


def sum_by_node(nodes: list[list[int]], count: int) -> np.ndarray:
    sums = []
    for node in nodes:
        total = contribution(node[0], count)
        for rank in node[1:]:
            total = total + contribution(rank, count)
        sums.append(total)
    return sum(sums[1:], start=sums[0])


def call_everything() -> tuple[int, list[list[int]]]:
    with antiphon.init() as comm:
        rank, size, nodes = comm.rank, comm.world_size, comm.nodes
        assert rank in nodes[comm.node] and nodes[comm.node][comm.node_rank] == rank
        assert [comm.is_local(other) for other in range(size)] == [other in nodes[comm.node] for other in range(size)]
        with pytest.raises(ValueError, match=f"rank {size} is not below"):
            comm.is_local(size)
        for count in (1, 1000, 300_000):
            total = comm.all_reduce(contribution(rank, count))
            np.testing.assert_array_equal(total, sum_by_node(nodes, count))
        np.testing.assert_array_equal(comm.all_gather(np.full(3, rank)), np.repeat(np.arange(size), 3))
        received = comm.send_recv(np.full(50_000, rank), (rank + 1) % size, np.empty(50_000, int), (rank - 1) % size)
        assert (received == (rank - 1) % size).all()
        assert comm.exchange_objects({"rank": rank}) == [{"rank": each} for each in range(size)]
        with comm.node_group() as mates, comm.rail_group() as rail:
            assert mates.nodes == [list(range(len(nodes[comm.node])))]
            mates.symmetric(64)
            assert rail.exchange_objects(rank) == [node[comm.node_rank] for node in nodes if comm.node_rank < len(node)]
        elsewhere = [other for other in range(size) if not comm.is_local(other)]
        with pytest.raises(ValueError, match="symmetric needs memory that all ranks share") as refused:
            comm.symmetric(64)
        assert f"ranks {elsewhere} of {size}" in str(refused.value) and "node_group" in str(refused.value)
        with comm.shrink() as again:
            assert (again.rank, again.nodes) == (rank, nodes)
            np.testing.assert_array_equal(again.all_reduce(contribution(rank, 1000)), sum_by_node(nodes, 1000))
        comm.barrier()
        return rank, nodes


@pytest.mark.parametrize("names", LAYOUTS, ids="".join)
def test_calls_go_across_nodes(names: list[str]) -> None:
    expected = [[rank for rank, name in enumerate(names) if name == node] for node in dict.fromkeys(names)]
    assert ranks.processes(len(names), call_everything, nodes=names) == [(rank, expected) for rank in range(len(names))]


def use_torch() -> list[np.ndarray]:
    warnings.simplefilter("ignore")
    dist.init_process_group("antiphon")
    rank, size = dist.get_rank(), dist.get_world_size()
    comm = antiphon.torch.communicator()
    assert len(comm.nodes) == 2
    ones = torch.full((1000,), float(rank))
    dist.all_reduce(ones)
    assert (ones == sum(range(size))).all()
    gathered = funcol.all_gather_tensor(torch.full((2,), rank), 0, dist.group.WORLD)
    assert gathered.tolist() == [each for each in range(size) for _ in range(2)]
    # One group within each node, and one across.
    for members in ([0, 1], [2, 3], [0, 3]):
        group = dist.new_group(members)
        if rank in members:
            total = torch.tensor([rank])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(members)
            assert len(antiphon.torch.communicator(group).nodes) == (2 if members == [0, 3] else 1)
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(6, 3).double())
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean().backward()
    gradients = [parameter.grad.numpy().copy() for parameter in model.parameters() if parameter.grad is not None]
    dist.destroy_process_group()
    return gradients


def test_torch_distributed_goes_across_nodes() -> None:
    first, *others = ranks.processes(4, use_torch, nodes=["a", "a", "b", "b"])
    assert len(first) == 2
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


PROGRAM = """
    import antiphon, numpy as np, os
    comm = antiphon.init()
    total = comm.all_reduce(np.full(3, float(comm.rank)))
    # In one piece: ranks share the pipe, and Python may be told not to buffer.
    os.write(1, f"rank {comm.rank} of {comm.world_size} {comm.nodes} {total.tolist()}\\n".encode())
"""


@pytest.mark.parametrize("launcher", ["antiphon run", "torchrun"])
def test_launchers_of_two_nodes_make_one_world(launcher: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    module = {"antiphon run": ["antiphon", "run"], "torchrun": ["torch.distributed.run"]}[launcher]
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    environment = os.environ | {"ANTIPHON_SECRET": "of the test", "ANTIPHON_PYTHON": sys.executable}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *module, *options, "--node-rank", str(node), str(program)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]
    try:
        said = [process.communicate(timeout=ranks.LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    # `antiphon run` names the rank before each line.
    lines = sorted(line[line.index("rank") :] for output, _ in said for line in output.splitlines() if "rank" in line)
    assert lines == [f"rank {rank} of 4 [[0, 1], [2, 3]] [6.0, 6.0, 6.0]" for rank in range(4)]
