"""The watcher: a thread of every rank that tells the others how it goes, and hears how they are.

Rank 0's (:mod:`lightning_cp.watchdog.server`) keeps the list and judges; the others
(:mod:`lightning_cp.watchdog.client`) are connected to it, and judge it. All of this goes over connections of
their own: in the data's groups, ranks may be waiting for one that is gone.

- A killed process's connection closes in that moment: everybody is told, says who it was, and ends.
- A rank that raises sends a note first, then shows its traceback and ends. The others let it, for a while.
  An error of ours comes last: its rank shows it once the others have ended.
- A stopped process sends no beats, and ranks that wait for each other make no progress: after the time that
  they allow themselves at that place, they end. Where all were stopped no time has passed for anybody.
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
from lightning_cp.watchdog.messages import BROKEN, Beat, Card, Note, Verdict, kept
from lightning_cp.watchdog.phase import PhasePosition, Position, Slot

# Time as it passes for a process: a job that is suspended (Ctrl-Z, ``scontrol suspend``) has not waited.


LONGEST = 2.0
"""Seconds between two looks, where they are meant to be half a second apart, that need an explanation."""


class Clock:
    """Seconds, but for those in which this process did not run at all.

    A process that was stopped finds out when it goes on, as hardly any of its own time has passed since the
    last look. One that was busy instead, and only this thread had to wait for its turn, has waited.

    Args:
        seconds: of the machine.
        busy: of the processors that this process has used.
    """

    def __init__(
        self,
        seconds: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.process_time,
    ) -> None:
        self._seconds, self._busy = seconds, busy
        self._looked, self._used = seconds(), busy()
        self._stood = 0.0

    def now(self) -> float:
        """For differences only; to be looked at often, by one thread."""
        seconds, used = self._seconds(), self._busy()
        gap = seconds - self._looked
        if gap > LONGEST and used - self._used < gap / 2:
            self._stood += gap
        self._looked, self._used = seconds, used
        return seconds - self._stood


PERIOD = 0.5
"""Seconds between two signs of life."""
LEAVING = 20.0
"""Seconds in which a rank that ends in good order has a turn to say so."""
GRACE = 5.0
"""Seconds in which who has raised shows its traceback before the others end."""
MISTAKES = 3
"""Of its own that a watch shows; the same one may come again and again."""


class Watcher(threading.Thread):
    """One rank's.

    Args:
        rank: this one.
        cards: of every rank.
        position: this rank's, changed by its main thread.
        slots: positions of ranks of this machine.
        limit: seconds that a rank allows itself without progress: of where it is, and whether that is in its
            first step.
        token: what messages of this job begin with.
        end: ends the process.
    """

    def __init__(
        self,
        rank: int,
        cards: Sequence[Card],
        position: Position,
        slots: dict[int, Slot],
        limit: Callable[[PhasePosition, bool], float | None],
        token: str,
        end: Callable[[Verdict], object] = ending.end,
    ) -> None:
        super().__init__(name="lightning_cp-watcher", daemon=True)
        self.rank, self._cards, self._position = rank, cards, position
        self._slots, self._limit, self._token, self._end = slots, limit, token, end
        self._main = threading.main_thread().ident or 0
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = map(kept, socket.socketpair())
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wakes)
        self._note: Note | None = None
        self._note_is_sent = self._leaving = self._done = False
        self._shows = self._shows_is_sent = False
        self._now = Clock().now
        self._counted, self._progressed, self._beaten = -1, self._now(), 0.0
        self._verdict: Verdict | None = None
        self._ends_at, self._mistakes = 0.0, 0
        self._judged, self._has_left = threading.Event(), threading.Event()

    # -- called by the main thread ----------------------------------------------------------------

    def note(self, note: Note) -> None:
        """This rank has an error."""
        self._note = note
        self._poke()

    def show(self) -> None:
        """This rank's error has ended its program, and is shown once the others have ended."""
        self._shows = True
        self._poke()

    def wait(self, seconds: float) -> bool:
        """Until it is known who failed; whether it is."""
        return self._judged.wait(seconds)

    @property
    def is_named(self) -> bool:
        """It is known who failed, and it is this rank that has raised."""
        found = self._verdict
        return found is not None and found.kind == "raised" and self.rank in found.ranks

    def leave(self) -> None:
        """This rank ends in good order, and so does the thread. Returns once the others have been told.

        On a busy machine the thread may have to wait for its turn; a process that has ended before that is
        taken for one that was killed.
        """
        self._leaving = True
        self._poke()
        if self is not threading.current_thread():  # garbage may be collected by this one
            self._has_left.wait(LEAVING)

    # -- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Listen, tell, and end the process if it has to."""
        try:
            while not self._done:
                self._guarded(self._hear)
                self._guarded(self._go_on, self._now())
        finally:
            self._close()

    def _hear(self) -> None:
        """Take what has come; who was heard first may have cut off another of whom there is news."""
        registered = self._selector.get_map()
        for key, _ in self._selector.select(PERIOD):
            if registered.get(key.fd) is key:
                self._guarded(key.data, key.fileobj)

    def _guarded(self, act: Callable[..., object], *given: object) -> None:
        """A mistake in the watch is shown and ends nothing: without the thread, this rank seems lost."""
        try:
            act(*given)
        except Exception:
            self._mistakes += 1
            if self._mistakes <= MISTAKES:
                name, error = self._cards[self.rank].name, without_home(traceback.format_exc())
                with suppress(OSError, ValueError):  # nobody reads it any more
                    print(
                        f"{name}'s watch has a mistake; the run goes on.\n{error}", file=sys.stderr
                    )
            time.sleep(PERIOD)  # it may come again at once

    def _go_on(self, now: float) -> None:
        note = None if self._note_is_sent else self._note
        if now - self._beaten >= PERIOD or note is not None:
            self._beaten = now
            self._tell_beat(self._beat(now), now)
        if note is not None:
            self._note_is_sent = True
            self._tell_note(note, now)
        if self._shows and self._note_is_sent and not self._shows_is_sent:
            self._shows_is_sent = True
            self._tell_shown()
        self._judge(now)
        if self._leaving:
            self._leave()
            self._has_left.set()
        elif self._verdict is not None and now >= self._ends_at and not self._shows_error():
            self._say_bye()
            self._end(self._said_here(self._verdict))
            self._done = True

    def _said_here(self, verdict: Verdict) -> Verdict:
        """The verdict that this rank shows: with stacks, of ranks that write to one place the lowest does."""
        own = self._cards[self.rank]
        if not verdict.stands or not own.output:
            return verdict
        gone = verdict.ranks if verdict.kind == "left" else ()
        place = (own.machine, own.output)
        sharing = [x.rank for x in self._cards if (x.machine, x.output) == place]
        speaks = min((rank for rank in sharing if rank not in gone), default=own.rank) == own.rank
        return verdict if speaks else replace(verdict, line="", details="")

    def _tell_beat(self, beat: Beat, now: float) -> None:
        raise NotImplementedError

    def _tell_note(self, note: Note, now: float) -> None:
        raise NotImplementedError

    def _tell_shown(self) -> None:
        raise NotImplementedError

    def _judge(self, now: float) -> None:
        raise NotImplementedError

    def _leave(self) -> None:
        raise NotImplementedError

    def _say_bye(self) -> None:
        """The last message, so that this rank's end is not taken for a failure."""

    def _end_by(self, verdict: Verdict, at: float) -> None:
        """End the process at that time, or earlier if that was said before."""
        self._ends_at = at if self._verdict is None else min(at, self._ends_at)
        self._verdict = verdict
        self._judged.set()

    def _shows_error(self) -> bool:
        """This rank raised as well, and ends by itself, or has somebody who handles that."""
        assert self._verdict is not None
        own = self._note is not None and self._note.kind != BROKEN
        return self.is_named or (own and self._verdict.kind == "raised")

    def _beat(self, now: float) -> Beat:
        """The sign of life of this rank."""
        position, limit = self._position, self._own_limit()
        if position.count != self._counted:
            self._counted, self._progressed = position.count, now
        stands = limit is not None and now - self._progressed > limit / 2
        count, since = position.count, position.count - position.began
        stack = self._stack() if stands else ""
        return Beat(count, since, position.place, limit, stack, position.within)

    def _stack(self) -> str:
        """Where the main thread is."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return ""
        return without_home("".join(traceback.format_stack(frame)[-12:]))[-4000:]

    def _place_of(self, rank: int) -> PhasePosition | None:
        """Where a rank of this machine is, or was."""
        return self._slots[rank].read() if rank in self._slots else None

    def _own_limit(self) -> float | None:
        """Seconds that this rank allows itself without progress, where it is now."""
        return self._limit(self._position.place, self._position.is_first)

    def _look(self, rank: int, beat: Beat) -> Beat:
        """What a silent rank of this machine would say of where it is; others' last word has to do."""
        place = self._place_of(rank)
        if place is None:
            return beat
        return replace(beat, place=place, limit=self._limit(place, self._slots[rank].is_first))

    def _kill(self, rank: int) -> None:
        """End a process of this machine that cannot end itself."""
        card, mine = self._cards[rank], self._cards[self.rank]
        if card.machine == mine.machine and card.pid != mine.pid:
            with suppress(OSError):
                os.kill(card.pid, signal.SIGKILL)

    def _forget_files(self) -> None:
        """Everybody has opened what it wants to read."""
        for slot in self._slots.values():
            slot.unlink()

    def _poke(self) -> None:
        with suppress(OSError):
            self._wake.send(b"!")

    def _wakes(self, woken: Any) -> None:
        with suppress(OSError):
            woken.recv(64)

    def _close(self) -> None:
        self._selector.close()
        self._wake.close()
        self._woken.close()
        self._forget_files()
        self._judged.set()
        self._has_left.set()
