"""The scripts that run emulated tests, in a folder as that of a bundle, with programs that stand for test programs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """#!/bin/sh
if [ "$1" = --list ]; then
    [ $# = 3 ] && printf 'fails: test\\nhangs: test\\nis_late: test\\nskips: test\\n'
    printf 'works: test\\n'
    exit
fi
say() { echo "emulator: schedule 7, 5 steps, hash $1; ANTIPHON_EMULATOR_REPLAY=$2 repeats it"; }
case $4 in
    fails) echo this is why; exit 3 ;;
    hangs) sleep 100 ;;
    is_late) mkdir "$(dirname "$0")/../came" ;; # fails once more than it works
    skips) printf 'skipped\\tgpus 2\\tfabric-cuda::skips\\tnone\\n' >> "$ANTIPHON_SKIPPED" ;;
    works)
        [ -z "$ANTIPHON_EMULATOR_COUNTS" ] || echo 3 >> "$ANTIPHON_EMULATOR_COUNTS"
        if [ "$ANTIPHON_EMULATOR_SEED" = 2 ]; then printf 'emulator: race at 0x0\\n  missing: a fence\\n'; exit 1; fi
        if [ -n "$ANTIPHON_EMULATOR_SCHEDULE" ]; then echo > "$TMPDIR/a.trace"; say beef "$TMPDIR/a.trace"; fi
        [ -z "$ANTIPHON_EMULATOR_REPLAY" ] || say "${OTHER:-beef}" "$ANTIPHON_EMULATOR_REPLAY" ;;
esac
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    for folder in ("scripts", "benches", "programs", "tests"):
        (tmp_path / folder).mkdir()
    for script in ("scripts/emulated.py", "scripts/programs.py", "benches/record.py"):
        shutil.copy(ROOT / script, tmp_path / script)
    program = tmp_path / "programs" / "fabric-cuda"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return tmp_path


def emulated(bundle: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ANTIPHON_COMMIT": "c0ffee", "TMPDIR": str(bundle), **variables}
    command = [sys.executable, str(bundle / "scripts" / "emulated.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_table_has_how_each_test_ended(bundle: Path) -> None:
    results = bundle / "results"
    (bundle / "came").mkdir()
    ran = emulated(bundle, "tests", results, "--jobs", 2, "--limit", 2)
    table = [line.split("\t")[:3] for line in (results / "tests.tsv").read_text().splitlines()]
    assert table == [
        ["fabric-cuda", "fails", "failed"],
        ["fabric-cuda", "hangs", "stopped"],
        ["fabric-cuda", "is_late", "failed"],
        ["fabric-cuda", "skips", "skipped"],
        ["fabric-cuda", "works", "ok"],
    ], ran.stderr
    assert ran.returncode == 1
    assert "this is why" in (results / "failed" / "fabric-cuda_fails.txt").read_text()
    assert (results / "skipped").read_text() == "skipped\tgpus 2\tfabric-cuda::skips\tnone\n"
    assert json.loads((results / "tests.json").read_text())["tests"]["failed"] == 2


def test_what_fails_beside_others_runs_again_alone(bundle: Path) -> None:
    results = bundle / "results"
    program = bundle / "programs" / "fabric-cuda"
    program.write_text(PROGRAM.replace('mkdir "$(dirname "$0")/../came"', 'rmdir "$(dirname "$0")/../came" || ! mkdir "$(dirname "$0")/../came"'))
    ran = emulated(bundle, "tests", results, "--jobs", 2, "--only", "is_late")
    assert (ran.returncode, (results / "tests.tsv").read_text().split("\t")[:3]) == (0, ["fabric-cuda", "is_late", "ok alone"]), ran.stderr
    assert (results / "failed").is_dir()


def test_what_has_not_begun_in_time_is_told(bundle: Path) -> None:
    ran = emulated(bundle, "tests", bundle / "results", "--seconds", 0)
    assert ran.returncode == 1
    assert "'not begun': 5" in ran.stdout


def test_a_soak_counts_calls_and_has_each_report_with_its_seed(bundle: Path) -> None:
    results = bundle / "results"
    ran = emulated(bundle, "soak", results, "--jobs", 1, "--seeds", 1, 2, 3, "--", "works")
    record = json.loads((results / "soak.json").read_text())
    assert ran.returncode == 1
    assert (record["runs"], record["calls"], record["ends"]) == (3, 9, {"ok": 2, "reports": 1})
    assert [(report["test"], report["seed"]) for report in record["reports"]] == [("fabric-cuda::works", "2")]
    assert "missing: a fence" in record["reports"][0]["report"]


def test_a_soak_ends_in_time(bundle: Path) -> None:
    results = bundle / "results"
    program = bundle / "programs" / "fabric-cuda"
    program.write_text(PROGRAM.replace("works)", "works) [ $ANTIPHON_EMULATOR_SEED = 1 ] || sleep 100"))
    ran = emulated(bundle, "soak", results, "--jobs", 1, "--seconds", 2, "--", "works")
    record = json.loads((results / "soak.json").read_text())
    assert (ran.returncode, record["ends"], record["failures"]) == (0, {"ok": 1, "cut short by the end": 1}, []), ran.stdout
    # The record goes to others, whom this machine's folders do not concern.
    assert record["command"].startswith("python scripts/emulated.py soak results ")


def test_a_repetition_is_the_same_or_an_error(bundle: Path) -> None:
    trace = bundle / "trace"
    ran = emulated(bundle, "record", trace, "fabric-cuda::works", "--first-seed", 7)
    assert ran.returncode == 0, ran.stderr
    assert emulated(bundle, "replay", trace).returncode == 0
    other = emulated(bundle, "replay", trace, OTHER="dead")
    assert (other.returncode, "ANOTHER" in other.stdout) == (1, True), other.stderr


def test_every_kernel_has_mutants_whose_lines_have_what_is_changed() -> None:
    listed = subprocess.run([sys.executable, ROOT / "scripts" / "mutants.py", "--list"], capture_output=True, text=True, check=True).stdout
    kernels = [file.read_text().splitlines() for file in (ROOT / "crates").glob("*/src/**/*.cuh")]
    mutants = [mutant.split(":", 2) for mutant in listed.splitlines()]
    assert len(mutants) > 100
    reasons = json.loads((ROOT / "benches" / "mutants.json").read_text())
    assert set(reasons) <= set(listed.splitlines()), "a reason of a survivor is of a line that has moved"
    for _, line, change in mutants:
        text = change.split("=>")[0]
        assert any(len(lines) >= int(line) and text in lines[int(line) - 1] for lines in kernels), (line, change)
