"""What a run prints and writes, suite by suite."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_cp.bench.machine import Machine
from lightning_cp.bench.picture import DRAW
from lightning_cp.bench.rates import hardware_of
from lightning_cp.bench.settings import Settings
from lightning_cp.bench.tables import (
    compute_table,
    kernel_tables,
    link_tables,
    mode_tables,
    overhead_table,
)

CONVENTION = (
    "FLOP convention: 4 x head dim x heads for each visible (query, key) pair, forward; 2.5 times that, "
    "backward.\nWhat a mask hides is not counted, and recomputation is not counted beyond those 2.5."
)
TABLES: dict[str, Callable[[Sequence[Any]], str]] = {
    "kernels": kernel_tables,
    "links": link_tables,
    "modes": mode_tables,
    "compute": compute_table,
    "overheads": overhead_table,
}
"""By suite."""
SCHEMA = 1
"""Of ``bench.json``."""
RESTLESS = 0.25
"""Half of the repeats of an idle machine differ by less."""


class Report:
    """Everything that was found so far.

    Args:
        machine: where.
        settings: what was asked for.
        folder: for the files.
    """

    def __init__(self, machine: Machine, settings: Settings, folder: Path) -> None:
        self._machine, self._settings, self._folder = machine, settings, folder
        self._found: dict[str, Sequence[Any]] = {}
        self._left: dict[Path, None] = {}  # files of this run, in the order in which they came
        print(f"{machine.headline}\n{_repeats(settings)}\n{CONVENTION}")
        if machine.device_type == "cpu" and machine.devices > machine.cores:
            print(
                f"{machine.devices} processes share {machine.cores} cores: wall times, and all that follows "
                "from them, say\nlittle. CPU-seconds are right."
            )

    def take(self, suite: str, rows: Sequence[Any]) -> None:
        """Print the tables of a suite, write its rows and draw its picture."""
        self._found[suite] = rows
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        print(f"\n## {suite}\n\n{TABLES[suite](rows)}")
        print(_trust(rows), end="", flush=True)
        self._write()
        self._draw(suite, rows)

    def finish(self) -> None:
        """Say where everything is."""
        print("\n" + "\n".join(f"  {file}" for file in self._left), flush=True)

    def _write(self) -> None:
        found = {suite: [asdict(row) for row in rows] for suite, rows in self._found.items()}
        about = {"machine": asdict(self._machine), "settings": asdict(self._settings)}
        text = {"schema": SCHEMA, "convention": CONVENTION, **about, **found}
        self._folder.mkdir(parents=True, exist_ok=True)
        bench, hardware = (self._folder / name for name in ("bench.json", "hardware.json"))
        bench.write_text(json.dumps(text, indent=1) + "\n")
        self._left[bench] = None
        if set(self._found) - {"modes"}:
            hardware_of(self._machine, self._found).save(hardware)
            self._left[hardware] = None

    def _draw(self, suite: str, rows: Sequence[Any]) -> None:
        picture = self._folder / f"{suite}.png"
        picture.unlink(missing_ok=True)  # a run before may have left one
        try:
            DRAW[suite](rows, self._machine.headline, picture)
        except ImportError as error:
            print(f"\nNo picture of {suite}: {error}. What draws it: pip install matplotlib.")
        if picture.exists():
            self._left[picture] = None


def _trust(rows: Sequence[Any]) -> str:
    """A warning where repeats differ so much that something else must be running."""
    spreads = [row.spread for row in rows if row.spread is not None]
    if not spreads or statistics.median(spreads) < RESTLESS:
        return ""
    return (
        f"\nHalf of the spreads are above {statistics.median(spreads):.0%}: runs this short, or other jobs "
        "on this machine, make\ntimes uncertain. On CPU, CPU-seconds suffer less.\n"
    )


def _repeats(settings: Settings) -> str:
    return (
        f"Ranks begin together; a figure is of the slowest rank, the least of {settings.repeats} after "
        f"{settings.warm_up} to warm up.\n{_SURE if settings.repeats > 1 else _UNSURE}"
    )


_SURE = "The spread is (most - least) / least."
_UNSURE = (
    "Of one repeat nobody knows how sure it is: there is no spread, and nothing that depends on it."
)
