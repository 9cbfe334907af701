"""The run itself: build what the config names, validate, train, report."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from lightning_cp import console
from lightning_cp.data import ByteDataModule, data_parallel
from lightning_cp.errors import ConfigError
from lightning_cp.train.callbacks import LossPicture, MuonReport, StepMetrics
from lightning_cp.train.module import LanguageModel
from lightning_cp.train.report import BITS, Files, Outcome
from lightning_cp.train.resume import (
    AUTO,
    ContinuedCSV,
    checkpoint_to_resume,
    require_folder,
    run_folder,
)


def train(
    config: DictConfig, began: float | None = None, trainers: list[L.Trainer] | None = None
) -> Outcome:
    """Train and validate as configured. Every rank runs this.

    Args:
        config: see ``configs/train.yaml``.
        began: when the program started, by ``time.perf_counter``, for the time that is reported.
        trainers: is given the Trainer before it starts processes, for who has to end them.

    Raises:
        CheckpointError: there is no checkpoint to continue from; raised before other ranks start.
        ConfigError: settings or text that cannot be trained with; raised before other ranks start.
    """
    began = time.perf_counter() if began is None else began
    check_extras(config)
    require_folder(config.resume, list(HydraConfig.get().overrides.hydra))
    files = Files(Path(HydraConfig.get().runtime.output_dir))
    kept = Files(run_folder(files.folder)).checkpoints
    resume = checkpoint_to_resume(config.resume, kept)
    quiet_what_is_expected()
    torch.set_num_threads(config.threads_per_rank)
    L.seed_everything(config.seed, verbose=False)

    data: ByteDataModule = made(config, "data")
    model: LanguageModel = made(config, "model")
    steps = StepMetrics(data.tokens_per_batch)
    continued = resume if config.resume == AUTO else None
    logger = ContinuedCSV(files.folder, files.metrics.parent.name, continued)
    trainer = make_trainer(config, logger, files, data, steps)
    if trainers is not None:
        trainers.append(trainer)
    _say(str(data))

    before = logger.first_with(BITS) or {}
    if continued is None:  # which all ranks know, while the lines are in the first one's folder
        before = _validated(trainer, model, data, resume)
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    after = dict(trainer.callback_metrics)
    if BITS not in after:  # shorter than val_check_interval
        after = _validated(trainer, model, data)

    outcome = Outcome(
        strategy=HydraConfig.get().runtime.choices["strategy"],
        processes=trainer.world_size,
        data_parallel_size=data_parallel(trainer)[0],
        steps=trainer.global_step,
        tokens=steps.tokens,
        seconds=time.perf_counter() - began,
        step_seconds=steps.seconds,
        before=before,
        after={name: float(value) for name, value in after.items()},
        entropy=data.validation_entropy,
    )
    _say("\n" + outcome.table(files))
    return outcome


def _validated(
    trainer: L.Trainer, model: LanguageModel, data: ByteDataModule, checkpoint: str | None = None
) -> Mapping[str, float]:
    return trainer.validate(model, datamodule=data, ckpt_path=checkpoint, verbose=False)[0]


def make_trainer(
    config: DictConfig, logger: CSVLogger, files: Files, data: ByteDataModule, steps: StepMetrics
) -> L.Trainer:
    """The configured Trainer, with the callbacks and the logger that every run has."""
    callbacks: list[Callback] = [
        steps,
        MuonReport(),
        LossPicture(files.metrics, files.picture, data.validation_entropy),
        ModelCheckpoint(
            dirpath=files.checkpoints,
            filename="best",
            monitor=BITS,
            save_last=True,
            enable_version_counter=False,
        ),
        TQDMProgressBar(refresh_rate=10),
    ]
    if config.throughput is not None:
        callbacks.append(instantiate(config.throughput))
    _keep_single(config)
    return made(config, "trainer", logger=logger, callbacks=callbacks)


def _keep_single(config: DictConfig) -> None:
    """A sweep over modes and devices may have its baseline."""
    for name in ("devices", "num_nodes"):
        asked = config.trainer.get(name, 1)
        if config.strategy == "auto" and isinstance(asked, int) and asked > 1:
            _say(f"strategy=single is one process: trainer.{name}={asked} is left aside")
            config.trainer[name] = 1


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


def check_extras(config: DictConfig) -> None:
    """Refuse a model of a package that is not installed, and workers that last for one stage.

    Raises:
        ConfigError: saying how to install it, or to start the ranks.
    """
    strategy = config.get("strategy")
    method = strategy.get("start_method") if isinstance(strategy, DictConfig) else None
    if method not in (None, "popen"):
        raise ConfigError(
            f"strategy.start_method={method} makes workers for one stage, but this job goes through several "
            "with the same model. Leave it out: Lightning or torchrun starts the ranks."
        )
    target = str(config.model.network.get("_target_", ""))
    if target.startswith("transformers.") and find_spec("transformers") is None:
        raise ConfigError(
            f"model.network is {target}, which needs transformers, and it is not installed. "
            "Install it with: pip install 'lightning_cp[hf]'."
        )


def made(config: DictConfig, part: str, **given: Any) -> Any:
    """One part of what a config names.

    Args:
        config: the whole one.
        part: its key in there.
        **given: more arguments.

    Raises:
        ConfigError: its settings do not fit what it is made of.
    """
    try:
        return instantiate(config[part], **given)
    except InstantiationException as error:
        if console.error_of(error) is not None:
            raise
        cause = error.__cause__ or error
        raise ConfigError(
            f"{part} cannot be made of its settings ({type(cause).__name__}: {cause}). Look at those that "
            f"you gave ({part}.<name>=... on the command line), and at the file in configs/{part}."
        ) from error


def quiet_what_is_expected() -> None:
    """Silence what Lightning says of every run like this one, and nothing else."""
    # The text is in memory and a sample takes microseconds; worker processes would cost more.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # It looks for a loader with a state; here the sampler goes by Lightning's own count.
    warnings.filterwarnings("ignore", ".*checkpoint that ended before the epoch ended.*")
    # Lightning's own use of a name that PyTorch has deprecated.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\).*", FutureWarning)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: "Tip: " not in record.getMessage())
