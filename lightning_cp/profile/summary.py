"""Figures of a step from all ranks' timelines: seconds of each kind, overlap, imbalance, the worst hops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
