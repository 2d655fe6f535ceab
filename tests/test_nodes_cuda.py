"""CUDA tensors of ranks on several nodes, which NCCL serves: two ranks share a GPU, on nodes that are names."""

import os
from collections.abc import Callable
from typing import Any

import harness
import needs
import pytest
import ranks
import torch

import antiphon
import antiphon.torch
from antiphon.comm.mixed_comm import ParallelInfo
from antiphon.moe import ExpertParallel

pytestmark = pytest.mark.cuda

NODES = ["a", "b"]
COUNT = 1000


@pytest.fixture(autouse=True)
def what_it_needs() -> None:
    harness.need("cuda", 1)
    needs.need_ucx()


def joined() -> tuple[antiphon.Communicator, torch.device]:
    # Ranks of one machine share a GPU if NCCL takes them for ranks of two.
    os.environ |= {"NCCL_HOSTID": os.environ["ANTIPHON_NODE"], "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
    comm = antiphon.init()
    device = torch.device("cuda", comm.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return comm, device


def x_of(rank: int, device: torch.device, count: int = COUNT) -> torch.Tensor:
    """Small integers, of which every order of a sum is exact."""
    return (torch.arange(count, device=device) % 13 + 100 * rank).float()


def call_everything() -> str:
    comm, device = joined()
    rank, size = comm.rank, comm.world_size
    mine, all_of = x_of(rank, device), [x_of(other, device) for other in range(size)]
    total, blocks = torch.stack(all_of).sum(0), COUNT // size
    counts = [1, 5]

    def mine_of(x: torch.Tensor) -> torch.Tensor:
        return x[rank * blocks : (rank + 1) * blocks]

    def expect(found: Any, expected: Any) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    expect(comm.all_reduce(mine), total)
    expect(comm.all_reduce(mine.bfloat16().clone(), "max"), torch.stack(all_of).amax(0).bfloat16())
    in_place = mine.clone()
    assert comm.all_reduce(in_place, out=in_place) is in_place
    expect(in_place, total)
    expect(comm.all_gather(mine), torch.cat(all_of))
    expect(comm.reduce_scatter(mine), mine_of(total))
    expect(comm.all_to_all(mine), torch.cat([mine_of(x) for x in all_of]))
    expect(comm.broadcast(mine.clone(), 1), all_of[1])
    reduced = comm.reduce(mine, root=1)
    if rank == 1:
        expect(reduced, total)
    gathered = comm.gather(mine, root=0)
    if rank == 0:
        expect(gathered, torch.cat(all_of))
    expect(comm.scatter(all_of[0] if rank == 0 else None, root=0, out=torch.empty(blocks, device=device)), mine_of(all_of[0]))
    expect(comm.all_gather_v(mine[: counts[rank]], counts), torch.cat([x[:n] for x, n in zip(all_of, counts, strict=True)]))
    begin = sum(counts[:rank])
    expect(comm.reduce_scatter_v(mine[:6], counts), total[begin : begin + counts[rank]])
    outs = [torch.empty(size * n, device=device) for n in (3, 4)]
    comm.all_gather_list([mine[:3], mine[:4]], out=outs)
    expect(outs[1], torch.cat([x[:4] for x in all_of]))
    received = torch.empty_like(mine)
    comm.send_recv(mine, 1 - rank, received, 1 - rank)
    expect(received, all_of[1 - rank])
    expect(comm.start_all_reduce(mine).wait(), total)
    comm.barrier(device=device.index)

    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(mine)
    with torch.cuda.graph(graph):
        comm.all_reduce(mine, out=out)
    for _ in range(3):
        out.zero_()
        graph.replay()
        expect(out, total)
    del graph
    torch.cuda.synchronize()
    comm.check()
    comm.close()
    return comm.cuda_engine


def test_collectives_are_nccls() -> None:
    assert ranks.processes(2, call_everything, nodes=NODES) == ["nccl"] * 2


def refusals() -> list[str]:
    """Each refusal leaves the communicator as it was: an all-reduce succeeds behind it."""
    comm, device = joined()
    rank, x = comm.rank, x_of(comm.rank, device, 1024)
    other = 1 - rank
    layout = ParallelInfo(rank, 2, 0, 1, rank, 2, 1, 1, 2, 1)
    not_there: dict[str, Callable[[], Any]] = {
        "all_reduce_rms_norm": lambda: comm.all_reduce_rms_norm(x.view(1, -1)),
        "send": lambda: comm.send(x, other),
        "recv": lambda: comm.recv(x, other),
        "start_send": lambda: comm.start_send(x, other),
        "all_to_all in place": lambda: comm.all_to_all(x, out=x),
    }
    on_one_node: dict[str, Callable[[], Any]] = {
        "register_cuda": lambda: comm.register_cuda(x),
        "symmetric": lambda: comm.symmetric(1024, "cuda"),
        "mixed": lambda: antiphon._core.MixedHandler(comm, layout, device.index),
        "experts": lambda: ExpertParallel(comm, 2, 1024).dispatch(x.view(1, -1), x.new_zeros(1, 1, dtype=torch.int64), x.new_ones(1, 1)),
    }
    told = []
    for kind, calls in ((NotImplementedError, not_there), (ValueError, on_one_node)):
        for name, call in calls.items():
            with pytest.raises(kind) as raised:
                call()
            told.append(f"{name}: {raised.value}")
            assert comm.all_reduce(torch.ones(1, device=device)).item() == 2
    return told


def test_what_nccl_lacks_is_refused_with_the_remedy() -> None:
    for told in ranks.processes(2, refusals, nodes=NODES):
        by_name = dict(text.split(": ", 1) for text in told)
        assert "node_group()" in by_name["all_reduce_rms_norm"] and "send_recv" in by_name["send"], by_name


def without_nccl() -> str:
    os.environ["ANTIPHON_NCCL"] = "/nowhere/libnccl.so.2" if os.environ["RANK"] == "1" else os.environ.get("ANTIPHON_NCCL", "")
    if not os.environ["ANTIPHON_NCCL"]:
        del os.environ["ANTIPHON_NCCL"]
    comm, device = joined()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        comm.all_reduce(torch.ones(1, device=device))
    assert comm.all_reduce(torch.ones(1)).item() == 2, "calls on the host go on"
    return str(raised.value)


def test_a_rank_without_nccl_is_named_on_all() -> None:
    elsewhere, there = ranks.processes(2, without_nccl, nodes=NODES)
    assert "/nowhere" in there and "rank 1" in elsewhere, (elsewhere, there)
