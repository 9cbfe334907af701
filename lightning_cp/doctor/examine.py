"""Builds what the main job would train, and goes as far as the check before its first step."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig, open_dict

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.arguments.parity import require_known
from lightning_cp.train.run import check_extras, made, quiet_what_is_expected


class StopsBeforeTraining(Callback):
    """The first batch is looked at, and nothing is trained on it."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> Any:
        trainer.should_stop = True
        return -1  # which ends the epoch


def examine(config: DictConfig, trainers: list[L.Trainer]) -> None:
    """Check the configured model; the strategy says what it found.

    Args:
        config: see ``configs/train.yaml``.
        trainers: is given the Trainer before it starts processes, for who has to end them.

    Raises:
        ConfigError: nothing is shared between ranks, or the step cannot be compared.
        ParityError: the model does not compute what it computes in one process.
    """
    check_extras(config)
    _require_shared(config)
    quiet_what_is_expected()
    torch.set_num_threads(config.threads_per_rank)
    L.seed_everything(config.seed, verbose=False)
    model, data = made(config, "model"), made(config, "data")
    trainer: L.Trainer = made(
        config,
        "trainer",
        logger=False,
        callbacks=[StopsBeforeTraining()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainers.append(trainer)
    trainer.fit(model, datamodule=data)
    strategy: Any = trainer.strategy
    if not strategy.parity.healthy:
        why = strategy.parity.left_out or "no batch came"
        raise ConfigError(
            f"the doctor could not look at this model: {why}. "
            "Mend that first, and run the doctor again."
        )


def _require_shared(config: DictConfig) -> None:
    """Have the strategy check the first batch.

    Raises:
        ConfigError: it shares no sequence, or what is to be replaced is no such setting.
    """
    strategy = config.strategy
    name = strategy if isinstance(strategy, str) else strategy.get("_target_")
    if isinstance(strategy, str) or "parity_check" not in strategy:
        raise ConfigError(
            f"the doctor compares a context-parallel strategy with one process, and this one ({name}) shares "
            "no sequence. Take strategy=hybrid, ring, ulysses, fsdp or another one of configs/strategy."
        )
    require_known(strategy.parity_check)
    with open_dict(strategy):
        strategy.parity_check = "first_batch"
