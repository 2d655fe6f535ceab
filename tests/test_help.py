"""What ``help`` and ``?`` show: the text of the stub, which is what editors show."""

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import antiphon
import pytest

#: Python has texts of its own for these.
OPERATORS = ("__len__", "__getitem__")
STUB = Path(antiphon.__file__).with_name("_core.pyi")


def documented() -> dict[str, str]:
    """The names with a docstring: classes, functions, and members as ``Class.member``."""
    found: dict[str, str] = {}

    def take(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text is not None:
                    found.setdefault(prefix + node.name, text)
                if isinstance(node, ast.ClassDef):
                    take(node.body, f"{node.name}.")

    take(ast.parse(STUB.read_text()).body, "")
    return found


@pytest.mark.parametrize("name", [name for name in documented() if not name.endswith(OPERATORS)])
def test_help_is_the_stubs(name: str) -> None:
    thing: Any = importlib.import_module("antiphon._core")
    for part in name.split("."):
        thing = getattr(thing, part)
    assert inspect.getdoc(thing) == documented()[name]


def test_every_call_of_a_communicator_has_help() -> None:
    calls = [name for name in dir(antiphon.Communicator) if not name.startswith("_")]
    internal = {"at_path", "by_exchange"}  # which antiphon.init explains
    assert [name for name in calls if not inspect.getdoc(getattr(antiphon.Communicator, name)) and name not in internal] == []
    assert "sum" in (inspect.getdoc(antiphon.Communicator.all_reduce) or "")
