"""Meeting, groups, objects, closing, and everything that can go wrong."""

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import antiphon
import ranks
from antiphon._core import strided_memory

# Meeting.


def test_a_world_of_one_needs_no_rendezvous() -> None:
    with antiphon.init(rank=0, world_size=1, path="/nowhere", timeout=1.5) as comm:
        assert (comm.rank, comm.world_size, comm.timeout) == (0, 1, 1.5)
        assert repr(comm) == "<antiphon.Communicator: rank 0 of 1>"


def meet_by_environment() -> tuple[int, int, list[int]]:
    with antiphon.init() as comm:
        return comm.rank, comm.world_size, comm.exchange_objects(os.getpid())


def test_processes_meet_by_torchruns_environment() -> None:
    first, second = ranks.processes(2, meet_by_environment)
    assert first[:2] == (0, 2) and second[:2] == (1, 2)
    assert first[2] == second[2] and len(set(first[2])) == 2


def meet_by_group() -> list[Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    world = antiphon.init(group=dist.group.WORLD)
    odd = dist.new_group([1, 2])
    results = [world.rank, world.all_reduce(np.ones(1)).tolist()]
    if dist.get_rank() > 0:
        results.append(antiphon.init(group=odd).exchange_objects(dist.get_rank()))
    else:
        with pytest.raises(ValueError, match="not in the group"):
            antiphon.init(group=odd)
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_processes_meet_by_a_torch_process_group() -> None:
    assert ranks.processes(3, meet_by_group) == [[0, [3.0]], [1, [3.0], [1, 2]], [2, [3.0], [1, 2]]]


def test_ranks_meet_by_any_exchange() -> None:
    def body(comm: antiphon.Communicator) -> list[int]:
        mine = antiphon.init(rank=comm.rank, world_size=2, exchange=comm.exchange_bytes)
        return mine.exchange_objects(mine.rank)

    assert ranks.threads(2, body) == [[0, 1], [0, 1]]


def test_an_exchange_that_raises_says_so() -> None:
    def broken(mine: bytes) -> list[bytes]:
        raise LookupError("no peers today")

    with pytest.raises(LookupError, match="no peers today"):
        antiphon.init(rank=0, world_size=2, exchange=broken)
    with pytest.raises(RuntimeError, match="exchange"):
        antiphon.init(rank=1, world_size=2, exchange=lambda mine: [])


def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] never arrived"):
        antiphon.init(rank=0, world_size=3, path=tmp_path / "world", timeout=0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank and world_size need path or exchange"),
        ({"path": "/x"}, "path needs rank and world_size"),
        ({"path": "/x", "rank": 2, "world_size": 2}, "rank 2 is not below the world size 2"),
        ({"path": "/x", "rank": -1, "world_size": 2}, "rank -1 is not below the world size 2"),
        ({"path": "/x", "exchange": list}, "one way to meet, not path and exchange"),
        ({"secret": "x"}, "secret is for meeting at a path"),
        ({"path": "/x", "rank": 0, "world_size": 1, "timeout": -1.0}, "timeout is -1"),
    ],
)
def test_senseless_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        antiphon.init(**arguments)


def test_a_missing_environment_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="WORLD_SIZE: it is not set .*antiphon run"):
        antiphon.init()


# Groups and objects.


def test_split() -> None:
    def body(comm: antiphon.Communicator) -> Any:
        group = comm.split(None if comm.rank == 3 else comm.rank % 2, key=-comm.rank)
        return group and (group.rank, group.exchange_objects(comm.rank))

    assert ranks.threads(4, body) == [(1, [2, 0]), (0, [1]), (0, [2, 0]), None]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not me")


def test_objects_that_do_not_pickle() -> None:
    def body(comm: antiphon.Communicator) -> None:
        kind, text = (TypeError, "not me") if comm.rank == 1 else (RuntimeError, "rank 1 could not pickle its object: .*not me")
        with pytest.raises(kind, match=text):
            comm.exchange_objects(Unpicklable() if comm.rank == 1 else {"fine": 1})
        assert comm.exchange_objects((comm.rank, "x" * 300_000))[1] == (1, "x" * 300_000)

    ranks.threads(2, body)


# Arrays that cannot be used. The communicator stays usable after each.


class CudaArray:
    """Says that it is on a GPU that no machine has."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 99)

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int] | None = None) -> Any:
        assert stream in (1, 7)  # the legacy default stream, unless another is given
        return strided_memory(F32.ctypes.data, 16, 16, 1, "float32", 99)


def read_only() -> Any:
    x = np.zeros(4, np.float32)
    x.flags.writeable = False
    return x


F32 = np.zeros(4, np.float32)
NEGATED = torch.zeros(4, dtype=torch.complex64).conj().imag.as_strided((2,), (1,))
BAD = {
    "strided": (lambda c: c.all_reduce(F32[::2]), ValueError, r"strides \[2\] .* is not contiguous"),
    "transposed": (lambda c: c.all_reduce(torch.zeros(2, 3).T), ValueError, r"shape \[3, 2\] with strides \[1, 3\]"),
    "Fortran": (lambda c: c.all_gather(np.zeros((2, 2), order="F")), ValueError, "not contiguous"),
    "strided out": (lambda c: c.all_reduce(F32[:2], out=F32[::2]), ValueError, "the output .* is not contiguous"),
    "dtypes": (lambda c: c.all_reduce(F32, out=np.zeros(4)), TypeError, "input is float32, the output is float64"),
    "dtypes of one size": (
        lambda c: c.all_gather(torch.zeros(1, dtype=torch.int16), out=torch.zeros(1, dtype=torch.bfloat16)),
        TypeError,
        "input is int16, the output is bfloat16",
    ),
    "read-only out": (lambda c: c.all_reduce(F32, out=read_only()), ValueError, "the output is read-only"),
    "read-only in place": (lambda c: c.broadcast(read_only()), ValueError, "the output is read-only"),
    "bytes out": (lambda c: c.all_gather(b"x", out=b"y"), ValueError, "the output is read-only"),
    "count": (lambda c: c.all_reduce(F32, out=F32[:3].copy()), ValueError, "output has 3 elements, expected 4"),
    "overlap": (lambda c: c.all_reduce(F32[:2], out=F32[1:3]), ValueError, "input and output overlap"),
    "no arithmetic": (lambda c: c.all_reduce(np.zeros(2, np.int16)), TypeError, "int16 cannot be reduced, only float64, float32"),
    "no arithmetic either": (
        lambda c: c.reduce_scatter(torch.zeros(2, dtype=torch.float8_e4m3fn)),
        TypeError,
        "float8_e4m3fn cannot be reduced",
    ),
    "operator": (lambda c: c.all_reduce(F32, "mul"), ValueError, r"known are sum, prod, min, max, avg \(or mean\)"),
    "operator type": (lambda c: c.all_reduce(F32, 3), TypeError, "op is 3: pass a name"),
    "no array": (lambda c: c.all_reduce([1.0, 2.0]), TypeError, "is a list, which is no array"),
    "no array out": (lambda c: c.all_reduce(F32, out="text"), TypeError, "the output is a str"),
    "objects": (lambda c: c.all_gather(np.array([object()])), TypeError, "format .*O.* not supported"),
    "dates": (lambda c: c.all_gather(np.zeros(2, "M8[s]")), TypeError, "cannot be exchanged"),
    "big-endian": (lambda c: c.all_reduce(np.zeros(2, ">f4")), TypeError, "not supported"),
    "structs": (lambda c: c.all_gather(np.zeros(2, [("a", "f4"), ("b", "f4")])), TypeError, "not supported"),
    "no such device": (lambda c: c.all_reduce(CudaArray(), out=CudaArray(), stream=7), RuntimeError, "libcuda|device 99"),
    "nothing like it": (lambda c: c.all_reduce(CudaArray()), TypeError, "no output can be made like this array .* pass out="),
    "two memories": (lambda c: c.all_reduce(F32, out=CudaArray()), ValueError, "input is on host, the output on cuda:99"),
    "and back": (lambda c: c.all_gather(CudaArray(), out=F32), ValueError, "input is on cuda:99, the output on host"),
    "a stream of host memory": (lambda c: c.all_reduce(F32, stream=1), ValueError, "host memory has no stream 1"),
    "a reduction on no device": (lambda c: c.reduce(CudaArray(), out=CudaArray()), RuntimeError, "libcuda|device 99"),
    "a message on no device": (lambda c: c.send(CudaArray(), 0), RuntimeError, "libcuda|device 99"),
    "started on no device": (lambda c: c.start_broadcast(CudaArray()), RuntimeError, "libcuda|device 99"),
    "no message started": (lambda c: c.start_recv(CudaArray(), 0), RuntimeError, "libcuda|device 99"),
    "no message from any rank": (
        lambda c: c.start_recv(CudaArray(), None),
        NotImplementedError,
        "start_recv from any rank on cuda:99: it takes host memory only",
    ),
    "no tag on CUDA": (lambda c: c.start_send(CudaArray(), 0, tag=3), NotImplementedError, "tag 3 on cuda:99"),
    "a barrier of no device": (lambda c: c.barrier(stream=1), ValueError, "a stream needs its device"),
    "a barrier on no device": (lambda c: c.barrier(device=99, stream=1), RuntimeError, "libcuda|device 99"),
    "nothing to prepare": (lambda c: c.prepare_cuda(99), RuntimeError, "libcuda|device 99"),
    "too little to prepare": (
        lambda c: c.prepare_cuda(99, staging_bytes=1 << 20),
        ValueError,
        "staging_bytes is 1048576, and must be at least 16777216",
    ),
    "unknown to prepare": (lambda c: c.prepare_cuda(99, dtypes=["int8"]), ValueError, "'?\"?int8.* is not reduced on CUDA"),
    "no buffer": (lambda c: c.symmetric(64, 99), RuntimeError, "libcuda|device 99"),
    "meta": (lambda c: c.all_reduce(torch.zeros(2, device="meta")), ValueError, "no memory .*: Cannot pack tensors on meta$"),
    "sparse": (lambda c: c.all_reduce(torch.zeros(2, 2).to_sparse()), ValueError, "no memory that could be exchanged"),
    "conjugated": (lambda c: c.all_gather(torch.zeros(2, dtype=torch.complex64).conj()), ValueError, "resolve_conj"),
    "negated": (lambda c: c.start_all_reduce(torch.zeros(1).mul(1j).conj().imag), ValueError, "resolve_neg"),
    "root": (lambda c: c.broadcast(F32, 7), ValueError, "root rank 7 is not below the world size 1"),
    "destination": (lambda c: c.send(F32, 7), ValueError, "destination rank 7"),
    "negated, longer": (lambda c: c.all_reduce(NEGATED), ValueError, "resolve_neg"),
    "negative rank": (lambda c: c.send(F32, -1), ValueError, "-1 is negative"),
    "negative root": (lambda c: c.broadcast(F32, -1), ValueError, "-1 is negative"),
    "negative color": (lambda c: c.split(-1), ValueError, "-1 is negative"),
    "negative size": (lambda c: c.symmetric(-1), ValueError, "-1 is negative"),
    "negative splits": (lambda c: c.all_to_all_v(F32, [-4], [4]), ValueError, "-4 is negative"),
    "no scattered array": (lambda c: c.scatter(None), TypeError, "the root must pass the array"),
    "splits": (lambda c: c.all_to_all_v(F32, [4, 0], [4]), ValueError, "2 .* for 1 ranks"),
    "counts": (lambda c: c.all_gather_v(F32, [4, 0]), ValueError, "all_gather_v: 2 counts for 1 ranks"),
    "other counts": (lambda c: c.all_gather_v(F32, [5]), ValueError, "has 4 elements, expected 5 .the count of rank 0"),
    "negative counts": (lambda c: c.reduce_scatter_v(F32, [-4]), ValueError, "-4 is negative"),
    "in place uneven": (lambda c: c.all_to_all_v(F32, [4], [4], out=F32), ValueError, "overlap"),
    "handle timeout": (lambda c: c.start_barrier().wait(float("nan")), ValueError, "no number of seconds"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_and_do_no_harm(name: str) -> None:
    call, kind, message = BAD[name]

    def body(comm: antiphon.Communicator) -> None:
        with pytest.raises(kind, match=message):
            call(comm)
        assert comm.all_reduce(np.ones(1)) == 1

    ranks.threads(1, body)


def test_a_new_output_is_refused_on_another_stream_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(ptr=5)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: current))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    x = type("CupyArray", (CudaArray,), {"__module__": "cupy"})()

    def body(comm: antiphon.Communicator) -> None:
        for call in (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.all_to_all):
            with pytest.raises(ValueError, match=r"stream 7 is not the current one \(5\).*: pass out="):
                call(x, stream=7)
        with pytest.raises(RuntimeError, match="libcuda|device 99"):
            comm.all_reduce(x, out=x, stream=7)
        for current.ptr, same in ((7, 7), (0, 1)):  # two numbers of the default stream
            with pytest.raises(Exception) as caught:
                comm.all_reduce(x, stream=same)
            assert "is not the current one" not in str(caught.value)

    ranks.threads(1, body)


def test_rows_that_cannot_be_divided() -> None:
    def body(comm: antiphon.Communicator) -> None:
        with pytest.raises(ValueError, match=r"3 rows \(of shape \[3, 2\]\) cannot be divided among 2 ranks"):
            comm.reduce_scatter(np.zeros((3, 2)))
        with pytest.raises(ValueError, match="the input has 3 elements, expected 2"):
            comm.reduce_scatter(np.zeros(3), out=np.zeros(1))

    ranks.threads(2, body)


def test_blocks_that_do_not_fit_are_not_taken_for_in_place() -> None:
    def body(comm: antiphon.Communicator) -> None:
        whole, rank = np.zeros(6, np.float32), comm.rank
        with pytest.raises(ValueError, match="overlap"):
            comm.all_gather(whole[2 * rank : 2 * rank + 2], out=whole)
        with pytest.raises(ValueError, match="overlap"):
            comm.reduce_scatter(whole, out=whole[2 * rank : 2 * rank + 2])

    ranks.threads(2, body)


def test_a_buffer_is_freed_by_its_own_communicator_or_not_at_all() -> None:
    def body(comm: antiphon.Communicator) -> None:
        other = comm.split(0)
        assert other is not None
        buffer = comm.symmetric(64)
        with pytest.raises(ValueError, match="another communicator"):
            other.free(buffer)
        comm.free(buffer)

    ranks.threads(2, body)


# Ranks that disagree, and ranks that are gone.


def test_ranks_that_pass_different_shapes_all_get_the_error() -> None:
    def body(comm: antiphon.Communicator) -> Any:
        return comm.all_reduce(np.zeros(4 + comm.rank, np.float32))

    for error in ranks.outcomes(2, body):
        assert isinstance(error, RuntimeError)
        assert "ranks disagree" in str(error) and "all_reduce" in str(error) and "f32" in str(error)


def test_a_communicator_that_failed_keeps_saying_why() -> None:
    def body(comm: antiphon.Communicator) -> list[Exception]:
        errors = []
        for _ in range(2):
            try:
                comm.barrier() if comm.rank else comm.all_reduce(np.zeros(1))
            except Exception as error:
                errors.append(error)
        return errors

    for first, second in ranks.threads(2, body):
        assert type(first) is type(second) is RuntimeError
        assert str(first) in str(second) and "failed earlier" in str(second)


def test_a_rank_that_does_not_come_is_a_timeout_that_names_it() -> None:
    def body(comm: antiphon.Communicator) -> Any:
        return comm.barrier() if comm.rank == 0 else time.sleep(1)

    error = ranks.outcomes(2, body, timeout=0.3)[0]
    assert isinstance(error, TimeoutError)
    assert "barrier timed out" in str(error) and "ranks [1] of 2" in str(error)


def test_a_rank_that_closed_is_lost() -> None:
    def body(comm: antiphon.Communicator) -> Any:
        if comm.rank == 0:
            return comm.barrier()
        comm.close()

    error = ranks.outcomes(2, body)[0]
    assert isinstance(error, antiphon.PeerLostError) and isinstance(error, RuntimeError)
    assert error.rank == 1 and "it dropped its communicator" in str(error)


def killed_peer() -> Any:
    comm = antiphon.init()
    comm.barrier()
    if comm.rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    try:
        comm.start_all_reduce(np.zeros(1)).wait() if comm.rank == 0 else time.sleep(60)
    except antiphon.PeerLostError as error:
        return error.rank, str(error), time.monotonic() - start


def test_a_killed_rank_is_lost_long_before_the_deadline() -> None:
    with pytest.raises(RuntimeError, match="rank 1 ended with status -9"):
        ranks.processes(2, killed_peer)


def killed_peer_seen_by_the_first(queue: Any) -> None:
    queue.put(killed_peer())


def test_surviving_ranks_name_the_killed_rank() -> None:
    queue = multiprocessing.get_context("spawn").Manager().Queue()
    with pytest.raises(RuntimeError, match="rank 1 ended"):
        ranks.processes(2, killed_peer_seen_by_the_first, queue)
    rank, text, seconds = queue.get(timeout=10)
    assert rank == 1 and "its process ended" in text and seconds < 30


# Handles.


def test_arrays_live_until_a_pending_operation_is_over() -> None:
    def body(comm: antiphon.Communicator) -> None:
        if comm.rank == 1:
            comm.recv(bytearray(1), 0)  # until the other has dropped its arrays
        x = np.full(100_000, comm.rank + 1.0)
        out = np.zeros(100_000)
        alive = [weakref.ref(x), weakref.ref(out)]
        handle = comm.start_all_reduce(x, out=out)
        del x, out
        if comm.rank == 0:
            gc.collect()
            assert all(ref() is not None for ref in alive)
            assert not handle.is_finished()
            comm.send(b"x", 1)
        assert (handle.wait() == 3.0).all()
        assert handle.wait() is handle.wait()
        del handle
        gc.collect()
        assert all(ref() is None for ref in alive)

    ranks.threads(2, body)


def test_arrays_live_even_when_the_handle_is_dropped() -> None:
    def body(comm: antiphon.Communicator) -> None:
        if comm.rank == 1:
            comm.recv(bytearray(1), 0)
        x = torch.full((100_000,), comm.rank + 1.0)
        comm.start_all_reduce(x, out=x)  # its handle goes at once
        gc.collect()
        if comm.rank == 0:
            comm.send(b"x", 1)
        comm.barrier()
        assert x[99_999] == 3.0

    ranks.threads(2, body)


def test_a_buffer_in_use_does_not_move() -> None:
    def body(comm: antiphon.Communicator) -> None:
        if comm.rank == 1:
            comm.recv(bytearray(1), 0)
        x = bytearray(1000)
        comm.start_broadcast(x)
        with pytest.raises(BufferError):
            x.clear()  # it must not move while the operation uses it
        if comm.rank == 0:
            comm.send(b"x", 1)
        comm.barrier()

    ranks.threads(2, body)


def test_a_handle_waits_for_a_while_and_then_again() -> None:
    def body(comm: antiphon.Communicator) -> None:
        if comm.rank == 1:
            comm.recv(bytearray(1), 0)
        handle = comm.start_barrier()
        if comm.rank == 0:
            with pytest.raises(TimeoutError, match="still under way"):
                handle.wait(0.02)
            comm.send(b"x", 1)
        handle.wait()

    ranks.threads(2, body)


def test_a_failed_operation_raises_at_every_wait() -> None:
    def body(comm: antiphon.Communicator) -> None:
        handle = comm.start_all_reduce(np.zeros(1 + comm.rank))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ranks disagree|was aborted"):
                handle.wait()

    ranks.threads(2, body)


def test_some_ranks_may_wait_and_others_start() -> None:
    def body(comm: antiphon.Communicator) -> None:
        handles = []
        for call in range(10):
            x = np.full(1000, float(call))
            if comm.rank == 0:
                handles.append((comm.start_all_reduce(x), 2.0 * call))
            else:
                assert (comm.all_reduce(x) == 2.0 * call).all()
        for handle, expected in handles:
            assert (handle.wait() == expected).all()

    ranks.threads(2, body)


def test_polling_a_message_notices_a_lost_peer() -> None:
    def body(comm: antiphon.Communicator) -> None:
        if comm.rank == 0:
            handle = comm.start_recv(bytearray(1), 1)
            deadline = time.monotonic() + 20
            while not handle.is_finished():
                assert time.monotonic() < deadline
            with pytest.raises(antiphon.PeerLostError):
                handle.wait()

    ranks.threads(2, body)


def test_closing_waits_for_what_is_being_sent() -> None:
    def body(comm: antiphon.Communicator) -> Any:
        if comm.rank == 0:
            handle = comm.start_send(np.ones(1 << 20), 1)
            comm.close()
            return handle.wait()
        time.sleep(0.1)
        return comm.recv(np.empty(1 << 20), 0).sum()

    assert ranks.threads(2, body) == [None, 1 << 20]


# Threads, signals, forks, the end. A thread that waits for the interpreter must hold no lock.


def test_starting_while_another_thread_waits_for_its_turn() -> None:
    def body(comm: antiphon.Communicator) -> None:
        for _ in range(20):
            if comm.rank == 1:
                comm.recv(bytearray(1), 0)
            handles = [comm.start_barrier()]
            waiter = threading.Thread(target=comm.barrier)
            waiter.start()
            time.sleep(0.02)  # it looks for signals meanwhile, for which it needs the interpreter
            handles += [comm.start_barrier() for _ in range(20)]
            if comm.rank == 0:
                comm.send(b"x", 1)
            for handle in handles:
                handle.wait()
            waiter.join()

    ranks.threads(2, body)


def test_dropping_a_send_while_another_thread_receives() -> None:
    def body(comm: antiphon.Communicator) -> None:
        peer = 1 - comm.rank
        for _ in range(50):
            receiver = threading.Thread(target=comm.recv, args=(np.empty(50_000), peer))
            receiver.start()
            comm.start_send(np.ones(50_000), peer)  # its handle goes at once
            receiver.join()

    ranks.threads(2, body)


def test_threads_wait_for_one_handle_whose_array_runs_python_when_it_goes() -> None:
    class Slow(np.ndarray):
        def __del__(self) -> None:
            time.sleep(0.02)

    def body(comm: antiphon.Communicator) -> None:
        for _ in range(5):
            handle = comm.start_all_gather(np.ones(4).view(Slow))
            waiters = [threading.Thread(target=handle.wait) for _ in range(4)]
            for waiter in waiters:
                waiter.start()
            for waiter in waiters:
                waiter.join()
            assert handle.wait().tolist() == [1] * 8

    ranks.threads(2, body)


def test_a_signal_handler_cannot_call_a_communicator_that_waits(tmp_path: Path) -> None:
    program = f"""
import signal, sys, threading, antiphon
comm = antiphon.init(rank=int(sys.argv[1]), world_size=2, path={str(tmp_path / "world")!r}, timeout=20)
if comm.rank == 1:
    comm.recv(bytearray(1), 0)
    comm.barrier()
    comm.barrier()
else:
    def handler(*_):
        try:
            comm.barrier()
        except ValueError as error:
            print("inside another one" in str(error))
        comm.send(b"x", 1)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    started = comm.start_barrier()
    comm.barrier()
    started.wait()
"""
    start = [sys.executable, "-c", program]
    both = [subprocess.Popen([*start, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["True\n", ""]



def test_other_threads_run_while_a_call_waits() -> None:
    def body(comm: antiphon.Communicator) -> int:
        if comm.rank == 1:
            time.sleep(0.3)
        counted = [0]
        done = threading.Event()

        def count() -> None:
            while not done.is_set():
                counted[0] += 1
                time.sleep(0.001)

        counter = threading.Thread(target=count)
        counter.start()
        comm.barrier()
        done.set()
        counter.join()
        return counted[0]

    assert ranks.threads(2, body)[0] > 20


def test_threads_share_a_communicator() -> None:
    def body(comm: antiphon.Communicator) -> None:
        results: list[float] = []

        def work() -> None:
            for _ in range(50):
                results.append(float(comm.all_reduce(np.ones(1))[0]))

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert results == [2.0] * 200

    ranks.threads(2, body)


# As in a terminal, also where SIGINT is ignored and children would inherit that: in what a script starts with `&`.
HEED_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"

WAITS = {
    "call": "comm.all_reduce(np.zeros(1))",
    "message": "comm.recv(bytearray(1), 1)",
    "handle": "comm.start_barrier().wait()",
    "message handle": "comm.start_recv(bytearray(1), 1).wait()",
}


@pytest.mark.parametrize("name", WAITS)
def test_ctrl_c_ends_a_wait(name: str, tmp_path: Path) -> None:
    program = f"""
{HEED_CTRL_C}
import sys, numpy as np, antiphon
comm = antiphon.init(rank=int(sys.argv[1]), world_size=2, path={str(tmp_path / "world")!r}, timeout=60)
comm.barrier()
try:
    if comm.rank == 0:
        print("waiting", flush=True)
        {WAITS[name]}
    else:
        sys.stdin.read()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    start = [sys.executable, "-c", program]
    peer = subprocess.Popen([*start, "1"], stdin=subprocess.PIPE)
    waiter = subprocess.Popen([*start, "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert waiter.stdout is not None and waiter.stdout.readline() == "waiting\n"
        time.sleep(0.2)
        waiter.send_signal(signal.SIGINT)
        begin = time.monotonic()
        assert waiter.communicate(timeout=30)[0] == "interrupted\n"
        assert time.monotonic() - begin < 10
    finally:
        for process in (peer, waiter):
            process.kill()
            process.wait()


def test_ctrl_c_ends_the_meeting(tmp_path: Path) -> None:
    program = f"""
{HEED_CTRL_C}
import antiphon
print("waiting", flush=True)
antiphon.init(rank=0, world_size=2, path={str(tmp_path / "world")!r}, timeout=60)
"""
    waiter = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert waiter.stdout is not None and waiter.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    waiter.send_signal(signal.SIGINT)
    _, errors = waiter.communicate(timeout=30)
    assert waiter.returncode != 0 and "KeyboardInterrupt" in errors


def test_a_signal_handler_that_raises_ends_the_wait_with_its_exception(tmp_path: Path) -> None:
    program = f"""
import signal, antiphon
class Stop(Exception): pass
def stop(*_): raise Stop
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    antiphon.init(rank=0, world_size=2, path={str(tmp_path / "world")!r}, timeout=60)
except Stop:
    print("stopped")
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=30) == "stopped\n"


def test_a_signal_handler_cannot_use_the_default_communicator_while_it_meets(tmp_path: Path) -> None:
    program = """
import signal, antiphon
def handler(*_):
    try:
        antiphon.all_reduce([1.0])
    except ValueError as error:
        print("inside another one" in str(error))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    antiphon.default()
except TimeoutError:
    print("nobody came")
"""
    world = dict(RANK="0", WORLD_SIZE="2", ANTIPHON_RENDEZVOUS=str(tmp_path / "world"), ANTIPHON_TIMEOUT="1")
    output = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=30, env={**os.environ, **world})
    assert output == "True\nnobody came\n"


def test_a_child_forked_while_the_default_communicator_meets_does_not_wait_for_that(tmp_path: Path) -> None:
    program = """
import os, threading, time, warnings, antiphon
warnings.simplefilter("ignore")
threading.Thread(target=antiphon.default, daemon=True).start()
time.sleep(0.2)
child = os.fork()
if child == 0:
    antiphon.set_default(None)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""
    world = dict(RANK="0", WORLD_SIZE="2", ANTIPHON_RENDEZVOUS=str(tmp_path / "world"), ANTIPHON_TIMEOUT="20")
    output = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=30, env={**os.environ, **world})
    assert output == "7\n"


def test_use_after_close_is_refused() -> None:
    def body(comm: antiphon.Communicator) -> None:
        handle = comm.start_all_reduce(np.ones(1))
        comm.close()
        assert comm.closed and "closed" in repr(comm)
        assert handle.wait() == 2  # close waited for it
        for call in (comm.barrier, lambda: comm.all_reduce(np.ones(1)), lambda: comm.start_send(b"x", 0)):
            with pytest.raises(RuntimeError, match=r"rank . of 2\) is closed"):
                call()
        comm.close()

    ranks.threads(2, body)


def test_a_forked_child_cannot_use_or_harm_its_parents_communicator(tmp_path: Path) -> None:
    program = f"""
import os, sys, warnings, numpy as np, antiphon
warnings.simplefilter("ignore")
comm = antiphon.init(rank=int(sys.argv[1]), world_size=2, path={str(tmp_path / "world")!r}, timeout=20)
comm.start_barrier().wait()
pending = comm.start_recv(bytearray(1), comm.rank)
child = os.fork()
if child == 0:
    for call in (comm.barrier, pending.wait, pending.is_finished):
        try:
            call()
        except RuntimeError as error:
            assert "forked" in str(error), error
        else:
            os._exit(1)
    comm.close()
    del comm, pending
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
comm.send(b"x", comm.rank)
pending.wait()
print(comm.all_reduce(np.ones(1))[0])
"""
    start = [sys.executable, "-c", program]
    both = [subprocess.Popen([*start, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["2.0\n", "2.0\n"]


def test_communicators_leak_neither_descriptors_nor_mappings() -> None:
    def resources() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())

    def round_trip() -> None:
        with antiphon.init(rank=0, world_size=1, path="/nowhere") as comm:
            comm.start_all_reduce(np.ones(10)).wait()
            comm.free(comm.symmetric(1 << 20))
            comm.split(0)

    for _ in range(5):
        round_trip()
    time.sleep(0.2)
    before = resources()
    for _ in range(100):
        round_trip()
    time.sleep(0.2)
    after = resources()
    assert after[0] <= before[0] + 2 and after[1] <= before[1] + 10, (before, after)


def test_the_symmetric_memory_is_limited(tmp_path: Path) -> None:
    with antiphon.init(rank=0, world_size=1, path=tmp_path, arena_bytes=1 << 20) as comm:
        with pytest.raises(RuntimeError, match="2097152 bytes of symmetric memory do not fit"):
            comm.symmetric(2 << 20)
        comm.barrier()


# The package.


def test_importing_the_package_imports_neither_numpy_nor_torch() -> None:
    program = "import antiphon, sys; print([m for m in ('numpy', 'torch', 'pickle') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


def test_what_is_listed_is_what_is_meant_for_use() -> None:
    program = "import antiphon; print(sorted(set(dir(antiphon)) - set(antiphon.__all__)))"
    modules = ["comm", "compat", "language", "lowering", "moe", "mscclpp", "torch"]
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == f"{modules}\n"


def test_a_communicator_does_not_pickle() -> None:
    with antiphon.init(rank=0, world_size=1, path="/nowhere") as comm, pytest.raises(TypeError):
        pickle.dumps(comm)


def test_the_command() -> None:
    command = [sys.executable, "-m", "antiphon"]
    assert "bench" in subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    failed = subprocess.run([*command, "sing"], capture_output=True, text=True)
    assert failed.returncode == 2 and "unrecognized subcommand 'sing'" in failed.stderr
    program = "import antiphon; c = antiphon.init(); print(c.exchange_objects(c.rank))"
    started = [*command, "run", "-n", "2", "--", sys.executable, "-c", program]
    lines = subprocess.run(started, capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted(lines) == ["[0] [0, 1]", "[1] [0, 1]"]
    bench = [*command, "bench", "all-reduce", "--ranks", "2", "--sizes", "4"]
    assert "# all_reduce, 2 ranks" in subprocess.run(bench, capture_output=True, text=True, check=True).stdout
