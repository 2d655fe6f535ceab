"""Fuses the collectives of a compiled model with the operations that follow them.

    import torch, torch.distributed as dist
    import antiphon.lowering

    antiphon.lowering.attach(group)                         # a communicator beside a group of any backend
    model = torch.compile(model, backend="antiphon")        # inductor, with our pass

In a tensor-parallel model an all-reduce, the residual and the RMS norm behind it become one call. A sum of sums becomes one sum. A
wait is removed if its call has become synchronous. The pass proves each rewrite: it exports the graph, rewrites it, exports it
again, and compares the two. :func:`reports` returns the rewrites, and the reasons why others were not made.

Each rank compiles for itself. At the first call of a program the ranks compare their programs. If these differ, every rank gets a
``RuntimeError``.

=========================== ==========================================================================================
:func:`attach`, `detach`    the groups whose calls the pass may change; it leaves other groups alone
:func:`enable`, `disable`   the pass for every ``torch.compile`` of the process
:class:`Pass`               the pass for a framework's own slot
:class:`Options`            the rules that the pass applies
:func:`spell`               the meaning of an operator that the pass does not know
:func:`reports`             the rewrites of each graph
=========================== ==========================================================================================

``ANTIPHON_LOWERING=off|log|strict`` overrides the options. The package needs torch 2.11 or newer; with an older one the import
raises ``RuntimeError``.
"""

from typing import Any

from antiphon.lowering import _inductor
from antiphon.lowering._groups import attach, detach
from antiphon.lowering._options import Options
from antiphon.lowering._pass import Pass, Report, reports, spell

__all__ = ["Options", "Pass", "Report", "attach", "backend", "detach", "disable", "enable", "reports", "spell"]


def backend(module: Any, inputs: Any, *, options: dict[str, Any] | None = None, mode: str | None = None) -> Any:
    """The backend ``"antiphon"`` of ``torch.compile``: inductor with our pass.

    Fields of :class:`Options` among ``options`` are the pass's; the other options and the mode are inductor's. With none of them the
    pass is that of :func:`enable`, or a :class:`Pass` among ``options``, if there is one. Another pass that inductor is configured with
    runs before ours. Raises ``ValueError`` for options that neither has, and for wrong values."""
    ours, patches = Options.split(dict(options or {}))
    if mode is not None and mode != "default":
        import torch

        patches = {**torch._inductor.list_mode_options(mode), **patches}
    before = patches.get("post_grad_custom_post_pass", _inductor.current_pass())
    if ours or not isinstance(before, Pass):
        before = Pass(Options.of(ours), before.before if isinstance(before, Pass) else before)
    patches["post_grad_custom_post_pass"] = before
    return _inductor.compile_fx(module, inputs, config_patches=patches)


def enable(**options: Any) -> None:
    """Applies the pass to every graph that inductor compiles from now on. ``options`` are the fields of :class:`Options`. A pass that
    inductor is configured with runs before ours."""
    before = _inductor.current_pass()
    new = Options.of(options)
    _inductor.set_pass(Pass(new, before.before if isinstance(before, Pass) else before))


def disable() -> None:
    """Undoes :func:`enable`."""
    before = _inductor.current_pass()
    if isinstance(before, Pass):
        _inductor.set_pass(before.before)


_inductor.register(backend, "antiphon")
