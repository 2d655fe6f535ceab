"""The ``torch.distributed`` backend ``"antiphon"``: importing this module registers it.

    import antiphon.torch
    import torch.distributed as dist

    dist.init_process_group("antiphon")     # under `antiphon run`, torchrun, or any init_method
    dist.all_reduce(tensor)                 # and DDP, DTensor, FSDP2, functional collectives, torch.compile

It serves CPU and CUDA tensors of the ranks of one machine. Any element type can be moved; float64, float32, float16,
bfloat16, int64, int32, int8 and uint8 can be reduced, bool as 0 and 1, complex sums as pairs of reals, and all integers by
BAND, BOR and BXOR. Reductions are those of :class:`antiphon.ReduceOp`: the same bits on every rank. Sparse tensors (COO) can
be summed.

Messages have tags, and can be received from any rank. Calls are events of ``torch.profiler`` (``antiphon:all_reduce`` with
shapes, bytes and the name of the group; what ``async_op=True`` started also ``antiphon:all_reduce:async``, until it is over), and NVTX ranges under Nsight
Systems. ``_set_pg_timeout`` and ``set_timeout`` change the timeout of a group, on this rank; ``abort`` ends its waits on all.

On CUDA float32, float16 and bfloat16 can be reduced. A call runs on the current stream; with ``async_op=True`` on a stream of the
group, after what is in the current one, for whose end ``wait()`` of the work makes the current stream wait. Sends have a stream of
the group, and receives another: a rank may send before it receives, whatever the length. A barrier also waits for the
current stream. :mod:`antiphon.torch.ops` has operators for ``torch.compile``.

A failure raises at the call, or at ``wait()`` of the work that ``async_op=True`` returned, with the exceptions of
:mod:`antiphon`. On CUDA neither waits for the GPU, and tells only what is known by then: the rest is raised by a later
call, ``wait()`` with a timeout, a barrier, or ``communicator(group).check()`` after ``torch.cuda.synchronize()``. Where C++
waits for a future (DDP does), its text arrives in a ``RuntimeError``. What is not supported raises ``NotImplementedError``
that names it. Ranks in messages are ranks in the group.

Callbacks of a future of host tensors run on a thread of the group, in the order of the operations, and may wait for others.
Calls that a callback makes take their turn among those of the program: it must see to it that all ranks make them in one
order, as torch's ``powerSGD_hook`` does while there is one bucket.
"""

import functools
import itertools
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, _DistributedBackendOptions

import antiphon
from antiphon.torch import ops
from antiphon.torch.group import Group
from antiphon.torch.tensors import unsupported

__all__ = ["communicator", "ops"]


def communicator(group: dist.ProcessGroup | None = None) -> antiphon.Communicator:
    """The communicator of a group of this backend (the default group unless given), which closes it when destroyed.

    Its calls and those of the group are one sequence: all ranks must make them in the same order. On CUDA the
    caller orders its calls, and replays of graphs, against the group's: ``wait()`` first for all work that was asked for
    with ``async_op=True``. Raises ``ValueError`` if the group has another backend or this process is not in it.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, Group):
        text = "there is no default group" if found is None else f"the backend of the group is {_backend(found)}"
        raise ValueError(f'communicator: {text}, not "antiphon"')
    return found.comm


def _backend(group: object) -> str:
    if isinstance(group, dist.ProcessGroup):
        return f'"{dist.get_backend(group)}"'
    return "unknown (is this process in it?)"


def _exchange(store: Store, rank: int, size: int, timeout: timedelta) -> Callable[[bytes], list[bytes]]:
    """An all-gather of bytes through a store, in which old keys of earlier groups may lie."""
    generation = store.add(f"antiphon/{rank}", 1)
    rounds = itertools.count()

    def exchange(mine: bytes) -> list[bytes]:
        this = next(rounds)
        keys = [f"antiphon/{generation}/{this}/{rank}" for rank in range(size)]
        store.set(keys[rank], mine.hex())
        try:
            store.wait(keys, timeout)
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not missing:
                raise
            raise TimeoutError(f"ranks {missing} of {size} did not come to the store within {timeout}") from error
        return [bytes.fromhex(store.get(key).decode()) for key in keys]

    return exchange


def _parent() -> antiphon.Communicator | None:
    """The communicator of the default group, of whose ranks every later group has some."""
    world = dist.group.WORLD
    return world.comm if isinstance(world, Group) and not world.comm.closed else None


def _create(options: _DistributedBackendOptions, backend_options: object) -> Group:
    if backend_options is not None:
        raise unsupported("pg_options", "pass the timeout to init_process_group or new_group")
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    meet = _exchange(store, rank, size, timeout)
    seconds = timeout.total_seconds()
    comm = antiphon.init(rank=rank, world_size=size, exchange=meet, parent=_parent(), timeout=seconds)
    return Group(store, rank, size, comm)


def _set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    found = dist.group.WORLD if group is None else group
    if isinstance(found, Group):
        found.set_timeout(timeout)
    else:
        _set_timeout_of_others(timeout, group)


# Which looks for gloo's and NCCL's backends by their classes, and calls no other. Training frameworks call it.
_set_timeout_of_others = dist.distributed_c10d._set_pg_timeout
dist.distributed_c10d._set_pg_timeout = functools.wraps(_set_timeout_of_others)(_set_pg_timeout)

dist.Backend.register_backend("antiphon", _create, extended_api=True, devices=["cpu", "cuda"])
