"""What orders calls on streams."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["EventHandle", "EventOverlap", "topk_idx_t"]

#: The type of experts' numbers.
topk_idx_t = torch.int64


class EventHandle:
    """A point in the current stream. On the CPU, where nothing is pending when a call returns, it is always reached."""

    def __init__(self) -> None:
        self._event = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def current_stream_wait(self) -> None:
        """Has the current stream wait for this point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event, with tensors that must last until it is reached. As a context manager, the current stream waits for it when
    the block ends."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Has the current stream wait for the event. Raises ``RuntimeError`` without one."""
        if self.event is None:
            raise RuntimeError("this EventOverlap has no event: the call was not asynchronous")
        self.event.current_stream_wait()

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *_exception: Any) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
