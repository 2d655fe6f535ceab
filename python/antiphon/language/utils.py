"""Descriptions of algorithms."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.language.collectives import Collective

__all__ = ["AlgoSpec", "ReplicationPolicy"]


class ReplicationPolicy(Enum):
    """The division of work among instances."""

    #: Each chunk becomes as many as there are instances, side by side; each instance takes one.
    interleaved = "interleaved"
    #: Chunks are not divided: only for programs that touch none.
    none = "none"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class AlgoSpec:
    """All of a program but its operations; see :meth:`CollectiveProgram.from_spec`."""

    name: str
    collective: "Collective"
    nranks_per_node: int
    world_size: int
    in_place: bool
    instances: int
    protocol: str
    instr_fusion: bool = True
    auto_sync: bool = True
    replication_policy: ReplicationPolicy = ReplicationPolicy.interleaved
    reuse_resources: bool = False
    num_threads_per_block: int = 1024
    use_double_scratch_buffer: bool = False
    buffer_alignment: int = 16
    min_message_size: int = 0
    max_message_size: int = 2**64 - 1
    tags: dict[str, Any] = field(default_factory=dict)
