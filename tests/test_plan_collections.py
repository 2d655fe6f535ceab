"""Collections of plans: on the host, and between GPUs on arrays that are nothing but DLPack, so also on the emulator."""

from typing import Any

import numpy as np
import pytest

import antiphon
import ranks
from antiphon.language import library
from gpu_arrays import arrays, graph, on_gpus

#: Elements of a chunk: a few vectors and a rest.
COUNT = 37
ROOM = 1 << 20
STREAM = 0

Comm = antiphon.Communicator


def built(name: str, world_size: int, **options: Any) -> str:
    return library.build(name, world_size, buffer_alignment=4, **options)


def values(comm: Comm, count: int, dtype: Any = np.float32) -> "np.ndarray[Any, Any]":
    return ((np.arange(count) * 7 + comm.rank * 1009) % 127 / 4).astype(dtype)


def chosen(plans: antiphon.PlanCollection, collective: str, num_bytes: int, dtype: Any = "float32") -> str:
    """The name of what does a call."""
    (name,) = [name for name, _, why_not in plans.explain(collective, num_bytes, dtype) if why_not is None]
    return name


def test_on_the_host_the_first_that_serves_a_call_does_it() -> None:
    small, large = built("packet-all-reduce", 2, max_message_size=4096), built("two-shot-all-reduce", 2)
    gather = built("ring-all-gather", 2)

    def body(comm: Comm) -> None:
        plans = antiphon.PlanCollection(comm)
        assert (plans.device, len(plans), repr(plans)) == (None, 0, "<antiphon.PlanCollection of [] on host>")
        for plan, dtypes in ((gather, None), (small, []), (large, ("float32", np.int32))):
            plans.add(plan, dtypes=dtypes)
        assert len(plans) == 3 and "packet-all-reduce" in repr(plans)
        for count in (64, 4096):
            x = values(comm, count)
            expected = comm.all_reduce(x)
            assert np.array_equal(plans.execute("allreduce", x), expected)
            out = np.empty_like(x)
            assert plans.execute("allreduce", x, out) is out
            assert np.array_equal(out, expected)
            assert plans.execute("allreduce", x, x) is x
            assert np.array_equal(x, expected)
        assert np.array_equal(plans.execute("allgather", values(comm, 8)), comm.all_gather(values(comm, 8)))
        assert chosen(plans, "allreduce", 256) == "packet-all-reduce"
        (first, _, why), (second, _, too_large), (_, time, none) = plans.explain("allreduce", 1 << 14, "float32")
        assert (first, why, second) == ("ring-all-gather", "it does allgather", "packet-all-reduce")
        assert too_large is not None and "4096" in too_large and time is None and none is None
        refused: list[tuple[type[Exception], str, Any]] = [
            (ValueError, "no plan serves allreduce of 16384 bytes of f16", lambda: plans.execute("allreduce", values(comm, 8192, np.float16))),
            (ValueError, 'unknown collective "all_reduce": a collection does allreduce, allgather', lambda: plans.execute("all_reduce", x)),
            (ValueError, "unknown collective", lambda: plans.explain("sendrecv", 4, "float32")),
            (ValueError, "host memory has no stream 7", lambda: plans.execute("allreduce", x, stream=7)),
            (NotImplementedError, "tune: this collection is on the host", lambda: plans.tune((1024, 2048), "float32")),
            (NotImplementedError, "add_built_in: this collection is on the host", lambda: plans.add_built_in()),
            (NotImplementedError, "prepare: this collection is on the host", lambda: plans.prepare("allreduce", "float32", 64)),
            (ValueError, "is for 3 ranks, and there are 2", lambda: plans.add(built("packet-all-reduce", 3))),
            (ValueError, "most_scratch is for plans on GPUs", lambda: plans.add(small, most_scratch=4)),
            (FileNotFoundError, "nowhere.json", lambda: plans.add("nowhere.json")),
        ]  # fmt: skip
        for error, text, call in refused:
            with pytest.raises(error, match=text):
                call()
        assert len(plans) == 3
        plans.close()
        plans.close()
        with pytest.raises(ValueError, match="the collection is closed"):
            plans.execute("allreduce", x)

    ranks.threads(2, body)


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_fastest_of_plans_and_built_in_calls_does_it(world_size: int) -> None:
    push, ring = built("push-two-shot-all-reduce", world_size), built("ring-all-reduce", world_size)

    def body(comm: Comm) -> None:
        plans = antiphon.PlanCollection(comm, device=comm.rank)
        plans.add_built_in()
        plans.add(push)
        plans.add(ring)
        assert (plans.device, len(plans)) == (comm.rank, 3)
        count = 2 * COUNT * world_size
        call = ("allreduce", 4 * count, "float32")
        assert chosen(plans, *call) == "built-in", "untuned, the first that was added"
        plans.tune((256, 512), "float32")
        timed = {name: time is not None for name, time, _ in plans.explain(*call)}
        assert timed == {"built-in": True, "push-two-shot-all-reduce": True, "ring-all-reduce": False}
        everywhere = comm.exchange_objects(plans.explain(*call))
        assert all(explained == everywhere[0] for explained in everywhere)
        reasons = {name: why_not for name, _, why_not in plans.explain(*call)}
        assert reasons["ring-all-reduce"] is not None and "may round otherwise" in reasons["ring-all-reduce"]
        again = antiphon.PlanCollection(comm, device=comm.rank)
        again.add_built_in()
        again.add(push)
        again.add(ring)
        again.prepare("allreduce", "float32", 4 * count)
        assert again.explain(*call) == plans.explain(*call), "the times are in the cache"
        again.close()
        mine = values(comm, count)
        expected = comm.all_reduce(mine)
        with arrays(comm, ROOM) as make:
            x, out = make(mine), make(shape=(count,))
            assert plans.execute("allreduce", x, out, stream=STREAM) is out
            assert np.array_equal(out.read(), expected)
            plans.prepare("allreduce", "float32", 4 * count)
            out.write(np.zeros(count, np.float32))
            with graph(comm.rank, lambda stream: plans.execute("allreduce", x, out, stream=stream)) as replay:
                replay()
                assert np.array_equal(out.read(), expected)
            assert plans.execute("allreduce", x, x, stream=STREAM) is x
            assert np.array_equal(x.read(), expected)
        plans.close()
        comm.check()

    on_gpus(world_size, body, timeout=120)


@pytest.mark.cuda
def test_a_collection_refuses_what_none_of_its_plans_does() -> None:
    push, greatest = built("push-two-shot-all-reduce", 2), built("push-two-shot-all-reduce", 2, max_message_size=1024)

    def body(comm: Comm) -> None:
        plans = antiphon.PlanCollection(comm, device=comm.rank)
        with pytest.raises(ValueError, match="no plan serves allreduce of 64 bytes of f32 on 2 ranks: there are none"):
            plans.prepare("allreduce", "float32", 64)
        plans.add(greatest, dtypes=["float32"])
        with pytest.raises(ValueError, match="plans reduce by sum, min, max, not by prod"):
            plans.add_built_in("prod")
        with pytest.raises(ValueError, match=r"no plan serves allreduce .*\"push-two-shot-all-reduce\": it was added for f32"):
            plans.prepare("allreduce", "int32", 64)
        with pytest.raises(RuntimeError, match="ranks load different plans"):
            plans.add([push, greatest][comm.rank])
        with pytest.raises(RuntimeError, match="2048"):
            plans.tune((1024, 2048), "float32")
        with arrays(comm, ROOM) as make:
            x, gathered = make(values(comm, 8)), make(shape=(16,))
            with pytest.raises(ValueError, match="the arrays are on host, and this collection is on cuda"):
                plans.execute("allreduce", values(comm, 8))
            with pytest.raises(ValueError, match="no plan serves allgather of 64 bytes"):
                plans.execute("allgather", x, gathered, stream=STREAM)
            plans.add_built_in()
            plans.execute("allgather", x, gathered, stream=STREAM)
            assert np.array_equal(gathered.read(), comm.all_gather(values(comm, 8)))
            assert chosen(plans, "allreduce", 32) == "push-two-shot-all-reduce"
            assert chosen(plans, "allreduce", 1 << 12) == "built-in"
        plans.close()
        with pytest.raises(ValueError, match="the collection is closed"):
            plans.explain("allreduce", 64, "float32")

    on_gpus(2, body, timeout=120)
