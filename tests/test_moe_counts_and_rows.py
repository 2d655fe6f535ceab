"""The counts and the rows of a dispatch by one call on GPUs, `Moe.notify` with arrays for the rows: as by two, whatever room there is."""

from typing import Any

import numpy as np
import pytest

import antiphon
import needs
import ranks
from antiphon._core import Moe
from gpu_arrays import arrays, device_count

pytestmark = pytest.mark.cuda

EXPERTS, HIDDEN, TOP_K = 24, 128, 2
ROOM = 4 << 20

Comm = antiphon.Communicator


def ids_of(rank: int, tokens: int) -> "np.ndarray[Any, Any]":
    """Different choices of every token, and of every rank."""
    token = np.arange(tokens, dtype=np.int64)
    first = (5 * token + rank) % EXPERTS
    return np.stack([first, (first + 1 + token % (EXPERTS - 1)) % EXPERTS], axis=1)


def rows_of(rank: int, tokens: int) -> "np.ndarray[Any, Any]":
    return np.arange(tokens * HIDDEN, dtype=np.float32).reshape(tokens, HIDDEN) + 1e6 * rank


def expected(rank: int, world_size: int, tokens: int) -> dict[str, "np.ndarray[Any, Any]"]:
    """What a rank receives: the tokens of each rank, in order, of which one of its experts is a choice."""
    local = EXPERTS // world_size
    rows, ids, sources = [], [], []
    for source in range(world_size):
        of_source = ids_of(source, tokens) - rank * local
        is_here = (of_source >= 0) & (of_source < local)
        goes = is_here.any(1)
        rows.append(rows_of(source, tokens)[goes])
        ids.append(np.where(is_here, of_source, -1)[goes])
        sources.append(np.arange(tokens, dtype=np.int32)[goes])
    here = np.concatenate(ids)
    return {"x": np.concatenate(rows), "ids": here, "weights": (here >= 0).astype(np.float32), "sources": np.concatenate(sources)}


def check(comm: Comm, tokens: int, room: str) -> None:
    """Calls one after the other with as much ``room`` as it says, each with memory of its own."""
    right = expected(comm.rank, comm.world_size, tokens)
    count = len(right["x"])
    rows = {"none": 0, "too little": max(count - 1, 0), "exact": count, "a quarter more": count * 5 // 4, "far more": 3 * count + 8, "capacity": count + 5}[room]
    with arrays(comm, ROOM) as make:
        moe = Moe(comm)
        x, ids = make(rows_of(comm.rank, tokens)), make(ids_of(comm.rank, tokens))
        weights = make(np.ones((tokens, TOP_K), np.float32))
        per_rank, per_expert = (make(shape=(n,), dtype=np.int32) for n in (comm.world_size, EXPERTS))
        in_rank = make(shape=(tokens, comm.world_size), dtype=np.uint8)
        layout = per_rank, per_expert, in_rank
        words = make(shape=(Moe.route_words(comm.world_size, EXPERTS, tokens)[-1][2],), dtype=np.int32)

        def received(rows: int) -> dict[str, Any]:
            of_rows = {"x": make(np.full((rows, HIDDEN), -1, np.float32)), "sources": make(np.full(rows, -1, np.int32))}
            return of_rows | {
                "ids": make(np.full((rows, TOP_K), -7, np.int64)),
                "weights": make(np.full((rows, TOP_K), -7, np.float32)),
            }

        def rows_in(arrays: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
            return arrays["x"], None, arrays["ids"], arrays["weights"]

        tokens_of_rank, to = (x, None, ids, weights), received(rows)
        routes, is_moved, *_ = moe.notify(
            tokens_of_rank,
            layout,
            counts=True,
            capacity=rows if room == "capacity" else None,
            words=words,
            sources=to["sources"],
            received=rows_in(to),
        )
        fills = rows // 4 * 3 <= count <= rows
        assert is_moved == (room == "capacity" or fills), (rows, count)
        if not is_moved:
            before, to = to, received(count)
            moe.dispatch(routes, tokens_of_rank, rows_in(to), sources=to["sources"])
            moe.check()
            assert (before["x"].read() == -1).all()
        for name, values in right.items():
            np.testing.assert_array_equal(to[name].read()[:count], values, err_msg=f"{name} of rank {comm.rank}")
        assert routes.rows == (rows if room == "capacity" else count)
        if room == "a quarter more":
            assert (to["x"].read()[count:] == -1).all(), "rows behind those that came are written"
        # The routes bring the rows back: each token once from every rank that it went to.
        back = make(shape=(tokens, HIDDEN), dtype=np.float32)
        source = to["x"] if room == "capacity" else make(right["x"])
        moe.combine(routes, source, back)
        moe.check()
        times = np.array([len(set(row // (EXPERTS // comm.world_size))) for row in ids_of(comm.rank, tokens)])
        np.testing.assert_array_equal(back.read(), sum((times > n)[:, None] * rows_of(comm.rank, tokens) for n in range(comm.world_size)))
        moe.close()


@pytest.mark.parametrize("room", ["none", "too little", "exact", "a quarter more", "far more", "capacity"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rows_come_as_by_two_calls(world_size: int, room: str) -> None:
    needs.need(f"gpus {world_size}", device_count() >= world_size, f"{device_count()} found")
    ranks.threads(world_size, check, 19, room)


@pytest.mark.parametrize("room", ["none", "capacity"])
def test_a_world_without_tokens(room: str) -> None:
    needs.need("gpus 2", device_count() >= 2, f"{device_count()} found")
    ranks.threads(2, check, 0, room)


def test_arrays_that_do_not_suit_are_refused_before_a_peer_waits() -> None:
    needs.need("gpus 2", device_count() >= 2, f"{device_count()} found")

    def body(comm: Comm) -> None:
        with arrays(comm, ROOM) as make:
            moe = Moe(comm)
            x, to = make(shape=(4, HIDDEN)), make(shape=(8, HIDDEN))
            layout = make(shape=(2,), dtype=np.int32), make(shape=(EXPERTS,), dtype=np.int32), make(shape=(4, 2), dtype=np.uint8)
            ids, scales = make(shape=(4, 2), dtype=np.int64), None
            memory = {"words": make(shape=(4096,), dtype=np.int32), "sources": make(shape=(8,), dtype=np.int32)}
            with pytest.raises(ValueError, match="received_x and x overlap|x and received_x overlap"):
                moe.notify((x, scales, None, None), layout, received=(x, scales, None, None), **memory)
            with pytest.raises(ValueError, match="ids need weights"):
                moe.notify((x, scales, ids, None), layout, received=(to, scales, None, None), **memory)
            with pytest.raises(ValueError, match="a layout is made of ids"):
                moe.notify((x, scales, None, None), layout, counts=True, received=(to, scales, None, None), **memory)
            moe.close()

    ranks.threads(2, body)
