"""The plan of the current program."""

from antiphon.language.internal.globals import get_program

__all__ = ["JSON", "get_program"]


def JSON() -> str:
    """The finished plan as text: :meth:`CollectiveProgram.to_json` of the current program."""
    return get_program().to_json()
