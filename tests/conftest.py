"""Tests of the Python package; ``ranks.py`` beside this runs the worlds.

A test that needs what not every machine has is skipped with the reason "needs NEED: WHY". As with the tests in Rust
(``crates/testing``), what ran and what did not is appended to the file that ``ANTIPHON_SKIPPED`` names, and a test fails rather than
skips if ``ANTIPHON_REQUIRE`` names its need.
"""

import os
from collections.abc import Generator
from typing import Any

import pytest

import needs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.passed:
        for mark in item.iter_markers("skipif"):
            need = needs.split(mark.kwargs["reason"])[0]
            needs.record("ran", need, item.nodeid, "")
    return recorded(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return recorded((yield))


def recorded(report: Any) -> Any:
    """A report of something that was skipped is recorded, and becomes a failure where its need is required."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return report
    need, why = needs.split(report.longrepr[2].removeprefix("Skipped: "))
    needs.record("skipped", need, report.nodeid, why)
    if needs.is_required(need):
        report.outcome = "failed"
        report.longrepr = f"ANTIPHON_REQUIRE={os.environ['ANTIPHON_REQUIRE']} and no {need}: {why}"
    return report
