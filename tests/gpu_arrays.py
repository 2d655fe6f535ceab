"""Arrays in the memory of GPUs that are nothing but DLPack: for tests without a library of tensors."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import antiphon
import needs
import ranks

_CODES = {"i": 0, "u": 1, "f": 2}
_CUDA = 2
#: What cuInit answers where there is no GPU, or a libcuda that is only there to link with.
_ABSENT = (100, 34)


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


#: What consumers hold, by address.
_held: dict[int, tuple[_Managed, Any]] = {}
_delete = _Deleter(lambda address: _held.pop(address, None) and None)


class Driver:
    """libcuda, as far as these tests copy with it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def device_count(self) -> int:
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """With this device's primary context as the current one."""
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self("cuCtxPopCurrent_v2", ctypes.byref(context))


@contextlib.contextmanager
def graph(device: int, body: Callable[[int], Any]) -> Iterator[Callable[[], None]]:
    """A graph of what ``body`` puts into the stream with the number that it is given. What this yields replays it and waits for the end.

    The stream stays, as torch's do: the next call of a communicator may ask whether it is captured still.
    """
    driver = Driver()
    stream, recorded, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    with driver.on(device):
        driver("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)  # CU_STREAM_NON_BLOCKING
        driver("cuStreamBeginCapture_v2", stream, 1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        try:
            body(stream.value or 0)
        finally:
            driver("cuStreamEndCapture", stream, ctypes.byref(recorded))
        driver("cuGraphInstantiateWithFlags", ctypes.byref(executable), recorded, ctypes.c_uint64(0))

    def replay() -> None:
        with driver.on(device):
            driver("cuGraphLaunch", executable, stream)
            driver("cuStreamSynchronize", stream)

    yield replay
    with driver.on(device):
        driver("cuGraphExecDestroy", executable)
        driver("cuGraphDestroy", recorded)


def device_count() -> int:
    """How many GPUs there are; 0 without a driver. One that is broken is an error."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if driver.cuInit(0) in _ABSENT:
        return 0
    return Driver().device_count()


def on_gpus(world_size: int, body: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
    """As :func:`ranks.threads`, where there is a GPU for each rank; skips the test elsewhere."""
    found = device_count()
    needs.need(f"gpus {world_size}", found >= world_size, f"{found} found")
    return ranks.threads(world_size, body, *arguments, timeout=timeout)


class Array:
    """An array in the memory of a rank's GPU."""

    def __init__(self, driver: Driver, device: int, address: int, dtype: Any, shape: tuple[int, ...]) -> None:
        self._driver, self.device, self.address = driver, device, address
        self.dtype, self.shape = np.dtype(dtype), shape

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device

    def __dlpack__(self, **_options: Any) -> Any:
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        managed = _Managed()
        managed.tensor = _Tensor(
            self.address, _CUDA, self.device, len(self.shape), _CODES[self.dtype.kind], self.dtype.itemsize * 8, 1, shape, None, 0
        )
        managed.deleter = _delete
        address = ctypes.addressof(managed)
        _held[address] = managed, shape
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return capsule(address, b"dltensor", None)

    def write(self, values: Any) -> None:
        values = np.ascontiguousarray(values, self.dtype)
        assert values.shape == self.shape
        with self._driver.on(self.device):
            self._driver("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.address), values.ctypes, ctypes.c_size_t(self.bytes), None)
            self._driver("cuStreamSynchronize", None)

    def read(self) -> "np.ndarray[Any, Any]":
        values = np.empty(self.shape, self.dtype)
        with self._driver.on(self.device):
            self._driver("cuMemcpyDtoHAsync_v2", values.ctypes, ctypes.c_uint64(self.address), ctypes.c_size_t(self.bytes), None)
            self._driver("cuStreamSynchronize", None)
        return values


@contextlib.contextmanager
def arrays(
    comm: antiphon.Communicator, num_bytes: int, given: antiphon.SymmetricBuffer | None = None
) -> Iterator[Callable[..., Array]]:
    """Makes arrays of values, or of a shape and a dtype, in a given buffer, or in one of the communicator on the GPU of the rank's number.

    After an error the buffer goes with the communicator, as the ranks may not come together any more.
    """
    driver, device = Driver(), comm.rank
    buffer = given or comm.symmetric(num_bytes, device)
    used = 0

    def make(values: Any = None, *, shape: tuple[int, ...] = (), dtype: Any = np.float32) -> Array:
        nonlocal used
        if values is not None:
            values = np.asarray(values)
            shape, dtype = values.shape, values.dtype
        array = Array(driver, device, buffer.pointer(comm.rank) + used, dtype, shape)
        used += -(-array.bytes // 256) * 256
        assert used <= num_bytes
        if values is not None:
            array.write(values)
        return array

    yield make
    comm.barrier()
    if given is None:
        comm.free(buffer)
