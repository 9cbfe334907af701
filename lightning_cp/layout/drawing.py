"""Pictures of layouts and of streams, with matplotlib: every number is the schedule's.

``draw_layouts`` shows the tokens that each rank holds and the pairs that it computes; ``draw_timeline`` shows
the posts, waits and computes of one pass on each ring rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_cp.layout.cost import DEFAULT_HEADS, CostModel
from lightning_cp.layout.documents import Ints
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.streams import GRADIENTS, KEYS, Messages, StreamEvent, stream_events
from lightning_cp.layout.tiles import Schedule, schedule
from lightning_cp.utils.colors import color_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE, WAIT = color_of(0), "#D9D9D9"
LOADS = {KEYS: color_of(1), GRADIENTS: color_of(2)}
PAIR_SECONDS = 4 * DEFAULT_HEADS.query * DEFAULT_HEADS.dim / 600e12
"""Seconds of a (query, key) pair in forward, all heads together, on the machine of ``CostModel()``."""
BACKWARD_WORK = 2.5
"""Work of a pair in backward over that in forward."""
MOST_LABELS = 16


def draw_layouts(layouts: Sequence[SequenceLayout], path: str | Path | None = None) -> Figure:
    """Draw layouts side by side: the tokens of each rank, the pairs that it computes, and its totals.

    Args:
        layouts: at least one. The first row of their documents is drawn; totals are of all rows.
        path: a file to write; ``None`` writes nothing.
    """
    from matplotlib.figure import Figure

    ranks, rings = max(x.cp_size for x in layouts), max(x.ring_size for x in layouts)
    heights = [0.5 + 0.18 * min(ranks, 32), 3.3, 0.5 + 0.22 * min(rings, 32)]
    figure: Any = Figure((3.8 * len(layouts) + 0.6, sum(heights) + 1.1), layout="constrained")
    panels: Any = figure.subplots(3, len(layouts), squeeze=False, height_ratios=heights)
    for column, layout in enumerate(layouts):
        plan = schedule(layout, None, layout.mask)
        _draw_tokens(panels[0, column], layout)
        _draw_pairs(panels[1, column], plan)
        _draw_totals(panels[2, column], plan)
        if column == 0:
            panels[0, 0].set_ylabel("rank that\nholds a token")
            panels[1, 0].set_ylabel("query token")
            panels[2, 0].set_ylabel("ring rank")
    columns = 3 if len(layouts) > 2 else 1
    figure.legend(
        handles=_layout_legend(), loc="outside lower center", ncols=columns, frameon=False
    )
    return _save(figure, path)


def _draw_tokens(axes: Any, layout: SequenceLayout) -> None:
    """Draw one line per context-parallel rank, with the intervals of its tokens."""
    axes.set_title(_title(layout), fontsize=10)
    for rank in range(layout.cp_size):
        positions = layout.positions(rank).numpy()
        starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
        sizes = np.diff(np.append(starts, positions.size))
        bars = list(zip(positions[starts].tolist(), sizes.tolist(), strict=True))
        axes.broken_barh(bars, (rank - 0.4, 0.8), color=_color(rank // layout.ulysses_size))
    axes.set_ylim(layout.cp_size - 0.5, -0.5)
    _token_axis(axes, layout)
    _rank_ticks(axes, layout.cp_size)


def _draw_pairs(axes: Any, plan: Schedule) -> None:
    """Draw the visible pairs of the first row, in the colour of the ring rank that computes them."""
    from matplotlib.collections import PolyCollection

    layout, tiles = plan.layout, plan.all_tiles
    first = np.flatnonzero(tiles.row == tiles.row.min(initial=0)).tolist()
    queries = _global_starts(layout, tiles.q_rank, tiles.q_start)
    keys = _global_starts(layout, tiles.k_rank, tiles.k_start)
    outlines = [
        _outline(
            (int(queries[tile]), int(tiles.q_len[tile])),
            (int(keys[tile]), int(tiles.k_len[tile])),
            (plan.mask.left, plan.mask.right),
        )
        for tile in first
    ]
    owners, sources = tiles.q_rank[first].tolist(), tiles.k_rank[first].tolist()
    colors = [_color(rank, rank == source) for rank, source in zip(owners, sources, strict=True)]
    axes.add_collection(PolyCollection(outlines, facecolors=colors, edgecolors="white", lw=0.4))
    for end in plan.rows[0][:-1, 1].tolist():
        axes.axhline(end, color="black", lw=0.6, ls=":")
        axes.axvline(end, color="black", lw=0.6, ls=":")
    axes.set_ylim(layout.padded_len, 0)
    axes.set_xlabel("key token")
    _token_axis(axes, layout)
    axes.yaxis.set_major_formatter(_thousands())


def _draw_totals(axes: Any, plan: Schedule) -> None:
    """Draw the pairs of each ring rank; its label has the keys that it receives."""
    from matplotlib.ticker import EngFormatter

    work, size = plan.work, plan.layout.ring_size
    mean = sum(work) / size
    received = (plan.keys.sum(axis=1) - plan.keys.diagonal()).tolist()
    for rank in range(size):
        axes.barh(rank, work[rank], color=_color(rank))
        text = f"{work[rank] / mean if mean else 0:.2f}x the mean, receives {received[rank]:,} keys"
        axes.text(
            0.02 * max(work), rank, text, va="center", fontsize=7.5, zorder=4, bbox=_label_box()
        )
    axes.axvline(mean, color="black", lw=1, ls="--")
    axes.set_ylim(size - 0.5, -0.5)
    ulysses = plan.layout.ulysses_size
    heads = (
        f";\neach of its {ulysses} Ulysses ranks: 1/{ulysses} of the heads" if ulysses > 1 else ""
    )
    axes.set_xlabel(f"(query, key) pairs; dashed: the mean{heads}")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params(axis="x", nbins=5)
    _rank_ticks(axes, size)


def draw_timeline(
    layout: SequenceLayout,
    cost: CostModel | None = None,
    path: str | Path | None = None,
    *,
    pair_seconds: float = PAIR_SECONDS,
) -> Figure:
    """Draw forward and backward of one attention call on each ring rank: compute, transfers, waits.

    Args:
        layout: the layout, with its documents and mask.
        cost: prices of a forward pass; by default ``CostModel()``. In backward gradients travel in float32,
            twice the bytes of the keys, and a pair takes 2.5 times as long.
        path: a file to write; ``None`` writes nothing.
        pair_seconds: seconds that a rank needs for one (query, key) pair in forward, all its heads together.
    """
    from matplotlib.figure import Figure

    forward, plan = cost or CostModel(), schedule(layout, None, layout.mask)
    scaled = {
        name: round(getattr(forward, name) / BACKWARD_WORK) for name in ("key", "hop", "latency")
    }
    backward = replace(forward, **scaled, gradient=2 * scaled["key"])
    size = layout.ring_size
    figure: Any = Figure((10.5, 1.6 + 0.62 * size), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True, width_ratios=[1, BACKWARD_WORK])
    for axes, name, model, unit in (
        (panels[0], "forward", forward, pair_seconds * 1e3),
        (panels[1], "backward", backward, pair_seconds * BACKWARD_WORK * 1e3),
    ):
        total = _draw_pass(axes, model, plan, unit, backward=name == "backward")
        axes.set_title(f"{name}: {total:.2f} ms", fontsize=10)
        axes.set_xlabel("ms")
    panels[0].set_ylim(size - 0.5, -0.5)
    panels[0].set_yticks(range(size), [f"rank {rank}" for rank in range(size)])
    figure.suptitle(f"One attention call: {_title(layout).replace(chr(10), ', ')}", fontsize=10)
    figure.legend(handles=_timeline_legend(), loc="outside lower center", ncols=4, frameon=False)
    return _save(figure, path)


def _draw_pass(
    axes: Any, model: CostModel, plan: Schedule, unit: float, *, backward: bool
) -> float:
    """Draw one pass and return its milliseconds; ``unit`` is a pair's."""
    order, computes, messages = model.streams(plan, backward=backward)
    total = 0.0
    for event in stream_events(order, computes, messages):
        if event.step.what == "post":
            _draw_transfers(axes, event, messages[event.step.load], unit)
            continue
        total = max(total, float(event.ends.max()) * unit)
        waits = event.step.what == "wait"
        for rank, (begin, end) in enumerate(zip(event.begins, event.ends, strict=True)):
            number = None if waits else event.step.number
            _bar(
                axes,
                (begin * unit, end * unit),
                (rank - 0.4, 0.42),
                WAIT if waits else COMPUTE,
                number,
            )
    axes.set_xlim(0, total * 1.01)
    return total


def _draw_transfers(axes: Any, event: StreamEvent, messages: Messages, unit: float) -> None:
    """Draw the transfers of a hop on their senders' lines."""
    number = event.step.number
    times, sent = messages.times[:, number], messages.sent(number, event.begins)
    for rank in np.flatnonzero(times > 0).tolist():
        span = ((sent[rank] - times[rank]) * unit, sent[rank] * unit)
        _bar(axes, span, (rank + 0.08, 0.26), LOADS[event.step.load], number)


def _bar(
    axes: Any, span: tuple[float, float], place: tuple[float, float], color: str, number: int | None
) -> None:
    """Draw a bar from and to, at (bottom, height), with the number of its hop where that fits."""
    begin, end = span
    if end <= begin:
        return
    axes.broken_barh([(begin, end - begin)], place, facecolor=color, edgecolor="white", lw=0.6)
    if number is not None:
        middle = (begin + end) / 2, place[0] + place[1] / 2
        ink = "white" if color == COMPUTE else "black"
        axes.text(
            *middle, str(number), ha="center", va="center", fontsize=7, color=ink, clip_on=True
        )


def _outline(
    queries: tuple[int, int], keys: tuple[int, int], bounds: tuple[int, int]
) -> list[tuple[float, float]]:
    """Return the corners (key, query) of a tile's visible part: a rectangle that two diagonals may cut."""
    (q, rows), (k, columns), (left, right) = queries, keys, bounds
    corners = [(k, q), (k + columns, q), (k + columns, q + rows), (k, q + rows)]
    points = [(float(x), float(y)) for x, y in corners]
    points = _clip(points, sign=1, bound=right + 0.5)
    return _clip(points, sign=-1, bound=left + 0.5)


def _clip(points: list[tuple[float, float]], sign: int, bound: float) -> list[tuple[float, float]]:
    """Keep the part of a polygon where ``sign * (key - query) <= bound``."""
    kept: list[tuple[float, float]] = []
    for (x0, y0), (x1, y1) in zip(points, [*points[1:], *points[:1]], strict=True):
        before, after = sign * (x0 - y0) - bound, sign * (x1 - y1) - bound
        if before <= 0:
            kept.append((x0, y0))
        if before * after < 0:
            share = before / (before - after)
            kept.append((x0 + share * (x1 - x0), y0 + share * (y1 - y0)))
    return kept


def _global_starts(layout: SequenceLayout, rank: Ints, start: Ints) -> Ints:
    """Return the global tokens of starts that are counted within the ring ranks' tokens."""
    segments = [layout.segments(ring_rank) for ring_rank in range(layout.ring_size)]
    table = np.concatenate(segments)
    local = np.cumsum(table[:, 1]) - table[:, 1]  # of all ranks, one after the other
    at = rank * layout.ring_len + start
    segment = np.searchsorted(local, at, "right") - 1
    return table[segment, 0] + at - local[segment]


def _title(layout: SequenceLayout) -> str:
    documents = 1 if layout.documents is None else len(layout.documents.rows[0])
    mask = "causal" if layout.mask.causal else "full"
    if layout.mask.window != (-1, -1):
        mask += f", window {layout.mask.window}"
    ulysses = f" x Ulysses {layout.ulysses_size}" if layout.ulysses_size > 1 else ""
    several = f", {documents} documents" if documents > 1 else ""
    return f"{layout.kind}, ring {layout.ring_size}{ulysses}\n{layout.seq_len:,} tokens, {mask}{several}"


def _color(rank: int, own: bool = True) -> tuple[float, float, float]:
    """Return a ring rank's colour; a lighter one for pairs with keys that it receives."""
    from matplotlib.colors import to_rgb

    strength = 1.0 if own else 0.5
    red, green, blue = (1 - strength * (1 - x) for x in to_rgb(color_of(rank)))
    return red, green, blue


def _token_axis(axes: Any, layout: SequenceLayout) -> None:
    axes.set_xlim(0, layout.padded_len)
    if layout.padded_len > layout.seq_len:
        axes.axvspan(
            layout.seq_len, layout.padded_len, color="white", hatch="////", ec="black", lw=0
        )
    axes.xaxis.set_major_formatter(_thousands())
    axes.locator_params(axis="x", nbins=5)


def _rank_ticks(axes: Any, ranks: int) -> None:
    axes.set_yticks(range(0, ranks, -(-ranks // MOST_LABELS)))


def _thousands() -> Any:
    from matplotlib.ticker import StrMethodFormatter

    return StrMethodFormatter("{x:,.0f}")


def _label_box() -> dict[str, Any]:
    return {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85}


def _layout_legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(color="#555555", label="full colour: pairs with the rank's own keys"),
        Patch(color="#AAAAAA", label="light: pairs with keys that it receives"),
        Line2D([], [], color="black", lw=0.8, ls=":", label="end of a document"),
    ]


def _timeline_legend() -> list[Any]:
    from matplotlib.patches import Patch

    labels = {
        "compute of a hop": COMPUTE,
        "rank waits": WAIT,
        "sends keys": LOADS[KEYS],
        "sends gradients": LOADS[GRADIENTS],
    }
    return [Patch(color=color, label=label) for label, color in labels.items()]


def _save(figure: Any, path: str | Path | None) -> Figure:
    if path is not None:
        figure.savefig(path, dpi=110)
    return figure
