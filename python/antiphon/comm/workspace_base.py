"""What workspaces of :func:`antiphon.comm.allreduce_fusion` have in common. After FlashInfer 0.6.18
comm/workspace_base.py."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["AllReduceFusionWorkspace"]


class AllReduceFusionWorkspace(ABC):
    """The workspace of one rank of a group of ``world_size`` ranks."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size, self.rank = world_size, rank

    @property
    @abstractmethod
    def backend(self) -> str:
        """The name of what serves it."""

    @abstractmethod
    def destroy(self) -> None:
        """Ends it. Once more does nothing."""

    @abstractmethod
    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: "torch.dtype | str",
        use_oneshot: bool | None = None,
    ) -> bool:
        """Whether calls may be of this size and dtype."""
