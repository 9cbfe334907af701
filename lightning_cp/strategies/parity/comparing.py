"""Passes of one batch, compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_cp.parity.compare import Comparison, compare
from lightning_cp.parity.passes import Pass
from lightning_cp.parity.tolerance import Tolerance, half_of, tolerance_of
from lightning_cp.strategies.parity.runner import Runner, StepFailed


@dataclass
class Comparing:
    """Runs a step on one process and context parallel; all ranks come here together."""

    runner: Runner

    def both(self, batch: Any) -> tuple[Pass, Pass]:
        """One process's pass, and the context-parallel one, which is the first: a part of the tokens shows
        soon what is refused.

        Raises:
            CannotRun: there is nothing to compare with.
            ConfigError: as a step of training does.
        """
        runner, parallel, failed = self.runner, None, None
        try:
            parallel = runner.parallel(batch)
        except StepFailed as own:
            failed = own.error
        alone = runner.alone(batch)
        if parallel is None:  # and one process does not fail
            runner.tell(failed)
        assert parallel is not None
        finite = all(bool(x.isfinite().all()) for x in (alone.loss, *alone.gradients.values()))
        told = None if finite else "NaN or inf"
        runner.require(told, "in one process the loss or a gradient is not finite")
        return alone, parallel

    def of(self, alone: Pass, other: Pass) -> Comparison:
        """Of one process's pass and another one that knows which tokens it has."""
        return compare(alone, other, self.runner.core.mesh, self.tolerance(alone))

    def run(self, batch: Any) -> Comparison:
        """Both, compared."""
        return self.of(*self.both(batch))

    def tolerance(self, alone: Pass) -> Tolerance:
        """By the dtypes of parameters, and those that the step computes in."""
        own = {p.dtype for p in self.runner.model.parameters()}
        return tolerance_of(own | self.runner.dtypes | half_of(alone.dtypes))
