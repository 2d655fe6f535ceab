"""Checks that run on host memory and on GPUs under one name.

Starting ranks with torch takes seconds, so that one world runs all checks of a module, each with a communicator of its own,
and the tests look up how a check went.
"""

import contextlib
import importlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

import antiphon
import needs
import ranks

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=Callable[..., None])

#: How each check went on a rank: nothing, or a traceback.
Outcomes = dict[str, str | None]

#: Where checks run. GPUs are marked, so that `pytest -m cuda` runs those alone.
DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.cuda)]
#: The same with numbers of ranks. On the host two are enough for what is the same with more: tests of Rust have those.
WORLDS = [("host", 2), *(pytest.param("cuda", size, marks=pytest.mark.cuda) for size in (2, 4))]


class Checks(dict[str, Callable[..., None]]):
    """The checks of a module, by name. Every rank runs them all."""

    def __init__(self) -> None:
        super().__init__()
        self._worlds: dict[tuple[Any, ...], list[Outcomes]] = {}

    def __call__(self, body: _Body) -> _Body:
        self[body.__name__] = body
        return body

    def run(self, call: Callable[[Callable[..., None]], object]) -> Outcomes:
        """Runs each check on this rank, by ``call(body)``."""
        found: Outcomes = {}
        for name, body in self.items():
            try:
                call(body)
                found[name] = None
            except Exception:
                found[name] = traceback.format_exc()
        return found

    def expect(
        self, name: str, world_size: int, main: Callable[..., Outcomes], *arguments: Any, nodes: Sequence[str] | None = None
    ) -> None:
        """Fails if a check went wrong on any rank. ``main(*arguments)`` runs all checks on each rank of a world, once for the tests
        that give the same arguments."""
        world = world_size, main, arguments
        if world not in self._worlds:
            try:
                self._worlds[world] = ranks.processes(world_size, main, *arguments, nodes=nodes)
            except Exception:  # for every check, rather than again and again
                self._worlds[world] = [dict.fromkeys(self, traceback.format_exc())]
        failures = [f"rank {rank}: {of[name]}" for rank, of in enumerate(self._worlds[world]) if of[name]]
        assert not failures, "\n".join(failures)


def need(device: str, world_size: int) -> None:
    """Skips a test for which there are too few GPUs. With ``ANTIPHON_TEST_RANKS_PER_GPU=2`` half as many are enough, which
    takes much longer: processes that share a GPU take turns on it."""
    if device == "cuda":
        found, ranks_per_gpu = torch.cuda.device_count(), int(os.environ.get("ANTIPHON_TEST_RANKS_PER_GPU", "1"))
        needed = -(-world_size // ranks_per_gpu)
        needs.need(f"gpus {needed}", found >= needed, f"{found} found")


def place(device: str, rank: int) -> torch.device:
    """The device of this rank's tensors, which is the current one from now on."""
    if device == "host":
        return torch.device("cpu")
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def beside_an_all_reduce(comm: antiphon.Communicator, device: torch.device, call: Callable[[], _T]) -> Iterator[_T]:
    """What a call on a GPU gives beside a large all-reduce on another stream. Ranks make the two in another order, so kernels of both
    wait on every GPU at once."""
    large = torch.ones(16 << 20, device=device)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    call()  # makes what calls need
    comm.all_reduce(large, out=large)
    torch.cuda.synchronize(device)
    for _ in range(3):
        if comm.rank == 0:
            with torch.cuda.stream(streams[0]):
                comm.all_reduce(large, out=large)
        with torch.cuda.stream(streams[1]):
            result = call()
        if comm.rank != 0:
            streams[1].synchronize()
            with torch.cuda.stream(streams[0]):
                comm.all_reduce(large, out=large)
        torch.cuda.synchronize(device)
        yield result
    assert (large == comm.world_size**4).all()


@contextlib.contextmanager
def torch_world(backend: str) -> Iterator[None]:
    """With the default group of ``torch.distributed``, of this process and its peers."""
    import antiphon.torch  # noqa: F401  (which has the backend)

    warnings.simplefilter("ignore")
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def torch_group() -> Iterator[dist.ProcessGroup]:
    """A group of all ranks, over Antiphon's backend."""
    group = dist.new_group(backend="antiphon", timeout=timedelta(seconds=60))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def expect(module: str, name: str, device: str, world_size: int) -> None:
    """Fails if a check of a module, ``body(comm, device)``, went wrong on any rank."""
    need(device, world_size)
    checks: Checks = importlib.import_module(module).CHECKS
    checks.expect(name, world_size, run, module, device)


def run(module: str, device: str) -> Outcomes:
    checks: Checks = importlib.import_module(module).CHECKS
    with antiphon.init() as world:
        where = place(device, world.rank)

        def call(body: Callable[..., None]) -> None:
            comm: Any = world.split(0)
            with comm:
                body(comm, where)

        return checks.run(call)
