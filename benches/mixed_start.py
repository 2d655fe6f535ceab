"""How long the start of a mixed communication handler takes, with tuning and from the cache, and what a call from Python costs.

    python benches/mixed_start.py [--ranks 4] [--tp 2] [--device cuda] [--hidden 7168] [--json FILE]

Ranks are processes that share the GPUs if there are fewer. The start is the time of the slowest rank's constructor and its
first call; the first of three worlds also calls ``run_autotune``, whose table the other two find in the cache. The cost of a
call is the time that the host spends in it: the mean of eager calls of ``run_mixed_comm``, of the compiled handler that it
calls, and of ``comm.all_reduce`` of as many bytes. On the host that time has the collective's own, of which ``--hidden 8``
leaves little.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

CALLS, BATCHES, ROWS = 200, 9, 4


def rank_main(tp: int, hidden: int, kind: str, tunes: bool) -> None:
    """One rank: rank 0 prints the seconds of a start and the microseconds of calls."""
    import torch
    import torch.distributed as dist

    import antiphon.torch  # noqa: F401  the backend

    from antiphon.comm.cuda_ipc import communicator
    from antiphon.comm.mixed_comm import MixedCommHandler, run_mixed_comm

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank % torch.cuda.device_count())
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the context is not the handler's
    dist.init_process_group("antiphon")

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize(device)

    def slowest(value: float) -> float:
        times: list[float] = [0.0] * world
        dist.all_gather_object(times, value)
        return max(times)

    slowest(0.0)
    start = time.perf_counter()
    handler = MixedCommHandler(
        rank, world, rank, world, 0, 1, tp, world // tp, None, None, torch.bfloat16, device
    )
    made = slowest(time.perf_counter() - start)
    op = handler.get_valid_op_list()[0]
    x = torch.ones(ROWS, hidden, dtype=torch.bfloat16, device=device)
    out = run_mixed_comm(op, handler, x)
    wait()
    first = slowest(time.perf_counter() - start)
    tuning = None
    if tunes:
        start = time.perf_counter()
        handler.run_autotune()
        tuning = slowest(time.perf_counter() - start)

    comm = communicator("mixed_start", dist.group.WORLD)
    same = torch.empty_like(x)
    ways = {
        "run_mixed_comm": lambda: run_mixed_comm(op, handler, x, out),
        "run_mixed_comm, skip_check": lambda: run_mixed_comm(op, handler, x, out, skip_check=True),
        "compiled handler": lambda: handler._core.run(op, x, out),
        "comm.all_reduce": lambda: comm.all_reduce(x, out=same),
    }
    microseconds = {}
    for name, call in ways.items():
        batches = []
        for _ in range(1 + BATCHES):
            wait()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            batches.append((time.perf_counter() - begin) / CALLS * 1e6)
        wait()
        microseconds[name] = slowest(statistics.median(batches[1:]))
    if rank == 0:
        print(json.dumps({"constructor_s": made, "first_call_s": first, "tuning_s": tuning, "host_us": microseconds}))
    dist.barrier()
    handler.shutdown()
    dist.destroy_process_group()


def world(ranks: int, tp: int, hidden: int, device: str, cache: str, tunes: bool) -> dict[str, object]:
    """One world of new processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": ranks}
    processes = []
    for rank in range(ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "ANTIPHON_CACHE_DIR": cache}
        environment = os.environ | {name: str(value) for name, value in (shared | own).items()}
        command = [sys.executable, __file__, "--rank", "--tp", str(tp), "--hidden", str(hidden), "--device", device]
        command += ["--tune"] * tunes
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        texts = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        sys.exit(f"ranks ended with {[process.returncode for process in processes]}")
    result: dict[str, object] = json.loads(texts[0])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    parser.add_argument("--tune", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.tp, options.hidden, options.device, options.tune)
        return
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "cached", "cached again"):
            of = options.ranks, options.tp, options.hidden, options.device, cache
            results[name] = world(*of, tunes=name == "cold")
            print(f"{name}: {json.dumps(results[name])}", flush=True)
    if options.record:
        shape = {"ranks": options.ranks, "tp": options.tp, "hidden": options.hidden, "device": options.device}
        record.write(options.record, {**shape, **results})


if __name__ == "__main__":
    main()
