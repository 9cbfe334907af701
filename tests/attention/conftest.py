"""Prints what the equivalence cells showed at the end of the run."""

from __future__ import annotations

import pytest

from tests.attention import report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add the table of cells, if any ran."""
    if report.lines:
        terminalreporter.section("equivalence cells")
        for line in report.table():
            terminalreporter.write_line(line)
