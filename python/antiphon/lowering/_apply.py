"""Applies the edits of a plan to a graph."""

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node

from antiphon.lowering._groups import sizes

__all__ = ["apply"]


def apply(graph: Graph, edits: Mapping[str, Any], sites: Mapping[str, str]) -> None:
    """Applies the edits that ``_core.Lowering`` returned. The site of each new call is that of its group in ``sites``, and the
    call's number among those of the group.

    Raises ``NotImplementedError`` for an operation for which torch has no operator.
    """
    _Editor(graph, sites).run(edits)


class _Editor:
    def __init__(self, graph: Graph, sites: Mapping[str, str]) -> None:
        self.graph, self.sites = graph, sites
        self.nodes: dict[str, Node] = {node.name: node for node in graph.nodes}
        first_waits: dict[Node, Node] = {}
        for node in graph.nodes:
            if node.target is torch.ops._c10d_functional.wait_tensor.default:
                # A second wait takes what the first one gives, which an edit may replace.
                started = node.args[0]
                if (first := first_waits.setdefault(started, node)) is not node:
                    node.replace_input_with(started, first)
        self.output = next(node for node in reversed(graph.nodes) if node.op == "output")
        self.made: dict[str, Node] = {}
        self.ticket: Node | None = None
        self.calls = Counter[str]()

    def run(self, edits: Mapping[str, Any]) -> None:
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        with self.graph.inserting_before(self.output):
            for op in edits["new"]:
                self.create(op)
        for name, old, new in edits["inputs"]:
            # The rules may divide an operator into several operations, `NODE/PART`.
            self.nodes[name.partition("/")[0]].replace_input_with(self.nodes[old], self.value(new))
        for old, new in edits["outputs"]:
            self.output.replace_input_with(self.nodes[old], self.value(new))
        self.sort(placeholders, edits["order"])
        for node in reversed(list(self.graph.nodes)):
            if node.name in edits["removed"] or (node.target is operator.getitem and not node.users):
                if not node.users:
                    self.graph.erase_node(node)

    def value(self, name: str) -> Node:
        return self.made.get(name) or self.nodes[name]

    def sort(self, placeholders: list[Node], order: list[str]) -> None:
        done: dict[Node, None] = dict.fromkeys(placeholders)

        def visit(node: Node) -> None:
            if node not in done:
                for before in node.all_input_nodes:
                    visit(before)
                done[node] = None

        for name in order:
            if (node := self.made.get(f"{name}!") or self.nodes.get(name)) is not None:
                visit(node)
        for node in self.graph.nodes:
            if node is not self.output:
                visit(node)
        for node in done:
            self.output.prepend(node)

    def create(self, op: Mapping[str, Any]) -> None:
        kind, do, args = op["do"]["kind"], op["do"], [self.value(name) for name in op["args"]]
        c10d, aten = torch.ops._c10d_functional, torch.ops.aten
        make: Callable[..., Any] = lambda target, *arguments: self.node(op["name"], target, arguments)
        if kind == "fused":
            self.call(op, torch.ops.antiphon._ordered_all_reduce_fused.default, args[0], _fused(do, args), nested=True)
            return
        if kind == "sync":
            name, arguments = _sync(do)
            self.call(op, getattr(torch.ops.antiphon, f"_ordered_{name}").default, args[0], arguments, nested=False)
            return
        if kind == "start" and len(args) > 1:
            self.bucket(op, do, args)
            return
        if kind == "wait" and len(args) > 1:
            for out, arg in zip(op["outs"], args, strict=True):
                node = self.made[out["name"]] = self.node(out["name"], c10d.wait_tensor.default, (arg,))
                self.made.setdefault(f"{op['name']}!", node)
            return
        if kind == "start" and do["prim"] == "all_reduce":
            node = make(c10d.all_reduce.default, args[0], do["red"], do["group"])
        elif kind == "wait":
            node = make(c10d.wait_tensor.default, args[0])
        elif kind == "binary" and do["op"] == "add" and len(args) == 2:
            node = make(aten.add.Tensor, *args)
        elif kind == "copy":
            node = make(aten.clone.default, args[0])
        elif kind == "view":
            node = make(aten.reshape.default, args[0], _sizes(op["outs"][0]["shape"]))
        else:
            raise NotImplementedError(f"{op['name']}: there is no operator for {do}")
        self.made[op["outs"][0]["name"]] = self.made[f"{op['name']}!"] = node

    def bucket(self, op: Mapping[str, Any], do: Mapping[str, Any], args: list[Node]) -> None:
        """Creates a collective of several tensors: torch's coalesced one."""
        c10d, prim, group = torch.ops._c10d_functional, do["prim"], do["group"]
        if prim == "all_reduce":
            node = self.node(op["name"], c10d.all_reduce_coalesced.default, (args, do["red"], group))
        else:
            size = sizes({group})[0][group]
            several = {
                "all_gather": (c10d.all_gather_into_tensor_coalesced, (args, size, group)),
                "reduce_scatter": (c10d.reduce_scatter_tensor_coalesced, (args, do.get("red"), size, group)),
            }
            operator_, arguments = several[prim]
            node = self.node(op["name"], operator_.default, arguments)
        self.made[f"{op['name']}!"] = node
        for index, out in enumerate(op["outs"]):
            self.made[out["name"]] = self.node(out["name"], operator.getitem, (node, index))

    def call(self, op: Mapping[str, Any], target: Any, x: Node, arguments: list[Any], nested: bool) -> None:
        """Creates one of our calls, which takes the ticket of the call before it."""
        if self.ticket is None:
            self.ticket = self.node("antiphon_ticket", torch.ops.aten.new_empty.default, (x, [0]))
        group = op["do"]["group"]
        site = f"{self.sites[group]}:{self.calls[group]}"
        self.calls[group] += 1
        node = self.node(op["name"], target, (self.ticket, x, *arguments, site))
        self.made[f"{op['name']}!"] = node
        self.ticket = self.node(f"{op['name']}_ticket", operator.getitem, (node, 0))
        results = self.node(f"{op['name']}_results", operator.getitem, (node, 1)) if nested else node
        for index, out in enumerate(op["outs"]):
            self.made[out["name"]] = self.node(out["name"], operator.getitem, (results, index if nested else index + 1))

    def node(self, name: str, target: Any, arguments: tuple[Any, ...]) -> Node:
        node = self.graph.create_node("call_function", target, arguments, {}, name=name)
        if node.name != name:
            raise NotImplementedError(f"the name {name} is taken")
        values = torch.fx.map_arg(arguments, lambda argument: argument.meta["val"])
        mode = detect_fake_mode([value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, Tensor)])
        if mode is None:
            node.meta["val"] = target(*values)
        else:
            with mode:
                node.meta["val"] = target(*values)
        return node


def _sync(do: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The name of the operator of a synchronous collective, and its arguments after the tensor."""
    prim, group = do["prim"], do["group"]
    if prim == "all_to_all" and "sends" in do:
        return "all_to_all_v", [_known(do["sends"]), _known(do["receives"]), group]
    if prim == "shard_dim_all_to_all":
        return prim, [*do["dims"], group]
    return prim, [group, *(do[name] for name in ("root", "red") if name in do)]


def _known(rows: list[int | str]) -> list[int]:
    if any(isinstance(count, str) for count in rows):
        raise NotImplementedError(f"an exchange of {rows} rows, which are not all constants")
    return [int(count) for count in rows]


def _fused(do: Mapping[str, Any], args: list[Node]) -> list[Any]:
    """The arguments of a fused call after the tensor."""
    given = dict(zip(do["args"], args[1:], strict=True))
    quantize = do.get("quantize", "fp8")
    name, group = ("fp8-groups", quantize["fp8_groups"]) if isinstance(quantize, dict) else (quantize.replace("_", "-"), 128)
    return [
        do["group"],
        list(do["outputs"]),
        given.get("residual"),
        given.get("weight"),
        float(do.get("eps") or 0.0),
        float(do.get("weight_bias", 0.0)),
        bool(do.get("round_before_weight", False)),
        name,
        given.get("scale"),
        float(do.get("scale") or 1.0),
        group,
    ]


def _sizes(shape: list[int | str]) -> list[int]:
    """The argument of a reshape, in which -1 stands for the only symbolic size."""
    if sum(isinstance(size, str) for size in shape) > 1:
        raise NotImplementedError(f"a reshape to {shape}, which has more than one symbolic size")
    return [-1 if isinstance(size, str) else size for size in shape]

