"""The clock of training, and the rates of a window of steps."""

from __future__ import annotations

from collections.abc import Callable

from lightning.fabric.utilities.throughput import Throughput

from lightning_cp.throughput.work import Work

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
"""What is logged."""


class Stopwatch:
    """Seconds of training, without what it is paused for.

    Args:
        clock: seconds since any time.
        synchronize: waits for the device; called where the watch is read or stopped, and nowhere else.
    """

    def __init__(self, clock: Callable[[], float], synchronize: Callable[[], None]) -> None:
        self._clock = clock
        self._synchronize = synchronize
        self._before = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Go on, unless it runs already."""
        if self._since is None:
            self._since = self._clock()

    def pause(self) -> None:
        """Stop, once the device has done what it was given."""
        self._before = self.read()
        self._since = None

    @property
    def runs(self) -> bool:
        """True if it is not paused."""
        return self._since is not None

    def read(self) -> float:
        """Seconds so far, of work that is done."""
        if self._since is None:
            return self._before
        self._synchronize()
        return self._before + self._clock() - self._since


class Rates:
    """From the totals at both ends of a window to rates, by Lightning's ``Throughput``.

    Its totals are those of all devices, each counted once, so its one "device" is all of them.
    """

    def __init__(self, devices: int, peak_flops: float | None) -> None:
        self._devices = devices
        peak = None if peak_flops is None else peak_flops * devices
        self._throughput = Throughput(available_flops=peak, window_size=2)
        self._windows = self._tokens = 0
        self._steps = 0

    def begin(self, seconds: float, steps: int) -> None:
        """The first window begins: what was before counts in no rate."""
        self._update(seconds, steps, Work())

    def end_window(self, seconds: float, steps: int, work: Work) -> Metrics:
        """The rates since the last window ended; the next one begins.

        Args:
            seconds: of training, so far.
            steps: of optimizers, so far.
            work: of all ranks in this window, with at least one token.
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
