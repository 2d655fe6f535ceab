"""The CUDA runtime by ctypes, for scripts that use it. After FlashInfer 0.6.18 comm/cuda_ipc.py.

Antiphon itself does not use it.
"""

import ctypes
from typing import Any

__all__ = ["CudaRTLibrary"]

#: Copies whose direction follows from the addresses.
_DEFAULT_KIND = 4
#: Peer access is opened when it is needed.
_LAZY_PEER_ACCESS = 1


class cudaIpcMemHandle_t(ctypes.Structure):
    """The handle of an allocation, for another process."""

    _fields_ = [("internal", ctypes.c_byte * 64)]


class CudaRTLibrary:
    """Functions of the CUDA runtime that this process has loaded, or of the library at ``so_file``.

    Each raises ``RuntimeError`` with the runtime's own text for an error. ``AssertionError`` if no runtime is loaded.
    """

    def __init__(self, so_file: str | None = None) -> None:
        found = so_file or _loaded("libcudart")
        assert found is not None, "libcudart is not loaded in this process: import torch and use CUDA first"
        self.lib = ctypes.CDLL(found)
        self.lib.cudaGetErrorString.restype = ctypes.c_char_p

    def CUDART_CHECK(self, result: int) -> None:
        """Raises ``RuntimeError`` for an error code."""
        if result != 0:
            raise RuntimeError(f"CUDART error: {self.cudaGetErrorString(result)}")

    def cudaGetErrorString(self, error: int) -> str:
        text: bytes = self.lib.cudaGetErrorString(ctypes.c_int(error))
        return text.decode()

    def cudaSetDevice(self, device: int) -> None:
        self._call("cudaSetDevice", ctypes.c_int(device))

    def cudaDeviceSynchronize(self) -> None:
        self._call("cudaDeviceSynchronize")

    def cudaDeviceReset(self) -> None:
        self._call("cudaDeviceReset")

    def cudaMalloc(self, size: int) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def cudaFree(self, devPtr: ctypes.c_void_p) -> None:
        self._call("cudaFree", devPtr)

    def cudaMemset(self, devPtr: ctypes.c_void_p, value: int, count: int) -> None:
        self._call("cudaMemset", devPtr, ctypes.c_int(value), ctypes.c_size_t(count))

    def cudaMemcpy(self, dst: ctypes.c_void_p, src: ctypes.c_void_p, count: int) -> None:
        self._call("cudaMemcpy", dst, src, ctypes.c_size_t(count), ctypes.c_int(_DEFAULT_KIND))

    def cudaIpcGetMemHandle(self, devPtr: ctypes.c_void_p) -> cudaIpcMemHandle_t:
        handle = cudaIpcMemHandle_t()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), devPtr)
        return handle

    def cudaIpcOpenMemHandle(self, handle: cudaIpcMemHandle_t) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return pointer

    def cudaIpcCloseMemHandle(self, devPtr: ctypes.c_void_p) -> None:
        self._call("cudaIpcCloseMemHandle", devPtr)

    def _call(self, name: str, *arguments: Any) -> None:
        self.CUDART_CHECK(getattr(self.lib, name)(*arguments))


def _loaded(name: str) -> str | None:
    """The file of a library that this process has loaded."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith(name):
                return f"/{path}"
    return None
