"""The run itself: build what the config names, validate, train, report; with its own callbacks."""

from __future__ import annotations

import logging
import re
import resource
import sys
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
from torch.optim import Optimizer

from lightning_cp import error_display
from lightning_cp.apps.data import ByteDataModule, data_parallel
from lightning_cp.apps.train.model import LanguageModel, bits_per_byte
from lightning_cp.apps.train.report import BITS, Outcome, RunFiles, draw_losses
from lightning_cp.apps.train.resume import (
    AUTO,
    ContinuedCSV,
    check_folder_named,
    checkpoint_to_resume,
    print_once,
    run_folder,
)
from lightning_cp.engines.gradients import gradient_norm
from lightning_cp.errors import ConfigError
from lightning_cp.optim import Muon

STATUS = Path("/proc/self/status")


def train(
    config: DictConfig, began: float | None = None, trainers: list[L.Trainer] | None = None
) -> Outcome:
    """Train and validate as configured. Every rank runs this.

    Args:
        config: see ``configs/train.yaml``.
        began: the program's start by ``time.perf_counter``, for the reported time.
        trainers: receives the Trainer before it starts processes, so that the caller can end them.

    Raises:
        CheckpointError: no checkpoint to resume from; raised before other ranks start.
        ConfigError: settings or text that cannot be trained with; raised before other ranks start.
    """
    began = time.perf_counter() if began is None else began
    check_extras(config)
    check_folder_named(config.resume, list(HydraConfig.get().overrides.hydra))
    files = RunFiles(Path(HydraConfig.get().runtime.output_dir))
    kept = RunFiles(run_folder(files.folder)).checkpoints
    resume = checkpoint_to_resume(config.resume, kept)
    silence_expected_warnings()
    torch.set_num_threads(config.threads_per_rank)
    L.seed_everything(config.seed, verbose=False)

    data: ByteDataModule = instantiate_part(config, "data")
    model: LanguageModel = instantiate_part(config, "model")
    steps = StepMetrics(data.tokens_per_batch)
    continued = resume if config.resume == AUTO else None
    logger = ContinuedCSV(files.folder, files.metrics.parent.name, continued)
    trainer = make_trainer(config, logger, files, data, steps)
    if trainers is not None:
        trainers.append(trainer)
    _say(str(data))

    before = logger.first_with(BITS) or {}
    if continued is None:  # known to all ranks, while only the first one has the lines
        before = _validated(trainer, model, data, resume)
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    after = dict(trainer.callback_metrics)
    if BITS not in after:  # shorter than val_check_interval
        after = _validated(trainer, model, data)

    outcome = Outcome(
        strategy=HydraConfig.get().runtime.choices["strategy"],
        mesh=_mesh_of(trainer.strategy),
        parity=_parity_of(trainer.strategy),
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


def _mesh_of(strategy: Any) -> str:
    sizes = strategy.runtime.meshes.sizes if hasattr(strategy, "runtime") else {}
    shared = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return " x ".join(shared) or "none"


def _parity_of(strategy: Any) -> str:
    if not hasattr(strategy, "parity"):
        return "not checked: no sample is shared between ranks"
    if not strategy.parity.is_on:
        return "not checked: parity_check='off'"
    if strategy.parity.report:
        return strategy.parity.report.removeprefix("parity: ")
    return f"not checked: {strategy.parity.skip_reason or 'no batch came'}"


def _validated(
    trainer: L.Trainer, model: LanguageModel, data: ByteDataModule, checkpoint: str | None = None
) -> Mapping[str, float]:
    return trainer.validate(model, datamodule=data, ckpt_path=checkpoint, verbose=False)[0]


def make_trainer(
    config: DictConfig, logger: CSVLogger, files: RunFiles, data: ByteDataModule, steps: StepMetrics
) -> L.Trainer:
    """Return the configured Trainer, with the callbacks and the logger of every run."""
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
    return instantiate_part(config, "trainer", logger=logger, callbacks=callbacks)


def _keep_single(config: DictConfig) -> None:
    """Set ``strategy=single`` to one process, so that a sweep over devices can contain its baseline."""
    for name in ("devices", "num_nodes"):
        asked = config.trainer.get(name, 1)
        if config.strategy == "auto" and isinstance(asked, int) and asked > 1:
            _say(f"strategy=single is one process: trainer.{name}={asked} is ignored")
            config.trainer[name] = 1


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


def check_extras(config: DictConfig) -> None:
    """Check that the model's package is installed, and that workers last longer than one stage.

    Raises:
        ConfigError: one of these fails; the message says how to install it, or how to start the ranks.
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
            "Install transformers."
        )


def instantiate_part(config: DictConfig, part: str, **given: Any) -> Any:
    """Instantiate one part of a config.

    Args:
        config: the whole config.
        part: the part's key.
        **given: more arguments.

    Raises:
        ConfigError: the part's settings do not fit its target.
    """
    try:
        return instantiate(config[part], **given)
    except InstantiationException as error:
        if error_display.error_of(error) is not None:
            raise
        cause = error.__cause__ or error
        raise ConfigError(
            f"{part} cannot be made of its settings ({type(cause).__name__}: {cause}). Look at those that "
            f"you gave ({part}.<name>=... on the command line), and at the file in configs/{part}."
        ) from error


def silence_expected_warnings() -> None:
    """Silence Lightning's messages that every such run causes, and nothing else."""
    # The text is in memory and a sample takes microseconds; worker processes would cost more.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # Lightning expects a loader with a state; here the sampler follows Lightning's own count.
    warnings.filterwarnings("ignore", ".*checkpoint that ended before the epoch ended.*")
    # Lightning uses a name that PyTorch has deprecated.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\).*", FutureWarning)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: "Tip: " not in record.getMessage())


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak MiB so far: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if STATUS.is_file() and (found := re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())):
        return int(found[1]) / 2**10
    # Not on Linux, where it starts from the peak of the process that started this one.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


class StepMetrics(Callback):
    """Logs bits per byte, perplexity, gradient norm, tokens and tokens per second of every step.

    Tokens are those of the text: a sequence that several ranks share counts once.

    Args:
        tokens_per_batch: tokens in one batch of one data rank, before any sharding.
    """

    def __init__(self, tokens_per_batch: int) -> None:
        self.tokens_per_batch = tokens_per_batch
        self.tokens = 0
        self.seconds = 0.0
        self._started = 0.0

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Start the step's clock."""
        self._started = time.perf_counter()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Log the norm over all gradients of all ranks, before clipping."""
        pl_module.log("train/grad_norm", gradient_norm(pl_module.parameters()).float())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Log the metrics of the step's loss and time."""
        loss = float(trainer.callback_metrics["train/loss"])  # waits for the device
        seconds = time.perf_counter() - self._started
        tokens = self.tokens_per_batch * data_parallel(trainer)[0]
        self.tokens += tokens
        self.seconds += seconds
        pl_module.log("train/tokens_per_second", tokens / seconds, prog_bar=True)
        pl_module.log_dict(
            {
                "train/bits_per_byte": bits_per_byte(loss),
                "train/perplexity": torch.tensor(
                    loss
                ).exp(),  # inf instead of an error if it diverged
                "train/learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
                "tokens": float(self.tokens),
            }
        )

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the tokens before this validation, and the peak memory of the largest rank."""
        pl_module.log("tokens", float(self.tokens), sync_dist=True)
        peak = peak_memory_mib(pl_module.device)
        pl_module.log("peak_memory_mib", peak, sync_dist=True, reduce_fx="max")

    def state_dict(self) -> dict[str, Any]:
        """Return the counts that a resumed run continues."""
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counts of a checkpoint."""
        self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]


class MuonReport(Callback):
    """Prints the parameters of Muon and of AdamW; logs the largest attention logit and the clipped heads."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table once."""
        for optimizer in _muons(trainer):
            print_once(optimizer.table())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Log the step's clipping; it is the same on every rank."""
        for optimizer in _muons(trainer):
            clip = getattr(optimizer, "qk_clip", None)
            if clip is not None and clip.largest:
                clipped = sum(map(len, clip.clipped.values()))
                pl_module.log("train/max_logit", max(clip.largest.values()))
                pl_module.log("train/clipped_heads", float(clipped))


def _muons(trainer: L.Trainer) -> list[Muon]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Muon)]


class LossPicture(Callback):
    """Draws the losses logged so far, after every validation.

    Args:
        metrics: the CSV logger's file.
        picture: the image to write.
        entropy: byte-unigram entropy of the validation text, drawn as a line, bits per byte.
    """

    def __init__(self, metrics: Path, picture: Path, entropy: float) -> None:
        self.metrics = metrics
        self.picture = picture
        self.entropy = entropy

    @rank_zero_only
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the losses; the loggers already have this validation."""
        for logger in trainer.loggers:
            logger.save()
        if self.metrics.is_file():
            draw_losses(self.metrics, self.picture, self.entropy)
