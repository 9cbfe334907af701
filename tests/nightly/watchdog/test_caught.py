"""An error that all ranks are told of can be caught, and keeps nothing alive afterwards."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any
from unittest.mock import patch

from lightning_cp.watchdog.watch import SWITCH
from tests.helpers import pool
from tests.helpers.pool.environment import PoolEnvironment


def _fail_and_forget(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether the watch has heard of the error; whether the strategy is gone."""
    import lightning.pytorch as pl

    from lightning_cp import UlyssesRingStrategy
    from lightning_cp.errors import NonFiniteError
    from tests.helpers.launch.scripts.model import QUIET, Tiny, text

    class Spoilt(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * float("nan")

    strategy = UlyssesRingStrategy()
    known = weakref.ref(strategy)
    trainer = pl.Trainer(
        strategy=strategy, devices=world_size, plugins=[PoolEnvironment()], **QUIET
    )
    module = Spoilt()
    failed = False
    try:
        with patch.dict(os.environ, {SWITCH: "1"}):
            trainer.fit(module, text())
    except NonFiniteError:
        failed = strategy.runtime.watch.failed
    del strategy, trainer, module
    gc.collect()
    return failed, known() is None


def test_a_strategy_is_released_after_an_error_that_was_caught() -> None:
    assert pool.run_ranks(2, _fail_and_forget) == [(True, True)] * 2
