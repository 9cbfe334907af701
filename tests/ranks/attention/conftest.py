"""Prints what the equivalence cells and the rounding errors showed at the end of the run."""

from __future__ import annotations

import pytest

from tests.helpers.attention import report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add the tables of what ran; where something failed, the last lines are for that."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        return
    if report.lines:
        terminalreporter.section("equivalence cells")
        for line in report.table():
            terminalreporter.write_line(line)
    if report.ratios:
        terminalreporter.section("rounding errors in bfloat16, as multiples of one rank's")
        for line in report.ratio_table():
            terminalreporter.write_line(line)
