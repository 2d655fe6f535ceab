"""Memory at an address as a tensor. After FlashInfer 0.6.18 comm/dlpack_utils.py."""

from typing import TYPE_CHECKING

from antiphon._core import strided_memory

if TYPE_CHECKING:
    import torch

__all__ = ["pack_strided_memory"]


def pack_strided_memory(
    ptr: int,
    segment_size: int,
    segment_stride: int,
    num_segments: int,
    dtype: "torch.dtype",
    dev_id: int | str | None,
) -> "torch.Tensor":
    """Segments of memory at a stride as the rows of a matrix, which does not own them.

    ``ptr`` is the address of the first segment, ``segment_size`` and ``segment_stride`` are in bytes. The tensor has
    shape ``[num_segments, segment_size / itemsize]`` and strides ``[segment_stride / itemsize, 1]``. The memory must
    outlive it. bfloat16 and float8 come back as themselves, where FlashInfer gives float16 and fails.

    ``dev_id`` says whose address it is: the number of a CUDA device, which is all that FlashInfer knows, or ``None``, -1
    or ``"cpu"`` for the host.

    Raises ``ValueError`` with the numbers for sizes that are not positive or no whole number of elements, segments
    that overlap, and an address that is misaligned or 0; ``NotImplementedError`` for a dtype that DLPack does not know.
    """
    import torch

    device = None
    if dev_id not in (None, -1, "cpu"):
        if not isinstance(dev_id, int) or dev_id < 0:
            raise ValueError(f"pack_strided_memory: dev_id is {dev_id!r}: pass a CUDA device's number, or -1 for the host")
        device = dev_id
    name = str(dtype).removeprefix("torch.")
    # PyTorch has not always taken float8 from DLPack.
    through = "uint8" if name.startswith("float8") else name
    capsule = strided_memory(ptr, segment_size, segment_stride, num_segments, through, device)
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule).view(dtype)
    setattr(tensor, "_capsule_wrapper", capsule)  # scripts look for it
    return tensor
