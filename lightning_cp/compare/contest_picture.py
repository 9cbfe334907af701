"""``comparison.png`` of groups: validation against steps, and where each run ended against what was swept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_cp.compare.contest import Group, described
from lightning_cp.compare.trial import Trial, final_bits


def draw(groups: Sequence[Group], picture: Path) -> None:
    """Draw validations over the steps on the left, the last ones over what was swept on the right.

    Args:
        groups: each in a colour of its own; its best trial strong, the others faint. Lines are means over
            seeds, dots on the right every run.
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


def _draw_steps(axes: Any, group: Group, color: str) -> None:
    for trial in group.trials:
        steps, bits = zip(*((step + 1, bits) for step, bits in trial.curve), strict=True)
        if trial is group.best:
            name = " ".join(filter(None, (group.name, described(group, trial))))
            label = f"{name}: {group.bits:.3f}"
            axes.plot(steps, bits, color=color, lw=2.2, marker="o", ms=4, zorder=3, label=label)
        else:
            axes.plot(steps, bits, color=color, lw=0.9, alpha=0.3)


def _draw_swept(axes: Any, groups: Sequence[Group]) -> None:
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


def _axis(groups: Sequence[Group]) -> str | None:
    """The number that was swept, if it is the same one in every group."""
    names = {group.number for group in groups}
    return names.pop() if len(names) == 1 else None


def _where(trial: Trial, name: str | None) -> Any:
    return trial.settings[name] if name else trial.runs[0].name
