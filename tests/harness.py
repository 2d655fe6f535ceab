"""Checks that run on host memory and on GPUs under one name.

Starting ranks with torch takes seconds, so that one world runs all checks of a module, each with a communicator of its own,
and the tests look up how a check went.
"""

import functools
import importlib
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

import antiphon
import needs
import ranks

#: What every rank runs: ``body(comm, device)``.
Body = Callable[[antiphon.Communicator, torch.device], None]

#: Where checks run. GPUs are marked, so that `pytest -m cuda` runs those alone.
DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.cuda)]
#: The same with numbers of ranks. On the host two are enough for what is the same with more: tests of Rust have those.
WORLDS = [("host", 2), *(pytest.param("cuda", size, marks=pytest.mark.cuda) for size in (2, 4))]


class Checks(dict[str, Body]):
    """The checks of a module, by name."""

    def __call__(self, body: Body) -> Body:
        self[body.__name__] = body
        return body


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


_T = TypeVar("_T")


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


def expect(module: str, name: str, device: str, world_size: int) -> None:
    """Fails if a check of a module went wrong on any rank."""
    need(device, world_size)
    failures = [f"rank {rank}: {of[name]}" for rank, of in enumerate(outcomes(module, device, world_size)) if of[name]]
    assert not failures, "\n".join(failures)


@functools.cache
def outcomes(module: str, device: str, world_size: int) -> list[dict[str, str | None]]:
    """How each check went on each rank: nothing, or a traceback."""
    try:
        return ranks.processes(world_size, run, module, device)
    except Exception:  # for every check, rather than again and again
        return [dict.fromkeys(importlib.import_module(module).CHECKS, traceback.format_exc())]


def run(module: str, device: str) -> dict[str, str | None]:
    checks: Checks = importlib.import_module(module).CHECKS
    found: dict[str, str | None] = {}
    with antiphon.init() as world:
        where = place(device, world.rank)
        for name, body in checks.items():
            comm: Any = world.split(0)
            with comm:
                try:
                    body(comm, where)
                    found[name] = None
                except Exception:
                    found[name] = traceback.format_exc()
    return found
