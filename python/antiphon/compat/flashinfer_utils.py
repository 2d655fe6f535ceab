"""What scripts for ``flashinfer.comm`` take from ``flashinfer.utils``, where that is not installed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["get_compute_capability"]


def get_compute_capability(device: "torch.device") -> tuple[int, int]:
    """Major and minor number of a CUDA device's compute capability. ``ValueError`` for other devices."""
    import torch

    if device.type != "cuda":
        raise ValueError(f"get_compute_capability: {device} is no CUDA device")
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor
