"""A group's calls on CUDA tensors: on the current stream, or beside it, on a stream of the group."""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

import antiphon
from antiphon.torch.tensors import Copies


class Streams:
    """The order of a group's calls on one GPU.

    Calls of a communicator must not run at once. So each waits for the one before, on whatever stream that was; and what is
    asked for with ``async_op=True`` has a stream of its own, which waits for the caller's too.
    """

    def __init__(self, comm: antiphon.Communicator, device: int) -> None:
        self.comm, self.device = comm, device
        self._side: torch.cuda.Stream | None = None
        #: Those that messages go on: two ranks may both send before they receive.
        self._messages: dict[str, torch.cuda.Stream] = {}
        #: The stream of the call before, and its number, which is faster to compare.
        self._last: torch.cuda.Stream | None = None
        self._raw = -1

    def enter(self) -> None:
        """Orders a call on the current stream after the call before."""
        if torch._C._cuda_getCurrentRawStream(self.device) != self._raw:
            self._follow(torch.cuda.current_stream(self.device))

    def aside(
        self, calls: Iterable[tuple[str, tuple[Any, ...], Any]], result: Sequence[Tensor], copies: Copies
    ) -> dist.Work:
        """Makes calls beside the current stream, but not before what is in it."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side, used = self._side, [*result, *(tensor for pair in copies for tensor in pair)]
        side.wait_stream(torch.cuda.current_stream(self.device))
        self._follow(side)
        try:
            with torch.cuda.stream(side):
                for name, arguments, out in calls:
                    lists = [each if isinstance(each, list) else [each] for each in (*arguments, out)]
                    used += [tensor for each in lists for tensor in each if isinstance(tensor, Tensor)]
                    getattr(self.comm, name)(*arguments, out=out)
                copies.finish()
                end = side.record_event()
        finally:  # also when a later call raises: those before are under way
            for tensor in used:
                tensor.record_stream(side)  # memory that is freed meanwhile is not given out again before
        return StreamWork(self, side, end, result)

    def message(
        self, name: str, arguments: tuple[Tensor, int], result: Sequence[Tensor], copies: Copies
    ) -> dist.Work:
        """A message. Sends have an order of their own beside the collectives, and so have receives."""
        stream = self._messages.get(name)
        if stream is None:
            stream = self._messages[name] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            getattr(self.comm, name)(*arguments)
            used = [arguments[0], *result, *(tensor for pair in copies for tensor in pair)]
            copies.finish()
            end = stream.record_event()
        for tensor in used:
            tensor.record_stream(stream)
        return StreamWork(self, stream, end, result)

    def synchronize(self) -> None:
        """Waits for the work of the current stream and for all calls, and raises what went wrong."""
        self.enter()
        torch.cuda.current_stream(self.device).synchronize()
        self.comm.check()

    def _follow(self, stream: torch.cuda.Stream) -> None:
        last, self._last, self._raw = self._last, stream, stream.cuda_stream
        # A graph cannot wait for what is outside of it: the program that replays the graph orders it.
        if last is not None and last != stream and _is_captured(last) == _is_captured(stream):
            stream.wait_stream(last)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class StreamWork(dist.Work):
    """Operations in a stream."""

    def __init__(
        self, streams: Streams, stream: torch.cuda.Stream, end: torch.cuda.Event, result: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._streams, self._stream, self._end, self._result = streams, stream, end, list(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Has the current stream wait for the end, and raises what is known by now to have gone wrong in this group. With a
        ``timeout`` the caller itself waits, so long at most, and gets ``TimeoutError``, or what went wrong."""
        torch.cuda.current_stream(self._streams.device).wait_event(self._end)
        if timeout > timedelta(0):
            end = time.monotonic() + timeout.total_seconds()
            while not self.is_completed():
                if time.monotonic() > end:
                    raise TimeoutError(f"still under way after {timeout}: wait again")
                time.sleep(1e-4)
        if not self._streams.comm.closed:
            self._streams.comm.check()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the GPU is done with it."""
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    def exception(self) -> BaseException | None:
        """What went wrong in this group, if something did."""
        try:
            self._streams.comm.check()
        except Exception as error:
            return error
        return None

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._result

    def get_future(self) -> Future[list[Tensor]]:
        """Complete at once: waiting for it makes the current stream wait for the end."""
        future: Future[list[Tensor]] = Future(devices=[torch.device("cuda", self._streams.device)])
        with torch.cuda.stream(self._stream):
            future.set_result(self._result)
        return future
