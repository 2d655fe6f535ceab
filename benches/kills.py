"""Kills a rank at a random moment of each family's calls, again and again: every survivor must name it in time, and go on without it.

    python benches/kills.py --device cuda --ranks 4 --kills 50 --record benches/results/MACHINE/DATE-kills.json

Each kill has its own world of processes, ``--at-once`` of them side by side. The ranks call until one of them is killed (SIGKILL). A
survivor must raise ``PeerLostError`` with the killed rank within ``--limit`` seconds; then the survivors shrink their communicator, and a call
of the same family and an all-reduce, whose sum is checked, must succeed on it. The record has the time until the last survivor knew, and the
time from there until the calls of the new communicator were over, which on GPUs includes all set-up.
"""

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import record
import torch

import antiphon
from antiphon.language import library
from antiphon.comm.mixed_comm import MixedCommOp, ParallelInfo
from antiphon.moe import ExpertParallel

HIDDEN, TOKENS, TOP_K, EXPERTS = 1024, 64, 4, 24
#: Elements of a collective's tensor: of one packet, and of a call that takes several pieces.
COUNTS = (64, 1 << 20)
#: Seconds that a world has to be made, or made anew.
PATIENCE = 120.0

Comm = antiphon.Communicator
#: Makes a rank's call of a family.
Family = Callable[[Comm, torch.device], Callable[[], None]]


def collectives(comm: Comm, device: torch.device) -> Callable[[], None]:
    tensors = [torch.ones(comm.world_size * count, device=device) for count in COUNTS]

    def call() -> None:
        for x in tensors:
            comm.all_reduce(x)
            comm.reduce_scatter(x)
            comm.all_gather(x[: len(x) // comm.world_size])
            comm.all_to_all(x)
            comm.broadcast(x, comm.world_size - 1)

    return call


def messages(comm: Comm, device: torch.device) -> Callable[[], None]:
    x = torch.ones(COUNTS[-1], device=device)
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size

    def call() -> None:
        for count in COUNTS:
            comm.send_recv(x[:count], after, torch.empty_like(x[:count]), before)

    return call


def fused(comm: Comm, device: torch.device) -> Callable[[], None]:
    x, weight = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device), torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)

    def call() -> None:
        comm.all_reduce_rms_norm(x[:1], x[:1].clone(), weight)
        comm.all_reduce_rms_norm(x, x.clone(), weight, quantize="fp8-tokens")

    return call


def mixed(comm: Comm, device: torch.device) -> Callable[[], None]:
    tensor_parallel = 2 if comm.world_size == 4 else 1
    layout = ParallelInfo(comm.rank, comm.world_size, comm.rank, comm.world_size, 0, 1, tensor_parallel, comm.world_size // tensor_parallel, 1, 1)
    handler = antiphon._core.MixedHandler(comm, layout, device.index, "bfloat16")
    x = torch.ones(TOKENS * comm.world_size, HIDDEN, dtype=torch.bfloat16, device=device)
    there, back = MixedCommOp.ALLREDUCE_ALLGATHER, MixedCommOp.REDUCESCATTER_ALLREDUCE
    if tensor_parallel == 1:
        there, back = MixedCommOp.ALLGATHER, MixedCommOp.REDUCESCATTER

    def call() -> None:
        handler.run(there, x[:TOKENS])
        handler.run(back, x)

    return call


def experts(form: str) -> Family:
    def make(comm: Comm, device: torch.device) -> Callable[[], None]:
        layer = ExpertParallel(comm, EXPERTS, HIDDEN)
        x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
        ids = torch.arange(TOKENS * TOP_K, device=device).view(TOKENS, TOP_K) % EXPERTS
        weights = torch.ones(TOKENS, TOP_K, device=device)
        chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool, device=device).scatter(1, ids, True)

        def by_token() -> None:
            received = layer.dispatch(x, ids, weights)
            layer.combine(received.x, received.routes)

        def by_expert() -> None:
            received = layer.dispatch_by_expert(x, chosen)
            layer.combine_by_expert(received.x, received.routes)

        def slots() -> None:
            received = layer.dispatch_to_slots(x, ids, max_tokens=TOKENS)
            layer.combine_from_slots(received.x, ids, weights, received.routes)

        return {"by_token": by_token, "by_expert": by_expert, "slots": slots}[form]

    return make


def plan(name: str) -> Family:
    def make(comm: Comm, device: torch.device) -> Callable[[], None]:
        loaded = comm.load_plan(library.build(name, comm.world_size), device=device.index)
        x = torch.ones(COUNTS[0] * comm.world_size, device=device)
        out = torch.empty_like(x)

        def call() -> None:
            loaded.execute(x, out)

        return call

    return make


FAMILIES: dict[str, Family] = {
    "collectives": collectives,
    "messages": messages,
    "fused": fused,
    "mixed": mixed,
    "dispatch by token": experts("by_token"),
    "dispatch by expert": experts("by_expert"),
    "dispatch to slots": experts("slots"),
    "plan": plan("packet-all-reduce"),
}


def finish(comm: Comm, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        comm.check()


def rank_main(family: str, kind: str, timeout: float, said: Connection) -> None:
    """A rank: it sends "calling", then what ended its calls, then the time at which it went on."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    try:
        comm = antiphon.init(timeout=PATIENCE)
        call = FAMILIES[family](comm, device)
        call()
        finish(comm, device)
        comm.barrier()
        comm.timeout = timeout
        said.send("calling")
        try:
            while True:
                call()
                finish(comm, device)
        except antiphon.PeerLostError as error:
            said.send((error.rank, time.monotonic()))
        with comm.shrink() as survivors:
            survivors.timeout = PATIENCE
            FAMILIES[family](survivors, device)()
            total = survivors.all_reduce(torch.ones(1000, device=device))
            finish(survivors, device)
            assert (total == survivors.world_size).all(), total
            survivors.barrier()
        said.send(time.monotonic())
    except Exception as error:  # is the parent's to judge
        said.send(f"{type(error).__name__}: {error}")


def told(connections: list[Connection], limit: float, what: str) -> list[Any]:
    """What each rank sends, all within ``limit`` seconds."""
    end, answers = time.monotonic() + limit, dict[Connection, Any]()
    while len(answers) < len(connections):
        ready = wait([each for each in connections if each not in answers], max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{len(connections) - len(answers)} ranks did not say {what} within {limit} s")
        for each in ready:
            assert isinstance(each, Connection)
            answers[each] = each.recv()
            if isinstance(answers[each], str) and answers[each] != "calling":
                raise RuntimeError(answers[each])
    return [answers[each] for each in connections]


def kill_one(family: str, number: int, options: argparse.Namespace) -> tuple[float, float]:
    """One world: the seconds from the kill until all survivors knew, and from then until all had gone on."""
    choice = random.Random(f"{family} {number}")
    victim, delay = choice.randrange(options.ranks), choice.uniform(0, 0.1)
    context = multiprocessing.get_context("fork")  # torch is imported once; nothing in this process has used a GPU
    processes, connections = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(options.ranks):
            here, there = context.Pipe(duplex=False)
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks, "ANTIPHON_RENDEZVOUS": f"{folder}/world"}

            def main(there: Connection = there, variables: dict[str, Any] = variables) -> None:
                os.environ.update({name: str(value) for name, value in variables.items()})
                rank_main(family, options.device, options.timeout, there)

            processes.append(context.Process(target=main))
            processes[-1].start()
            there.close()
            connections.append(here)
        try:
            told(connections, PATIENCE, "that they call")
            time.sleep(delay)
            killed = time.monotonic()
            os.kill(processes[victim].pid or 0, signal.SIGKILL)
            survivors = [each for rank, each in enumerate(connections) if rank != victim]
            named = told(survivors, options.limit, "which rank was lost")
            wrong = [rank for rank, _ in named if rank != victim]
            if wrong:
                raise RuntimeError(f"rank {victim} was killed, and survivors say {wrong}")
            knew = max(at for _, at in named)
            return knew - killed, max(told(survivors, PATIENCE, "that they went on")) - knew
        finally:
            for process in processes:
                process.kill()
                process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=50, help="of each family")
    parser.add_argument("--at-once", type=int, default=4, help="worlds side by side")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of the communicator's deadline, which no survivor should need")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds in which every survivor must know")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    if options.ranks < 3:
        parser.error(f"--ranks {options.ranks}: two ranks at least must survive")
    rows, failures = [], 0

    def attempt(family: str, number: int) -> tuple[float, float] | Exception:
        try:
            return kill_one(family, number, options)
        except Exception as error:
            return error

    for family in options.families:
        with ThreadPoolExecutor(options.at_once) as pool:
            outcomes = list(pool.map(lambda number: attempt(family, number), range(options.kills)))
        right = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
        wrong = [f"kill {number}: {outcome}" for number, outcome in enumerate(outcomes) if isinstance(outcome, Exception)]
        failures += len(wrong)
        row: dict[str, Any] = {"family": family, "kills": len(outcomes), "named by all survivors": len(right), "failures": wrong[:5]}
        if right:
            knew, went_on = zip(*right, strict=True)
            row |= {"ms until the last survivor knew, median": round(statistics.median(knew) * 1e3, 1)}
            row |= {"at most": round(max(knew) * 1e3, 1), "s until the new communicator had called, at most": round(max(went_on), 2)}
        rows.append(row)
        print(row, flush=True)
    if options.record:
        about = {"ranks": options.ranks, "device": options.device, "worlds at once": options.at_once}
        libraries = {"antiphon": antiphon.__version__, "torch": torch.__version__}
        record.write(options.record, {**about, "libraries": libraries, "figures": "kills", "rows": rows})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
