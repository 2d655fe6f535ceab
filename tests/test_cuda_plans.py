"""Plans between GPUs, on arrays that are nothing but DLPack. Neither torch nor CuPy takes part, so these also run on the emulator:
`make emulated-all`. Each gives the bits of the same plan on the host."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import antiphon
import needs
import ranks
from antiphon.language import *
from antiphon.language import library
from gpu_arrays import arrays, device_count, graph, on_gpus

pytestmark = pytest.mark.cuda

#: Elements of a chunk: a few vectors and a rest. The plans below take chunks of any number of 4 bytes.
COUNT = 37
ROOM = 1 << 20
#: The stream of all calls: the device's own.
STREAM = 0

Comm = antiphon.Communicator


def built(name: str, world_size: int, **options: Any) -> str:
    return library.build(name, world_size, buffer_alignment=4, **options)


def values(comm: Comm, count: int, dtype: Any = np.float32) -> "np.ndarray[Any, Any]":
    return ((np.arange(count) * 7 + comm.rank * 1009) % 127 / 4).astype(dtype)


#: An algorithm of each kind of synchronisation, with what a rank has of ``(ranks, inputs)`` afterwards.
PLANS: dict[str, Callable[[int, list[Any]], Any]] = {
    "one-shot-all-reduce": lambda rank, inputs: sum(inputs),
    "packet-all-reduce": lambda rank, inputs: sum(inputs),
    "two-shot-all-reduce": lambda rank, inputs: sum(inputs),
    "ring-all-gather": lambda rank, inputs: np.concatenate(inputs),
    "direct-reduce-scatter": lambda rank, inputs: np.split(sum(inputs), len(inputs))[rank],
    "packet-all-to-all": lambda rank, inputs: np.concatenate([np.split(x, len(inputs))[rank] for x in inputs]),
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_copy_engines_do_the_work_of_ports(world_size: int) -> None:
    text = built("port-send-recv", world_size)

    def body(comm: Comm) -> None:
        gpu = comm.load_plan(text, device=comm.rank, ports="engines")
        mine = values(comm, COUNT)
        expected = comm.load_plan(text).execute(mine)
        gpu.prepare("float32", mine.nbytes)
        with arrays(comm, ROOM) as make:
            x, out = make(mine), make(np.full_like(expected, -1))
            for _ in range(3):
                gpu.execute(x, out, stream=STREAM)
            assert np.array_equal(out.read(), expected)
        comm.check()

    on_gpus(world_size, body)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_has_the_bits_of_the_host(name: str, world_size: int) -> None:
    text, count = built(name, world_size), COUNT * world_size

    def body(comm: Comm) -> None:
        host, gpu = comm.load_plan(text), comm.load_plan(text, device=comm.rank)
        assert (host.device, gpu.device) == (None, comm.rank)
        for dtype, packets in ((np.float32, "ll16"), (np.int32, "ll8")):
            mine = values(comm, count, dtype)
            expected = host.execute(mine)
            inputs = [values_of(rank, count, dtype) for rank in range(comm.world_size)]
            assert np.array_equal(expected, PLANS[name](comm.rank, inputs)), "quarters are exact"
            plan = gpu if packets == "ll16" else comm.load_plan(text, device=f"cuda:{comm.rank}", packets="ll8")
            with arrays(comm, ROOM) as make:
                x, out = make(mine), make(np.full_like(expected, -1))
                for _ in range(2):
                    assert plan.execute(x, out, stream=STREAM) is out
                assert np.array_equal(out.read(), expected)
                assert np.array_equal(x.read(), mine), "the input is as it was"
        comm.check()

    def values_of(rank: int, count: int, dtype: Any) -> Any:
        return ((np.arange(count) * 7 + rank * 1009) % 127 / 4).astype(dtype)

    on_gpus(world_size, body)


def test_the_buffer_of_a_call_in_place() -> None:
    text = built("two-shot-all-reduce", 2, inplace=True)

    def body(comm: Comm) -> None:
        plan, mine = comm.load_plan(text, device=comm.rank), values(comm, 4 * COUNT, np.float16)
        plan.prepare("float16", mine.nbytes)
        with arrays(comm, ROOM) as make:
            x = make(mine)
            assert plan.execute(x, stream=STREAM) is x
            assert np.array_equal(x.read(), comm.all_reduce(mine))

    on_gpus(2, body)


def test_registered_arrays_are_not_staged() -> None:
    texts = [built("two-shot-all-reduce", 2, inplace=inplace) for inplace in (False, True)]

    def body(comm: Comm) -> None:
        apart, together = (comm.load_plan(text, device=comm.rank) for text in texts)
        mine = values(comm, 4 * COUNT)
        expected, twice = comm.all_reduce(mine), comm.all_reduce(comm.all_reduce(mine))
        buffer = comm.symmetric(ROOM, comm.rank)
        with arrays(comm, ROOM, buffer) as make:
            x, out = make(mine), make(shape=mine.shape)
            with pytest.raises(ValueError, match="the input is not in registered memory: no memory that is registered has the"):
                apart.execute(x, out, registered=True, stream=STREAM)
            apart.execute(x, out, stream=STREAM)
            assert np.array_equal(out.read(), expected)
            out.write(mine)
            comm.register_cuda(buffer)
            assert apart.execute(x, out, registered=True, stream=STREAM) is out
            assert np.array_equal(out.read(), expected)
            assert np.array_equal(x.read(), mine)
            with graph(comm.rank, lambda stream: apart.execute(x, out, registered=True, stream=stream)) as replay:
                out.write(mine)
                replay()
                assert np.array_equal(out.read(), expected)
            assert together.execute(out, registered=True, stream=STREAM) is out
            assert np.array_equal(out.read(), twice)
            comm.unregister_cuda(buffer)
            with pytest.raises(ValueError, match="the buffer is not in registered memory"):
                together.execute(out, registered=True, stream=STREAM)
        comm.free(buffer)
        with pytest.raises(ValueError, match="registered is for plans on GPUs"):
            comm.load_plan(texts[0]).execute(mine, registered=True)

    on_gpus(2, body)


def test_elements_without_arithmetic_are_moved() -> None:
    text = built("direct-all-gather", 2)

    def body(comm: Comm) -> None:
        plan = comm.load_plan(text, device=comm.rank)
        mine = np.arange(8, dtype=np.uint64) + (comm.rank + 1) * 2**60
        plan.prepare("uint64", 2 * mine.nbytes)
        with arrays(comm, ROOM) as make:
            x, out = make(mine), make(shape=(16,), dtype=np.uint64)
            plan.execute(x, out, stream=STREAM)
            assert out.read().tolist() == [int(n) + (rank + 1) * 2**60 for rank in (0, 1) for n in range(8)]

    on_gpus(2, body)


def test_graphs_replay_between_calls_of_other_plans_and_sizes() -> None:
    texts = [built(name, 2) for name in ("packet-all-reduce", "two-shot-all-reduce")]

    def body(comm: Comm) -> None:
        packets, signals = (comm.load_plan(text, device=comm.rank) for text in texts)
        packets.prepare("float32", 8 * COUNT)
        signals.prepare("float32", 8 * COUNT)
        with arrays(comm, ROOM) as make:
            x, out, small = make(values(comm, 2 * COUNT)), make(shape=(2 * COUNT,)), make(shape=(8,))

            def calls(stream: int) -> None:
                packets.execute(x, out, stream=stream)
                signals.execute(out, out, stream=stream)  # of the sum, which both ranks have

            expected = 2 * comm.all_reduce(values(comm, 2 * COUNT))
            with graph(comm.rank, calls) as replay:
                for turn in range(4):
                    out.write(np.full(2 * COUNT, -1))
                    replay()
                    assert np.array_equal(out.read(), expected)
                    small.write(np.full(8, turn, np.float32))
                    packets.execute(small, small, stream=STREAM)
                    assert small.read().tolist() == [2 * turn] * 8
                with graph(comm.rank, lambda stream: packets.execute(small, small, stream=stream)) as other:
                    other()
                    replay()
                assert small.read().tolist() == [12] * 8
            packets.close()
            again = comm.load_plan(texts[0], device=comm.rank)
            with graph(comm.rank, lambda stream: unprepared(again, small, stream)):
                pass
            again.execute(small, small, stream=STREAM)
            assert small.read().tolist() == [24] * 8

    def unprepared(plan: antiphon.Plan, small: Any, stream: int) -> None:
        with pytest.raises(RuntimeError, match="was not prepared for 32 bytes of f32: prepare it first, on all ranks"):
            plan.execute(small, small, stream=stream)

    on_gpus(2, body)


def announced() -> CollectiveProgram:
    """Packets announce plain data, which is right on a host alone."""
    with CollectiveProgram("announced", AllGather(2, 2, False), 2) as program:
        scratch = [Buffer(rank, 6) for rank in (0, 1)]
        for own in (0, 1):
            channel, rank = MemoryChannel(1 - own, own), Rank(own)
            channel.put(scratch[1 - own][5:6], rank.get_input_buffer()[0:1], tb=0)
            rank.barrier(tb_list=[0])
            channel.put_packets(scratch[1 - own][0:1], rank.get_input_buffer()[1:2], tb=0)
            rank.copy(rank.get_output_buffer()[2 * own : 2 * own + 2], rank.get_input_buffer()[0:2], tb=0)
        for own in (0, 1):
            rank, theirs = Rank(own), 2 * (1 - own)
            rank.unpack_packets(rank.get_output_buffer()[theirs + 1 : theirs + 2], scratch[own][0:1], tb=0)
            rank.barrier(tb_list=[0])
            rank.copy(rank.get_output_buffer()[theirs : theirs + 1], scratch[own][5:6], tb=0)
    return program


def test_plans_that_cannot_run_are_refused() -> None:
    right, of_three = built("one-shot-all-reduce", 2), built("one-shot-all-reduce", 3)
    many, host_alone = built("one-shot-all-reduce", 2, instances=700), announced().to_json()

    def body(comm: Comm) -> None:
        refused: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
            (ValueError, "(?s)plan \"announced\" is not proved for the memory of GPUs:.*rejected", host_alone, {}),
            (ValueError, "is for 3 ranks, and there are 2", of_three, {}),
            (RuntimeError, "has 700 thread blocks, and .* fit a GPU beside another call", many, {}),
            (RuntimeError, "ranks load different plans", right if comm.rank == 0 else built("packet-all-reduce", 2), {}),
            (RuntimeError, "ranks load different plans", right, {"packets": ["ll8", "ll16"][comm.rank]}),
            (ValueError, "packets \"ll\": known are ll8, ll16", right, {"packets": "ll"}),
        ]
        for error, text, plan, options in refused:
            with pytest.raises(error, match=text):
                comm.load_plan(plan, device=comm.rank, **options)
        gathered = comm.load_plan(host_alone).execute(np.full(8, comm.rank))
        assert gathered.tolist() == [0] * 8 + [1] * 8
        # A mistake of one rank is an error on every rank.
        named = "rank 1 has no plan that can run: " if comm.rank == 0 else ""
        with pytest.raises(ValueError, match=f"^{named}plan \"announced\" is not proved"):
            comm.load_plan([right, host_alone][comm.rank], device=comm.rank)
        with pytest.raises(RuntimeError, match="device 99"):
            comm.load_plan(right, device=99)
        tiny = comm.load_plan(right, device=comm.rank, most_scratch=1)
        with pytest.raises(ValueError, match="exceed the 1 bytes that are allowed"):
            tiny.prepare("float32", 1 << 16)
        small = comm.load_plan(right, device=comm.rank, most_scratch=4096)
        with arrays(comm, ROOM) as make:
            x = make(np.ones(1001, np.float32))
            # In several launches.
            assert small.execute(x, x, stream=STREAM).read().tolist() == [2.0] * 1001

    on_gpus(2, body)


def test_arrays_that_do_not_fit_are_refused() -> None:
    text = built("one-shot-all-reduce", 2)

    def body(comm: Comm) -> None:
        plan = comm.load_plan(text, device=comm.rank)
        with arrays(comm, ROOM) as make:
            x, out = make(np.ones(8, np.float32)), make(shape=(16,))
            host, ints = np.ones(8, np.float32), make(np.ones(8, np.int32))
            refused: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
                (ValueError, f"the input is on host, and plan .* was loaded on cuda:{comm.rank}", (host, x)),
                (ValueError, f"the output is on host, and plan .* was loaded on cuda:{comm.rank}", (x, host)),
                (ValueError, "the input's 32 bytes|the output's 64", (x, out)),
                (TypeError, "the input is int32, the output is float32", (ints, x)),
                (TypeError, "cannot be reduced", (make(np.ones(8, np.uint16)), out)),
            ]
            for error, said, operands in refused:
                with pytest.raises(error, match=said):
                    plan.execute(*operands, stream=STREAM)
            with pytest.raises(ValueError, match=f"the input is on cuda:{comm.rank}, and plan .* was loaded on host"):
                comm.load_plan(text).execute(x, x)
            with pytest.raises(TypeError, match="elements of type uint16 cannot be reduced"):
                plan.prepare("uint16", 32)
            with pytest.raises(ValueError, match="unknown dtype \"float31\""):
                plan.prepare("float31", 32)
            with pytest.raises(ValueError, match="30 bytes"):
                plan.prepare("float16", 30)
            assert plan.execute(x, x, stream=STREAM).read().tolist() == [2.0] * 8
            plan.close()
            plan.close()
            with pytest.raises(ValueError, match="the plan is closed"):
                plan.execute(x, x, stream=STREAM)

    on_gpus(2, body)


def test_a_plan_that_is_dropped_ends_with_its_communicator() -> None:
    text = built("packet-all-reduce", 2)

    def body(comm: Comm) -> antiphon.Plan:
        plan = comm.load_plan(text, device=comm.rank)
        with arrays(comm, ROOM) as make:
            x = make(np.ones(8, np.float32))
            comm.load_plan(text, device=comm.rank).execute(x, x, stream=STREAM)  # and nobody has this one
            plan.execute(x, x, stream=STREAM)
            assert x.read().tolist() == [4.0] * 8
        return plan

    for plan in on_gpus(2, body):
        plan.close()
        with pytest.raises(RuntimeError, match="the communicator of plan .* is closed"):
            plan.prepare("float32", 32)


def test_ranks_that_disagree_get_an_error() -> None:
    text = built("packet-all-reduce", 2)

    def body(comm: Comm) -> str:
        told, heard = threading.Event(), []
        comm.on_cuda_failure(lambda error: (heard.append(error), told.set()))  # before there is a plan that takes it
        plan = comm.load_plan(text, device=comm.rank)
        for count in (8, 16):
            plan.prepare("float32", 4 * count)
        with pytest.raises(RuntimeError) as raised, arrays(comm, ROOM) as make:
            x = make(np.ones([8, 16][comm.rank], np.float32))
            plan.execute(x, x, stream=STREAM)
            x.read()
            comm.check()
        assert told.wait(10) and str(heard[0]) in str(raised.value)
        return str(raised.value)

    for text in on_gpus(2, body):
        assert "ranks disagree" in text and "execute(8 × f32" in text, text


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    text = built("two-shot-all-reduce", 2)
    is_over = threading.Event()

    def body(comm: Comm) -> str:
        plan = comm.load_plan(text, device=comm.rank)
        plan.prepare("float32", 32)
        with arrays(comm, ROOM) as make:
            x = make(np.ones(8, np.float32))
            if comm.rank == 1:
                assert is_over.wait(60)
                raise ConnectionAbortedError("it never called")
            comm.timeout = 2.0
            plan.execute(x, x, stream=STREAM)
            x.read()
            with pytest.raises(TimeoutError) as raised:
                comm.check()
            is_over.set()
            with pytest.raises(TimeoutError, match="failed"):
                plan.execute(x, x, stream=STREAM)
            raise raised.value

    needs.need("gpus 2", device_count() >= 2, f"{device_count()} found")
    error, other = ranks.outcomes(2, body, timeout=60)
    assert isinstance(other, ConnectionAbortedError)
    assert isinstance(error, TimeoutError) and "execute(8 × f32" in str(error) and "still waiting for ranks [1] of 2" in str(error), error
