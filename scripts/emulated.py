#!/usr/bin/env python3
"""Runs the tests of GPUs on the emulator, each in a process of its own and many at once.

    scripts/emulated.py tests RESULTS              all of them, once: RESULTS/tests.tsv, and what those print that fail
    scripts/emulated.py soak RESULTS [-- WORDS]    those that libtest chooses by WORDS, up to the first race, in another order for each seed: RESULTS/soak.json
    scripts/emulated.py record FOLDER TEST         one of them (PROGRAM::TEST), with a schedule, and all that a repetition needs, which is tried
    scripts/emulated.py replay FOLDER              repeats that, and fails unless each step is the same

The emulator is that of the environment, which `make emulated` and the run.sh of an emulator bundle set.
"""

import argparse
import importlib.util
import itertools
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from programs import ROOT, Ended, Program, find, run

sys.path.append(str(ROOT / "benches"))

import record  # noqa: E402

T = TypeVar("T")
CIRCLE = re.compile(r"emulator: nothing moves.*?(?=\n\S|\Z)", re.S)
SCHEDULE = re.compile(r"emulator: schedule (.*?); ANTIPHON_EMULATOR_REPLAY=(\S+) repeats it")
VARIABLES = ("ANTIPHON_EMULATOR_GPUS", "ANTIPHON_EMULATOR_MULTIPROCESSORS", "ANTIPHON_EMULATOR_CAPABILITY", "ANTIPHON_EMULATOR_RACES", "ANTIPHON_EMULATOR_ROOM")
"""What a schedule depends on."""


class Python:
    """The Python tests, in the place of a program; a file of them, of which each process imports much, in the place of a test."""

    name = "python"

    def tests(self) -> list[str]:
        if not all(map(importlib.util.find_spec, ("pytest", "antiphon"))):
            print("the Python tests need pytest and antiphon: not run")
            return []
        files = sorted((ROOT / "tests").glob("test_*.py"))
        return [str(file.relative_to(ROOT)) for file in files if re.search(r"mark\.cuda|harness\.(DEVICES|WORLDS)", file.read_text())]

    def run(self, test: str, environment: Mapping[str, str], limit: float) -> Ended:
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", "--color", "no", test]
        return run(command, environment, limit)


@dataclass(frozen=True)
class Test:
    program: Program | Python
    name: str

    @property
    def full_name(self) -> str:
        return f"{self.program.name}::{self.name}"

    def run(self, environment: Mapping[str, str], limit: float) -> Ended:
        return self.program.run(self.name, environment, limit)


def share(items: Iterable[T], jobs: int, work: Callable[[T], None]) -> None:
    """Works on the items, on so many threads, of which each takes the next when it is free."""
    rest, taken = iter(items), threading.Lock()

    def take() -> None:
        while True:
            with taken:
                item = next(rest, None)
            if item is None:
                return
            work(item)

    with ThreadPoolExecutor(jobs) as pool:
        for each in [pool.submit(take) for _ in range(jobs)]:
            each.result()


def cpu_hours() -> float:
    """What the processes that have ended have used of all processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / 3600


def keep(folder: Path, test: Test, ended: Ended, word: str = "") -> None:
    """Keeps what a test has printed."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", f"{test.full_name}{word}")
    (folder / f"{name}.txt").write_text(f"status {ended.status}, after {ended.seconds:.0f} s\n{ended.output}")


# --- all tests ---------------------------------------------------------------------------------------------------------------------


def outcome_of(ended: Ended, skipped: Path) -> str:
    """Libtest ends with 0 for a test that did not run, of which the record tells; pytest for a file of which some tests did not."""
    if ended.status is None:
        return "stopped"
    if ended.status != 0:
        return "failed"
    is_skipped = skipped.exists() and re.search(r"^skipped\t", skipped.read_text(), re.M)
    return "skipped" if is_skipped and not re.search(r"^=.* \d+ passed", ended.output, re.M) else "ok"


def read_durations(file: Path) -> dict[str, float]:
    """The seconds of each test, of a table of an earlier run."""
    rows = [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []
    return {f"{program}::{test}": float(seconds) for program, test, _, seconds in rows}


def run_tests(arguments: argparse.Namespace) -> int:
    results: Path = arguments.folder
    table = results / "tests.tsv"
    durations = read_durations(arguments.before or table)
    shutil.rmtree(results / "failed", ignore_errors=True)
    deadline = time.monotonic() + arguments.seconds
    programs: list[Program | Python] = [*find(is_release=arguments.release), Python()]
    tests = [Test(program, name) for program in programs for name in program.tests()]
    tests = [test for test in tests if arguments.only in test.full_name]
    # The longest first, and those of which nothing is known ahead of them, so that all jobs end together.
    tests.sort(key=lambda test: -durations.get(test.full_name, float("inf")))
    rows: dict[Test, tuple[str, float]] = {}
    begun = time.monotonic()

    with tempfile.TemporaryDirectory() as records:

        def work(test: Test, word: str = "") -> None:
            left = deadline - time.monotonic()
            if left < 1:
                return
            # Each has a record of its own, by which it is known whether it ran.
            skipped = Path(records) / f"{tests.index(test)}{word}"
            ended = test.run({"ANTIPHON_SKIPPED": str(skipped)}, min(arguments.limit, left))
            outcome = outcome_of(ended, skipped)
            if outcome in ("failed", "stopped"):
                keep(results / "failed", test, ended, word)
                print(f"{outcome} {test.full_name}{word}", flush=True)
            rows[test] = (outcome + word if outcome == "ok" else outcome, ended.seconds)

        share(tests, arguments.jobs, work)
        # A machine that is busy is late for a deadline.
        for test in [test for test, (outcome, _) in rows.items() if outcome == "failed" and arguments.jobs > 1]:
            work(test, " alone")
        with (results / "skipped").open("w") as record_of_all:
            record_of_all.writelines(file.read_text() for file in sorted(Path(records).iterdir()))

    lines = [(*test.full_name.split("::", 1), *rows.get(test, ("not begun", 0.0))) for test in tests]
    table.write_text("".join(f"{program}\t{name}\t{outcome}\t{seconds:.1f}\n" for program, name, outcome, seconds in sorted(lines)))
    counts = Counter(outcome for _, _, outcome, _ in lines)
    spent = time.monotonic() - begun
    print(f"{dict(counts)} of {len(tests)} tests in {spent:.0f} s, {arguments.jobs} at once, {cpu_hours():.2f} hours of processors")
    figures = {"tests": dict(counts), "jobs": arguments.jobs, "seconds": round(spent), "cpu hours": round(cpu_hours(), 2)}
    not_ok = {f"{program}::{name}": outcome for program, name, outcome, _ in lines if outcome not in ("ok", "skipped")}
    record.write(results / "tests.json", figures | {"other than ok or skipped": not_ok})
    return 0 if set(counts) <= {"ok", "ok alone", "skipped"} else 1


# --- other orders ------------------------------------------------------------------------------------------------------------------


CUT = "cut short by the end"


def soak(arguments: argparse.Namespace) -> int:
    results: Path = arguments.folder
    programs = find(["cuda", "cuda_warm"], is_release=arguments.release)
    tests = [Test(program, name) for program in programs for name in program.tests(arguments.words)]
    variable = "ANTIPHON_EMULATOR_SCHEDULE" if arguments.schedules else "ANTIPHON_EMULATOR_SEED"
    seeds = iter(arguments.seeds or itertools.count(arguments.first_seed))
    begun, last = time.monotonic(), arguments.first_seed
    runs, ends, reports, failures = Counter[str](), Counter[str](), list[dict[str, str]](), list[str]()

    def items() -> Iterator[tuple[int, Test]]:
        nonlocal last
        for last in seeds:
            for test in tests:
                if time.monotonic() - begun > arguments.seconds:
                    return
                yield last, test

    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"

        def work(item: tuple[int, Test]) -> None:
            seed, test = item
            environment = {variable: str(seed), "ANTIPHON_EMULATOR_RACES": "first", "ANTIPHON_EMULATOR_COUNTS": str(counts)}
            limit = min(arguments.limit, max(1, begun + arguments.seconds - time.monotonic()))
            ended = test.run(environment, limit)
            runs[test.full_name] += 1
            circle = CIRCLE.search(ended.output)
            report = ended.race() or (circle[0] if circle else "")
            is_over = ended.status is None and not report and limit < arguments.limit
            how = CUT if is_over else "reports" if report else "stopped" if ended.status is None else "ok" if ended.status == 0 else "failed"
            ends[how] += 1
            if report:
                reports.append({"test": test.full_name, "seed": str(seed), "report": report})
            elif how not in ("ok", CUT):
                failures.append(f"{test.full_name}, seed {seed}: {how}")
            if how not in ("ok", CUT):
                keep(results / "failed", test, ended, f"-{seed}")
                print(f"{how} seed {seed} {test.full_name}", flush=True)

        share(items(), arguments.jobs, work)
        grids = sum(map(int, counts.read_text().split())) if counts.exists() else 0

    figures = {
        "orders by": variable,
        "seeds": f"{arguments.first_seed if not arguments.seeds else arguments.seeds[0]} to {last}",
        "tests": len(runs),
        "runs": runs.total(),
        "calls": grids,
        "ends": dict(ends),
        "reports": reports,
        "failures": failures,
        "jobs": arguments.jobs,
        "seconds": round(time.monotonic() - begun),
        "cpu hours": round(cpu_hours(), 2),
    }
    record.write(results / "soak.json", figures)
    print(json.dumps(figures | {"reports": len(reports)}, indent=1))
    return 0 if set(ends) <= {"ok", CUT} else 1


# --- one order again ---------------------------------------------------------------------------------------------------------------


def scheduled(test: Test, environment: Mapping[str, str], limit: float) -> tuple[str, Path]:
    """What the emulator says of a schedule (its seed, its steps, the hash of them all), and the record of it."""
    ended = test.run({"ANTIPHON_EMULATOR_KEEP": "1", **environment}, limit)
    told = SCHEDULE.findall(ended.output)
    if not told or "emulator: the run is no longer that of" in ended.output:
        raise SystemExit(ended.output)
    return told[-1][0], Path(told[-1][1])


def find_test(full_name: str, *, is_release: bool) -> Test:
    found = [Test(program, name) for program in find(is_release=is_release) for name in program.tests()]
    return next(test for test in found if test.full_name == full_name)


def record_schedule(arguments: argparse.Namespace) -> int:
    folder = arguments.folder.resolve()
    (folder / "cache").mkdir(parents=True, mode=0o700, exist_ok=True)
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    environment = {"ANTIPHON_EMULATOR_SCHEDULE": str(arguments.first_seed), "ANTIPHON_CACHE_DIR": str(folder / "cache")}
    said, trace = scheduled(find_test(arguments.test, is_release=arguments.release), environment, arguments.limit)
    shutil.move(trace, folder / "schedule.trace")
    record.write(folder / "schedule.json", {"test": arguments.test, "schedule": said, "variables": variables})
    # What the host writes to mapped memory while a kernel looks at it is not in a record: of no use is one that is not repeated here.
    return max(replay(arguments) for _ in range(3))


def replay(arguments: argparse.Namespace) -> int:
    """With the programs that were compiled for the record, whatever g++ is here; and with those that g++ makes here, which may differ."""
    folder = arguments.folder.resolve()
    known = json.loads((folder / "schedule.json").read_text())
    test = find_test(known["test"], is_release=arguments.release)
    environment = known["variables"] | {"ANTIPHON_EMULATOR_REPLAY": str(folder / "schedule.trace")}
    said, _ = scheduled(test, environment | {"ANTIPHON_CACHE_DIR": str(folder / "cache")}, arguments.limit)
    is_same = said == known["schedule"]
    print(f"{known['test']}: schedule {said}, recorded {known['schedule']}: {'the same' if is_same else 'ANOTHER'}")
    return 0 if is_same else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tests", "soak", "record", "replay"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("test", nargs="?", help="of `record`")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many tests run at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which all ends")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="of one test")
    parser.add_argument("--release", action="store_true", help="of what Cargo builds, optimised code")
    parser.add_argument("--only", default="", metavar="TEXT", help="of `tests`: those whose names have this")
    parser.add_argument("--before", type=Path, metavar="FILE", help="of `tests`: a table of an earlier run, whose longest tests begin; that of RESULTS without it")
    parser.add_argument("--schedules", action="store_true", help="of `soak`: a seed is a schedule, which can be repeated")
    parser.add_argument("--seeds", type=int, nargs="+", help="of `soak`: these; without it, all numbers until the time is over")
    parser.add_argument("--first-seed", type=int, default=1)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:at])
    arguments.words = sys.argv[at + 1 :]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    steps = {"tests": run_tests, "soak": soak, "record": record_schedule, "replay": replay}
    return steps[arguments.what](arguments)


if __name__ == "__main__":
    sys.exit(main())
