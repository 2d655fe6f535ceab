"""Runs a function on every rank of a small world, and never hangs: what does not end in time is killed."""

import concurrent.futures
import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Container, Sequence
from typing import Any

import antiphon
from ports import free_port

#: Seconds until a test's world counts as stuck. Importing torch in every process takes a few on a busy machine, and ranks that share
#: a GPU take turns on it.
LIMIT = 120.0 * int(os.environ.get("ANTIPHON_TEST_RANKS_PER_GPU", "1"))

_worlds = itertools.count()


def threads(world_size: int, body: Callable[..., Any], *arguments: Any, timeout: float = 20.0) -> list[Any]:
    """What ``body(comm, *arguments)`` returns on each rank; ranks are threads of this process, which is fast.

    An exception of the lowest rank that raised one goes on here.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "world")

        def rank_main(rank: int) -> Any:
            with antiphon.init(rank=rank, world_size=world_size, path=path, timeout=timeout) as comm:
                return body(comm, *arguments)

        with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
            ranks = [pool.submit(rank_main, rank) for rank in range(world_size)]
            return [rank.result(LIMIT) for rank in ranks]


def outcomes(world_size: int, body: Callable[..., Any], *arguments: Any, timeout: float = 20.0) -> list[Any]:
    """As :func:`threads`, but exceptions are returned like results."""

    def caught(comm: antiphon.Communicator) -> Any:
        try:
            return body(comm, *arguments)
        except Exception as error:
            return error

    return threads(world_size, caught, timeout=timeout)


def processes(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    timeout: float = 60.0,
    dying: Container[int] = (),
    nodes: Sequence[str] | None = None,
) -> list[Any]:
    """What ``body(*arguments)`` returns on each rank; ranks are fresh processes with torchrun's environment.

    ``body`` must be a function of a module, ``arguments`` and results must pickle. Ranks that are ``dying`` return nothing.
    ``nodes`` has the name of each rank's node.
    """
    context = multiprocessing.get_context("spawn")
    name = f"{os.getpid()}-{next(_worlds)}"
    started = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port() if rank == 0 else place["MASTER_PORT"],
            "TORCHELASTIC_RUN_ID": name,
            "ANTIPHON_TIMEOUT": timeout,
            "OMP_NUM_THREADS": 1,
        }
        if nodes is not None:
            port = free_port() if rank == 0 else port
            place |= {"ANTIPHON_NODE": nodes[rank], "ANTIPHON_PORT": port, "ANTIPHON_SECRET": name}
            place |= {"LOCAL_WORLD_SIZE": nodes.count(nodes[rank])}
        process = context.Process(target=_rank_main, args=(place, sender, body, arguments), daemon=True)
        process.start()
        sender.close()
        started.append((process, receiver))
    try:
        return [None if rank in dying else _result(rank, *each) for rank, each in enumerate(started)]
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def _rank_main(place: dict[str, Any], sender: Any, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        sender.send((True, body(*arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def _result(rank: int, process: Any, receiver: Any) -> Any:
    if not receiver.poll(LIMIT):
        raise TimeoutError(f"rank {rank} has not ended within {LIMIT} s")
    try:
        succeeded, result = receiver.recv()
    except EOFError:
        process.join(5)
        raise RuntimeError(f"rank {rank} ended with status {process.exitcode} and no result") from None
    if not succeeded:
        raise AssertionError(f"rank {rank}:\n{result}")
    return result


