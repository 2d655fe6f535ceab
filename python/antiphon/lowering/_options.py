"""The options of the pass."""

import os
from dataclasses import dataclass, fields
from typing import Any, Literal

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
    ``overlap``      whether starts come early and waits late, neighbouring calls become one, and inductor keeps that order
    ``groups``       the names of the groups whose calls the pass may change; by default all that are attached
    ``strict``       whether a failed proof raises ``RuntimeError``; otherwise the graph stays unchanged, with a warning
    ================ ==========================================================================================
    """

    numerics: Literal["close", "same"] = "close"
    fuse: bool = True
    merge: bool = True
    realize: Literal["measured", "always", "never"] = "measured"
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
        if self.groups is not None:
            if isinstance(self.groups, str) or not all(isinstance(group, str) for group in self.groups):
                raise ValueError(f"groups={self.groups!r}: a tuple of the names of groups")
            object.__setattr__(self, "groups", tuple(self.groups))

    @classmethod
    def split(cls, given: dict[str, Any]) -> tuple["Options", dict[str, Any]]:
        """Separates the options of ``torch.compile`` into the pass's and inductor's."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in names}), {
            name: value for name, value in given.items() if name not in names
        }

    def request(self) -> dict[str, Any]:
        """The options in the form that ``_core.lower`` takes."""
        return {name: getattr(self, name) for name in ("numerics", "fuse", "merge", "realize", "overlap")}


def mode() -> str:
    """The value of ``ANTIPHON_LOWERING``, or an empty string.

    ``off`` disables the pass, ``log`` logs the report of each graph as a warning, ``strict`` raises an error if a proof fails.
    Any other value raises ``ValueError``."""
    found = os.environ.get("ANTIPHON_LOWERING", "")
    if found not in ("", "off", "log", "strict"):
        raise ValueError(f"ANTIPHON_LOWERING={found!r}: known are off, log, strict")
    return found
