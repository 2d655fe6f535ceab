"""``mscclpp.utils``, without its compiler of kernels."""

import sys
from typing import TYPE_CHECKING, Any

from antiphon.mscclpp._absent import Absent
from antiphon.mscclpp._enums import DataType

if TYPE_CHECKING:
    import torch

__all__ = ["is_torch_tensor", "torch_dtype_to_mscclpp_dtype"]


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def torch_dtype_to_mscclpp_dtype(dtype: "torch.dtype") -> DataType:
    """The :class:`DataType` of the same name. ``ValueError`` if there is none."""
    name = str(dtype).removeprefix("torch.")
    if name not in DataType.__members__:
        raise ValueError(f"torch_dtype_to_mscclpp_dtype: {dtype} is none of {', '.join(DataType.__members__)}")
    return DataType[name]


_KERNELS = "kernels of your own are launched by CuPy's RawKernel, or torch.utils.cpp_extension"
Kernel = Absent("mscclpp.utils.Kernel", _KERNELS)
KernelBuilder = Absent("mscclpp.utils.KernelBuilder", _KERNELS)
pack = Absent("mscclpp.utils.pack", _KERNELS)
get_device_arch = Absent("mscclpp.utils.get_device_arch", "use torch.cuda.get_device_capability")
