"""Lists of names in errors."""

import difflib
from collections.abc import Collection

__all__ = ["listed"]

#: The most characters of a list: an error is read in a line or two.
MOST = 160


def listed(names: Collection[str], asked: str) -> str:
    """The names that are most like the one that was asked for, as many as fit, and how many others there are."""
    likeness = {name: difflib.SequenceMatcher(None, name.lower(), asked.lower()).ratio() for name in names}
    shown: list[str] = []
    for name in sorted(names, key=lambda name: (-likeness[name], name)):
        if len(", ".join([*shown, name])) > MOST:
            break
        shown.append(name)
    others = len(names) - len(shown)
    return ", ".join(shown) + (f" and {others} more" if others else "")
