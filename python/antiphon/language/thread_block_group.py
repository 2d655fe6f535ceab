"""Thread blocks that do operations together."""

from antiphon._core import ThreadBlockGroup

__all__ = ["ThreadBlockGroup"]
