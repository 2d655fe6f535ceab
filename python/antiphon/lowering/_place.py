"""What a plan decides beyond the graph itself: operands in comm buffers, and an order that inductor keeps."""

import operator
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._ordered_set import OrderedSet
from torch.utils.flop_counter import flop_registry

from antiphon.lowering._export import COMM_BUFFER
from antiphon.lowering._inductor import preserve_node_ordering

__all__ = ["freeze", "put_in_comm_buffers", "storage"]


def put_in_comm_buffers(graph: Graph, slots: Iterable[Mapping[str, Any]], sites: Container[str]) -> None:
    """Copies the operands of our calls into the plan's slots.

    The copy is fused with what computes the operand, which so writes into the buffer. Only the call reads a buffer; other
    operations read the operand itself. A buffer takes the ticket of the call before, and the call takes the buffer's: whatever the
    order in which inductor runs the rest, no two calls use the arena at once.
    """
    by_value = {slot["value"]: slot for slot in slots}
    if not by_value:
        return
    arena_bytes: dict[str, int] = {}
    for each in by_value.values():
        arena_bytes[each["domain"]] = max(arena_bytes.get(each["domain"], 0), each["offset"] + each["bytes"])
    comm_buffer = torch.ops.antiphon._ordered_comm_buffer.default
    calls = [node for node in graph.nodes if node.op == "call_function" and _site(node).rpartition(":")[0] in sites]
    for call in calls:
        ticket, x = call.args[:2]
        slot = by_value.get(storage(x).name)
        if slot is None:
            continue
        value: Tensor = x.meta["val"]
        group = next(argument for argument in call.args[2:] if isinstance(argument, str))
        place = (group, [1, *value.shape], value.dtype, slot["offset"], arena_bytes[slot["domain"]], f"{_site(call)}, its buffer")
        with graph.inserting_before(call):
            shape = torch.ops.aten.sym_size.int
            sizes = [
                size if isinstance(size, int) else _with_value(graph.call_function(shape, (x, dim)), size)
                for dim, size in enumerate(value.shape)
            ]
            buffer = graph.call_function(comm_buffer, (ticket, group, [1, *sizes], *place[2:]))
            fake = comm_buffer(ticket.meta["val"], *place)
            buffer.meta |= {"val": fake, COMM_BUFFER: (slot["value"], slot["domain"])}
            after, memory = (_with_value(graph.call_function(operator.getitem, (buffer, at)), fake[at]) for at in range(2))
            # Inductor does not copy into a whole buffer, for which it takes the copied tensor instead, but into a view.
            view = _with_value(graph.call_function(torch.ops.aten.select.int, (memory, 0, 0)), fake[1][0])
            copy = _with_value(graph.call_function(torch.ops.aten.copy_.default, (view, x)), fake[1][0])
        call.args = (after, copy, *call.args[2:])


def _with_value(node: Node, value: Any) -> Node:
    node.meta["val"] = value
    return node


def _site(node: Node) -> str:
    """The last argument of our calls; an empty string for others."""
    last = node.args[-1] if node.args else ""
    return last if isinstance(last, str) else ""


def storage(node: Node) -> Node:
    """The node whose storage a view lies in; the node itself if it is no view."""
    while isinstance(node.target, torch._ops.OpOverload) and any(each.alias_info for each in node.target._schema.returns):
        node = node.args[0]  # type: ignore[assignment]
    return node


def freeze(graph: Graph) -> None:
    """Makes inductor keep matrix products between the starts and the waits that are around them.

    A product runs after the collectives that were started before it, and a wait after the products that come before it. Other
    operations stay free, so that inductor fuses them as before.
    """
    c10d = torch.ops._c10d_functional
    order: dict[Node, OrderedSet[Node]] = {}
    # For each collective in flight, the products since its start.
    flying: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is c10d.wait_tensor.default:
            if products := flying.pop(_start(node), []):
                order[node] = OrderedSet(products[-1:])
        elif str(node.target).startswith("_c10d_functional."):
            flying[node] = []
        elif flying and _is_product(node):
            order[node] = OrderedSet(_result(start) for start in flying)
            for products in flying.values():
                products.append(node)
    preserve_node_ordering(graph, order)


def _start(wait: Node) -> Node:
    """The collective that a wait is for; of several tensors, each has a wait."""
    start = wait.args[0]
    assert isinstance(start, Node)
    return start.args[0] if start.target is operator.getitem else start  # type: ignore[return-value]


def _result(start: Node) -> Node:
    """The first tensor of a collective."""
    return next((user for user in start.users if user.target is operator.getitem), start)


def _is_product(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in flop_registry
