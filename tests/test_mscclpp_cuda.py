"""``antiphon.mscclpp`` on the addresses of GPUs' memory. Except the script with torch these also run on the emulator: `make emulated-all`."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import antiphon
import antiphon.mscclpp as mscclpp
import needs
import ranks
from antiphon.language import library
from antiphon.mscclpp import DataType, PacketType
from gpu_arrays import Array, arrays, graph, on_gpus
from ports import free_port

pytestmark = pytest.mark.cuda

#: Elements of a chunk: a few vectors and a rest.
COUNT = 37
ROOM = 1 << 20

Comm = antiphon.Communicator


def plan(name: str, comm: Comm, **options: Any) -> mscclpp.ExecutionPlan:
    return mscclpp.ExecutionPlan.of_text(library.build(name, comm.world_size, buffer_alignment=4, **options), comm.rank)


def execute(executor: mscclpp.Executor, x: Array, out: Array, dtype: DataType, plan: mscclpp.ExecutionPlan, *others: Any) -> None:
    executor.execute(plan.rank, x.address, out.address, x.bytes, out.bytes, dtype, plan, *others)


def values(rank: int, count: int, dtype: Any = np.float32) -> "np.ndarray[Any, Any]":
    return ((np.arange(count) * 7 + rank * 1009) % 127 / 4).astype(dtype)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ["packet-all-reduce", "two-shot-all-reduce", "ring-all-gather", "direct-reduce-scatter"])
def test_a_plan_executes_on_addresses(name: str, world_size: int) -> None:
    def body(comm: Comm) -> None:
        group = mscclpp.CommGroup(torch_group=comm)
        executor, one = mscclpp.Executor(group.communicator), plan(name, comm)
        mine = values(comm.rank, COUNT * world_size)
        expected = comm.load_plan(one.text).execute(mine)
        for packets in PacketType:
            with arrays(comm, ROOM) as make:
                x, out = make(mine), make(np.full_like(expected, -1))
                for _ in range(2):
                    execute(executor, x, out, DataType.float32, one, 0, packets)
                assert np.array_equal(out.read(), expected) and np.array_equal(x.read(), mine)
        comm.check()
        executor.reset()

    on_gpus(world_size, body)


@pytest.mark.parametrize("world_size", [2, 3])
def test_in_place(world_size: int) -> None:
    def body(comm: Comm) -> None:
        executor, xs = mscclpp.Executor(comm), [values(rank, COUNT * world_size) for rank in range(world_size)]
        of_rank = slice(comm.rank * COUNT, (comm.rank + 1) * COUNT)
        reduce, gather, scatter = (
            plan(name, comm, inplace=True) for name in ("two-shot-all-reduce", "direct-all-gather", "direct-reduce-scatter")
        )
        with arrays(comm, ROOM) as make:
            x = make(xs[comm.rank])
            part = Array(x._driver, x.device, x.address + of_rank.start * 4, x.dtype, (COUNT,))
            execute(executor, x, x, DataType.float32, reduce, 0)
            assert np.array_equal(x.read(), sum(xs))
            x.write(xs[comm.rank])
            execute(executor, part, x, DataType.float32, gather, 0)
            assert np.array_equal(x.read(), np.concatenate([each[rank * COUNT :][:COUNT] for rank, each in enumerate(xs)]))
            x.write(xs[comm.rank])
            execute(executor, x, part, DataType.float32, scatter, 0)
            assert np.array_equal(part.read(), sum(xs)[of_rank])

    on_gpus(world_size, body)


def test_elements_of_every_type() -> None:
    def body(comm: Comm) -> None:
        executor, gather, reduce = mscclpp.Executor(comm), plan("direct-all-gather", comm), plan("one-shot-all-reduce", comm)
        with arrays(comm, ROOM) as make:
            x, out = make(np.arange(64, dtype=np.uint8) + 100 * comm.rank), make(shape=(128,), dtype=np.uint8)
            for dtype in DataType:
                if dtype is not DataType.float8_e4m3b15:
                    out.write(np.zeros(128))
                    execute(executor, x, out, dtype, gather, 0)
                    assert out.read().tolist() == [*range(64), *range(100, 164)], dtype
            x, out = make(np.full(16, 2**31 + comm.rank, np.uint32)), make(shape=(16,), dtype=np.uint32)
            execute(executor, x, out, DataType.uint32, reduce, 0)
            assert out.read().tolist() == [1] * 16  # of 32 bits
            with pytest.raises(TypeError, match="float8_e5m2 cannot be reduced"):
                execute(executor, x, out, DataType.float8_e5m2, reduce, 0)

    on_gpus(2, body)


def test_graphs_replay_what_was_executed_before() -> None:
    def body(comm: Comm) -> None:
        executor, one = mscclpp.Executor(comm), plan("packet-all-reduce", comm)
        with arrays(comm, ROOM) as make:
            x, out = make(values(comm.rank, 2 * COUNT)), make(shape=(2 * COUNT,))
            execute(executor, x, out, DataType.float32, one, 0)  # prepares it
            assert np.array_equal(out.read(), values(0, 2 * COUNT) + values(1, 2 * COUNT))

            def captured(stream: int) -> None:
                execute(executor, x, x, DataType.float32, one, stream)

            x.write(np.ones(2 * COUNT))
            execute(executor, x, x, DataType.float32, one, 0)
            assert x.read().tolist() == [2] * 2 * COUNT
            with graph(comm.rank, captured) as replay:
                for times in range(1, 4):
                    replay()
                    assert x.read().tolist() == [2 ** (times + 1)] * 2 * COUNT
            comm.barrier()

    on_gpus(2, body)


def test_memory_that_does_not_serve_is_refused() -> None:
    def body(comm: Comm) -> None:
        executor, one = mscclpp.Executor(comm), plan("two-shot-all-reduce", comm)
        host = np.ones(16, np.float32)
        with arrays(comm, ROOM) as make:
            x = make(np.ones(16, np.float32))
            at, far = x.address, 1 << 44
            for said, send, recv, sizes in (
                (f"send_buff is on cuda:{comm.rank}, and recv_buff on the host", at, host.ctypes.data, (64, 64)),
                (f"send_buff is on the host, and recv_buff on cuda:{comm.rank}", host.ctypes.data, at, (64, 64)),
                (f"the {far} bytes at {at:#x} are not memory of this process", at, at, (far, far)),
                ("overlap: they must be apart or the same", at, at + 4, (32, 32)),
                ("no address of elements of 4 bytes", at + 2, at + 2, (32, 32)),
                ("20 bytes", at, at, (20, 20)),
            ):
                with pytest.raises(ValueError, match=said):
                    executor.execute(comm.rank, send, recv, *sizes, DataType.float32, one, 0)
            execute(executor, x, x, DataType.float32, one, 0)
            assert x.read().tolist() == [2.0] * 16

    on_gpus(2, body)


SCRIPT = """
    import os
    import sys
    import torch
    import torch.multiprocessing as mp
    import mscclpp
    import mscclpp.utils as mscclpp_utils
    from mscclpp.language import *

    def allreduce(spec: AlgoSpec) -> CollectiveProgram:
        size = spec.world_size
        with CollectiveProgram.from_spec(spec) as program:
            channels = {(d, s): MemoryChannel(d, s) for s in range(size) for d in range(size) if d != s}
            for channel in channels.values():
                channel.signal(tb=0, data_sync=SyncType.before)
            for channel in channels.values():
                channel.wait(tb=0, data_sync=SyncType.after)
            for src in range(size):
                chunk = Rank(src).get_input_buffer()[src : src + 1]
                for dst in range(size):
                    if dst != src:
                        channels[dst, src].reduce(chunk, [Rank(dst).get_input_buffer()[src : src + 1]], tb=0)
                for dst in range(size):
                    if dst != src:
                        channels[dst, src].put(Rank(dst).get_input_buffer()[src : src + 1], chunk, tb=0)
            for channel in channels.values():
                channel.signal(tb=0, data_sync=SyncType.before)
            for channel in channels.values():
                channel.wait(tb=0, data_sync=SyncType.after)
        return program

    def worker(rank, size, port):
        torch.cuda.set_device(rank)
        comm = mscclpp.CommGroup(interfaceIpPortTrio=f"lo:127.0.0.1:{port}", rank=rank, size=size)
        executor = mscclpp.Executor(comm.communicator)
        spec = AlgoSpec("allreduce", AllReduce(size, 1, True), size, size, True, 1, "Simple")
        algo = mscclpp.compile(algo=allreduce, algo_spec=spec, rank=rank)
        buffer = mscclpp.RawGpuBuffer(24 << 20)
        assert buffer.device_id() == rank
        x = torch.utils.dlpack.from_dlpack(buffer.to_dlpack(data_type=str(torch.bfloat16)))
        assert x.device.index == rank and x.data_ptr() == buffer.data()
        x.fill_(rank + 1)
        dtype, stream = mscclpp_utils.torch_dtype_to_mscclpp_dtype(x.dtype), torch.cuda.Stream()

        def all_reduce():
            where = dict(input_buffer=x.data_ptr(), output_buffer=x.data_ptr(), input_size=x.nbytes, output_size=x.nbytes)
            current = torch.cuda.current_stream().cuda_stream
            algo.execute(comm=comm.communicator, executor=executor, dtype=dtype, stream=current, **where)

        all_reduce()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            all_reduce()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            all_reduce()
        graph.replay()
        torch.cuda.synchronize()
        assert x.eq(3 * 2 * 2).all(), x
        comm.barrier()

    if __name__ == "__main__":
        mp.spawn(worker, args=(2, int(sys.argv[1])), nprocs=2)
        print("all ranks agree")
"""


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = torch.cuda.device_count()
    needs.need("gpus 2", found >= 2, f"torch finds {found}")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "antiphon.compat", "run", str(script), str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=ranks.LIMIT, env=environment, check=False)
    assert done.stdout == "all ranks agree\n", done.stderr
