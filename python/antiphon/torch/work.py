"""What a call returns, and the futures on it."""

import atexit
import queue
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

import antiphon
from antiphon.torch.tensors import Copies


class Work(dist.Work):
    """Operations under way. ``wait`` may be called again, from any thread."""

    def __init__(
        self,
        handles: Sequence[antiphon.Handle],
        result: Sequence[Tensor],
        copies: Copies | None = None,
        futures: "Futures | None" = None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._handles, self._result, self._copies = handles, list(result), copies
        self._futures, self._source = futures, source
        self._future: Future[list[Tensor]] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until all is over, which is bounded by the timeout of the group; raises what went wrong.

        After ``timeout``, unless zero, ``TimeoutError`` is raised and the operation goes on.
        """
        seconds = timeout.total_seconds()
        for handle in self._handles:
            handle.wait(seconds if seconds > 0 else None)
        with self._lock:
            if self._copies:
                self._copies.finish()
        return True

    def is_completed(self) -> bool:
        return all(handle.is_finished() for handle in self._handles)

    def exception(self) -> BaseException | None:
        """What went wrong, if it is over and something did."""
        try:
            if self.is_completed():
                self.wait()
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
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[list[Tensor]]:
        """Completed with the outputs when all is over."""
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
    """What a blocking call returns: there is nothing left to wait for."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class Futures:
    """Completes the futures of works in their order, on a thread: futures want to be told, and works can only wait."""

    _running: "set[Futures]" = set()
    _leave = threading.Event()

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, Future[list[Tensor]]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def complete(self, work: Work, future: Future[list[Tensor]]) -> None:
        if work.is_completed():
            self._finish(work, future)  # which spares waking a thread
            return
        self._queue.put((work, future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="antiphon-futures", daemon=True)
            self._running.add(self)
            self._thread.start()

    def close(self) -> None:
        """Lets the thread end after what it has to do."""
        self._queue.put(None)

    def _main(self) -> None:
        while (item := self._queue.get()) is not None and self._see_through(*item):
            del item  # it keeps tensors
        self._running.discard(self)

    def _see_through(self, work: Work, future: Future[list[Tensor]]) -> bool:
        while not work.is_completed():
            if self._leave.is_set():
                return False
            try:
                work.wait(timedelta(seconds=0.1))
            except Exception:
                pass  # not yet over; or a failure, which is found again
        self._finish(work, future)
        return True

    @staticmethod
    def _finish(work: Work, future: Future[list[Tensor]]) -> None:
        error = work.exception()
        if error is None:
            future.set_result(work.result())
        else:
            future.set_exception(error)  # type: ignore[arg-type]  # which says that errors are values

    @classmethod
    def leave(cls) -> None:
        """Ends the threads: one that outlives the interpreter is killed in the middle of what it does."""
        cls._leave.set()
        for futures in list(cls._running):
            futures.close()
            if futures._thread is not None:
                futures._thread.join(1)


atexit.register(Futures.leave)
