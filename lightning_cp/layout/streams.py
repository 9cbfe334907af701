"""Streams: the order in which a ring rank posts, awaits and computes, and the time that this takes.

On a GPU the ring's transfers run on the stream of their communicator, one after the other, in the order of
their posts. A post waits for everything that was computed before it; a wait holds computing back until its
transfer has ended. A transfer begins when all of its ranks have come to it (NCCL).

``attention/ring.py`` and ``attention/all_gather.py`` have these orders too: a test runs them and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_cp.layout.documents import Ints

Times = npt.NDArray[Any]
"""Integers or floats, in the caller's unit."""

KEYS, GRADIENTS = "keys", "gradients"
"""Loads of transfers."""


class StreamStep(NamedTuple):
    """One entry of a rank's order."""

    what: Literal["post", "wait", "compute"]
    load: str
    """``keys`` or ``gradients``; empty for a compute."""
    number: int
    """Hop, or block of heads."""


Order = tuple[StreamStep, ...]


def ring_order(hops: int, *, backward: bool) -> Order:
    """Return the order of a ring: the next hop's keys travel during a compute, its gradients after it."""
    return tuple(_ring(hops, backward))


def _ring(hops: int, backward: bool) -> Iterator[StreamStep]:
    for hop in range(hops):
        if hop:
            yield StreamStep("wait", KEYS, hop)
        if hop + 1 < hops:
            yield StreamStep("post", KEYS, hop + 1)
        yield StreamStep("compute", "", hop)
        if backward and hop:
            if hop > 1:
                yield StreamStep("wait", GRADIENTS, hop - 1)
            yield StreamStep("post", GRADIENTS, hop)
    if backward and hops > 1:
        yield StreamStep("wait", GRADIENTS, hops - 1)


def gather_order(blocks: int, *, backward: bool) -> Order:
    """Return the order of an all-gather: the same with blocks of heads, and the first one travels too."""
    return tuple(_gather(blocks, backward))


def _gather(blocks: int, backward: bool) -> Iterator[StreamStep]:
    yield StreamStep("post", KEYS, 0)
    for block in range(blocks):
        if block + 1 < blocks:
            yield StreamStep("post", KEYS, block + 1)
        yield StreamStep("wait", KEYS, block)
        yield StreamStep("compute", "", block)
        if backward:
            if block:
                yield StreamStep("wait", GRADIENTS, block - 1)
            yield StreamStep("post", GRADIENTS, block)
    if backward:
        yield StreamStep("wait", GRADIENTS, blocks - 1)


@dataclass(frozen=True)
class Messages:
    """All transfers of one load, of every ring rank."""

    times: Times
    """``[rank, hop or block]``: time of what a rank sends; 0: it sends nothing."""
    dest: Ints | None = None
    """``[rank, hop]``: the receiver; ``None``: all ranks send to all."""

    def sent(self, number: int, begins: Times) -> Times:
        """Return when each rank has sent its transfer, given when each comes to it; 0: it sends nothing."""
        sending = self.times[:, number]
        if self.dest is None:
            return np.full_like(begins, begins.max() + sending.max())
        dest = self.dest[:, number]
        return np.where(sending > 0, np.maximum(begins, begins[dest]) + sending, 0)

    def ends(self, number: int, begins: Times) -> Times:
        """Return when each rank's transfer has ended, given when each comes to it; it may have none."""
        ends = self.sent(number, begins)
        if self.dest is None:
            return ends
        dest, sent = self.dest[:, number], ends.copy()
        ends[dest] = np.maximum(sent[dest], sent)  # a rank receives from one other
        return ends


class StreamEvent(NamedTuple):
    """One entry of the order, with its times on each ring rank."""

    step: StreamStep
    begins: Times
    """Seconds at which each rank comes to it; a transfer waits for its other rank too."""
    ends: Times
    """Seconds at which each rank's compute, wait or transfer has ended."""


def stream_events(
    order: Order, computes: Times, messages: Mapping[str, Messages]
) -> Iterator[StreamEvent]:
    """Yield the events of an order, with the arguments of :func:`elapsed`."""
    now = free = np.zeros_like(computes[:, 0])
    arrival: dict[tuple[str, int], Times] = {}
    for step in order:
        what, load, number = step
        begins = now
        if what == "compute":
            ends = now = now + computes[:, number]
        elif what == "wait":
            ends = now = np.maximum(now, arrival.pop((load, number)))
        else:
            begins = np.maximum(now, free)
            ends = arrival[load, number] = messages[load].ends(number, begins)
            free = np.maximum(free, ends)
        yield StreamEvent(step, begins, ends)


def elapsed(order: Order, computes: Times, messages: Mapping[str, Messages]) -> Times:
    """Return the time at which each ring rank has gone through an order.

    Args:
        order: the same on every rank; a rank skips transfers that it has no part in.
        computes: ``[rank, hop or block]``, the time of each compute.
        messages: the transfers, by load.
    """
    now = np.zeros_like(computes[:, 0])
    for event in stream_events(order, computes, messages):
        if event.step.what != "post":
            now = event.ends
    return now
