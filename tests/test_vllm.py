"""vLLM's names in ``antiphon.comm``, on host memory and on GPUs."""

from typing import Any

import harness
import pytest
import torch
from harness import Checks

import antiphon
from antiphon import comm as peer

CHECKS = check = Checks()

Comm, Device = antiphon.Communicator, torch.device

SIZE = 1 << 20


class Setup:
    """What scripts make before their first call, and what they undo."""

    def __init__(self, comm: Comm, device: Device) -> None:
        self.comm, self.device = comm, device
        where: Any = "cpu" if device.type == "cpu" else device.index
        self.meta = peer.create_shared_buffer(peer.vllm_meta_size() + SIZE, comm, device=where)
        self.buffer = peer.create_shared_buffer(SIZE, comm, device=where)
        self.rank_data = torch.empty(640, dtype=torch.uint8, device=device)
        self.handle = peer.vllm_init_custom_ar(self.meta, self.rank_data, comm.rank, True)
        peer.vllm_register_buffer(self.handle, self.buffer)

    def reduce(self, x: torch.Tensor, out: torch.Tensor, ctas: int = 4, register: int | None = None) -> None:
        register = self.buffer[self.comm.rank] if register is None else register
        peer.vllm_all_reduce(self.handle, x, out, register, SIZE, ctas)

    def end(self) -> None:
        peer.vllm_dispose(self.handle)
        peer.free_shared_buffer(self.buffer, self.comm)
        peer.free_shared_buffer(self.meta, self.comm)


def refused(call: Any, text: str) -> None:
    for kind in ValueError, RuntimeError:
        with pytest.raises(kind, match=text):
            call()


def x_of(rank: int, count: int, dtype: torch.dtype, device: Device) -> torch.Tensor:
    return ((torch.arange(count, device=device) + rank) % 15 + 1).to(dtype)


def sum_of(comm: Comm, count: int, dtype: torch.dtype, device: Device) -> torch.Tensor:
    return torch.stack([x_of(rank, count, torch.float64, device) for rank in range(comm.world_size)]).sum(0).to(dtype)


@check
def sums_of_every_size(comm: Comm, device: Device) -> None:
    setup = Setup(comm, device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for count in (8, 512, 2560, 262_144):
            for ctas in (1, 16, 36):
                x = x_of(comm.rank, count, dtype, device)
                out = torch.empty_like(x)
                setup.reduce(x, out, ctas)
                assert torch.equal(out, sum_of(comm, count, dtype, device))
                assert torch.equal(x, x_of(comm.rank, count, dtype, device))
    setup.end()


@check
def tensors_without_gaps_in_any_order(comm: Comm, device: Device) -> None:
    setup = Setup(comm, device)
    x = x_of(comm.rank, 64, torch.float32, device).reshape(2, 4, 8)
    out = torch.empty(2, 4, 8, device=device)
    setup.reduce(x.permute(2, 0, 1), out.permute(2, 0, 1))
    assert torch.equal(out.flatten(), sum_of(comm, 64, torch.float32, device))
    refused(lambda: setup.reduce(x[:, 1:], out[:, 1:]), "gaps")
    refused(lambda: setup.reduce(torch.ones(1, device=device).expand(8), out.flatten()[:8]), "gaps")
    setup.end()


@check
def what_is_not_registered_is_refused(comm: Comm, device: Device) -> None:
    setup = Setup(comm, device)
    x = x_of(comm.rank, 64, torch.float32, device)
    out = torch.empty_like(x)
    refused(lambda: setup.reduce(x, out, register=0), f"{x.data_ptr():#x} is not registered")
    refused(lambda: setup.reduce(x, out, register=setup.buffer[comm.rank] + 16), "is not registered")
    pointers = [0] * comm.world_size
    pointers[comm.rank] = x.data_ptr()
    peer.vllm_register_buffer(setup.handle, pointers)
    setup.reduce(x, out, register=0)
    assert torch.equal(out, sum_of(comm, 64, torch.float32, device))
    refused(lambda: peer.vllm_register_buffer(setup.handle, pointers[:1]), "1 pointers for")
    for _ in range(8):
        peer.vllm_register_buffer(setup.handle, pointers)
    refused(lambda: peer.vllm_register_buffer(setup.handle, pointers), "room for 10 inputs")
    setup.end()


@check
def arguments_that_make_no_sense(comm: Comm, device: Device) -> None:
    setup = Setup(comm, device)
    x, y = x_of(0, 64, torch.float32, device), torch.empty(64, device=device)
    refused(lambda: setup.reduce(x, y, 37), "max supported block limit is 36")
    refused(lambda: setup.reduce(x, y, 0), "at least 1")
    refused(lambda: setup.reduce(x[:6], y[:6]), "multiple of 4: it is 6")
    refused(lambda: setup.reduce(x, y[:32]), "64 elements .* out 32")
    refused(lambda: setup.reduce(x, y.half()), "out 64 of torch.float16")
    refused(lambda: setup.reduce(x.double(), y.double()), "only supports float32, float16 and bfloat16")
    refused(lambda: peer.vllm_all_reduce(setup.handle, x, y, setup.buffer[comm.rank], 128, 4), "256 bytes, .* 128")
    data = setup.rank_data
    refused(lambda: peer.vllm_init_custom_ar([1] * 10, data, 0, True), "world size > 8")
    refused(lambda: peer.vllm_init_custom_ar([1] * 3, data, 0, True), "Odd num gpus")
    refused(lambda: peer.vllm_init_custom_ar([1] * 2, data, 2, True), "invalid rank")
    with pytest.raises(ValueError, match="no group"):
        peer.vllm_init_custom_ar([1] * comm.world_size, data, comm.rank, True)
    handle = setup.handle
    setup.end()
    refused(lambda: peer.vllm_dispose(handle), "is no handle")


@check
def what_was_captured_is_registered_afterwards(comm: Comm, device: Device) -> None:
    setup = Setup(comm, device)
    assert peer.vllm_get_graph_buffer_ipc_meta(setup.handle) == ([], [])
    xs = [x_of(comm.rank, count, torch.float16, device) for count in (4096, 8192)]
    outs = [torch.zeros_like(x) for x in xs]
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for x, out in zip(xs, outs):
                setup.reduce(x, out, register=0)
    mine = peer.vllm_get_graph_buffer_ipc_meta(setup.handle)
    count = 2 if device.type == "cuda" else 0
    assert len(mine[0]) == 64 * count and mine[1] == [0] * count
    assert all(type(byte) is int and -128 <= byte < 128 for byte in mine[0])
    handles, offsets = map(list, zip(*comm.exchange_objects(mine)))
    refused(lambda: peer.vllm_register_graph_buffers(setup.handle, handles[1:], offsets), "but there are")
    refused(lambda: peer.vllm_register_graph_buffers(setup.handle, [[1], *handles[1:]], offsets), "rank 0 has 1 bytes")
    peer.vllm_register_graph_buffers(setup.handle, handles, offsets)
    assert peer.vllm_get_graph_buffer_ipc_meta(setup.handle) == ([], [])
    if device.type == "cuda":
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        for x, out in zip(xs, outs):
            assert torch.equal(out, sum_of(comm, x.numel(), torch.float16, device))
    setup.end()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("device", harness.DEVICES)
@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str, device: str, world_size: int) -> None:
    harness.expect("test_vllm", name, device, world_size)


def test_the_size_of_the_signals_is_the_peers() -> None:
    assert peer.vllm_meta_size() == 3456
