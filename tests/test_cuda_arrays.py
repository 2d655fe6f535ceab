"""Calls on arrays of GPUs that are nothing but DLPack. Neither torch nor CuPy takes part, so these also run on the emulator:
`make emulated-all`. Each gives the bits of the same call on arrays of the host."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import antiphon
from gpu_arrays import arrays, on_gpus

pytestmark = pytest.mark.cuda

#: A dozen vectors and a rest.
COUNT = 12 * 4 + 4
ROOM = 1 << 20
#: The stream of all calls: the device's own.
STREAM = 0

Comm = antiphon.Communicator


def values(comm: Comm, count: int) -> "np.ndarray[Any, Any]":
    return (np.arange(count, dtype=np.float32) * 7 + comm.rank * 1009) % 4093


#: Each operation, with the elements of its input and output for a world.
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[int, int]]]] = {
    "all_reduce": (lambda comm, x, out, **more: comm.all_reduce(x, out=out, **more), lambda n: (COUNT, COUNT)),
    "all_reduce_max": (lambda comm, x, out, **more: comm.all_reduce(x, "max", out=out, **more), lambda n: (COUNT, COUNT)),
    "all_gather": (lambda comm, x, out, **more: comm.all_gather(x, out=out, **more), lambda n: (COUNT, n * COUNT)),
    "reduce_scatter": (lambda comm, x, out, **more: comm.reduce_scatter(x, out=out, **more), lambda n: (n * COUNT, COUNT)),
    "all_to_all": (lambda comm, x, out, **more: comm.all_to_all(x, out=out, **more), lambda n: (n * COUNT, n * COUNT)),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_has_the_bits_of_the_host(operation: str, world_size: int) -> None:
    call, counts = OPERATIONS[operation]

    def body(comm: Comm) -> None:
        given, got = counts(comm.world_size)
        mine = values(comm, given)
        expected = np.empty(got, np.float32)
        call(comm, mine, expected)
        with arrays(comm, ROOM) as make:
            x, out = make(mine), make(np.full(got, -1, np.float32))
            call(comm, x, out, stream=STREAM)
            assert np.array_equal(out.read(), expected)
            assert np.array_equal(x.read(), mine), "the input is as it was"
            comm.check()

    on_gpus(world_size, body)


def test_a_broadcast_and_a_message() -> None:
    def body(comm: Comm) -> None:
        with arrays(comm, ROOM) as make:
            x = make(values(comm, COUNT))
            comm.broadcast(x, 1, stream=STREAM)
            theirs = (np.arange(COUNT, dtype=np.float32) * 7 + 1009) % 4093
            assert np.array_equal(x.read(), theirs)
            sent, received = make(np.full(COUNT, comm.rank, np.float32)), make(shape=(COUNT,))
            comm.send_recv(sent, 1 - comm.rank, received, 1 - comm.rank, stream=STREAM)
            assert (received.read() == 1 - comm.rank).all()

    on_gpus(2, body)


def test_symmetric_memory_is_on_the_gpu_of_each_rank() -> None:
    def body(comm: Comm) -> None:
        buffer = comm.symmetric(100, f"cuda:{comm.rank}")
        assert (len(buffer), buffer.device) == (100, comm.rank)
        assert buffer.pointer(0) != buffer.pointer(1)
        with pytest.raises(ValueError, match=f"100 bytes on cuda:{comm.rank} and on each of 2 ranks.* is not on the host: use its pointer"):
            buffer.memory("uint8")
        comm.free(buffer)
        for call in lambda: comm.free(buffer), lambda: buffer.pointer(0):
            with pytest.raises(ValueError, match="freed"):
                call()
        with pytest.raises(ValueError, match="unknown device"):
            comm.symmetric(100, "gpu")  # refused before the ranks meet
        on_host = comm.symmetric(64, "cpu")
        with pytest.raises(ValueError, match="is on host, not on CUDA"):
            comm.register_cuda(on_host)

    on_gpus(2, body)


def test_half_precision_is_rounded_once() -> None:
    def body(comm: Comm) -> None:
        mine = (values(comm, COUNT) / 3).astype(np.float16)
        expected = comm.all_reduce(mine)
        with arrays(comm, ROOM) as make:
            x = make(mine)
            comm.all_reduce(x, out=x, stream=STREAM)
            assert np.array_equal(x.read(), expected)

    on_gpus(2, body)


def test_a_norm_is_fused() -> None:
    def body(comm: Comm) -> None:
        shape = (3, 64)
        mine, weight = values(comm, 192).reshape(shape).astype(np.float16), np.linspace(0.5, 2, 64).astype(np.float16)
        residual = np.ones(shape, np.float16)
        expected = comm.all_reduce_rms_norm(mine, residual, weight, eps=1e-5)
        with arrays(comm, ROOM) as make:
            outputs = {name: make(shape=shape, dtype=np.float16) for name in ("out", "residual_out")}
            comm.all_reduce_rms_norm(make(mine), make(residual), make(weight), eps=1e-5, stream=STREAM, **outputs)
            assert np.array_equal(outputs["residual_out"].read(), np.asarray(expected.residual))
            # A norm's sum of squares has an order of its own on GPUs.
            assert np.allclose(outputs["out"].read(), np.asarray(expected.norm), rtol=2e-3)

    on_gpus(2, body)


def test_ranks_that_disagree_get_an_error() -> None:
    def body(comm: Comm) -> str:
        with pytest.raises(RuntimeError) as raised, arrays(comm, ROOM) as make:
            x = make(np.ones(COUNT + 4 * comm.rank, np.float32))
            comm.all_reduce(x, out=x, stream=STREAM)
            x.read()
            comm.check()
        return str(raised.value)

    for text in on_gpus(2, body):
        assert "ranks disagree" in text and f"all_reduce({COUNT} × f32" in text, text
