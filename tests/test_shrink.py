"""Going on after a loss: `abort` and `shrink`."""

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import antiphon
import ranks


def train_until(left: int) -> list[int]:
    """Trains while ranks are killed, until ``left`` ranks are left, and returns the first numbers of these ranks."""
    comm = antiphon.init()
    first = comm.rank
    if first >= left:
        # One after the other, the second often while the others shrink.
        comm.barrier()
        threading.Timer(0.05 + 0.002 * first, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        comm.barrier()
    while True:
        try:
            gradient = comm.all_reduce(np.ones(100_000))
            members = comm.exchange_objects(first)
        except antiphon.PeerLostError:
            start, old = time.monotonic(), comm
            comm = old.shrink()
            assert time.monotonic() - start < comm.timeout / 2, "the deadline has nothing to do with it"
            old.close()
        else:
            assert gradient[0] == len(members) == comm.world_size and members[comm.rank] == first
            if len(members) == left:
                comm.barrier()
                return members


def test_surviving_ranks_continue_without_the_killed() -> None:
    results = ranks.processes(4, train_until, 2, dying={2, 3})
    assert results[:2] == [[0, 1], [0, 1]]


def test_abort_from_another_thread_ends_waits_everywhere_and_all_go_on() -> None:
    def body(comm: antiphon.Communicator) -> tuple[Any, ...]:
        if comm.rank == 1:
            threading.Timer(0.2, comm.abort).start()
        pending = comm.start_recv(np.zeros(1), (comm.rank + 1) % 3)
        start = time.monotonic()
        with pytest.raises(antiphon.AbortedError, match="rank 1 called abort") as raised:
            comm.barrier() if comm.rank == 0 else comm.recv(np.zeros(1), 0)
        with pytest.raises(antiphon.AbortedError, match="rank 1 called abort"):
            pending.wait()
        assert time.monotonic() - start < 5
        with pytest.raises(antiphon.AbortedError, match="failed earlier"):
            comm.barrier()
        with comm.shrink() as again:
            return raised.value.rank, raised.value.world_rank, again.rank, again.all_reduce(np.ones(1)).item()

    assert ranks.threads(3, body) == [(1, 1, 0, 3.0), (1, 1, 1, 3.0), (1, 1, 2, 3.0)]


def test_a_rank_that_lives_and_does_not_shrink_is_named() -> None:
    is_over = threading.Event()

    def body(comm: antiphon.Communicator) -> str:
        if comm.rank == 1:
            assert is_over.wait(20), "rank 0 waits for ever"
            return ""
        with pytest.raises(TimeoutError) as raised:
            comm.shrink()
        is_over.set()
        return str(raised.value)

    text, _ = ranks.threads(2, body, timeout=0.3)
    assert text.startswith("shrink timed out") and text.endswith("still waiting for ranks [1] of 2")
