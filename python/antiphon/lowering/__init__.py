"""Collectives of a compiled model, fused with what follows them, at compile time.

    import torch, torch.distributed as dist
    import antiphon.lowering

    antiphon.lowering.attach(group)                         # a communicator beside a group of any backend
    model = torch.compile(model, backend="antiphon")        # inductor, with our pass

In a tensor-parallel model every all-reduce with the residual and the RMS norm behind it becomes one call, a sum of sums one
sum, and waits that are for nothing go. Nothing changes that is not proved: each program is exported, rewritten, exported once
more, and compared. :func:`reports` says what was done and why not more.

Ranks compile for themselves. The first call of a program compares what they made: ranks that differ all get a
``RuntimeError``.

=========================== ==========================================================================================
:func:`attach`, `detach`    groups whose calls may be changed; others are left alone
:func:`enable`, `disable`   for every ``torch.compile`` of the process
:class:`Pass`               for a framework's own slot
:class:`Options`            what is done
:func:`spell`               how an operator is spelled that nobody knows
:func:`reports`             what was done
=========================== ==========================================================================================

``ANTIPHON_LOWERING=off|log|strict`` overrules all of it. Needs torch 2.11 or newer, else importing raises ``RuntimeError``.
"""

from typing import Any

from antiphon.lowering import _inductor
from antiphon.lowering._groups import attach, detach
from antiphon.lowering._options import Options
from antiphon.lowering._pass import Pass, Report, reports, spell

__all__ = ["Options", "Pass", "Report", "attach", "backend", "detach", "disable", "enable", "reports", "spell"]


def backend(module: Any, inputs: Any, *, options: dict[str, Any] | None = None, mode: str | None = None) -> Any:
    """``torch.compile``'s backend ``"antiphon"``: inductor with our pass. Options that are not :class:`Options` are
    inductor's. A pass that is there already runs first."""
    ours, patches = Options.split(dict(options or {}))
    if mode is not None and mode != "default":
        import torch

        patches = {**torch._inductor.list_mode_options(mode), **patches}
    before = patches.pop("post_grad_custom_post_pass", _inductor.current_pass())
    if not isinstance(before, Pass):
        patches["post_grad_custom_post_pass"] = Pass(ours, before)
    return _inductor.compile_fx(module, inputs, config_patches=patches)


def enable(**options: Any) -> None:
    """Lowers all that inductor compiles from now on, with :class:`Options`. A pass that is there already runs first."""
    before = _inductor.current_pass()
    new = Options(**options)
    _inductor.set_pass(Pass(new, before.before if isinstance(before, Pass) else before))


def disable() -> None:
    """Takes back what :func:`enable` did."""
    before = _inductor.current_pass()
    if isinstance(before, Pass):
        _inductor.set_pass(before.before)


_inductor.register(backend, "antiphon")
