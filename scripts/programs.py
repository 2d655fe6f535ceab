#!/usr/bin/env python3
"""The test programs that run on the emulator, and their tests: programs that Cargo builds, or those of a bundle, where Cargo is not needed.

    scripts/programs.py FOLDER [TARGET...]     builds them, or those of these targets, as optimised code, and copies them to FOLDER, as CRATE-TARGET
"""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, or the folder of a bundle."""

BUNDLED = ROOT / "programs"
"""The programs of a bundle."""

TARGETS = {"cuda": [], "cuda_warm": [], "conformance": ["gpus::"], "plan": ["between_gpus"]}
"""Which tests of a target run on GPUs: those whose names have these parts."""

FEATURES = {False: ["--all-features"], True: ["--exclude", "antiphon-python"]}
"""Options of Cargo for code that is not optimised and for code that is: those of `make rust` and of `make gpu-bundle`, so that nothing is built twice."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: its status, none if it was stopped at its limit; its seconds; what it printed."""

    status: int | None
    seconds: float
    output: str

    def race(self) -> str:
        """The emulator's report of a race, if there is one."""
        found = re.search(r"emulator: race.*?missing:[^\n]*", self.output, re.S)
        return found[0] if found else ""


def run(command: Sequence[str | Path], environment: Mapping[str, str], limit: float, folder: Path = ROOT) -> Ended:
    """Runs a command with these variables beside ours. At the limit the command and all its processes are ended."""
    start = time.monotonic()
    with subprocess.Popen(
        command,
        env={**os.environ, **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            status = None
    return Ended(status, time.monotonic() - start, output)


@dataclass(frozen=True)
class Program:
    """A test program: its crate, its target and its file."""

    crate: str
    target: str
    file: Path
    command: Path
    """The command `antiphon`, which some tests run."""

    @property
    def name(self) -> str:
        return f"{self.crate}-{self.target}"

    def environment(self) -> dict[str, str]:
        """What Cargo tells a test program."""
        found = {"CARGO_MANIFEST_DIR": str(ROOT / "crates" / self.crate), "CARGO_BIN_EXE_antiphon": str(self.command)}
        # A file of a bundle has its crate in its name.
        return found if self.file.name == self.name else found | {"CARGO_PKG_NAME": f"antiphon-{self.crate}"}

    def tests(self, arguments: Sequence[str] = ()) -> list[str]:
        """The tests that run on GPUs, and are also chosen by these arguments of libtest."""
        listed = run([self.file, "--list", "--format", "terse", *arguments], self.environment(), 60)
        if listed.status != 0:
            raise SystemExit(f"{self.name} --list: {listed.output}")
        names = [line.removesuffix(": test") for line in listed.output.splitlines() if line.endswith(": test")]
        return [name for name in names if all(part in name for part in TARGETS[self.target])]

    def run(self, test: str, environment: Mapping[str, str], limit: float) -> Ended:
        """Runs one test in a process of its own."""
        return run([self.file, "--test-threads", "1", "--exact", test], {**self.environment(), **environment}, limit)


def bundled(folder: Path) -> list[Program]:
    """The programs of a folder, whose files are named CRATE-TARGET."""
    names = [file.name.partition("-") for file in sorted(folder.iterdir())]
    return [Program(crate, target, folder / f"{crate}-{target}", folder / "antiphon") for crate, _, target in names if target]


@functools.cache
def built(targets: tuple[str, ...], *, is_release: bool = False) -> list[Program]:
    """The programs that Cargo builds."""
    options = [*FEATURES[is_release], *(option for target in targets for option in ("--test", target))]
    command = ["cargo", "test", "--workspace", *options, "--no-run", "--message-format", "json", *["--release"] * is_release]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = []
    for message in map(json.loads, output.splitlines()):
        if message.get("executable") and "test" in message["target"]["kind"]:
            file = Path(message["executable"])
            crate = Path(message["manifest_path"]).parent.name
            found.append(Program(crate, message["target"]["name"], file, file.parent.parent / "antiphon"))
    return found


def find(targets: Sequence[str] = tuple(TARGETS), *, is_release: bool = False) -> list[Program]:
    """The programs of these targets that have tests on GPUs: a bundle's where they are, and else those that Cargo builds."""
    programs = bundled(BUNDLED) if BUNDLED.is_dir() else built(tuple(targets), is_release=is_release)
    return [program for program in programs if program.target in targets and program.tests()]


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    targets = sys.argv[2:] or list(TARGETS)
    folder.mkdir(parents=True, exist_ok=True)
    for program in find(targets, is_release=True):
        shutil.copy(program.file, folder / program.name)
        if program.target == "plan":
            shutil.copy(program.command, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
