"""Memory of a device by kind, plan beside plan; and the work of every ring rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_cp.layout import Documents, Mask, SequenceLayout, schedule
from lightning_cp.planner.job import Case
from lightning_cp.planner.machines import GIB
from lightning_cp.planner.memory import Memory
from lightning_cp.planner.search import Found

Bar = tuple[str, Memory]


MOST_BARS = 12
"""Of plans, and of what does not fit: more cannot be read."""
CORNER: dict[str, Any] = {"fontsize": 8, "va": "bottom", "ha": "center"}


def draw(found: Found, headline: str, show: int, picture: Path) -> None:
    """Write the picture; nothing if nothing was priced."""
    from matplotlib.figure import Figure  # needs no display

    shown = min(show, MOST_BARS)
    bars: list[Bar] = [(_name(plan.case), plan.memory) for plan in found.plans[:shown]]
    for one in found.rejected[:shown]:
        if one.case is not None and one.memory is not None:
            bars.append((_name(one.case), one.memory))
    if not bars:
        return
    best = found.plans[0].case if found.plans else None
    panels = 1
    if best is not None and best.job.trains and best.choice.mesh.ring > 1:
        panels = 2
    figure = Figure(figsize=(11, 1.6 + 0.45 * len(bars) + 2.6 * (panels - 1)), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    figure.suptitle(headline, fontsize=10)
    _memory(axes[0], bars)
    if best is not None and panels > 1:
        _work(axes[1], best)
    figure.savefig(picture, dpi=130)


def _name(case: Case) -> str:
    choice = case.choice
    mesh = str(choice.mesh).replace(" x ", "\n", 0)
    saved = [] if choice.checkpointing == "none" else [choice.checkpointing]
    saved += ["offload"] * choice.offload
    return f"{mesh or '1 device'}\n{', '.join([choice.engine, *saved])}"


def _memory(axis: Any, bars: Sequence[Bar]) -> None:
    """One bar for each, the fastest on top; those that end beyond the line do not fit."""
    left = [0.0] * len(bars)
    kinds = [*bars[0][1].by_kind, "reserve"]
    at = range(len(bars))
    for number, kind in enumerate(kinds):
        sizes = [{**m.by_kind, "reserve": m.reserve}[kind] / GIB for _, m in bars]
        color = "lightgray" if kind == "reserve" else f"C{number}"
        if any(sizes):
            axis.barh(at, sizes, left=left, label=kind, color=color)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    capacity = bars[0][1].capacity / GIB
    axis.axvline(capacity, color="black", ls="--", lw=1)
    axis.text(
        capacity, 1.01, f"{capacity:,.0f} GiB", transform=axis.get_xaxis_transform(), **CORNER
    )
    axis.set_yticks(at, [name for name, _ in bars], fontsize=7)
    axis.set_xlim(0, min(max(*left, capacity), 3 * capacity) * 1.05)
    axis.invert_yaxis()
    axis.set_xlabel("GiB of a device at the fullest moment of a step")
    axis.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1), borderaxespad=2.5)


def _work(axis: Any, case: Case) -> None:
    """Attention pairs of every ring rank over the mean, beside those of a contiguous layout."""
    mesh, length = case.choice.mesh, case.job.seq_len
    documents = Documents.single(length)
    contiguous = SequenceLayout(length, mesh.ring, mesh.ulysses, "contiguous")
    ranks = list(range(mesh.ring))
    for layout, color, aside in ((contiguous, "lightgray", -0.2), (case.layout, "C0", 0.2)):
        work = schedule(layout, documents, Mask()).work
        mean, at = sum(work) / len(work), [rank + aside for rank in ranks]
        axis.bar(at, [one / mean for one in work], width=0.4, color=color, label=layout.kind)
    axis.set(xlabel="ring rank", ylabel="attention / mean", ylim=(0, None))
    axis.set_xlim(-0.6, mesh.ring - 0.4)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title(f"work of every ring rank: {mesh}, layers without a window", fontsize=9)
    axis.legend(fontsize=8)
