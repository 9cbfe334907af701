"""The report on groups of runs: a table, a verdict with its doubts, and ``comparison.png``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_cp.apps.compare.groups import (
    SEED,
    VALIDATION,
    RunGroup,
    Trial,
    bits_at,
    common_seeds,
    describe_settings,
    final_bits,
    groups_of,
    seed_of,
    unequal_settings,
)
from lightning_cp.apps.compare.report import ComparisonResult, costs
from lightning_cp.apps.compare.runs import TrainRun


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
        _draw_steps(left, group, f"C{number}")
    left.set(xlabel="step", ylabel="validation, bits per byte", title="the best of each strong")
    _draw_swept(right, groups)
    right.set(ylabel="validation at the end, bits per byte", title="every run, by what was swept")
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
        style = {"color": f"C{number}", "marker": "o"}
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
