"""Scripts written for other libraries, on Antiphon, unchanged.

    python -m antiphon.compat run script.py --its --arguments
    python -m antiphon.compat run -m torch.distributed.run --nproc-per-node 2 script.py

runs a script that says ``import flashinfer.comm`` with :mod:`antiphon.comm` under that name. In your own program,
before such imports::

    antiphon.compat.install()               # all of PEERS, in this process
    antiphon.compat.install(children=True)  # and in the processes it starts, other than by fork

A name of :data:`PEERS` stands for our module and its submodules: ``flashinfer.comm.mapping`` is the very module
``antiphon.comm.mapping``. Of two names the longer one counts: ``mscclpp.language``, which comes with ``mscclpp``, is
``antiphon.language``. If the peer is installed, that one module of it is hidden, with its submodules, also from the rest of the
peer (``flashinfer.norm``), which stays; if it is not, its parent (``flashinfer``) is a package with nothing but the few names that
scripts take from the rest of it (``flashinfer.utils.get_compute_capability``, norms of ``flashinfer.norm``). What is not served
yet raises ``ImportError`` with a list of what is.

Children know it from the environment: ``ANTIPHON_COMPAT`` names the peers, and ``PYTHONPATH`` starts with a folder whose
``sitecustomize`` reads it (and goes on to any other ``sitecustomize``). Python's options ``-S``, ``-E`` and ``-I`` turn
that off.
"""

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from antiphon._names import listed

__all__ = ["BY_NAME", "PEERS", "install", "uninstall"]

#: Our module for each module of a peer.
PEERS = {
    "deep_ep": "antiphon.moe.deep_ep",
    "deep_ep_cpp": "antiphon.moe.deep_ep",
    "flashinfer.comm": "antiphon.comm",
    "megatron.core.transformer.moe.fused_a2a": "antiphon.moe.fused_a2a",
    "mscclpp": "antiphon.mscclpp",
    "mscclpp.language": "antiphon.language",
}

#: Those that :func:`install` serves only if it names them: Megatron's own module works on our ``deep_ep``.
BY_NAME = frozenset({"megatron.core.transformer.moe.fused_a2a"})

#: Our module for modules beside those, where the peer is not installed.
_BESIDE = {
    "flashinfer.norm": "antiphon.compat.flashinfer_norm",
    "flashinfer.utils": "antiphon.compat.flashinfer_utils",
}

#: The environment's names of peers that a process serves, and the folder in which it finds our ``sitecustomize``.
_VARIABLE = "ANTIPHON_COMPAT"
_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "children")


def install(*peers: str, children: bool = False) -> None:
    """Serves our modules under the names of these peers: all of :data:`PEERS` but those of :data:`BY_NAME`, unless given.

    ``children`` does so too for processes that this one starts from now on, by whatever means. Modules of those names
    that are imported already are put aside; code that holds one keeps it.

    Raises ``ValueError`` for a name that is not in :data:`PEERS`.
    """
    names = _known(peers) or [name for name in PEERS if name not in BY_NAME]
    for name in names:
        if name not in _finder.hidden:
            _finder.hidden[name] = _take(name)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
        sys.meta_path.append(_parents)
    if children:
        tell_children({*told_children(), *names})


def uninstall(*peers: str) -> None:
    """Undoes :func:`install` for these peers (all of :data:`PEERS`, unless given), for children as well.

    Raises ``ValueError`` for a name that is not in :data:`PEERS`.
    """
    names = _known(peers) or list(PEERS)
    for name in names:
        if name in _finder.hidden:
            before = _finder.hidden.pop(name)
            _take(name)
            _put_back(before)
    _parents.forget()
    if not _finder.hidden:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in (_finder, _parents)]
    tell_children(set(told_children()) - set(names))


def told_children() -> list[str]:
    """The peers that this process's environment names."""
    return [name for name in os.environ.get(_VARIABLE, "").split(",") if name]


def tell_children(peers: Collection[str]) -> None:
    """Makes the processes that this one starts serve exactly these peers."""
    path = os.environ.get("PYTHONPATH")
    folders = [folder for folder in path.split(os.pathsep) if folder != _HOOK] if path else []
    if peers:
        folders.insert(0, _HOOK)
    for variable, value in (_VARIABLE, ",".join(sorted(peers))), ("PYTHONPATH", os.pathsep.join(folders)):
        if value:
            os.environ[variable] = value
        else:
            os.environ.pop(variable, None)


def _known(peers: Sequence[str]) -> Sequence[str]:
    for name in peers:
        if name not in PEERS:
            raise ValueError(f"antiphon.compat: no peer {name!r} is served; served are {', '.join(PEERS)}")
    return peers


def _take(name: str) -> dict[str, ModuleType]:
    """Takes a module and its submodules out of those that are imported. Gives them, but those of a peer that is served."""
    taken = {each: sys.modules.pop(each) for each in list(sys.modules) if _is_within(each, name)}
    for each in taken:
        _bind(each)
    return {each: module for each, module in taken.items() if _finder.peer_of(each) is None}


def _put_back(modules: dict[str, ModuleType]) -> None:
    """Puts modules where they were, or, under the name of a peer that is still served, to what that hides."""
    for name, module in modules.items():
        peer = _finder.peer_of(name)
        (sys.modules if peer is None else _finder.hidden[peer])[name] = module
    for name in *modules, *_finder.hidden:
        _bind(name)


def _bind(name: str) -> None:
    """Makes what a package has under a module's name agree with ``sys.modules``, unless it is no module."""
    parent, _, child = name.rpartition(".")
    if parent not in sys.modules:
        return
    contents = vars(sys.modules[parent])
    if not isinstance(contents.get(child), (ModuleType, type(None))):
        return
    if name in sys.modules:
        contents[child] = sys.modules[name]
    else:
        contents.pop(child, None)


class _Finder(MetaPathFinder, Loader):
    """Finds our modules under the peers' names. Python asks it first."""

    def __init__(self) -> None:
        #: The peers that are served, each with the modules that had its names before.
        self.hidden: dict[str, dict[str, ModuleType]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.peer_of(fullname) is None:
            return None
        peer = max((peer for peer in PEERS if _is_within(fullname, peer)), key=len)
        ours = PEERS[peer] + fullname.removeprefix(peer)
        if importlib.util.find_spec(ours) is None:
            raise ModuleNotFoundError(_not_served(fullname, peer), name=fullname)
        return ModuleSpec(fullname, self, origin=ours)

    def peer_of(self, name: str) -> str | None:
        """The peer that is served and that a module is of: the one of the longest name."""
        return max((peer for peer in self.hidden if _is_within(name, peer)), key=len, default=None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own name, in place of the one it was just found by.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _is_within(name: str, module: str) -> bool:
    """Whether a name is that of a module or of one in it."""
    return f"{name}.".startswith(f"{module}.")


class _Parents(MetaPathFinder):
    """Makes the packages around the peers' modules up, and what is beside them. Asked last, so only for what is not
    installed."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.is_served(fullname):
            return None
        self.made.add(fullname)
        if fullname in _BESIDE:
            return ModuleSpec(fullname, _finder, origin=_BESIDE[fullname])
        return ModuleSpec(fullname, None, is_package=True)

    def is_served(self, name: str) -> bool:
        return self.is_parent(name.rpartition(".")[0] if name in _BESIDE else name)

    def is_parent(self, name: str) -> bool:
        return any(peer.startswith(f"{name}.") for peer in _finder.hidden)

    def forget(self) -> None:
        """Removes the packages without modules."""
        for name in {name for name in self.made if not self.is_served(name)}:
            self.made.remove(name)
            sys.modules.pop(name, None)


def _not_served(name: str, peer: str) -> str:
    modules = pkgutil.iter_modules(getattr(importlib.import_module(PEERS[peer]), "__path__", []), f"{peer}.")
    names = [module.name for module in modules if "._" not in module.name]
    return f"Antiphon does not serve the module {name} yet; it serves {listed([peer, *names], name)}"


_finder = _Finder()
_parents = _Parents()
