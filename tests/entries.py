"""How often calls enter the compiled module."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def entries_of(*classes: type) -> Iterator[list[str]]:
    """The methods that are called, and the attributes that are read or set, of these classes of the compiled module."""
    entered: list[str] = []
    kept = [(each, name, member) for each in classes for name, member in vars(each).items() if not name.startswith("__")]
    for each, name, member in kept:
        counted = _counted(f"{each.__name__}.{name}", member, entered)
        if counted is not None:
            setattr(each, name, counted)
    try:
        yield entered
    finally:
        for each, name, member in kept:
            setattr(each, name, member)


def _counted(name: str, member: Any, entered: list[str]) -> Any:
    """A member that counts its uses, or nothing for a constant."""

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            entered.append(name)
            return call(*arguments, **named)

        return counted

    kind = type(member).__name__
    if kind == "staticmethod":
        return staticmethod(counting(member.__func__))
    if kind == "method_descriptor":
        return counting(member)
    return property(counting(member.__get__), counting(member.__set__)) if kind == "getset_descriptor" else None
