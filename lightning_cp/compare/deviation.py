"""How far the losses of a run are from those of its baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_cp.compare.runs import LOSSES, Run
from lightning_cp.compare.same_steps import require_same_steps
from lightning_cp.errors import ConfigError

FLOAT32_TOLERANCE = 1e-4
"""Rounding in another order, over a run. No bound follows from theory; a wrong seam is far above."""
FLOOR = 0.05
"""The usual 5%: what is commonly accepted as agreeing, and the loosest that can be asked for here."""
OTHER_BATCHES = (
    "their batches are different, so their losses need not agree. Data parallel runs need a baseline with as "
    "many data ranks."
)
EXACT = {"32-true", "32", "64-true", "64"}


@dataclass(frozen=True)
class Deviation:
    """One run against its baseline."""

    run: Run
    baseline: Run
    curves: dict[str, list[float]]
    """Of each loss, |run - baseline| / |baseline| at every step."""
    tolerance: float

    def largest(self, loss: str) -> float:
        """The largest relative deviation of one loss."""
        return max(self.curves[loss])

    @property
    def worst(self) -> float:
        """The largest of all losses."""
        return max(map(self.largest, self.curves))

    @property
    def step(self) -> int:
        """Where it is."""
        loss = max(self.curves, key=self.largest)
        return self.run.curves[loss].steps[self.curves[loss].index(self.worst)]

    @property
    def passed(self) -> bool:
        """True if it is within the tolerance."""
        return self.worst <= self.tolerance


def deviations(
    pairs: Sequence[tuple[Run, Run]], tolerance: float | str = "auto"
) -> list[Deviation]:
    """Compare each run with its baseline.

    Args:
        pairs: runs and their baselines.
        tolerance: the largest relative deviation that passes; ``auto`` for float32.

    Raises:
        ConfigError: curves that do not belong together, or a tolerance that is none.
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


def _relative(run: Run, baseline: Run, loss: str) -> list[float]:
    ours, theirs = run.curves[loss], baseline.curves[loss]
    require_same_steps(
        run, baseline, loss, called=f"its baseline {baseline.name}", why=OTHER_BATCHES
    )
    pairs = zip(ours.values, theirs.values, strict=True)
    return [_deviation(value, expected) for value, expected in pairs]


def _deviation(value: float, expected: float) -> float:
    if value == expected:
        return 0.0
    return abs(value - expected) / abs(expected) if expected else float("inf")


def _tolerance(asked: float | str, run: Run) -> float:
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
