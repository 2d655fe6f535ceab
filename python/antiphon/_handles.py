"""Waiting for several operations."""

import time
from collections.abc import Iterable
from typing import TypeVar

from antiphon._core import Pending

_T = TypeVar("_T")


def wait_all(handles: Iterable[Pending[_T]], timeout: float | None = None) -> list[_T]:
    """Waits until all operations are over and returns what each returns, in the order of the handles.

    If some fail, the error of the first of them is raised, when all are over. ``TimeoutError`` if some still go on after
    ``timeout`` seconds, which ends none of them.
    """
    all_handles = list(handles)
    end = None if timeout is None else time.monotonic() + timeout
    results: list[_T] = []
    first: Exception | None = None
    for handle in all_handles:
        try:
            results.append(handle.wait(None if end is None else max(0.0, end - time.monotonic())))
        except Exception as error:
            if not handle.is_finished():
                raise TimeoutError(_still(all_handles, timeout)) from None
            first = first or error
    if first is not None:
        raise first
    return results


def _still(handles: list[Pending[_T]], timeout: float | None) -> str:
    count = sum(not handle.is_finished() for handle in handles)
    return f"{count} of {len(handles)} operations still under way after {timeout} s: wait again"
