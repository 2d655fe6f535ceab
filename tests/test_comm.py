"""``antiphon.comm``: FlashInfer's names on host memory; test_vllm.py and test_devices.py have what is on GPUs too."""

import ctypes
import gc
import subprocess
import sys
from typing import Any

import pytest

import antiphon
import ranks
from antiphon import comm as peer
from antiphon.comm import create_shared_buffer, free_shared_buffer, pack_strided_memory

torch = pytest.importorskip("torch")


def bytes_at(pointer: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(pointer)


# Shared buffers.


def write_to_everybody(comm: Any, group: Any, rank: int, world_size: int) -> list[int]:
    """Each rank writes its part of each copy; the pointers of this process."""
    size = 64 * world_size
    pointers = create_shared_buffer(size, group)
    for pointer in pointers:
        assert set(bytes_at(pointer, size)) == {0}
    comm.barrier()
    for pointer in pointers:
        bytes_at(pointer, size)[64 * rank : 64 * (rank + 1)] = [rank + 1] * 64
    comm.barrier()
    wanted = [each + 1 for each in range(world_size) for _ in range(64)]
    assert all(list(bytes_at(pointer, size)) == wanted for pointer in pointers)
    return pointers


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_writes_every_copy(world_size: int) -> None:
    def body(comm: antiphon.Communicator) -> list[int]:
        pointers = write_to_everybody(comm, comm, comm.rank, world_size)
        free_shared_buffer(pointers, comm)
        return pointers

    for pointers in ranks.threads(world_size, body):
        assert len(set(pointers)) == world_size and all(type(pointer) is int for pointer in pointers)


def test_several_buffers_are_apart_and_freed_in_any_order() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffers = [create_shared_buffer(1000, comm) for _ in range(3)]
        assert len({pointer for pointers in buffers for pointer in pointers}) == 6
        for pointers in buffers[1], buffers[0], buffers[2]:
            free_shared_buffer(pointers, comm)

    ranks.threads(2, body)


def test_what_was_never_made_is_freed_by_waiting() -> None:
    def body(comm: antiphon.Communicator) -> None:
        for pointers in None, [], [None, None]:
            free_shared_buffer(pointers, comm)

    ranks.threads(2, body)


def test_wrong_addresses_are_refused_by_number() -> None:
    def body(comm: antiphon.Communicator) -> None:
        pointers = create_shared_buffer(64, comm)
        for wrong in [0x1230, 0x1230], pointers[::-1], [*pointers, 0x1230], [pointers[0] + 1, pointers[1] + 1]:
            with pytest.raises(ValueError, match="0x[0-9a-f]+, given for rank [012], is not the address"):
                free_shared_buffer(wrong, comm)
        free_shared_buffer(pointers, comm)
        with pytest.raises(ValueError, match=hex(pointers[0])):
            free_shared_buffer(pointers, comm)

    ranks.threads(2, body)


def test_impossible_sizes_are_refused() -> None:
    def body(comm: antiphon.Communicator) -> None:
        with pytest.raises(ValueError, match="it is -1"):
            create_shared_buffer(-1, comm)
        with pytest.raises(RuntimeError, match=str(1 << 50)):
            create_shared_buffer(1 << 50, comm)
        free_shared_buffer(create_shared_buffer(64, comm), comm)

    ranks.threads(2, body)


def test_without_a_group_both_calls_say_what_to_do() -> None:
    for call in lambda: create_shared_buffer(64), lambda: free_shared_buffer([1]):
        with pytest.raises(ValueError, match="antiphon.Communicator, or call torch.distributed.init_process_group"):
            call()


def in_process_groups() -> bool:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pointers = write_to_everybody(dist, None, rank, world_size)
    again = create_shared_buffer(64, dist.group.WORLD)
    free_shared_buffer(again)
    free_shared_buffer(pointers, dist.group.WORLD)

    # A group of some, in which ranks count anew.
    some = dist.new_group([1, 2])
    if rank in (1, 2):
        pointers = create_shared_buffer(8, some)
        assert len(pointers) == 2
        bytes_at(pointers[2 - rank], 8)[0] = rank
        dist.barrier(some)
        assert bytes_at(pointers[rank - 1], 8)[0] == 3 - rank
        free_shared_buffer(pointers, some)
    else:
        with pytest.raises(ValueError, match="not in the group"):
            create_shared_buffer(8, some)

    # What was made for a group ends with it.
    communicators = peer.cuda_ipc._communicators
    assert len(communicators) == (2 if rank in (1, 2) else 1)
    del some
    dist.destroy_process_group()
    gc.collect()
    return len(communicators) == 0 and len(peer.cuda_ipc._buffers) == 0


def test_torch_process_groups() -> None:
    assert ranks.processes(3, in_process_groups) == [True] * 3


# Strided memory.

DTYPES = [
    *("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("dev_id", [None, -1, "cpu"])
def test_segments_become_rows_of_their_own_dtype(name: str, dev_id: Any) -> None:
    dtype = getattr(torch, name)
    memory = torch.arange(96, dtype=torch.uint8)
    rows = pack_strided_memory(memory.data_ptr(), 16, 32, 3, dtype, dev_id)
    assert (rows.dtype, rows.device.type) == (dtype, "cpu")
    assert (rows.shape, rows.stride()) == ((3, 16 // dtype.itemsize), (32 // dtype.itemsize, 1))
    assert rows.view(torch.uint8).equal(memory.view(3, 32)[:, :16])
    memory[32] = 200  # it is the same memory
    assert rows.view(torch.uint8)[1, 0] == 200
    assert hasattr(rows, "_capsule_wrapper")


def test_the_copies_of_all_ranks_as_one_matrix() -> None:
    def body(comm: antiphon.Communicator) -> None:
        pointers = create_shared_buffer(32, comm)
        for rank, pointer in enumerate(pointers):
            pack_strided_memory(pointer, 16, 16, 2, torch.bfloat16, None)[comm.rank].fill_(10 * comm.rank + rank)
        comm.barrier()
        mine = pack_strided_memory(pointers[comm.rank], 16, 16, 2, torch.bfloat16, None)
        assert mine[:, 0].tolist() == [comm.rank, 10 + comm.rank]
        comm.barrier()
        free_shared_buffer(pointers, comm)

    ranks.threads(2, body)


@pytest.mark.parametrize(
    ("size", "stride", "count", "text"),
    [
        (0, 32, 3, "segment size .* 0"),
        (16, -32, 3, "segment stride .* -32"),
        (16, 32, 0, "number of segments .* 0"),
        (18, 32, 3, "18 bytes"),
        (16, 30, 3, "30 bytes"),
        (32, 16, 3, "16"),
    ],
)
def test_segments_that_cannot_be_are_refused(size: int, stride: int, count: int, text: str) -> None:
    memory = torch.zeros(96, dtype=torch.uint8)
    with pytest.raises(ValueError, match=text):
        pack_strided_memory(memory.data_ptr(), size, stride, count, torch.float32, None)


def test_addresses_that_cannot_be_are_refused() -> None:
    memory = torch.zeros(96, dtype=torch.uint8)
    with pytest.raises(ValueError, match="align"):
        pack_strided_memory(memory.data_ptr() + 1, 16, 32, 2, torch.float32, None)
    with pytest.raises(ValueError, match="null"):
        pack_strided_memory(0, 16, 32, 2, torch.float32, None)


def test_other_dtypes_and_devices_are_refused() -> None:
    memory = torch.zeros(96, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="quint8"):
        pack_strided_memory(memory.data_ptr(), 16, 32, 2, torch.quint8, None)
    for device in -2, "cuda:0":
        with pytest.raises(ValueError, match="pass a CUDA device's number, or -1"):
            pack_strided_memory(memory.data_ptr(), 16, 32, 2, torch.float32, device)


# Integers.

CONSTANTS = {
    "AllReduceStrategyType": "NCCL=0 MIN_LATENCY=1 UB=2 AUTO=3 ONESHOT=4 TWOSHOT=5 LOWPRECISION=6",
    "AllReduceStrategyConfig": "USE_MEMCPY=1 PUSH_MODE=2",
    "AllReduceFusionOp": "NONE=0 RESIDUAL_RMS_NORM=1 LAST_PROCESS_FOR_UB=2 RESIDUAL_RMS_PREPOST_NORM=3 "
    "RESIDUAL_RMS_NORM_QUANT_FP8=4 RESIDUAL_RMS_NORM_QUANT_NVFP4=5 RESIDUAL_RMS_NORM_OUT_QUANT_FP8=6 "
    "RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4=7 MOE_ALLREDUCE_RESIDUAL_RMS_NORM=8 "
    "MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM=9",
    "AllReduceFusionPattern": "kAllReduce=0 kARResidualRMSNorm=1 kARResidualRMSNormFP8Quant=2 "
    "kARResidualRMSNormFP4Quant=3 kARResidualRMSNormOutFP8Quant=4 kARResidualRMSNormOutFP4Quant=5 "
    "kMoEReductionARResidualRMSNorm=6 kMoEFinalizeARResidualRMSNorm=7 "
    "kARResidualRMSNormPerTokenGroupFP8PackedQuant=8 kARResidualRMSNormOutPerTokenGroupFP8PackedQuant=9 "
    "kARResidualRMSNormDynamicFP8Quant=10 kARResidualRMSNormOutDynamicFP8Quant=11",
    "QuantizationSFLayout": "SWIZZLED_128x4=0 SWIZZLED_8x4=1 LINEAR=2 SWIZZLED=0",
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_plain_integers(name: str) -> None:
    members = {key: value for key, value in vars(getattr(peer, name)).items() if not key.startswith("_")}
    assert members == {key: int(value) for key, value in (pair.split("=") for pair in CONSTANTS[name].split())}
    assert {type(value) for value in members.values()} == {int}


def test_both_names_of_the_scale_layouts_are_one_class() -> None:
    assert peer.FP4QuantizationSFLayout is peer.QuantizationSFLayout


def test_the_size_of_swizzled_scales() -> None:
    size = peer.compute_fp4_swizzled_layout_sf_size
    for rows in 0, 1, 127, 128, 129, 1000:
        for columns in 0, 1, 4, 5, 448:
            assert size(rows, columns) == -(-rows // 128) * 128 * (-(-columns // 4) * 4)
    with pytest.raises(ValueError, match="total_row must not be negative, but it is -1"):
        size(-1, 4)
    with pytest.raises(ValueError):
        size(1 << 62, 4)


# What there is.


def test_what_is_not_served_is_absent_and_says_so() -> None:
    assert not hasattr(peer, "UlyssesCommunicator")
    with pytest.raises(AttributeError, match="'UlyssesCommunicator' of flashinfer.comm yet; it serves .* more$"):
        peer.UlyssesCommunicator
    with pytest.raises(ImportError, match="'MoeAlltoAll' of flashinfer.comm yet; it serves .* more$"):
        from antiphon.comm import MoeAlltoAll  # noqa: F401
    for name in peer.__all__:
        assert hasattr(peer, name)


def test_the_runtime_of_cuda_is_what_is_loaded_or_named(tmp_path: Any) -> None:
    if "libcudart" not in open("/proc/self/maps").read():
        with pytest.raises(AssertionError, match="libcudart is not loaded"):
            peer.CudaRTLibrary()
    with pytest.raises(OSError):
        peer.CudaRTLibrary(str(tmp_path / "libcudart.so"))


def test_importing_it_does_not_import_torch() -> None:
    script = "import antiphon.comm, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
