"""The table of faults: what goes wrong, how soon every process must be gone, and what has to be said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.nightly.faults.run import Outcome


@dataclass(frozen=True)
class Row:
    """One fault.

    Args:
        name: what goes wrong, where.
        bound: seconds from the fault until every process must be gone.
        run: makes it happen, in a folder of its own.
        check: asserts what has to have become of it, besides the bound.
    """

    name: str
    bound: float
    run: Callable[[Path], Outcome]
    check: Callable[[Outcome], None]

    def prove(self, folder: Path) -> Outcome:
        """Run and check it."""
        outcome = self.run(folder)
        self.check(outcome)
        assert outcome.seconds < self.bound, outcome
        return outcome


def every() -> tuple[Row, ...]:
    """All rows."""
    from tests.nightly.faults.rows_hangs import HANGS
    from tests.nightly.faults.rows_kills import KILLS
    from tests.nightly.faults.rows_raises import RAISES
    from tests.nightly.faults.rows_told import TOLD

    rows = (*KILLS, *HANGS, *RAISES, *TOLD)
    assert len({row.name for row in rows}) == len(rows)
    return rows
