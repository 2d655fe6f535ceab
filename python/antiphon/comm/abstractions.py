"""The interface of a group of ranks. After FlashInfer comm/abstractions.py (its main branch of August 2026)."""

from typing import Any, Protocol, runtime_checkable

__all__ = ["CommBackend"]


@runtime_checkable
class CommBackend(Protocol):
    """How the ranks of a group exchange Python objects. Whatever has these methods is one, without being a subclass."""

    def Get_rank(self) -> int:
        """This rank."""
        ...

    def Get_size(self) -> int:
        """The number of ranks."""
        ...

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """The objects of all ranks, in their order."""
        ...

    def bcast(self, data: Any, root: int) -> Any:
        """The object of ``root``, a rank of this group."""
        ...

    def barrier(self) -> None:
        """Waits for all ranks."""
        ...

    def Split(self, color: int, key: int) -> "CommBackend":
        """A group of the ranks with the same ``color``, in the order of ``key``."""
        ...
