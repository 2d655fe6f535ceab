"""Training on the ``torch.distributed`` backend, how its programs start, and what a lost rank does to them."""

import os
import pickle
import signal
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import antiphon.torch
import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power_sgd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()


def batch(step: int, part: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(12, width, generator=generator, dtype=torch.float64) for width in (6, 3))
    return x[part], y[part]


def whole(tensor: torch.Tensor | None) -> np.ndarray:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy().copy()


def trained(module: torch.nn.Module, part: slice = slice(None)) -> list[np.ndarray]:
    """The gradients of every step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, part)
        torch.nn.functional.mse_loss(module(x), y).backward()
        found += [whole(parameter.grad) for parameter in module.parameters()]
        optimizer.step()
    return found


def train_in_parallel() -> dict[str, list[np.ndarray]]:
    warnings.simplefilter("ignore")
    dist.init_process_group("antiphon")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)
    found = {
        "DDP": trained(DistributedDataParallel(model()), part),
        "DDP, many buckets": trained(DistributedDataParallel(model(), bucket_cap_mb=1e-4), part),
        "DDP, unused parameters": trained(DistributedDataParallel(model(), find_unused_parameters=True), part),
    }
    sharded = model()
    for layer in sharded:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(sharded)
    found["FSDP2"] = trained(sharded, part)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_equal_those_of_one_process_on_the_whole_batch(world_size: int) -> None:
    expected = trained(model())
    everywhere = ranks.processes(world_size, train_in_parallel)
    for of_rank in everywhere:
        for how, found in of_rank.items():
            assert len(found) == len(expected), how
            for mine, theirs, alone in zip(found, everywhere[0][how], expected):
                assert mine.tobytes() == theirs.tobytes(), f"{how}: ranks differ"
                np.testing.assert_allclose(mine, alone, rtol=1e-12, atol=1e-14, err_msg=how)


def train_with_power_sgd() -> list[np.ndarray]:
    """With a hook whose callbacks make calls of the group, and wait for them."""
    warnings.simplefilter("ignore")
    dist.init_process_group("antiphon", timeout=timedelta(seconds=30))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(model())
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    module.register_comm_hook(state, power_sgd.powerSGD_hook)
    found = trained(module, slice(rank * 12 // world_size, (rank + 1) * 12 // world_size))
    assert state.total_numel_after_compression < state.total_numel_before_compression
    dist.destroy_process_group()
    return found


def test_power_sgd_compresses_the_gradients_alike_on_all_ranks() -> None:
    mine, theirs = ranks.processes(2, train_with_power_sgd)
    for one, other in zip(mine, theirs, strict=True):
        assert np.isfinite(one).all() and one.tobytes() == other.tobytes()
    for found, alone in zip(mine, trained(model())[: 4 * 2]):  # which are not compressed yet
        np.testing.assert_allclose(found, alone, rtol=1e-12, atol=1e-14)


# A lost rank


def lose_rank_1(report: str) -> None:
    dist.init_process_group("antiphon", timeout=timedelta(seconds=30))
    module = DistributedDataParallel(model())
    trained(module)
    group = dist.new_group(backend="antiphon")
    started = dist.new_group(backend="antiphon")
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def failure(call: Any) -> BaseException:
        with pytest.raises(Exception) as caught:
            call()
        return caught.value

    x, y = batch(0)
    loss = torch.nn.functional.mse_loss(module(x), y)
    work = dist.all_reduce(torch.ones(3), group=started, async_op=True)
    functional = funcol.all_reduce(torch.ones(3), "sum", started)
    errors = [
        failure(lambda: funcol.wait_tensor(functional)),
        failure(lambda: dist.all_reduce(torch.ones(3), group=group)),
        failure(work.wait),
        failure(loss.backward),
        failure(dist.barrier),
    ]
    dist.destroy_process_group()
    found = [(type(error), str(error), getattr(error, "rank", None)) for error in errors]
    Path(report).write_bytes(pickle.dumps(found))


def test_the_loss_of_a_rank_raises_peer_lost_error(tmp_path: Path) -> None:
    report = tmp_path / "report"
    with pytest.raises(RuntimeError, match="rank 1 ended with status -9"):
        ranks.processes(2, lose_rank_1, str(report))
    functional, blocking, started, backward, after = pickle.loads(report.read_bytes())
    for kind, text, lost in (functional, blocking, started, after):
        assert kind is antiphon.PeerLostError and lost == 1, (kind, text)
    assert issubclass(backward[0], RuntimeError) and "PeerLostError: rank 1" in backward[1], backward


# How groups and programs start


def begin_and_end(folder: str) -> None:
    rank = int(os.environ["RANK"])

    # One store, as under torchrun, in which the keys of earlier times still lie.
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    open_before = 0
    for turn in range(50):
        dist.init_process_group("antiphon", store=store, rank=rank, world_size=2)
        total = torch.tensor([turn])
        dist.all_reduce(total)
        assert total.item() == 2 * turn
        dist.destroy_process_group()
        open_before = open_before or len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= open_before + 2  # the last connections close in the background

    # Any init_method.
    dist.init_process_group("antiphon", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    comm = antiphon.torch.communicator()
    assert comm.exchange_objects(rank) == [0, 1]
    dist.destroy_process_group()
    assert comm.closed

    # A store that no other rank joins.
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not come"):
        dist.init_process_group(
            "antiphon", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=1)
        )
    assert not dist.is_initialized()


def test_groups_begin_and_end(tmp_path: Path) -> None:
    ranks.processes(2, begin_and_end, str(tmp_path))


PROGRAM = """
import antiphon.torch, torch, torch.distributed as dist
dist.init_process_group("antiphon")
total = torch.ones(1)
dist.all_reduce(total)
print(f"total {total.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        ["-m", "antiphon", "run", "-n", "2", sys.executable],
    ],
    ids=["torchrun", "antiphon run"],
)
def test_launchers_start_programs(launcher: list[str], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.count("total 2.0") == 2, done.stdout + done.stderr
