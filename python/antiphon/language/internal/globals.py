"""The program that calls without one are about."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.language.program import CollectiveProgram

_current: "CollectiveProgram | None" = None


def get_program() -> "CollectiveProgram":
    """The program whose ``with`` block this is. ``RuntimeError`` outside of one."""
    if _current is None:
        raise RuntimeError("no program: this belongs into a block `with CollectiveProgram(...):`")
    return _current


def set_program(program: "CollectiveProgram | None") -> None:
    """Makes a program the current one, or none."""
    global _current
    _current = program
