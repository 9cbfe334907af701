"""The watcher of every rank but the first."""

from __future__ import annotations

import selectors
import socket
from typing import Any

from lightning_cp.watchdog.attribution import NO_MESSAGE, SILENT_SECONDS, frozen_line
from lightning_cp.watchdog.messages import Beat, Connection, Message, Note, Verdict
from lightning_cp.watchdog.thread import Watcher

AFTER_HUB = 1.0
"""Seconds until this process ends, if rank 0 ended after it sent a verdict."""


class Member(Watcher):
    """A rank's watcher that reports to rank 0 and judges only rank 0."""

    def __init__(self, *args: Any, hub: socket.socket, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hub = Connection(hub)
        self._selector.register(self._hub, selectors.EVENT_READ, self._read_hub)
        self._hub_beat, self._hub_heard = Beat(), self._now()
        self._hub_left = self._hub_is_gone = False
        self._hub.send({"hello": self._token, "rank": self.rank})

    def _send_beat(self, beat: Beat, now: float) -> None:
        self._hub.send({"beat": beat.as_message()})

    def _send_note(self, note: Note, now: float) -> None:
        self._hub.send({"note": note.as_message()})

    def _send_shown(self) -> None:
        self._hub.send({"shows": 1})

    def _leave(self) -> None:
        self._send_bye()
        self._done = True

    def _send_bye(self) -> None:
        self._hub.send({"bye": 1})

    def _read_hub(self, hub: Connection) -> None:
        for message in hub.receive():
            self._handle(message)
        if hub.closed:
            self._selector.unregister(hub)
            self._lose_hub()

    def _handle(self, message: Message) -> None:
        now = self._now()
        if "beat" in message:
            self._hub_beat, self._hub_heard = Beat.of_message(message["beat"]), now
        elif "ready" in message:
            self._forget_files()
        elif "where" in message:
            rank = int(message["where"])
            if (place := self._position_of(rank)) is not None:
                self._hub.send({"was": rank, "place": place})
        elif "verdict" in message:
            self._schedule_end(Verdict.of_message(message["verdict"]), now + float(message["in"]))
        elif "leaving" in message:
            self._hub_left = True
        elif "over" in message:
            self._done = True

    def _lose_hub(self) -> None:
        now = self._now()
        self._hub_is_gone = True
        if self._verdict is not None:
            self._schedule_end(self._verdict, now + AFTER_HUB)
        elif not self._leaving and not self._hub_left:
            place = self._position_of(0) or self._hub_beat.place
            line = f"{self._cards[0].name} lost {place}: {NO_MESSAGE}"
            self._schedule_end(Verdict("lost", (0,), line), now)

    def _judge(self, now: float) -> None:
        if self._verdict is not None:
            return
        name, silent = self._cards[0].name, now - self._hub_heard
        beat = self._refresh_beat(0, self._hub_beat) if silent > SILENT_SECONDS else self._hub_beat
        if not self._hub_left and beat.limit is not None and silent > beat.limit:
            self._kill(0)
            self._schedule_end(Verdict("frozen", (0,), frozen_line(name, silent, beat.place)), now)
        limit, waited = self._own_limit(), now - self._progressed
        if self._hub_is_gone and limit is not None and waited > limit:
            own = f"{self._cards[self.rank].name} made no progress for {waited:.0f} s"
            line = f"{name} ended, and {own}, {self._position.place}"
            self._schedule_end(Verdict("left", (0,), line), now)

    def _close(self) -> None:
        super()._close()
        self._hub.close()
