"""Memory at raw addresses, as MSCCL++'s executor takes it, and new memory where the program has its tensors.

The CUDA driver says whether an address is of the host or of a GPU, if this process has loaded the driver, and
host memory must be mapped, so that a wrong number is an error and no crash. That the memory stays while it is used is up to the caller.
"""

import ctypes
import mmap
import os
import sys
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from antiphon import _numbers
from antiphon._core import strided_memory

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

__all__ = ["Span", "cuda_driver", "new_bytes", "used_cupy", "whole"]

#: Device types of DLPack.
_CPU, _CUDA = 1, 2
#: A flag of ``msync``.
_MS_ASYNC = 1
#: What the driver answers to a process that does not use it (any more), and for an address that is none of its contexts'.
_NOT_CUDA = (3, 4, 201)
#: ``CU_POINTER_ATTRIBUTE_MEMORY_TYPE`` and ``..._DEVICE_ORDINAL``; the type that means a device.
_ASKED, _OF_DEVICE = (2, 9), 2


def whole(call: str, name: str, value: Any, least: int = 0) -> int:
    """An integer of at least ``least`` that fits 64 bits, such as an address. ``TypeError`` for what is none, ``ValueError`` for another
    one."""
    return _numbers.whole(call, name, value, least, 2**64 - 1)


class Span:
    """Bytes at an address, of the host or of a GPU, for whoever reads DLPack: as elements of ``dtype``, in one row.

    ``name`` and ``call`` are for errors, and ``driver`` is :func:`cuda_driver`. ``TypeError`` for what are no integers;
    ``ValueError`` with the numbers for no whole number of elements, none, and what is not memory, or not writable although ``writes``.
    """

    def __init__(
        self,
        call: str,
        name: str,
        address: Any,
        num_bytes: Any,
        dtype: str,
        itemsize: int,
        writes: bool,
        driver: ctypes.CDLL | None,
    ) -> None:
        self.name, self.dtype = name, dtype
        self.address = whole(call, name, address, 1)
        self.num_bytes = whole(call, f"{name}_size", num_bytes, 1)
        if self.num_bytes % itemsize:
            raise ValueError(f"{call}: {name}_size is {self.num_bytes} bytes, no whole number of elements of {itemsize} ({dtype})")
        if self.address % itemsize:
            raise ValueError(f"{call}: {name} is {self.address:#x}, no address of elements of {itemsize} bytes ({dtype})")
        self.end = self.address + self.num_bytes
        #: The number of the GPU; none on the host.
        self.device = _device_of(driver, self.address)
        last = _device_of(driver, min(self.end, 2**64) - 1)
        if self.device is None and last is None:
            is_memory = _maps.have(self.address, self.end, writes)
        else:
            is_memory = self.device == last
        if not is_memory:
            what = "writable memory" if writes else "memory"
            raise ValueError(f"{call}: {name}: the {self.num_bytes} bytes at {self.address:#x} are not {what} of this process")

    @property
    def place(self) -> str:
        """Where it is, for errors."""
        return "the host" if self.device is None else f"cuda:{self.device}"

    def overlaps(self, other: "Span") -> bool:
        return self.address < other.end and other.address < self.end

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0) if self.device is None else (_CUDA, self.device)

    def __dlpack__(self, **_options: Any) -> "CapsuleType":
        return strided_memory(self.address, self.num_bytes, self.num_bytes, 1, self.dtype, self.device)


class _Maps:
    """The memory of this process. Whether it is there is asked each time; the rights are those that the kernel listed when it was last
    asked for some that an address did not have."""

    def __init__(self) -> None:
        #: Where ranges begin, and where they end, ascending, by whether they can be written.
        self._ranges: dict[bool, tuple[list[int], list[int]]] = {}
        self._msync = ctypes.CDLL(None).msync
        self._msync.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def have(self, start: int, end: int, writes: bool) -> bool:
        """Whether all bytes from ``start`` to ``end`` can be read, and written if ``writes``."""
        page = start - start % mmap.PAGESIZE
        # With this flag it does nothing on Linux but fail for a page that is not mapped.
        if end >= 2**64 or self._msync(page, end - page, _MS_ASYNC):
            return False
        if not self._known(start, end, writes):
            self._read()
        return self._known(start, end, writes)

    def _known(self, start: int, end: int, writes: bool) -> bool:
        starts, ends = self._ranges.get(writes, ([], []))
        at = bisect_right(starts, start) - 1
        return at >= 0 and end <= ends[at]

    def _read(self) -> None:
        self._ranges = {writes: ([], []) for writes in (False, True)}
        with open("/proc/self/maps", "rb") as lines:
            for line in lines:
                place, rights, _ = line.split(b" ", 2)
                start, end = (int(number, 16) for number in place.split(b"-"))
                for writes, (starts, ends) in self._ranges.items():
                    if not rights.startswith(b"rw" if writes else b"r"):
                        continue
                    if ends and ends[-1] == start:
                        ends[-1] = end
                    else:
                        starts.append(start)
                        ends.append(end)


_maps = _Maps()
_loaded_driver: ctypes.CDLL | None = None


def cuda_driver() -> ctypes.CDLL | None:
    """The CUDA driver, if anything in this process has loaded it: without it no address is of a GPU."""
    global _loaded_driver
    if _loaded_driver is None:
        try:
            _loaded_driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        except OSError:
            return None
    return _loaded_driver


def _device_of(driver: ctypes.CDLL | None, address: int) -> int | None:
    """The GPU in whose memory an address is; none for the host's."""
    if driver is None:
        return None
    answers = (ctypes.c_uint64 * len(_ASKED))()
    size = ctypes.sizeof(ctypes.c_uint64)
    places = (ctypes.c_void_p * len(_ASKED))(*(ctypes.addressof(answers) + size * at for at in range(len(_ASKED))))
    asked = (ctypes.c_uint32 * len(_ASKED))(*_ASKED)
    code = driver.cuPointerGetAttributes(len(_ASKED), asked, places, ctypes.c_uint64(address))
    if code and code not in _NOT_CUDA:
        raise RuntimeError(f"the CUDA driver does not say what is at {address:#x}: cuPointerGetAttributes gives {code}")
    kind, device = answers
    return int(device) if code == 0 and kind == _OF_DEVICE else None


def new_bytes(num_bytes: int) -> Any:
    """An array of zero bytes: of torch or CuPy on its current GPU if the program uses CUDA through it, else of torch, if it is
    imported, or NumPy, on the host."""
    torch, cupy = sys.modules.get("torch"), used_cupy()
    if torch is not None and (cupy is None or torch.cuda.is_initialized()):
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cuda" if torch.cuda.is_initialized() else "cpu")
    if cupy is not None:
        return cupy.zeros(num_bytes, dtype="uint8")
    import numpy

    return numpy.zeros(num_bytes, numpy.uint8)


def used_cupy() -> Any:
    """CuPy, if the program has imported it and it has a GPU."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and cupy.cuda.is_available() else None
