"""``profile.png``: the step of every rank, one attention call of it from near, and how even the ranks are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_cp.profile.summary import Report, Summary
from lightning_cp.profile.timeline import HOST_ONLY, WORK, Interval, Span, Timeline, union

MOST_RANKS = 8
"""That are drawn from near; of more ranks, these are picked at equal distances."""

COLORS = {
    "compute": "#3b7dd8",
    "merge": "#1b2a49",
    "copies": "#5f9ea0",
    "exposed": "#d62839",
    "keys": "#8fc0a9",
    "gradients": "#c8a2c8",
    "all-to-all": "#f4a259",
    "all-gather": "#8fc0a9",
    "reduce-scatter": "#c8a2c8",
    "other": "#bbbbbb",
    "agreement": "#b8b08d",
    "shard batch": "#e3dcc2",
}
_BLUES = ("#2f6fc9", "#6ea4e6")
"""Neighbouring hops are told apart."""
_MS = 1e3


def draw(reports: Sequence[Report], summary: Summary, step: int, picture: Path) -> None:
    """Draw the timelines of all ranks.

    Args:
        reports: of ranks that have one, in order.
        summary: of the same ranks.
        step: its number.
        picture: the PNG to write.
    """
    from matplotlib.figure import Figure  # needs no display

    near = reports[:: -(-len(reports) // MOST_RANKS)]
    heights = [0.32 * len(reports) + 0.7, 0.75 * len(near) + 0.8]
    figure = Figure(figsize=(15, 2.2 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=heights, width_ratios=[1, 1, 0.45])
    _draw_steps(figure.add_subplot(grid[0, :2]), reports)
    _draw_balance(figure.add_subplot(grid[:, 2]), summary)
    call = _middle_call(near)
    for column, backward in enumerate((False, True)):
        _draw_call(figure.add_subplot(grid[1, column]), near, call, backward, summary)
    _add_legend(figure, reports)
    figure.suptitle(f"Training step {step}: {_headline(summary)}", fontsize=12)
    figure.savefig(picture, dpi=110)


def _headline(summary: Summary) -> str:
    longest = max(rank.step for rank in summary.ranks) * _MS
    parts = [f"{longest:.1f} ms"]
    overlaps = [rank.total.overlap for rank in summary.ranks if rank.total.overlap is not None]
    if overlaps:
        parts.append(f"overlap {min(overlaps):.0%} to {max(overlaps):.0%}")
    if summary.imbalance is not None:
        due = summary.scheduled_imbalance
        by_schedule = f" (by the schedule {due:.2f})" if due is not None else ""
        parts.append(f"imbalance {summary.imbalance:.2f}{by_schedule}")
    return ", ".join(parts)


def _draw_steps(axes: Any, reports: Sequence[Report]) -> None:
    """A line per rank: what it does, and when it waits."""
    for row, report in enumerate(reports):
        timeline = report.timeline
        axes.broken_barh([(0, timeline.seconds * _MS)], (row - 0.38, 0.76), color="#eeeeee")
        for kind in (*HOST_ONLY, *WORK):
            _bars(axes, row, 0.76, _of(timeline.work, kind), COLORS[kind])
        _bars(axes, row, 0.76, _exposed(timeline.flights), COLORS["exposed"])
    axes.set_yticks(range(len(reports)), [f"rank {report.rank}" for report in reports])
    axes.set(title="the whole step (grey: the model beside attention)", xlabel="ms", xlim=(0, None))
    axes.invert_yaxis()


def _middle_call(reports: Sequence[Report]) -> int | None:
    """The attention call in the middle of those that have a backward, or of all if none has one."""
    computed = [s for r in reports for s in r.timeline.work if s.kind == "compute"]
    calls = {s.call for s in computed if s.backward} or {s.call for s in computed}
    numbers = sorted(call for call in calls if call is not None)
    return numbers[len(numbers) // 2] if numbers else None


def _draw_call(
    axes: Any, reports: Sequence[Report], call: int | None, backward: bool, summary: Summary
) -> None:
    """One pass of an attention call: work above, what is in flight below."""
    way = "backward" if backward else "forward"
    rows = [_call_of(report.timeline, call, backward) for report in reports]
    spans = [span for work, flights in rows for span in (*work, *flights)]
    if call is None or not spans:
        axes.set_axis_off()
        axes.set_title(f"no attention call {way}", fontsize=10)
        return
    begin = min(span.start for span in spans)
    axes.set_xlim(0, (max(span.end for span in spans) - begin) * _MS)
    for row, (work, flights) in enumerate(rows):
        _draw_work(axes, row, work, flights, begin)
        _draw_flights(axes, row, flights, begin)
        axes.axhline(row + 0.5, color="#dddddd", lw=0.8)
    axes.set_ylim(len(reports) - 0.5, -0.5)
    axes.set_yticks(range(len(reports)), [f"rank {report.rank}" for report in reports])
    title = f"{way} of attention call {call + 1} of {_number_of_calls(reports)}"
    axes.set(title=f"{title} (numbers: {summary.unit}s)", xlabel="ms")


def _number_of_calls(reports: Sequence[Report]) -> int:
    calls = {span.call for r in reports for span in r.timeline.work if span.call is not None}
    return max(calls) + 1


def _call_of(timeline: Timeline, call: int | None, backward: bool) -> tuple[list[Span], list[Span]]:
    """Work and flights of one pass of one attention call."""
    work, flights = (
        [span for span in spans if span.call == call and span.backward == backward]
        for spans in (timeline.work, timeline.flights)
    )
    return [span for span in work if span.kind in WORK], flights


def _draw_work(
    axes: Any, row: int, work: Sequence[Span], flights: Sequence[Span], begin: float
) -> None:
    for span in sorted(work, key=lambda span: -span.seconds):  # what lies within another above it
        start, width = (span.start - begin) * _MS, span.seconds * _MS
        shade = _BLUES[(span.index or 0) % 2] if span.kind == "compute" else COLORS[span.kind]
        axes.broken_barh([(start, width)], (row - 0.4, 0.4), color=shade)
        if span.kind == "compute":
            _write(axes, span, start, width, row - 0.2)
    waits = _shifted(_exposed(flights), begin)
    axes.broken_barh([(a, b - a) for a, b in waits], (row - 0.4, 0.4), color=COLORS["exposed"])


def _draw_flights(axes: Any, row: int, flights: Sequence[Span], begin: float) -> None:
    """Every kind in lanes of its own, as many as there are transfers of it at one time."""
    lanes = [lane for kind in COLORS for lane in _lanes(s for s in flights if s.kind == kind)]
    height = 0.38 / max(len(lanes), 1)
    for number, lane in enumerate(lanes):
        bottom = row + 0.04 + number * height
        for span in lane:
            start, width = (span.start - begin) * _MS, span.seconds * _MS
            bar = {"facecolor": COLORS[span.kind], "edgecolor": "white", "lw": 0.6}
            axes.broken_barh([(start, width)], (bottom, height * 0.86), **bar)
            _write(axes, span, start, width, bottom + height * 0.43)


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans in as few rows as hold them side by side."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            free = []
            lanes.append(free)
        free.append(span)
    return lanes


def _write(axes: Any, span: Span, start: float, width: float, y: float) -> None:
    """The number of the hop, where there is room for it."""
    if span.index is None or width < 0.015 * axes.get_xlim()[1]:
        return
    color = "white" if span.kind == "compute" else "black"
    place = {"ha": "center", "va": "center", "fontsize": 7}
    axes.text(start + width / 2, y, str(span.index), color=color, **place)


def _draw_balance(axes: Any, summary: Summary) -> None:
    """Seconds of work and waiting of each rank, and the mean of compute."""
    names = [str(rank.rank) for rank in summary.ranks]
    bottom = [0.0] * len(names)
    amounts = {kind: [rank.work[kind] * _MS for rank in summary.ranks] for kind in WORK}
    amounts["exposed"] = [rank.total.exposed * _MS for rank in summary.ranks]
    for kind, values in amounts.items():
        axes.bar(names, values, bottom=bottom, color=COLORS[kind], width=0.7)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    mean = sum(amounts["compute"]) / len(names)
    axes.axhline(mean, color="black", ls="--", lw=1, label="mean compute")
    axes.legend(loc="upper right", fontsize=8)
    axes.margins(y=0.12)
    axes.set(title="attention of the step", xlabel="rank", ylabel="ms")


def _add_legend(figure: Any, reports: Sequence[Report]) -> None:
    """Of the kinds that were seen."""
    from matplotlib.patches import Patch

    flights = {span.kind for r in reports for span in r.timeline.flights}
    work = {span.kind for r in reports for span in r.timeline.work}
    named = {"exposed": "waiting: exposed communication"}
    named |= {kind: f"{kind} in flight" for kind in COLORS if kind in flights}
    kinds = [kind for kind in COLORS if kind in work or kind in named]
    handles = [Patch(color=COLORS[kind], label=named.get(kind, kind)) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)


def _of(spans: Iterable[Span], kind: str) -> list[Interval]:
    return [(span.start, span.end) for span in spans if span.kind == kind]


def _exposed(flights: Iterable[Span]) -> list[Interval]:
    return union(part for span in flights for part in span.inner)


def _shifted(intervals: Iterable[Interval], begin: float) -> list[Interval]:
    return [((start - begin) * _MS, (end - begin) * _MS) for start, end in intervals]


def _bars(axes: Any, row: int, height: float, intervals: Sequence[Interval], color: str) -> None:
    bars = [(start * _MS, (end - start) * _MS) for start, end in intervals]
    axes.broken_barh(bars, (row - height / 2, height), color=color)
