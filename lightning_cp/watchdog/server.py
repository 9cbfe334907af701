"""Rank 0's watcher: all other ranks report to it, and it decides which rank failed."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_cp.watchdog.attribution import Judge
from lightning_cp.watchdog.messages import (
    Beat,
    Connection,
    Message,
    Note,
    Verdict,
    close_in_children,
)
from lightning_cp.watchdog.phase import PhasePosition
from lightning_cp.watchdog.thread import GRACE, PERIOD, Watcher


class Hub(Watcher):
    """The watcher of rank 0; accepts connections that present the job's token."""

    def __init__(self, *args: Any, listener: socket.socket, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failure_judge = Judge(
            [card.name for card in self._cards], self._now(), self._refresh_beat
        )
        self._links: dict[int, Connection] = {}
        self._unidentified: list[Connection] = []
        self._asked: dict[int, float] = {}
        self._announced: Verdict | None = None
        self._ended_grace = self._announced_leave = False
        listener.setblocking(False)
        self._listener = close_in_children(listener)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    # -- who is there -----------------------------------------------------------------------------

    def _accept(self, listener: Any) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            link = Connection(connection)
            self._unidentified.append(link)
            self._selector.register(link, selectors.EVENT_READ, self._read_hello)

    def _read_hello(self, link: Connection) -> None:
        """Read from a connection that has not named its rank yet."""
        messages = link.receive()
        if not messages and not link.closed:
            return
        self._selector.unregister(link)
        self._unidentified.remove(link)
        rank = self._rank_of(messages[0] if messages else {})
        if rank is None:
            link.close()
            return
        self._links[rank] = link
        self._selector.register(link, selectors.EVENT_READ, self._read_link)
        for message in messages[1:]:
            self._handle(rank, message)
        if len(self._links) == len(self._cards) - 1:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._close_unidentified()
            self._forget_files()
            self._send_to_all({"ready": 1})

    def _close_unidentified(self) -> None:
        for link in self._unidentified:
            self._selector.unregister(link)
            link.close()
        self._unidentified.clear()

    def _rank_of(self, hello: Message) -> int | None:
        rank = hello.get("rank")
        if hello.get("hello") != self._token or type(rank) is not int:
            return None
        return rank if 0 < rank < len(self._cards) and rank not in self._links else None

    def _read_link(self, link: Connection) -> None:
        rank = next(rank for rank, known in self._links.items() if known is link)
        for message in link.receive():
            self._handle(rank, message)
        if link.closed:
            self._selector.unregister(link)
            link.close()
            del self._links[rank]
            self._lose_rank(rank)

    def _handle(self, rank: int, message: Message) -> None:
        now = self._now()
        if "beat" in message:
            self._failure_judge.record_beat(rank, Beat.of_message(message["beat"]), now)
        elif "note" in message:
            self._failure_judge.record_note(rank, Note.of_message(message["note"]), now)
        elif "shows" in message:
            self._failure_judge.record_shown(rank)
        elif "bye" in message:
            self._failure_judge.record_leave(rank)
        elif "was" in message:
            asked = int(message["was"])
            if self._asked.pop(asked, None) is not None:
                self._failure_judge.record_disconnect(
                    asked, PhasePosition(*map(int, message["place"]))
                )

    def _lose_rank(self, rank: int) -> None:
        """Find the lost rank's position: read it here, or ask a rank of its machine, or use its last
        heartbeat."""
        place, machine = self._position_of(rank), self._cards[rank].machine
        others = [other for other in self._links if self._cards[other].machine == machine]
        if place is not None or not others:
            self._failure_judge.record_disconnect(rank, place)
            return
        self._asked[rank] = self._now()
        for other in others:
            self._links[other].send({"where": rank})

    # -- what is said -----------------------------------------------------------------------------

    def _send_beat(self, beat: Beat, now: float) -> None:
        self._failure_judge.record_beat(0, beat, now)
        self._send_to_all({"beat": replace(beat, stack="").as_message()})

    def _send_note(self, note: Note, now: float) -> None:
        self._failure_judge.record_note(0, note, now)

    def _send_shown(self) -> None:
        self._failure_judge.record_shown(0)

    def _leave(self) -> None:
        """Announce the end; the thread serves the others until they are gone."""
        self._failure_judge.record_leave(0)
        if not self._announced_leave:
            self._announced_leave = True
            self._send_to_all({"leaving": 1})
        self._done = self._done or not self._links

    def _judge(self, now: float) -> None:
        for rank, asked in list(self._asked.items()):
            if now - asked > PERIOD:  # no rank answered
                del self._asked[rank]
                self._failure_judge.record_disconnect(rank)
        if self._failure_judge.all_informed:
            self._send_to_all({"over": 1})
            self._done = True
        elif self._announced is None:
            self._announce(self._failure_judge.verdict(now), now)
        elif self._announced.kind == "raised" and not self._ended_grace:
            self._end_grace(self._announced, now)

    def _announce(self, verdict: Verdict | None, now: float) -> None:
        """Send the verdict to all ranks, once."""
        if verdict is None:
            return
        self._announced = verdict
        self._broadcast(verdict, GRACE if verdict.kind == "raised" else 0.0, now)
        if verdict.kind == "frozen":
            for rank in verdict.ranks:
                self._kill(rank)

    def _end_grace(self, said: Verdict, now: float) -> None:
        """End the waiting once the ranks that raised have shown their errors."""
        if self._failure_judge.raisers_are_gone(said.ranks):
            self._ended_grace = True
            self._broadcast(said, 0.0, now)

    def _broadcast(self, verdict: Verdict, grace: float, now: float) -> None:
        self._send_to_all({"verdict": verdict.as_message(), "in": grace})
        self._schedule_end(verdict, now + grace)

    def _send_to_all(self, message: Message) -> None:
        for link in list(self._links.values()):
            link.send(message)

    def _close(self) -> None:
        super()._close()
        self._listener.close()
        for link in [*self._links.values(), *self._unidentified]:
            link.close()
