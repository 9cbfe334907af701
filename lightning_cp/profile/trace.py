"""Reading a Chrome trace: the named ranges, what was in flight between them, and what ran on a GPU.

Only what the file says is used, so that a summary can be made anew from a trace that was kept. Seconds count
from the moment at which the ranks began the step together, which puts the ranks of one picture on one clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_cp.errors import ConfigError
from lightning_cp.named_ranges import PREFIX
from lightning_cp.profile.nesting import Nesting

BEGIN, END = "step begins", "step ends"
"""Ranges around what is recorded; every rank leaves the first one at the same time."""
ATTENTION = "ContextParallelAttention"
"""The autograd function; its backward is called the same with ``Backward`` behind it."""

Event = Mapping[str, Any]
Moment = tuple[int, float]
"""A thread and the seconds."""

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
    """Which one."""
    phase: str
    """``post`` or ``wait`` of what is asynchronous, else empty."""
    start: float
    end: float
    """Seconds."""
    thread: int
    call: int | None = None
    """Which attention call this belongs to; a backward has the number of its forward."""
    backward: bool = False

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start


@dataclass(frozen=True)
class Kernel:
    """What ran on a GPU: a kernel, or a copy."""

    name: str
    start: float
    end: float
    """Seconds."""
    launched: Moment | None
    """The host's thread, and when it launched the kernel, if the trace says so."""

    @property
    def communicates(self) -> bool:
        """True if it moves data between ranks."""
        return self.name.lower().startswith("nccl")


@dataclass(frozen=True)
class Trace:
    """One rank's step."""

    seconds: float
    ranges: list[Range]
    """By start; those that contain others before them."""
    operators: list[Moment]
    """Thread and moment of each call of an attention operator."""
    kernels: list[Kernel]


_OPERATORS = re.compile(
    r"aten::(_flash_attention_(forward|backward)"
    r"|_scaled_dot_product_(flash_attention_for_cpu|cudnn_attention)(_backward)?)"
    r"|flash_attn(_3)?::\w*(forward|backward|fwd|bwd)"
)
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of what runs there: dense copies and zeros are no kernels."""
_OWN_KERNELS = frozenset({"forward", "backward_queries", "backward_keys"})
"""Of ``kernel="triton"``, as they are called on the GPU."""


def read_trace(path: Path) -> Trace:
    """Read what :meth:`torch.profiler.profile.export_chrome_trace` wrote.

    Raises:
        ConfigError: a step of ours was not recorded in it.
    """
    events = json.loads(path.read_text())["traceEvents"]
    return trace_of(events, str(path))


def trace_of(events: Iterable[Event], source: str = "the trace") -> Trace:
    """The same of the events themselves; times are in microseconds there.

    Raises:
        ConfigError: a step of ours was not recorded.
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
    """All passes, forward ones in their order; a recomputation is one too.

    A backward and its forward share autograd's sequence number. What runs without gradients has that of the
    next operation, so that the last forward before counts.
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


def _kernels(events: Sequence[Event], zero: float) -> list[Kernel]:
    """Kernels, and who launched each: host and GPU share a correlation number."""
    launches = {
        event["args"]["correlation"]: (event["tid"], (event["ts"] - zero) * 1e-6)
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    return [
        Kernel(
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
