"""`dist.all_reduce` of the backends "antiphon" and "gloo" in the same processes; benches/README.md says how to read it.

    python -m antiphon run -n 2 python benches/python_vs_gloo.py
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import antiphon
import antiphon.torch
import record
import torch
import torch.distributed as dist

SIZES = [4, 64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def calls_for(size: int, seconds: float) -> int:
    """Calls in a round, so that one takes about `seconds` at 100 µs per call and 0.5 GB/s; equal on all ranks."""
    return max(int(seconds / (100e-6 + size / 0.5e9)), 2)


def round_of(group: dist.ProcessGroup, tensor: torch.Tensor, calls: int) -> float:
    """Microseconds per call of the slowest rank."""
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    mine = torch.tensor([(time.perf_counter() - start) / calls * 1e6], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def measure(groups: dict[str, dist.ProcessGroup], size: int, rounds: int, seconds: float) -> dict[str, float]:
    """The medians over rounds, in which the backends take turns."""
    tensor, calls = torch.zeros(size // 4), calls_for(size, seconds)
    times: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(rounds + 1):  # the first warms up
        for name in list(groups)[:: 1 if turn % 2 else -1]:
            found = round_of(groups[name], tensor, calls)
            if turn:
                times[name].append(found)
    row = {name: round(statistics.median(found), 2) for name, found in times.items()}
    return {"bytes": size, "calls": calls, **row, "ratio": round(row["antiphon"] / row["gloo"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.1, help="about how long a round may take")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("antiphon")
    groups = {name: dist.new_group(backend=name) for name in ("antiphon", "gloo")}
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(f"float32 sum, {world_size} ranks; µs per call, median of {arguments.rounds} rounds, slowest rank")
    say(f"{'bytes':>10} {'antiphon':>10} {'gloo':>10} {'ratio':>6}")
    rows = []
    for size in arguments.sizes:
        row = measure(groups, size, arguments.rounds, arguments.seconds)
        say(f"{size:>10} {row['antiphon']:>10.2f} {row['gloo']:>10.2f} {row['ratio']:>6.3f}")
        rows.append(row)
    summary = {"median ratio to gloo": round(statistics.median(row["ratio"] for row in rows), 3)}
    say(f"median ratio {summary['median ratio to gloo']}")
    if arguments.record and rank == 0:
        figures = {
            "ranks": world_size,
            "versions": {
                "antiphon": antiphon.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "unit": f"microseconds per call, median of {arguments.rounds} rounds, slowest rank",
            "summary": summary,
            "rows": rows,
        }
        record.write(arguments.record, figures)
    dist.destroy_process_group()


main()
