"""What a user asks for."""

import os
from dataclasses import dataclass, fields
from typing import Any, Literal

__all__ = ["Options", "mode"]


@dataclass(frozen=True)
class Options:
    """What is done to a program. Raises ``ValueError`` for a value that there is not.

    ================ ==========================================================================================
    ``numerics``     ``"close"``: roundings may be dropped, and the report says by how much results may differ;
                     ``"same"``: every rounding stays where it was, and only the order of a row's sum is free
    ``fuse``         sums with the residual, norm and quantisation behind them
    ``merge``        sums of sums
    ``realize``      ``"measured"``: operands lie in symmetric memory where that was measured to be faster, which on the host
                     saves a copy; ``"always"``: wherever possible; ``"never"``. On GPUs it was never faster, and
                     ``"always"`` is refused
    ``overlap``      starts early, waits late
    ``groups``       names of the groups whose calls may be changed; all that are attached unless given
    ``strict``       what cannot be proved raises ``RuntimeError`` instead of being left as it was
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
                raise ValueError(f"groups={self.groups!r}: the names of groups")
            object.__setattr__(self, "groups", tuple(self.groups))

    @classmethod
    def split(cls, given: dict[str, Any]) -> tuple["Options", dict[str, Any]]:
        """The options among what ``torch.compile`` was given, and the rest, which is inductor's."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in names}), {
            name: value for name, value in given.items() if name not in names
        }

    def request(self) -> dict[str, Any]:
        """As ``_core.lower`` takes it."""
        return {name: getattr(self, name) for name in ("numerics", "fuse", "merge", "realize", "overlap")}


def mode() -> str:
    """``ANTIPHON_LOWERING``: ``off`` changes nothing, ``log`` tells of every program, ``strict`` raises where something
    cannot be proved; empty unless set. Raises ``ValueError`` for anything else."""
    found = os.environ.get("ANTIPHON_LOWERING", "")
    if found not in ("", "off", "log", "strict"):
        raise ValueError(f"ANTIPHON_LOWERING={found!r}: known are off, log, strict")
    return found
