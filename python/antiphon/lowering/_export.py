"""A graph of torch as JSON, which ``antiphon-lowering`` reads."""

import json
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import _side_effectful_functions

__all__ = ["export", "names_of"]


def export(graph: Graph, groups: Mapping[str, int], spellings: tuple[str, ...] = ()) -> bytes:
    """The graph, with the sizes of the groups that it names and operators that are spelled in other ways."""
    exporter = _Exporter()
    nodes = [found for node in graph.nodes if (found := exporter.node(node)) is not None]
    syms = [exporter.sym(name, symbol) for name, symbol in sorted(exporter.symbols.items())]
    listed = [{"name": name, "size": size} for name, size in sorted(groups.items())]
    file = {"syms": syms, "groups": listed, "spellings": list(spellings), "nodes": nodes}
    return json.dumps(file, separators=(",", ":")).encode()


def names_of(node: Node) -> list[str]:
    """The names of a node's tensors: its own, or those of the nodes that take several apart."""
    return [name for name, _ in _tensors(node)]


def _tensors(node: Node) -> Iterator[tuple[str, Tensor]]:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        yield node.name, value
    elif isinstance(value, (list, tuple)):
        yield from _parts(node, node.name, value)


def _parts(node: Node | None, name: str, values: Any) -> Iterator[tuple[str, Tensor]]:
    """Those of several, which may be several again."""
    users = () if node is None else node.users
    taken = {user.args[1]: user for user in users if user.target is operator.getitem}
    for index, value in enumerate(values):
        part = taken.get(index)
        own = f"{name}.{index}" if part is None else part.name
        if isinstance(value, Tensor):
            yield own, value
        elif isinstance(value, (list, tuple)):
            yield from _parts(part, own, value)


def _plain(node: Node) -> tuple[str, tuple[Any, ...]]:
    """An operator and its arguments by place; one that is made functional has its name in the other's."""
    if node.target is torch.ops.higher_order.auto_functionalized:
        return f"auto_functionalized({node.args[0]})", node.args[1:]
    return str(node.target), node.args


def _takes_apart(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], Node)


class _Exporter:
    def __init__(self) -> None:
        self.symbols: dict[str, Any] = {}

    def node(self, node: Node) -> dict[str, Any] | None:
        if _takes_apart(node):
            return None
        found: dict[str, Any] = {"name": node.name, "op": node.op}
        if node.op == "output":
            found["args"] = [self.argument(node.args[0])]
            return found
        found["outs"] = [{"name": name, **self.type(value)} for name, value in _tensors(node)]
        if node.op != "call_function":
            return found
        operator, arguments = _plain(node)
        found["target"] = operator
        found["args"] = [self.argument(argument) for argument in arguments]
        if node.kwargs:
            found["kwargs"] = {name: self.argument(argument) for name, argument in sorted(node.kwargs.items())}
        if isinstance(node.target, torch._ops.OpOverload):
            self.effects(node, node.target, found)
        else:
            # A size, or an operator that runs a program: nobody knows what that does.
            found["effect"] = bool(found["outs"]) or isinstance(node.target, torch._ops.HigherOrderOperator)
        return found

    def effects(self, node: Node, target: torch._ops.OpOverload, found: dict[str, Any]) -> None:
        schema = target._schema
        if not schema.is_mutable and not any(result.alias_info for result in schema.returns):
            random = torch.Tag.nondeterministic_seeded in target.tags
            found["effect"] = random or target in _side_effectful_functions
            return
        places: dict[str, list[int]] = {}
        written: dict[str, bool] = {}
        count = 0
        given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
        in_order = [argument for argument in schema.arguments if argument.name not in node.kwargs]
        in_order += sorted((argument for argument in schema.arguments if argument.name in node.kwargs), key=lambda each: each.name)
        for argument in in_order:
            tensors = _count(given.get(argument.name))
            if argument.alias_info is not None:
                for name in argument.alias_info.before_set:
                    places.setdefault(name, []).extend(range(count, count + tensors))
                    written[name] = written.get(name, False) or argument.alias_info.is_write
            count += tensors
        aliases: list[dict[str, Any] | None] = []
        returned = set()
        for result in schema.returns:
            names = [] if result.alias_info is None else sorted(result.alias_info.before_set)
            place = next((places[name][0] for name in names if places.get(name)), None)
            aliases.append(None if place is None else {"arg": place, "writes": any(written[name] for name in names)})
            returned.update(names)
        # Of a list of results, each may lie in the operand.
        found["aliases"] = (aliases * max(1, len(found["outs"])))[: len(found["outs"])] if len(aliases) == 1 else aliases
        found["writes"] = [place for name, all in places.items() if written[name] and name not in returned for place in all]
        found["effect"] = schema.is_mutable

    def type(self, value: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": [self.size(size) for size in value.shape]}
        if value.layout is torch.strided:
            if not value.is_contiguous():
                found["strides"] = [self.size(stride) for stride in value.stride()]
            if (offset := self.size(value.storage_offset())) != 0:
                found["offset"] = offset
        return found

    def size(self, size: int | torch.SymInt) -> int | str:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        for symbol in expression.free_symbols:
            self.symbols[str(symbol)] = (symbol, size.node.shape_env)
        return int(expression) if expression.is_integer and expression.is_number else str(expression)

    def sym(self, name: str, found: tuple[Any, Any]) -> dict[str, Any]:
        symbol, environment = found
        result: dict[str, Any] = {"name": name}
        bounds = environment.var_to_range.get(symbol)
        if bounds is not None:
            result["min"] = max(0, int(bounds.lower)) if bounds.lower.is_Integer else 0
            if bounds.upper.is_Integer and int(bounds.upper) < 2**48:
                result["max"] = int(bounds.upper)
        hints = getattr(environment, "backed_var_to_val", None) or getattr(environment, "var_to_val", {})
        if symbol in hints:
            result["hint"] = int(hints[symbol])
        return result

    def argument(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            value = argument.meta.get("val")
            if isinstance(value, Tensor):
                return {"value": argument.name}
            if isinstance(value, (torch.SymInt, int)):
                return {"sym": str(self.size(value))}
            if isinstance(value, (list, tuple)):
                return [{"value": name} for name in names_of(argument)]
            return {"node": argument.name}
        if isinstance(argument, (list, tuple)):
            return [self.argument(each) for each in argument]
        if isinstance(argument, dict):
            return {"table": [[str(key), self.argument(each)] for key, each in argument.items()]}
        if isinstance(argument, torch.SymInt):
            return {"sym": str(self.size(argument))}
        if isinstance(argument, torch.dtype):
            return {"dtype": str(argument).removeprefix("torch.")}
        if isinstance(argument, float) and not math.isfinite(argument):
            return {"number": str(argument)}
        return argument if argument is None or isinstance(argument, (bool, int, float, str)) else {"other": str(argument)}


def _count(argument: Any) -> int:
    """The tensors in an argument, as the importer counts them."""
    if isinstance(argument, Node):
        value = argument.meta.get("val")
        return 1 if isinstance(value, Tensor) else len(names_of(argument)) if isinstance(value, (list, tuple)) else 0
    return sum(map(_count, argument)) if isinstance(argument, (list, tuple)) else 0
