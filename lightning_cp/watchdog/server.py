"""The watcher of rank 0: where all others report, and where it is found out who failed."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_cp.watchdog.attribution import Judge
from lightning_cp.watchdog.messages import Beat, Connection, Message, Note, Verdict, kept
from lightning_cp.watchdog.phase import PhasePosition
from lightning_cp.watchdog.thread import GRACE, PERIOD, Watcher


class Hub(Watcher):
    """Takes reports from whoever knows the job's token."""

    def __init__(self, *args: Any, listener: socket.socket, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._judges = Judge([card.name for card in self._cards], self._now(), self._look)
        self._links: dict[int, Connection] = {}
        self._strangers: list[Connection] = []
        self._asked: dict[int, float] = {}
        self._said: Verdict | None = None
        self._said_now = self._said_leaving = False
        listener.setblocking(False)
        self._listener = kept(listener)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    # -- who is there -----------------------------------------------------------------------------

    def _accept(self, listener: Any) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            link = Connection(connection)
            self._strangers.append(link)
            self._selector.register(link, selectors.EVENT_READ, self._hears_stranger)

    def _hears_stranger(self, link: Connection) -> None:
        """Hear from a connection that has not said yet which rank it is."""
        messages = link.receive()
        if not messages and not link.closed:
            return
        self._selector.unregister(link)
        self._strangers.remove(link)
        rank = self._rank_of(messages[0] if messages else {})
        if rank is None:
            link.close()
            return
        self._links[rank] = link
        self._selector.register(link, selectors.EVENT_READ, self._hears)
        for message in messages[1:]:
            self._take(rank, message)
        if len(self._links) == len(self._cards) - 1:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._cut_strangers_off()
            self._forget_files()
            self._all({"ready": 1})

    def _cut_strangers_off(self) -> None:
        for link in self._strangers:
            self._selector.unregister(link)
            link.close()
        self._strangers.clear()

    def _rank_of(self, hello: Message) -> int | None:
        rank = hello.get("rank")
        if hello.get("hello") != self._token or type(rank) is not int:
            return None
        return rank if 0 < rank < len(self._cards) and rank not in self._links else None

    def _hears(self, link: Connection) -> None:
        rank = next(rank for rank, known in self._links.items() if known is link)
        for message in link.receive():
            self._take(rank, message)
        if link.closed:
            self._selector.unregister(link)
            link.close()
            del self._links[rank]
            self._lose(rank)

    def _take(self, rank: int, message: Message) -> None:
        now = self._now()
        if "beat" in message:
            self._judges.beats(rank, Beat.of_message(message["beat"]), now)
        elif "note" in message:
            self._judges.notes(rank, Note.of_message(message["note"]), now)
        elif "shows" in message:
            self._judges.shows(rank)
        elif "bye" in message:
            self._judges.leaves(rank)
        elif "was" in message:
            asked = int(message["was"])
            if self._asked.pop(asked, None) is not None:
                self._judges.goes(asked, PhasePosition(*map(int, message["place"])))

    def _lose(self, rank: int) -> None:
        """Where it was can be read here, or by a rank of its machine, or is known from its last beat."""
        place, machine = self._place_of(rank), self._cards[rank].machine
        others = [other for other in self._links if self._cards[other].machine == machine]
        if place is not None or not others:
            self._judges.goes(rank, place)
            return
        self._asked[rank] = self._now()
        for other in others:
            self._links[other].send({"where": rank})

    # -- what is said -----------------------------------------------------------------------------

    def _tell_beat(self, beat: Beat, now: float) -> None:
        self._judges.beats(0, beat, now)
        self._all({"beat": replace(beat, stack="").as_message()})

    def _tell_note(self, note: Note, now: float) -> None:
        self._judges.notes(0, note, now)

    def _tell_shown(self) -> None:
        self._judges.shows(0)

    def _leave(self) -> None:
        """The thread serves the others for as long as they are there."""
        self._judges.leaves(0)
        if not self._said_leaving:
            self._said_leaving = True
            self._all({"leaving": 1})
        self._done = self._done or not self._links

    def _judge(self, now: float) -> None:
        for rank, asked in list(self._asked.items()):
            if now - asked > PERIOD:  # nobody knows
                del self._asked[rank]
                self._judges.goes(rank)
        if self._judges.all_know:
            self._all({"over": 1})
            self._done = True
        elif self._said is None:
            self._pronounce(self._judges.verdict(now), now)
        elif self._said.kind == "raised" and not self._said_now:
            self._hurry(self._said, now)

    def _pronounce(self, verdict: Verdict | None, now: float) -> None:
        """Tell everybody who failed, once."""
        if verdict is None:
            return
        self._said = verdict
        self._broadcast(verdict, GRACE if verdict.kind == "raised" else 0.0, now)
        if verdict.kind == "frozen":
            for rank in verdict.ranks:
                self._kill(rank)

    def _hurry(self, said: Verdict, now: float) -> None:
        """Once who has raised has shown it, nobody has to wait any more."""
        if self._judges.raisers_are_gone(said.ranks):
            self._said_now = True
            self._broadcast(said, 0.0, now)

    def _broadcast(self, verdict: Verdict, grace: float, now: float) -> None:
        self._all({"verdict": verdict.as_message(), "in": grace})
        self._end_by(verdict, now + grace)

    def _all(self, message: Message) -> None:
        for link in list(self._links.values()):
            link.send(message)

    def _close(self) -> None:
        super()._close()
        self._listener.close()
        for link in [*self._links.values(), *self._strangers]:
            link.close()
