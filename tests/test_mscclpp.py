"""``antiphon.mscclpp``: plans that execute on raw addresses, under MSCCL++'s names. On host memory."""

import ctypes
import functools
import importlib
import json
import mmap
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import antiphon
import antiphon.mscclpp as mscclpp
import ranks
from antiphon import compat
from antiphon.language import *
from antiphon.language import library
from antiphon.mscclpp import DataType, PacketType, ReduceOp
from ports import free_port

Comm = antiphon.Communicator

#: Elements of a chunk.
COUNT = 20


def file(folder: Path, name: str, world_size: int, **options: Any) -> Path:
    """The file of a plan of the library; of one that copies, for one rank, of which the library has none."""
    path = folder / f"{name}-{world_size}.json"
    if world_size == 1:
        with CollectiveProgram(name, AllReduce(1, 1, options.get("inplace", False)), 1) as program:
            Rank(0).copy(Rank(0).get_output_buffer()[0:1], Rank(0).get_input_buffer()[0:1], tb=0)
        path.write_text(program.to_json())
    else:
        path.write_text(library.build(name, world_size, buffer_alignment=4, **options))
    return path


def number(array: Any) -> tuple[int, int]:
    """The address of an array, and its bytes."""
    if isinstance(array, torch.Tensor):
        return array.data_ptr(), array.nbytes
    return array.ctypes.data, array.nbytes


def execute(executor: mscclpp.Executor, x: Any, out: Any, dtype: DataType, plan: mscclpp.ExecutionPlan, *others: Any) -> None:
    (send, send_size), (recv, recv_size) = number(x), number(out)
    executor.execute(executor.communicator.rank, send, recv, send_size, recv_size, dtype, plan, *others)


def inputs(world_size: int, count: int, dtype: Any = np.float32) -> list[Any]:
    """What each rank puts in: whole numbers, whose sums are exact."""
    return [((np.arange(count) * 7 + rank * 5) % 13).astype(dtype) for rank in range(world_size)]


# Executing.


@pytest.mark.parametrize("packets", PacketType)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_plan_executes_on_addresses(world_size: int, packets: PacketType, tmp_path: Path) -> None:
    path, xs = file(tmp_path, "packet-all-reduce", world_size), inputs(world_size, COUNT * world_size)

    def body(comm: Comm) -> None:
        group = mscclpp.CommGroup(torch_group=comm)
        executor, plan = mscclpp.Executor(group.communicator), mscclpp.ExecutionPlan(str(path), group.my_rank)
        x, out = xs[comm.rank].copy(), np.full_like(xs[0], -1)
        for _ in range(2):
            execute(executor, x, out, DataType.float32, plan, 0, packets)
        assert np.array_equal(out, sum(xs)) and np.array_equal(x, xs[comm.rank])

    ranks.threads(world_size, body)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_in_place(world_size: int, tmp_path: Path) -> None:
    xs = inputs(world_size, COUNT * world_size)
    names = ["two-shot-all-reduce", "direct-all-gather", "direct-reduce-scatter"]
    paths = [file(tmp_path, name, world_size, inplace=True) for name in names]

    def body(comm: Comm) -> None:
        executor, parts = mscclpp.Executor(comm), slice(comm.rank * COUNT, (comm.rank + 1) * COUNT)
        reduce, gather, scatter = (mscclpp.ExecutionPlan(path, comm.rank) for path in paths)
        x = xs[comm.rank].copy()
        execute(executor, x, x, DataType.float32, reduce)
        assert np.array_equal(x, sum(xs))
        x = np.full_like(x, -1)
        x[parts] = xs[comm.rank][:COUNT]
        execute(executor, x[parts], x, DataType.float32, gather)
        assert np.array_equal(x, np.concatenate([each[:COUNT] for each in xs]))
        x = xs[comm.rank].copy()
        execute(executor, x, x[parts], DataType.float32, scatter)
        assert np.array_equal(x[parts], sum(xs)[parts])

    ranks.threads(world_size, body)


def test_sums_of_every_type(tmp_path: Path) -> None:
    path = file(tmp_path, "two-shot-all-reduce", 2)

    def body(comm: Comm) -> None:
        executor, plan = mscclpp.Executor(comm), mscclpp.ExecutionPlan(path, comm.rank)
        for dtype in DataType.float16, DataType.float32, DataType.bfloat16, DataType.int32, DataType.uint8:
            x = torch.arange(16).to(getattr(torch, dtype.name)) + comm.rank
            out = torch.zeros_like(x)
            execute(executor, x, out, dtype, plan)
            assert out.tolist() == [2 * n + 1 for n in range(16)], dtype
        x, out = np.full(16, 2**31 + comm.rank, np.uint32), np.zeros(16, np.uint32)
        execute(executor, x, out, DataType.uint32, plan)
        assert out.tolist() == [1] * 16  # of 32 bits
        for dtype in DataType.float8_e4m3fn, DataType.float8_e5m2fnuz:
            with pytest.raises(TypeError, match=f"{dtype.name} cannot be reduced"):
                execute(executor, x, out, dtype, plan)
        with pytest.raises(NotImplementedError, match="float8_e4m3b15: pass DataType.uint8"):
            execute(executor, x, out, DataType.float8_e4m3b15, plan)

    ranks.threads(2, body)


def test_only_sums_of_uint32_are_those_of_int32(tmp_path: Path) -> None:
    path = file(tmp_path, "two-shot-all-reduce", 2, reduce_op=ReduceOperationType.max)

    def body(comm: Comm) -> None:
        executor, plan = mscclpp.Executor(comm), mscclpp.ExecutionPlan(path, comm.rank)
        assert plan.operators == {"max"}
        x = np.full(16, 2**31 * comm.rank, np.uint32)
        with pytest.raises(TypeError, match="uint32 cannot be reduced"):
            execute(executor, x, np.zeros_like(x), DataType.uint32, plan)

    ranks.threads(2, body)


@pytest.mark.parametrize("dtype", [dtype for dtype in DataType if dtype is not DataType.float8_e4m3b15], ids=lambda dtype: dtype.name)
def test_elements_of_every_type_are_moved(dtype: DataType, tmp_path: Path) -> None:
    path = file(tmp_path, "direct-all-gather", 2)

    def body(comm: Comm) -> None:
        x, out = np.arange(64, dtype=np.uint8) + 100 * comm.rank, np.zeros(128, np.uint8)
        execute(mscclpp.Executor(comm), x, out, dtype, mscclpp.ExecutionPlan(path, comm.rank))
        assert out.tolist() == [*range(64), *range(100, 164)]

    ranks.threads(2, body)


def test_plans_are_told_apart_by_what_they_say(tmp_path: Path) -> None:
    paths = []
    for op in ReduceOperationType.sum, ReduceOperationType.max:
        folder = tmp_path / str(op)
        folder.mkdir()
        paths.append(file(folder, "two-shot-all-reduce", 2, reduce_op=op))

    def body(comm: Comm) -> None:
        executor = mscclpp.Executor(comm)
        plans = [mscclpp.ExecutionPlan(path, comm.rank) for path in [*paths, *paths]]
        assert len({plan.name for plan in plans}) == 1
        x, out = np.full(16, comm.rank + 1, np.float32), np.zeros(16, np.float32)
        for plan, expected in zip(plans, (3, 2, 3, 2)):
            execute(executor, x, out, DataType.float32, plan)
            assert out.tolist() == [expected] * 16
        assert len(executor._loaded) == 2
        executor.reset()
        assert not executor._loaded
        executor.reset()
        execute(executor, x, out, DataType.float32, plans[0])
        assert out.tolist() == [3] * 16

    ranks.threads(2, body)


def test_a_plan_is_as_its_file_was(tmp_path: Path) -> None:
    path = file(tmp_path, "two-shot-all-reduce", 2)

    def body(comm: Comm) -> None:
        plan = mscclpp.ExecutionPlan(path, comm.rank)
        comm.barrier()
        path.unlink(missing_ok=True)
        x = np.ones(16, np.float32)
        execute(mscclpp.Executor(comm), x, x, DataType.float32, plan)
        assert x.tolist() == [2] * 16

    ranks.threads(2, body)


# What is refused.


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    path, other = file(tmp_path, "two-shot-all-reduce", 2), file(tmp_path, "two-shot-all-reduce", 3)
    gathers = file(tmp_path, "direct-all-gather", 2)

    def body(comm: Comm) -> None:
        executor, plan = mscclpp.Executor(comm), mscclpp.ExecutionPlan(path, comm.rank)
        rank, peer, buffer = comm.rank, 1 - comm.rank, np.zeros(64, np.float32)
        at, out = buffer.ctypes.data, np.zeros(16, np.float32).ctypes.data
        good: dict[str, Any] = {
            "rank": rank, "send_buff": at, "recv_buff": at + 128, "send_buff_size": 64, "recv_buff_size": 64,
            "data_type": DataType.float32, "plan": plan, "stream": 0, "packet_type": PacketType.LL8,
        }  # fmt: skip
        gather = mscclpp.ExecutionPlan(gathers, rank)
        wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (ValueError, f"rank is {peer}, and this is rank {rank} of 2", {"rank": peer}),
            (ValueError, "rank must be at least 0, not -1", {"rank": -1}),
            (TypeError, "rank must be an integer, not float", {"rank": 1.0}),
            (ValueError, f"made for rank {peer}, and this is rank {rank}", {"plan": mscclpp.ExecutionPlan(path, peer)}),
            (ValueError, "is for 3 ranks, and there are 2", {"plan": mscclpp.ExecutionPlan(other, rank)}),
            (TypeError, "plan must be of mscclpp.ExecutionPlan, not PosixPath", {"plan": path}),
            (TypeError, "data_type must be of mscclpp.DataType, not str", {"data_type": "float32"}),
            (TypeError, "data_type must be of mscclpp.DataType, not int", {"data_type": 3}),
            (TypeError, "packet_type must be of mscclpp.PacketType, not str", {"packet_type": "LL8"}),
            (TypeError, "send_buff must be an integer, not ndarray", {"send_buff": buffer}),
            (TypeError, "send_buff must be an integer, not bool", {"send_buff": True}),
            (ValueError, "send_buff must be at least 1, not 0", {"send_buff": 0}),
            (ValueError, "recv_buff must be at most 18446744073709551615, not", {"recv_buff": 2**64}),
            (ValueError, "the 64 bytes at 0x1000 are not memory of this process", {"send_buff": 4096}),
            (ValueError, "recv_buff: the 64 bytes at 0xf{15}c are not writable memory", {"recv_buff": 2**64 - 4}),
            (ValueError, "send_buff_size must be at least 1, not 0", {"send_buff_size": 0}),
            (TypeError, "recv_buff_size must be an integer, not float", {"recv_buff_size": 64.0}),
            (ValueError, "send_buff_size is 62 bytes, no whole number of elements of 4 \\(float32\\)", {"send_buff_size": 62}),
            (ValueError, f"recv_buff is {at + 130:#x}, no address of elements of 4 bytes", {"recv_buff": at + 130}),
            (ValueError, "36 bytes.* 2 chunks|no whole number", {"send_buff_size": 36, "recv_buff_size": 36}),
            (ValueError, "32 bytes|64", {"recv_buff_size": 32}),
            (ValueError, "overlap: they must be apart or the same, or one part", {"recv_buff": at + 4}),
            (ValueError, "overlap: they must be apart or the same, or one part", {"recv_buff": at, "recv_buff_size": 32 + 4}),
            (ValueError, "64 bytes at .* 32 bytes at .* not as the plan's 2 chunks in and 2 out", {"recv_buff": at + 32 * rank, "recv_buff_size": 32}),
            (ValueError, "overlap: .* or one part", {"plan": gather, "send_buff": at + 64 * peer, "recv_buff": at, "recv_buff_size": 128}),
            (ValueError, "on the host, which has no stream 0x7", {"stream": 7}),
            (ValueError, "stream must be at least 0, not -1", {"stream": -1}),
            (TypeError, "stream must be an integer, not NoneType", {"stream": None}),
        ]
        for error, said, changed in wrong:
            with pytest.raises(error, match=said):
                executor.execute(**{**good, **changed})
        executor.execute(**good)
        del good["packet_type"], good["stream"]
        executor.execute(**good)
        assert out

    ranks.threads(2, body)


def test_memory_must_be_there_and_writable() -> None:
    from antiphon.mscclpp._memory import Span, _maps

    libc, page = ctypes.CDLL(None), mmap.PAGESIZE
    libc.mmap.restype = ctypes.c_void_p

    def mapped(rights: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        at: int = libc.mmap(None, ctypes.c_size_t(4 * page), rights, flags, -1, ctypes.c_long(0))
        return at

    def span(at: int, size: int, writes: bool) -> Span:
        return Span("call", "here", at, size, "uint8", 1, writes, None)

    def unmap(at: int, size: int) -> None:
        libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))

    both = mapped(mmap.PROT_READ | mmap.PROT_WRITE)
    whole = span(both, 4 * page, True)
    assert (whole.device, whole.place, whole.__dlpack_device__()) == (None, "the host", (1, 0))
    unmap(both + 2 * page, page)
    span(both + 1, 2 * page - 1, True)
    for at, size in (both, 2 * page + 1), (both + 2 * page, 8), (both + 3 * page - 1, 2), (both, 4 * page):
        for writes, what in (True, "writable memory"), (False, "memory"):
            with pytest.raises(ValueError, match=f"call: here: the {size} bytes at {at:#x} are not {what} of this process"):
                span(at, size, writes)
    _maps._ranges.clear()
    only_read, nothing = mapped(mmap.PROT_READ), mapped(0)
    span(only_read, 4 * page, False)
    for at, writes in (only_read, True), (nothing, False), (nothing, True):
        with pytest.raises(ValueError, match="memory of this process"):
            span(at, 8, writes)
    for at, size in (both, 2 * page), (both + 3 * page, page), (only_read, 4 * page), (nothing, 4 * page):
        unmap(at, size)


class Driver:
    """What the CUDA driver says of addresses: which are of which GPU, which are of pinned memory, and what it fails with."""

    def __init__(self, gpus: dict[range, int], pinned: range = range(0), code: int = 0) -> None:
        self.gpus, self.pinned, self.code = gpus, pinned, code

    def cuPointerGetAttributes(self, count: int, asked: Any, places: Any, address: Any) -> int:
        device = next((gpu for place, gpu in self.gpus.items() if address.value in place), None)
        answers = {2: 2 if device is not None else int(address.value in self.pinned), 9: device or 0}
        for attribute, place in zip(asked, places):
            ctypes.c_uint32.from_address(place).value = answers[attribute]
        assert count == len(asked) == len(places)
        return self.code


def test_the_driver_says_whose_memory_it_is() -> None:
    from antiphon.mscclpp._memory import Span

    buffer = np.zeros(8, np.uint8)
    at = buffer.ctypes.data
    driver = Driver({range(4096, 8192): 3, range(8192, 9000): 2}, pinned=range(at, at + 8))

    def span(address: int, size: int, driver: Any = driver) -> Span:
        return Span("call", "here", address, size, "uint8", 1, True, driver)

    of_gpu = span(5000, 3192)
    assert (of_gpu.device, of_gpu.place, of_gpu.__dlpack_device__()) == (3, "cuda:3", (2, 3))
    assert span(at, 8).device is None  # pinned
    for start, size in (5000, 3193), (8192, 809), (4000, 200), (4095, 1):
        with pytest.raises(ValueError, match=f"the {size} bytes at {start:#x} are not writable memory"):
            span(start, size)
    for code in 3, 4, 201:  # not, or no more initialised; of no context
        assert span(at, 8, Driver({range(at, at + 8): 0}, code=code)).device is None
    with pytest.raises(RuntimeError, match=f"does not say what is at {at:#x}: cuPointerGetAttributes gives 700"):
        span(at, 8, Driver({}, code=700))


def test_buffers_are_at_one_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, x = file(tmp_path, "packet-all-reduce", 1), np.ones(16, np.float32)
    comm = antiphon.init(rank=0, world_size=1, path="/nowhere")
    driver = Driver({range(4096, 8192): 0, range(8192, 12288): 1})
    monkeypatch.setattr("antiphon.mscclpp._executor.cuda_driver", lambda: driver)
    execute = functools.partial(mscclpp.Executor(comm).execute, data_type=DataType.float32, plan=mscclpp.ExecutionPlan(path, 0))
    for send, recv, said in (
        (x.ctypes.data, 4096, "send_buff is on the host, and recv_buff on cuda:0"),
        (4096, x.ctypes.data, "send_buff is on cuda:0, and recv_buff on the host"),
        (4096, 8192, "send_buff is on cuda:0, and recv_buff on cuda:1"),
    ):
        with pytest.raises(ValueError, match=said):
            execute(0, send, recv, 64, 64)


def test_an_executor_is_of_a_communicator() -> None:
    with pytest.raises(TypeError, match="comm must be an antiphon.Communicator, as CommGroup.* is, not NoneType"):
        mscclpp.Executor(None)  # type: ignore[arg-type]


def test_plans_that_are_none(tmp_path: Path) -> None:
    good = file(tmp_path, "two-shot-all-reduce", 2)
    plan = mscclpp.ExecutionPlan(good, 1)
    assert (plan.name, plan.collective, plan.rank, plan.inplace) == ("two-shot-all-reduce", "allreduce", 1, False)
    assert (plan.min_message_size, plan.max_message_size) == (0, 2**64 - 1)
    assert repr(plan) == "<ExecutionPlan 'two-shot-all-reduce': allreduce, rank 1>"
    with pytest.raises(FileNotFoundError):
        mscclpp.ExecutionPlan(tmp_path / "nowhere.json", 0)
    with pytest.raises(TypeError, match="planPath must be the path of a file, not dict"):
        mscclpp.ExecutionPlan({}, 0)  # type: ignore[arg-type]
    for rank, error, said in (2, ValueError, "rank 2 of plan 'two-.*for 2 ranks"), (-1, ValueError, "-1"), ("0", TypeError, "str"):
        with pytest.raises(error, match=said):
            mscclpp.ExecutionPlan(good, rank)  # type: ignore[arg-type]
    texts = ["", "[]", "{}", "null", '{"collective": "x", "gpus": [{}]}', '{"collective": "x", "gpus": 3}', "[" * 100_000, "\xff"]
    for text in texts:
        bad = tmp_path / "bad.json"
        bad.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match="ExecutionPlan: .*bad.json is no plan: "):
            mscclpp.ExecutionPlan(bad, 0)


def test_a_plan_that_is_not_proved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    path = file(tmp_path, "two-shot-all-reduce", 2)
    text = json.loads(path.read_text())
    for gpu in text["gpus"]:
        for block in gpu["threadblocks"]:
            block["ops"] = [op for op in block["ops"] if "wait" not in op["name"]]
    path.write_text(json.dumps(text))

    def body(comm: Comm) -> None:
        x = np.ones(16, np.float32)
        executor = mscclpp.Executor(comm)
        with pytest.raises(ValueError, match="is not proved"):
            execute(executor, x, x, DataType.float32, mscclpp.ExecutionPlan(path, comm.rank))
        assert not executor._loaded

    ranks.threads(2, body)


def test_a_lost_rank_is_an_error(tmp_path: Path) -> None:
    path = file(tmp_path, "two-shot-all-reduce", 2)

    def body(comm: Comm) -> None:
        if comm.rank == 1:
            return
        x = np.ones(16, np.float32)
        with pytest.raises(antiphon.PeerLostError):
            execute(mscclpp.Executor(comm), x, x, DataType.float32, mscclpp.ExecutionPlan(path, 0))

    ranks.threads(2, body)


# Groups.


class Mpi:
    """A communicator of mpi4py, by the messages of another one."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def Get_rank(self) -> int:
        return self._comm.rank

    def Get_size(self) -> int:
        return self._comm.world_size

    def allgather(self, data: Any) -> list[Any]:
        return self._comm.exchange_objects(data)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_groups_in_every_way(world_size: int) -> None:
    trio = f"lo:127.0.0.1:{free_port()}"

    def body(comm: Comm) -> None:
        of = {"rank": comm.rank, "size": world_size}
        ways = [
            lambda: mscclpp.CommGroup(torch_group=comm),
            lambda: mscclpp.CommGroup(Mpi(comm)),
            lambda: mscclpp.CommGroup(interfaceIpPortTrio=trio, **of),
            lambda: mscclpp.CommGroup(interfaceIpPortTrio=trio.removeprefix("lo:"), **of),
            lambda: mscclpp.CommGroup(None, None, trio.replace("127.0.0.1", "localhost"), comm.rank, world_size),
        ]
        for way in ways:
            group = way()
            assert (group.my_rank, group.nranks) == (comm.rank, world_size)
            assert {group.nranks_per_node, group.nranks_per_ipc_domain, group.ipc_domain_n_ranks} == {world_size}
            bootstrap = group.bootstrap
            assert (bootstrap.get_rank(), bootstrap.get_n_ranks()) == (comm.rank, world_size)
            assert bootstrap.get_n_ranks_per_node() == bootstrap.get_n_ranks_per_ipc_domain() == world_size
            group.barrier()
            bootstrap.barrier()
            told = np.full(3, comm.rank)
            if world_size > 1 and comm.rank == 0:
                group.send(told, 1, 7)
            elif comm.rank == 1:
                group.recv(told, 0, 7)
                assert told.tolist() == [0, 0, 0]
        comm.barrier()

    ranks.threads(world_size, body)


def test_groups_that_are_wrong() -> None:
    comm, known = antiphon.init(rank=0, world_size=1, path="/nowhere"), {"rank": 0, "size": 1}
    at = "eth0:10.0.0.1:50000"
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "pass one of mpi_comm, torch_group and interfaceIpPortTrio, not none", {}),
        (ValueError, "not none", known),
        (ValueError, "not torch_group and interfaceIpPortTrio", {"torch_group": comm, "interfaceIpPortTrio": at, **known}),
        (TypeError, "the group must be .* not 'gloo'", {"torch_group": "gloo"}),
        (TypeError, "mpi_comm must be a communicator of mpi4py, not int", {"mpi_comm": 3}),
        (ValueError, "rank is 1, and the group says 0", {"torch_group": comm, "rank": 1}),
        (ValueError, "size is 2, and the group says 1", {"torch_group": comm, "size": 2}),
        (ValueError, "needs rank and size", {"interfaceIpPortTrio": at, "rank": 0}),
        (ValueError, "rank 1 is not below the world size 1", {"interfaceIpPortTrio": "127.0.0.1:5", "rank": 1, "size": 1}),
        (ValueError, "size must be at least 1, not 0", {"interfaceIpPortTrio": at, "rank": 0, "size": 0}),
        (TypeError, "rank must be an integer, not str", {"interfaceIpPortTrio": at, "rank": "0", "size": 1}),
        (ValueError, "203.0.113.7 is no address of this machine .* on one", {"interfaceIpPortTrio": "203.0.113.7:50000", **known}),
    ]
    for trio in "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "lo:127.0.0.1:", "a:b:c:1", "::1:50", 50000:
        wrong.append((ValueError, "must be interface:ip:port, such as", {"interfaceIpPortTrio": trio, **known}))
    for error, said, arguments in wrong:
        with pytest.raises(error, match=said):
            mscclpp.CommGroup(**arguments)


def test_ranks_meet_in_a_folder_of_their_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder, address = tmp_path / f"antiphon-{os.geteuid()}", {"interfaceIpPortTrio": "[::ffff:127.0.0.1]:50000", "rank": 0, "size": 1}
    address["interfaceIpPortTrio"] = "127.0.0.1:50000"
    mscclpp.CommGroup(**address)  # type: ignore[arg-type]
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(RuntimeError, match=f"{folder} must be a folder of this user alone .* but it is 40755 of user"):
        mscclpp.CommGroup(**address)  # type: ignore[arg-type]
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(RuntimeError, match="must be a folder of this user alone"):
        mscclpp.CommGroup(**address)  # type: ignore[arg-type]


def test_a_time_limit_of_the_environment_holds_for_groups_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_TIMEOUT", "7.5")
    trio = f"127.0.0.1:{free_port()}"
    assert mscclpp.CommGroup(interfaceIpPortTrio=trio, rank=0, size=1).communicator.timeout == 7.5
    monkeypatch.setenv("ANTIPHON_TIMEOUT", "0.2")
    with pytest.raises(TimeoutError, match="1"):
        mscclpp.CommGroup(interfaceIpPortTrio=trio, rank=0, size=2)


# Algorithms.


def all_pairs(spec: AlgoSpec, twice: bool = False) -> CollectiveProgram:
    """Each rank sums what all others have."""
    size = spec.world_size
    with CollectiveProgram.from_spec(spec) as program:
        pairs = [(own, peer) for own in range(size) for peer in range(size) if own != peer]
        channel = {(own, peer): MemoryChannel(peer, own) for own, peer in pairs}
        for own, peer in pairs:
            channel[own, peer].signal(tb=0, data_sync=SyncType.before)
        for own, peer in pairs:
            channel[own, peer].wait(tb=0, data_sync=SyncType.after)
        for own, peer in pairs:
            mine, output = Rank(own).get_input_buffer()[0:size], Rank(own).get_output_buffer()[0:size]
            channel[own, peer].reduce(mine, [Rank(peer).get_input_buffer()[0:size]], tb=0, local_dst_chunk=output)
        for own, peer in pairs:
            channel[own, peer].signal(tb=0, data_sync=SyncType.before)
        for own, peer in pairs:
            channel[own, peer].wait(tb=0, data_sync=SyncType.after)
    return program


def spec(world_size: int = 2, **changed: Any) -> AlgoSpec:
    fields: dict[str, Any] = {
        "name": "pairs", "collective": AllReduce(world_size, 1, False), "nranks_per_node": 8, "world_size": world_size,
        "in_place": False, "instances": 1, "protocol": "Simple", "max_message_size": 1 << 20, "tags": {"direct": 1},
    }  # fmt: skip
    return AlgoSpec(**{**fields, **changed})


def test_a_compiled_program_is_an_algorithm() -> None:
    def body(comm: Comm) -> str | None:
        algo = mscclpp.compile(algo=all_pairs, algo_spec=spec(), rank=comm.rank)
        assert (algo.name, algo.collective, algo.tags) == ("pairs", "allreduce", {"direct": 1})
        assert algo.message_size_range == (0, 1 << 20) and repr(algo) == "<Algorithm 'pairs': allreduce>"
        assert algo.is_dsl_algorithm() and not algo.is_native_algorithm()
        assert algo.buffer_mode is mscclpp.CollectiveBufferMode.OUT_OF_PLACE
        assert (algo.constraint.world_size, algo.constraint.n_ranks_per_node) == (2, 8)
        x, out = torch.arange(16.0) + comm.rank, torch.zeros(16)
        where = {"input_buffer": x.data_ptr(), "output_buffer": out.data_ptr(), "input_size": 64, "output_size": 64}
        executor = mscclpp.Executor(comm)
        for options in {}, {"op": ReduceOp.SUM, "accum_dtype": DataType.float32, "nblocks": 4, "extras": {"a": 1}}:
            assert algo.execute(comm=comm, executor=executor, dtype=DataType.float32, **where, **options) == 0
            assert out.tolist() == [2 * n + 1 for n in range(16)]
            out.zero_()
        algo.reset()
        wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (TypeError, "algorithm 'pairs' needs executor=mscclpp.Executor\\(comm\\), not NoneType", {"executor": None}),
            (TypeError, "comm must be an antiphon.Communicator, not CommGroup", {"comm": mscclpp.CommGroup(torch_group=comm)}),
            (ValueError, "the executor is of another communicator", {"comm": antiphon.init(rank=0, world_size=1, path="/x")}),
            (TypeError, "op must be of mscclpp.ReduceOp, not str", {"op": "SUM"}),
            (ValueError, "op is MIN, and plan 'pairs' has sum", {"op": ReduceOp.MIN}),
            (TypeError, "accum_dtype must be of mscclpp.DataType, not type", {"accum_dtype": float}),
            (TypeError, "nblocks must be an integer", {"nblocks": "8"}),
            (ValueError, "nthreads_per_block must be at least 0, not -1", {"nthreads_per_block": -1}),
            (TypeError, "data_type must be of mscclpp.DataType, not dtype", {"dtype": torch.float32}),
            (ValueError, "not memory", {"input_buffer": 4096}),
        ]
        for error, said, changed in wrong:
            with pytest.raises(error, match=said):
                algo.execute(**{"comm": comm, "executor": executor, "dtype": DataType.float32, **where, **changed})
        return algo.id

    first, second = ranks.threads(2, body)
    assert first == second and len(first) == 64


def test_the_id_of_an_algorithm_is_of_all_that_its_plan_says() -> None:
    ids = {mscclpp.compile(all_pairs, spec(**changed), 0).id for changed in ({}, {"instances": 2}, {"max_message_size": 64})}
    assert len(ids) == 3
    compiler = mscclpp.DslCompiler()
    assert compiler.compile(all_pairs, spec(), 1, twice=True).id == compiler(all_pairs, spec(), 0).id in ids
    assert mscclpp.compile(lambda of: all_pairs(of), spec(instances=2), 0).id in ids
    inplace = mscclpp.compile(all_pairs, spec(collective=AllReduce(2, 1, True)), 0)
    assert inplace.buffer_mode is mscclpp.CollectiveBufferMode.IN_PLACE


def test_what_is_not_compiled() -> None:
    wrong: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, "algo must be a function that returns a program, not str", ("all_pairs", spec(), 0)),
        (TypeError, "algo_spec must be of mscclpp.language.AlgoSpec, not dict", (all_pairs, {}, 0)),
        (ValueError, "rank is 2, and 'pairs' is for 2 ranks", (all_pairs, spec(), 2)),
        (ValueError, "rank must be at least 0", (all_pairs, spec(), -1)),
        (TypeError, "algo must return a CollectiveProgram, not NoneType", (lambda of: None, spec(), 0)),
        (AssertionError, "protocol", (all_pairs, spec(protocol="LL128"), 0)),
    ]
    for error, said, arguments in wrong:
        with pytest.raises(error, match=said):
            mscclpp.compile(*arguments)


def test_an_algorithm_of_a_file(tmp_path: Path) -> None:
    plan = mscclpp.ExecutionPlan(file(tmp_path, "direct-all-gather", 2), 0)
    algo = mscclpp.Algorithm("mine", plan)
    assert (algo.id, algo.tags, algo.constraint) == ("mine", {}, mscclpp.Algorithm.Constraint(0, 0))
    with pytest.raises(TypeError, match="set_message_size_range\\(1, 2\\): plan 'direct-all-gather' has 0 and 18446744073709551615"):
        algo.set_message_size_range(1, 2)
    with pytest.raises(TypeError, match="execution_plan must be of mscclpp.ExecutionPlan, not NoneType"):
        mscclpp.Algorithm("mine")
    with pytest.raises(NotImplementedError, match="no algorithms of native code: .* compile it"):
        mscclpp.Algorithm(native_handle=object())
    with pytest.raises(NotImplementedError, match="Algorithm.create_from_native_capsule of MSCCL"):
        mscclpp.Algorithm.create_from_native_capsule(object())


# Buffers.


def test_raw_buffers_are_memory_of_the_host_without_cuda() -> None:
    buffer = mscclpp.RawGpuBuffer(64)
    assert (buffer.nelems(), buffer.bytes(), buffer.device_id()) == (64, 64, -1)
    x = torch.utils.dlpack.from_dlpack(buffer.to_dlpack(data_type=str(torch.float16)))
    assert (x.dtype, x.shape, x.data_ptr()) == (torch.float16, (32,), buffer.data()) and not x.any()
    x.fill_(1)
    y = torch.utils.dlpack.from_dlpack(buffer.to_dlpack("torch.float32", shape=[2, 4]))
    assert y.shape == (2, 4) and y.stride() == (4, 1) and y.data_ptr() == x.data_ptr() and y[1, 3] != 0
    z = torch.utils.dlpack.from_dlpack(buffer.to_dlpack("uint8", [4, 2], [1, 32]))
    assert z.stride() == (1, 32) and z[0, 1].item() == x.view(torch.uint8)[32]
    assert torch.utils.dlpack.from_dlpack(buffer.to_dlpack("fp8_e4m3b15")).dtype == torch.uint8
    odd = mscclpp.RawGpuBuffer(7, mscclpp.GpuBufferGranularity.MultiCastRecommended)
    assert torch.utils.dlpack.from_dlpack(odd.to_dlpack("torch.int32")).shape == (1,)
    del buffer
    assert y.sum() != 0  # a capsule keeps the memory


def test_buffers_that_are_wrong() -> None:
    buffer = mscclpp.RawGpuBuffer(64)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "nelems must be at least 1, not 0", lambda: mscclpp.RawGpuBuffer(0)),
        (TypeError, "nelems must be an integer, not str", lambda: mscclpp.RawGpuBuffer("64")),  # type: ignore[arg-type]
        (TypeError, "granularity must be a GpuBufferGranularity, not 1", lambda: mscclpp.RawGpuBuffer(1, 1)),  # type: ignore[arg-type]
        (TypeError, "'torch.float64' is none of torch.int32, ", lambda: buffer.to_dlpack("torch.float64")),
        (TypeError, "torch.float32 is none of", lambda: buffer.to_dlpack(torch.float32)),  # type: ignore[arg-type]
        (ValueError, "shape \\[17\\] .* takes 68 bytes, and the buffer has 64", lambda: buffer.to_dlpack("float32", [17])),
        (ValueError, "takes 68 bytes", lambda: buffer.to_dlpack("float32", [2, 1], [16, 1])),
        (ValueError, "1 strides for 2 dimensions", lambda: buffer.to_dlpack("float32", [2, 2], [2])),
        (ValueError, "a dimension must be at least 0, not -1", lambda: buffer.to_dlpack("float32", [-1])),
        (ValueError, "shape must be an integer or several, not 1.5", lambda: mscclpp.GpuBuffer(1.5)),  # type: ignore[arg-type]
        (ValueError, "shape must be at least 1, not 0", lambda: mscclpp.GpuBuffer((3, 0))),
        (ValueError, "shape must be an integer or several, not 'ab'", lambda: mscclpp.GpuBuffer("ab")),  # type: ignore[arg-type]
        (TypeError, "granularity must be", lambda: mscclpp.GpuBuffer(3, granularity=None)),  # type: ignore[arg-type]
        (TypeError, "float31", lambda: mscclpp.GpuBuffer(3, "float31")),
    ]
    for error, said, make in wrong:
        with pytest.raises(error, match=said):
            make()


def test_arrays_have_the_addresses_of_cupys() -> None:
    x = mscclpp.GpuBuffer((4, 3), dtype=np.float32)
    assert isinstance(x, np.ndarray) and (x.shape, x.dtype, x.nbytes, x.sum()) == ((4, 3), np.float32, 48, 0)
    part = np.split(x, 2)[1]
    assert (x.data.ptr, part.data.ptr) == (x.ctypes.data, x.ctypes.data + 24)
    assert mscclpp.GpuBuffer(5).dtype == np.float64
    assert mscclpp.GpuBuffer((2, 3), np.int32, order="F").strides == (4, 8)
    assert mscclpp.GpuBuffer((2, 3), np.int32, strides=(4, 8)).strides == (4, 8)


def test_buffers_without_torch_are_numpys(tmp_path: Path) -> None:
    program = """
        import sys
        import numpy as np
        import antiphon.mscclpp as mscclpp

        assert "torch" not in sys.modules and "numpy" in sys.modules
        buffer = mscclpp.RawGpuBuffer(64)

        class Taken:
            def __dlpack__(self, **options): return buffer.to_dlpack("float32", [4, 2], [1, 4])
            def __dlpack_device__(self): return 1, 0

        x = np.from_dlpack(Taken())
        assert x.ctypes.data == buffer.data() and x.strides == (4, 16) and buffer.device_id() == -1
        try:
            buffer.to_dlpack("torch.bfloat16")
        except NotImplementedError as error:
            print(error)
        assert not mscclpp.utils.is_torch_tensor(x)
        """
    program = textwrap.dedent(program).replace("mscclpp.utils", "__import__('antiphon.mscclpp.utils').mscclpp.utils")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "to_dlpack: NumPy and CuPy have no bfloat16: import torch before the buffer is made\n", done.stderr


# Names.


def test_numbers_are_those_of_mscclpp() -> None:
    assert [int(dtype) for dtype in DataType] == list(range(11))
    assert [(op.name, int(op)) for op in ReduceOp] == [("SUM", 0), ("MIN", 3), ("NOP", 255)]
    assert [(packets.name, int(packets)) for packets in PacketType] == [("LL8", 0), ("LL16", 1)]
    assert {dtype.itemsize for dtype in (DataType.uint8, DataType.float8_e5m2, DataType.float8_e4m3b15)} == {1}
    assert [DataType.bfloat16.itemsize, DataType.float16.itemsize, DataType.uint32.itemsize] == [2, 2, 4]
    assert f"{PacketType.LL16}" == "PacketType.LL16"
    assert (mscclpp.is_nvls_supported(), mscclpp.is_bulk_supported()) == (False, False)
    assert mscclpp.version == {"version": mscclpp.__version__, "git_commit": ""} and mscclpp.__version__ == "0.9.0"


def test_utils() -> None:
    utils = importlib.import_module("antiphon.mscclpp.utils")
    assert utils.torch_dtype_to_mscclpp_dtype(torch.bfloat16) is DataType.bfloat16
    assert utils.torch_dtype_to_mscclpp_dtype(torch.float8_e4m3fn) is DataType.float8_e4m3fn
    with pytest.raises(ValueError, match="torch.float64 is none of int32, "):
        utils.torch_dtype_to_mscclpp_dtype(torch.float64)
    assert utils.is_torch_tensor(torch.ones(1)) and not utils.is_torch_tensor(np.ones(1))


#: What MSCCL++ 0.9.0 exports, and Antiphon has not.
ABSENT = (
    "AlgorithmBuilder AlgorithmCollection Communicator Connection Device DeviceType EndpointConfig EndpointConfigIb ErrorCode Fifo "
    "Host2DeviceSemaphore Host2HostSemaphore IbMode MemoryChannel MemoryDevice2DeviceSemaphore NativeCodeCompiler PortChannel "
    "ProxyService RegisteredMemory Semaphore TcpBootstrap Transport TransportFlags alloc_shared_physical_cuda compile_native "
    "connect_nvls_collective env get_flag_buffer get_include get_lib npkit numa utils:Kernel utils:KernelBuilder utils:pack "
    "utils:get_device_arch ext:AlgorithmCollectionBuilder default_algos:allgather_multi_nodes default_algos:allreduce_multi_nodes "
    "default_algos:reducescatter_multi_nodes"
).split()


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_absent_can_be_named_and_says_what_to_use(name: str) -> None:
    module, _, name = name.rpartition(":")
    absent = getattr(importlib.import_module(f"antiphon.mscclpp.{module}".rstrip(".")), name)
    assert name in repr(absent) and not isinstance(3, absent) and not hasattr(absent, "__len__")
    for use in lambda: absent(1, a=2), lambda: absent.CudaIpc, lambda: type("Mine", (absent,), {}):
        with pytest.raises((NotImplementedError, TypeError)) as raised:
            use()
        if raised.type is NotImplementedError:
            assert f"{name} of MSCCL++: " in str(raised.value)
    with pytest.raises(NotImplementedError, match=f"{name} of MSCCL"):
        exec("class Mine(absent): pass", {"absent": absent})


def test_what_needs_channels_says_what_to_use() -> None:
    group = mscclpp.CommGroup(torch_group=antiphon.init(rank=0, world_size=1, path="/nowhere"))
    for call in group.make_connection, group.make_memory_channels, group.register_local_memory, group.my_ib_device:
        with pytest.raises(NotImplementedError, match="Antiphon has no CommGroup"):
            call([0], None)
    with pytest.raises(NotImplementedError, match="no Bootstrap.all_gather of MSCCL.*exchange_bytes"):
        group.bootstrap.all_gather(0, 1)


def test_names_that_mscclpp_has_not_either() -> None:
    with pytest.raises(AttributeError, match="Antiphon does not serve 'Executer' of mscclpp; it serves Executor, "):
        mscclpp.Executer  # noqa: B018
    with pytest.raises(ImportError, match="'Executer'"):
        from antiphon.mscclpp import Executer  # noqa: F401
    assert mscclpp.language is antiphon.language


# Scripts as users of MSCCL++ write them, unchanged.

SCRIPT = """
    import os
    import sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import mscclpp
    import mscclpp.language
    import mscclpp.utils as mscclpp_utils
    from mscclpp import CommGroup, DataType, ExecutionPlan, Executor, PacketType, Transport, env, npkit
    from mscclpp.language.collectives import AllReduce
    from mscclpp.language.channel import MemoryChannel, SyncType
    from mscclpp.language.program import CollectiveProgram
    from mscclpp.language.rank import Rank

    def allreduce(spec: mscclpp.language.AlgoSpec) -> CollectiveProgram:
        size = spec.world_size
        with CollectiveProgram.from_spec(spec) as program:
            channels = {(d, s): MemoryChannel(d, s) for s in range(size) for d in range(size) if d != s}
            for (_, _), channel in channels.items():
                channel.signal(tb=0, relaxed=True)
            for (_, _), channel in channels.items():
                channel.wait(tb=0, relaxed=True, data_sync=SyncType.after)
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

    class CustomizedComm:
        def __init__(self, comm: mscclpp.CommGroup, algorithms=[]):
            self.comm = comm
            self.executor = mscclpp.Executor(comm.communicator)
            self.algorithms = algorithms

        def all_reduce(self, tensor, stream=None):
            algo: mscclpp.Algorithm = self.algorithms[0]
            algo.execute(
                comm=self.comm.communicator,
                executor=self.executor,
                input_buffer=tensor.data_ptr(),
                output_buffer=tensor.data_ptr(),
                input_size=tensor.nbytes,
                output_size=tensor.nbytes,
                dtype=mscclpp_utils.torch_dtype_to_mscclpp_dtype(tensor.dtype),
                stream=stream.cuda_stream if stream is not None else 0,
            )

    def worker(rank, size, folder, port):
        spec = mscclpp.language.AlgoSpec(
            name="allreduce", collective=AllReduce(size, 1, True), nranks_per_node=size, world_size=size, in_place=True,
            instances=1, protocol="Simple", num_threads_per_block=1024, max_message_size=48 << 30, tags={"nvls": 0},
        )
        if mscclpp.is_nvls_supported():
            raise SystemExit("not here")
        algorithms = [mscclpp.compile(algo=allreduce, algo_spec=spec, rank=rank)]
        comm = CustomizedComm(CommGroup(interfaceIpPortTrio=f"lo:127.0.0.1:{port}", rank=rank, size=size), algorithms)
        comm.comm.barrier()
        dlpack = mscclpp.RawGpuBuffer(1 << 16).to_dlpack(data_type=str(torch.bfloat16))
        x = torch.utils.dlpack.from_dlpack(dlpack)
        x.fill_(rank + 1)
        comm.all_reduce(x)
        assert x.eq(size * (size + 1) // 2).all(), x

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        group = CommGroup(torch_group=dist.group.WORLD)
        executor = Executor(group.communicator)
        plan = ExecutionPlan(f"{folder}/plan.json", group.my_rank)
        send, recv = torch.full((1024,), rank, dtype=torch.int32), torch.zeros(1024 * size, dtype=torch.int32)
        for packets in PacketType.LL8, PacketType.LL16:
            executor.execute(
                group.my_rank, send.data_ptr(), recv.data_ptr(), send.nbytes, recv.nbytes, DataType.int32, plan, 0, packets
            )
        assert recv.view(size, 1024).eq(torch.arange(size)[:, None]).all()
        group.barrier()
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(worker, args=(2, sys.argv[1], int(sys.argv[2])), nprocs=2)
        print("all ranks agree")
"""


@pytest.mark.parametrize("peers", [(), ("--peer", "mscclpp")])
def test_a_script_runs_unchanged(peers: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "plan.json").write_text(library.build("direct-all-gather", 2))
    command = [sys.executable, "-m", "antiphon.compat", "run", *peers, str(script), str(tmp_path), str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.stdout == "all ranks agree\n", done.stderr


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer itself, on this process's path."""
    for name in "mscclpp/__init__.py", "mscclpp/_core.py", "mscclpp/language/__init__.py", "mscclpp/language/rank.py":
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)


ORDERS = [
    (["mscclpp", "mscclpp.language"], ["mscclpp", "mscclpp.language"]),
    (["mscclpp", "mscclpp.language"], ["mscclpp.language", "mscclpp"]),
    (["mscclpp.language", "mscclpp"], ["mscclpp", "mscclpp.language"]),
    (["mscclpp.language", "mscclpp"], ["mscclpp.language", "mscclpp"]),
]


@pytest.mark.parametrize(("installed", "removed"), ORDERS)
@pytest.mark.parametrize("imported", [True, False])
def test_a_peer_within_a_peer(imported: bool, installed: list[str], removed: list[str], real: None) -> None:
    """``mscclpp.language`` is the longer name, in whatever order they come and go."""

    def found(name: str) -> str:
        module = importlib.import_module(name)
        return "real" if vars(module).get("real") else module.__name__

    def are(mscclpp: str, language: str, rank: str) -> None:
        names = ["mscclpp", "mscclpp.language", "mscclpp.language.rank"]
        assert [found(name) for name in names] == [mscclpp, language, rank]
        assert importlib.import_module("mscclpp").language is importlib.import_module("mscclpp.language")

    ours = ("antiphon.mscclpp", "antiphon.language", "antiphon.language.rank")
    try:
        if imported:
            are("real", "real", "real")
            before = sys.modules["mscclpp.language.rank"]
        for name in installed:
            compat.install(name)
            part = ours if name == "mscclpp" or "mscclpp" in compat._finder.hidden else ("real", *ours[1:])
            are(*part)
        compat.uninstall(removed[0])
        are(*(ours if removed[0] == "mscclpp.language" else ("real", *ours[1:])))
        compat.uninstall(removed[1])
        are("real", "real", "real")
        assert not imported or sys.modules["mscclpp.language.rank"] is before
    finally:
        compat.uninstall()
        for name in [name for name in sys.modules if name.split(".")[0] == "mscclpp"]:
            del sys.modules[name]


def test_modules_that_are_not_served_are_listed() -> None:
    compat.install("mscclpp")
    try:
        with pytest.raises(ImportError, match="not serve the module mscclpp._mscclpp yet; it serves mscclpp.utils, mscclpp, "):
            importlib.import_module("mscclpp._mscclpp")
        served = importlib.import_module("mscclpp.ext")
        assert served is importlib.import_module("antiphon.mscclpp.ext")
    finally:
        compat.uninstall("mscclpp")
    assert not [name for name in sys.modules if name.split(".")[0] == "mscclpp"]
