"""ThroughputCallback: tokens per second, model FLOPs and MFU, independent of how the work is shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_cp.mixin import options_of
from lightning_cp.throughput.meter import NAMES, Meter, Metrics, format_metrics
from lightning_cp.throughput.step_flops import ThroughputOptions, Work, check_countable, peak_of
from lightning_cp.utils.patching import PatchSet


class ThroughputCallback(Callback):
    """Logs the throughput of training: every token counted once, however many ranks share it.

    Loggers and monitoring callbacks get ``throughput/`` and ``tokens_per_second``,
    ``tokens_per_second_per_device``, ``seconds_per_step``, ``tflops_per_device``, ``mfu``, and the run's
    ``tokens`` and ``model_flops`` so far, resumed parts included. It works with the context-parallel
    strategy, DDP and one device.

    Args:
        every_n_steps: optimizer steps of a window, at the end of which ranks exchange one small message and,
            on a GPU, wait for the device; the last one may be shorter.
        warmup_steps: first optimizer steps, of each ``fit``, that count in no rate.
        peak_flops: FLOP/s of one device, of which MFU is a share; ``None`` looks it up in Lightning's table.
        active_parameters: parameters that multiply each token, if the model's cannot be counted
            (layers that are called twice, weights that are used by hand).
        sequence_dims: as of ``UlyssesRingStrategy``, for batches with unusual names.

    Raises:
        ConfigError: a setting of another kind.
    """

    state_is_of_steps = True  # not of the batches of a window that is not complete

    def __init__(
        self,
        every_n_steps: int = 50,
        warmup_steps: int = 1,
        peak_flops: float | None = None,
        active_parameters: int | None = None,
        sequence_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        given = (every_n_steps, warmup_steps, peak_flops, active_parameters, sequence_dims)
        self._options = ThroughputOptions(*given)
        self._meter: Meter | None = None
        self._replaced = PatchSet()
        self._clock: Callable[[], float] = time.perf_counter
        self._done = Work()
        self._stepped = 0
        self.metrics: Metrics = {}
        """The last logged values."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that tokens can be counted under the strategy.

        Raises:
            ConfigError: they cannot; the message names the strategies that work.
        """
        if stage == "fit":
            check_countable(trainer.strategy)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting, and print the convention."""
        strategy: Any = trainer.strategy
        device: torch.device = strategy.root_device
        declared = options_of(pl_module).get("sequence_dims") or {}
        options = self._options.with_dims(declared)
        peak = peak_of(options, device, trainer.precision_plugin, strategy, pl_module)
        given = (pl_module, strategy, options, peak, device, self._done, self._clock)
        self._meter = Meter(*given)
        self._stepped = trainer.global_step
        self._replaced.replace(trainer, "save_checkpoint", self._around_saves)
        rank_zero_info(self._meter.convention())

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a micro-batch."""
        if self._meter is not None:
            self._meter.begin_batch(batch)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a finished step, and log at the end of a window."""
        meter = self._meter
        if meter is None:
            return
        meter.end_batch()
        if trainer.global_step == self._stepped:
            return
        self._stepped = trainer.global_step
        meter.end_step()
        if not meter.is_due:
            return
        self._end_window(meter, trainer, 0)
        for name, value in self.metrics.items():
            exact = torch.tensor(value, dtype=torch.float64)
            shows = name == NAMES["tokens_per_second"]
            pl_module.log(name, exact, prog_bar=shows, logger=False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard a batch at which a hook ended the epoch: it was not trained on."""
        if self._meter is not None:
            self._meter.model.work.abandon()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pause the clock until the next batch: callbacks draw and save after a validation."""
        if self._meter is not None:
            self._meter.watch.pause()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the remaining steps, and print the rates of the last window."""
        meter = self._meter
        if meter is None:
            return
        if meter.has_steps:
            self._end_window(meter, trainer, 1)
        else:
            meter.settle()
        self._done = meter.done
        if self.metrics:
            rank_zero_info(f"throughput, at the end: {format_metrics(self.metrics)}")
        self._release()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove all hooks from the model, without waiting for other ranks."""
        self._release()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the run's trained tokens of all ranks, and their FLOPs."""
        return self._done.state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counts of a checkpoint."""
        self._done = Work.of(state_dict)

    def _end_window(self, meter: Meter, trainer: Trainer, since: int) -> None:
        """Log a window directly: ``self.log`` would repeat it in every later row of the epoch.

        Args:
            meter: the meter at the end of its window.
            trainer: has the loggers and their step number.
            since: steps that Lightning has counted already.
        """
        metrics = meter.end_window()
        self.metrics = metrics or self.metrics
        step = trainer.fit_loop.epoch_loop._batches_that_stepped - since
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step)
        reason = meter.take_reason()
        if reason:
            rank_zero_info(reason)

    def _around_saves(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a save: exclude it from the time, and sum the work, as all ranks take part in it."""

        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            meter = self._meter
            if meter is None:
                return save(*args, **kwargs)
            runs = meter.watch.runs
            meter.watch.pause()
            meter.settle()
            self._done = meter.done
            try:
                return save(*args, **kwargs)
            finally:
                if runs:
                    meter.watch.start()

        return save_checkpoint

    def _release(self) -> None:
        self._replaced.undo()
        if self._meter is not None:
            self._meter.end()
            self._meter = None
