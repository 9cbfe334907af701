"""The first rank's report on a step: profile.json, profile.md, profile.png, and the printed table.

Its figures come from all ranks' timelines: seconds of each kind, overlap, imbalance, the worst hops. The
picture shows the step of every rank, one attention call of it in detail, and the balance of the ranks.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_cp.profile.timeline import (
    HOST_ONLY,
    TRANSFERS,
    WORK,
    Interval,
    Span,
    Timeline,
    union,
)

Place = tuple[str, int]
"""Direction, and index of the hop or chunk."""

MOST_RANKS = 8
"""Ranks that are drawn in detail; of more ranks, these are picked at equal distances."""

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
"""Alternating colours of neighbouring hops."""
_MS = 1e3


@dataclass(frozen=True)
class RankSummary:
    """One rank's report on its step, sent to the others."""

    rank: int
    """The rank in the world."""
    timeline: Timeline = field(default_factory=lambda: Timeline(0.0))
    scheduled: Mapping[str, Any] = field(default_factory=dict)
    """Tiles and bytes by the schedule."""
    error: str | None = None
    """The error that prevented a report."""
    lost: str | None = None
    """The error that prevented writing the trace."""


@dataclass(frozen=True)
class CommTime:
    """Communication of one kind."""

    in_flight: float = 0.0
    """Seconds in which a transfer was in flight."""
    exposed: float = 0.0
    """Seconds of these that no work hid."""
    count: int = 0

    @property
    def overlap(self) -> float | None:
        """The hidden share; ``None`` without communication."""
        return 1 - self.exposed / self.in_flight if self.in_flight else None


@dataclass(frozen=True)
class RankFigures:
    """One rank's step in seconds."""

    rank: int
    step: float
    work: dict[str, float]
    """``compute``, ``merge``, ``copies``, ``agreement``, ``shard batch``; without nested ranges."""
    flows: dict[str, CommTime]
    """Communication by kind, only kinds that occurred."""
    total: CommTime
    """Communication of all kinds; several may be in flight at once."""
    hops: dict[Place, float]
    """Compute of each hop or chunk, over all attention calls."""
    exposed: dict[tuple[str, str, int | None], float]
    """Exposed seconds by direction, kind and hop."""
    kernel_calls: int
    scheduled: Mapping[str, Any]
    has_trace: bool = True
    """True if the trace could be written."""

    @property
    def rest(self) -> float:
        """Seconds outside all ranges: the model, its optimizer, other communication; little of attention."""
        return max(0.0, self.step - sum(self.work.values()) - self.total.exposed)


@dataclass(frozen=True)
class Summary:
    """The figures of all ranks."""

    ranks: list[RankFigures]
    unit: str
    """The unit of compute: ``hop`` or ``chunk``."""
    device: str

    @property
    def imbalance(self) -> float | None:
        """The busiest rank's compute over the mean; ``None`` if nothing was computed."""
        return imbalance_of([rank.work.get("compute", 0.0) for rank in self.ranks])

    @property
    def scheduled_imbalance(self) -> float | None:
        """The imbalance of visible (query, key) pairs, which equally fast ranks would show."""
        return imbalance_of([rank.scheduled.get("visible_pairs", 0) for rank in self.ranks])

    @property
    def most_exposed(self) -> tuple[float, int, str, str, int | None] | None:
        """Seconds, rank, direction, kind and hop of the longest wait, summed over attention calls."""
        every = [
            (seconds, rank.rank, *place)
            for rank in self.ranks
            for place, seconds in rank.exposed.items()
        ]
        return max(every, key=lambda found: found[0], default=None)

    @property
    def most_uneven(self) -> tuple[float, float, int, Place] | None:
        """The largest and the mean seconds, the busiest rank, and the hop where they are farthest apart."""
        places = {place for rank in self.ranks for place in rank.hops}
        found = [self._spread(place) for place in sorted(places)]
        return max(found, key=lambda spread: spread[0] - spread[1], default=None)

    def _spread(self, place: Place) -> tuple[float, float, int, Place]:
        seconds = [rank.hops.get(place, 0.0) for rank in self.ranks]
        busiest = max(range(len(seconds)), key=seconds.__getitem__)
        return seconds[busiest], sum(seconds) / len(seconds), self.ranks[busiest].rank, place


def summarise(reports: Iterable[RankSummary]) -> Summary:
    """Return the figures of the ranks without an error, in their order."""
    told = [report for report in reports if report.error is None]
    units = {report.timeline.unit for report in told}
    devices = {report.timeline.device for report in told}
    unit, device = min(units, default="hop"), max(devices, default="cpu")
    return Summary([figures(report) for report in told], unit, device)


def figures(report: RankSummary) -> RankFigures:
    """Return the figures of one rank."""
    timeline = report.timeline
    work: dict[str, float] = dict.fromkeys((*WORK, *HOST_ONLY), 0.0)
    hops: dict[Place, float] = defaultdict(float)
    for span in timeline.work:
        work[span.kind] = work.get(span.kind, 0.0) + span.own
        if span.kind == "compute" and span.index is not None:
            hops[direction(span), span.index] += span.own
    exposed: dict[tuple[str, str, int | None], float] = defaultdict(float)
    for span in timeline.flights:
        exposed[direction(span), span.kind, span.index] += span.exposed
    by_kind = {
        kind: [span for span in timeline.flights if span.kind == kind]
        for kind in (*TRANSFERS, "other")
    }
    flows = {kind: flow(spans) for kind, spans in by_kind.items() if spans}
    return RankFigures(
        report.rank,
        timeline.seconds,
        work,
        flows,
        flow([span for kind in TRANSFERS for span in by_kind[kind]]),
        dict(hops),
        dict(exposed),
        timeline.kernel_calls,
        report.scheduled,
        report.lost is None,
    )


def flow(spans: Sequence[Span]) -> CommTime:
    """Return the time of some transfers; each moment counts once, however many are in flight."""
    in_flight = length(union((span.start, span.end) for span in spans))
    exposed = length(union(part for span in spans for part in span.inner))
    return CommTime(in_flight, exposed, len(spans))


def length(intervals: Iterable[Interval]) -> float:
    """Return the seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def imbalance_of(amounts: Sequence[float]) -> float | None:
    """Return the largest over the mean; ``None`` if all are 0."""
    return max(amounts) * len(amounts) / sum(amounts) if any(amounts) else None


def direction(span: Span) -> str:
    """Return ``forward`` or ``backward``."""
    return "backward" if span.backward else "forward"


def as_json(summary: Summary, step: int) -> dict[str, Any]:
    """Return the content of ``profile.json``, in seconds."""
    exposed, spread = summary.most_exposed, summary.most_uneven
    return {
        "step": step,
        "times_of": summary.device,
        "imbalance": summary.imbalance,
        "scheduled_imbalance": summary.scheduled_imbalance,
        "most_exposed": None
        if exposed is None
        else dict(zip(("seconds", "rank", "pass", "kind", summary.unit), exposed, strict=True)),
        "most_uneven": None
        if spread is None
        else {
            **dict(zip(("seconds", "mean_seconds", "rank"), spread, strict=False)),
            "pass": spread[3][0],
            summary.unit: spread[3][1],
        },
        "ranks": [_rank_as_json(rank, summary.unit) for rank in summary.ranks],
    }


def _rank_as_json(rank: RankFigures, unit: str) -> dict[str, Any]:
    flows = {**rank.flows, "total": rank.total}
    return {
        "rank": rank.rank,
        "trace": f"rank-{rank.rank}.trace.json" if rank.has_trace else None,
        "seconds": {"step": rank.step, **rank.work, "rest": rank.rest},
        "communication": {
            kind: {**asdict(each), "overlap": each.overlap} for kind, each in flows.items()
        },
        f"compute_of_{unit}s": {
            way: {str(index): s for (of, index), s in sorted(rank.hops.items()) if of == way}
            for way in ("forward", "backward")
        },
        "kernel_calls": rank.kernel_calls,
        **rank.scheduled,
    }


def draw(reports: Sequence[RankSummary], summary: Summary, step: int, picture: Path) -> None:
    """Draw the timelines of all ranks.

    Args:
        reports: the reports without an error, in the order of ranks.
        summary: the figures of the same ranks.
        step: the step's number.
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


def _draw_steps(axes: Any, reports: Sequence[RankSummary]) -> None:
    """Draw a line per rank with its work and its waits."""
    for row, report in enumerate(reports):
        timeline = report.timeline
        axes.broken_barh([(0, timeline.seconds * _MS)], (row - 0.38, 0.76), color="#eeeeee")
        for kind in (*HOST_ONLY, *WORK):
            _bars(axes, row, 0.76, _of(timeline.work, kind), COLORS[kind])
        _bars(axes, row, 0.76, _exposed(timeline.flights), COLORS["exposed"])
    axes.set_yticks(range(len(reports)), [f"rank {report.rank}" for report in reports])
    axes.set(title="the whole step (grey: the model beside attention)", xlabel="ms", xlim=(0, None))
    axes.invert_yaxis()


def _middle_call(reports: Sequence[RankSummary]) -> int | None:
    """Return the middle attention call of those with a backward, or of all if none has one."""
    computed = [s for r in reports for s in r.timeline.work if s.kind == "compute"]
    calls = {s.call for s in computed if s.backward} or {s.call for s in computed}
    numbers = sorted(call for call in calls if call is not None)
    return numbers[len(numbers) // 2] if numbers else None


def _draw_call(
    axes: Any, reports: Sequence[RankSummary], call: int | None, backward: bool, summary: Summary
) -> None:
    """Draw one pass of an attention call: work above, transfers in flight below."""
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


def _number_of_calls(reports: Sequence[RankSummary]) -> int:
    calls = {span.call for r in reports for span in r.timeline.work if span.call is not None}
    return max(calls) + 1


def _call_of(timeline: Timeline, call: int | None, backward: bool) -> tuple[list[Span], list[Span]]:
    """Return work and flights of one pass of one attention call."""
    work, flights = (
        [span for span in spans if span.call == call and span.backward == backward]
        for spans in (timeline.work, timeline.flights)
    )
    return [span for span in work if span.kind in WORK], flights


def _draw_work(
    axes: Any, row: int, work: Sequence[Span], flights: Sequence[Span], begin: float
) -> None:
    for span in sorted(work, key=lambda span: -span.seconds):  # nested spans on top
        start, width = (span.start - begin) * _MS, span.seconds * _MS
        shade = _BLUES[(span.index or 0) % 2] if span.kind == "compute" else COLORS[span.kind]
        axes.broken_barh([(start, width)], (row - 0.4, 0.4), color=shade)
        if span.kind == "compute":
            _write(axes, span, start, width, row - 0.2)
    waits = _shifted(_exposed(flights), begin)
    axes.broken_barh([(a, b - a) for a, b in waits], (row - 0.4, 0.4), color=COLORS["exposed"])


def _draw_flights(axes: Any, row: int, flights: Sequence[Span], begin: float) -> None:
    """Draw every kind in separate lanes, as many as it has transfers at one time."""
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
    """Distribute spans over the fewest rows without overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            free = []
            lanes.append(free)
        free.append(span)
    return lanes


def _write(axes: Any, span: Span, start: float, width: float, y: float) -> None:
    """Write the hop's number if there is room."""
    if span.index is None or width < 0.015 * axes.get_xlim()[1]:
        return
    color = "white" if span.kind == "compute" else "black"
    place = {"ha": "center", "va": "center", "fontsize": 7}
    axes.text(start + width / 2, y, str(span.index), color=color, **place)


def _draw_balance(axes: Any, summary: Summary) -> None:
    """Draw each rank's seconds of work and waiting, and the mean of compute."""
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


def _add_legend(figure: Any, reports: Sequence[RankSummary]) -> None:
    """Add a legend of the kinds that occur."""
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


_OTHERS = {"agreement": "agreement", "shard batch": "sharding"}


def markdown(summary: Summary, step: int) -> str:
    """Return a table in milliseconds with a line per rank, and the worst figures in words."""
    kinds = [kind for kind in _kinds(summary) if kind != "other"]
    columns = [
        *("rank", "step", *WORK),
        *(f"{kind}: exposed / in flight" for kind in kinds),
        *("overlap", *_OTHERS.values(), "rest", "kernel calls", "tiles", "sent, MB"),
    ]
    lines = [_row(columns), "|" + "---:|" * len(columns)]
    lines += [_row(_cells(rank, kinds)) for rank in summary.ranks]
    head = f"Training step {step}, milliseconds of the {_CLOCK[summary.device]}:"
    return "\n".join([head, "", *lines, "", *(f"- {line}" for line in sentences(summary))])


_CLOCK = {"cpu": "wall clock", "cuda": "GPU"}


def sentences(summary: Summary) -> list[str]:
    """Return the most important figures as sentences."""
    lines: list[str] = []
    compute = [rank.work["compute"] for rank in summary.ranks]
    if summary.imbalance is not None:
        due = summary.scheduled_imbalance
        by_schedule = "" if due is None else f" By the schedule it would be {due:.2f}."
        busiest = summary.ranks[compute.index(max(compute))].rank
        lines.append(
            f"imbalance {summary.imbalance:.2f}: rank {busiest} computes for {_ms(max(compute))} ms, the "
            f"mean is {_ms(sum(compute) / len(compute))} ms.{by_schedule}"
        )
    spread = summary.most_uneven
    if spread is not None:
        most, mean, rank, (way, index) = spread
        lines.append(
            f"most uneven: {summary.unit} {index}, {way}: {_ms(most)} ms on rank {rank}, the mean is "
            f"{_ms(mean)} ms."
        )
    exposed = summary.most_exposed
    if exposed is not None:
        seconds, rank, way, kind, index = exposed
        of = f" of {summary.unit} {index}" if index is not None else ""
        lines.append(f"most waited for: {kind}{of}, {way}: {_ms(seconds)} ms on rank {rank}.")
    return lines


def _kinds(summary: Summary) -> list[str]:
    """Return the kinds of communication in display order."""
    return list(dict.fromkeys(kind for rank in summary.ranks for kind in rank.flows))


def _cells(rank: RankFigures, kinds: list[str]) -> list[str]:
    moved = [rank.flows.get(kind) for kind in kinds]
    overlap = rank.total.overlap
    return [
        str(rank.rank),
        _ms(rank.step),
        *(_ms(rank.work[kind]) for kind in WORK),
        *("" if flow is None else f"{_ms(flow.exposed)} / {_ms(flow.in_flight)}" for flow in moved),
        "" if overlap is None else f"{overlap:.0%}",
        *(_ms(rank.work[kind]) for kind in _OTHERS),
        _ms(rank.rest),
        str(rank.kernel_calls or ""),
        str(rank.scheduled.get("tiles", "")),
        f"{rank.scheduled.get('sent', {}).get('total_bytes', 0) / 1e6:.2f}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


_log = logging.getLogger("lightning_cp")


def trace_name(rank: int) -> str:
    """Return the file name of a rank's Chrome trace."""
    return f"rank-{rank}.trace.json"


def write_summary(reports: Sequence[RankSummary], step: int, folder: Path) -> None:
    """Write and print the results of all ranks; log a failed rank or file and leave it out."""
    for report in reports:
        if report.error is not None:
            _log.warning(
                "profile of step %d: rank %d has none: %s", step, report.rank, report.error
            )
        if report.lost is not None:
            _log.warning(
                "profile of step %d: the trace of rank %d could not be written: %s",
                *(step, report.rank, report.lost),
            )
    told = [report for report in reports if report.error is None]
    if not told:
        return
    summary = summarise(told)
    table = markdown(summary, step)
    print(f"\n{table}\n", flush=True)
    figures = json.dumps(as_json(summary, step), indent=2) + "\n"
    traces = [trace_name(rank.rank) for rank in summary.ranks if rank.has_trace]
    if len(traces) > 2:
        traces = [f"{len(traces)} traces ({traces[0]}, ...)"]
    files: dict[str, Callable[[Path], object]] = {
        "profile.json": lambda path: path.write_text(figures),
        "profile.md": lambda path: path.write_text(table + "\n"),
        "profile.png": lambda path: draw(told, summary, step, path),
    }
    written = [name for name, write in files.items() if _try_write(write, folder / name, step)]
    print(f"In {folder}: {', '.join([*traces, *written]) or 'nothing'}", flush=True)


def _try_write(write: Callable[[Path], object], path: Path, step: int) -> bool:
    """Write a file; on failure log it and return False, because a profile must not end a training run."""
    try:
        write(path)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        _log.warning("profile of step %d: %s could not be written: %s", step, path.name, why)
        return False
    return True
