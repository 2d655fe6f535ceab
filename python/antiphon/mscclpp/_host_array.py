"""NumPy's arrays with the attributes by which scripts find the address of a CuPy array."""

from typing import Any, NamedTuple

import numpy

__all__ = ["HostArray"]


class _Pointer(NamedTuple):
    ptr: int


class HostArray(numpy.ndarray[Any, Any]):
    """A NumPy array whose address is ``data.ptr``, also of its parts."""

    @property
    def data(self) -> Any:
        return _Pointer(self.ctypes.data)
