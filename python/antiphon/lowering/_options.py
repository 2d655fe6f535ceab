"""The options of the pass."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from antiphon.lowering._inductor import is_inductors

__all__ = ["Options", "mode"]


@dataclass(frozen=True)
class Options:
    """The rules that the pass applies. An unknown value raises ``ValueError``.

    ================ ==========================================================================================
    ``numerics``     ``"close"``: a rewrite may drop or move roundings, and the report bounds the difference of each
                     result; ``"same"``: every rounding stays, and only the order of a row's sum may change
    ``fuse``         whether a sum is fused with the residual, the norm and the quantisation behind it
    ``merge``        whether a sum of sums becomes one sum
    ``realize``      which operands of calls lie in symmetric memory, on the host: ``"measured"``, those for which it was
                     measured to be faster; ``"always"``, those for which it is possible; ``"never"``, none. On GPUs it was
                     never faster: ``"always"`` is refused there
    ``tables``       the path of a file of ``antiphon tune``, equal on all ranks, whose measured times replace the built-in ones
    ``overlap``      whether starts come early and waits late, neighbouring calls become one, and inductor keeps that order
    ``groups``       the names of the groups whose calls the pass may change; by default all that are attached
    ``strict``       whether a failed proof raises ``RuntimeError``; otherwise the graph stays unchanged, with a warning. Small programs,
                     before and after, are also run on numbers, and must agree
    ================ ==========================================================================================
    """

    numerics: Literal["close", "same"] = "close"
    fuse: bool = True
    merge: bool = True
    realize: Literal["measured", "always", "never"] = "measured"
    tables: str | None = None
    overlap: bool = False
    groups: tuple[str, ...] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name, known in ("numerics", ("close", "same")), ("realize", ("measured", "always", "never")):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: known are {', '.join(known)}")
        for name in ("fuse", "merge", "overlap", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: True or False")
        if self.tables is not None and not (isinstance(self.tables, str | os.PathLike) and Path(self.tables).is_file()):
            raise ValueError(f"tables={self.tables!r}: the path of a file of antiphon tune")
        if self.groups is not None:
            is_list = isinstance(self.groups, Iterable) and not isinstance(self.groups, str)
            if not is_list or not all(isinstance(group, str) for group in self.groups):
                raise ValueError(f"groups={self.groups!r}: a tuple of the names of groups")
            object.__setattr__(self, "groups", tuple(self.groups))

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Options":
        """The options of these names. ``ValueError`` for a name that there is not."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"antiphon.lowering has no options {', '.join(unknown)}: known are {', '.join(known)}")
        return cls(**given)

    @classmethod
    def split(cls, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Separates the options of ``torch.compile`` into the pass's and inductor's. ``ValueError`` for names that neither has."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(name for name in given if name not in known and not is_inductors(name)):
            text = f"options {', '.join(unknown)} are neither inductor's nor antiphon's, which are {', '.join(known)}"
            raise ValueError(f"torch.compile: {text}")
        ours = {name: value for name, value in given.items() if name in known}
        return ours, {name: value for name, value in given.items() if name not in known}

    def request(self) -> dict[str, Any]:
        """The options in the form that ``_core.Lowering`` takes."""
        names = ("numerics", "fuse", "merge", "realize", "overlap")
        tables = "built_in" if self.tables is None else {"file": self.tables}
        return {"tables": tables} | {name: getattr(self, name) for name in names}

    def key(self) -> str:
        """A text that differs for options which may lead to different programs."""
        tables = b"" if self.tables is None else Path(self.tables).read_bytes()
        return f"{replace(self, tables=None)!r} {hashlib.sha256(tables).hexdigest()}"


def mode() -> str:
    """The value of ``ANTIPHON_LOWERING``, or an empty string.

    ``off`` disables the pass, ``log`` logs the report of each graph as a warning, ``strict`` raises an error if a proof fails.
    Any other value raises ``ValueError``."""
    found = os.environ.get("ANTIPHON_LOWERING", "")
    if found not in ("", "off", "log", "strict"):
        raise ValueError(f"ANTIPHON_LOWERING={found!r}: known are off, log, strict")
    return found
