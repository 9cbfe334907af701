"""The doctor's run: the main job's model and data, up to the parity check before the first step."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig, open_dict

from lightning_cp.apps.train.run import check_extras, instantiate_part, silence_expected_warnings
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.validation import check_parity_schedule


class StopBeforeTraining(Callback):
    """End the run after the check of the first batch, before training on it."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        trainer.should_stop = True
        raise StopIteration  # ends the epoch: the result of a callback's hook is not read


def examine(config: DictConfig, trainers: list[L.Trainer]) -> None:
    """Check the configured model; the strategy reports the result.

    Args:
        config: see ``configs/train.yaml``.
        trainers: receives the Trainer before it starts processes, so that the caller can end them.

    Raises:
        ConfigError: ranks share nothing, or the step cannot be compared.
        ParityError: the model's results differ from those of one process.
    """
    check_extras(config)
    _set_parity_check(config)
    silence_expected_warnings()
    torch.set_num_threads(config.threads_per_rank)
    L.seed_everything(config.seed, verbose=False)
    model, data = instantiate_part(config, "model"), instantiate_part(config, "data")
    trainer: L.Trainer = instantiate_part(
        config,
        "trainer",
        logger=False,
        callbacks=[StopBeforeTraining()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainers.append(trainer)
    trainer.fit(model, datamodule=data)
    strategy: Any = trainer.strategy
    if not strategy.parity.report:
        why = strategy.parity.skip_reason or "no batch came"
        raise ConfigError(
            f"the doctor could not look at this model: {why}. "
            "Correct that first, and run the doctor again."
        )


def _set_parity_check(config: DictConfig) -> None:
    """Set the strategy's ``parity_check`` to the first batch.

    Raises:
        ConfigError: the strategy shares no sequence, or its setting is unknown.
    """
    strategy = config.strategy
    name = strategy if isinstance(strategy, str) else strategy.get("_target_")
    if isinstance(strategy, str) or "parity_check" not in strategy:
        raise ConfigError(
            f"the doctor compares a context-parallel strategy with one process, and this one ({name}) shares "
            "no sequence. Take strategy=hybrid, ring, ulysses, fsdp or another one of configs/strategy."
        )
    check_parity_schedule(strategy.parity_check)
    with open_dict(strategy):
        strategy.parity_check = StrategyConfig.parity_check
        (strategy.get("diagnostics") or {}).pop("parity_check", None)
