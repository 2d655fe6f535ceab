"""Collectives between processes of one machine, or of several, on NumPy arrays, torch tensors and any object with DLPack.

    import antiphon, numpy as np

    comm = antiphon.init()                  # under `antiphon run -n 4 python script.py`, or torchrun
    total = comm.all_reduce(np.ones(3))     # array([4., 4., 4.]) on every rank
    comm.all_reduce(total, "max", out=total)  # in place

Every call waits until this rank's part is done, and never without a deadline: a lost peer raises
:class:`PeerLostError`, one that does not come ``TimeoutError``, ranks that call different things ``RuntimeError``.
Each blocking call ``x`` has a form ``start_x`` that returns a :class:`Pending`. Under one communicator for everything it
need not be named: :func:`all_reduce` and :func:`all_reduce_rms_norm` are calls of the :func:`default` one.
"""

import importlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING

from antiphon._core import (
    AbortedError,
    Communicator,
    Memory,
    PeerLostError,
    Pending,
    Plan,
    PlanCollection,
    SymmetricBuffer,
    __version__,
    after_fork,
    launcher_variables,
)
from antiphon._default import all_reduce, all_reduce_rms_norm, default, set_default
from antiphon._handles import wait_all
from antiphon._results import RmsNormResult
from antiphon._types import ReduceOp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "AbortedError",
    "Communicator",
    "Memory",
    "PeerLostError",
    "Pending",
    "Plan",
    "PlanCollection",
    "ReduceOp",
    "RmsNormResult",
    "SymmetricBuffer",
    "__version__",
    "all_reduce",
    "all_reduce_rms_norm",
    "default",
    "init",
    "set_default",
    "wait_all",
]

#: Modules that are imported when a program first names them.
_PARTS = ("comm", "compat", "language", "lowering", "moe", "mscclpp", "torch")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS})


def __getattr__(name: str) -> ModuleType:
    if name in _PARTS:
        return importlib.import_module(f"antiphon.{name}")
    raise AttributeError(f"module 'antiphon' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


#: The variables by which launchers describe a world.
_LAUNCHERS = launcher_variables()


# The child of a fork must not act for its parent's rank.
os.register_at_fork(after_in_child=after_fork)


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    path: str | os.PathLike[str] | None = None,
    secret: str | bytes | None = None,
    group: "ProcessGroup | None" = None,
    exchange: Callable[[bytes], list[bytes]] | None = None,
    parent: Communicator | None = None,
    timeout: float | None = None,
    arena_bytes: int | None = None,
) -> Communicator:
    """Joins the other ranks and returns this rank's communicator. All ranks must pass corresponding arguments.

    Without ``path``, ``group`` and ``exchange`` the environment describes the world (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
    ``MASTER_PORT``, as ``antiphon run`` and torchrun set them). If no launcher has set any of it, as in a notebook, the world is this
    rank alone, and a line on standard error says so; ``rank=0, world_size=1`` does the same. Several ranks of ``mpirun`` or ``srun`` raise
    ``RuntimeError``. Otherwise pass exactly one of these:

    * ``path``: the path of a Unix socket, which exists until all ranks have joined. Needs ``rank`` and ``world_size``. A rank
      must know ``secret`` to join. By default it is the path itself: then any process of this user that can open the socket
      may join.
    * ``group``: an existing ``torch.distributed`` process group, of any backend. It is used while the ranks meet, to
      exchange a few bytes.
    * ``exchange``: any other channel, as a function that takes this rank's bytes and returns the bytes of all ranks
      in order (for example ``MPI.COMM_WORLD.allgather``). Needs ``rank`` and ``world_size``.

    ``parent`` is a communicator of which these ranks are a part; all of them pass it, and its other ranks take no part. Errors
    then also give the world's rank numbers, and the handles of the ranks' processes are shared.

    ``timeout`` is the number of seconds that a call waits for a peer (300, or the timeout of the ``group`` if that is less).
    ``arena_bytes`` is the limit of each rank's
    symmetric memory (1 GiB; only used memory is allocated). If the environment describes the world, it may set them by
    ``ANTIPHON_TIMEOUT`` and ``ANTIPHON_ARENA_BYTES``.

    Raises ``TimeoutError`` that names the missing ranks, ``ValueError`` for invalid arguments,
    ``RuntimeError`` for other failures of the rendezvous.
    """
    ways = [name for name, way in (("path", path), ("group", group), ("exchange", exchange)) if way is not None]
    if len(ways) > 1:
        raise ValueError(f"init: pass one way to meet, not {' and '.join(ways)}")
    if group is not None:
        if rank is not None or world_size is not None:
            raise ValueError("init: the group says rank and world_size")
        rank, world_size, exchange = _of_group(group)
        if timeout is None and (of_group := _timeout_of(group)) is not None:
            timeout = min(300.0, of_group.total_seconds())
    if secret is not None and path is None:
        raise ValueError("init: secret is for meeting at a path")
    if not ways:
        launched = any(name in os.environ for name in _LAUNCHERS)
        if parent is None and not launched and (rank, world_size) in ((None, None), (0, 1)):
            comm = Communicator.alone(timeout, arena_bytes)
            print("antiphon: a world of this rank alone; `antiphon run -n RANKS program.py` starts several", file=sys.stderr)
            return comm
        if rank is not None or world_size is not None:
            raise ValueError("init: rank and world_size need path or exchange; from the environment both are read")
        if parent is not None:
            raise ValueError("init: ranks of a parent need path, group or exchange; the environment describes a world")
        return Communicator.from_env(timeout, arena_bytes)
    if rank is None or world_size is None:
        raise ValueError(f"init: {ways[0]} needs rank and world_size")
    if rank < 0 or world_size < 1 or rank >= world_size:
        raise ValueError(f"init: rank {rank} is not below the world size {world_size}")
    if exchange is not None:
        return Communicator.by_exchange(rank, world_size, exchange, timeout, arena_bytes, parent)
    assert path is not None
    where = os.fsdecode(path)
    known = where if secret is None else secret
    known = known.encode() if isinstance(known, str) else known
    return Communicator.at_path(rank, world_size, where, known, timeout, arena_bytes, parent)


def _timeout_of(group: "ProcessGroup") -> timedelta | None:
    """How long calls of a torch process group wait, if its backend says so."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def _of_group(group: "ProcessGroup") -> tuple[int, int, Callable[[bytes], list[bytes]]]:
    """The rank and the size of a torch process group, and the exchange of bytes among its members."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("init: this process is not in the group")

    def exchange(mine: bytes) -> list[bytes]:
        all_bytes: list[bytes] = [b""] * world_size
        dist.all_gather_object(all_bytes, mine, group=group)
        return all_bytes

    return rank, world_size, exchange
