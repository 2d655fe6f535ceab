"""No argument of the names of other packages is ignored in silence: what a function does not look at, its documentation names."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ["antiphon.moe.deep_ep", "antiphon.moe.fused_a2a"]


def trees(package: str) -> list[ast.Module]:
    file = inspect.getsourcefile(importlib.import_module(package))
    assert file is not None
    files = sorted(Path(file).parent.glob("*.py")) if file.endswith("__init__.py") else [Path(file)]
    return [ast.parse(file.read_text()) for file in files]


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Functions with their names, and their documentation with that of the class of a constructor."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node, ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    text = ast.get_docstring(inner) or ""
                    if inner.name == "__init__":
                        text += ast.get_docstring(node) or ""
                    yield f"{node.name}.{inner.name}", inner, text


def pairs(statement: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def kept(function: ast.FunctionDef) -> set[ast.expr]:
    """The places where an argument is only kept as the attribute of its name."""
    found: set[ast.expr] = set()
    for statement in ast.walk(function):
        for target, value in pairs(statement) if isinstance(statement, ast.Assign) else ():
            if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and target.attr == value.id:
                found.add(value)
    return found


def ignored(function: ast.FunctionDef, attributes: set[str]) -> list[str]:
    """The arguments that have no effect. ``attributes`` are those that some code reads."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    only_kept = kept(function)
    read = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and (node not in only_kept or node.id in attributes)
    }
    names = [argument.arg for argument in arguments]
    return [name for name in names if name not in read and name not in ("self", "cls") and not name.startswith("_")]


@pytest.mark.parametrize("package", PACKAGES)
def test_an_argument_without_effect_is_documented_as_such(package: str) -> None:
    modules = trees(package)
    attributes = {
        node.attr
        for module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    silent = [
        f"{name}: {argument}"
        for module in modules
        for name, function, text in functions(module)
        if not name.rpartition(".")[2].startswith("_") or name.endswith("__init__")
        if not name.endswith(".backward")  # which autograd calls, with the gradients of whatever the forward gave
        for argument in ignored(function, attributes)
        if f"``{argument}``" not in text
    ]
    assert not silent, "\n".join(silent)


def test_an_argument_that_is_only_kept_is_found() -> None:
    source = "def f(self, a, b, c, d):\n    self.a, self.b = a, b\n    self.c = c + 1\n"
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert ignored(function, {"b"}) == ["a", "d"]
