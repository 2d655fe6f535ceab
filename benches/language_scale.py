"""How long a direct all-to-all takes from its first call to its JSON, from Python and from Rust.

    cargo build --release -p antiphon-language --example scale
    maturin develop --release
    python benches/language_scale.py [--record FILE]

The programs are equal; the difference between the two is the Python layer: calls, conversions, and the text as a `str`.
"""

import argparse
import subprocess
import time
from pathlib import Path

import record
from antiphon.language import *

RUST = Path(__file__).resolve().parent.parent / "target" / "release" / "examples" / "scale"
#: Ranks and instances.
SIZES = [(8, 1), (16, 4), (64, 1), (64, 4)]
ROUNDS = 9


def all_to_all(size: int, instances: int) -> tuple[float, float, int]:
    start = time.perf_counter()
    with CollectiveProgram("all_to_all", AllToAll(size, 1, False), size, instances=instances):
        for own in range(size):
            rank = Rank(own)
            source, target = rank.get_input_buffer(), rank.get_output_buffer()
            rank.copy(target[own : own + 1], source[own : own + 1], tb=0)
            for step in range(1, size):
                peer = (own + step) % size
                channel = MemoryChannel(peer, own)
                there = Rank(peer).get_output_buffer()
                channel.put(there[own : own + 1], source[peer : peer + 1], tb=step - 1)
                channel.signal(tb=step - 1)
                channel.wait(tb=step - 1)
        built = time.perf_counter()
        text = JSON()
    return built - start, time.perf_counter() - built, len(text)


def rust() -> dict[tuple[int, int], float]:
    """Milliseconds of the same from Rust."""
    lines = subprocess.run([RUST], capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    rows = [line.split(" | ") for line in lines]
    return {tuple(map(int, row[0].split(" x "))): float(row[4]) for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    from_rust, rows = rust(), []
    print("ranks x instances | build ms | JSON ms | all ms | from Rust ms | Python's share")
    for size, instances in SIZES:
        build, text, bytes_ = min((all_to_all(size, instances) for _ in range(ROUNDS)), key=lambda run: run[0] + run[1])
        ours, below = 1e3 * (build + text), from_rust[size, instances]
        print(
            f"{size} x {instances} | {1e3 * build:.1f} | {1e3 * text:.1f} | {ours:.1f} | {below:.1f} | {1 - below / ours:.0%}"
        )
        times = {"build_ms": 1e3 * build, "json_ms": 1e3 * text, "rust_ms": below}
        rows.append({"ranks": size, "instances": instances, "bytes": bytes_, **times})
    if arguments.record:
        record.write(arguments.record, {"figures": f"the fastest of {ROUNDS}", "rows": rows})


if __name__ == "__main__":
    main()
