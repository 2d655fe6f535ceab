"""Functions as operators of torch, in the namespace ``antiphon``, whose calls stay in the order in which a program makes them.

A compiler may move a call to any place that its inputs and results allow. Ranks whose programs differ would then make their
calls in different orders, and where the shapes agree the results would be wrong. So a compiled program gives each call the
ticket that the call before it returned: an empty tensor, which makes their order one that every pass and scheduler keeps.

Torch's own ordered effects (``torch.library._register_effectful_op``) are not enough. Inductor's scheduler drops them when it
fuses what calls read, and operators that write arguments have none.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.node import has_side_effect

__all__ = ["Operators", "refuse_gradients"]


class Operators:
    """Operators in the namespace, which exist as long as this object."""

    def __init__(self) -> None:
        self._library = torch.library.Library("antiphon", "FRAGMENT")  # type: ignore[no-untyped-call]
        self._differentiable: set[str] = set()

    def define(self, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
        """An operator for tensors on the host and on GPUs, whose first argument is a tensor and whose results are tensors, or one list of them.

        A compiler keeps its calls, even if their results are unused, and keeps their order among those of all operators
        that are defined here.
        """
        operator = self._define(schema, kernel, fake)
        name = schema.partition("(")[0]
        head, count = schema.partition(" -> ")[0], len(operator._schema.returns)
        types = [str(result.type).replace("List[Tensor]", "Tensor[]") for result in operator._schema.returns]
        ordered = self._define(
            f"_ordered_{head.replace('(', '(Tensor ticket, ', 1)} -> ({', '.join(['Tensor', *types])})",
            _with_ticket(kernel),
            _with_ticket(fake),
        )

        @operator.py_impl(FunctionalTensorMode)
        def in_turn(mode: FunctionalTensorMode, x: Tensor, *arguments: Any, **named: Any) -> Any:
            trace = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
            place = vars(mode if trace is None else trace.tracer)
            if name not in self._differentiable:
                refuse_gradients(name, (x, *arguments, *named.values()))
            with mode:
                ticket = place.get(_TICKET)
                results = ordered(x.new_empty(0) if ticket is None else ticket, x, *arguments, **named)
            place[_TICKET], *others = results if count else (results,)
            return None if not others else others[0] if count == 1 else tuple(others)

    def define_ordered(self, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
        """An operator that compiled programs alone have: its first argument is a ticket, and so is its first result."""
        self._define(f"_ordered_{schema}", kernel, fake)

    def differentiate(self, name: str, backward: Callable[..., Any], save: Callable[..., None]) -> None:
        """Gives an operator a gradient: ``backward(ctx, *grads)``, of what ``save(ctx, inputs, output)`` has kept."""
        self._differentiable.add(name)
        torch.library.register_autograd(f"antiphon::{name}", backward, setup_context=save, lib=self._library)

    def _define(self, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
        name = schema.partition("(")[0]
        kernel = _without_tangents(name, kernel)
        self._library.define(schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
        # Plain kernels: those of `torch.library.custom_op` take several times as long for each call.
        for key in ("CPU", "CUDA"):
            self._library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"antiphon::{name}", fake, lib=self._library)
        operator: OpOverload = getattr(torch.ops.antiphon, name).default
        has_side_effect(operator)
        return operator


def refuse_gradients(
    name: str, arguments: Iterable[Any], instead: str = "an operator that returns a tensor, such as torch.ops.antiphon.all_reduce"
) -> None:
    """Raises ``ValueError`` if one of the arguments requires grad and grad mode is on, as the communicator's methods do, which a compiled
    program calls where it is off. ``instead`` is what has a gradient."""
    if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in arguments):
        raise ValueError(
            f"{name}: a tensor requires grad, and {name} tracks no gradient: use {instead}, pass x.detach(), or call it under"
            " torch.no_grad()"
        )


def _without_tangents(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, which raises where forward mode would lose a derivative."""

    @functools.wraps(kernel)
    def checked(*arguments: Any, **named: Any) -> Any:
        # `torch.func.jvp` hides a tensor's tangent from kernels, so an open level is refused with or without one.
        if forward_ad._current_level >= 0:
            raise NotImplementedError(
                f"{name}: forward-mode derivatives are not computed: call it outside of torch.func.jvp and forward_ad.dual_level()"
            )
        return kernel(*arguments, **named)

    return checked


#: The name under which a trace keeps the ticket for its next call.
_TICKET = "antiphon_ticket"


def _with_ticket(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` after a ticket, with another one before its results."""

    def ordered(ticket: Tensor, x: Tensor, *arguments: Any, **named: Any) -> Any:
        results, after = function(x, *arguments, **named), x.new_empty(0)
        if results is None:
            return after
        return (after, *results) if isinstance(results, tuple) else (after, results)

    return ordered


# Torch's caches of compiled programs identify an operator by its name, and entries of an older release have no tickets.
torch.compiler.config.cache_key_tag += "antiphon: tickets;"
