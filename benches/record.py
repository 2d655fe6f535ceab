"""Writes records: files of results/ that name the command, the machine, the commit and the date of their figures.

    python benches/record.py benches/results/MACHINE/DATE-WHAT.txt -- target/release/antiphon bench --device cuda --tail
    python benches/record.py benches/results/MACHINE/DATE-WHAT.json -- target/release/antiphon bench --device cuda --json {}

runs a command and records what it prints, or what it writes to the file that stands in the place of `{}`. The benchmarks in Python call
`write` themselves, with `--record`. scripts/figures.py refuses records without these facts, and sets the tables of the docs beside them.

A checkout knows its commit. Elsewhere, for example on a GPU machine to which only the programs travel, ANTIPHON_COMMIT names it.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

#: What every record has.
FACTS = ("command", "machine", "commit", "date")
#: Variables that change what is measured.
VARIABLES = ("MSCCLPP_", "NCCL_", "TORCH_SYMM_MEM", "NVSHMEM_", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE", "OMP_NUM_THREADS")
HERE = Path(__file__).resolve().parent


def _output(*command: str) -> str:
    """What a command prints; nothing if it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit() -> str:
    """The commit of the checkout, with `-dirty` behind it if more than records differs from it; elsewhere that of ANTIPHON_COMMIT."""
    if given := os.environ.get("ANTIPHON_COMMIT"):
        return given
    found = _output("git", "rev-parse", "HEAD")
    if not found:
        raise SystemExit(f"{HERE} is no checkout: set ANTIPHON_COMMIT to the commit of what is measured")
    changed = _output("git", "status", "--porcelain", "--", ":/", ":!/benches/results", ":!/docs")
    return found + ("-dirty" if changed else "")


def machine() -> dict[str, Any]:
    """This machine: its processor, and its GPUs if it has any."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    found = {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    if gpus:
        name, driver = gpus[0].rsplit(", ", 1)
        found |= {"gpus": f"{len(gpus)} × {name}", "driver": driver}
    return found


def command(words: list[str]) -> str:
    """As a shell reads it, with the variables that change what is measured."""
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    return shlex.join(variables + words)


def facts(words: list[str] | None = None) -> dict[str, Any]:
    """The facts of a record; without words the command is this process's own, with the names of files where their paths are the machine's."""
    if words is None:
        script = Path(sys.argv[0]).resolve()
        given = (Path(word).name if word.startswith("/") else word for word in sys.argv[1:])
        words = ["python", str(script.relative_to(HERE.parent) if HERE.parent in script.parents else script), *given]
    found = dict(zip(FACTS, (command(words), machine(), commit(), date.today().isoformat()), strict=True))
    return found | {"load": round(os.getloadavg()[0], 1)}


def write(path: Path, figures: dict[str, Any]) -> None:
    """Records the figures of this process's command, as JSON."""
    _write_json(path, facts() | figures)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help=".txt for what the command prints, .json for what it writes to {}")
    parser.add_argument("command", nargs="+", help="the command and its arguments, behind --")
    arguments = parser.parse_args()
    words: list[str] = arguments.command
    known = facts([word.replace("{}", arguments.file.name) for word in words])
    if arguments.file.suffix == ".json":
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "figures.json"
            subprocess.run([word.replace("{}", str(written)) for word in words], check=True)
            figures = json.loads(written.read_text())
        # Antiphon's own `machine` has its GPUs and the versions of their libraries.
        figures["machine"] = known["machine"] | figures.get("machine", {})
        _write_json(arguments.file, known | figures)
        return
    printed: list[str] = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line)
    if process.returncode:
        raise SystemExit(process.returncode)
    known["machine"] = ", ".join(f"{name} {value}" for name, value in known["machine"].items())
    head = [f"# {name}: {value}\n" for name, value in known.items()]
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text("".join(head + printed))


if __name__ == "__main__":
    main()
