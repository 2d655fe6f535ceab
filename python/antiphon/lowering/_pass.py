"""The pass that inductor calls with each graph, forward or backward."""

import hashlib
import json
import logging
import os
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from antiphon import __version__, _core
from antiphon.lowering import _groups
from antiphon.lowering._apply import apply
from antiphon.lowering._export import export
from antiphon.lowering._inductor import CustomGraphPass
from antiphon.lowering._options import Options, mode
from antiphon.lowering._place import freeze, put_in_comm_buffers
from antiphon.torch import ops

__all__ = ["Pass", "Report", "reports", "spell"]

log = logging.getLogger("antiphon.lowering")


@dataclass(frozen=True)
class Report:
    """The rewrites of one graph."""

    #: The text that ``antiphon lower --report`` prints.
    text: str
    #: The names of the applied rules, in order.
    rules: tuple[str, ...]
    #: The number of calls before and after.
    calls: tuple[int, int]
    #: For each group the SHA-256 of its calls, in hexadecimal digits, which the ranks of the group compare.
    digests: dict[str, str]

    def __str__(self) -> str:
        return self.text


_reports: deque[Report] = deque(maxlen=1000)
_spellings: list[str] = []


def reports() -> list[Report]:
    """The reports of the last 1000 graphs that this process compiled, the latest one last. A graph that inductor took from its
    cache has no report."""
    return list(_reports)


def spell(operator: str, meaning: str, **roles: int) -> None:
    """Gives an operator a meaning, with the places of its arguments by their roles.

        spell("mine::all_reduce", "all_reduce", x=0, group=1)   # mine::all_reduce(Tensor x, str group) -> Tensor
        spell("mine::norm", "rms_norm", x=0, weight=1, eps=2)
        spell("mine::add", "binary add")

    ``operator`` is ``namespace::name`` or ``namespace.name.overload``. A collective is functional, and complete when it returns:
    ``all_reduce`` (``x``, ``group``, and perhaps ``op``), ``all_gather`` and ``reduce_scatter`` (with ``dim``, ``size``), ``broadcast``
    (with ``root``), ``all_to_all`` (with ``sends``, ``receives``). ``rms_norm`` rounds before its weight. Without roles a meaning is the
    words behind an operator in ``crates/lowering/src/torch/spellings.txt``. Raises ``ValueError`` for what is unknown there.
    """
    for role, place in roles.items():
        if not isinstance(place, int) or isinstance(place, bool) or place < 0:
            raise ValueError(f"spell: {role}={place!r}: the place of an argument")
    line = _core.spelled(operator, meaning, roles)
    if line not in _spellings:
        _spellings.append(line)


class Pass(CustomGraphPass):
    """The pass, for inductor's ``post_grad_custom_post_pass`` or for a framework's own slot.

    A call takes a ``torch.fx.Graph`` and changes it in place. ``before``, if given, is another pass that runs first.
    """

    def __init__(self, options: Options | None = None, before: Callable[[Graph], None] | None = None) -> None:
        if options is not None and not isinstance(options, Options):
            raise ValueError(f"Pass: options are an antiphon.lowering.Options, not {options!r}")
        self.options, self.before = options or Options(), before

    def __call__(self, graph: Graph) -> None:
        if self.before is not None:
            self.before(graph)
        if (asked := mode()) == "off":
            return
        names = _named_groups(graph)
        sizes, ours = _groups.sizes(names)
        if self.options.groups is not None:
            ours = [name for name in ours if name in self.options.groups]
        if not ours:
            return
        program: bytes | None = None
        try:
            program = export(graph, sizes, tuple(_spellings))
            edits = self._proved(graph, program, sizes, ours, asked)
        except Exception as error:
            if self.options.strict or asked == "strict":
                raise RuntimeError(f"antiphon.lowering: a graph is left as it was: {error}") from error
            where = "" if program is None else f" (it is in {_kept(program)})"
            warnings.warn(f"antiphon.lowering: a graph is left as it was: {error}{where}", stacklevel=2)
            return
        if edits is not None and edits(graph) != edits.proved:  # from here on the graph is changed
            raise RuntimeError("antiphon.lowering: the same edits gave two programs")

    def _proved(
        self, graph: Graph, program: bytes, sizes: dict[str, int], ours: list[str], asked: str
    ) -> "_Edits | None":
        """The edits of the graph, proved on a copy of it; nothing if there is nothing to change."""
        device = "h200" if any(_is_cuda(node) for node in graph.nodes) else "host"
        if device != "host" and self.options.realize == "always":
            raise ValueError("realize='always': comm buffers are for tensors on the host")
        request = {"world": {"device": device, "groups": ours}, "options": self.options.request()}
        lowering = _core.Lowering(program, json.dumps(request))
        answer = json.loads(lowering.answer())
        if findings := answer["report"]["findings"]:
            raise ValueError("; ".join(finding["text"] for finding in findings[:3]))
        report = Report(
            answer["text"],
            tuple(rewrite["rule"] for rewrite in answer["plan"]["rewrites"]),
            tuple(answer["report"]["calls"]),
            answer["digests"],
        )
        edits = None
        if answer["plan"]["rewrites"]:
            slots, freezes = answer["plan"]["slots"], self.options.overlap
            edits = _Edits(answer["edits"], slots, self._sites(answer), sizes, freezes)
            edits.proved = edits(_copied(graph))
            if found := _unproved(lowering, edits.proved):
                raise ValueError("; ".join(found[:3]))
            if self.options.strict or asked == "strict":
                agrees, text = lowering.second_opinion(edits.proved)
                if not agrees:
                    raise ValueError(f"{text} (the programs are in {_kept(program)} and {_kept(edits.proved)})")
                log.info("%s", text)
        _reports.append(report)
        log.log(logging.WARNING if asked == "log" else logging.INFO, "%s", report)
        return edits

    def _sites(self, answer: dict[str, Any]) -> dict[str, str]:
        """For each group the first part of its calls' sites: a hash of all that its ranks must agree on."""
        options = replace(self.options, groups=None)  # whose names may differ by rank
        ours, sites = f"{__version__} {torch.__version__} {options.key()} {sorted(_spellings)}", dict[str, str]()
        for group, digest in answer["digests"].items():
            sites[group] = hashlib.sha256(f"{digest} {ours}".encode()).hexdigest()[:16]
            calls = (call for call in answer["plan"]["calls"] if call["group"] == group)
            ops.describe(sites[group], [f"{call['op']} = {call['signature']}, {call['choice']}" for call in calls])
        return sites

    def uuid(self) -> Any:
        """The key of inductor's caches: everything that the result of the pass depends on.

        These are the versions, the options with the contents of their tables, the spellings, and the groups with their sizes. The
        built-in tables are a part of the package, and so of its version.
        """
        before = self.before.uuid() if isinstance(self.before, CustomGraphPass) else repr(self.before)
        ours = [__version__, torch.__version__, self.options.key(), sorted(_spellings), mode(), before]
        return json.dumps([*ours, _groups.all_sizes()], default=repr)


class _Edits:
    """What changes a graph."""

    #: The program that a graph becomes.
    proved: bytes = b""

    def __init__(self, edits: Any, slots: Any, sites: dict[str, str], sizes: dict[str, int], freezes: bool) -> None:
        self._edits, self._slots, self._sites, self._sizes, self._freezes = edits, slots, sites, sizes, freezes

    def __call__(self, graph: Graph) -> bytes:
        """Changes a graph, and returns the program that it has become."""
        apply(graph, self._edits, self._sites)
        put_in_comm_buffers(graph, self._slots, self._sites.values())
        if self._freezes:
            freeze(graph)
        return export(graph, self._sizes, tuple(_spellings))


def _unproved(lowering: _core.Lowering, program: bytes) -> list[str]:
    """Why a program is not shown to compute what the one before does."""
    return lowering.check(program)


def _copied(graph: Graph) -> Graph:
    copy, values = Graph(owning_module=graph.owning_module), dict[Node, Node]()
    for node in graph.nodes:
        new = copy.node_copy(node, lambda old: values[old])
        if new.name != node.name:
            new._rename(node.name)
        values[node] = new
    return copy


def _named_groups(graph: Graph) -> set[str]:
    """The strings among the arguments of collectives: names of groups, and others."""
    found: set[str] = set()
    communicating = ["c10d_functional", "antiphon.", "_dtensor.", "vllm.", *(line.split()[0] for line in _spellings)]
    for node in graph.nodes:
        if node.op == "call_function" and any(name in str(node.target) for name in communicating):
            found.update(argument for argument in node.args if isinstance(argument, str))
    return found


def _is_cuda(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_cuda


def _kept(program: bytes) -> str:
    """Writes the program to a file, and returns its path. ``antiphon lower FILE --from torch`` reads it."""
    handle, path = tempfile.mkstemp(prefix="antiphon-lowering-", suffix=".json")
    with os.fdopen(handle, "wb") as file:
        file.write(program)
    return path
