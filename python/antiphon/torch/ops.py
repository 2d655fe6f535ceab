"""Collectives as operators of torch, for ``torch.compile``, ``torch.export`` and whatever else traces.

    import antiphon.torch

    group = antiphon.torch.ops.register(comm)       # a name for the communicator

    @torch.compile(fullgraph=True)
    def layer(x, weight):
        return torch.ops.antiphon.all_reduce(x @ weight, group)

A compiled program holds the name, so that a name must mean the same group later on. The name of a ``torch.distributed``
group of the backend ``"antiphon"`` does as well: such calls take their turn among the group's own, on whatever stream.

``all_reduce_(Tensor(a!) x, str group, str op="sum", *) -> ()`` reduces in place, and ``broadcast_(Tensor(a!) x, str group, int
root=0, *) -> ()`` puts the root's there. The others return a new tensor:

    all_reduce(Tensor x, str group, str op="sum", *)                    like ``x``
    all_gather(Tensor x, str group, *)                                  ``(n, ...)`` to ``(world_size * n, ...)``
    all_gather_v(Tensor x, SymInt[] counts, str group, *)               ``(counts[rank], ...)`` to ``(sum(counts), ...)``
    reduce_scatter(Tensor x, str group, str op="sum", *)                ``(world_size * n, ...)`` to ``(n, ...)``
    all_to_all(Tensor x, str group, *)                                  like ``x``
    broadcast(Tensor x, str group, int root=0, *)                       like ``x``, of which the root's is sent
    scatter(Tensor x, str group, int root=0, *)                         ``(world_size * n, ...)``, the root's, to ``(n, ...)``
    all_to_all_v(Tensor x, SymInt[] sends, SymInt[] receives, str group, *)
    shard_dim_all_to_all(Tensor x, int gather_dim, int shard_dim, str group, *)     gathered along one dimension, sharded along
                                                                        another

``reduce``, ``gather`` and ``reduce_scatter_v`` are methods of the communicator alone: the shapes of their results depend on the rank,
which a compiler's cache does not know.

``all_reduce_rms_norm(Tensor x, str group, Tensor? residual=None, Tensor? weight=None, float eps=1e-6, float weight_bias=0.,
Tensor? bias=None, *) -> (Tensor, Tensor)`` returns the norm, and its input: the sum with ``bias`` and ``residual``.

``all_reduce_fused(Tensor x, str group, str[] outputs, Tensor? residual=None, Tensor? weight=None, float eps=1e-6, float
weight_bias=0., bool round_before_weight=False, str quantize="fp8", Tensor? scale=None, float scale_value=1., int group_size=128,
*) -> Tensor[]`` returns the ``outputs`` that are asked for, in their order:

    "sum", "residual", "norm"       like ``x``
    "inverse_rms"                   float32 ``(..., 1)``: one over the root mean square, which the norm's gradient needs
    "codes"                         E4M3 like ``x``: the norm over its scales, by ``quantize``
    "scales"                        float32 ``(..., 1)`` of ``"fp8-tokens"``, ``(..., hidden / group_size)`` of ``"fp8-groups"``;
                                    ``"fp8"`` has ``scale``, or ``scale_value`` without

``*`` is ``str site=""``: the compiled program and the place in it that a call comes from, ``"DIGEST:INDEX"``, which
:mod:`antiphon.lowering` sets. The ranks compare a digest when they first meet it, and all get ``RuntimeError`` if they differ.

They are the methods of :class:`antiphon.Communicator`, on host and CUDA tensors, with contiguous results; an ``x`` that
is not contiguous is copied. Gradients flow through those that return a tensor, as ``torch.distributed.nn`` defines them: the gradient is
that of the sum of all ranks' losses. They are those of ``"sum"`` and ``"avg"``; other reductions raise ``NotImplementedError`` in the
backward pass. The operators in place, and the fused ones, track no gradient, and raise ``ValueError`` for a tensor that requires grad
unless grad mode is off. A compiler keeps a call whose result is unused, because the other
ranks wait for it, and keeps the order of the calls, those of :mod:`antiphon.comm` among them. It does not know that order for
``torch.distributed``'s own operators: a program that compiles those too gives them another group.
"""

import inspect
import itertools
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

import antiphon
from antiphon._core import operations
from antiphon._operators import Operators
from antiphon._types import Op, Quantize
from antiphon.torch._gradients import differentiate
from antiphon.torch.comm_buffers import comm_buffer, is_comm_buffer
from antiphon.torch.group import Group

__all__ = ["register"]

_groups: WeakValueDictionary[str, antiphon.Communicator] = WeakValueDictionary()
_numbers = itertools.count()


def register(comm: antiphon.Communicator, name: str | None = None) -> str:
    """Makes a name for a communicator, which lasts as long as that does, and returns it.

    Unless given it is ``antiphon-`` and a number: equal on all ranks if all register in the same order. Raises
    ``ValueError`` for a name that another communicator has.
    """
    if name is None:
        name = f"antiphon-{next(_numbers)}"
    if _groups.setdefault(name, comm) is not comm:
        raise ValueError(f"register: {name!r} is the name of {_groups[name]}")
    return name


def forget(comm: antiphon.Communicator) -> None:
    """Takes all names of a communicator back."""
    for name in [name for name, found in _groups.items() if found is comm]:
        del _groups[name]


def _group(name: str) -> antiphon.Communicator | Group:
    """What has this name: looked up each time, as a group may be destroyed and another one get its name."""
    found = _groups.get(name)
    if found is not None:
        return found
    try:
        group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    except (RuntimeError, ValueError, LookupError):
        group = None
    if not isinstance(group, Group):
        raise ValueError(f"there is no group {name!r} of antiphon: register a communicator, which must not be dropped")
    return group


def named_world_size(name: str) -> int:
    """How many ranks the group of this name has."""
    group = _group(name)
    return group.size() if isinstance(group, Group) else group.world_size


def named_communicator(name: str, x: Tensor) -> antiphon.Communicator:
    """The communicator for a call on ``x``, which comes after those of the process group, if it is one's."""
    group = _group(name)
    return group.enter(x) if isinstance(group, Group) else group


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _Operation:
    """An operation of the table, as an operator."""

    def __init__(self, name: str, input: str, output: str, reduces: bool, root: str | None) -> None:
        self.name, self.output = name, output
        #: Whether ranks get results of different shapes from equal arguments. A compiler's cache does not know of ranks, and would
        #: give a rank the program of another one.
        self.depends_on_rank = root == "gets" or output == "part"
        #: Whether the input has a block for each rank, of which one comes out.
        self._divides = (input, output) == ("row", "block")
        self._multiplies = (input, output) == ("block", "row")
        lists = ["sends", "receives"] if (input, output) == ("parts", "parts") else ["counts"]
        self._lists = lists if "parts" in (input, output) else []
        self._names = [*self._lists, "group", *(["root"] if root else []), *(["op"] if reduces else []), "site"]
        types = {"group": "str group", "root": "int root=0", "op": 'str op="sum"', "site": 'str site=""'}
        arguments = ", ".join(types.get(name, f"SymInt[] {name}") for name in self._names)
        self.schema = f"{name}(Tensor x, {arguments}) -> Tensor"

    def empty(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """A result without values."""
        given = {"root": 0, **dict(zip(self._names, arguments)), **named}
        return self._empty(x, given, _group(given["group"]))

    def call(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """The method of the communicator."""
        given = {"root": 0, **dict(zip(self._names, arguments)), **named}
        comm = _at(given.pop("site", ""), given.pop("group"), x)
        out = self._empty(x, given, comm)
        if "root" not in self._names:
            del given["root"]
        if self.name == "all_reduce" and is_comm_buffer(comm, x):
            # Only this call reads a comm buffer. The ranks reduce in place, where the result needs no staging either.
            comm.all_reduce(x, out=x, **given)
            return out.copy_(x)
        getattr(comm, self.name)(x.contiguous(), out=out, **given)
        return out

    def _empty(self, x: Tensor, given: dict[str, Any], group: antiphon.Communicator | Group) -> Tensor:
        size = _size(group)
        rows = x.shape[0] if x.dim() else 1
        if self.output == "parts":
            rows = sum(given[self._lists[-1]])
        elif self._divides:
            if rows % size:
                raise ValueError(f"{self.name}: {rows} rows cannot be divided among {size} ranks")
            rows //= size
        elif self._multiplies:
            rows *= size
        else:
            return _like(x)
        return x.new_empty((rows, *x.shape[1:]))


def _all_reduce_in_place(x: Tensor, group: str, op: Op = "sum", site: str = "") -> None:
    plain = x.contiguous()
    _at(site, group, plain).all_reduce(plain, op, out=plain)
    if plain is not x:
        x.copy_(plain)


def _broadcast_in_place(x: Tensor, group: str, root: int = 0, site: str = "") -> None:
    plain = x.contiguous()
    x.copy_(_at(site, group, plain).broadcast(plain, root))


def _size(group: antiphon.Communicator | Group) -> int:
    return group.size() if isinstance(group, Group) else group.world_size


def _resharded(x: Tensor, gather_dim: int, shard_dim: int, group: str, site: str = "") -> Tensor:
    """A result without values."""
    size, shape = _size(_group(group)), list(x.shape)
    if not 0 <= gather_dim != shard_dim >= 0 or max(gather_dim, shard_dim) >= x.dim():
        raise ValueError(f"shard_dim_all_to_all: dimensions {gather_dim} and {shard_dim} of {x.dim()}: two that differ")
    if shape[shard_dim] % size:
        raise ValueError(f"shard_dim_all_to_all: {shape[shard_dim]} along {shard_dim} cannot be divided among {size} ranks")
    shape[shard_dim] //= size
    shape[gather_dim] *= size
    return x.new_empty(shape)


def _shard_dim_all_to_all(x: Tensor, gather_dim: int, shard_dim: int, group: str, site: str = "") -> Tensor:
    out = _resharded(x, gather_dim, shard_dim, group)
    comm = _at(site, group, x)
    parts = torch.stack(x.chunk(comm.world_size, shard_dim))
    return torch.cat(comm.all_to_all(parts).unbind(), gather_dim, out=out)


#: The programs that the ranks of a communicator have compared.
_agreed: WeakKeyDictionary[antiphon.Communicator, set[str]] = WeakKeyDictionary()


#: The calls of programs that this process compiled, by the digest in their sites.
_calls: dict[str, list[str]] = {}


def describe(program: str, calls: list[str]) -> None:
    """Stores what the calls of a program are, for the error that ranks with different programs get."""
    _calls[program] = calls


def _difference(program: str, comm: antiphon.Communicator, other: int) -> str:
    """The first call that differs between the programs of rank 0 and of rank ``other``, if both ranks know their calls. All
    ranks of the communicator call this together."""
    programs = comm.exchange_objects(_calls.get(program))
    first, second = programs[0], programs[other]
    if first is None or second is None:
        return ""
    for index, (one, another) in enumerate(itertools.zip_longest(first, second, fillvalue="missing")):
        if one != another:
            return f"; call {index} is {one} on rank 0, {another} on rank {other}"
    return "; their calls are equal, but not their options, tables or versions"


def _at(site: str, group: str, x: Tensor) -> antiphon.Communicator:
    """The communicator for a call on ``x`` from a place in a compiled program, which all ranks must have."""
    comm = named_communicator(group, x)
    if site:
        program = site.partition(":")[0]
        agreed = _agreed.setdefault(comm, set())
        if program not in agreed:
            sites = comm.exchange_objects(site)
            if (other := next((rank for rank, found in enumerate(sites) if found != sites[0]), None)) is not None:
                raise RuntimeError(
                    f"the ranks of group {group!r} run different programs: rank 0 is at call {sites[0]}, rank {other} at"
                    f" {sites[other]}{_difference(program, comm, other)}: compile the same model with the same options, or clear"
                    " the caches of torch.compile"
                )
            agreed.add(program)
    return comm


#: The outputs of a fused call, and the elements of those that differ from its input.
_OUTPUTS = {
    "sum": None,
    "residual": None,
    "norm": None,
    "inverse_rms": torch.float32,
    "codes": torch.float8_e4m3fn,
    "scales": torch.float32,
}
_QUANTIZE = ("fp8", "fp8-tokens", "fp8-groups")


def _all_reduce_fused(
    x: Tensor,
    group: str,
    outputs: list[str],
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    round_before_weight: bool = False,
    quantize: Quantize = "fp8",
    scale: Tensor | None = None,
    scale_value: float = 1.0,
    group_size: int = 128,
    site: str = "",
) -> list[Tensor]:
    plain = x.contiguous()
    results = _results(plain, outputs, quantize, group_size)
    into = dict(zip(outputs, results, strict=True))
    codes, scales = into.get("codes"), into.get("scales")
    if quantize == "fp8":
        given: float | Tensor | None = scale_value if scale is None else scale
    else:
        given = None
        codes = _codes(plain) if codes is None and scales is not None else codes
        if codes is not None and (scales is None or quantize == "fp8-groups"):
            scales = _scales(plain, quantize, group_size)
    _at(site, group, plain).all_reduce_fused(
        plain,
        residual=None if residual is None else residual.contiguous(),
        weight=None if weight is None else weight.contiguous(),
        eps=eps,
        weight_bias=weight_bias,
        round_before_weight=round_before_weight,
        sum_out=into.get("sum"),
        residual_out=into.get("residual"),
        norm_out=into.get("norm"),
        inverse_rms_out=into.get("inverse_rms"),
        quantize=None if codes is None else quantize,
        scale=None if codes is None else given,
        group_size=group_size,
        codes=None if codes is None else codes.view(torch.uint8),
        scales=scales,
    )
    if quantize == "fp8-groups" and scales is not None and "scales" in into:
        into["scales"].copy_(_powers(scales, into["scales"]))
    return results


def _codes(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn)


def _scales(x: Tensor, quantize: str, group_size: int) -> Tensor:
    """Room for scales as the kernels write them: packed, where they are powers of two."""
    hidden = x.shape[-1]
    tokens = x.numel() // max(1, hidden)
    if quantize == "fp8-tokens":
        return x.new_empty((tokens, 1), dtype=torch.float32)
    return x.new_empty(((hidden // group_size + 3) // 4, (tokens + 3) // 4 * 4), dtype=torch.int32)


def _powers(packed: Tensor, like: Tensor) -> Tensor:
    """The numbers whose exponents are packed, four groups of a token in a word."""
    tokens, groups = like.numel() // max(1, like.shape[-1]), like.shape[-1]
    rows = packed.t().clone(memory_format=torch.contiguous_format)
    exponents = rows.view(torch.uint8)[:tokens, :groups]
    return (exponents.to(torch.int32) << 23).view(torch.float32).view(like.shape)


def _empty_fused(*arguments: Any, **named: Any) -> list[Tensor]:
    """The same with nothing in them, for the same arguments."""
    given = _signature.bind(*arguments, **named)
    given.apply_defaults()
    return _results(*(given.arguments[name] for name in ("x", "outputs", "quantize", "group_size")))


_signature = inspect.signature(_all_reduce_fused)


def _results(x: Tensor, outputs: list[str], quantize: str, group_size: int) -> list[Tensor]:
    if not outputs or len(set(outputs)) < len(outputs) or not set(outputs) <= set(_OUTPUTS):
        raise ValueError(f"all_reduce_fused: outputs {outputs}: each of {', '.join(_OUTPUTS)} at most once, and any")
    if quantize not in _QUANTIZE:
        raise ValueError(f"all_reduce_fused: quantize={quantize!r}: known are {', '.join(_QUANTIZE)}")
    hidden = x.shape[-1] if x.dim() else 1
    if quantize == "fp8-groups" and (group_size < 1 or hidden % group_size):
        raise ValueError(f"all_reduce_fused: group_size={group_size}: a divisor of {hidden}")
    if quantize == "fp8" and "scales" in outputs:
        raise ValueError("all_reduce_fused: outputs: there are no scales of fp8, whose scale is given")
    columns = {"inverse_rms": 1, "scales": hidden // group_size if quantize == "fp8-groups" else 1}
    return [x.new_empty((*x.shape[:-1], columns.get(name, hidden)), dtype=_OUTPUTS[name] or x.dtype) for name in outputs]


def _all_reduce_rms_norm(
    x: Tensor,
    group: str,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    bias: Tensor | None = None,
    site: str = "",
) -> tuple[Tensor, Tensor]:
    plain = x.contiguous()
    norm, total = torch.empty_like(plain), torch.empty_like(plain)
    _at(site, group, plain).all_reduce_fused(
        plain,
        residual=None if residual is None else residual.contiguous(),
        weight=weight,
        eps=eps,
        weight_bias=weight_bias,
        bias=bias,
        residual_out=total,
        norm_out=norm,
    )
    return norm, total


def _two_like(x: Tensor, *options: Any, **others: Any) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


def _nothing(x: Tensor, *arguments: Any, **named: Any) -> None:
    pass


def _comm_buffer(
    ticket: Tensor, group: str, shape: list[int], dtype: torch.dtype, offset: int, arena_bytes: int, site: str
) -> tuple[Tensor, Tensor]:
    comm = _at(site, group, ticket)
    return ticket.new_empty(0), comm_buffer(comm, shape, dtype, offset, arena_bytes)


def _empty_comm_buffer(ticket: Tensor, group: str, shape: list[int], dtype: torch.dtype, *place: Any) -> tuple[Tensor, Tensor]:
    return ticket.new_empty(0), ticket.new_empty(shape, dtype=dtype)


_operators = Operators()
_operators.define('all_reduce_(Tensor(a!) x, str group, str op="sum", str site="") -> ()', _all_reduce_in_place, _nothing)
_operators.define('broadcast_(Tensor(a!) x, str group, int root=0, str site="") -> ()', _broadcast_in_place, _nothing)
_operators.define(
    'shard_dim_all_to_all(Tensor x, int gather_dim, int shard_dim, str group, str site="") -> Tensor',
    _shard_dim_all_to_all,
    _resharded,
)
for _row in operations():
    _operation = _Operation(*_row)
    if _operation.depends_on_rank:
        continue
    _operators.define(_operation.schema, _operation.call, _operation.empty)
_operators.define(
    "all_reduce_rms_norm(Tensor x, str group, Tensor? residual=None, Tensor? weight=None, float eps=1e-6,"
    ' float weight_bias=0., Tensor? bias=None, str site="") -> (Tensor, Tensor)',
    _all_reduce_rms_norm,
    _two_like,
)
_operators.define(
    "all_reduce_fused(Tensor x, str group, str[] outputs, Tensor? residual=None, Tensor? weight=None, float eps=1e-6,"
    ' float weight_bias=0., bool round_before_weight=False, str quantize="fp8", Tensor? scale=None, float scale_value=1.,'
    ' int group_size=128, str site="") -> Tensor[]',
    _all_reduce_fused,
    _empty_fused,
)
# Compilers do not give the memory of a result to other tensors if the result is said to alias an argument.
_operators.define_ordered(
    "comm_buffer(Tensor(a) ticket, str group, SymInt[] shape, ScalarType dtype, int offset, int arena_bytes, str site)"
    " -> (Tensor, Tensor(a))",
    _comm_buffer,
    _empty_comm_buffer,
)
differentiate(_operators, named_communicator, named_world_size)
