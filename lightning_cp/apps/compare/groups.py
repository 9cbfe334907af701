"""Groups of runs by one setting's value, and the report on them: a table, a verdict and ``comparison.png``.

A group is as good as its best trial: a set of runs of the same settings, which differ only in their seeds.
The verdict comes with its doubts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from lightning_cp.apps.compare.runs import (
    LOSSES,
    ComparisonResult,
    TrainRun,
    check_same_steps,
    costs,
    is_free,
)
from lightning_cp.errors import ConfigError
from lightning_cp.utils.colors import color_of

VALIDATION = "val/loss"
MISSING = "-"
"""The value of a setting that a run does not have."""
SEED = "seed"
"""The random setting: runs that differ only in it are repetitions."""


@dataclass(frozen=True)
class Trial:
    """Runs of the same settings and steps, as good as their mean."""

    of_seed: dict[Any, TrainRun]
    """The runs by seed."""

    @staticmethod
    def of(runs: Iterable[TrainRun]) -> Trial:
        """Make a trial of runs whose other settings are equal.

        Raises:
            ConfigError: two of them have the same seed.
        """
        found: dict[Any, TrainRun] = {}
        for run in runs:
            other = found.setdefault(seed_of(run), run)
            if other is not run:
                raise ConfigError(
                    f"{other.name} and {run.name} have the same settings and the same seed, so one of them "
                    "says nothing new. Leave it out."
                )
        return Trial(found)

    @property
    def runs(self) -> list[TrainRun]:
        """All runs."""
        return list(self.of_seed.values())

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the first run; all runs share them except for the seed."""
        return self.runs[0].settings

    @property
    def bits(self) -> float:
        """The mean of the runs' last validations, bits per byte."""
        return statistics.fmean(map(final_bits, self.runs))

    @property
    def deviation(self) -> float | None:
        """Standard deviation between seeds (n - 1); ``None`` for a single run."""
        return statistics.stdev(map(final_bits, self.runs)) if len(self.of_seed) > 1 else None

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The mean of the runs' validations after training began: (step, bits per byte)."""
        steps = [step for step, _ in bits_at(self.runs[0])]
        values = zip(*([bits for _, bits in bits_at(run)] for run in self.runs), strict=True)
        return list(zip(steps, map(statistics.fmean, values), strict=True))

    def with_seeds(self, seeds: Iterable[Any]) -> Trial:
        """Return the trial with only these seeds."""
        wanted = set(seeds)
        return Trial({seed: run for seed, run in self.of_seed.items() if seed in wanted})


def seed_of(run: TrainRun) -> Any:
    """Return a run's seed."""
    return run.settings.get(SEED, MISSING)


def bits_at(run: TrainRun) -> list[tuple[int, float]]:
    """Return a run's validations after training began: (step, bits per byte)."""
    curve = run.curves[VALIDATION]
    every = zip(curve.steps, curve.tokens, curve.values, strict=True)
    return [(step, loss / math.log(2)) for step, tokens, loss in every if tokens]


def final_bits(run: TrainRun) -> float:
    """Return a run's last validation, bits per byte."""
    return run.curves[VALIDATION].values[-1] / math.log(2)


OTHER_TOKENS = (
    "what they cost to train is different, so neither of them is better for its loss. Compare runs that have "
    "trained on as much."
)


@dataclass(frozen=True)
class RunGroup:
    """The runs in which the setting has one value."""

    name: str
    trials: list[Trial]
    swept: list[str]
    """Settings that differ within the group, except the seed."""
    left_out: list[TrainRun]
    """Runs with seeds that some trial of some group lacks: they would win or lose by chance."""

    @property
    def runs(self) -> list[TrainRun]:
        """The runs of all trials."""
        return [run for trial in self.trials for run in trial.runs]

    @property
    def best(self) -> Trial:
        """The trial with the lowest final validation loss."""
        return min(self.trials, key=lambda trial: trial.bits)

    @property
    def bits(self) -> float:
        """The best trial's result, bits per byte."""
        return self.best.bits

    @property
    def number(self) -> str | None:
        """The name of the only swept setting, if it is a number in every trial."""
        name = self.swept[0] if len(self.swept) == 1 else None
        numbers = name and all(is_number(trial.settings.get(name)) for trial in self.trials)
        return name if numbers else None

    @property
    def is_at_edge(self) -> bool:
        """True if the best trial has the smallest or largest number: a value beyond may be better."""
        name = self.number
        if name is None:
            return False
        values = [trial.settings[name] for trial in self.trials]
        return self.best.settings[name] in (min(values), max(values))


def groups_of(runs: Sequence[TrainRun], by: str) -> list[RunGroup]:
    """Group runs, best group first.

    Args:
        runs: all runs.
        by: the dotted name of a setting.

    Raises:
        ConfigError: a run without the setting, a single value, runs with different tokens at the same steps,
            or two runs with the same settings and seed.
    """
    members: dict[Any, list[TrainRun]] = {}
    for run in runs:
        members.setdefault(repr(_value(run, by)), []).append(run)
    if len(members) < 2:
        raise ConfigError(
            f"{by} is {_value(runs[0], by)} in every run, so none can be better. Give runs that differ in "
            "it, or name another setting: by=..."
        )
    for run in runs[1:]:
        for loss in LOSSES:
            check_same_steps(run, runs[0], loss, called=runs[0].name, why=OTHER_TOKENS)
    names = _short([str(_value(some[0], by)) for some in members.values()])
    made = zip(names, members.values(), strict=True)
    groups = [_group(name, some) for name, some in made]
    if by != SEED:
        groups = _of_common_seeds(groups)
    return sorted(groups, key=lambda group: group.bits)


def common_seeds(groups: Sequence[RunGroup]) -> set[Any]:
    """Return the seeds that every trial of every group has."""
    return set.intersection(*(set(trial.of_seed) for group in groups for trial in group.trials))


def describe_settings(group: RunGroup, one: Trial | TrainRun) -> str:
    """Return the settings that differ within the group, as text."""
    return " ".join(
        f"{name.rsplit('.', 1)[-1]}={one.settings.get(name, MISSING)}" for name in group.swept
    )


def is_number(value: object) -> TypeGuard[int | float]:
    """True if the value is a number, which an axis can show."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def unequal_settings(groups: Sequence[RunGroup], by: str) -> list[str]:
    """Return settings in which the groups differ, besides ``by`` and the swept ones.

    Settings that only some groups have belong to the value of ``by``, as the options of an optimizer do.
    """
    leave = {by, SEED, *(name for group in groups for name in group.swept)}
    settings = [group.best.settings for group in groups]
    common = [name for name in settings[0] if all(name in other for other in settings[1:])]
    return [
        name
        for name in common
        if name not in leave and not is_free(name) and len({repr(s[name]) for s in settings}) > 1
    ]


def _value(run: TrainRun, by: str) -> Any:
    if by not in run.settings:
        near = get_close_matches(by, run.settings, n=3, cutoff=0.4)
        raise ConfigError(
            f"by={by} is not a setting of {run.name}. Name one of its .hydra/config.yaml with dots"
            f"{': ' if near else ''}{', '.join(near)}."
        )
    return run.settings[by]


def _group(name: str, runs: Sequence[TrainRun]) -> RunGroup:
    swept = _differing(runs)
    trials: dict[Any, list[TrainRun]] = {}
    for run in runs:
        trials.setdefault(repr([run.settings.get(n, MISSING) for n in swept]), []).append(run)
    return RunGroup(name, [Trial.of(some) for some in trials.values()], swept, [])


def _of_common_seeds(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Return the groups with the seeds that all trials have, if there are any."""
    common = common_seeds(groups)
    if not common:
        return list(groups)
    return [
        replace(
            group,
            trials=[trial.with_seeds(common) for trial in group.trials],
            left_out=[run for run in group.runs if seed_of(run) not in common],
        )
        for group in groups
    ]


def _differing(runs: Sequence[TrainRun]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.settings if name != SEED)
    return [n for n in names if len({repr(run.settings.get(n, MISSING)) for run in runs}) > 1]


def _short(values: Sequence[str]) -> list[str]:
    """Return class names without modules if they stay distinct."""
    short = [value.rsplit(".", 1)[-1] if _is_dotted(value) else value for value in values]
    return short if len(set(short)) == len(values) else list(values)


def _is_dotted(value: str) -> bool:
    return "." in value and all(part.isidentifier() for part in value.split("."))


def draw(groups: Sequence[RunGroup], picture: Path) -> None:
    """Draw validations over the steps on the left, the last ones over the swept setting on the right.

    Args:
        groups: each has one colour; its best trial is strong, the others faint. Lines are means over seeds,
            dots on the right are single runs.
        picture: the PNG to write.
    """
    from matplotlib.figure import Figure  # needs no display

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, group in enumerate(groups):
        _draw_steps(left, group, color_of(number))
    left.set(
        xlabel="step", ylabel="validation, bits per byte", title="all runs; bold: the best of each"
    )
    _draw_swept(right, groups)
    right.set(ylabel="validation at the end, bits per byte", title="all runs by the swept setting")
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    figure.savefig(picture, dpi=120)


def _draw_steps(axes: Any, group: RunGroup, color: str) -> None:
    for trial in group.trials:
        steps, bits = zip(*((step + 1, bits) for step, bits in trial.curve), strict=True)
        if trial is group.best:
            name = " ".join(filter(None, (group.name, describe_settings(group, trial))))
            label = f"{name}: {group.bits:.3f}"
            axes.plot(steps, bits, color=color, lw=2.2, marker="o", ms=4, zorder=3, label=label)
        else:
            axes.plot(steps, bits, color=color, lw=0.9, alpha=0.3)


def _draw_swept(axes: Any, groups: Sequence[RunGroup]) -> None:
    name = _axis(groups)
    for number, group in enumerate(groups):
        ends = [(_where(trial, name), trial.bits) for trial in group.trials]
        xs, ys = zip(*(sorted(ends) if name else ends), strict=True)
        style = {"color": color_of(number), "marker": "o"}
        axes.plot(xs, ys, ls="-" if name else "", ms=4, label=group.name, **style)
        for trial in group.trials:
            every = [final_bits(run) for run in trial.runs]
            axes.plot([_where(trial, name)] * len(every), every, ls="", ms=3, alpha=0.5, **style)
        axes.plot([_where(group.best, name)], [group.bits], ms=10, mfc="none", mew=2, **style)
    axes.set(xlabel=name or "run")
    if name and min(trial.settings[name] for group in groups for trial in group.trials) > 0:
        axes.set_xscale("log")


def _axis(groups: Sequence[RunGroup]) -> str | None:
    """Return the swept number's name, if it is the same in every group."""
    names = {group.number for group in groups}
    return names.pop() if len(names) == 1 else None


def _where(trial: Trial, name: str | None) -> Any:
    return trial.settings[name] if name else trial.runs[0].name


COLUMNS: tuple[str, ...] = (
    "group",
    "run",
    "settings",
    "final bits/byte",
    "best bits/byte",
    "tokens/s",
    "MiB/process",
    "result",
)


def compare_groups(runs: Sequence[TrainRun], by: str) -> ComparisonResult:
    """Compare the values of a setting; each is as good as its best trial.

    Args:
        runs: all runs.
        by: the setting's dotted name.

    Raises:
        ConfigError: runs that cannot be compared.
    """
    groups = groups_of(runs, by)
    return ComparisonResult(
        columns=COLUMNS,
        lines=[
            _row(group, trial, run)
            for group in groups
            for trial in (*group.trials, None)
            for run in (trial.runs if trial else group.left_out)
        ],
        of_words={"group", "run", "settings", "result"},
        verdict=" ".join([verdict(groups), *doubts(groups, by)]),
        passed=True,
        draw=partial(draw, groups),
    )


def _row(group: RunGroup, trial: Trial | None, run: TrainRun) -> dict[str, str]:
    is_repeated = trial is None or len(trial.runs) > 1
    chance = f"{SEED}={seed_of(run)}" if is_repeated else ""
    settings = f"{describe_settings(group, run)} {chance}".strip()
    told = {"group": group.name, "run": run.name, "settings": settings}
    told["final bits/byte"] = f"{final_bits(run):.4f}"
    told["best bits/byte"] = f"{min(bits for _, bits in bits_at(run)):.4f}"
    told["result"] = "left out" if trial is None else "best" if trial is group.best else ""
    return dict.fromkeys(COLUMNS, "") | costs(run) | told


def verdict(groups: Sequence[RunGroup]) -> str:
    """Return the outcome in sentences.

    Args:
        groups: best first.
    """
    first, *others = groups
    end = first.best.runs[0].curves[VALIDATION]
    outcome = f"{first.name} is better" if first.bits < others[0].bits else "None is better"
    after = f"after {end.steps[-1] + 1} steps and {end.tokens[-1]:,.0f} tokens"
    places = [f"{_place(group)}{_behind(first, group)}." for group in others]
    return " ".join([f"{outcome} {after}: {_place(first)}.", *places])


def doubts(groups: Sequence[RunGroup], by: str) -> list[str]:
    """Return sentences on other causes of the outcome."""
    said = [
        f"{group.name} may reach less: its best is at an edge of what was swept."
        for group in groups
        if group.is_at_edge
    ]
    said += [f"{group.name} was not tuned." for group in groups if len(group.trials) == 1]
    if len({_values(group) for group in groups}) > 1:
        said.append("The groups were not swept over the same values.")
    said += _chance(groups) if by != SEED else []
    if other := unequal_settings(groups, by):
        said.append(f"They also differ in {', '.join(other)}.")
    return said


def _chance(groups: Sequence[RunGroup]) -> list[str]:
    """Return sentences on the influence of seeds."""
    seeds = sorted(common_seeds(groups), key=str)
    if not seeds:
        return [f"They also differ in {SEED}."]
    left = dict.fromkeys(str(seed_of(run)) for group in groups for run in group.left_out)
    said = [f"Left out, as not all were run with it: {SEED} {', '.join(left)}."] if left else []
    if len(seeds) == 1:
        return [*said, "None was repeated with another seed."]
    first, second = groups[:2]
    pairs = {seed: (first.best.of_seed[seed], second.best.of_seed[seed]) for seed in seeds}
    luck = [str(seed) for seed, (a, b) in pairs.items() if final_bits(a) >= final_bits(b)]
    if luck:
        said.append(
            f"Of {SEED} {', '.join(luck)} {second.name} is as good or better: it may be chance."
        )
    return said


def _place(group: RunGroup) -> str:
    best = group.best
    own = describe_settings(group, best)
    notes = [own, f"best of {len(group.trials)}"] if own else []
    notes += [f"mean of {len(best.of_seed)} seeds"] if best.deviation is not None else []
    spread = "" if best.deviation is None else f" ± {best.deviation:.4f}"
    told = f" ({', '.join(notes)})" if notes else ""
    return f"{group.name} {group.bits:.4f}{spread} bits per byte{told}"


def _behind(first: RunGroup, group: RunGroup) -> str:
    """Return the distance to the first group, and the step at which the first group was that good."""
    if first.bits == group.bits:
        return ""
    more = group.bits - first.bits
    step = next(step for step, bits in first.best.curve if bits <= group.bits)
    return f", {more:.4f} ({more / first.bits:.1%}) more; {first.name} was there by step {step + 1}"


def _values(group: RunGroup) -> frozenset[str]:
    return frozenset(describe_settings(group, trial) for trial in group.trials)
