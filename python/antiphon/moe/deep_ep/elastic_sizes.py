"""How large an ``ElasticBuffer`` would be, how many SMs keep links busy, and which ranks there are."""

from math import ceil, comb, inf
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from antiphon import Communicator
from antiphon.comm.cuda_ipc import communicator
from antiphon.moe._arguments import whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "LARGEST",
    "Group",
    "aligned",
    "buffer_bytes",
    "busy_sms",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "no_engram",
    "of_one_node",
    "rate",
    "size_hint",
]

Group: TypeAlias = "ProcessGroup | Communicator"

#: The sizes of buffers are multiples of this many bytes.
_ALIGNMENT = 2 << 20
#: The most bytes that a buffer has.
LARGEST = 2**63 - 1


def aligned(size: int, multiple: int = _ALIGNMENT) -> int:
    """A size, rounded up."""
    return -(-size // multiple) * multiple


def get_physical_domain_size(group: Group) -> tuple[int, int]:
    """How many ranks of a group are reached by RDMA, and by NVLink: 1 and ``R``. Raises ``NotImplementedError`` for ranks on several
    nodes."""
    return 1, of_one_node("get_physical_domain_size", group).world_size


def get_logical_domain_size(group: Group, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """How many domains a group is divided into, and how many ranks each has: 1 and ``R``, whatever ``allow_hybrid_mode``. Raises
    ``NotImplementedError`` for ranks on several nodes."""
    return 1, of_one_node("get_logical_domain_size", group).world_size


def of_one_node(call: str, group: Group) -> Communicator:
    """The communicator of a group. Raises ``NotImplementedError`` for ranks on several nodes."""
    comm = communicator(call, group)
    if len(comm.nodes) > 1:
        raise NotImplementedError(f"{call}: the ranks are on {len(comm.nodes)} nodes; mixtures of experts are served within one")
    return comm


def no_engram(call: str) -> NoReturn:
    """Raises ``NotImplementedError``."""
    raise NotImplementedError(f"{call}: Engram fetches entries of other ranks' memory by RDMA, for which there is no operation here")


def buffer_bytes(name: str, size: Any, least: int) -> int:
    """A number of bytes, ``least`` or more. Raises ``ValueError`` unless it is a multiple of 2 MiB."""
    number = whole("ElasticBuffer", name, size, least, LARGEST)
    if number % _ALIGNMENT:
        raise ValueError(f"ElasticBuffer: {name} must be a multiple of {_ALIGNMENT}, not {number}")
    return number


def size_hint(call: str, count: int, most_tokens: Any, hidden: Any, top_k: Any, is_fp8: bool, allows_reductions: bool) -> int:
    """The answer of :meth:`ElasticBuffer.get_buffer_size_hint` for ``count`` ranks."""
    most_tokens = whole(call, "num_max_tokens_per_rank", most_tokens, 1)
    hidden, top_k = whole(call, "hidden", hidden, 1), whole(call, "num_topk", top_k, 0, 32) or 32
    scales = 4 * -(-hidden // 32) if is_fp8 else 0
    sent = aligned(hidden * (1 if is_fp8 else 2) + scales + top_k * 12 + 16, 32)  # with ids, weights and the token
    returned = aligned(hidden * 2 + top_k * 4, 32)
    rows = min(count, top_k) if allows_reductions else top_k
    size: int = most_tokens * max(count * sent, rows * returned)
    return aligned(size)


def rate(call: str, name: str, value: Any) -> float:
    """A positive number. Raises ``TypeError`` for what is none, ``ValueError`` for another one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{call}: {name} must be a number, not {type(value).__name__}")
    if not 0 < value < inf:
        raise ValueError(f"{call}: {name} must be a positive number, not {value}")
    return float(value)


def busy_sms(count: int, num_experts: int, num_topk: int, links: float, read: float, write: float) -> int:
    """The even number of SMs, at least 4, that keep the links between the ranks busy; see
    :meth:`ElasticBuffer.get_theoretical_num_sms`. Rates are those of the links of a rank and of an SM."""
    if count == 1:
        return 4
    ranks_of_a_token = count * (1 - comb(num_experts - num_experts // count, num_topk) / comb(num_experts, num_topk))
    rows = links / (1 - 1 / count)
    return aligned(max(4, ceil(1.25 * max(rows / ranks_of_a_token / read, rows / write))), 2)
