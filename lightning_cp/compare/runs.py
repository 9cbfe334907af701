"""What a run of the main job has left: its settings, its losses, its speed."""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_cp.errors import ConfigError

METRICS = Path("metrics", "metrics.csv")
SETTINGS = Path(".hydra", "config.yaml")
LOSSES = ("train/loss", "val/loss")
"""The columns that are compared, in nats per byte."""
SPEED = "train/tokens_per_second"
MEMORY = "peak_memory_mib"
"""Optional: runs of before it was recorded have none."""

Row = dict[str, str]


@dataclass(frozen=True)
class Curve:
    """One loss over the steps of a run."""

    steps: list[int]
    tokens: list[float]
    """Trained on by then."""
    values: list[float]


@dataclass(frozen=True)
class Run:
    """One run of the main job, read from its folder."""

    name: str
    folder: Path
    settings: dict[str, Any]
    """Dotted name -> value, as composed; interpolations are left as they are."""
    curves: dict[str, Curve]
    """One for each of ``LOSSES``."""
    tokens_per_second: float
    """The median over its steps, so that the first and slow one does not matter."""
    memory: float | None
    """MiB at most in one of its processes."""

    @property
    def processes(self) -> int | None:
        """How many it had; None if that was left to Lightning."""
        devices = self.settings.get("trainer.devices")
        if self.settings.get("strategy") == "auto" and isinstance(devices, int):
            return 1  # strategy=single, whatever a sweep asks of the others
        if isinstance(devices, list):
            devices = len(devices)
        return devices * self.settings.get("trainer.num_nodes", 1) if type(devices) is int else None


def find_runs(sweep: str) -> list[Path]:
    """The folders of runs inside a folder, in the order of their numbers.

    Raises:
        ConfigError: there is no such folder, or no run inside.
    """
    folder = Path(sweep)
    if not folder.is_dir():
        raise ConfigError(
            f"sweep={sweep} is no folder: there is no {folder.absolute()}. "
            "Give the folder of a sweep, which has a folder for each job."
        )
    found = [path.parents[1] for path in folder.rglob(str(SETTINGS)) if path.parents[1] != folder]
    if not found:
        raise ConfigError(
            f"sweep={sweep} has no run inside: no folder below {folder.absolute()} has a {SETTINGS}. Sweeps "
            "are in multirun/<date>/<time>; for single runs use runs=[folder,folder]."
        )
    return sorted(found, key=_by_number)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs, named by what is different in their paths.

    Raises:
        ConfigError: fewer than two, or one that cannot be compared; the message says why.
    """
    if len(folders) < 2:
        raise ConfigError(
            f"there is nothing to compare: {len(folders)} run was given. Give two or more with "
            "runs=[folder,folder], a sweep=folder, or experiment=mode_matrix."
        )
    paths = [folder.absolute() for folder in folders]
    if twice := {str(path) for path in paths if paths.count(path) > 1}:
        raise ConfigError(
            f"runs names {', '.join(sorted(twice))} more than once. Name each run once."
        )
    common = os.path.commonpath(paths)
    return [read_run(path, os.path.relpath(path, common)) for path in paths]


def read_run(folder: Path, name: str) -> Run:
    """Read one run.

    Args:
        folder: what the run wrote.
        name: what to call it.

    Raises:
        ConfigError: no folder, no run, no or incomplete metrics, or a loss that is not finite.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}, which was given as a run. "
            "Give the folder that the run has written."
        )
    for file in (SETTINGS, METRICS):
        if not (folder / file).is_file():
            raise ConfigError(
                f"{folder} has no {file}: it is not the folder of a run of lightning_cp.train, or the run "
                "failed before its first step. Leave it out: runs=[folder,folder] names the others."
            )
    rows = _rows(folder / METRICS)
    memory = [float(row[MEMORY]) for row in rows if row.get(MEMORY)]
    return Run(
        name=name,
        folder=folder,
        settings=_flat(OmegaConf.to_container(OmegaConf.load(folder / SETTINGS))),
        curves={loss: _curve(rows, loss, folder) for loss in LOSSES},
        tokens_per_second=statistics.median(float(row[SPEED]) for row in rows if row[SPEED]),
        memory=max(memory, default=None),
    )


def _rows(file: Path) -> list[Row]:
    with file.open(newline="") as content:
        reader = csv.DictReader(content)
        rows, columns = list(reader), reader.fieldnames or ()
    needed = ("step", "tokens", *LOSSES, SPEED)
    if missing := [name for name in needed if name not in columns]:
        raise ConfigError(
            f"{file} has no column {', '.join(missing)}; it has {', '.join(columns) or 'none'}. Runs of "
            f"lightning_cp.train have {', '.join(needed)}."
        )
    return rows


def _curve(rows: list[Row], loss: str, folder: Path) -> Curve:
    filled = [row for row in rows if row[loss]]
    if not filled:
        raise ConfigError(
            f"{folder / METRICS} has no value of {loss}: the run ended before any. "
            "Leave this run out, or let it train longer."
        )
    values = [float(row[loss]) for row in filled]
    steps = [int(row["step"]) for row in filled]
    for step, value in zip(steps, values, strict=True):
        if not math.isfinite(value):
            raise ConfigError(
                f"{loss} of {folder} is {value} at step {step}. A run that has diverged agrees with nothing: "
                "mend it, or leave it out."
            )
    return Curve(steps, [float(row["tokens"]) for row in filled], values)


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    if not isinstance(settings, dict):
        return {prefix: settings}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sorts 9 before 10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", str(path))]
