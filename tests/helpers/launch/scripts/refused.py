"""Ends with an error of ours: ``refused.py WAY STRATEGY DEVICES RANK``.

WAY is ``trainer``, ``fsdp`` (the Trainer's), ``fabric`` or ``hydra`` (the Trainer in a job of Hydra's). The
error is that of one RANK, in the user's own step, or of ``all``, in setup; or ``user``'s own, on all ranks.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric

from lightning_cp import Documents, UlyssesRingStrategy
from lightning_cp.parity import runner
from tests.helpers.launch.scripts.model import QUIET, Tiny, fit_with_fabric, text


def a_step_of_the_user(rank: int, who: str) -> None:
    if who == "user":
        raise ValueError("the user's own mistake")
    if who == f"{rank}":
        Documents.from_cu_seqlens([3, 2])


class Refused(Tiny):
    """Fails in its step, or in setup."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who
        if who == "all":
            self.network.config.attention_dropout = 0.1
            layers: Any = self.network.model.layers
            for layer in layers:
                layer.self_attn.attention_dropout = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a_step_of_the_user(self.global_rank, self.who)
        return super().training_step(batch, batch_idx)


class RefusedBackward(Fabric):
    """Fails in a loop of its own."""

    who = ""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        a_step_of_the_user(self.global_rank, self.who)
        super().backward(*args, **kwargs)


def fit(fabric: Fabric) -> None:
    fit_with_fabric(fabric, ".")


def run(way: str, strategy: str, devices: str, who: str) -> None:
    if way == "fabric":
        fabric = RefusedBackward(accelerator="cpu", devices=int(devices), strategy=strategy)
        fabric.who = who
        if strategy == "ulysses_ring":
            fabric.launch()
            fit(fabric)
        else:
            fabric.launch(fit)
        return
    chosen: Any = strategy
    if way == "fsdp":
        runner.PATIENCE = timedelta(seconds=3)
        chosen = UlyssesRingStrategy(data_parallel="fsdp")
    trainer = pl.Trainer(strategy=chosen, devices=int(devices), **QUIET)
    trainer.fit(Refused(who), text())


if __name__ == "__main__":
    if sys.argv[1] == "hydra":  # whose processes get its overrides alone
        sys.argv[1:] = [f"+given=[{','.join(sys.argv[1:])}]"]
    if sys.argv[1].startswith("+given"):
        import hydra

        hydra.main(version_base=None)(lambda config: run(*map(str, config.given)))()
    else:
        run(*sys.argv[1:])
