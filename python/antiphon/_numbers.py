"""Numbers that callers pass."""

from operator import index
from typing import Any

__all__ = ["whole"]

#: Numbers of rows, tokens and bytes are counted in 32 bits.
MOST = 2**31 - 1


def whole(call: str, name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """An integer of ``least..=most``. Raises ``TypeError`` for what is none, ``ValueError`` for another one."""
    if isinstance(value, bool):
        raise TypeError(f"{call}: {name} must be an integer, not bool")
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{call}: {name} must be an integer, not {type(value).__name__}") from None
    if not least <= number <= most:
        bound = f"at least {least}" if number < least else f"at most {most}"
        raise ValueError(f"{call}: {name} must be {bound}, not {number}")
    return number
