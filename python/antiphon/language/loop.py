"""Loops over the bytes of chunks."""

from sys import _getframe
from types import TracebackType

from antiphon.language.internal.globals import get_program

__all__ = ["LoopIterationContext", "get_program"]


class LoopIterationContext:
    """Operations inside happen again and again, ``unit`` bytes at a time, until ``num_chunks`` chunks are done.

    When the block ends, by an exception too, the operations of each thread block become one ``pipeline``.
    ``RuntimeError`` for a loop in a loop.
    """

    def __init__(self, unit: int, num_chunks: int) -> None:
        self.unit, self.num_chunks = unit, num_chunks

    def __enter__(self) -> None:
        program = get_program()
        program._core.begin_pipeline(self.unit, self.num_chunks, _getframe(1))
        program.loop_context = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        program = get_program()
        program.loop_context = None
        program._core.end_pipeline()
