"""What there is on GPUs alone: streams, graphs, setting up in advance, and ranks that die in the middle of a call."""

import os
import signal
import time
from typing import Any

import pytest
import torch

import antiphon
import antiphon.torch
import harness
import ranks
from antiphon.comm import create_shared_buffer, free_shared_buffer, pack_strided_memory
from harness import Checks
from trtllm import Call

pytestmark = pytest.mark.cuda

CHECKS = check = Checks()

Comm, Device = antiphon.Communicator, torch.device


def filled(comm: Comm, device: Device, count: int = 1000) -> torch.Tensor:
    return torch.full((count,), comm.rank + 1.0, device=device)


def total(comm: Comm) -> float:
    return sum(range(1, comm.world_size + 1)) * 1.0


@check
def a_call_does_not_wait(comm: Comm, device: Device) -> None:
    x = filled(comm, device)
    comm.all_reduce(x)
    torch.cuda.synchronize()
    comm.barrier()
    torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
    start = time.perf_counter()
    found = comm.all_reduce(x)
    assert time.perf_counter() - start < 0.2
    assert found.eq(total(comm)).all()


@check
def calls_follow_the_current_stream(comm: Comm, device: Device) -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device=device)
    comm.prepare_cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for turn in range(20):
            torch.cuda._sleep(1_000_000)
            x.fill_(comm.rank + turn)
            found = comm.all_reduce(x)
            x.fill_(-1)
            assert found.eq(total(comm) + comm.world_size * (turn - 1)).all()
    # A stream by its number, which the current one waits for.
    x.fill_(comm.rank + 1)
    stream.wait_stream(torch.cuda.current_stream())
    with pytest.raises(ValueError, match="is not the current one .* pass out="):
        comm.all_reduce(x, stream=stream.cuda_stream)
    comm.all_reduce(x, out=x, stream=stream.cuda_stream)
    torch.cuda.current_stream().wait_stream(stream)
    assert x.eq(total(comm)).all()


@check
def a_part_of_the_multiprocessors(comm: Comm, device: Device) -> None:
    """On a stream of a green context grids are as small as it is: blocks that wait for each other must all find room."""
    from cuda.bindings import driver  # torch brings it

    def ok(answer: tuple[Any, ...]) -> Any:
        assert answer[0] == driver.CUresult.CUDA_SUCCESS, answer[0]
        return answer[1] if len(answer) == 2 else answer[1:]

    sizes = [(4, 1024), (64, 7168), (512, 7168), (2048, 7168)]
    inputs = [torch.randn(size, device=device).bfloat16() for size in sizes]
    weights = {hidden: torch.rand(hidden, device=device).bfloat16() for _, hidden in sizes}

    def results() -> list[torch.Tensor]:
        found = []
        for x in inputs:
            found += [comm.all_reduce(x), comm.all_gather(x), comm.reduce_scatter(x), comm.all_to_all(x)]
            norm = comm.all_reduce_rms_norm(x, torch.ones_like(x), weights[x.shape[1]], eps=1e-5)
            found.append(norm[0] if isinstance(norm, tuple) else norm)
        return found

    expected = results()
    whole = ok(driver.cuDeviceGetDevResource(device.index, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    parts, _, _ = ok(driver.cuDevSmResourceSplitByCount(1, whole, 0, 16))
    description = ok(driver.cuDevResourceGenerateDesc([parts[0]], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = ok(driver.cuGreenCtxCreate(description, device.index, flags))
    stream = ok(driver.cuGreenCtxStreamCreate(green, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    external = torch.cuda.ExternalStream(int(stream), device)
    external.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(external):
        found = results()
        external.synchronize()
    comm.check()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # And on the whole GPU again.
    assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))
    torch.cuda.synchronize()


@check
def a_forked_child_drops_what_it_inherited(comm: Comm, device: Device) -> None:
    group = comm.split(0)
    assert group is not None
    x = filled(comm, device)
    group.all_reduce(x)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        del group  # the last reference: what is on the GPU is the parent's
        os._exit(0)
    end = time.monotonic() + 20
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    assert found == (child, 0), found
    assert group.all_reduce(x).eq(total(comm)).all()


@check
def a_program_that_only_replays_graphs_hears_of_a_failure(comm: Comm, device: Device) -> None:
    with pytest.raises(TypeError, match="\"error\", \"abort\" or a callable"):
        comm.on_cuda_failure(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="\"loud\", not error or abort"):
        comm.on_cuda_failure("loud")  # type: ignore[arg-type]
    heard: list[Exception] = []
    comm.on_cuda_failure(heard.append)
    x = filled(comm, device)
    comm.prepare_cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = comm.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    assert found.eq(total(comm)).all()
    comm.barrier()
    if comm.rank == 0:
        return  # and leaves
    graph.replay()
    torch.cuda.synchronize()
    assert found.isnan().all()
    end = time.monotonic() + 20
    while not heard and time.monotonic() < end:
        time.sleep(0.01)
    assert isinstance(heard[0], antiphon.PeerLostError), heard
    assert "all_reduce(1000" in str(heard[0])


@check
def every_entry_point_raises_after_a_failure(comm: Comm, device: Device) -> None:
    """The next call, of any kind, raises a failure that happened in a graph."""
    group = antiphon.torch.ops.register(comm)
    fused = Call(comm, device, 2, 256, torch.bfloat16)
    fused()
    x = filled(comm, device)
    comm.prepare_cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x)
    torch.cuda.synchronize()
    comm.barrier()
    if comm.rank == 0:
        return  # and leaves
    graph.replay()
    torch.cuda.synchronize()
    for name, call in {
        "comm.all_reduce": lambda: comm.all_reduce(x),
        "comm.all_reduce_rms_norm": lambda: comm.all_reduce_rms_norm(x.view(1, -1), weight=torch.ones_like(x)),
        "comm.barrier": lambda: comm.barrier(device=device.index),
        "comm.check": comm.check,
        "torch.ops.antiphon.all_reduce": lambda: torch.ops.antiphon.all_reduce(x, group),
        "trtllm_allreduce_fusion": fused,
    }.items():
        try:
            call()
        except (antiphon.PeerLostError, RuntimeError):
            continue
        raise AssertionError(f"{name} was as if nothing had happened")


@check
def graphs(comm: Comm, device: Device) -> None:
    world, rank = comm.world_size, comm.rank
    comm.prepare_cuda(dtypes=["float32", "bfloat16"], ops=["sum", "avg"])
    x = torch.zeros(world * 3000, device=device)
    half = torch.zeros(77, device=device, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reduced = comm.all_reduce(x)
        gathered = comm.all_gather(half)
        comm.all_reduce(half, "avg", out=half)
        scattered = comm.reduce_scatter(reduced)
        mixed = comm.all_to_all(x)
        comm.broadcast(mixed, 1)
        comm.barrier(device=device.index)
    for turn in range(30):
        x.copy_(torch.arange(world * 3000) % 50 + rank + turn)
        half.fill_(float(rank + turn % 9))
        graph.replay()
        xs = [torch.arange(world * 3000, device=device) % 50 + float(each + turn) for each in range(world)]
        assert torch.equal(reduced, torch.stack(xs).sum(0))
        assert gathered.chunk(world)[1].eq(1 + turn % 9).all()
        assert half.eq((world - 1) / 2 + turn % 9).all()
        assert torch.equal(scattered, reduced.chunk(world)[rank] * world)
        assert torch.equal(mixed, torch.cat([each.chunk(world)[1] for each in xs]))
        assert comm.all_reduce(torch.ones(5, device=device)).eq(world).all()  # between two replays
    comm.check()


@check
def a_capture_without_setting_up_says_what_to_do(comm: Comm, device: Device) -> None:
    x = filled(comm, device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(ValueError, match=r"make one before the capture, or call comm.prepare_cuda\(\)"):
            comm.all_reduce(x)
        x.add_(1)
    comm.prepare_cuda()
    assert comm.all_reduce(filled(comm, device)).eq(total(comm)).all()


@check
def a_capture_may_have_the_first_call_of_its_kind(comm: Comm, device: Device) -> None:
    comm.prepare_cuda(dtypes=[])
    x, graph = filled(comm, device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = comm.all_reduce(x, "max")
    graph.replay()
    assert found.eq(comm.world_size).all()


@check
def many_graphs_of_many_sizes(comm: Comm, device: Device) -> None:
    comm.prepare_cuda(dtypes=["float32"])
    made: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for count in (1, 16, 1000, 50_000, 1 << 20):
        x, graph = filled(comm, device, count), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                out = comm.all_reduce(x)
        made.append((graph, x, out))
    for turn in range(40):
        graph, x, out = made[turn * 3 % 5]
        x.fill_(comm.rank + turn)
        graph.replay()
        assert out.eq(total(comm) + comm.world_size * (turn - 1)).all()


@check
def shared_buffers_of_who_uses_cuda_are_on_the_gpu(comm: Comm, device: Device) -> None:
    pointers = create_shared_buffer(64, comm)
    mine = pack_strided_memory(pointers[comm.rank], 64, 64, 1, torch.float32, device.index)
    assert mine.device == device and mine.eq(0).all()
    comm.barrier()
    theirs = pack_strided_memory(pointers[1 - comm.rank % 2], 64, 64, 1, torch.float32, device.index)
    assert theirs.eq(0).all()
    free_shared_buffer(pointers, comm)


@check
def registered_memory_is_reduced_where_it_lies(comm: Comm, device: Device) -> None:
    x = torch.empty(3_000_000, device=device)[1000:2_001_000]  # somewhere inside an allocation
    comm.register_cuda(x)
    part = x[7:1_000_008]
    part.fill_(comm.rank + 1.0)
    assert comm.all_reduce(part, registered=True).eq(total(comm)).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(part, out=part, registered=True)
    for turn in range(3):
        part.fill_(comm.rank + turn)
        graph.replay()
        assert part.eq(total(comm) + comm.world_size * (turn - 1)).all()
    with pytest.raises(ValueError, match="the output must be in registered memory"):
        comm.all_reduce(part, registered=True, algorithm="two-shot")
    comm.unregister_cuda(x)
    with pytest.raises(ValueError, match="the input must be in registered memory: no memory has the 4000004 bytes"):
        comm.all_reduce(part, registered=True)
    with pytest.raises(ValueError, match="no registered memory begins at"):
        comm.unregister_cuda(x)
    with pytest.raises(ValueError, match="the memory to register is on host"):
        comm.register_cuda(torch.zeros(3))
    buffer = comm.symmetric(4096, "cuda")
    comm.register_cuda(buffer)
    mine = pack_strided_memory(buffer.pointer(comm.rank), 4096, 4096, 1, torch.float32, device.index).view(-1)
    mine.fill_(comm.rank + 1.0)
    assert comm.all_reduce(mine, out=mine, registered=True).eq(total(comm)).all()
    comm.unregister_cuda(buffer)
    comm.free(buffer)


@check
def two_communicators_at_once(comm: Comm, device: Device) -> None:
    other = comm.split(0)
    assert other is not None
    with other:
        for turn in range(50):
            x = filled(comm, device, 1 + 997 * turn)
            first, second = comm.all_reduce(x), other.all_reduce(x, "max")
            assert first.eq(total(comm)).all() and second.eq(comm.world_size).all()


@check
def rooted_operations(comm: Comm, device: Device) -> None:
    xs = [torch.arange(6.0, device=device) * (rank + 1) for rank in range(comm.world_size)]
    for root in range(comm.world_size):
        mine, is_root = xs[comm.rank], comm.rank == root
        reduced, gathered = comm.reduce(mine, root=root), comm.gather(mine, root)
        if is_root:
            assert torch.equal(reduced, torch.stack(xs).sum(0)) and torch.equal(gathered, torch.cat(xs))
        else:
            assert reduced is None and gathered is None
        row = torch.cat(xs).int()
        out = torch.empty(6, dtype=torch.int32, device=device)
        comm.scatter(row if is_root else None, root, out=out)
        assert torch.equal(out, xs[comm.rank].int())


@check
def parts_of_uneven_lengths(comm: Comm, device: Device) -> None:
    size, rank = comm.world_size, comm.rank
    counts = [3 * r for r in range(size)]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        parts = [torch.full((count, 5), r + 1, dtype=dtype, device=device) for r, count in enumerate(counts)]
        assert torch.equal(comm.all_gather_v(parts[rank], counts), torch.cat(parts))
        if dtype.is_floating_point:
            whole = torch.cat(parts) + rank
            found = comm.reduce_scatter_v(whole, counts, "max")
            assert torch.equal(found, parts[rank] + size - 1)
    sends, receives = [rank + to for to in range(size)], [source + rank for source in range(size)]
    x = torch.cat([torch.full((n,), 10.0 * rank + to, device=device) for to, n in enumerate(sends)])
    found = comm.all_to_all_v(x, sends, receives)
    expected = [torch.full((n,), 10.0 * source + rank, device=device) for source, n in enumerate(receives)]
    assert torch.equal(found, torch.cat(expected))


@check
def lists_of_tensors(comm: Comm, device: Device) -> None:
    size, rank = comm.world_size, comm.rank
    for counts in ((3, 0, 5, 1000), tuple(range(70)), (5_000_000, 3)):  # in one launch, too many, too long
        for dtype in (torch.float32, torch.bfloat16):
            xs = [[torch.full((n,), r + i % 5, dtype=dtype, device=device) for i, n in enumerate(counts)] for r in range(size)]
            for index, found in enumerate(comm.all_gather_list(xs[rank])):
                assert torch.equal(found, torch.cat([x[index] for x in xs]))
            rows = [torch.cat([x[index] for x in xs]) + rank for index in range(len(counts))]
            for index, found in enumerate(comm.reduce_scatter_list(rows, "max")):
                assert torch.equal(found, xs[rank][index] + size - 1)
    xs = [torch.full((n,), 1.0, device=device) for n in (7, 100)]
    outs = [torch.zeros(n * size, device=device) for n in (7, 100)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_gather_list(xs, out=outs)
    for turn in range(3):
        for x in xs:
            x.fill_(rank + turn)
        graph.replay()
        for n, out in zip((7, 100), outs):
            assert torch.equal(out, torch.arange(float(size), device=device).repeat_interleave(n) + turn)


@check
def messages(comm: Comm, device: Device) -> None:
    size, rank = comm.world_size, comm.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (1, 1000, 5_000_000):
        x, out = torch.full((count,), rank + 1, device=device), torch.zeros(count, dtype=torch.int64, device=device)
        assert comm.send_recv(x, after, out, before).eq(before + 1).all()
        if rank == 0:
            comm.send(x, 1)
        elif rank == 1:
            assert comm.recv(out, 0).eq(1).all()
        received = comm.start_recv(out.zero_(), before)  # first, on every rank: it delays no send
        sent = comm.start_send(x, after)
        assert received.wait().eq(before + 1).all() and sent.wait() is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.send_recv(x, after, out, before)
    for turn in range(3):
        x.fill_(rank + turn)
        graph.replay()
        assert out.eq(before + turn).all()


@check
def started_calls_go_beside_the_current_stream(comm: Comm, device: Device) -> None:
    x = filled(comm, device, 1_000_000)
    handles = [comm.start_all_reduce(x) for _ in range(5)]
    product = torch.ones(512, 512, device=device) @ torch.ones(512, 512, device=device)
    rooted = comm.start_gather(x, 1)
    for handle in handles:
        assert handle.wait().eq(total(comm)).all()
        assert handle.wait() is not None  # again
    gathered = rooted.wait()
    assert (gathered is None) == (comm.rank != 1) and product.eq(512).all()
    torch.cuda.synchronize()
    assert handles[0].is_finished()
    del x, handles
    comm.start_all_reduce(filled(comm, device, 1_000_000))  # lost: its memory stays until it is over
    comm.check()


@check
def what_has_no_form_on_cuda_is_refused(comm: Comm, device: Device) -> None:
    x = filled(comm, device)
    for name, call in {
        "recv_any": lambda: comm.recv_any(x),
        "start_recv from any rank": lambda: comm.start_recv(x, None),
    }.items():
        with pytest.raises(NotImplementedError, match=f"{name} on cuda:{device.index}: "):
            call()
    with pytest.raises(ValueError, match="the input is on cuda:., the output on host"):
        comm.all_reduce(x, out=x.cpu())
    with pytest.raises(TypeError, match="i32 cannot be reduced"):
        comm.all_reduce(x.int())
    with pytest.raises(ValueError, match="by send_recv alone"):
        comm.send(x, comm.rank)


@check
def the_host_works_beside_it(comm: Comm, device: Device) -> None:
    for _ in range(20):
        on_device = comm.all_reduce(filled(comm, device))
        on_host = comm.all_reduce(torch.full((3,), comm.rank + 1.0))
        assert on_host.eq(total(comm)).all() and on_device.eq(total(comm)).all()


@check
def arrays_of_cupy(comm: Comm, device: Device) -> None:
    try:
        import cupy
    except ImportError:
        return
    with cupy.cuda.Device(device.index), cupy.cuda.Stream(non_blocking=True):
        x = cupy.full(1000, comm.rank + 1, dtype=cupy.float32)
        for found in (comm.all_reduce(x), comm.all_reduce(x, out=x)):
            assert type(found) is cupy.ndarray and bool((found == total(comm)).all())
        assert comm.all_gather(x.astype(cupy.int64)).shape == (1000 * comm.world_size,)
    for _ in range(10):  # CuPy destroys each stream before the next call
        with cupy.cuda.Device(device.index), cupy.cuda.Stream(non_blocking=True):
            x = cupy.full(1000, comm.rank + 1, dtype=cupy.float32)
            assert bool((comm.all_reduce(x) == total(comm)).all())


@check
def ranks_that_call_different_things(comm: Comm, device: Device) -> None:
    x = filled(comm, device)
    comm.all_reduce(x)
    comm.all_gather(x) if comm.rank == 0 else comm.all_reduce(x)
    torch.cuda.synchronize()
    with pytest.raises((RuntimeError, TimeoutError), match="ranks disagree|aborted|failed|timed out"):
        comm.check()
    assert torch.ones(3, device=device).sum().item() == 3


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_on_cuda(name: str, world_size: int) -> None:
    harness.expect("test_cuda", name, "cuda", world_size)


def alone() -> None:
    """A world of one rank copies, in the order of the stream."""
    with antiphon.init() as comm:
        x = torch.arange(6.0, device=harness.place("cuda", 0))
        for found in (comm.all_reduce(x), comm.all_gather(x), comm.all_gather_v(x, [6]), comm.gather(x)):
            assert torch.equal(found, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = comm.reduce_scatter(x)
        x += 1
        graph.replay()
        assert torch.equal(out, x)
        comm.check()


@pytest.mark.cuda
def test_a_world_of_one() -> None:
    harness.need("cuda", 1)
    ranks.processes(1, alone)


def after_a_death(captured: bool) -> str:
    """The error of a rank when another one is killed while the others wait for it on their GPUs."""
    with antiphon.init() as comm:
        device = harness.place("cuda", comm.rank)
        comm.prepare_cuda()
        x = filled(comm, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = comm.all_reduce(x)
        graph.replay()
        assert out.eq(total(comm)).all()
        comm.barrier()
        if comm.rank == comm.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        if captured:
            graph.replay()
        else:
            comm.all_reduce(x)
        torch.cuda.synchronize()
        assert time.monotonic() - start < 15
        try:
            comm.check()
        except (antiphon.PeerLostError, TimeoutError, RuntimeError) as error:
            told = f"{type(error).__name__}: {error}"
        assert torch.ones(1000, device=device).sum().item() == 1000  # the GPU is as good as before
        with pytest.raises(RuntimeError):
            comm.all_reduce(x)
        return told


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_killed_rank_is_named_and_gpus_stay_usable(world_size: int, captured: bool) -> None:
    harness.need("cuda", world_size)
    told = ranks.processes(world_size, after_a_death, captured, timeout=10, dying={world_size - 1})
    assert any("PeerLostError" in text and f"rank {world_size - 1}" in text for text in told[:-1]), told
    assert all(text.startswith(("PeerLostError", "TimeoutError", "RuntimeError")) for text in told[:-1]), told


def after_a_shrink() -> tuple[int, float, float]:
    """What surviving ranks get on their GPUs, eager and in a graph, when a rank was killed and they have shrunk."""
    with antiphon.init() as old:
        device = harness.place("cuda", old.rank)
        assert old.all_reduce(filled(old, device)).eq(total(old)).all()
        old.barrier()
        if old.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(antiphon.PeerLostError):
            old.barrier()
        comm = old.shrink()
    with comm:
        comm.prepare_cuda()
        x = filled(comm, device)
        eager = comm.all_reduce(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = comm.all_reduce(x)
        graph.replay()
        torch.cuda.synchronize()
        comm.check()
        comm.barrier()
        return comm.world_size, eager[0].item(), out[-1].item()


def test_surviving_ranks_continue_with_their_gpus() -> None:
    harness.need("cuda", 3)
    left = ranks.processes(3, after_a_shrink, timeout=30, dying={1})
    assert [left[0], left[2]] == [(2, 3.0, 3.0)] * 2


def after_a_change_of_the_timeout() -> str:
    """Of a kernel that waits for a rank which does not come."""
    with antiphon.init() as comm:
        device = harness.place("cuda", comm.rank)
        x = filled(comm, device)
        comm.all_reduce(x)
        torch.cuda.synchronize()
        comm.timeout = 2.0
        comm.barrier()
        if comm.rank == 0:
            start = time.monotonic()
            comm.all_reduce(x)
            torch.cuda.synchronize()
            assert 1 < time.monotonic() - start < 15
            with pytest.raises(TimeoutError) as raised:
                comm.check()
            return str(raised.value)
        time.sleep(4)
        return ""


def test_a_timeout_that_is_changed_holds_on_gpus_too() -> None:
    harness.need("cuda", 2)
    told = ranks.processes(2, after_a_change_of_the_timeout, timeout=60)
    assert "timed out" in told[0] and "ranks [1] of 2" in told[0]


def with_a_compiler_that_fails() -> tuple[str, float]:
    """The error of a rank when the last one cannot compile a kernel, and after how many seconds."""
    with antiphon.init() as comm:
        device = harness.place("cuda", comm.rank)
        comm.prepare_cuda(dtypes=[])
        x = filled(comm, device)
        if comm.rank == comm.world_size - 1:
            os.environ["ANTIPHON_NVRTC_OPTIONS"] = "--no-such-option"
        comm.barrier()
        start = time.monotonic()
        try:
            comm.all_reduce(x)
            torch.cuda.synchronize()
            comm.check()
        except (antiphon.PeerLostError, TimeoutError, RuntimeError) as error:
            told = f"{type(error).__name__}: {error}"
        return told, time.monotonic() - start


def test_a_kernel_that_one_rank_cannot_compile_is_told_to_all() -> None:
    harness.need("cuda", 2)
    (first, waited), (second, _) = ranks.processes(2, with_a_compiler_that_fails, timeout=60)
    assert "no-such-option" in second, second
    assert "rank 1" in first and waited < 20, (first, waited)


def left_alone_with_a_graph() -> str:
    """The first rank replays a graph that no other rank replays; the other rank sees how the process ends."""
    os.environ["ANTIPHON_ON_FAILURE"] = "abort"
    with antiphon.init() as comm:
        x = filled(comm, harness.place("cuda", comm.rank))
        comm.prepare_cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.all_reduce(x)
        comm.barrier()
        if comm.rank == 0:
            graph.replay()
            time.sleep(60)
        time.sleep(14)  # beyond the deadline
        with pytest.raises((antiphon.PeerLostError, TimeoutError, RuntimeError)) as raised:
            comm.barrier()
        return str(raised.value)


def test_a_failure_aborts_the_process_if_it_was_told_so(capfd: pytest.CaptureFixture[str]) -> None:
    harness.need("cuda", 2)
    told = ranks.processes(2, left_alone_with_a_graph, timeout=10, dying={0})
    assert "rank 0" in told[1], told
    printed = capfd.readouterr().err
    assert "antiphon: rank 0: all_reduce(1000" in printed, printed
