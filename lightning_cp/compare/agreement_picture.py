"""``comparison.png``: the losses of all runs, and how far each is from its baseline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_cp.compare.deviation import FLOOR, Deviation
from lightning_cp.compare.runs import Run

SMALLEST = 1e-9
"""Deviations of 0 are drawn here, since the axis is logarithmic."""


def draw(runs: Sequence[Run], found: Sequence[Deviation], picture: Path) -> None:
    """Draw training losses above, their relative deviations below.

    Args:
        runs: all of them.
        found: those with a baseline.
        picture: the PNG to write.
    """
    from matplotlib.figure import Figure  # needs no display
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    compared = {deviation.run.folder for deviation in found}
    colors = {run.folder: f"C{number}" for number, run in enumerate(runs)}
    for run in runs:
        curve = run.curves["train/loss"]
        width = 1.2 if run.folder in compared else 3.5  # baselines show from behind the others
        alpha = 1.0 if run.folder in compared else 0.35
        style = {"lw": width, "alpha": alpha, "color": colors[run.folder]}
        above.plot(curve.steps, curve.values, label=run.name, **style)
    for deviation in found:
        values = [max(value, SMALLEST) for value in deviation.curves["train/loss"]]
        steps = deviation.run.curves["train/loss"].steps
        color = colors[deviation.run.folder]
        below.plot(steps, values, lw=1, marker=".", color=color, label=deviation.run.name)
    for tolerance in sorted({deviation.tolerance for deviation in found}):
        below.axhline(tolerance, color="black", ls="--", lw=1, label=f"tolerance {tolerance:g}")
    below.axhline(FLOOR, color="gray", ls=":", lw=1, label="usual floor 5%")
    above.set(ylabel="training loss (nats per byte)")
    below.set(xlabel="step", ylabel="relative deviation from the baseline", yscale="log")
    below.set_ylim(bottom=SMALLEST / 2)
    below.text(
        0.01,
        SMALLEST * 1.15,
        "1e-9: none at all",
        fontsize=7,
        color="gray",
        transform=below.get_yaxis_transform(),
    )
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=3)
    figure.savefig(picture, dpi=120)
