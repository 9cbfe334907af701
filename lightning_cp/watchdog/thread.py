"""The watcher: a thread of every rank that reports to the others and receives their verdict.

Rank 0's collects reports and judges (:class:`Hub`). The others are connected to it and judge rank 0.
They use separate connections: ranks may be blocked in the data's process groups, waiting for one that is
gone.

- A killed process's connection closes in that moment: all ranks name it and end.
- A rank that raises sends a note first, then shows its traceback and ends. The others wait for a while.
  An error of ours comes last: its rank shows it once the others have ended.
- A stopped process sends no heartbeats, and ranks that wait for it make no progress: after the limit of
  their phase they end. Time in which all processes were suspended does not count.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_cp.errors import without_home
from lightning_cp.watchdog import attribution as ending
from lightning_cp.watchdog.attribution import (
    NO_MESSAGE,
    SILENT_SECONDS,
    FailureAttribution,
    frozen_line,
)
from lightning_cp.watchdog.messages import (
    BROKEN,
    Connection,
    Heartbeat,
    Message,
    Note,
    RankIdentity,
    Verdict,
    close_in_children,
)
from lightning_cp.watchdog.phase import PhasePosition, Position, Slot

# Time as a process experiences it: a suspended job (Ctrl-Z, ``scontrol suspend``) has not waited.


MAX_GAP = 2.0
"""Seconds between two looks, meant to be half a second apart, above which the gap is examined."""

AFTER_HUB = 1.0
"""Seconds until this process ends, if rank 0 ended after it sent a verdict."""


class Clock:
    """A clock that leaves out the time in which this process was suspended.

    A resumed process finds out because it used hardly any processor time since the last look. If it was
    busy instead, and only this thread had to wait for its turn, the time counts.

    Args:
        seconds: returns the machine's monotonic time.
        busy: returns the processor time that this process has used, in seconds.
    """

    def __init__(
        self,
        seconds: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.process_time,
    ) -> None:
        self._seconds, self._busy = seconds, busy
        self._looked, self._used = seconds(), busy()
        self._suspended = 0.0

    def now(self) -> float:
        """Return the time in seconds, for differences only; call it often, from one thread."""
        seconds, used = self._seconds(), self._busy()
        gap = seconds - self._looked
        if gap > MAX_GAP and used - self._used < gap / 2:
            self._suspended += gap
        self._looked, self._used = seconds, used
        return seconds - self._suspended


PERIOD = 0.5
"""Seconds between two heartbeats."""
LEAVE_TIMEOUT = 20.0
"""Seconds in which a rank that ends in good order gets a turn to say so."""
GRACE = 5.0
"""Seconds in which a rank that raised shows its traceback before the others end."""
MAX_PRINTED_ERRORS = 3
"""Number of internal errors of the watch that are printed; one may recur endlessly."""


class Watcher(threading.Thread):
    """The thread of one rank.

    Args:
        rank: this rank.
        identities: the identities of all ranks.
        position: this rank's position, changed by its main thread.
        slots: positions of this machine's ranks, by rank.
        limit: returns the seconds without progress that are allowed, from the position and whether no step
            has ended yet.
        token: the first text of a connection, which proves that it belongs to this job.
        end: ends the process.
    """

    def __init__(
        self,
        rank: int,
        identities: Sequence[RankIdentity],
        position: Position,
        slots: dict[int, Slot],
        limit: Callable[[PhasePosition, bool], float | None],
        token: str,
        end: Callable[[Verdict], object] = ending.end_process,
    ) -> None:
        super().__init__(name="lightning_cp-watcher", daemon=True)
        self.rank, self._identities, self._position = rank, identities, position
        self._slots, self._limit, self._token, self._end = slots, limit, token, end
        self._main = threading.main_thread().ident or 0
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = map(close_in_children, socket.socketpair())
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain_wake)
        self._note: Note | None = None
        self._note_is_sent = self._leaving = self._done = False
        self._shows = self._shows_is_sent = False
        self._now = Clock().now
        self._counted, self._progressed, self._beaten = -1, self._now(), 0.0
        self._verdict: Verdict | None = None
        self._ends_at, self._internal_errors = 0.0, 0
        self._has_verdict, self._has_left = threading.Event(), threading.Event()

    # -- called by the main thread ----------------------------------------------------------------

    def note(self, note: Note) -> None:
        """Report an error of this rank."""
        self._note = note
        self._wake_thread()

    def show(self) -> None:
        """Report that this rank's error ended its program; it is shown once the others have ended."""
        self._shows = True
        self._wake_thread()

    def wait(self, seconds: float) -> bool:
        """Wait for the verdict; return whether it has arrived.

        On a busy machine the thread may have to wait for its turn; a process that ends before that would
        be taken for a killed one.
        """
        return self._has_verdict.wait(seconds)

    @property
    def is_named(self) -> bool:
        """True if the verdict names this rank as the one that raised."""
        found = self._verdict
        return found is not None and found.kind == "raised" and self.rank in found.ranks

    def leave(self) -> None:
        """Report that this rank ends in good order, and end the thread; returns once the report is sent.

        On a busy machine the thread may have to wait for its turn; a process that ends before that would
        be taken for a killed one.
        """
        self._leaving = True
        self._wake_thread()
        if self is not threading.current_thread():  # may be run by garbage collection
            self._has_left.wait(LEAVE_TIMEOUT)

    # -- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Receive and send until the end, and end the process if the verdict says so."""
        try:
            while not self._done:
                self._guarded(self._read_ready)
                self._guarded(self._update, self._now())
        finally:
            self._close()

    def _read_ready(self) -> None:
        """Read from ready connections; a handler may have closed another ready one, which is skipped."""
        registered = self._selector.get_map()
        for key, _ in self._selector.select(PERIOD):
            if registered.get(key.fd) is key:
                self._guarded(key.data, key.fileobj)

    def _guarded(self, act: Callable[..., object], *given: object) -> None:
        """Print an internal error and continue: without the thread, this rank would seem lost."""
        try:
            act(*given)
        except Exception:
            self._internal_errors += 1
            if self._internal_errors <= MAX_PRINTED_ERRORS:
                name, error = self._identities[self.rank].name, without_home(traceback.format_exc())
                with suppress(OSError, ValueError):  # standard error is closed
                    says = f"{name}'s watch had an internal error. Training continues; please report this."
                    print(f"{says}\n{error}", file=sys.stderr)
            time.sleep(PERIOD)  # it may recur at once

    def _update(self, now: float) -> None:
        note = None if self._note_is_sent else self._note
        if now - self._beaten >= PERIOD or note is not None:
            self._beaten = now
            self._send_beat(self._beat(now), now)
        if note is not None:
            self._note_is_sent = True
            self._send_note(note, now)
        if self._shows and self._note_is_sent and not self._shows_is_sent:
            self._shows_is_sent = True
            self._send_shown()
        self._judge(now)
        if self._leaving:
            self._leave()
            self._has_left.set()
        elif self._verdict is not None and now >= self._ends_at and not self._shows_error():
            self._send_bye()
            self._end(self._verdict_to_print(self._verdict))
            self._done = True

    def _verdict_to_print(self, verdict: Verdict) -> Verdict:
        """Return the verdict that this rank prints: of ranks with one standard error, the lowest prints
        the stacks."""
        own = self._identities[self.rank]
        if not verdict.is_standstill or not own.output:
            return verdict
        gone = verdict.ranks if verdict.kind == "left" else ()
        place = (own.machine, own.output)
        sharing = [x.rank for x in self._identities if (x.machine, x.output) == place]
        speaks = min((rank for rank in sharing if rank not in gone), default=own.rank) == own.rank
        return verdict if speaks else replace(verdict, line="", details="")

    def _send_beat(self, beat: Heartbeat, now: float) -> None:
        raise NotImplementedError

    def _send_note(self, note: Note, now: float) -> None:
        raise NotImplementedError

    def _send_shown(self) -> None:
        raise NotImplementedError

    def _judge(self, now: float) -> None:
        raise NotImplementedError

    def _leave(self) -> None:
        raise NotImplementedError

    def _send_bye(self) -> None:
        """Send the last message, so that this rank's end is not taken for a failure."""

    def _schedule_end(self, verdict: Verdict, at: float) -> None:
        """End the process at that time, or earlier if that was set before."""
        self._ends_at = at if self._verdict is None else min(at, self._ends_at)
        self._verdict = verdict
        self._has_verdict.set()

    def _shows_error(self) -> bool:
        """True if this rank raised as well, and shows its own error or handles it."""
        assert self._verdict is not None
        own = self._note is not None and self._note.kind != BROKEN
        return self.is_named or (own and self._verdict.kind == "raised")

    def _beat(self, now: float) -> Heartbeat:
        """Make this rank's heartbeat."""
        position, limit = self._position, self._own_limit()
        device, count = position.poll_device(), position.signs
        if count != self._counted:
            self._counted, self._progressed = count, now
        stands = limit is not None and now - self._progressed > limit / 2
        since = position.count - position.began
        stack = self._stack() if stands else ""
        return Heartbeat(count, since, position.place, limit, stack, position.module_call, device)

    def _stack(self) -> str:
        """Return the main thread's stack, as text."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return ""
        return without_home("".join(traceback.format_stack(frame)[-12:]))[-4000:]

    def _position_of(self, rank: int) -> PhasePosition | None:
        """Return the position of a rank of this machine, alive or dead; ``None`` elsewhere."""
        return self._slots[rank].read() if rank in self._slots else None

    def _own_limit(self) -> float | None:
        """Return the seconds without progress that this rank allows at its present position."""
        return self._limit(self._position.place, self._position.is_first)

    def _refresh_beat(self, rank: int, beat: Heartbeat) -> Heartbeat:
        """Replace a silent rank's last heartbeat by its position file, if that is on this machine."""
        place = self._position_of(rank)
        if place is None:
            return beat
        slot = self._slots[rank]
        device = beat.device and slot.read_device()._replace(name=beat.device.name)
        return replace(beat, place=place, limit=self._limit(place, slot.is_first), device=device)

    def _kill(self, rank: int) -> None:
        """Kill a process of this machine that cannot end itself."""
        identity, mine = self._identities[rank], self._identities[self.rank]
        if identity.machine == mine.machine and identity.pid != mine.pid:
            with suppress(OSError):
                os.kill(identity.pid, signal.SIGKILL)

    def _forget_files(self) -> None:
        """Unlink position files, once every rank has opened those it needs."""
        for slot in self._slots.values():
            slot.unlink()

    def _wake_thread(self) -> None:
        with suppress(OSError):
            self._wake.send(b"!")

    def _drain_wake(self, woken: Any) -> None:
        with suppress(OSError):
            woken.recv(64)

    def _close(self) -> None:
        self._selector.close()
        self._wake.close()
        self._woken.close()
        self._forget_files()
        self._has_verdict.set()
        self._has_left.set()


class Member(Watcher):
    """A rank's watcher that reports to rank 0 and judges only rank 0."""

    def __init__(self, *args: Any, hub: socket.socket, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hub = Connection(hub)
        self._selector.register(self._hub, selectors.EVENT_READ, self._read_hub)
        self._hub_beat, self._hub_heard = Heartbeat(), self._now()
        self._hub_left = self._hub_is_gone = False
        self._hub.send({"hello": self._token, "rank": self.rank})

    def _send_beat(self, beat: Heartbeat, now: float) -> None:
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
            self._hub_beat, self._hub_heard = Heartbeat.of_message(message["beat"]), now
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
            line = f"{self._identities[0].name} lost {place}: {NO_MESSAGE}"
            self._schedule_end(Verdict("lost", (0,), line), now)

    def _judge(self, now: float) -> None:
        if self._verdict is not None:
            return
        name, silent = self._identities[0].name, now - self._hub_heard
        beat = self._refresh_beat(0, self._hub_beat) if silent > SILENT_SECONDS else self._hub_beat
        if not self._hub_left and beat.limit is not None and silent > beat.limit:
            self._kill(0)
            line = frozen_line(name, silent, beat)
            self._schedule_end(Verdict("frozen", (0,), line), now)
        limit, waited = self._own_limit(), now - self._progressed
        if self._hub_is_gone and limit is not None and waited > limit:
            own = f"{self._identities[self.rank].name} made no progress for {waited:.0f} s"
            line = f"{name} ended, and {own}, {self._position.place}"
            self._schedule_end(Verdict("left", (0,), line), now)

    def _close(self) -> None:
        super()._close()
        self._hub.close()


class Hub(Watcher):
    """The watcher of rank 0; accepts connections that present the job's token."""

    def __init__(self, *args: Any, listener: socket.socket, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attribution = FailureAttribution(
            [identity.name for identity in self._identities], self._now(), self._refresh_beat
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
        if len(self._links) == len(self._identities) - 1:
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
        return rank if 0 < rank < len(self._identities) and rank not in self._links else None

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
            self._attribution.record_beat(rank, Heartbeat.of_message(message["beat"]), now)
        elif "note" in message:
            self._attribution.record_note(rank, Note.of_message(message["note"]), now)
        elif "shows" in message:
            self._attribution.record_shown(rank)
        elif "bye" in message:
            self._attribution.record_leave(rank)
        elif "was" in message:
            asked = int(message["was"])
            if self._asked.pop(asked, None) is not None:
                self._attribution.record_disconnect(
                    asked, PhasePosition(*map(int, message["place"]))
                )

    def _lose_rank(self, rank: int) -> None:
        """Find the lost rank's position: read it here, or ask a rank of its machine, or use its last
        heartbeat."""
        place, machine = self._position_of(rank), self._identities[rank].machine
        others = [other for other in self._links if self._identities[other].machine == machine]
        if place is not None or not others:
            self._attribution.record_disconnect(rank, place)
            return
        self._asked[rank] = self._now()
        for other in others:
            self._links[other].send({"where": rank})

    # -- what is said -----------------------------------------------------------------------------

    def _send_beat(self, beat: Heartbeat, now: float) -> None:
        self._attribution.record_beat(0, beat, now)
        self._send_to_all({"beat": replace(beat, stack="").as_message()})

    def _send_note(self, note: Note, now: float) -> None:
        self._attribution.record_note(0, note, now)

    def _send_shown(self) -> None:
        self._attribution.record_shown(0)

    def _leave(self) -> None:
        """Announce the end; the thread serves the others until they are gone."""
        self._attribution.record_leave(0)
        if not self._announced_leave:
            self._announced_leave = True
            self._send_to_all({"leaving": 1})
        self._done = self._done or not self._links

    def _judge(self, now: float) -> None:
        for rank, asked in list(self._asked.items()):
            if now - asked > PERIOD:  # no rank answered
                del self._asked[rank]
                self._attribution.record_disconnect(rank)
        if self._attribution.all_informed:
            self._send_to_all({"over": 1})
            self._done = True
        elif self._announced is None:
            self._announce(self._attribution.verdict(now), now)
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
        if self._attribution.raisers_are_gone(said.ranks):
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
