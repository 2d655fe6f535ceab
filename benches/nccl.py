"""NCCL itself, without torch's process group around it: the peer of the benchmarks."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import antiphon

_NUMBERS = {torch.uint8: 1, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # ncclDataType_t
_SUM = 0  # ncclRedOp_t
_UNSET = -(2**31)  # NCCL_CONFIG_UNDEF_INT


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.18, which later versions read as well."""

    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int), ("cga_cluster_size", ctypes.c_int), ("min_ctas", ctypes.c_int), ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p), ("split_share", ctypes.c_int),
    ]  # fmt: skip


class Nccl:
    """A communicator of libnccl between the GPUs of ``comm``, with at most ``max_ctas`` blocks for a call, else with NCCL's defaults.

    Calls go into torch's current stream, and may be captured."""

    def __init__(self, comm: antiphon.Communicator, max_ctas: int | None = None) -> None:
        self.library = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        self.world_size, self.max_ctas = comm.world_size, max_ctas
        own = _UniqueId()
        if comm.rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(own))
        shared = _UniqueId.from_buffer_copy(comm.exchange_objects(bytes(own))[0])
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21800, _UNSET, _UNSET, _UNSET, max_ctas or _UNSET, None, _UNSET)
        self.handle = ctypes.c_void_p()
        self._call(
            "ncclCommInitRankConfig", ctypes.byref(self.handle), comm.world_size, shared, comm.rank, ctypes.byref(config)
        )

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        """Sums over the ranks."""
        self._call("ncclAllReduce", *_ends(x, out), _SUM, self.handle, _stream())

    def all_to_all(self, rows: Tensor, sends: list[int], out: Tensor, receives: list[int]) -> None:
        """Rows to each rank, and from each, in the order of ranks."""
        self._call("ncclGroupStart")
        for name, tensor, counts in (("ncclSend", rows, sends), ("ncclRecv", out, receives)):
            for peer, part in enumerate(tensor.split(counts)):
                size = ctypes.c_size_t(part.numel())
                self._call(name, _at(part), size, _NUMBERS[part.dtype], peer, self.handle, _stream())
        self._call("ncclGroupEnd")

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self.library, name)
        if code := function(*arguments):
            raise RuntimeError(f"{name}: {self.library.ncclGetErrorString(code).decode()}")


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _ends(x: Tensor, out: Tensor) -> tuple[Any, ...]:
    return _at(x), _at(out), ctypes.c_size_t(x.numel()), _NUMBERS[x.dtype]


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class _KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [("function", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("parameters", "extra", "kernel", "context")]


def grids(graph: torch.cuda.CUDAGraph) -> list[int]:
    """The blocks of each kernel of a graph that was captured with ``keep_graph=True``; copies and memsets are not kernels."""
    driver, raw = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    _driver(driver.cuGraphGetNodes(raw, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _driver(driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)))
    found = []
    for node in map(ctypes.c_void_p, nodes):
        kind = ctypes.c_int()
        _driver(driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
        if kind.value == 0:  # CU_GRAPH_NODE_TYPE_KERNEL
            kernel = _KernelParameters()
            _driver(driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(kernel)))
            found.append(kernel.grid_x * kernel.grid_y * kernel.grid_z)
    return found


def _driver(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver answers {code}")
