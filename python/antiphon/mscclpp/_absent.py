"""What MSCCL++ has and Antiphon has not: objects that can be imported and named, so that a script may go on without them."""

from typing import Any, NoReturn

__all__ = ["Absent"]


class Absent:
    """Stands for something that is not there. Whatever is done with it, except naming it, raises ``NotImplementedError`` that names it and
    what to use instead; nothing is an instance of it."""

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"Antiphon has no {self._name} of MSCCL++: {self._instead}")

    def __repr__(self) -> str:
        return f"<{self._name} of MSCCL++, which Antiphon has not>"

    def __call__(self, *_arguments: Any, **_options: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python and other libraries ask whether there is such a thing
            raise AttributeError(name)
        self._refuse()

    def __instancecheck__(self, _instance: object) -> bool:
        return False

    def __mro_entries__(self, _bases: tuple[object, ...]) -> NoReturn:
        self._refuse()
