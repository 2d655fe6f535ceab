"""What a call from Python costs over the call from Rust, and what the import costs; benches/README.md says how to read it."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record

HERE = Path(__file__).resolve().parent
ANTIPHON = [sys.executable, "-m", "antiphon"]
BATCHES = 11
CALLS = 20_000
ROUNDS = 5


def worker() -> None:
    """One rank: the microseconds of each way to call, printed by rank 0."""
    import numpy as np
    import torch

    import antiphon

    comm = antiphon.init(timeout=60)
    array, other = np.ones(1, np.float32), np.ones(1, np.float32)
    tensor, other_tensor = torch.ones(1), torch.ones(1)
    ways = {
        "NumPy, in place": lambda: comm.all_reduce(array, out=array),
        "NumPy, out=": lambda: comm.all_reduce(array, out=other),
        "NumPy, new array": lambda: comm.all_reduce(array),
        "torch, in place": lambda: comm.all_reduce(tensor, out=tensor),
        "torch, out=": lambda: comm.all_reduce(tensor, out=other_tensor),
        "torch, new tensor": lambda: comm.all_reduce(tensor),
    }
    result = {}
    for name, call in ways.items():
        array.fill(0)  # a sum in place grows
        tensor.zero_()
        batches = []
        for _ in range(1 + BATCHES):
            comm.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            batches.append((time.perf_counter() - start) / CALLS * 1e6)
        result[name] = max(comm.exchange_objects(statistics.median(batches[1:])))
    if comm.rank == 0:
        print(json.dumps(result))


def rust() -> float:
    """The microseconds of the same call in a loop in Rust, by the same compiled library."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [*ANTIPHON, "bench", "all-reduce", "-n", "2", "--sizes", "4", "--json", file.name]
        subprocess.run([*command, "--iterations", str(CALLS)], check=True, stdout=subprocess.DEVNULL)
        (row,) = json.load(open(file.name))["rows"]
        return float(row["latency_us"])


def python() -> dict[str, float]:
    command = [*ANTIPHON, "run", "-n", "2", "--no-prefix", "--bind", "--", sys.executable, __file__, "--worker"]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def import_time() -> float:
    """Milliseconds of `import antiphon` in a fresh interpreter."""

    def run(program: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True)
        return (time.perf_counter() - start) * 1e3

    pairs = [(run("import antiphon"), run("pass")) for _ in range(21)]
    return statistics.median(with_import - without for with_import, without in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    if arguments.worker:
        return worker()
    rounds = [{"Rust": rust(), **python()} for _ in range(ROUNDS)]
    rows = {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}
    print(f"{'all_reduce of 4 bytes, 2 ranks':<32} {'µs':>8} {'over Rust':>10}")
    for name, micros in rows.items():
        print(f"{name:<32} {micros:>8.3f} {micros - rows['Rust']:>10.3f}")
    imported = round(import_time(), 1)
    print(f"{'import antiphon':<32} {imported:>8.1f} ms")
    if arguments.record:
        figures: dict[str, Any] = {
            "python": sys.version.split()[0],
            "unit": f"microseconds per call, median of {BATCHES} batches of {CALLS}, slowest rank, median of {ROUNDS} rounds",
            "rows": rows,
            "import antiphon, ms": imported,
            "rounds": rounds,
        }
        record.write(arguments.record, figures)


main()
