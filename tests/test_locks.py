"""How many locks a warm call takes: docs/guide/python.md gives the numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import antiphon
import needs
import ranks
from antiphon import _core
from antiphon.language import library
from gpu_arrays import arrays, device_count

CALLS = 1000
COUNT = 64

Comm = antiphon.Communicator


def locks_of(call: Callable[[], Any], calls: int = CALLS) -> float:
    """The locks that each of ``calls`` calls takes on this thread, on average."""
    for _ in range(3):
        call()
    before = locks_taken()
    for _ in range(calls):
        call()
    return (locks_taken() - before) / calls


def locks_taken() -> int:
    taken = _core._locks_taken()
    assert taken is not None
    return taken


def need_a_count() -> None:
    counted = _core._locks_taken() is not None
    needs.need("debug build", counted, "only builds with debug assertions count locks")


HOST: dict[str, Callable[[Comm, Any, Any], Any]] = {
    "all_reduce": lambda comm, x, row: comm.all_reduce(x, out=x, op="max"),
    "all_gather": lambda comm, x, row: comm.all_gather(x, out=row),
    "reduce_scatter": lambda comm, x, row: comm.reduce_scatter(row, out=x, op="max"),
    "all_to_all": lambda comm, x, row: comm.all_to_all(row),
    "broadcast": lambda comm, x, row: comm.broadcast(x),
    "reduce": lambda comm, x, row: comm.reduce(x, op="max"),
    "gather": lambda comm, x, row: comm.gather(x),
    "scatter": lambda comm, x, row: comm.scatter(row, out=x),
    "all_reduce_rms_norm": lambda comm, x, row: comm.all_reduce_rms_norm(x.reshape(1, COUNT)),
    "barrier": lambda comm, x, row: comm.barrier(),
}


@pytest.mark.parametrize("operation", HOST)
def test_a_call_on_the_host_takes_five_locks(operation: str) -> None:
    need_a_count()

    def body(comm: Comm) -> float:
        x, row = np.ones(COUNT, np.float32), np.ones(2 * COUNT, np.float32)
        return locks_of(lambda: HOST[operation](comm, x, row))

    # A rank that waits for long locks once more, to sleep.
    assert all(5 <= locks < 5.1 for locks in ranks.threads(2, body))


@pytest.mark.cuda
def test_a_call_on_a_gpu_takes_two_locks() -> None:
    need_a_count()
    text = library.build("packet-all-reduce", 2)

    def body(comm: Comm) -> list[float]:
        plan = comm.load_plan(text, device=comm.rank)
        with arrays(comm, 1 << 16) as make:
            x, row = make(np.ones(COUNT, np.float32)), make(np.ones(2 * COUNT, np.float32))
            return [
                locks_of(lambda: comm.all_reduce(x, "max", out=x, stream=0), 100),
                locks_of(lambda: comm.all_gather(x, out=row, stream=0), 100),
                locks_of(lambda: comm.reduce_scatter(row, "max", out=x, stream=0), 100),
                locks_of(lambda: comm.all_to_all(row, out=row, stream=0), 100),
                locks_of(lambda: comm.broadcast(x, stream=0), 100),
                locks_of(lambda: plan.execute(x, x, stream=0), 100),
            ]

    found = device_count()
    needs.need("gpus 2", found >= 2, f"{found} found")
    assert ranks.threads(2, body, timeout=60) == [[2.0] * 6] * 2
