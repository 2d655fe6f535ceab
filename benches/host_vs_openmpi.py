"""All-reduce on the host beside Open MPI, in one run; benches/README.md says what the columns mean."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import record

HERE = Path(__file__).resolve().parent
ANTIPHON = HERE.parent / "target" / "release" / "antiphon"
BATCHES = 11  # what `antiphon bench` does
SMALL = [4, 16, 64, 256, 1024, 4096, 16384, 65536]
LARGE = [256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def calls_for(size: int) -> int:
    """Calls in a batch: about 50 MB, so that a batch is long enough to time and the whole run takes minutes."""
    return min(max(50_000_000 // (size + 2_000), 2), 20_000)


def bench(collective: str, size: int, *options: str, ranks: int, calls: int | None = None) -> float:
    """The microseconds that `antiphon bench` measures; every element must be right."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [str(ANTIPHON), "bench", collective, "-n", str(ranks), "--sizes", str(size), "--json", file.name]
        command += [*options, "--iterations", str(calls or calls_for(size))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (row,) = json.load(open(file.name))["rows"]
        assert row["errors"] == 0, row
        return row["latency_us"]


def mpi(program: list[str], size: int, buffers: str, ranks: int) -> float:
    """The median over batches of an MPI program's times."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *root, "--bind-to", "core", "-n", str(ranks), *program]
    command += [str(size), str(calls_for(size)), str(BATCHES), buffers]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert len(lines) == BATCHES, lines
    return statistics.median(map(float, lines))


def peers(folder: str) -> dict[str, list[str]]:
    """The MPI programs by name; the one in C if there is a compiler for it."""
    programs = {"mpi4py": [sys.executable, str(HERE / "mpi_all_reduce.py")]}
    if shutil.which("mpicc"):
        binary = f"{folder}/openmpi_all_reduce"
        subprocess.run(["mpicc", "-O2", str(HERE / "openmpi_all_reduce.c"), "-o", binary], check=True)
        programs["C"] = [binary]
    return programs


def compare(buffers: str, ranks: int, programs: dict[str, list[str]]) -> list[dict]:
    """One table: every size, ours and theirs and the floor."""
    print(f"\nfloat32 sum, {ranks} ranks, {buffers} tensors; µs, and ours as a ratio to each peer and to the floor")
    names = [*programs, "floor"]
    print(f"{'bytes':>10} {'ours':>10} " + " ".join(f"{name:>10} {'ratio':>6}" for name in names))
    rows = []
    for size in SMALL + LARGE:
        ours_kind, theirs_kind = ("symmetric", "shared") if buffers == "shared" else ("private", "private")
        row = {"bytes": size, "buffers": buffers}
        row["ours"] = bench("all-reduce", size, "--buffers", ours_kind, ranks=ranks)
        row |= {name: mpi(program, size, theirs_kind, ranks) for name, program in programs.items()}
        row["floor"] = bench("memory", size, "--buffers", ours_kind, ranks=ranks)
        cells = (f"{row[name]:>10.2f} {row['ours'] / row[name]:>6.2f}" for name in names)
        print(f"{size:>10} {row['ours']:>10.2f} " + " ".join(cells), flush=True)
        rows.append(row)
    return rows


def summarise(rows: list[dict], names: list[str]) -> dict[str, float]:
    """Median ratios in the two ranges."""
    summary = {}
    for buffers in dict.fromkeys(row["buffers"] for row in rows):
        mine = [row for row in rows if row["buffers"] == buffers]
        for label, sizes in [("4 B to 64 KiB", SMALL), ("256 KiB to 64 MiB", LARGE)]:
            for name in names if sizes is SMALL else [*names, "floor"]:
                ratios = [row["ours"] / row[name] for row in mine if row["bytes"] in sizes]
                summary[f"{buffers}, {label}, median ratio to {name}"] = round(statistics.median(ratios), 3)
        largest = [row["ours"] / row["floor"] for row in mine if row["bytes"] >= 16 << 20]
        summary[f"{buffers}, 16 and 64 MiB, mean ratio to floor"] = round(statistics.mean(largest), 3)
    return summary


def further(ranks: int) -> dict[str, float]:
    """bf16 against float32 for equal counts, and more ranks than cores."""
    count = 16 << 20
    f32 = [bench("all-reduce", 4 * count, ranks=ranks, calls=3) for _ in range(3)]
    bf16 = [bench("all-reduce", 2 * count, "--dtype", "bf16", ranks=ranks, calls=3) for _ in range(3)]
    return {
        "bf16 per element, ratio to float32 (16 Mi elements)": round(min(bf16) / min(f32), 3),
        "8 ranks, 1 MiB, ms": round(bench("all-reduce", 1 << 20, ranks=8, calls=20) / 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = peers(folder)
        rows = [row for buffers in ("private", "shared") for row in compare(buffers, arguments.ranks, programs)]
    summary = summarise(rows, list(programs)) | further(arguments.ranks)
    print()
    for what, figure in summary.items():
        print(f"{figure:>8}  {what}")
    if arguments.record:
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
        figures = {
            "peer": version,
            "unit": "microseconds per call, median of 11 batches, slowest rank",
            "summary": summary,
            "rows": rows,
        }
        record.write(arguments.record, figures)


main()
