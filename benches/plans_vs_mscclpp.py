"""The same plan files on MSCCL++'s executor and on ours, in one run; benches/README.md says how to read it.

    python3 benches/plans_vs_mscclpp.py --kit mscclpp_bench --gpus 4 --record benches/results/MACHINE/DATE-plans.json

It needs Python, torch (for the peer) and the program `antiphon`, in the PATH or in target/release. The kit is a folder with MSCCL++'s
executor as a library (`libms_bench.so`), the script that times it (`bench_mscclpp.py`), and plans for as many ranks as the folders are
called (`plans/4`). Without a kit ours is timed alone.
"""

import argparse
import glob
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import record

#: Multicast objects belong to the switches, which others share.
MULTICAST_OFF = {
    "MSCCLPP_FORCE_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
}  # fmt: skip
SIZES = [1024, 4096, 14336, 57344, 65536, 229376, 917504, 1 << 20, 3670016, 4 << 20, 7340032, 16 << 20, 29360128, 64 << 20]
LIBRARY = ["one-shot-all-reduce", "packet-all-reduce", "push-two-shot-all-reduce", "two-shot-all-reduce", "direct-all-gather"]
#: The kit's dtype, and so ours.
DTYPE = "bf16"
ROOT = Path(__file__).resolve().parent.parent
OURS = re.compile(
    r"^ *(?P<bytes>\d+) +(?P<us>[\d.]+) +[\d.]+ +(?:[\d.]+|-)(?: +(?P<beside>[\d.]+) +[\d.]+)?  (?P<results>\S.*)$"
)
THEIRS = re.compile(r"^(?P<plan>\S+) +(?P<bytes>\d+) +(?P<us>[\d.]+) us +wrong (?P<wrong>-?\d+)$")


@dataclass
class Plan:
    """A plan file: what decides at which sizes it runs."""

    path: Path
    collective: str
    ranks: int
    unit: int
    limits: tuple[int, int]
    packets: bool
    switch: bool
    #: Equal for plans that differ in their names and their threads per block alone, which our kernel chooses itself.
    digest: str

    @classmethod
    def read(cls, path: Path) -> "Plan":
        plan = json.loads(path.read_text())
        gpu, operations = plan["gpus"][0], json.dumps(plan["gpus"])
        without = {key: value for key, value in plan.items() if key not in ("name", "num_threads_per_block")}
        return cls(
            path=path,
            collective=plan["collective"],
            ranks=len(plan["gpus"]),
            unit=max(gpu["input_chunks"], gpu["output_chunks"], 1) * max(plan.get("buffer_alignment", 16), 16),
            limits=(plan.get("min_message_size", 0), plan.get("max_message_size", 2**64 - 1)),
            packets="pkt" in operations,
            switch='"switch"' in operations,
            digest=hashlib.sha256(json.dumps(without, sort_keys=True).encode()).hexdigest(),
        )

    def sizes(self, sizes: Iterable[int], packet_limit: int) -> list[int]:
        """Those of a rank's larger tensor that it serves, and its peer's script would take."""
        least, most = self.limits
        most = min(most, packet_limit) if self.packets else most
        return [size for size in sizes if size % self.unit == 0 and least <= size <= most]


@dataclass
class Row:
    """A plan's times at a size, in microseconds; a time that is absent was not taken, or its results were wrong."""

    bytes: int
    plan: str
    collective: str
    #: By the form of our kernel.
    ours: dict[str, float] = field(default_factory=dict)
    mscclpp: float | None = None
    #: Our own all-reduce in the same processes.
    by_hand: float | None = None
    wrong: list[str] = field(default_factory=list)

    def ratios(self) -> dict[str, float]:
        """Our times by MSCCL++'s."""
        return {form: round(us / self.mscclpp, 3) for form, us in self.ours.items()} if self.mscclpp else {}

    def best(self) -> float | None:
        return min(self.ours.values(), default=None)


class Rows:
    """All rows, by size and plan."""

    def __init__(self, collectives: dict[str, str]) -> None:
        self.collectives = collectives
        self.rows: dict[tuple[int, str], Row] = {}

    def at(self, bytes_: int, plan: str) -> Row:
        return self.rows.setdefault((bytes_, plan), Row(bytes_, plan, self.collectives[plan]))

    def sorted(self) -> list[Row]:
        return [self.rows[key] for key in sorted(self.rows)]

    def add_ours(self, plan: str, form: str, printed: str) -> int:
        """Takes the table of `antiphon plan run`; how many sizes it has."""
        found = [match for match in map(OURS.match, printed.splitlines()) if match]
        for match in found:
            row = self.at(int(match["bytes"]), plan)
            if match["results"] == "right" or match["results"].startswith("not checked"):
                row.ours[form] = float(match["us"])
                if match["beside"]:
                    row.by_hand = min(float(match["beside"]), row.by_hand or float("inf"))
            else:
                row.wrong.append(f"{form}: {match['results']}")
        return len(found)

    def add_theirs(self, printed: str) -> int:
        """Takes the lines of the kit's script; how many there are."""
        found = [match for match in map(THEIRS.match, printed.splitlines()) if match and match["plan"] in self.collectives]
        for match in found:
            row = self.at(int(match["bytes"]), match["plan"])
            if int(match["wrong"]) > 0:
                row.wrong.append(f"MSCCL++: {match['wrong']} elements are wrong")
            else:
                row.mscclpp = float(match["us"])
        return len(found)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(rows: list[Row], forms: list[str]) -> str:
    """A line for each size and plan."""
    width = max((len(row.plan) for row in rows), default=4)
    ours = "".join(f" {f'ours {form}'.strip():>16} {'ratio':>6}" for form in forms)
    lines = [f"{'bytes':>10}  {'plan':{width}} {'MSCCL++':>9}{ours} {'all-reduce':>11}"]
    for row in rows:
        ratios = row.ratios()
        ours = "".join(f" {number(row.ours.get(form)):>16} {number(ratios.get(form)):>6}" for form in forms)
        line = f"{row.bytes:>10}  {row.plan:{width}} {number(row.mscclpp):>9}{ours} {number(row.by_hand):>11}"
        lines.append(f"{line}  {'; '.join(row.wrong)}".rstrip())
    return "\n".join(lines)


def best(rows: list[Row]) -> list[dict[str, Any]]:
    """The fastest plan of each executor, for each collective and size, and our all-reduce."""
    found = []
    for collective, bytes_ in sorted({(row.collective, row.bytes) for row in rows}):
        here = [row for row in rows if (row.collective, row.bytes) == (collective, bytes_)]
        one: dict[str, Any] = {"collective": collective, "bytes": bytes_}
        by_us = [(us, row.plan) for row in here if (us := row.best()) is not None]
        by_them = [(row.mscclpp, row.plan) for row in here if row.mscclpp is not None]
        one["ours"], one["our plan"] = min(by_us, default=(None, "-"))
        one["mscclpp"], one["their plan"] = min(by_them, default=(None, "-"))
        one["by hand"] = min((row.by_hand for row in here if row.by_hand is not None), default=None)
        for name in ("mscclpp", "by hand"):
            one[f"of {name}"] = round(one["ours"] / one[name], 3) if one["ours"] and one[name] else None
        found.append(one)
    return found


def best_table(rows: list[dict[str, Any]]) -> str:
    titles = f"{'bytes':>10}  {'collective':13} {'ours':>9} {'MSCCL++':>9} {'ratio':>6} {'all-reduce':>11} {'ratio':>6}  plans"
    lines = [titles]
    for row in rows:
        times = f"{number(row['ours']):>9} {number(row['mscclpp']):>9} {number(row['of mscclpp']):>6}"
        by_hand = f"{number(row['by hand']):>11} {number(row['of by hand']):>6}"
        lines.append(f"{row['bytes']:>10}  {row['collective']:13} {times} {by_hand}  {row['our plan']} | {row['their plan']}")
    return "\n".join(lines)


def run(command: list[str], seconds: float) -> tuple[str, str]:
    """What a command prints, and why it failed, if it did. It has no longer than `seconds`; then all its processes end."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            printed, said = process.communicate(timeout=max(seconds, 1))
            why_not = "" if process.returncode == 0 else (said.strip().splitlines() or [f"status {process.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, why_not = process.communicate()[0], f"it took more than {seconds:.0f} s"
    return printed, why_not


def library_plans(antiphon: str, names: list[str], instances: list[int], ranks: int, folder: Path) -> None:
    """Writes plans of our library, in place."""
    for name in names:
        for count in instances:
            file = folder / f"{name}_i{count}.json"
            command = [antiphon, "plan", "build", "--library", name, "--ranks", str(ranks), "--in-place"]
            _, why_not = run([*command, "--instances", str(count), "-o", str(file)], 60)
            if why_not:
                print(f"# {file.stem}: {why_not}", flush=True)


def theirs(arguments: argparse.Namespace, folder: Path, ranks: int, seconds: float) -> tuple[str, str]:
    """What the kit's script prints of the plans in a folder."""
    kit: Path = arguments.kit.resolve()
    sizes = ",".join(map(str, arguments.sizes))
    command = [sys.executable, str(Path(__file__).resolve()), "--as-kit", str(kit), str(arguments.ranks_per_gpu)]
    command += ["--lib", str(kit / "libms_bench.so"), "--plans", str(folder), "--out", str(folder / "theirs"), "--sizes", sizes]
    command += ["--gpus", str(ranks), "--packet-limit", str(arguments.packet_limit), "--limit", str(int(seconds))]
    return run([*command, "--ll8"] if arguments.packets == "ll8" else command, seconds + 30)


def main_of_kit(kit: str, ranks_per_gpu: str, *arguments: str) -> None:
    """The kit's script, whose ranks may share GPUs."""
    sys.path.insert(0, kit)
    os.environ["ANTIPHON_RANKS_PER_GPU"] = ranks_per_gpu
    sys.argv = [str(Path(kit) / "bench_mscclpp.py"), *arguments]
    script: Any = importlib.import_module("bench_mscclpp")
    script.worker = worker_of_kit
    script.main()


def worker_of_kit(rank: int, arguments: Any, meet: Any, results: Any) -> None:
    """A rank of the kit's script; the script itself gives every rank the GPU of its number."""
    import torch

    script: Any = importlib.import_module("bench_mscclpp")
    gpu = rank // int(os.environ["ANTIPHON_RANKS_PER_GPU"])
    set_device = torch.cuda.set_device

    base: Any = script.Lib

    class Lib(base):  # type: ignore[misc]
        def __call__(self, name: str, *given: Any) -> Any:
            return super().__call__(name, *given[:-1], gpu) if name == "open" else super().__call__(name, *given)

    torch.cuda.set_device = lambda device: set_device(gpu)
    script.Lib = Lib
    script.worker(rank, arguments, meet, results)


def ours(arguments: argparse.Namespace, plan: Plan, form: str, sizes: list[int], seconds: float) -> tuple[str, str]:
    """What `antiphon plan run` prints of a plan."""
    command = [arguments.antiphon, "plan", "run", str(plan.path), "--device", "cuda", "--graph", "--dtype", DTYPE]
    command += ["--size", ",".join(map(str, sizes)), "--packets", arguments.packets]
    command += ["--ranks-per-gpu", str(arguments.ranks_per_gpu)]
    command += ["--form", form] if form else []
    command += ["--registered"] if arguments.registered else []
    command += ["--beside", "all-reduce"] if plan.collective == "allreduce" else []
    return run(command, seconds)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def libraries(arguments: argparse.Namespace) -> dict[str, str]:
    found = {"antiphon": run([arguments.antiphon, "--version"], 60)[0].strip(), "torch": version("torch")}
    if arguments.kit:
        stated = arguments.kit / "src/VERSION"
        library = (arguments.kit / "libms_bench.so").read_bytes()
        found["mscclpp"] = stated.read_text().strip() if stated.is_file() else "unknown"
        found["mscclpp library"] = hashlib.sha256(library).hexdigest()[:16]
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", type=Path, help="MSCCL++'s executor, its script and its plans; without it ours runs alone")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--ranks-per-gpu", type=int, default=1, help="more than one: start NVIDIA's MPS")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a rank's larger tensor")
    parser.add_argument("--plans", help="files, as a pattern; the kit's by default")
    parser.add_argument("--library", nargs="*", default=LIBRARY, help="algorithms of our library, on both")
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 4, 8], help="of our library's")
    parser.add_argument("--forms", nargs="+", default=[""], help="of our kernel: auto, compiled, interpreted")
    parser.add_argument("--registered", action="store_true", help="our tensors are registered, as the peer's are")
    parser.add_argument("--packets", choices=["ll8", "ll16"], default="ll16")
    parser.add_argument("--packet-limit", type=int, default=4 << 20, help="bytes of the largest messages of plans with packets")
    parser.add_argument("--limit", type=float, default=480, help="seconds for all")
    parser.add_argument("--antiphon", help="the program; by default the one in the PATH, else that in target/release")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    arguments.antiphon = arguments.antiphon or shutil.which("antiphon") or str(ROOT / "target/release/antiphon")
    if not Path(arguments.antiphon).is_file():
        parser.error(f"there is no program antiphon in the PATH, and no {arguments.antiphon}")
    if arguments.record:
        record.commit()  # which fails now, rather than when all is measured
    return arguments


def collect(arguments: argparse.Namespace, ranks: int, folder: Path) -> list[Plan]:
    """The plans of this run, as files of one folder, ours behind the given ones."""
    pattern = arguments.plans or (f"{arguments.kit}/plans/{ranks}/*.json" if arguments.kit else None)
    for file in glob.glob(pattern) if pattern else []:
        shutil.copy(file, folder)
    library_plans(arguments.antiphon, arguments.library, arguments.instances, ranks, folder)
    plans = [Plan.read(file) for file in sorted(folder.glob("*.json"))]
    for plan in plans:
        if plan.ranks != ranks or plan.switch:
            why = "it needs multicast of the peer" if plan.switch else f"it is for {plan.ranks} ranks, not {ranks}"
            print(f"# {plan.path.stem}: {why}")
            plan.path.unlink()
    return [plan for plan in plans if plan.path.exists()]


def measure(arguments: argparse.Namespace, plans: list[Plan], rows: Rows, ranks: int, folder: Path) -> list[str]:
    """Times all plans, theirs first, and tells what could not be timed."""
    began, notes = time.monotonic(), []

    def note(text: str) -> None:
        notes.append(text)
        print(f"# {text}", flush=True)

    if arguments.kit:
        printed, why_not = theirs(arguments, folder, ranks, arguments.limit / 2)
        print(f"# MSCCL++: {rows.add_theirs(printed)} times", flush=True)
        if why_not:
            note(f"MSCCL++: {why_not}")
    else:
        note("MSCCL++: not timed, there is no --kit")
    done: dict[tuple[str, str], str] = {}
    for plan in plans:
        name, sizes = plan.path.stem, plan.sizes(arguments.sizes, arguments.packet_limit)
        for form in arguments.forms:
            left = arguments.limit - (time.monotonic() - began)
            if not sizes or left < 5:
                note(f"{name}: {'serves none of the sizes' if not sizes else 'ours was not timed, the time is over'}")
                continue
            printed = done.get((plan.digest, form), "")
            if not printed:
                printed, why_not = ours(arguments, plan, form, sizes, min(left, 120))
                if why_not:
                    note(f"{name}{' ' + form if form else ''}: {why_not}")
            done[plan.digest, form] = printed
            rows.add_ours(name, form, printed)
    return notes


def main() -> None:
    os.environ.update(MULTICAST_OFF)
    arguments = parse()
    ranks = arguments.gpus * arguments.ranks_per_gpu
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plans = collect(arguments, ranks, folder)
        rows = Rows({plan.path.stem: plan.collective for plan in plans})
        notes = measure(arguments, plans, rows, ranks, folder)
    fastest = best(rows.sorted())
    print(table(rows.sorted(), arguments.forms), best_table(fastest), sep="\n\n")
    if arguments.record:
        figures = [vars(row) | {"ratios": row.ratios()} for row in rows.sorted()]
        facts: dict[str, Any] = {"ranks": ranks, "ranks per GPU": arguments.ranks_per_gpu, "registered": arguments.registered}
        facts["libraries"] = libraries(arguments)
        record.write(arguments.record, facts | {"figures": f"{DTYPE}, µs", "notes": notes, "best": fastest, "rows": figures})
    if not any(row.ours for row in rows.rows.values()) or any(row.wrong for row in rows.rows.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-kit"]:
        main_of_kit(*sys.argv[2:])
    else:
        main()
