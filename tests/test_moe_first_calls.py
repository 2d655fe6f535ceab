"""In a program whose only calls on GPUs are those of mixtures of experts, these set GPUs up as the collectives do."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import antiphon
import needs
import ranks
from antiphon._core import Moe
from gpu_arrays import Driver, arrays, device_count

pytestmark = pytest.mark.cuda

TOKENS, EXPERTS, HIDDEN = 4, 8, 128
ROOM = 1 << 20
#: What a wait that does not end by itself is given.
LONG = 60.0

Comm = antiphon.Communicator


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go into the device's own stream, also where other tests have imported torch."""
    needs.need("gpus 2", device_count() >= 2, f"{device_count()} found")
    for name in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, name, raising=False)


class Layer:
    """The routing of a rank's tokens, each to one expert of each rank."""

    def __init__(self, comm: Comm, make: Any) -> None:
        self.moe = Moe(comm)
        self.x = make(np.ones((TOKENS, HIDDEN), np.float32))
        self.ids = make(np.tile(np.array([[0, EXPERTS // 2]], np.int64), (TOKENS, 1)))
        self.per_rank, self.per_expert = (make(shape=(n,), dtype=np.int32) for n in (comm.world_size, EXPERTS))
        self.in_rank = make(shape=(TOKENS, comm.world_size), dtype=np.uint8)

    def layout(self) -> None:
        """Has no part for peers, and sets up what the calls share with them if it is the first call."""
        self.moe.layout(self.ids, (self.per_rank, self.per_expert, self.in_rank))

    def notify(self, **capacity: Any) -> Any:
        return self.moe.notify((self.x, None, None, None), (self.per_rank, self.per_expert, self.in_rank), **capacity)


def test_a_failure_is_told_by_the_communicator() -> None:
    is_over = threading.Event()

    def body(comm: Comm) -> None:
        told: list[Exception] = []
        comm.on_cuda_failure(told.append)
        # The barrier behind the arrays finds the communicator failed.
        with pytest.raises((TimeoutError, RuntimeError)), arrays(comm, ROOM) as make:
            layer = Layer(comm, make)
            layer.layout()
            comm.barrier()
            if comm.rank == 1:
                is_over.wait(LONG)
                return
            # With a capacity no call of this rank waits for the kernel, which gives up.
            layer.notify(capacity=TOKENS * comm.world_size)
            end = time.monotonic() + LONG
            while not told and time.monotonic() < end:
                time.sleep(0.01)
            assert [type(error) for error in told] == [TimeoutError], told
            with pytest.raises(TimeoutError, match="ranks \\[1\\]"):
                comm.check()
            is_over.set()

    ranks.threads(2, body, timeout=3)


def test_first_calls_of_two_threads_set_up_once() -> None:
    def body(comm: Comm) -> None:
        with arrays(comm, ROOM) as make:
            layer = Layer(comm, make)
            together = threading.Barrier(2)
            errors: list[Exception] = []

            def call() -> None:
                together.wait()
                try:
                    layer.layout()
                except Exception as error:
                    errors.append(error)

            # The other rank makes one call, so a second part of rank 0 would wait for a peer.
            if comm.rank == 0:
                threads = [threading.Thread(target=call) for _ in range(2)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            else:
                layer.layout()
            assert not errors, errors
            assert layer.per_rank.read().tolist() == [TOKENS] * 2

    ranks.threads(2, body, timeout=10)


@contextlib.contextmanager
def captured(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Iterator[None]:
    """A library whose current stream, of GPU 0, is being captured."""
    stream, graph, relaxed = ctypes.c_void_p(), ctypes.c_void_p(), 2
    with driver.on(0):
        driver("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        driver("cuStreamBeginCapture_v2", stream, relaxed)
    current = SimpleNamespace(ptr=stream.value)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: current)))
        yield
    with driver.on(0):
        driver("cuStreamEndCapture", stream, ctypes.byref(graph))  # an error if a call has ended the capture
        driver("cuGraphDestroy", graph)
        driver("cuStreamDestroy_v2", stream)


def test_a_first_call_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Comm) -> None:
        with arrays(comm, ROOM) as make:
            layer = Layer(comm, make)
            if comm.rank == 0:
                with captured(monkeypatch, Driver()), pytest.raises(ValueError, match="first MoE call .* make one before the capture"):
                    layer.layout()
            comm.barrier()
            layer.layout()
            assert layer.per_rank.read().tolist() == [TOKENS] * 2

    ranks.threads(2, body, timeout=30)


def test_ctrl_c_ends_the_wait_for_counts(tmp_path: Path) -> None:
    was_interrupted = threading.Event()

    def rank(number: int) -> None:
        with antiphon.init(rank=number, world_size=2, path=tmp_path / "world", timeout=LONG) as comm:
            # The memory goes with the communicator: the call that was interrupted has ended it.
            with pytest.raises(RuntimeError, match="interrupted|abort"), arrays(comm, ROOM) as make:
                layer = Layer(comm, make)
                layer.layout()
                comm.barrier()
                if number == 1:
                    was_interrupted.wait(LONG)
                else:
                    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
                    with pytest.raises(KeyboardInterrupt):
                        layer.notify()
                    was_interrupted.set()
                comm.abort()

    peer = threading.Thread(target=rank, args=[1])
    peer.start()
    begin = time.monotonic()
    rank(0)  # in the main thread, to which Ctrl-C comes
    peer.join()
    assert time.monotonic() - begin < LONG / 2
