"""The picture of each suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_cp.bench.compute import ComputeRow
from lightning_cp.bench.kernels import KernelRow
from lightning_cp.bench.links import LinkRow
from lightning_cp.bench.modes import ModeRow
from lightning_cp.bench.overheads import OverheadRow
from lightning_cp.bench.tables import Unit, grouped, mode_group, short, size_shown


def draw_kernels(rows: Sequence[KernelRow], headline: str, picture: Path) -> None:
    """TFLOP/s by tokens: a panel for each mask, a line for each kernel and pass."""
    measured = [row for row in rows if row.obstacle is None]
    if not measured:
        return
    panels = grouped(measured, lambda r: (r.mask,))
    title = "Kernels: operations on visible pairs, one device"
    figure, axes = _figure(len(panels), f"{title}\n{headline}")
    unit = Unit.of([row.both_tflops for row in measured])
    lines = grouped(measured, lambda r: (r.kernel, r.dtype, r.head_dim))
    colors = {key: f"C{number}" for number, (key, _) in enumerate(lines)}
    shapes = len({(row.dtype, row.head_dim) for row in measured}) > 1
    for ((mask,), part), axis in zip(panels, axes, strict=True):
        for key, line in grouped(part, lambda r: (r.kernel, r.dtype, r.head_dim)):
            name = ", ".join(map(str, key)) if shapes else str(key[0])
            tokens, style = [row.tokens for row in line], {"color": colors[key], "marker": "o"}
            forward = [unit.of_tflops(row.forward_tflops) for row in line]
            axis.plot(tokens, forward, label=f"{name}, forward", **style)
            backward = [unit.of_tflops(row.backward_tflops) for row in line]
            axis.plot(tokens, backward, label=f"{name}, backward", ls="--", mfc="white", **style)
        axis.set(xlabel="tokens", ylabel=unit.name)
        axis.set_title(mask, fontsize=10)
        tokens = sorted({row.tokens for row in measured})
        _at(axis, tokens, [f"{n:,}" for n in tokens])
        axis.set_ylim(bottom=0)
    _finish(figure, axes, picture)


def draw_links(rows: Sequence[LinkRow], headline: str, picture: Path) -> None:
    """GB/s by the bytes that a rank sends: a panel for each mesh, a line for each collective."""
    if not rows:
        return
    panels = grouped(rows, lambda r: (r.ulysses_size, r.ring_size))
    title = "Links: what a rank sends while it receives as much"
    figure, axes = _figure(len(panels), f"{title}\n{headline}", share=True)
    names = grouped(rows, lambda r: (r.axis, r.collective))
    colors = {key: f"C{number}" for number, (key, _) in enumerate(names)}
    for ((ulysses, ring), part), axis in zip(panels, axes, strict=True):
        for key, line in grouped(part, lambda r: (r.axis, r.collective)):
            style = {"color": colors[key], "marker": "o", "label": ", ".join(map(str, key))}
            axis.plot([r.bytes for r in line], [r.gigabytes_per_second for r in line], **style)
        axis.set(xscale="log", yscale="log", xlabel="bytes that a rank sends", ylabel="GB/s")
        axis.set_title(f"ulysses {ulysses} x ring {ring}", fontsize=10)
        tiny = min(row.bytes for row in rows)
        sizes = [tiny, *sorted({row.asked for row in rows if not row.latency})]
        _at(axis, sizes, [size_shown(size) for size in sizes])
        axis.tick_params(labelbottom=True, labelleft=True)  # inner panels hide them otherwise
    _finish(figure, axes, picture)


def draw_modes(rows: Sequence[ModeRow], headline: str, picture: Path) -> None:
    """Compute and exposed communication of each way, and its efficiency: one panel for each table."""
    measured = [row for row in rows if row.both is not None]
    if not measured:
        return
    panels = grouped(measured, mode_group)
    title = "Modes: time of one attention call; per cent: efficiency against one process"
    height = 1.1 + 0.27 * max(len(part) for _, part in panels)
    figure, axes = _figure(len(panels), f"{title}\n{headline}", height=height)
    for (_, part), axis in zip(panels, axes, strict=True):
        _bars(axis, part)
    _finish(figure, axes, picture)


def _bars(axis: Any, rows: Sequence[ModeRow]) -> None:
    """One bar for each way, the first on top; gray where nobody knows what of it is exposed."""
    for at, row in enumerate(rows):
        both = (row.both or 0.0) * 1e3
        if row.compute is None or row.exposed is None:
            axis.barh(at, both, color="lightgray", label="both, not taken apart for certain")
        else:
            compute = min(row.compute * 1e3, both)
            axis.barh(at, compute, color="C0", label="compute")
            left = {"left": compute, "label": "exposed communication"}
            axis.barh(at, both - compute, color="C1", **left)
        share = "" if row.efficiency is None else f" {row.efficiency:.0%}"
        axis.text(both, at, share, va="center", fontsize=8)
    first = rows[0]
    what = f"{first.documents} documents" if first.documents else "dense"
    passes = "forward + backward" if first.backward else "forward"
    axis.set_title(f"{first.tokens:,} tokens, {what}, {passes}", fontsize=9)
    axis.set_xlabel("milliseconds", fontsize=8)
    axis.set_yticks(range(len(rows)), [short(row) for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    axis.set_xlim(0, max(row.both or 0.0 for row in rows) * 1e3 * 1.15)


def draw_compute(rows: Sequence[ComputeRow], headline: str, picture: Path) -> None:
    """Rates by tokens: operations on the left, bytes on the right."""
    names = (("operations", "GFLOP/s"), ("bytes", "GB/s"))
    figure, axes = _figure(2, f"Beside attention: one device\n{headline}")
    for (name, unit), axis in zip(names, axes, strict=True):
        measured = [row for row in rows if getattr(row, name)]
        for key, line in grouped(measured, lambda r: (r.what, r.dtype)):
            rates = [getattr(row, name) / row.seconds / 1e9 for row in line]
            axis.plot(
                [row.tokens for row in line], rates, marker="o", label=", ".join(map(str, key))
            )
        axis.set(xlabel="tokens", ylabel=unit)
        tokens = sorted({row.tokens for row in rows})
        _at(axis, tokens, [f"{n:,}" for n in tokens])
        axis.set_ylim(bottom=0)
    _finish(figure, axes, picture)


def draw_overheads(rows: Sequence[OverheadRow], headline: str, picture: Path) -> None:
    """Milliseconds of a layer and of a step in each mode."""
    figure, axes = _figure(1, f"A training step of next to nothing\n{headline}")
    for name, color, move in (("layer", "C0", -0.2), ("step", "C1", 0.2)):
        at = [number + move for number in range(len(rows))]
        times = [getattr(row, f"{name}_seconds") * 1e3 for row in rows]
        axes[0].barh(at, times, height=0.4, color=color, label=f"a {name}")
    axes[0].set_yticks(range(len(rows)), [f"{row.mode}, {row.ranks} ranks" for row in rows])
    axes[0].set_xlabel("milliseconds")
    _finish(figure, axes, picture)


def _figure(
    panels: int, title: str, *, height: float = 3.2, share: bool = False
) -> tuple[Any, list[Any]]:
    """A figure with two panels in a row; they may share scales and marks."""
    from matplotlib.figure import Figure  # needs no display

    columns = min(panels, 2)
    lines = -(-panels // columns)
    figure = Figure(figsize=(5.5 * columns, height * lines + 1.0), layout="constrained")
    every = figure.subplots(lines, columns, squeeze=False, sharex=share, sharey=share)
    grid = every.flatten().tolist()
    for unused in grid[panels:]:
        unused.remove()
    figure.suptitle(title, fontsize=10)
    return figure, grid[:panels]


def _at(axis: Any, values: Sequence[int], names: Sequence[str]) -> None:
    """Marks along x at these values alone."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, names, minor=False)
    axis.set_xticks([], minor=True)


def _finish(figure: Any, axes: Sequence[Any], picture: Path) -> None:
    """A grid in each panel, and one legend for all."""
    named: dict[str, Any] = {}
    for axis in axes:
        axis.grid(alpha=0.3)
        lines, names = axis.get_legend_handles_labels()
        named |= dict(zip(names, lines, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(picture, dpi=120)


DRAW: dict[str, Callable[[Sequence[Any], str, Path], None]] = {
    "kernels": draw_kernels,
    "links": draw_links,
    "modes": draw_modes,
    "compute": draw_compute,
    "overheads": draw_overheads,
}
"""By suite."""
