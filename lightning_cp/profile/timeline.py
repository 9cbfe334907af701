"""The timeline of a rank's step: work, and communication with its exposed part.

On CPU, work is the named ranges without their nested ranges. Data is in flight from its post to the end of
its wait, and exposed while the rank waits. On a GPU the host runs ahead, so both come from kernels: each
belongs to the range in which it was launched; data is in flight while an NCCL kernel runs, and exposed while
no other kernel runs at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_cp.profile.trace import GpuEvent, Nesting, Range, Trace

TRANSFERS = ("keys", "gradients", "all-to-all", "all-gather", "reduce-scatter")
"""Kinds of communication, in display order."""
WORK = ("compute", "merge", "copies")
"""Kinds of attention's work that run on the device."""
HOST_ONLY = ("agreement", "shard batch")
Interval = tuple[float, float]
"""Start and end in seconds."""


@dataclass(frozen=True)
class Span:
    """A period of work, or of data in flight."""

    kind: str
    index: int | None
    """Index of the hop or chunk."""
    start: float
    end: float
    """Seconds."""
    call: int | None = None
    """Number of the attention call; a backward has the number of its forward."""
    backward: bool = False
    inner: tuple[Interval, ...] = ()
    """For work: nested ranges, which do not count. For data in flight: the exposed intervals."""

    @property
    def seconds(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start

    @property
    def own(self) -> float:
        """Seconds of work without nested ranges."""
        return self.seconds - self.exposed

    @property
    def exposed(self) -> float:
        """Seconds in flight that no work hid."""
        return sum(end - start for start, end in self.inner)


@dataclass(frozen=True)
class Timeline:
    """One rank's step."""

    seconds: float
    work: list[Span] = field(default_factory=list)
    flights: list[Span] = field(default_factory=list)
    kernel_calls: int = 0
    """Calls of attention operators within hops and chunks."""
    device: str = "cpu"
    """The clock of the times: ``cpu`` or ``cuda``."""
    unit: str = "hop"
    """The unit of compute: a ``hop``, or a ``chunk`` where keys are gathered."""


def timeline_of(trace: Trace) -> Timeline:
    """Build a timeline from the host's ranges, and from kernels if the trace has any."""
    computing = Nesting(r for r in trace.ranges if r.kind == "compute")
    calls = sum(computing.at(*moment) is not None for moment in trace.operators)
    unit = "chunk" if any(r.unit == "chunk" for r in trace.ranges) else "hop"
    work = host_work(trace.ranges)
    if not trace.kernels:
        flights = host_flights(trace.ranges)
        return Timeline(trace.seconds, work, flights, calls, unit=unit)
    on_device, flights = _by_launch(trace)
    work = [span for span in work if span.kind in HOST_ONLY]
    return Timeline(trace.seconds, work + on_device, flights, calls, "cuda", unit)


def host_work(ranges: Sequence[Range]) -> list[Span]:
    """Return the ranges in which the host works, neither posting nor waiting."""
    return [
        _span(r, tuple((child.start, child.end) for child in children))
        for r, children in Nesting(ranges).with_children()
        if not r.phase
    ]


def host_flights(ranges: Sequence[Range]) -> list[Span]:
    """Pair each post with its wait: transfers of one name are waited for in the order of their posts."""
    posted: dict[tuple[object, ...], list[Range]] = defaultdict(list)
    flights: list[Span] = []
    for r in ranges:
        key = (r.kind, r.index, r.thread)
        if r.phase == "post":
            posted[key].append(r)
        elif r.phase == "wait" and posted[key]:
            post = posted[key].pop(0)
            waiting = ((r.start, r.end),)
            flights.append(Span(r.kind, r.index, post.start, r.end, r.call, r.backward, waiting))
    return flights


def _by_launch(trace: Trace) -> tuple[list[Span], list[Span]]:
    """Return kernels as work and as flights, each in the innermost range in which it was launched."""
    busy = union((k.start, k.end) for k in trace.kernels if not k.communicates)
    ranges = Nesting(trace.ranges)
    work: list[Span] = []
    flights: list[Span] = []
    for kernel in trace.kernels:
        r = ranges.at(*kernel.launched) if kernel.launched is not None else None
        if kernel.communicates:
            kind = r.kind if r is not None and r.kind in TRANSFERS else "other"
            flights.append(
                _kernel_span(kind, r, kernel, exposed_parts((kernel.start, kernel.end), busy))
            )
        elif r is not None and r.kind in WORK:
            work.append(_kernel_span(r.kind, r, kernel))
    return work, flights


def _kernel_span(
    kind: str, r: Range | None, kernel: GpuEvent, inner: tuple[Interval, ...] = ()
) -> Span:
    index, call, backward = (r.index, r.call, r.backward) if r is not None else (None, None, False)
    return Span(kind, index, kernel.start, kernel.end, call, backward, inner)


def _span(r: Range, inner: tuple[Interval, ...]) -> Span:
    return Span(r.kind, r.index, r.start, r.end, r.call, r.backward, inner)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into sorted ones that do not touch."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def exposed_parts(whole: Interval, covers: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return the parts of an interval that no cover hides; covers are sorted and disjoint."""
    at, parts = whole[0], []
    for start, end in covers:
        if end > at and start < whole[1]:
            if start > at:
                parts.append((at, start))
            at = end
    if at < whole[1]:
        parts.append((at, whole[1]))
    return tuple(parts)
