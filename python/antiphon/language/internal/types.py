"""What arguments can be."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from antiphon._core import Chunk
from antiphon.language.utils import ReplicationPolicy

__all__ = ["BufferType", "ChannelType", "Chunk", "RankGroup", "ReduceOperationType", "ReplicationPolicy", "SyncType"]

_SIDES = {"none": 0, "before": 1, "after": 2, "both": 3}


class SyncType(Enum):
    """On which sides of an operation the threads of its thread block meet: a set of two, with ``|``, ``&`` and ``^``."""

    none = "none"
    before = "before"
    after = "after"
    both = "both"

    def __str__(self) -> str:
        return self.value

    def __or__(self, other: "SyncType") -> "SyncType":
        return _of_sides(_SIDES[self.value] | _SIDES[other.value])

    def __and__(self, other: "SyncType") -> "SyncType":
        return _of_sides(_SIDES[self.value] & _SIDES[other.value])

    def __xor__(self, other: "SyncType") -> "SyncType":
        return _of_sides(_SIDES[self.value] ^ _SIDES[other.value])


def _of_sides(sides: int) -> SyncType:
    return list(SyncType)[sides]


class ReduceOperationType(Enum):
    """How contributions are combined."""

    sum = "sum"
    min = "min"
    max = "max"

    def __str__(self) -> str:
        return self.value


class BufferType(Enum):
    """A kind of memory: what the caller gives, what the caller gets, or the plan's own."""

    input = "i"
    output = "o"
    scratch = "s"

    def __str__(self) -> str:
        return self.value

    def __lt__(self, other: "BufferType") -> bool:
        return str(self.value) < str(other.value)

    def __gt__(self, other: "BufferType") -> bool:
        # As in MSCCL++ 0.9.0, where both are this.
        return str(self.value) < str(other.value)


class ChannelType(Enum):
    """How a channel reaches its peer."""

    memory = "memory"
    port = "port"
    switch = "switch"
    none = "none"

    def __str__(self) -> str:
        return self.value


@dataclass
class RankGroup:
    """Ranks behind a switch channel."""

    size: int
    ranks: list[int]

    def to_dict(self) -> dict[str, Any]:
        """As in the plan."""
        return {"size": self.size, "ranks": self.ranks}
