"""Do runs agree? Each is held against a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lightning_cp.compare.agreement_picture import draw
from lightning_cp.compare.answer import Answer, costs
from lightning_cp.compare.baseline import pair
from lightning_cp.compare.deviation import FLOOR, Deviation, deviations
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


def agreement(
    runs: Sequence[Run], baselines: Sequence[str] = (), tolerance: float | str = "auto"
) -> Answer:
    """True if every run is within the tolerance of its baseline.

    Args:
        runs: all of them.
        baselines: names or folders; without any, the runs of one process.
        tolerance: the largest relative deviation that passes.

    Raises:
        ConfigError: runs that cannot be compared, or a tolerance that is none.
    """
    found = deviations(pair(runs, baselines), tolerance)
    return Answer(
        columns=COLUMNS,
        lines=rows(runs, found),
        of_words={"run", "baseline", "result"},
        verdict=verdict(found),
        passed=all(deviation.passed for deviation in found),
        draw=partial(draw, runs, found),
    )


def rows(runs: Sequence[Run], found: Sequence[Deviation]) -> list[dict[str, str]]:
    """One row for each run, in the order given; baselines have no deviation."""
    by_run = {deviation.run.folder: deviation for deviation in found}
    return [_row(run, by_run.get(run.folder)) for run in runs]


def _row(run: Run, deviation: Deviation | None) -> dict[str, str]:
    told = {"run": run.name, "processes": str(run.processes or "?"), "result": "baseline"}
    if deviation is not None:
        figures = {f"{loss.split('/')[0]} deviation": deviation.largest(loss) for loss in LOSSES}
        told |= {name: f"{figure:.2e}" for name, figure in figures.items()}
        told |= {"baseline": deviation.baseline.name, "at step": str(deviation.step)}
        told["result"] = "pass" if deviation.passed else "FAIL"
    return dict.fromkeys(COLUMNS, "") | costs(run) | told


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
