"""Writes a graph of torch as the JSON that the crate ``antiphon-lowering`` reads."""

import functools
import gc
import json
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import _side_effectful_functions, map_arg

from antiphon.lowering._inductor import control_deps

__all__ = ["COMM_BUFFER", "export", "names_of"]


def export(graph: Graph, groups: Mapping[str, int], spellings: tuple[str, ...] = ()) -> bytes:
    """The graph as ``_core.Lowering`` takes it, with the sizes of the groups that it names, and with the meanings of operators that
    :func:`antiphon.lowering.spell` taught.

    A copy into a comm buffer is exported as the copied tensor, which then asks for symmetric memory. What ``control_deps`` wraps is
    exported as itself.
    """
    exporter = _Exporter(_comm_buffers(graph))
    # Nothing here becomes garbage, and to look for it at every 10,000 dicts would take half of the time of a large graph.
    collects = gc.isenabled()
    gc.disable()
    try:
        nodes = [found for node in graph.nodes if (found := exporter.node(node)) is not None]
    finally:
        if collects:
            gc.enable()
    syms = [exporter.sym(name, symbol) for name, symbol in sorted(exporter.symbols.items())]
    listed = [{"name": name, "size": size} for name, size in sorted(groups.items())]
    file = {"syms": syms, "groups": listed, "spellings": list(spellings), "comm": exporter.buffers.requests, "nodes": nodes}
    return json.dumps(file, separators=(",", ":"), check_circular=False).encode()


def names_of(node: Node) -> list[str]:
    """The names of a node's tensors: its own, or those of the nodes that take several apart."""
    return [name for name, _ in _tensors(node)]


def _tensors(node: Node) -> list[tuple[str, Tensor]]:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [(node.name, value)]
    return list(_parts(node, node.name, value)) if isinstance(value, (list, tuple)) else []


def _parts(node: Node | None, name: str, values: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a list, whose elements may be lists."""
    users = () if node is None else node.users
    taken = {user.args[1]: user for user in users if user.target is operator.getitem}
    for index, value in enumerate(values):
        part = taken.get(index)
        own = f"{name}.{index}" if part is None else part.name
        if isinstance(value, Tensor):
            yield own, value
        elif isinstance(value, (list, tuple)):
            yield from _parts(part, own, value)


def _wrapped(node: Node) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """The operator and the arguments of a call that is wrapped to order it after others."""
    module = getattr(node.graph.owning_module, str(node.args[1].target))  # type: ignore[union-attr]
    inner = next(each for each in module.graph.nodes if each.op == "call_function")
    operands = dict(zip(module.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
    args, kwargs = map_arg((inner.args, inner.kwargs), lambda each: operands[each])
    return inner.target, args, kwargs


class _Buffers(NamedTuple):
    """The comm buffers of a graph."""

    #: For each copy into a buffer, the tensor that it copies.
    copies: dict[Node, Node]
    #: Nodes that make buffers.
    hidden: set[Node]
    #: For each tensor that asks for symmetric memory, what communication needs of it.
    requests: dict[str, dict[str, Any]]


def _comm_buffers(graph: Graph) -> _Buffers:
    found = _Buffers({}, set(), {})
    for node in graph.find_nodes(op="call_function", target=torch.ops.antiphon._ordered_comm_buffer.default):
        value, domain = node.meta[COMM_BUFFER]
        request = found.requests.setdefault(value, {"domain": domain, "groups": [], "roles": "in"})
        request["groups"] = sorted({*request["groups"], node.args[1]})
        memory = next(user for user in node.users if user.args[1] == 1)
        (view,) = memory.users
        found.hidden.update((node, view))
        for copy in view.users:
            source = copy.args[1]
            assert isinstance(source, Node)
            found.copies[copy] = source
    return found


#: The key of a comm buffer's node in ``meta``: the name of the tensor whose storage it is, and its heap.
COMM_BUFFER = "antiphon_comm_buffer"


class _Operator(NamedTuple):
    """An operator, which graphs call often."""

    name: str
    #: Whether its results alias arguments, or it writes arguments.
    aliases: bool
    effect: bool


@functools.cache
def _operator(target: torch._ops.OpOverload) -> _Operator:
    schema = target._schema
    aliases = schema.is_mutable or any(result.alias_info for result in schema.returns)
    random = torch.Tag.nondeterministic_seeded in target.tags
    effect = schema.is_mutable if aliases else random or target in _side_effectful_functions
    return _Operator(str(target), aliases, effect)


def _takes_apart(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], Node)


class _Exporter:
    def __init__(self, buffers: _Buffers) -> None:
        self.buffers = buffers
        self.hidden = buffers.hidden | buffers.copies.keys()
        self.symbols: dict[str, Any] = {}
        #: What the file says of types whose sizes are all known.
        self.types: dict[Any, dict[str, Any]] = {}

    def node(self, node: Node) -> dict[str, Any] | None:
        if _takes_apart(node) or node in self.hidden:
            return None
        found: dict[str, Any] = {"name": node.name, "op": node.op}
        if node.op == "output":
            found["args"] = [self.argument(node.args[0])]
            return found
        found["outs"] = [{"name": name, **self.type(value)} for name, value in _tensors(node)]
        if node.op != "call_function":
            # A module has no tensors, and sizes are told with the tensors that have them.
            return found if found["outs"] else None
        target, args, kwargs = (node.target, node.args, node.kwargs) if node.target is not control_deps else _wrapped(node)
        if isinstance(target, torch._ops.OpOverload):
            known = _operator(target)
            if not (found["outs"] or known.effect or known.aliases):
                return None  # a size, which is told with the tensors that have it
            found["target"], found["effect"] = known.name, known.effect
            if known.aliases:
                self.aliases(target._schema, args, kwargs, found)
        elif target is torch.ops.higher_order.auto_functionalized:
            # The operator that is made functional is an argument.
            found["target"], args, found["effect"] = f"auto_functionalized({args[0]})", args[1:], True
        else:
            # A size, or an operator that runs a program, whose effects are not known.
            found["target"] = str(target)
            found["effect"] = bool(found["outs"]) or isinstance(target, torch._ops.HigherOrderOperator)
        found["args"] = [self.argument(argument) for argument in args]
        if kwargs:
            found["kwargs"] = {name: self.argument(argument) for name, argument in sorted(kwargs.items())}
        return found

    def aliases(self, schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: dict[str, Any]) -> None:
        """Which results lie in the memory of which operands, and which operands are written."""
        places: dict[str, list[int]] = {}
        written: dict[str, bool] = {}
        count = 0
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
        in_order = [argument for argument in schema.arguments if argument.name not in kwargs]
        in_order += sorted((argument for argument in schema.arguments if argument.name in kwargs), key=lambda each: each.name)
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
        # Each tensor of a list of results may lie in the operand.
        found["aliases"] = (aliases * max(1, len(found["outs"])))[: len(found["outs"])] if len(aliases) == 1 else aliases
        found["writes"] = [place for name, all in places.items() if written[name] and name not in returned for place in all]

    def type(self, value: Tensor) -> dict[str, Any]:
        if value.layout is not torch.strided:
            return self.new_type(value)
        key = (value.dtype, value.shape, value.stride(), value.storage_offset())
        try:
            found = self.types.get(key)
        except TypeError:  # symbols have no hashes
            return self.new_type(value)
        if found is None:
            found = self.types[key] = self.new_type(value)
        return found

    def new_type(self, value: Tensor) -> dict[str, Any]:
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
        if argument is None or type(argument) in (bool, int, str):
            return argument
        if isinstance(argument, Node):
            if self.buffers.copies:
                argument = self.buffers.copies.get(argument, argument)
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
        return argument if isinstance(argument, (bool, int, float, str)) else {"other": str(argument)}


def _count(argument: Any) -> int:
    """The tensors in an argument, as the importer counts them."""
    if isinstance(argument, Node):
        value = argument.meta.get("val")
        return 1 if isinstance(value, Tensor) else len(names_of(argument)) if isinstance(value, (list, tuple)) else 0
    return sum(map(_count, argument)) if isinstance(argument, (list, tuple)) else 0
