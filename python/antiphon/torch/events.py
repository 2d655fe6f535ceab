"""The events of a group's calls, for profilers."""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from antiphon.torch.work import Work

#: Whether a tool that takes NVTX ranges is attached to this process, as Nsight Systems says it is.
NVTX = "NVTX_INJECTION64_PATH" in os.environ

_NOT_WATCHED = contextlib.nullcontext()
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def is_watched() -> bool:
    """Whether a call would be seen, which is to cost nothing otherwise."""
    return NVTX or _is_profiling()


def call(name: str, tensors: Iterable[Tensor], group: str) -> contextlib.AbstractContextManager[object]:
    """A call of this operation, as long as the context lasts: the event ``antiphon:NAME`` of torch's profiler, with the shapes of
    the tensors, their bytes and the name of the group; and a range of NVTX."""
    if not is_watched():
        return _NOT_WATCHED
    inputs = list(tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    return _Call(f"antiphon:{name}", inputs, {"bytes": size, "group": group})


def started(name: str, work: dist.Work) -> dist.Work:
    """The same work, whose time until it is over is the event ``antiphon:NAME:async``."""
    if _is_profiling():
        event = record_function(f"antiphon:{name}:async")
        event.__enter__()  # type: ignore[no-untyped-call]
        ended = event._call_end_callbacks_on_future(work.get_future())
        if isinstance(work, Work):
            work.event = ended
    return work


class _Call(contextlib.AbstractContextManager[None]):
    def __init__(self, name: str, tensors: list[Tensor], values: dict[str, Any]) -> None:
        self._event = torch._C._profiler._RecordFunctionFast(name, tensors, values)
        self._range = f"{name} ({values['bytes']} bytes, group {values['group']})"

    def __enter__(self) -> None:
        if NVTX:
            torch.cuda.nvtx.range_push(self._range)  # type: ignore[no-untyped-call]
        self._event.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._event.__exit__(*exception)
        if NVTX:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
