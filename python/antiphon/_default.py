"""The default communicator, for calls without one."""

import os
import threading
from typing import Any, TypeVar

from antiphon._core import Communicator
from antiphon._results import RmsNormResult
from antiphon._types import Op

__all__ = ["all_reduce", "all_reduce_rms_norm", "default", "set_default"]

_A = TypeVar("_A")

_lock = threading.RLock()
_default: Communicator | None = None
_meets = False


def _after_fork() -> None:
    """A thread that holds the lock does not exist in the child of a fork, and the child would wait for it for ever."""
    global _lock, _meets
    _lock, _meets = threading.RLock(), False


os.register_at_fork(after_in_child=_after_fork)


def default() -> Communicator:
    """The communicator of :func:`antiphon.all_reduce` and :func:`antiphon.all_reduce_rms_norm`.

    It is the one that :func:`set_default` was given. Without one, the first call meets the other ranks as
    ``antiphon.init()`` does, and keeps what that gives until the process ends: all ranks must come to it alike.

    Raises what ``antiphon.init()`` raises, and ``ValueError`` in a signal handler that interrupts this first call.
    """
    global _default, _meets
    with _lock:
        if _default is None:
            from antiphon import init

            if _meets:
                raise ValueError("default: this thread is inside another one, which meets the other ranks")
            _meets = True
            try:
                _default = init()
            finally:
                _meets = False
        return _default


def set_default(comm: Communicator | None) -> None:
    """Makes a communicator the default one. ``None`` forgets it, so that the next call meets anew; it closes
    nothing."""
    global _default
    with _lock:
        _default = comm


def all_reduce(x: _A, op: Op | None = None, **options: Any) -> _A:
    """:meth:`antiphon.Communicator.all_reduce` of the default communicator."""
    result: _A = default().all_reduce(x, op, **options)  # type: ignore[type-var]
    return result


def all_reduce_rms_norm(x: _A, residual: Any = None, weight: Any = None, **options: Any) -> "RmsNormResult[_A]":
    """:meth:`antiphon.Communicator.all_reduce_rms_norm` of the default communicator."""
    result: RmsNormResult[_A] = default().all_reduce_rms_norm(x, residual, weight, **options)  # type: ignore[type-var]
    return result
