"""What a comparison prints and writes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from lightning_cp.compare.deviation import FLOOR, Deviation
from lightning_cp.compare.runs import LOSSES, Run

COLUMNS: tuple[str, ...] = (
    "run",
    "processes",
    "baseline",
    "train deviation",
    "val deviation",
    "at step",
    "tokens/s",
    "MiB/process",
    "result",
)


def rows(runs: Sequence[Run], found: Sequence[Deviation]) -> list[dict[str, str]]:
    """One row for each run, in the order given; baselines have no deviation."""
    by_run = {deviation.run.folder: deviation for deviation in found}
    return [_row(run, by_run.get(run.folder)) for run in runs]


def _row(run: Run, deviation: Deviation | None) -> dict[str, str]:
    memory = "" if run.memory is None else f"{run.memory:.0f}"
    costs = [f"{run.tokens_per_second:.0f}", memory]
    about = [run.name, str(run.processes or "?")]
    if deviation is None:
        return dict(zip(COLUMNS, [*about, "", "", "", "", *costs, "baseline"], strict=True))
    figures = [f"{deviation.largest(loss):.2e}" for loss in LOSSES]
    result = "pass" if deviation.passed else "FAIL"
    cells = [*about, deviation.baseline.name, *figures, str(deviation.step), *costs, result]
    return dict(zip(COLUMNS, cells, strict=True))


def table(lines: Sequence[dict[str, str]]) -> str:
    """The rows as text; numbers to the right."""
    left = {"run", "baseline", "result"}
    cells = [dict(zip(COLUMNS, COLUMNS, strict=True)), *lines]
    widths = {name: max(len(line[name]) for line in cells) for name in COLUMNS}
    return "\n".join(
        "  ".join(
            line[name].ljust(widths[name]) if name in left else line[name].rjust(widths[name])
            for name in COLUMNS
        ).rstrip()
        for line in cells
    )


def verdict(found: Sequence[Deviation]) -> str:
    """The outcome in a sentence."""
    tolerances = " or ".join(sorted({f"{deviation.tolerance:g}" for deviation in found}))
    failed = [deviation for deviation in found if not deviation.passed]
    if not failed:
        return (
            f"pass: no loss is further than {tolerances} from its baseline (the usual floor is 5%)."
        )
    worst = max(deviation.worst for deviation in failed)
    usual = "but within" if worst <= FLOOR else "and beyond even"
    return (
        f"FAIL: {len(failed)} of {len(found)} runs are further than {tolerances} from their baseline, "
        f"{usual} the usual floor of 5%: {', '.join(deviation.run.name for deviation in failed)}."
    )


def write_table(lines: Sequence[dict[str, str]], file: Path) -> None:
    """The rows as CSV."""
    with file.open("w", newline="") as content:
        writer = csv.DictWriter(content, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)


def write_losses(runs: Sequence[Run], file: Path) -> None:
    """The aligned curves as CSV: loss, step, tokens, then a column for each run, empty where it has none."""
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
