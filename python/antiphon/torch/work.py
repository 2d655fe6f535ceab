"""What a call returns, and the futures on it.

Locks are reentrant: a signal handler may call what it has interrupted.
"""

import atexit
import contextlib
import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

import antiphon
from antiphon.torch.tensors import Copies


class Work(dist.Work):
    """Operations under way. ``wait`` may be called again, from any thread."""

    def __init__(
        self,
        handles: Sequence[antiphon.Pending[Any]],
        result: Sequence[Tensor],
        copies: Copies | None = None,
        futures: "Futures | None" = None,
    ) -> None:
        super().__init__()
        self._handles, self._result, self._copies = handles, list(result), copies
        self._futures = futures
        #: Complete once a profiler has seen the end: a caller that waited for this work may stop the profiler next.
        self.event: Future[object] | None = None
        self._future: Future[list[Tensor]] | None = None
        self._lock = threading.RLock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until all is over, which is bounded by the timeout of the group; raises what went wrong.

        After ``timeout``, unless zero, ``TimeoutError`` is raised and the operation goes on.
        """
        self.finish(timeout)
        if self.event is not None:
            self.event.wait()
        return True

    def finish(self, timeout: timedelta = timedelta(0)) -> None:
        """As ``wait``, for the threads that complete futures."""
        seconds = timeout.total_seconds()
        for handle in self._handles:
            handle.wait(seconds if seconds > 0 else None)
        with self._lock:
            if self._copies is not None:
                self._copies.finish()

    def is_completed(self) -> bool:
        """Whether all is over; what has come then lies in the outputs, as after ``wait``."""
        if not all(handle.is_finished() for handle in self._handles):
            return False
        with contextlib.suppress(Exception):  # ``wait`` raises it
            self.finish()
        return True

    def exception(self) -> BaseException | None:
        """What went wrong, if it is over and something did."""
        try:
            if self.is_completed():
                self.finish()
        except Exception as error:
            return error
        return None

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._result

    def source_rank(self) -> int:
        """The rank that a message came from, once it is here; -1 for what is no message to this rank."""
        sources = [handle.source for handle in self._handles]
        return -1 if sources[:1] in ([], [None]) else sources[0]  # type: ignore[return-value]

    _source_rank = source_rank

    def get_future(self) -> Future[list[Tensor]]:
        """A future that is completed with the outputs when all operations are over."""
        if self._future is None:
            done: Future[list[Tensor]] = Future()
            # An error set on a future from Python is a value to C++; one that a callback raises is an error.
            self._future = done.then(lambda done: done.wait())
            if self._futures is not None:
                self._futures.complete(self, done)
            else:  # a message: it waits for no other, and needs a thread of its own
                futures = Futures()
                futures.complete(self, done)
                futures.close()
        return self._future


class Completed(Work):
    """The result of a blocking call, which is over."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class Sends:
    """Sends under way, which must complete even if no caller waits for them."""

    _FEW = 16

    def __init__(self) -> None:
        self._handles: list[antiphon.Pending[Any]] = []
        self._limit = self._FEW
        self._lock = threading.RLock()

    def add(self, handle: antiphon.Pending[Any]) -> None:
        with self._lock:
            if len(self._handles) >= self._limit:  # seldom, so that it costs little for each
                self._handles = [handle for handle in self._handles if not handle.is_finished()]
                self._limit = max(self._FEW, 2 * len(self._handles))
            self._handles.append(handle)

    def wait(self) -> None:
        """Waits until all are over, successfully or not; the timeout of the group bounds the wait."""
        with self._lock:
            handles, self._handles = self._handles, []
        for handle in handles:
            with contextlib.suppress(Exception):
                handle.wait()


#: The work of a thread of futures; ``None`` ends it.
_Queue = queue.SimpleQueue[tuple[Work, Future[list[Tensor]]] | None]


class Callbacks(threading.Thread):
    """Completes one future, which calls what was to be called then: all that a user can write, waiting included."""

    def __init__(self, work: Work, future: Future[list[Tensor]]) -> None:
        super().__init__(name="antiphon-callbacks", daemon=True)
        self._work, self._done = work, future

    def run(self) -> None:
        error = self._work.exception()
        if error is None:
            self._done.set_result(self._work.result())
        else:
            self._done.set_exception(error)  # type: ignore[arg-type]  # which says that errors are values


class Futures:
    """Completes the futures of works in their order, on a thread: a future must be completed, and a work can only be waited for.

    Callbacks run one after the other. One that takes longer than ``PATIENCE`` seconds may be waiting for a future that comes
    after its own: the next are completed meanwhile.
    """

    PATIENCE = 0.2

    _running: dict[threading.Thread, _Queue] = {}
    _leave = threading.Event()

    def __init__(self) -> None:
        self._queue: _Queue | None = None
        self._closed = False
        self._lock = threading.RLock()

    def complete(self, work: Work, future: Future[list[Tensor]]) -> None:
        if isinstance(threading.current_thread(), Callbacks):
            with contextlib.suppress(Exception):  # the future has the error
                work.finish()  # as the thread completes no other before this callback ends
        if work.is_completed():
            Callbacks(work, future).run()  # which spares waking a thread
            return
        with self._lock:
            if self._queue is None:
                self._queue = self._start()
            self._queue.put((work, future))
            if self._closed:  # the future came late, and its thread ends with it
                self._end()

    def close(self) -> None:
        """Lets the thread end after what it has to do."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    @classmethod
    def _start(cls) -> _Queue:
        todo: _Queue = queue.SimpleQueue()
        thread = threading.Thread(target=cls._main, args=(todo,), name="antiphon-futures", daemon=True)
        cls._running[thread] = todo
        thread.start()
        return todo

    @classmethod
    def _main(cls, todo: _Queue) -> None:
        while (item := todo.get()) is not None and cls._see_through(*item):
            del item  # it keeps tensors
        cls._running.pop(threading.current_thread(), None)

    @classmethod
    def _see_through(cls, work: Work, future: Future[list[Tensor]]) -> bool:
        while not work.is_completed():
            if cls._leave.is_set():
                return False
            try:
                work.finish(timedelta(seconds=0.1))
            except Exception:
                pass  # not yet over, or a failure, which the next call finds
        callbacks = Callbacks(work, future)
        callbacks.start()
        callbacks.join(cls.PATIENCE)
        return True

    @classmethod
    def leave(cls) -> None:
        """Ends the threads: one that outlives the interpreter is killed in the middle of what it does."""
        cls._leave.set()
        for thread, todo in list(cls._running.items()):
            todo.put(None)
            thread.join(1)


atexit.register(Futures.leave)
