"""The record of tests that were skipped, and its comparison with a list."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import needs

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "skipped.py"

if "ANTIPHON_TEST_INNER" in os.environ:  # in the processes that tests below start

    def test_inner_that_needs_a_moon() -> None:
        needs.need("moon 1", False, "clouds")

    def test_inner_that_needs_a_sun() -> None:
        needs.need("sun", True, "")


def run_inner(record: Path, **variables: str) -> tuple[int, list[str]]:
    """The status of a run of the inner tests, and what it records of moon and sun."""
    environment = {**os.environ, "ANTIPHON_TEST_INNER": "1", "ANTIPHON_SKIPPED": str(record), **variables}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "inner", str(Path(__file__))]
    status = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
    return status, record.read_text().splitlines()


def test_what_ran_and_what_did_not_is_recorded(tmp_path: Path) -> None:
    status, lines = run_inner(tmp_path / "record", ANTIPHON_REQUIRE="sun")
    place = "tests/test_skipped.py::test_inner_that_needs_a"
    assert (status, lines) == (0, [f"skipped\tmoon 1\t{place}_moon\tclouds", f"ran\tsun\t{place}_sun\t"])


@pytest.mark.parametrize("required", ["moon", "sun, moon", "all"])
def test_what_is_required_and_not_there_fails(tmp_path: Path, required: str) -> None:
    assert run_inner(tmp_path / "record", ANTIPHON_REQUIRE=required)[0] == 1


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


def test_the_script_counts_and_compares(tmp_path: Path) -> None:
    record, expected = tmp_path / "record", tmp_path / "list.txt"
    record.write_text(
        "skipped\tgpus 2\ta::one\t0 found\nskipped\tgpus 2\ta::two\t0 found\nran\troot\tb::three\t\nskipped\tgpus 2\ta::one\t0 found\n"
        "ran\tgpus 2\ta::one\t\n"
    )
    expected.write_text("# why\n")
    run = script(record, "--write", expected)
    assert run.stdout == "need      ran  skipped\ngpus 2      0        2\nroot        1        0\n"
    assert expected.read_text() == "# why\ngpus 2\n    a::one\n    a::two\n"
    assert script(record, "--expect", expected).returncode == 0
    # A test that is no longer skipped, and one that is newly skipped.
    expected.write_text("gpus 2\n    a::one\n    a::four\n")
    run = script(record, "--expect", expected)
    assert run.returncode == 1
    assert "skipped, but not expected to be: a::two (gpus 2)" in run.stderr
    assert "expected to be skipped, but was not: a::four (gpus 2)" in run.stderr
    assert script(record, "--within", expected).stderr == "skipped, but not expected to be: a::two (gpus 2)\n"
    expected.write_text("gpus 2\n    a::one\n    a::two\n    a::four\n")
    assert script(record, "--within", expected).returncode == 0
