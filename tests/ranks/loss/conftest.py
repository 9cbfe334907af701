"""Prints the worst errors of the losses' matrix at the end of the run."""

from __future__ import annotations

import pytest

from tests.ranks.loss import test_loss_matrix as matrix


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add two tables of what ran in this process: losses by grids, and by engines."""
    for program in sorted({key[0] for key in matrix.worst}):
        for place, names in ((2, matrix.GRIDS), (3, matrix.ENGINES)):
            terminalreporter.section(f"{program}: worst error of a change of weights, float64")
            terminalreporter.write_line(" " * 8 + "".join(f"{name:>10}" for name in names))
            for kind in matrix.KINDS:
                cells = ""
                for name in names:
                    found = [
                        error
                        for key, error in matrix.worst.items()
                        if key[:2] == (program, kind) and key[place] == name
                    ]
                    cells += f"{max(found):10.1e}" if found else " " * 9 + "-"
                terminalreporter.write_line(f"{kind:<8}{cells}")
