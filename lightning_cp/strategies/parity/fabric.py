"""The check of a step in a loop of Fabric, which calls it by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric import wrappers
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.engines import Engine
from lightning_cp.strategies.parity.check import NotRepeatable, ParityCheck
from lightning_cp.strategies.parity.dtypes import dtypes_of
from lightning_cp.strategies.parity.runner import CannotRun, Runner, Step
from lightning_cp.strategies.step.core import ContextParallelCore
from lightning_cp.strategies.step.counts import ASK


@dataclass
class FabricParity:
    """Of the models that were set up."""

    core: ContextParallelCore
    engine: Engine
    models: nn.ModuleList
    precision: Any

    def check(self, batch: Any, step: Step, backward: Callable[[torch.Tensor], Any]) -> str:
        """See ``UlyssesRingStrategy.check_parity``."""
        if not len(self.models):
            raise ConfigError(
                "check_parity compares a step of models that were set up, and there is none yet. Call "
                "fabric.setup(model, ...) first."
            )
        if self.core.mesh.sample_size == 1:
            self.core.clear_unknown()
            return self._told(
                "parity: no sample is shared between ranks, so there is nothing to compare"
            )
        if any(True for _ in self.engine.unreduced()):
            raise ConfigError(
                "check_parity within a window of accumulation: gradients of its first batches are not "
                "reduced yet. Call it before a window."
            )
        dtypes = dtypes_of(str(self.precision.precision), self.core.settings)
        runner = Runner(
            *(self.core, self.engine, self.models, step, dtypes),
            backward=partial(_as_fabric_does, backward),
        )
        try:
            line = self._told(ParityCheck(runner, self.core.settings.parity_tokens).run(batch))
        except NotRepeatable as why:
            raise ConfigError(f"check_parity cannot compare this step: {why}.") from None
        except CannotRun as why:
            raise ConfigError(
                f"check_parity cannot compare this step: {why}. "
                "Pass the whole batch, and a step that returns its loss and calls no backward."
            ) from None
        self.core.ask_for_counts = asked_in_fabric(" (the loss that it has seen is another one)")
        return line

    def _told(self, line: str) -> str:
        rank_zero_info(line)
        return line


def asked_in_fabric(seen: str = "") -> str:
    """What to say of a loss of no known kind; ``seen``: what a check has seen until now."""
    check = f"compare the step with one process by fabric.strategy.check_parity(batch, step){seen}"
    names = {"count": "fabric.strategy.count_targets", "unshard": "fabric.strategy.unshard"}
    return ASK.format(**names, check=check)


def _as_fabric_does(backward: Callable[[torch.Tensor], Any], loss: torch.Tensor) -> None:
    """Its modules refuse a backward that did not come through ``fabric.backward``."""
    assert hasattr(wrappers, "_in_fabric_backward")  # Lightning's own, and private
    wrappers._in_fabric_backward = True
    try:
        backward(loss)
    finally:
        wrappers._in_fabric_backward = False
