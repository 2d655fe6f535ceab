"""What tests need of a machine, and the record of it: see ``conftest.py``."""

import ctypes.util
import importlib.util
import os
import re

import pytest


def need(what: str, found: bool, why: str) -> None:
    """Skips the test that runs unless something was found. The first word is its name in ``ANTIPHON_REQUIRE``."""
    if not found:
        pytest.skip(f"needs {what}: {why}")
    test, _, _ = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")
    record("ran", what, test, "")


def need_ucx() -> None:
    """Skips the test that runs unless there is UCX, which carries what passes between nodes."""
    found = "ANTIPHON_UCX" in os.environ or importlib.util.find_spec("libucx") or ctypes.util.find_library("ucp")
    need("ucx", bool(found), "no libucp, nor the package libucx-cu13")


def split(reason: str) -> tuple[str, str]:
    """The need and the rest of a reason: those of :func:`need`, of marks with the same words, and of ``pytest.importorskip``."""
    if found := re.fullmatch(r"needs ([^:]+): (.*)", reason, re.DOTALL):
        return found[1], found[2]
    if found := re.match(r"could not import '([^']+)'", reason):
        return f"module {found[1]}", reason
    return "something", reason


def record(outcome: str, what: str, test: str, why: str) -> None:
    """Appends a line to the record, if there is to be one."""
    if file := os.environ.get("ANTIPHON_SKIPPED"):
        fields = (re.sub(r"[\t\r\n]", " ", field) for field in (outcome, what, test, why))
        with open(file, "a") as records:
            records.write("\t".join(fields) + "\n")


def is_required(what: str) -> bool:
    required = [name.strip() for name in os.environ.get("ANTIPHON_REQUIRE", "").split(",")]
    return what.split()[0] in required or "all" in required
