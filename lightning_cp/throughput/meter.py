"""Meter: counts steps, sums their work over ranks once in a window, and gives the rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_cp.throughput.model import CountedModel
from lightning_cp.throughput.options import Options, Peak
from lightning_cp.throughput.ranks import Ranks, core_of, ranks_of
from lightning_cp.throughput.window import NAMES, Metrics, Rates, Stopwatch
from lightning_cp.throughput.work import Work


class Meter:
    """One run's throughput. Every rank makes one, and calls the same methods at the same steps.

    Args:
        model: the user's module, as it was set up.
        strategy: whose processes have met.
        options: what is asked for.
        peak: what MFU is a share of.
        device: of this rank.
        done: of the run before this one, which it continues.
        clock: seconds since any time.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Any,
        options: Options,
        peak: Peak,
        device: torch.device,
        done: Work | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ranks: Ranks = ranks_of(strategy)
        self._options, self._peak = options, peak
        self.watch = Stopwatch(clock, _waits_for(device))
        self.model = CountedModel(model, core_of(strategy), options)
        self._rates = Rates(self._ranks.devices, peak.flops)
        self._own = Work()
        """Of this rank, since ranks last told each other."""
        self._window = Work()
        """Of all ranks, in this window, as far as they have told each other."""
        self.done = done or Work()
        """Of all ranks in the whole run, as far as they have told each other."""
        self._steps = self._begun_at = 0
        self._measures = False
        self._told_reason = False

    @property
    def devices(self) -> int:
        """Of all ranks."""
        return self._ranks.devices

    def begin_batch(self, batch: Any) -> None:
        """A micro-batch of training begins; time counts from the first one on.

        Raises:
            ConfigError: its tokens cannot be counted.
        """
        self.watch.start()
        if not self._measures and self._steps >= self._options.warmup_steps:
            self._begin_windows()
        self.model.begin(batch)

    def end_batch(self) -> None:
        """A micro-batch is over: what follows is no training of it."""
        self.model.end_batch()

    def end_step(self) -> None:
        """Optimizers have stepped along all micro-batches since the last step."""
        self.model.end_batch()
        self.model.work.stepped()
        self._own += self.model.work.take(wait=False)
        self._steps += 1

    @property
    def is_due(self) -> bool:
        """True if a window has all its steps; the same on all ranks."""
        return self._measures and self._steps - self._begun_at >= self._options.every_n_steps

    @property
    def has_steps(self) -> bool:
        """True if there is anything in the window."""
        return self._measures and self._steps > self._begun_at

    def end_window(self) -> Metrics:
        """The rates of the window, the same on all ranks, all of which come here; the next one begins.

        Nothing where no token was trained on; the window goes on then.
        """
        seconds = self.settle()
        if not self._window.tokens:
            return {}
        metrics = self._rates.end_window(seconds, self._steps, self._window)
        self._window, self._begun_at = Work(), self._steps
        metrics[NAMES["tokens"]] = float(self.done.tokens)
        if not self.done.unknown:
            metrics[NAMES["flops"]] = float(self.done.flops)
        return metrics

    def settle(self) -> float:
        """Add up the work of all ranks, all of which come here; the mean of their seconds of training."""
        seconds = self.watch.read()
        self._own += self.model.work.take(wait=True)
        work, seconds = self._ranks.total(self._own, seconds)
        self._own = Work()
        self._window += work
        self.done += work
        return seconds

    def _begin_windows(self) -> None:
        seconds = self.settle()
        self._window, self._begun_at = Work(), self._steps
        self._rates.begin(seconds, self._steps)
        self._measures = True

    def convention(self) -> str:
        """What is counted, to be said once."""
        found, options = self.model.multiplied, self._options
        lines = [
            "throughput: tokens are those that are not padding, each counted once however many ranks share "
            f"it ({self.devices} device{'s' * (self.devices > 1)} in all).",
        ]
        reason = self.take_reason()
        if reason:
            return "\n".join([*lines, reason])
        parts = f"6 x {found.trained:,} parameters"
        if options.active_parameters is not None:
            parts = f"6 x {options.active_parameters:,} parameters (active_parameters=)"
        elif found.frozen or found.first:
            parts += f" + 4 x {found.frozen:,} frozen ones behind them + 2 x {found.first:,} before"
        lines.append(
            f"MFU counts model FLOPs: {parts} per token (no embedding lookups, the output projection once), "
            "and 12 x heads x head dim per visible (query, key) pair and layer (causal: only visible pairs, "
            "within documents and windows). What is recomputed does not count."
        )
        if self._peak.flops is None:
            lines.append(
                f"MFU is not logged: the peak FLOP/s of {self._peak.where} is not known. peak_flops= says it."
            )
        else:
            peak = f"{self._peak.flops / 1e12:,.4g} TFLOP/s"
            lines.append(f"It assumes a peak of {peak} per device ({self._peak.where}).")
        return "\n".join(lines)

    def take_reason(self) -> str:
        """Why FLOPs are not logged, the first time that it turns out; nothing otherwise."""
        reason = self.model.reason
        if not reason or self._told_reason:
            return ""
        self._told_reason = True
        return _no_flops(reason)

    def end(self) -> None:
        """Leave the model as it was."""
        self.model.end()


def _no_flops(reason: str) -> str:
    return f"throughput: neither TFLOP/s nor MFU are logged: {reason}."


def _waits_for(device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def shown(metrics: Metrics) -> str:
    """In one line."""
    values = {NAMES[key]: text for key, text in _SHOWN.items()}
    return ", ".join(text.format(metrics[name]) for name, text in values.items() if name in metrics)


_SHOWN = {
    "tokens_per_second": "{:,.0f} tokens/s",
    "per_device": "{:,.0f} a device",
    "seconds": "{:.4f} s a step",
    "tflops": "{:.4g} TFLOP/s a device",
    "mfu": "MFU {:.1%}",
    "tokens": "{:,.0f} tokens so far",
}
