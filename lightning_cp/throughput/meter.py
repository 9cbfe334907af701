"""The throughput meter of a run: counts steps, sums work over ranks once per window, and returns rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.throughput import Throughput
from torch import nn

from lightning_cp.throughput.flops import CountedModel
from lightning_cp.throughput.step_flops import (
    Peak,
    RunRanks,
    ThroughputOptions,
    Work,
    ranks_of,
    runtime_of,
)

Metrics = dict[str, float]

NAMES = {
    "tokens_per_second": "throughput/tokens_per_second",
    "per_device": "throughput/tokens_per_second_per_device",
    "tokens": "throughput/tokens",
    "flops": "throughput/model_flops",
    "seconds": "throughput/seconds_per_step",
    "tflops": "throughput/tflops_per_device",
    "mfu": "throughput/mfu",
}
"""The logged names."""


class Stopwatch:
    """Seconds of training, without pauses.

    Args:
        clock: returns seconds from an arbitrary start.
        synchronize: waits for the device; called only where the watch is read or stopped.
    """

    def __init__(self, clock: Callable[[], float], synchronize: Callable[[], None]) -> None:
        self._clock = clock
        self._synchronize = synchronize
        self._before = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start, unless it runs already."""
        if self._since is None:
            self._since = self._clock()

    def pause(self) -> None:
        """Stop after the device has finished its work."""
        self._before = self.read()
        self._since = None

    @property
    def runs(self) -> bool:
        """True unless paused."""
        return self._since is not None

    def read(self) -> float:
        """Return the seconds so far, of finished work."""
        if self._since is None:
            return self._before
        self._synchronize()
        return self._before + self._clock() - self._since


class Rates:
    """The rates of a window from the totals at both of its ends, by Lightning's ``Throughput``.

    Totals cover all devices, so Lightning's single "device" stands for all of them.
    """

    def __init__(self, devices: int, peak_flops: float | None) -> None:
        self._devices = devices
        peak = None if peak_flops is None else peak_flops * devices
        self._throughput = Throughput(available_flops=peak, window_size=2)
        self._windows = self._tokens = 0
        self._steps = 0

    def begin(self, seconds: float, steps: int) -> None:
        """Begin the first window; earlier steps count in no rate."""
        self._update(seconds, steps, Work())

    def end_window(self, seconds: float, steps: int, work: Work) -> Metrics:
        """Return the rates of the window, and begin the next one.

        Args:
            seconds: seconds of training so far.
            steps: optimizer steps so far.
            work: the work of all ranks in this window, with at least one token.
        """
        before = self._throughput._time[-1], self._steps
        self._update(seconds, steps, work)
        found = self._throughput.compute()
        tokens_per_second = float(found["device/items_per_sec"])
        metrics = {
            NAMES["tokens_per_second"]: tokens_per_second,
            NAMES["per_device"]: tokens_per_second / self._devices,
            NAMES["seconds"]: (seconds - before[0]) / (steps - before[1]),
        }
        if not work.unknown:
            metrics[NAMES["tflops"]] = found["device/flops_per_sec"] / self._devices / 1e12
            if "device/mfu" in found:
                metrics[NAMES["mfu"]] = float(found["device/mfu"])
        return metrics

    def _update(self, seconds: float, steps: int, work: Work) -> None:
        self._tokens += work.tokens
        self._throughput.update(
            time=seconds,
            batches=self._windows,
            samples=self._windows,
            lengths=self._tokens,
            flops=work.flops,
        )
        self._windows += 1
        self._steps = steps


class Meter:
    """One run's throughput. Every rank makes one, and calls the same methods at the same steps.

    Args:
        model: the user's module after its set-up.
        strategy: the strategy, with its process group initialised.
        options: the user's options.
        peak: the peak FLOP/s of MFU.
        device: this rank's device.
        done: the work of the run that this one continues.
        clock: returns seconds from an arbitrary start.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Any,
        options: ThroughputOptions,
        peak: Peak,
        device: torch.device,
        done: Work | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ranks: RunRanks = ranks_of(strategy)
        self._options, self._peak = options, peak
        self.watch = Stopwatch(clock, _waits_for(device))
        self.model = CountedModel(model, runtime_of(strategy), options)
        self._rates = Rates(self._ranks.devices, peak.flops)
        self._own = Work()
        """This rank's work since the last sum over ranks."""
        self._window = Work()
        """The work of all ranks in this window, up to the last sum."""
        self.done = done or Work()
        """The work of all ranks in the whole run, up to the last sum."""
        self._steps = self._begun_at = 0
        self._measures = False
        self._told_reason = False

    @property
    def devices(self) -> int:
        """The number of devices of all ranks."""
        return self._ranks.devices

    def begin_batch(self, batch: Any) -> None:
        """Begin a micro-batch of training; time counts from the first one on.

        Raises:
            ConfigError: its tokens cannot be counted.
        """
        self.watch.start()
        if not self._measures and self._steps >= self._options.warmup_steps:
            self._begin_windows()
        self.model.begin(batch)

    def end_batch(self) -> None:
        """End a micro-batch: later calls of the model do not belong to it."""
        self.model.end_batch()

    def end_step(self) -> None:
        """Record an optimizer step, which uses all micro-batches since the last one."""
        self.model.end_batch()
        self.model.work.stepped()
        self._own += self.model.work.take(wait=False)
        self._steps += 1

    @property
    def is_due(self) -> bool:
        """True if the window has all its steps; the same on all ranks."""
        return self._measures and self._steps - self._begun_at >= self._options.every_n_steps

    @property
    def has_steps(self) -> bool:
        """True if the window has any steps."""
        return self._measures and self._steps > self._begun_at

    def end_window(self) -> Metrics:
        """Return the window's rates and begin the next window; all ranks must call this, and get the same.

        Without a trained token the result is empty, and the window continues.
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
        """Sum the work of all ranks, which all must call this; return their mean seconds of training."""
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
        """Return the description of the counts, to be printed once."""
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
                f"MFU is not logged: the peak FLOP/s of {self._peak.where} is unknown. Set peak_flops=."
            )
        else:
            peak = f"{self._peak.flops / 1e12:,.4g} TFLOP/s"
            lines.append(f"It assumes a peak of {peak} per device ({self._peak.where}).")
        return "\n".join(lines)

    def take_reason(self) -> str:
        """Return the reason why FLOPs are not logged, the first time it is known; else an empty string."""
        reason = self.model.reason
        if not reason or self._told_reason:
            return ""
        self._told_reason = True
        return _no_flops(reason)

    def end(self) -> None:
        """Remove all hooks from the model."""
        self.model.end()


def _no_flops(reason: str) -> str:
    return f"throughput: neither TFLOP/s nor MFU are logged: {reason}."


def _waits_for(device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def format_metrics(metrics: Metrics) -> str:
    """Format the rates in one line."""
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
