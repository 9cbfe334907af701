"""The output of every comparison: a table, its CSV, the losses as CSV, and a verdict."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_cp.apps.compare.runs import LOSSES, TrainRun


@dataclass(frozen=True)
class ComparisonResult:
    """The answer to one question about runs."""

    columns: Sequence[str]
    lines: Sequence[dict[str, str]]
    """One line for each run: column -> text."""
    of_words: Collection[str]
    """Left-aligned columns; columns of numbers are right-aligned."""
    verdict: str
    passed: bool
    draw: Callable[[Path], None]
    """Writes the PNG."""

    def table(self) -> str:
        """Return the lines as text."""
        cells = [dict(zip(self.columns, self.columns, strict=True)), *self.lines]
        widths = {name: max(len(line[name]) for line in cells) for name in self.columns}
        return "\n".join(
            "  ".join(
                line[name].ljust(widths[name])
                if name in self.of_words
                else line[name].rjust(widths[name])
                for name in self.columns
            ).rstrip()
            for line in cells
        )

    def write_table(self, file: Path) -> None:
        """Write the lines as CSV."""
        with file.open("w", newline="") as content:
            writer = csv.DictWriter(content, self.columns)
            writer.writeheader()
            writer.writerows(self.lines)


def costs(run: TrainRun) -> dict[str, str]:
    """Return the columns of a run's cost."""
    memory = "" if run.memory is None else f"{run.memory:.0f}"
    return {"tokens/s": f"{run.tokens_per_second:.0f}", "MiB/process": memory}


def write_losses(runs: Sequence[TrainRun], file: Path) -> None:
    """Write the aligned curves as CSV: loss, step, tokens, and a column for each run, possibly empty."""
    with file.open("w", newline="") as content:
        writer = csv.writer(content)
        writer.writerow(["loss", "step", "tokens", *(run.name for run in runs)])
        for loss in LOSSES:
            points: dict[tuple[int, float], dict[str, float]] = {}
            for run in runs:
                curve = run.curves[loss]
                for step, tokens, value in zip(
                    curve.steps, curve.tokens, curve.values, strict=True
                ):
                    points.setdefault((step, tokens), {})[run.name] = value
            for (step, tokens), values in sorted(points.items()):
                line = [values.get(run.name, "") for run in runs]
                writer.writerow([loss, step, f"{tokens:.0f}", *line])
