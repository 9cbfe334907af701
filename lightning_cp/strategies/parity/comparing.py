"""Passes of one batch, compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_cp.parity.compare import Comparison, compare
from lightning_cp.parity.passes import Pass
from lightning_cp.parity.tolerance import Tolerance, tolerance_of
from lightning_cp.strategies.parity.runner import Runner


@dataclass
class Comparing:
    """Runs a step on one process and context parallel; all ranks come here together."""

    runner: Runner

    def both(self, batch: Any) -> tuple[Pass, Pass]:
        """One process's pass, and the context-parallel one.

        Raises:
            CannotRun: there is nothing to compare with.
        """
        runner = self.runner
        alone = runner.alone(batch)
        finite = all(bool(x.isfinite().all()) for x in (alone.loss, *alone.gradients.values()))
        told = None if finite else "NaN or inf in its loss or gradients"
        runner.require(told, "one process cannot be compared with")
        return alone, runner.parallel(batch)

    def of(self, alone: Pass, other: Pass) -> Comparison:
        """Of one process's pass and another one that knows which tokens it has."""
        return compare(alone, other, self.runner.core.mesh, self.tolerance)

    def run(self, batch: Any) -> Comparison:
        """Both, compared."""
        return self.of(*self.both(batch))

    @property
    def tolerance(self) -> Tolerance:
        """By the dtypes of parameters, and those that the step computes in."""
        own = {p.dtype for p in self.runner.model.parameters()}
        return tolerance_of(own | self.runner.dtypes)
