"""``RawGpuBuffer`` and ``GpuBuffer``."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from antiphon.mscclpp._enums import DataType, GpuBufferGranularity
from antiphon.mscclpp._memory import new_bytes, used_cupy, whole

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

__all__ = ["GpuBuffer", "RawGpuBuffer"]


class RawGpuBuffer:
    """``nelems`` zero bytes: on the current GPU of torch or CuPy if the program uses CUDA through it, else on the host.

    Sizes are not rounded up, and ``granularity`` has no effect: there is no multicast. ``ValueError`` for no bytes.
    """

    def __init__(
        self, nelems: int, granularity: GpuBufferGranularity = GpuBufferGranularity.MultiCastMinimum
    ) -> None:
        self._size = whole("RawGpuBuffer", "nelems", nelems, 1)
        _check_granularity("RawGpuBuffer", granularity)
        self._memory = new_bytes(self._size)

    def nelems(self) -> int:
        """The number of bytes."""
        return self._size

    def bytes(self) -> int:
        """The number of bytes."""
        return self._size

    def data(self) -> int:
        """The address."""
        if _library(self._memory) == "torch":
            return int(self._memory.data_ptr())
        return int(self._memory.data.ptr if _library(self._memory) == "cupy" else self._memory.ctypes.data)

    def device_id(self) -> int:
        """The number of the GPU; -1 on the host."""
        if _library(self._memory) == "cupy":
            return int(self._memory.device.id)
        return int(self._memory.get_device()) if _library(self._memory) == "torch" else -1

    def to_dlpack(self, data_type: str, shape: Sequence[int] = (), strides: Sequence[int] = ()) -> "CapsuleType":
        """A DLPack capsule of the memory, which it keeps, for ``torch.utils.dlpack.from_dlpack`` and the like: as elements of
        ``data_type`` (``str(torch.float16)``, or the name of a :class:`DataType`), of ``shape``, by default one dimension of all, with
        ``strides`` in elements.

        ``TypeError`` for another type, ``ValueError`` with the numbers for a shape beyond the buffer, ``NotImplementedError`` for a type
        that NumPy has not, unless torch was imported before the buffer was made.
        """
        name = data_type.removeprefix("torch.") if isinstance(data_type, str) else data_type
        name = "float8_e4m3b15" if name == "fp8_e4m3b15" else name
        if name not in DataType.__members__:
            known = ", ".join(f"torch.{known}" for known in DataType.__members__)
            raise TypeError(f"to_dlpack: data_type {data_type!r} is none of {known}")
        size = DataType[name].itemsize
        name = "uint8" if name == "float8_e4m3b15" else name
        counts = [whole("to_dlpack", "a dimension", count) for count in shape] or [self._size // size]
        steps = [whole("to_dlpack", "a stride", step) for step in strides] or _row_major(counts)
        if len(steps) != len(counts):
            raise ValueError(f"to_dlpack: {len(steps)} strides for {len(counts)} dimensions")
        last = 0 if 0 in counts else 1 + sum((count - 1) * step for count, step in zip(counts, steps))
        if last * size > self._size:
            text = f"shape {counts} with strides {steps} (in elements) takes {last * size} bytes"
            raise ValueError(f"to_dlpack: {text}, and the buffer has {self._size}")
        return _capsule(self._memory, name, size, counts, steps)


class GpuBuffer:
    """An array of zeros: of CuPy on its current GPU if the program uses it, else of NumPy on the host, which has CuPy's ``data.ptr``
    too.

    ``dtype``, ``strides`` (in bytes) and ``order`` are theirs; ``granularity`` has no effect. Raises ``ValueError`` for a shape
    that is none or not positive, and ``NotImplementedError`` in a program that uses CUDA through torch alone.
    """

    def __new__(
        cls,
        shape: int | Sequence[int],
        dtype: Any = float,
        strides: Sequence[int] | None = None,
        order: str = "C",
        granularity: GpuBufferGranularity = GpuBufferGranularity.MultiCastMinimum,
    ) -> Any:
        _check_granularity("GpuBuffer", granularity)
        try:
            counts = tuple(shape) if isinstance(shape, Sequence) else (shape,)
            counts = tuple(whole("GpuBuffer", "shape", count, 1) for count in counts)
        except TypeError:
            raise ValueError(f"GpuBuffer: shape must be an integer or several, not {shape!r}") from None
        if (cupy := used_cupy()) is not None:
            return _strided(cupy, cupy.ndarray, counts, dtype, strides, order)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            text = "on a GPU it is an array of CuPy: import that, or use RawGpuBuffer(bytes).to_dlpack(dtype)"
            raise NotImplementedError(f"GpuBuffer: {text}")
        import numpy

        from antiphon.mscclpp._host_array import HostArray

        return _strided(numpy, HostArray, counts, dtype, strides, order)


def _strided(
    library: Any, kind: Any, shape: tuple[int, ...], dtype: Any, strides: Sequence[int] | None, order: str
) -> Any:
    """A new array of a library, of just as many bytes as its elements take."""
    count = 1
    for extent in shape:
        count *= extent
    memory = library.zeros(count * library.dtype(dtype).itemsize, "uint8")
    where = {"memptr": memory.data} if library.__name__ == "cupy" else {"buffer": memory}
    return kind(shape, dtype=dtype, strides=strides, order=order, **where)


def _capsule(memory: Any, name: str, size: int, shape: list[int], strides: list[int]) -> "CapsuleType":
    if _library(memory) == "torch":
        import torch

        elements = memory[: memory.numel() // size * size].view(getattr(torch, name))
        capsule: CapsuleType = elements.as_strided(shape, strides).__dlpack__()
        return capsule
    if name == "bfloat16" or name.startswith("float8"):
        text = f"NumPy and CuPy have no {name}: import torch before the buffer is made"
        raise NotImplementedError(f"to_dlpack: {text}")
    steps = [step * size for step in strides]
    if _library(memory) == "cupy":
        array = sys.modules["cupy"].ndarray(tuple(shape), name, memory.data, tuple(steps))
    else:
        array = sys.modules["numpy"].ndarray(shape, name, memory, 0, steps)
    capsule = array.__dlpack__()
    return capsule


def _library(array: Any) -> str:
    """The package that an array is of."""
    return type(array).__module__.partition(".")[0]


def _row_major(shape: list[int]) -> list[int]:
    steps = [1]
    for count in reversed(shape[1:]):
        steps.insert(0, steps[0] * count)
    return steps


def _check_granularity(call: str, granularity: object) -> None:
    if not isinstance(granularity, GpuBufferGranularity):
        raise TypeError(f"{call}: granularity must be a GpuBufferGranularity, not {granularity!r}")
