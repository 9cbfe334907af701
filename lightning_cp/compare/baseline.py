"""Which run each run is held against: one with the same settings, but for how the work is shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_cp.compare.runs import Run
from lightning_cp.errors import ConfigError

FREE = (
    "strategy",
    "threads_per_rank",
    "throughput",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.accelerator",
)
"""Settings that say how the work is shared or watched, and must change no loss; with all below them."""


def pair(runs: Sequence[Run], named: Sequence[str] = ()) -> list[tuple[Run, Run]]:
    """Each run with its baseline; baselines themselves are left out.

    Args:
        runs: all of them.
        named: the baselines' names or folders; without any, the runs of one process.

    Raises:
        ConfigError: no run of that name, or a run that has no or several baselines.
    """
    baselines = [_find(name, runs) for name in named] or [r for r in runs if r.processes == 1]
    others = [run for run in runs if run not in baselines]
    if not baselines or not others:
        raise ConfigError(
            f"{'no run' if not baselines else 'every run'} is a baseline; those of one process are, unless "
            f"baseline= names others. The runs: {_list(runs)}."
        )
    return [(run, _baseline_of(run, baselines)) for run in others]


def differences(run: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """Settings that should be equal and are not: name -> the value in each, None where it is absent."""
    names = [*run.settings, *(name for name in other.settings if name not in run.settings)]
    both = {name: (run.settings.get(name), other.settings.get(name)) for name in names}
    return {name: two for name, two in both.items() if two[0] != two[1] and not is_free(name)}


def is_free(name: str) -> bool:
    """True if it only says how the work is shared or watched."""
    return any(name == free or name.startswith(f"{free}.") for free in FREE)


def _baseline_of(run: Run, baselines: Sequence[Run]) -> Run:
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


def _find(name: str, runs: Sequence[Run]) -> Run:
    found = [run for run in runs if run.name == name or run.folder == Path(name).absolute()]
    if len(found) != 1:
        raise ConfigError(f"baseline={name} is none of the runs: {_list(runs)}. Name one of these.")
    return found[0]


def _list(runs: Sequence[Run]) -> str:
    return ", ".join(f"{run.name} ({run.processes or '?'} processes)" for run in runs)
