"""A run that is over is forgotten: strategies, and the groups of their meshes, are not kept alive."""

from __future__ import annotations

import gc
import weakref

from tests import pool
from tests.pool.environment import PoolEnvironment


def _fit_and_forget(rank: int, world_size: int) -> bool:
    import lightning.pytorch as pl

    from lightning_cp import UlyssesRingStrategy
    from tests.launch.scripts.model import QUIET, Tiny, text

    strategy = UlyssesRingStrategy()
    known = weakref.ref(strategy)
    trainer = pl.Trainer(
        strategy=strategy, devices=world_size, plugins=[PoolEnvironment()], **QUIET
    )
    module = Tiny()
    trainer.fit(module, text())
    del strategy, trainer, module
    gc.collect()
    return known() is None


def test_a_strategy_is_released() -> None:
    assert pool.run_ranks(2, _fit_and_forget) == [True, True]
