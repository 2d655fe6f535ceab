"""What orders calls on streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from antiphon.moe._calls import Side

__all__ = ["AnyEvent", "CallOrder", "EventHandle", "EventOverlap", "StreamOrder", "topk_idx_t"]

#: The type of experts' numbers.
topk_idx_t = torch.int64


class EventHandle:
    """A point in the current stream, or in ``stream``. On the CPU, where nothing is pending when a call returns, it is always
    reached."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._event = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def current_stream_wait(self) -> None:
        """Has the current stream wait for this point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def stream_wait(self, stream: torch.cuda.Stream) -> None:
        """Has a stream wait for this point."""
        if self._event is not None:
            stream.wait_event(self._event)


class EventOverlap:
    """An event, with ``extra_tensors`` that must last until it is reached. As a context manager, the current stream waits for it when
    the block ends; ``with event(release_handle=True)`` also lets go of it then."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Has the current stream wait for the event, and lets go of it with ``release_handle``. Raises ``RuntimeError`` without one."""
        if self.event is None:
            raise RuntimeError("this EventOverlap has no event: the call was not asynchronous")
        self.event.current_stream_wait()
        if release_handle:
            self.event = None

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        """This event, for a ``with`` that lets go of it at its end with ``release_handle``."""
        self._releases = release_handle
        return self

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *_exception: Any) -> None:
        if self.event is not None:
            self.current_stream_wait(self._releases)
        self._releases = False


#: What calls take as an event.
AnyEvent: TypeAlias = EventHandle | EventOverlap | None


class CallOrder:
    """How a call is ordered on a GPU, as DeepEP's callers ask: on a stream of the buffer, behind ``previous_event`` or else what is
    in the current stream. With ``async_finish`` the current stream does not wait for its end, which the event is.

    New tensors are of the current stream, which the call then comes behind as well; with ``allocate_on_comm_stream`` they are of the
    buffer's, so that the call waits for ``previous_event`` alone.

    On the CPU (``stream`` is ``None``) calls are over when they return.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream | None,
        previous_event: EventOverlap | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> None:
        if allocate_on_comm_stream and not (async_finish and previous_event is not None):
            raise ValueError("allocate_on_comm_stream needs async_finish and a previous_event")
        if previous_event is not None and not isinstance(previous_event, EventOverlap):
            raise TypeError(f"previous_event must be an EventOverlap, not {type(previous_event).__name__}")
        self._stream, self._async_finish, self._allocates_there = stream, async_finish, allocate_on_comm_stream
        self._previous = None if previous_event is None else previous_event.event
        if self._previous is not None:
            if stream is None:
                self._previous.current_stream_wait()
            else:
                self._previous.stream_wait(stream)
        #: Where calls are made that are not in the current stream.
        self.side = None if stream is None or allocate_on_comm_stream else Side(stream, joins=not async_finish)
        #: The end of the call.
        self.event = EventOverlap()

    @contextmanager
    def run(self, inputs: list[Any], outputs: list[Any]) -> Iterator[None]:
        """In this the call is made; ``outputs`` gets its new tensors."""
        stream = self._stream
        if stream is not None and self._allocates_there:
            current = torch.cuda.current_stream(stream.device)
            if self._previous is None:
                stream.wait_stream(current)
            with torch.cuda.stream(stream):
                yield
            _keep(inputs, stream)
            _keep(outputs, current)
        else:
            yield
        if self._async_finish:
            self.event = EventOverlap(EventHandle(stream))


class StreamOrder:
    """How an ``ElasticBuffer``'s call is ordered on a GPU: in the current stream, or in ``stream``, behind ``previous`` or else the
    current stream. That then waits for its end, unless it ``is_async``. New tensors are of the stream that the call is in."""

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        previous: AnyEvent,
        before_epilogue: AnyEvent,
        is_async: bool,
    ) -> None:
        self._device, self._stream, self._is_async = device, stream, is_async
        self._is_behind_current = previous is None
        handles = [event.event if isinstance(event, EventOverlap) else event for event in (previous, before_epilogue)]
        self._events = [handle for handle in handles if handle is not None]
        #: The end of the call.
        self.event = EventOverlap()

    @contextmanager
    def run(self, inputs: list[Any], outputs: list[Any]) -> Iterator[None]:
        """In this the call is made; ``outputs`` gets its new tensors."""
        stream = self._stream
        if stream is None:
            if self._device.type == "cuda":
                for event in self._events:
                    event.stream_wait(torch.cuda.current_stream(self._device))
            yield
        else:
            current = torch.cuda.current_stream(self._device)
            if self._is_behind_current:
                stream.wait_stream(current)
            for event in self._events:
                event.stream_wait(stream)
            with torch.cuda.stream(stream):
                yield
            _keep(inputs, stream)
            _keep(outputs, current)
            if not self._is_async:
                current.wait_stream(stream)
        if self._is_async:
            self.event = EventOverlap(EventHandle(stream))


def _keep(tensors: list[Any], stream: torch.cuda.Stream) -> None:
    """Memory of these is not given away before a stream is done with them."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            tensor.record_stream(stream)
