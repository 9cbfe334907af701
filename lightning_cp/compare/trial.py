"""Runs of the same settings: a trial, whose runs differ in their seeds alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_cp.compare.runs import Run
from lightning_cp.errors import ConfigError

VALIDATION = "val/loss"
MISSING = "-"
"""Of a setting that a run has not."""
SEED = "seed"
"""The setting that is chance: runs that differ in nothing else are repetitions."""


@dataclass(frozen=True)
class Trial:
    """Runs of the same settings and at the same steps: as good as their mean."""

    of_seed: dict[Any, Run]
    """By seed."""

    @staticmethod
    def of(runs: Iterable[Run]) -> Trial:
        """Of runs whose other settings are the same.

        Raises:
            ConfigError: two of them have the same seed.
        """
        found: dict[Any, Run] = {}
        for run in runs:
            other = found.setdefault(seed_of(run), run)
            if other is not run:
                raise ConfigError(
                    f"{other.name} and {run.name} have the same settings and the same seed, so one of them "
                    "says nothing new. Leave it out."
                )
        return Trial(found)

    @property
    def runs(self) -> list[Run]:
        """All of them."""
        return list(self.of_seed.values())

    @property
    def settings(self) -> dict[str, Any]:
        """Those of its first run, which are those of all but for the seed."""
        return self.runs[0].settings

    @property
    def bits(self) -> float:
        """The mean of its runs' last validations, bits per byte."""
        return statistics.fmean(map(final_bits, self.runs))

    @property
    def deviation(self) -> float | None:
        """Standard deviation between seeds (n - 1); ``None`` of a single run."""
        return statistics.stdev(map(final_bits, self.runs)) if len(self.of_seed) > 1 else None

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The mean of its runs' validations after training began: step, bits per byte."""
        steps = [step for step, _ in bits_at(self.runs[0])]
        values = zip(*([bits for _, bits in bits_at(run)] for run in self.runs), strict=True)
        return list(zip(steps, map(statistics.fmean, values), strict=True))

    def with_seeds(self, seeds: Iterable[Any]) -> Trial:
        """Its runs with these seeds alone."""
        kept = set(seeds)
        return Trial({seed: run for seed, run in self.of_seed.items() if seed in kept})


def seed_of(run: Run) -> Any:
    """The seed that a run was made with."""
    return run.settings.get(SEED, MISSING)


def bits_at(run: Run) -> list[tuple[int, float]]:
    """Its validations after training began: step, bits per byte."""
    curve = run.curves[VALIDATION]
    every = zip(curve.steps, curve.tokens, curve.values, strict=True)
    return [(step, loss / math.log(2)) for step, tokens, loss in every if tokens]


def final_bits(run: Run) -> float:
    """Its last validation, bits per byte."""
    return run.curves[VALIDATION].values[-1] / math.log(2)
