#!/usr/bin/env python3
"""Which tests ran and which were skipped, by what they need of the machine.

    scripts/skipped.py RECORDS...                     prints a table; RECORDS are files that $ANTIPHON_SKIPPED named
    scripts/skipped.py RECORDS... --expect SET        fails unless exactly the tests of SET were skipped
    scripts/skipped.py RECORDS... --within SET        fails if a test was skipped that SET has not
    scripts/skipped.py RECORDS... --write SET         makes SET anew

A record is a line of `ran` or `skipped`, the need, the test and the reason, between tabs. A set (tests/skipped/*.txt) has the needs,
and behind each its tests, indented.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

Tests = dict[str, set[str]]
"""The tests of each need."""


def read(records: Iterable[Path]) -> tuple[Tests, Tests]:
    """What ran and what was skipped. A test that asked twice counts once, as skipped if it was so once."""
    ran: Tests = {}
    skipped: Tests = {}
    for record in records:
        for line in record.read_text().splitlines() if record.exists() else ():
            outcome, need, test, _reason = line.split("\t")
            {"ran": ran, "skipped": skipped}[outcome].setdefault(need, set()).add(test)
    for need, tests in skipped.items():
        ran[need] = ran.get(need, set()) - tests
    return ran, skipped


def read_set(file: Path) -> Tests:
    tests: Tests = {}
    need = ""
    for line in file.read_text().splitlines():
        if line.startswith(" "):
            tests[need].add(line.strip())
        elif line and not line.startswith("#"):
            need = line
            tests[need] = set()
    return tests


def write_set(file: Path, tests: Tests) -> None:
    comments = [line for line in file.read_text().splitlines() if line.startswith("#")] if file.exists() else []
    lines = [*comments, *(line for need in sorted(tests) for line in (need, *(f"    {test}" for test in sorted(tests[need]))))]
    file.write_text("\n".join(lines) + "\n")


def table(ran: Tests, skipped: Tests) -> str:
    needs = sorted(ran.keys() | skipped.keys())
    width = max((len(need) for need in needs), default=4)
    lines = [f"{'need':{width}}    ran  skipped"]
    lines += [f"{need:{width}}  {len(ran.get(need, ())):5}  {len(skipped.get(need, ())):7}" for need in needs]
    return "\n".join(lines)


def pairs(tests: Tests) -> set[tuple[str, str]]:
    return {(need, test) for need, of in tests.items() for test in of}


def differences(skipped: Tests, expected: Tests, *, within: bool) -> list[str]:
    found, wanted = pairs(skipped), pairs(expected)
    lines = [f"skipped, but not expected to be: {test} ({need})" for need, test in sorted(found - wanted)]
    if not within:
        lines += [f"expected to be skipped, but was not: {test} ({need})" for need, test in sorted(wanted - found)]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--expect", type=Path)
    parser.add_argument("--within", type=Path)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    ran, skipped = read(arguments.records)
    print(table(ran, skipped))
    if arguments.write:
        write_set(arguments.write, skipped)
    wrong = []
    if arguments.expect:
        wrong += differences(skipped, read_set(arguments.expect), within=False)
    if arguments.within:
        wrong += differences(skipped, read_set(arguments.within), within=True)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
