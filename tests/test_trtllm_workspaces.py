"""Workspaces of TensorRT-LLM's all-reduces in ``antiphon.comm``, on host memory and on GPUs."""

import gc
import os
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import Checks
from test_fusion import Comm, Device

import ranks
from antiphon import comm as peer

CHECKS = check = Checks()


@check
def workspaces(comm: Comm, device: Device) -> None:
    create, rank, size = peer.trtllm_create_ipc_workspace_for_all_reduce_fusion, comm.rank, comm.world_size
    handles, tensor = create(rank, size, 64, 256, group=comm)
    assert [len(part) for part in handles] == [size] * 3 and tensor.dtype == torch.int64
    assert tensor.tolist()[:-1] == [pointer for part in handles for pointer in part]
    assert tensor.numel() == 3 * size + 1 == len(set(tensor.tolist())) and tensor.device == device
    other, _, metadata = create(rank, size, 64, 256, True, comm, True)
    assert metadata["lamport_comm_size"] == size * 64 * 256 * 4 and metadata["lamport_buffer_size"] == 3 * size * 65536
    assert not {pointer for part in handles for pointer in part} & {pointer for part in other for pointer in part}
    with_memory = create(rank, size, 64, 256, group=comm, create_metadata=True, use_symm_dev_mem=True)
    assert len(with_memory) == 4 and with_memory[2] == [] and with_memory[3]["control_flag_ptr"] == with_memory[1][-1]
    with pytest.raises(ValueError, match="create_metadata"):
        create(rank, size, 64, 256, group=comm, use_symm_dev_mem=True)
    with pytest.raises(ValueError, match=f"rank {rank} of {size + 1} was passed in, but the group has"):
        create(rank, size + 1, 64, 256, group=comm)
    for destroy in (
        peer.trtllm_destroy_ipc_workspace_for_all_reduce,
        peer.trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
    ):
        for workspace in (handles, handles, [[1, 2, 3]], []):
            destroy(workspace, group=comm)
    peer.trtllm_destroy_ipc_workspace_for_all_reduce(other)
    peer.trtllm_destroy_ipc_workspace_for_all_reduce(with_memory[0])


@check
def a_thousand_workspaces_leave_nothing(comm: Comm, device: Device) -> None:
    rank, size = comm.rank, comm.world_size

    def again(times: int) -> None:
        for _ in range(times):
            workspace: Any = peer.create_allreduce_fusion_workspace(
                "auto", size, rank, 64, 256, torch.bfloat16, group=comm
            )
            workspace.destroy()
            handles, _ = peer.trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, size, 64, 256, group=comm)
            peer.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles, group=comm)
            peer.trtllm_destroy_ipc_workspace_for_all_reduce(
                peer.trtllm_create_ipc_workspace_for_all_reduce(rank, size, 64, 256, comm)
            )

    def used() -> dict[str, int]:
        gc.collect()
        found = peer._workspaces
        maps = Path("/proc/self/maps").read_text()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "traced bytes": tracemalloc.get_traced_memory()[0],
            "resident bytes": pages * resource.getpagesize(),
            "device bytes": torch.cuda.memory_allocated() if device.type == "cuda" else 0,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "memfd mappings": maps.count("memfd:"),
            "workspaces": len(found._found) + len(found._kept) + sum(map(len, found._owned.values())),
        }

    tracemalloc.start()
    again(50)
    before = used()
    again(1000)
    after = used()
    tracemalloc.stop()
    grown = {what: after[what] - before[what] for what in before}
    # Python and the allocator keep some memory of their own, but not 50 bytes for each.
    assert grown.pop("traced bytes") < 3000 * 50 and grown.pop("resident bytes") < 8 << 20, (before, after)
    assert set(grown.values()) == {0}, (before, after)


class Exchange(peer.mnnvl.CommBackend):
    """A way to meet of the caller's own: one of another communicator, which may end."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def Get_rank(self) -> int:
        return self.comm.rank

    def Get_size(self) -> int:
        return self.comm.world_size

    def allgather(self, data: Any) -> list[Any]:
        return self.comm.exchange_objects(data)

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data)[root]

    def barrier(self) -> None:
        self.comm.barrier()

    def Split(self, color: int, key: int) -> "Exchange":
        return Exchange(self.comm.split(color, key))


@check
def a_backend_that_nobody_keeps(comm: Comm, device: Device) -> None:
    x = torch.full((4, 256), comm.rank + 1.0, device=device)
    total = float(sum(range(1, comm.world_size + 1)))
    kept = len(peer._workspaces._owned)

    def open_descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    for round_ in range(3):
        workspace: Any = peer.create_allreduce_fusion_workspace(
            "trtllm", comm.world_size, comm.rank, 64, 256, torch.float32, comm_backend=Exchange(comm)
        )
        gc.collect()
        assert peer.allreduce_fusion(x, workspace, 0).eq(total).all()
        if device.type == "cuda":
            torch.cuda.synchronize()
        comm.barrier()
        workspace.destroy()
        comm.barrier()
        if round_ == 0:
            descriptors = open_descriptors()
        assert (open_descriptors(), len(peer._workspaces._owned)) == (descriptors, kept)


@check
def negative_zeros_in_memory(comm: Comm, device: Device) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        memory = [torch.ones(24, dtype=dtype, device=device) for _ in range(3)]
        peer.trtllm_lamport_initialize(memory[0].data_ptr(), 16, dtype)
        assert memory[0][:16].eq(0).all() and memory[0][:16].signbit().all() and memory[0][16:].eq(1).all()
        peer.trtllm_lamport_initialize_all(*(each.data_ptr() for each in memory), 24, dtype)
        assert all(each.eq(0).all() and each.signbit().all() for each in memory)
    peer.trtllm_lamport_initialize(1, 0, torch.float16)
    with pytest.raises(NotImplementedError, match="torch.int32 is not float32"):
        peer.trtllm_lamport_initialize(memory[0].data_ptr(), 1, torch.int32)


@pytest.mark.parametrize(("device", "world_size"), harness.WORLDS)
@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str, device: str, world_size: int) -> None:
    harness.expect("test_trtllm_workspaces", name, device, world_size)


def in_groups(device_type: str) -> int:
    """Two groups of two ranks, each with workspaces of its own; a rank's device is the current one."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, mine = dist.get_rank(), dist.get_rank() % 2
    device = harness.place(device_type, rank)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    backend = peer.mnnvl.TorchDistBackend(group)
    assert (backend.Get_rank(), backend.Get_size()) == (mine, 2) and backend.bcast(rank, 1) == rank // 2 * 2 + 1
    x = torch.full((4, 256), float(rank + 1), device=device)
    for options in ({"comm_backend": backend}, {"group": group}):
        workspace: Any = peer.create_allreduce_fusion_workspace(
            backend="trtllm", world_size=2, rank=mine, max_token_num=64, hidden_dim=256, dtype=torch.float32, **options
        )
        assert peer.allreduce_fusion(x, workspace, 0).eq(3 if rank < 2 else 7).all()
        workspace.destroy()
    pointers = peer.trtllm_create_ipc_workspace_for_all_reduce(mine, 2, 64, 256, group=group)
    _, everybody = peer.trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, 4, 64, 256, True)
    total = torch.empty_like(x)
    peer.trtllm_allreduce_fusion(
        x, 4, rank, 4, 256, everybody, False, False, True, 0, True, total, *[None] * 7, 1e-5, None, None
    )
    assert total.eq(10).all()
    peer.trtllm_destroy_ipc_workspace_for_all_reduce(pointers)
    halves = peer.mnnvl.TorchDistBackend().Split(rank % 2, 0)
    assert (halves.Get_rank(), halves.allgather(rank)) == (rank // 2, (rank % 2, 2 + rank % 2))
    # What was made for a group ends with it.
    del groups, group, backend, workspace, halves, options
    dist.destroy_process_group()
    gc.collect()
    return len(peer._workspaces._found) + len(peer._workspaces._owned)


@pytest.mark.parametrize("device", harness.DEVICES)
def test_groups_have_workspaces_of_their_own(device: str) -> None:
    harness.need(device, 4)
    assert ranks.processes(4, in_groups, device) == [0, 0, 0, 0]
