"""What every rank of a run does: one suite after the other, and the first rank reports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_cp.bench import kernels, which
from lightning_cp.bench.compute import measure_compute
from lightning_cp.bench.kernels import measure_kernels
from lightning_cp.bench.links import measure_links
from lightning_cp.bench.machine import this_machine
from lightning_cp.bench.modes import measure_modes
from lightning_cp.bench.overheads import measure_overheads
from lightning_cp.bench.report import Report
from lightning_cp.bench.settings import Settings

Tell = Callable[[str], None]
MEASURE: dict[str, Callable[[Settings, Tell], Sequence[Any]]] = {
    "kernels": measure_kernels,
    "links": measure_links,
    "modes": measure_modes,
    "compute": measure_compute,
    "overheads": measure_overheads,
}
"""By suite."""


def check(settings: Settings) -> None:
    """Refuse what cannot be measured, before any process is started.

    Raises:
        ConfigError: says what would work.
    """
    kernels.check(settings)
    if {"links", "modes"} & set(settings.suites):
        which.check_devices(settings)
    if "modes" in settings.suites:
        which.check(settings)


def run(settings: Settings, folder: Path) -> None:
    """Measure on every rank of the world; the first prints tables and writes what was found.

    What is measured is written suite by suite, so that a failure costs no more than its own suite.

    Args:
        settings: what to measure, checked.
        folder: gets ``bench.json``, ``hardware.json`` and a picture of each suite.
    """
    machine = this_machine(settings)
    report = Report(machine, settings, folder) if dist.get_rank() == 0 else None
    for suite in settings.suites:
        rows = MEASURE[suite](settings, _teller(suite))
        if report is not None:
            report.take(suite, rows)
    if report is not None:
        report.finish()


def _teller(suite: str) -> Tell:
    """Shows the user what is going on, in one line that is written over; nothing if nobody looks."""
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        return lambda text: None

    def tell(text: str) -> None:
        print(f"\r\033[K{suite}: {text}", end="", file=sys.stderr, flush=True)

    return tell
