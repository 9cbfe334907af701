"""From the timelines of all ranks to figures: seconds of each kind, overlap, imbalance, the worst hops."""

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
"""Direction, and which hop or chunk."""


@dataclass(frozen=True)
class Report:
    """What one rank tells the others of its step."""

    rank: int
    """In the world."""
    timeline: Timeline = field(default_factory=lambda: Timeline(0.0))
    scheduled: Mapping[str, Any] = field(default_factory=dict)
    """Tiles and bytes, of the schedule."""
    error: str | None = None
    """Why there is nothing to tell."""
    lost: str | None = None
    """Why its trace could not be written."""


@dataclass(frozen=True)
class Flow:
    """Communication of one kind."""

    in_flight: float = 0.0
    """Seconds in which some of it was under way."""
    exposed: float = 0.0
    """Seconds of these that nothing hid."""
    count: int = 0

    @property
    def overlap(self) -> float | None:
        """The share that was hidden; ``None`` if there was no communication."""
        return 1 - self.exposed / self.in_flight if self.in_flight else None


@dataclass(frozen=True)
class RankFigures:
    """One rank's step in seconds."""

    rank: int
    step: float
    work: dict[str, float]
    """``compute``, ``merge``, ``copies``, ``agreement``, ``shard batch``; without what is named within."""
    flows: dict[str, Flow]
    """By kind of communication, those that there were."""
    total: Flow
    """Of all kinds; at one moment several may be in flight."""
    hops: dict[Place, float]
    """Compute of each hop, or chunk, over all attention calls."""
    exposed: dict[tuple[str, str, int | None], float]
    """By direction, kind and hop."""
    kernel_calls: int
    scheduled: Mapping[str, Any]
    has_trace: bool = True
    """Whether it could be written."""

    @property
    def rest(self) -> float:
        """What lies in no range: the model, its optimizer, other communication; little of attention."""
        return max(0.0, self.step - sum(self.work.values()) - self.total.exposed)


@dataclass(frozen=True)
class Summary:
    """Of all ranks."""

    ranks: list[RankFigures]
    unit: str
    """What computes at once: ``hop`` or ``chunk``."""
    device: str

    @property
    def imbalance(self) -> float | None:
        """The busiest rank's compute over the mean; ``None`` if nothing was computed."""
        return uneven([rank.work.get("compute", 0.0) for rank in self.ranks])

    @property
    def scheduled_imbalance(self) -> float | None:
        """The same of visible (query, key) pairs: what equally fast ranks would show."""
        return uneven([rank.scheduled.get("visible_pairs", 0) for rank in self.ranks])

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


def summarise(reports: Iterable[Report]) -> Summary:
    """Figures of the ranks that have something to tell, in their order."""
    told = [report for report in reports if report.error is None]
    units = {report.timeline.unit for report in told}
    devices = {report.timeline.device for report in told}
    unit, device = min(units, default="hop"), max(devices, default="cpu")
    return Summary([figures(report) for report in told], unit, device)


def figures(report: Report) -> RankFigures:
    """Of one rank."""
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


def flow(spans: Sequence[Span]) -> Flow:
    """Of some transfers: each moment counts once, however many are in flight."""
    in_flight = length(union((span.start, span.end) for span in spans))
    exposed = length(union(part for span in spans for part in span.inner))
    return Flow(in_flight, exposed, len(spans))


def length(intervals: Iterable[Interval]) -> float:
    """Seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def uneven(amounts: Sequence[float]) -> float | None:
    """The largest over the mean; ``None`` if all are 0."""
    return max(amounts) * len(amounts) / sum(amounts) if any(amounts) else None


def direction(span: Span) -> str:
    """As it is shown."""
    return "backward" if span.backward else "forward"


def as_json(summary: Summary, step: int) -> dict[str, Any]:
    """What ``profile.json`` holds; seconds."""
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
