"""Watching, delaying and postponing the ring's transfers, and watching the kernel between them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from lightning_cp.kernels.reference import ReferenceKernel

What = Literal["post", "wait", "kernel", "kernel ends"]
Load = Literal["keys", "gradients", ""]


class Event(NamedTuple):
    """Something that a rank did.

    Args:
        what: started a transfer, began to wait for one, called the kernel or came back from it.
        load: what the transfer carries.
        hop: whose keys it is about.
    """

    what: What
    load: Load
    hop: int


def no_delay(event: Event) -> float:
    """Seconds to lose at an event: none."""
    return 0.0


class Transport:
    """Records events of one attention call in the block, at one rank of a ring.

    Keys are told from gradients by their dtype, so the call must be in bfloat16 if it matters.

    Args:
        rank: ring rank.
        ring_size: ranks of the ring.
        delay: seconds to sleep just before an event.
        postpone: really start a transfer only when it is waited for, so that a buffer that is
            overwritten or given up before that shows.
    """

    def __init__(
        self,
        rank: int,
        ring_size: int,
        delay: Callable[[Event], float] = no_delay,
        postpone: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self._rank = rank
        self._ring_size = ring_size
        self._delay = delay
        self._postpone = postpone
        self._calls = 0

    @contextmanager
    def watching(self) -> Iterator[Transport]:
        """Patch torch.distributed and the reference kernel; events start anew."""
        self.events, self._calls = [], 0
        with ExitStack() as stack:
            replace = mock.patch.object(dist, "batch_isend_irecv", self._post)
            self._start = dist.batch_isend_irecv
            stack.enter_context(replace)
            for name in ("forward", "backward"):
                watched = self._watched(getattr(ReferenceKernel, name))
                stack.enter_context(mock.patch.object(ReferenceKernel, name, watched))
            yield self

    def note(self, event: Event) -> None:
        """Lose time, then write down the event."""
        time.sleep(self._delay(event))
        self.events.append(event)

    def at(self, what: What, hop: int, load: Load = "") -> int:
        """When the event took place, as its place among the events; it must be there once."""
        event = Event(what, load, hop)
        assert self.events.count(event) == 1, f"{event} is {self.events.count(event)} times there"
        return self.events.index(event)

    @property
    def posts(self) -> list[tuple[str, int]]:
        """(load, hop) of the transfers that were started."""
        return [(event.load, event.hop) for event in self.events if event.what == "post"]

    def _watched(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            hop = self._calls
            self._calls += 1
            self.note(Event("kernel", "", hop))
            method(*args)
            self.note(Event("kernel ends", "", hop))

        return call

    def _post(self, ops: list[dist.P2POp]) -> list[Any]:
        load: Load = "keys" if ops[0].tensor.dtype == torch.bfloat16 else "gradients"
        hop = self._hop(ops[0], load)
        self.note(Event("post", load, hop))
        assert all(op.tensor.numel() for op in ops), "an empty message"
        start = self._later(ops)
        works = None if self._postpone else start()
        return [_Batch(works, start, lambda: self.note(Event("wait", load, hop)))]

    def _later(self, ops: list[dist.P2POp]) -> Callable[[], Sequence[dist.Work]]:
        """Starts the transfer from what the buffers hold by then; keeps no buffer alive itself."""
        parts = [(op.op, weakref.ref(op.tensor), op.group, op.group_peer) for op in ops]

        def start() -> Sequence[dist.Work]:
            late: list[dist.P2POp] = []
            for op, buffer, group, peer in parts:
                tensor = buffer()
                assert tensor is not None, (
                    "a buffer was given up before its transfer was waited for"
                )
                late.append(dist.P2POp(op, tensor, group=group, group_peer=peer))
            return self._start(late)

        return start

    def _hop(self, op: dist.P2POp, load: Load) -> int:
        """Keys go to rank + hop; their gradients come back from there."""
        outward = (op.op is dist.isend) == (load == "keys")
        distance = op.group_peer - self._rank if outward else self._rank - op.group_peer
        return distance % self._ring_size


class _Batch:
    """A transfer's work; starts it when it was not yet."""

    def __init__(
        self,
        works: Sequence[dist.Work] | None,
        start: Callable[[], Sequence[dist.Work]],
        note: Callable[[], None],
    ) -> None:
        self._works = works
        self._start = start
        self._note = note

    def wait(self) -> None:
        """Wait for both directions."""
        self._note()
        for work in self._works if self._works is not None else self._start():
            work.wait()
