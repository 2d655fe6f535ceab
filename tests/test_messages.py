"""Messages with tags and from any rank, waits for several operations, and an object of one rank for all."""

import threading
import time

import numpy as np
import pytest

import antiphon
import ranks

Comm = antiphon.Communicator


def test_a_message_goes_to_the_receive_with_its_tag() -> None:
    def body(comm: Comm) -> list[float]:
        if comm.rank == 0:
            for tag in (1, 2, 3):
                comm.send(np.full(50_000, float(tag)), 1, tag=tag)
            return []
        return [comm.recv(np.empty(50_000), 0, tag=tag)[-1] for tag in (3, 1, 2)]

    assert ranks.threads(2, body)[1] == [3.0, 1.0, 2.0]


def test_a_message_of_any_rank_says_whose_it_is() -> None:
    def body(comm: Comm) -> None:
        if comm.rank:
            comm.send(np.array([comm.rank]), 0)
            comm.send(np.array([comm.rank]), 0, tag=5)
            return
        out, senders = np.empty(1, int), set()
        for _ in range(2):
            senders.add(comm.recv_any(out))
            assert out[0] in senders
        handles = [comm.start_recv(np.empty(1, int), None, tag=5) for _ in range(2)]
        assert handles[0].source is None or handles[0].is_finished()
        results = antiphon.wait_all(handles)
        assert [handle.source for handle in handles] == [result[0] for result in results]
        assert senders == {1, 2}
        assert comm.start_barrier().source is None

    def with_a_barrier(comm: Comm) -> None:
        body(comm)
        if comm.rank:
            comm.start_barrier().wait()

    ranks.threads(3, with_a_barrier)


@pytest.mark.parametrize("tag", [-1, 2**32])
def test_a_tag_has_32_bits(tag: int) -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(ValueError, match=f"the tag {tag} is not between 0 and 4294967295"):
            comm.send(b"x", 0, tag=tag)

    ranks.threads(1, body)


def test_a_receive_from_any_ends_with_a_lost_rank() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            with pytest.raises(antiphon.PeerLostError):
                comm.recv_any(np.empty(1))

    ranks.threads(3, body)


def test_wait_all_waits_for_all_and_raises_the_first_error() -> None:
    def body(comm: Comm) -> None:
        peer = 1 - comm.rank
        handles = [comm.start_recv(np.empty(1), peer, tag=tag) for tag in range(3)]
        with pytest.raises(TimeoutError, match="3 of 3 operations still under way after 0.05 s"):
            antiphon.wait_all(handles, 0.05)
        comm.barrier()
        for tag in range(3):
            comm.send(np.array([float(tag)]), peer, tag=tag)
        assert [result[0] for result in antiphon.wait_all(handles, 20)] == [0.0, 1.0, 2.0]
        comm.barrier()
        handles = [comm.start_barrier(), comm.start_recv(np.empty(1), peer)]
        threading.Timer(0.1, comm.abort).start() if comm.rank else None
        with pytest.raises(antiphon.AbortedError):
            antiphon.wait_all(handles)
        assert antiphon.wait_all([]) == []

    ranks.threads(2, body)


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("not this one")


def test_an_object_goes_from_one_rank_to_all() -> None:
    def body(comm: Comm) -> None:
        mine = {"rank": comm.rank, "text": "x" * 100_000}
        assert comm.broadcast_object(mine, 1) == {"rank": 1, "text": "x" * 100_000}
        assert comm.broadcast_object(mine if comm.rank == 0 else None)["rank"] == 0
        # What goes wrong goes wrong on all ranks, and they go on.
        with pytest.raises((TypeError, RuntimeError), match="not this one|rank 2 could not pickle its object"):
            comm.broadcast_object(Unpicklable(), 2)
        if comm.rank != 2:
            with pytest.raises(RuntimeError, match="broadcast_object: rank 2 is not the root there"):
                comm.broadcast_object(1, 2)
        else:
            comm.exchange_bytes(b"")
        with pytest.raises(ValueError, match="root rank 3"):
            comm.broadcast_object(1, 3)
        assert comm.broadcast_object(comm.rank, 2) == 2

    ranks.threads(3, body)


def test_the_timeout_can_be_set_also_for_waits_under_way() -> None:
    def body(comm: Comm) -> float:
        assert comm.timeout == 60.0
        start = time.monotonic()
        if comm.rank == 0:
            threading.Timer(0.3, lambda: setattr(comm, "timeout", 0.5)).start()
            with pytest.raises(TimeoutError, match=r"barrier timed out .* still waiting for ranks \[1\] of 2"):
                comm.barrier()
            assert comm.timeout == 0.5
        else:
            time.sleep(1.5)
        with pytest.raises(ValueError, match="timeout is -1"):
            comm.timeout = -1
        return time.monotonic() - start

    assert ranks.threads(2, body, timeout=60.0)[0] < 20


def test_ranks_compare_types_that_they_only_move() -> None:
    def body(comm: Comm) -> str:
        dtype = [np.int16, np.uint16][comm.rank]
        with pytest.raises(RuntimeError) as raised:
            comm.all_gather(np.zeros(3, dtype))
        return str(raised.value)

    for rank, text in enumerate(ranks.threads(2, body)):
        assert f"rank {rank} called all_gather(3 × {['i16', 'u16'][rank]})" in text


@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_operators_on_bits(op: str) -> None:
    function = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}[op]

    def body(comm: Comm) -> None:
        for dtype in (np.int64, np.int32, np.int8, np.uint8):
            inputs = np.random.default_rng(3).integers(0, 100, (3, 1000)).astype(dtype)
            np.testing.assert_array_equal(comm.all_reduce(inputs[comm.rank], op), function.reduce(inputs))
            np.testing.assert_array_equal(comm.all_reduce(inputs[comm.rank], antiphon.ReduceOp(op)), function.reduce(inputs))
        with pytest.raises(TypeError, match=f"{op} combines the bits of integers, and not of float32"):
            comm.all_reduce(np.zeros(3, np.float32), op)

    ranks.threads(3, body)
