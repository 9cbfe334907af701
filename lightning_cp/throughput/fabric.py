"""FabricThroughput: the values of ThroughputCallback for the user's own loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_cp.throughput.meter import Meter, Metrics
from lightning_cp.throughput.step_flops import ThroughputOptions, Work, check_countable, peak_of


class FabricThroughput:
    """Counts the steps of a loop; the same numbers, under the same names, as ``ThroughputCallback``::

        model, optimizer = fabric.setup(model, optimizer)
        throughput = FabricThroughput(fabric, model, every_n_steps=10)
        for batch in loader:
            batch = fabric.strategy.shard_batch(batch)
            throughput.begin_batch(batch)
            fabric.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            fabric.log_dict(throughput.end_step())  # {} but at the end of a window

    Args:
        fabric: launched, its model set up.
        model: what ``fabric.setup`` has returned, or the module itself.
        every_n_steps: as of ``ThroughputCallback``, and so are all below.

    Raises:
        ConfigError: a setting of another kind, or a strategy under which tokens cannot be counted.
    """

    def __init__(
        self,
        fabric: Fabric,
        model: nn.Module,
        every_n_steps: int = 50,
        warmup_steps: int = 1,
        peak_flops: float | None = None,
        active_parameters: int | None = None,
        sequence_dims: Mapping[str, int | None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        given = (every_n_steps, warmup_steps, peak_flops, active_parameters, sequence_dims)
        options, strategy = ThroughputOptions(*given), fabric.strategy
        check_countable(strategy)
        module: Any = getattr(model, "module", model)
        peak = peak_of(options, fabric.device, strategy.precision, strategy, module)
        self._meter = Meter(module, strategy, options, peak, fabric.device, clock=clock)
        rank_zero_info(self._meter.convention())

    def begin_batch(self, batch: Any) -> None:
        """Begin a micro-batch of training; call it after ``strategy.shard_batch`` and before the model.

        Raises:
            ConfigError: its tokens cannot be counted.
        """
        self._meter.begin_batch(batch)

    def end_step(self) -> Metrics:
        """Count an optimizer step, on every rank; return the rates at a window's end, else ``{}``."""
        self._meter.end_step()
        return self._end_window() if self._meter.is_due else {}

    def finish(self) -> Metrics:
        """Return the rates of the remaining steps, if any, and remove all hooks from the model."""
        metrics = self._end_window() if self._meter.has_steps else {}
        self._meter.end()
        return metrics

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude a block from training: validation, a save."""
        self._meter.end_batch()
        runs = self._meter.watch.runs
        self._meter.watch.pause()
        try:
            yield
        finally:
            if runs:
                self._meter.watch.start()

    def state_dict(self) -> dict[str, Any]:
        """Return the run's tokens and FLOPs for a checkpoint; every rank must call it."""
        self._meter.settle()
        return self._meter.done.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the counts of a checkpoint."""
        self._meter.done = Work.of(state_dict)

    def _end_window(self) -> Metrics:
        metrics = self._meter.end_window()
        reason = self._meter.take_reason()
        if reason:
            rank_zero_info(reason)
        return metrics
