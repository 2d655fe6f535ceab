"""Time-outs are symmetric: a rank that ends a call after another rank gave up in it raises too, in every operation."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import antiphon
import antiphon.language.library
import antiphon.moe
import ranks

#: In seconds.
TIMEOUT = 0.3

Comm = antiphon.Communicator
#: Prepares the call of a rank, with all ranks in time.
Prepare = Callable[[Comm], Callable[[], Any]]

CALLS: dict[str, Prepare] = {}


def operation(prepare: Prepare) -> Prepare:
    CALLS[prepare.__name__] = prepare
    return prepare


def of_table(name: str, *arguments: Any, **named: Any) -> None:
    """A method of the communicator, on four rows."""

    def prepare(comm: Comm) -> Callable[[], Any]:
        x = np.ones((4, 8), np.float32)
        return lambda: getattr(comm, name)(x, *arguments, **named)

    prepare.__name__ = "_".join([name, *map(str, named.values())]).replace("-", "_")
    operation(prepare)


for _algorithm in "one-shot", "two-shot":
    of_table("all_reduce", algorithm=_algorithm)
for _name in "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "start_all_reduce":
    of_table(_name)
of_table("all_to_all_v", [2, 2], [2, 2])
of_table("all_gather_v", [4, 4])
of_table("reduce_scatter_v", [2, 2])


@operation
def started_and_waited_for(comm: Comm) -> Callable[[], Any]:
    x = np.ones(8)
    return lambda: comm.start_all_reduce(x, out=x).wait()


@operation
def large_all_reduce(comm: Comm) -> Callable[[], Any]:
    x = np.ones(3 << 20, np.float32)
    return lambda: comm.all_reduce(x, out=x)


@operation
def scatter(comm: Comm) -> Callable[[], Any]:
    x, out = np.ones((4, 2)), np.ones((2, 2))
    return lambda: comm.scatter(x if comm.rank == 0 else None, out=out)


@operation
def barrier(comm: Comm) -> Callable[[], Any]:
    return comm.barrier


@operation
def objects(comm: Comm) -> Callable[[], Any]:
    return lambda: comm.exchange_objects({"rank": comm.rank})


@operation
def send_recv(comm: Comm) -> Callable[[], Any]:
    x, out = np.ones(4), np.ones(4)
    return lambda: comm.send_recv(x, 1 - comm.rank, out, 1 - comm.rank)


@operation
def split(comm: Comm) -> Callable[[], Any]:
    return lambda: comm.split(0)


@operation
def shared_buffer(comm: Comm) -> Callable[[], Any]:
    return lambda: comm.symmetric(64)


@operation
def fused(comm: Comm) -> Callable[[], Any]:
    x = np.ones((2, 16), np.float32)
    return lambda: comm.all_reduce_rms_norm(x, x)


@operation
def plan(comm: Comm) -> Callable[[], Any]:
    loaded, x = comm.load_plan(antiphon.language.library.build("ring-all-gather", 2)), np.ones((4, 8), np.float32)
    return lambda: loaded.execute(x)


@operation
def torch_backend(comm: Comm) -> Callable[[], Any]:
    from antiphon.torch.group import Group

    group, x = Group(torch.distributed.HashStore(), comm.rank, comm.world_size, comm), torch.ones(4)
    options = torch.distributed.AllreduceOptions()
    options.asyncOp = False
    return lambda: group.allreduce([x], options)


@operation
def operator(comm: Comm) -> Callable[[], Any]:
    import antiphon.torch

    group, x = antiphon.torch.ops.register(comm), torch.ones(4)
    return lambda: torch.ops.antiphon.all_reduce(x, group)


def experts(comm: Comm) -> tuple[antiphon.moe.ExpertParallel, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.arange(8).reshape(4, 2) % 4
    return antiphon.moe.ExpertParallel(comm, 4, 16), torch.ones(4, 16), ids, torch.ones(4, 2)


@operation
def moe_dispatch(comm: Comm) -> Callable[[], Any]:
    parallel, *tokens = experts(comm)
    return lambda: parallel.dispatch(*tokens)


@operation
def moe_combine(comm: Comm) -> Callable[[], Any]:
    parallel, *tokens = experts(comm)
    received = parallel.dispatch(*tokens)
    return lambda: parallel.combine(received.x, received.routes)


@operation
def moe_by_expert(comm: Comm) -> Callable[[], Any]:
    parallel, x, *_ = experts(comm)
    chosen = torch.ones(4, 4, dtype=torch.bool)
    return lambda: parallel.dispatch_by_expert(x, chosen)


@operation
def moe_to_slots(comm: Comm) -> Callable[[], Any]:
    parallel, x, ids, _ = experts(comm)
    return lambda: parallel.dispatch_to_slots(x.bfloat16(), ids, max_tokens=4)


def outcomes(prepare: Prepare) -> list[Any]:
    """Of both ranks, of which rank 1 comes to the second call when rank 0 has given up."""
    given_up = threading.Event()

    def body(comm: Comm) -> Any:
        call = prepare(comm)
        call()
        comm.barrier()
        comm.timeout = TIMEOUT
        if comm.rank == 1:
            given_up.wait(timeout=20)
        try:
            result = call()
            return result.wait() if isinstance(result, antiphon.Pending) else result
        finally:
            given_up.set()

    return ranks.outcomes(2, body)


@pytest.fixture(scope="module")
def all_outcomes() -> dict[str, list[Any]]:
    """The ranks sleep, so that many worlds run at once."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip(CALLS, pool.map(outcomes, CALLS.values())))


@pytest.mark.parametrize("name", CALLS)
def test_a_late_rank_raises_as_the_rank_that_gave_up_did(name: str, all_outcomes: dict[str, list[Any]]) -> None:
    first, late = all_outcomes[name]
    assert isinstance(first, TimeoutError), first
    assert isinstance(late, RuntimeError), late
    assert "rank 0 gave up waiting for rank 1" in str(late)
