"""A Chrome trace as data, and the timeline of a rank's step in it: work, and communication's exposed part.

Only the file's content is used, so a summary can be rebuilt from a stored trace: named ranges of the host,
attention operators, and kernels on a GPU. Seconds count from the moment at which the ranks began the step
together, which puts all ranks on one clock.

On CPU, work is the named ranges without their nested ranges. Data is in flight from its post to the end of
its wait, and exposed while the rank waits. On a GPU the host runs ahead, so both come from kernels: each
belongs to the range in which it was launched; data is in flight while an NCCL kernel runs, and exposed while
no other kernel runs at the same time.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lightning_cp.errors import ConfigError
from lightning_cp.utils.tracing import PREFIX

TRANSFERS = ("keys", "gradients", "all-to-all", "all-gather", "reduce-scatter")
"""Kinds of communication, in display order."""
WORK = ("compute", "merge", "copies")
"""Kinds of attention's work that run on the device."""
HOST_ONLY = ("agreement", "shard batch")
Interval = tuple[float, float]
"""Start and end in seconds."""


class TimeRange(Protocol):
    """A range of time on a thread."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def thread(self) -> int: ...


R = TypeVar("R", bound=TimeRange)


class Nesting(Generic[R]):
    """The nesting of ranges by thread: ranges of one thread contain each other or follow each other."""

    def __init__(self, ranges: Iterable[R]) -> None:
        self._threads: dict[int, list[R]] = defaultdict(list)
        self._parents: dict[int, list[int | None]] = defaultdict(list)
        for r in sorted(ranges, key=lambda r: (r.start, -r.end)):
            self._add(r)
        self._starts = {thread: [r.start for r in of] for thread, of in self._threads.items()}

    def _add(self, r: R) -> None:
        of, parents = self._threads[r.thread], self._parents[r.thread]
        parent = len(of) - 1 if of else None
        while parent is not None and of[parent].end < r.end:
            parent = parents[parent]
        of.append(r)
        parents.append(parent)

    def at(self, thread: int, moment: float) -> R | None:
        """Return the innermost range around a moment of a thread."""
        of = self._threads.get(thread, [])
        at: int | None = bisect_right(self._starts.get(thread, []), moment) - 1
        if at == -1:
            return None
        while at is not None and of[at].end < moment:
            at = self._parents[thread][at]
        return None if at is None else of[at]

    def with_children(self) -> list[tuple[R, list[R]]]:
        """Return every range with the ranges directly inside it."""
        found: list[tuple[R, list[R]]] = []
        for thread, of in self._threads.items():
            pairs: list[tuple[R, list[R]]] = [(r, []) for r in of]
            for r, parent in zip(of, self._parents[thread], strict=True):
                if parent is not None:
                    pairs[parent][1].append(r)
            found += pairs
        return found


BEGIN, END = "step begins", "step ends"
"""Ranges around the recording; every rank leaves the first one at the same time."""
ATTENTION = "ContextParallelAttention"
"""The autograd function; its backward has this name followed by ``Backward``."""

Event = Mapping[str, Any]
Moment = tuple[int, float]
"""A thread and a time in seconds."""

_NAME = re.compile(
    r"(?:(?P<unit>hop|chunk) (?P<index>\d+) )?(?P<kind>.+?)(?: (?P<phase>post|wait))?"
)


@dataclass(frozen=True)
class Range:
    """A named range of the host."""

    kind: str
    """``compute``, ``merge``, ``keys``, ``gradients``, ``all-to-all``, ..."""
    unit: str | None
    """``hop`` or ``chunk``."""
    index: int | None
    """Index of the hop or chunk."""
    phase: str
    """``post`` or ``wait`` of an asynchronous transfer, else empty."""
    start: float
    end: float
    """Seconds."""
    thread: int
    call: int | None = None
    """Number of the attention call; a backward has the number of its forward."""
    backward: bool = False

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start


@dataclass(frozen=True)
class GpuEvent:
    """A kernel or a copy on a GPU."""

    name: str
    start: float
    end: float
    """Seconds."""
    launched: Moment | None
    """The host's thread and time of the launch, if the trace has them."""

    @property
    def communicates(self) -> bool:
        """True if the kernel moves data between ranks."""
        return self.name.lower().startswith("nccl")


@dataclass(frozen=True)
class Trace:
    """One rank's step."""

    seconds: float
    ranges: list[Range]
    """Ranges by start; outer ones before inner ones."""
    operators: list[Moment]
    """Thread and moment of each call of an attention operator."""
    kernels: list[GpuEvent]


_OPERATORS = re.compile(
    r"aten::(_flash_attention_(forward|backward)"
    r"|_scaled_dot_product_(flash_attention_for_cpu|cudnn_attention)(_backward)?)"
    r"|flash_attn(_3)?::\w*(forward|backward|fwd|bwd)"
)
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of GPU events; dense copies and zeros are not kernels."""
_OWN_KERNELS = frozenset({"forward", "backward_queries", "backward_keys"})
"""The GPU names of the kernels of ``kernel="triton"``."""


def read_trace(path: Path) -> Trace:
    """Read a file of :meth:`torch.profiler.profile.export_chrome_trace`.

    Raises:
        ConfigError: the file has no step that :class:`StepRecorder` recorded.
    """
    events = json.loads(path.read_text())["traceEvents"]
    return trace_of(events, str(path))


def trace_of(events: Iterable[Event], source: str = "the trace") -> Trace:
    """Build a trace from the file's events, whose times are in microseconds.

    Raises:
        ConfigError: the events have no step that :class:`StepRecorder` recorded.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    ours = {
        event["name"]: event for event in spans if event["name"] in (PREFIX + BEGIN, PREFIX + END)
    }
    if len(ours) < 2:
        raise ConfigError(
            f"{source} holds no step that the profile view recorded: it has no '{PREFIX}{BEGIN}' and "
            f"'{PREFIX}{END}'. Traces are made by profile= of the strategy."
        )
    zero = _end(ours[PREFIX + BEGIN])
    length = (ours[PREFIX + END]["ts"] - zero) * 1e-6
    calls = _calls(spans)
    ranges = [
        _range(event, zero, calls)
        for event in spans
        if event["name"].startswith(PREFIX) and event["ts"] >= zero and event["name"] not in ours
    ]
    kernels = _kernels(spans, zero)
    own = [kernel.launched for kernel in kernels if kernel.name in _OWN_KERNELS and kernel.launched]
    operators = [
        (event["tid"], (event["ts"] - zero) * 1e-6)
        for event in spans
        if event.get("cat") == "cpu_op" and _OPERATORS.fullmatch(event["name"])
    ]
    return Trace(
        length, sorted(ranges, key=lambda r: (r.start, -r.end)), [*operators, *own], kernels
    )


@dataclass(frozen=True)
class _Call:
    """One pass of the ``number``-th attention call."""

    thread: int
    start: float
    end: float
    number: int
    backward: bool


def _calls(events: Sequence[Event]) -> Nesting[_Call]:
    """Return all passes of attention calls, numbered by forwards; a recomputation is a forward too.

    A backward and its forward share autograd's sequence number. A call without gradients has the number of
    the next operation, so the last forward before the backward counts.
    """
    forward, backward = (
        sorted((e for e in events if e["name"] == name), key=lambda e: e["ts"])
        for name in (ATTENTION, f"{ATTENTION}Backward")
    )
    passes = [(event, number, False) for number, event in enumerate(forward)]
    for number, event in enumerate(backward):
        sequence = _sequence(event)
        own = [
            at
            for at, before in enumerate(forward)
            if sequence is not None and _sequence(before) == sequence and before["ts"] < event["ts"]
        ]
        passes.append((event, own[-1] if own else number, True))
    return Nesting(_Call(e["tid"], e["ts"], _end(e), number, back) for e, number, back in passes)


def _sequence(event: Event) -> int | None:
    return event.get("args", {}).get("Sequence number")


def _range(event: Event, zero: float, calls: Nesting[_Call]) -> Range:
    match = _NAME.fullmatch(event["name"].removeprefix(PREFIX))
    assert match is not None
    call, index = calls.at(event["tid"], event["ts"]), match["index"]
    return Range(
        match["kind"],
        match["unit"],
        None if index is None else int(index),
        match["phase"] or "",
        (event["ts"] - zero) * 1e-6,
        (_end(event) - zero) * 1e-6,
        event["tid"],
        None if call is None else call.number,
        call is not None and call.backward,
    )


def _kernels(events: Sequence[Event], zero: float) -> list[GpuEvent]:
    """Return kernels with their launches: host and GPU share a correlation number."""
    launches = {
        event["args"]["correlation"]: (event["tid"], (event["ts"] - zero) * 1e-6)
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    return [
        GpuEvent(
            event["name"],
            (event["ts"] - zero) * 1e-6,
            (_end(event) - zero) * 1e-6,
            launches.get(event["args"].get("correlation")),
        )
        for event in events
        if event.get("cat") in _ON_GPU and event["ts"] >= zero
    ]


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]


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
