"""The calls by token that `antiphon.moe` is made of, on arrays of GPUs that are nothing but DLPack, with the bits of the host. Torch
takes no part, so these also run on the emulator: `make emulated-all`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import antiphon
from antiphon._core import Moe
from gpu_arrays import arrays, on_gpus

pytestmark = pytest.mark.cuda

EXPERTS, K, H, TOKENS = 12, 3, 32, 5
ROOM = 1 << 20

Comm = antiphon.Communicator
Contents = dict[str, "np.ndarray[Any, Any]"]
Make = Callable[["np.ndarray[Any, Any]"], Any]


def dispatched(comm: Comm, moe: Moe, make: Make, read: Make, capacity: int | None) -> Contents:
    """What a dispatch writes, and a combine of its rows."""
    rng = np.random.default_rng(comm.rank)
    ids, weights = rng.integers(-1, EXPERTS, (TOKENS, K)), rng.random((TOKENS, K), np.float32)
    tokens = tuple(make(part) for part in (rng.random((TOKENS, H), np.float32), rng.random((TOKENS, 1), np.float32), ids, weights))
    layout = tuple(
        make(np.zeros(shape, dtype))
        for shape, dtype in (((comm.world_size,), np.int32), ((EXPERTS,), np.int32), ((TOKENS, comm.world_size), np.uint8))
    )
    parts = Moe.route_words(comm.world_size, EXPERTS, TOKENS)
    words, output = make(np.zeros(parts[-1][2], np.int32)), make(np.zeros((TOKENS, H), np.float32))

    def rows(count: int) -> tuple[Any, ...]:
        shapes: list[tuple[int, Any]] = [(H, np.float32), (1, np.float32), (K, np.int64), (K, np.float32)]
        return tuple(make(np.zeros((count, columns), dtype)) for columns, dtype in shapes)

    if capacity is not None:
        sources, received = make(np.zeros(capacity, np.int32)), rows(capacity)
        routes, is_moved, count, *_ = moe.notify(
            tokens, layout, counts=True, capacity=capacity, words=words, sources=sources, received=received
        )
    else:
        routes, is_moved, count, *_ = moe.notify(tokens, layout, counts=True, words=words)
        sources, received = make(np.zeros(count, np.int32)), rows(count)
        moe.dispatch(routes, tokens, received, sources=sources)
    assert is_moved == (capacity is not None)
    assert count == (capacity if capacity is not None else routes.num_received)
    moe.combine(routes, received[0], output)
    contents = {name: read(words)[begin:end] for name, begin, end in parts}
    arrived = read(sources)
    contents["sources"] = arrived
    for name, part in zip(("x", "scales", "ids", "weights"), received):
        contents[name] = read(part)[arrived >= 0]
    return contents | {"per expert": read(layout[1]), "in rank": read(layout[2]), "output": read(output)}


@pytest.mark.parametrize("capacity", [None, 2 * TOKENS, 4, 0])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_dispatch_has_the_words_and_the_rows_of_the_host(world_size: int, capacity: int | None) -> None:
    def body(comm: Comm) -> None:
        moe = Moe(comm)
        host = dispatched(comm, moe, lambda values: values, lambda values: values, capacity)
        with arrays(comm, ROOM) as make:
            gpu = dispatched(comm, moe, make, lambda array: array.read(), capacity)
        assert host.keys() == gpu.keys()
        for name, expected in host.items():
            assert np.array_equal(gpu[name], expected), name
        moe.close()

    on_gpus(world_size, body)
