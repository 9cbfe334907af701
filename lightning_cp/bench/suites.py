"""The suites of a run, one after the other on every rank; the first rank reports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_cp.bench import kernels, modes
from lightning_cp.bench.compute import measure_compute
from lightning_cp.bench.hardware_json import this_machine
from lightning_cp.bench.kernels import measure_kernels
from lightning_cp.bench.links import measure_links
from lightning_cp.bench.model_step import measure_overheads
from lightning_cp.bench.modes import measure_modes
from lightning_cp.bench.report import BenchReport
from lightning_cp.bench.settings import BenchSettings

Tell = Callable[[str], None]
"""Shows a line of progress."""
MEASURE: dict[str, Callable[[BenchSettings, Tell], Sequence[Any]]] = {
    "kernels": measure_kernels,
    "links": measure_links,
    "modes": measure_modes,
    "compute": measure_compute,
    "overheads": measure_overheads,
}
"""The measurement of each suite."""


def check(settings: BenchSettings) -> None:
    """Check that everything asked for can be measured, before any process starts.

    Raises:
        ConfigError: something cannot; the message says what works.
    """
    kernels.check(settings)
    if {"links", "modes"} & set(settings.suites):
        modes.check_devices(settings)
    if "modes" in settings.suites:
        modes.check(settings)


def run(settings: BenchSettings, folder: Path) -> None:
    """Measure on every rank of the world; the first rank prints tables and writes the results.

    Results are written suite by suite, so that a failure costs no more than its own suite.

    Args:
        settings: the checked settings.
        folder: receives ``bench.json``, ``hardware.json`` and a picture of each suite.
    """
    machine = this_machine(settings)
    report = BenchReport(machine, settings, folder) if dist.get_rank() == 0 else None
    for suite in settings.suites:
        rows = MEASURE[suite](settings, _teller(suite))
        if report is not None:
            report.take(suite, rows)
    if report is not None:
        report.finish()


def _teller(suite: str) -> Tell:
    """Return a function that shows progress in one overwritten line; without a terminal it does nothing."""
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        return lambda text: None

    def tell(text: str) -> None:
        print(f"\r\033[K{suite}: {text}", end="", file=sys.stderr, flush=True)

    return tell
