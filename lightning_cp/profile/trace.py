"""A Chrome trace as data: the named ranges of the host, attention operators, and kernels on a GPU.

Only the file's content is used, so a summary can be rebuilt from a stored trace. Seconds count from the
moment at which the ranks began the step together, which puts all ranks on one clock.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lightning_cp.errors import ConfigError
from lightning_cp.utils.tracing import PREFIX


class Timed(Protocol):
    """A range of time on a thread."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def thread(self) -> int: ...


R = TypeVar("R", bound=Timed)


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
