"""Agreement of runs: the relative deviation of each from its baseline, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_cp.apps.compare.runs import (
    LOSSES,
    ComparisonResult,
    TrainRun,
    check_same_steps,
    costs,
    pair,
)
from lightning_cp.errors import ConfigError
from lightning_cp.utils.colors import color_of

FLOAT32_TOLERANCE = 1e-4
"""Rounding in another order, over a run. No bound follows from theory; a wrong seam is far above."""
FLOOR = 0.05
"""The usual 5%, commonly accepted as agreeing, and the loosest tolerance allowed here."""
OTHER_BATCHES = (
    "their batches are different, so their losses need not agree. Data parallel runs need a baseline with as "
    "many data ranks."
)
EXACT = {"32-true", "32", "64-true", "64"}


@dataclass(frozen=True)
class Deviation:
    """One run against its baseline."""

    run: TrainRun
    baseline: TrainRun
    curves: dict[str, list[float]]
    """|run - baseline| / |baseline| of each loss at every step."""
    tolerance: float

    def largest(self, loss: str) -> float:
        """Return the largest relative deviation of one loss."""
        return max(self.curves[loss])

    @property
    def worst(self) -> float:
        """The largest deviation over all losses."""
        return max(map(self.largest, self.curves))

    @property
    def step(self) -> int:
        """The step of the largest deviation."""
        loss = max(self.curves, key=self.largest)
        return self.run.curves[loss].steps[self.curves[loss].index(self.worst)]

    @property
    def passed(self) -> bool:
        """True if the largest deviation is within the tolerance."""
        return self.worst <= self.tolerance


def deviations(
    pairs: Sequence[tuple[TrainRun, TrainRun]], tolerance: float | str = "auto"
) -> list[Deviation]:
    """Compare each run with its baseline.

    Args:
        pairs: runs and their baselines.
        tolerance: the largest relative deviation that passes; ``auto`` for float32.

    Raises:
        ConfigError: curves that cannot be compared, or an invalid tolerance.
    """
    return [
        Deviation(
            run,
            baseline,
            {loss: _relative(run, baseline, loss) for loss in LOSSES},
            _tolerance(tolerance, run),
        )
        for run, baseline in pairs
    ]


def _relative(run: TrainRun, baseline: TrainRun, loss: str) -> list[float]:
    ours, theirs = run.curves[loss], baseline.curves[loss]
    check_same_steps(run, baseline, loss, called=f"its baseline {baseline.name}", why=OTHER_BATCHES)
    pairs = zip(ours.values, theirs.values, strict=True)
    return [_deviation(value, expected) for value, expected in pairs]


def _deviation(value: float, expected: float) -> float:
    if value == expected:
        return 0.0
    return abs(value - expected) / abs(expected) if expected else float("inf")


def _tolerance(asked: float | str, run: TrainRun) -> float:
    precision = str(run.settings.get("trainer.precision"))
    if asked == "auto" and precision in EXACT:
        return FLOAT32_TOLERANCE
    if asked == "auto":
        raise ConfigError(
            f"{run.name} was trained in {precision}, and tolerance=auto knows only float32. Say what you "
            f"expect: tolerance=0.01, at most {FLOOR}."
        )
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not 0 <= asked <= FLOOR:
        raise ConfigError(
            f"tolerance={asked} is not between 0 and {FLOOR}. 5% is what is usually accepted as agreeing, "
            "and the loosest that can be asked for; float32 runs reach 1e-4."
        )
    return float(asked)


SMALLEST = 1e-9
"""Deviations of 0 are drawn here, since the axis is logarithmic."""


def draw(runs: Sequence[TrainRun], found: Sequence[Deviation], picture: Path) -> None:
    """Draw training losses above, their relative deviations below.

    Args:
        runs: all runs.
        found: the deviations of runs with a baseline.
        picture: the PNG to write.
    """
    from matplotlib.figure import Figure  # needs no display
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    compared = {deviation.run.folder for deviation in found}
    colors = {run.folder: color_of(number) for number, run in enumerate(runs)}
    for run in runs:
        curve = run.curves["train/loss"]
        width = 1.2 if run.folder in compared else 3.5  # baselines stay visible behind the others
        alpha = 1.0 if run.folder in compared else 0.35
        style = {"lw": width, "alpha": alpha, "color": colors[run.folder]}
        above.plot(curve.steps, curve.values, label=run.name, **style)
    for deviation in found:
        values = [max(value, SMALLEST) for value in deviation.curves["train/loss"]]
        steps = deviation.run.curves["train/loss"].steps
        color = colors[deviation.run.folder]
        below.plot(steps, values, lw=1, marker=".", color=color, label=deviation.run.name)
    for tolerance in sorted({deviation.tolerance for deviation in found}):
        below.axhline(tolerance, color="black", ls="--", lw=1, label=f"tolerance {tolerance:g}")
    below.axhline(FLOOR, color="gray", ls=":", lw=1, label="usual limit 5%")
    above.set(ylabel="training loss (nats per byte)")
    below.set(xlabel="step", ylabel="relative deviation from the baseline", yscale="log")
    below.set_ylim(bottom=SMALLEST / 2)
    below.text(
        0.01,
        SMALLEST * 1.15,
        "1e-9: none at all",
        fontsize=7,
        color="gray",
        transform=below.get_yaxis_transform(),
    )
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=3)
    figure.savefig(picture, dpi=120)


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


def compare_with_baselines(
    runs: Sequence[TrainRun], baselines: Sequence[str] = (), tolerance: float | str = "auto"
) -> ComparisonResult:
    """Compare every run with its baseline; the answer passes if all are within the tolerance.

    Args:
        runs: all runs.
        baselines: names or folders; by default the runs of one process.
        tolerance: the largest relative deviation that passes.

    Raises:
        ConfigError: runs that cannot be compared, or an invalid tolerance.
    """
    found = deviations(pair(runs, baselines), tolerance)
    return ComparisonResult(
        columns=COLUMNS,
        lines=rows(runs, found),
        of_words={"run", "baseline", "result"},
        verdict=verdict(found),
        passed=all(deviation.passed for deviation in found),
        draw=partial(draw, runs, found),
    )


def rows(runs: Sequence[TrainRun], found: Sequence[Deviation]) -> list[dict[str, str]]:
    """Return one row for each run, in the given order; baselines have no deviation."""
    by_run = {deviation.run.folder: deviation for deviation in found}
    return [_row(run, by_run.get(run.folder)) for run in runs]


def _row(run: TrainRun, deviation: Deviation | None) -> dict[str, str]:
    told = {"run": run.name, "processes": str(run.processes or "?"), "result": "baseline"}
    if deviation is not None:
        figures = {f"{loss.split('/')[0]} deviation": deviation.largest(loss) for loss in LOSSES}
        told |= {name: f"{figure:.2e}" for name, figure in figures.items()}
        told |= {"baseline": deviation.baseline.name, "at step": str(deviation.step)}
        told["result"] = "pass" if deviation.passed else "FAIL"
    return dict.fromkeys(COLUMNS, "") | costs(run) | told


def verdict(found: Sequence[Deviation]) -> str:
    """Return the outcome in a sentence."""
    tolerances = " or ".join(sorted({f"{deviation.tolerance:g}" for deviation in found}))
    failed = [deviation for deviation in found if not deviation.passed]
    if not failed:
        return (
            f"pass: no loss is further than {tolerances} from its baseline (the usual limit is 5%)."
        )
    worst = max(deviation.worst for deviation in failed)
    usual = "but within" if worst <= FLOOR else "and beyond even"
    return (
        f"FAIL: {len(failed)} of {len(found)} runs are further than {tolerances} from their baseline, "
        f"{usual} the usual limit of 5%: {', '.join(deviation.run.name for deviation in failed)}."
    )
