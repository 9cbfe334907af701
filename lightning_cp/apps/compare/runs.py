"""Runs of the main job, read from their folders, with the baseline of each; the output of every comparison.

A run's baseline has the same settings, except for those that say how the work is shared. Losses are
comparable only at the same steps, after the same tokens. The output is a table, its CSV, the losses as CSV,
and a verdict.
"""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
from collections.abc import Callable, Collection, Sequence
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
"""Optional: older runs did not record it."""

Row = dict[str, str]


@dataclass(frozen=True)
class Curve:
    """One loss over the steps of a run."""

    steps: list[int]
    tokens: list[float]
    """Tokens trained on until then."""
    values: list[float]


@dataclass(frozen=True)
class TrainRun:
    """One run of the main job, read from its folder."""

    name: str
    folder: Path
    settings: dict[str, Any]
    """Dotted name -> value, as composed; interpolations are left as they are."""
    curves: dict[str, Curve]
    """One curve for each of ``LOSSES``."""
    tokens_per_second: float
    """The median over the steps, so that the slow first one does not matter."""
    memory: float | None
    """Peak MiB of the largest process."""

    @property
    def processes(self) -> int | None:
        """The number of processes; ``None`` if Lightning chose it."""
        devices = self.settings.get("trainer.devices")
        if self.settings.get("strategy") == "auto" and isinstance(devices, int):
            return 1  # strategy=single, whatever a sweep asks of the others
        if isinstance(devices, list):
            devices = len(devices)
        return devices * self.settings.get("trainer.num_nodes", 1) if type(devices) is int else None


def find_runs(sweep: str) -> list[Path]:
    """Return the folders of runs inside a folder, in the order of their numbers.

    Raises:
        ConfigError: the folder does not exist, or has no run inside.
    """
    folder = Path(sweep)
    if not folder.is_dir():
        raise ConfigError(
            f"sweep={sweep} is not a folder: {folder.absolute()} does not exist. "
            "Give the folder of a sweep, which has a folder for each job."
        )
    found = [path.parents[1] for path in folder.rglob(str(SETTINGS)) if path.parents[1] != folder]
    if not found:
        raise ConfigError(
            f"sweep={sweep} has no run inside: no folder below {folder.absolute()} has a {SETTINGS}. Sweeps "
            "are in multirun/<date>/<time>; for single runs use runs=[folder,folder]."
        )
    return sorted(found, key=_by_number)


def read_runs(folders: Sequence[Path]) -> list[TrainRun]:
    """Read runs, named by the different parts of their paths.

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


def read_run(folder: Path, name: str) -> TrainRun:
    """Read one run.

    Args:
        folder: the run's folder.
        name: the run's name in tables.

    Raises:
        ConfigError: no folder, no run, missing or incomplete metrics, or a loss that is not finite.
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
    return TrainRun(
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
                "correct it, or leave it out."
            )
    return Curve(steps, [float(row["tokens"]) for row in filled], values)


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names."""
    if not isinstance(settings, dict):
        return {prefix: settings}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts 9 before 10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", str(path))]


FREE = (
    "strategy",
    "threads_per_rank",
    "throughput",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.accelerator",
)
"""Settings that say how the work is shared or observed, with all below them; they must not change a loss."""


def pair(runs: Sequence[TrainRun], named: Sequence[str] = ()) -> list[tuple[TrainRun, TrainRun]]:
    """Pair each run with its baseline; baselines themselves are left out.

    Args:
        runs: all runs.
        named: the baselines' names or folders; by default the runs of one process.

    Raises:
        ConfigError: no run of that name, or a run without exactly one baseline.
    """
    baselines = [_find(name, runs) for name in named] or [r for r in runs if r.processes == 1]
    others = [run for run in runs if run not in baselines]
    if not baselines or not others:
        raise ConfigError(
            f"{'no run' if not baselines else 'every run'} is a baseline; those of one process are, unless "
            f"baseline= names others. The runs: {_list(runs)}."
        )
    return [(run, _baseline_of(run, baselines)) for run in others]


def differences(run: TrainRun, other: TrainRun) -> dict[str, tuple[Any, Any]]:
    """Return settings that should be equal but differ: name -> both values, ``None`` where absent."""
    names = [*run.settings, *(name for name in other.settings if name not in run.settings)]
    both = {name: (run.settings.get(name), other.settings.get(name)) for name in names}
    return {name: two for name, two in both.items() if two[0] != two[1] and not is_free(name)}


def is_free(name: str) -> bool:
    """True if a setting only says how the work is shared or observed."""
    return any(name == free or name.startswith(f"{free}.") for free in FREE)


def _baseline_of(run: TrainRun, baselines: Sequence[TrainRun]) -> TrainRun:
    fitting = [baseline for baseline in baselines if not differences(run, baseline)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConfigError(
            f"{run.name} has several baselines of the same settings: {_list(fitting)}. Choose one: "
            f"baseline={fitting[0].name}."
        )
    nearest = min(baselines, key=lambda baseline: len(differences(run, baseline)))
    told = [
        f"{name} is {ours}, there {theirs}"
        for name, (ours, theirs) in differences(run, nearest).items()
    ]
    raise ConfigError(
        f"{run.name} and its nearest baseline {nearest.name} have different settings: {'; '.join(told)}. "
        f"Only {', '.join(FREE)} may differ. Add a baseline with the settings of {run.name}, or leave it out."
    )


def _find(name: str, runs: Sequence[TrainRun]) -> TrainRun:
    found = [run for run in runs if run.name == name or run.folder == Path(name).absolute()]
    if len(found) != 1:
        raise ConfigError(f"baseline={name} is none of the runs: {_list(runs)}. Name one of these.")
    return found[0]


def _list(runs: Sequence[TrainRun]) -> str:
    return ", ".join(f"{run.name} ({run.processes or '?'} processes)" for run in runs)


def check_same_steps(run: TrainRun, other: TrainRun, loss: str, *, called: str, why: str) -> None:
    """Check that two curves are comparable.

    Args:
        run: one run.
        other: the other run.
        loss: the name of the loss.
        called: the other run's role in the message, as in "its baseline one".
        why: the consequence of different batches and the fix, for the message.

    Raises:
        ConfigError: the curves have different steps, or different tokens at a step.
    """
    ours, theirs = run.curves[loss], other.curves[loss]
    if ours.steps != theirs.steps:
        raise ConfigError(
            f"{run.name} and {called} have {loss} at different steps: {_span(ours)}, and {_span(theirs)}. "
            "Compare runs of the same length that have come to their end."
        )
    for step, mine, its in zip(ours.steps, ours.tokens, theirs.tokens, strict=True):
        if mine != its:
            raise ConfigError(
                f"{run.name} had trained on {mine:.0f} tokens at step {step}, {called} on {its:.0f}: {why}"
            )


def _span(curve: Curve) -> str:
    return f"{len(curve.steps)} from {curve.steps[0]} to {curve.steps[-1]}"


@dataclass(frozen=True)
class ComparisonResult:
    """The answer to one question about runs."""

    columns: Sequence[str]
    lines: Sequence[dict[str, str]]
    """One line for each run: column -> text."""
    of_words: Collection[str]
    """Left-aligned columns; columns of numbers are right-aligned."""
    verdict: str
    passed: bool
    draw: Callable[[Path], None]
    """Writes the PNG."""

    def table(self) -> str:
        """Return the lines as text."""
        cells = [dict(zip(self.columns, self.columns, strict=True)), *self.lines]
        widths = {name: max(len(line[name]) for line in cells) for name in self.columns}
        return "\n".join(
            "  ".join(
                line[name].ljust(widths[name])
                if name in self.of_words
                else line[name].rjust(widths[name])
                for name in self.columns
            ).rstrip()
            for line in cells
        )

    def write_table(self, file: Path) -> None:
        """Write the lines as CSV."""
        with file.open("w", newline="") as content:
            writer = csv.DictWriter(content, self.columns)
            writer.writeheader()
            writer.writerows(self.lines)


def costs(run: TrainRun) -> dict[str, str]:
    """Return the columns of a run's cost."""
    memory = "" if run.memory is None else f"{run.memory:.0f}"
    return {"tokens/s": f"{run.tokens_per_second:.0f}", "MiB/process": memory}


def write_losses(runs: Sequence[TrainRun], file: Path) -> None:
    """Write the aligned curves as CSV: loss, step, tokens, and a column for each run, possibly empty."""
    with file.open("w", newline="") as content:
        writer = csv.writer(content)
        writer.writerow(["loss", "step", "tokens", *(run.name for run in runs)])
        for loss in LOSSES:
            points: dict[tuple[int, float], dict[str, float]] = {}
            for run in runs:
                curve = run.curves[loss]
                for step, tokens, value in zip(
                    curve.steps, curve.tokens, curve.values, strict=True
                ):
                    points.setdefault((step, tokens), {})[run.name] = value
            for (step, tokens), values in sorted(points.items()):
                line = [values.get(run.name, "") for run in runs]
                writer.writerow([loss, step, f"{tokens:.0f}", *line])
