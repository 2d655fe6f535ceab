"""The groups whose calls the pass may change."""

from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

import antiphon
from antiphon.torch import ops
from antiphon.torch.group import Group

__all__ = ["all_sizes", "attach", "detach", "sizes"]

_attached: WeakKeyDictionary[dist.ProcessGroup, antiphon.Communicator] = WeakKeyDictionary()
#: Further names by which programs call groups.
_names: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


def attach(group: dist.ProcessGroup | None = None, name: str | None = None) -> str:
    """Makes a communicator beside a group of any backend, and returns the name by which programs call the group.

    This is the group's own name, or ``name`` if given: vLLM's programs, for example, call a group ``"tp:0"``.

    All ranks of the group make the same calls of ``attach``. The ranks must be on one machine. A group of the backend
    ``"antiphon"`` has a communicator already. Raises ``ValueError`` if this process is not in the group, and without a group before
    ``init_process_group``.
    """
    if group is None:
        if not dist.is_initialized():
            raise ValueError("attach: no group: pass one, or call torch.distributed.init_process_group first")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("attach: this process is not in the group")
    if not isinstance(group, Group) and group not in _attached:
        _attached[group] = antiphon.init(group=group)
        ops.register(_attached[group], group.group_name)
    if name is None:
        return str(group.group_name)
    if isinstance(group, Group):
        raise ValueError(f"attach: the group {group.group_name!r} of the backend antiphon has no other name: not {name!r}")
    ops.register(_attached[group], name)
    _names[name] = group
    return name


def detach(group: dist.ProcessGroup | None = None) -> None:
    """Closes the communicator that :func:`attach` made. Programs that were compiled since then must not be called any more."""
    group = dist.group.WORLD if group is None else group
    comm = _attached.pop(group, None) if isinstance(group, dist.ProcessGroup) else None
    if comm is not None:
        for name in [name for name, found in _names.items() if found is group]:
            del _names[name]
        ops.forget(comm)
        comm.close()


def sizes(names: set[str]) -> tuple[dict[str, int], list[str]]:
    """The sizes of the groups among ``names``, and the names of those whose calls the pass may change."""
    found: dict[str, int] = {}
    ours: list[str] = []
    for name in sorted(names):
        try:
            group = _names.get(name) or dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
        except (RuntimeError, ValueError, LookupError):
            continue
        found[name] = group.size()
        if isinstance(group, Group) or group in _attached:
            ours.append(name)
    return found, ours


def all_sizes() -> list[tuple[str, int]]:
    """All groups whose calls the pass may change, with their sizes."""
    names = {str(group.group_name) for group in dist.distributed_c10d._world.pg_map} | set(_names)
    found, ours = sizes(names)
    return [(name, found[name]) for name in ours]
