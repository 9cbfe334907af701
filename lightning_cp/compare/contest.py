"""Which is better? Runs are grouped by one setting's value, and each group is as good as its best trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeGuard

from lightning_cp.compare.baseline import is_free
from lightning_cp.compare.runs import LOSSES, Run
from lightning_cp.compare.same_steps import require_same_steps
from lightning_cp.compare.trial import MISSING, SEED, Trial, seed_of
from lightning_cp.errors import ConfigError

OTHER_TOKENS = (
    "what they cost to train is different, so neither of them is better for its loss. Compare runs that have "
    "trained on as much."
)


@dataclass(frozen=True)
class Group:
    """The runs in which the setting has one value."""

    name: str
    trials: list[Trial]
    swept: list[str]
    """Settings that differ within the group, but for the seed."""
    left_out: list[Run]
    """Runs with seeds that not all trials of all groups have: those would be better off by luck."""

    @property
    def runs(self) -> list[Run]:
        """Of all trials."""
        return [run for trial in self.trials for run in trial.runs]

    @property
    def best(self) -> Trial:
        """The trial with the lowest validation loss at its end."""
        return min(self.trials, key=lambda trial: trial.bits)

    @property
    def bits(self) -> float:
        """What the group reaches, bits per byte."""
        return self.best.bits

    @property
    def number(self) -> str | None:
        """The one setting that was swept, if it is a number in every trial."""
        name = self.swept[0] if len(self.swept) == 1 else None
        numbers = name and all(is_number(trial.settings.get(name)) for trial in self.trials)
        return name if numbers else None

    @property
    def is_at_edge(self) -> bool:
        """True if the best has the least or the largest number: what lies beyond may be better."""
        name = self.number
        if name is None:
            return False
        values = [trial.settings[name] for trial in self.trials]
        return self.best.settings[name] in (min(values), max(values))


def groups_of(runs: Sequence[Run], by: str) -> list[Group]:
    """The groups, best first.

    Args:
        runs: all of them.
        by: the dotted name of a setting.

    Raises:
        ConfigError: a run that has no such setting, one value only, runs that have not trained on the same
            number of tokens at the same steps, or one that repeats another, seed and all.
    """
    members: dict[Any, list[Run]] = {}
    for run in runs:
        members.setdefault(repr(_value(run, by)), []).append(run)
    if len(members) < 2:
        raise ConfigError(
            f"{by} is {_value(runs[0], by)} in every run, so none can be better. Give runs that differ in "
            "it, or name another setting: by=..."
        )
    for run in runs[1:]:
        for loss in LOSSES:
            require_same_steps(run, runs[0], loss, called=runs[0].name, why=OTHER_TOKENS)
    names = _short([str(_value(some[0], by)) for some in members.values()])
    made = zip(names, members.values(), strict=True)
    groups = [_group(name, some) for name, some in made]
    if by != SEED:
        groups = _of_common_seeds(groups)
    return sorted(groups, key=lambda group: group.bits)


def common_seeds(groups: Sequence[Group]) -> set[Any]:
    """Those that every trial of every group was run with."""
    return set.intersection(*(set(trial.of_seed) for group in groups for trial in group.trials))


def described(group: Group, one: Trial | Run) -> str:
    """The settings that differ within its group."""
    return " ".join(
        f"{name.rsplit('.', 1)[-1]}={one.settings.get(name, MISSING)}" for name in group.swept
    )


def is_number(value: object) -> TypeGuard[int | float]:
    """True if it can be set out along an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def unequal(groups: Sequence[Group], by: str) -> list[str]:
    """Settings that groups differ in, beside the one that is asked about and those that were swept.

    Those that only some have come with the value that is asked about, as the options of an optimizer do.
    """
    leave = {by, SEED, *(name for group in groups for name in group.swept)}
    settings = [group.best.settings for group in groups]
    common = [name for name in settings[0] if all(name in other for other in settings[1:])]
    return [
        name
        for name in common
        if name not in leave and not is_free(name) and len({repr(s[name]) for s in settings}) > 1
    ]


def _value(run: Run, by: str) -> Any:
    if by not in run.settings:
        near = get_close_matches(by, run.settings, n=3, cutoff=0.4)
        raise ConfigError(
            f"by={by} is no setting of {run.name}. Name one of its .hydra/config.yaml with dots"
            f"{': ' if near else ''}{', '.join(near)}."
        )
    return run.settings[by]


def _group(name: str, runs: Sequence[Run]) -> Group:
    swept = _differing(runs)
    trials: dict[Any, list[Run]] = {}
    for run in runs:
        trials.setdefault(repr([run.settings.get(n, MISSING) for n in swept]), []).append(run)
    return Group(name, [Trial.of(some) for some in trials.values()], swept, [])


def _of_common_seeds(groups: Sequence[Group]) -> list[Group]:
    """With the seeds that all trials have, if there are any."""
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


def _differing(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.settings if name != SEED)
    return [n for n in names if len({repr(run.settings.get(n, MISSING)) for run in runs}) > 1]


def _short(values: Sequence[str]) -> list[str]:
    """Classes without their modules, if that leaves them apart."""
    short = [value.rsplit(".", 1)[-1] if _is_dotted(value) else value for value in values]
    return short if len(set(short)) == len(values) else list(values)


def _is_dotted(value: str) -> bool:
    return "." in value and all(part.isidentifier() for part in value.split("."))
