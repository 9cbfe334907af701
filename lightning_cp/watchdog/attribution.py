"""Verdicts on who failed, and their texts; plain bookkeeping, without sockets and threads."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from lightning_cp.error_display import Meeting
from lightning_cp.watchdog.messages import BROKEN, OWN, Beat, Note, Verdict
from lightning_cp.watchdog.phase import PhasePosition

PATIENCE = 3.0
"""Seconds that an error which looks like the consequence of another one's is kept back for that one."""
_WAITS = re.compile(r"lightning_cp/comm/|torch/distributed/")
"""In the stack of a rank that waits for others."""
SILENT = 2.0
"""Seconds without a sign of life after which a rank's own last word of itself is looked after."""
UNSAID = "its process ended without a word; if it was killed for want of memory, dmesg says so"
"""What is said of a rank that is lost."""
SHOWN = 8
"""Ranks that are named at most."""


@dataclass
class _Member:
    """The facts known of a rank."""

    name: str
    beat: Beat
    heard: float
    """When it last gave a sign of life."""
    note: Note | None = None
    noted: float = 0.0
    here: bool = True
    left: bool = False
    """It has said that it ends."""
    shows: bool = False
    """Its error has ended its program, and waits for the others to be shown."""

    @property
    def knows(self) -> bool:
        """Nothing keeps it waiting: it ends, or handles an error that is no broken connection."""
        return self.left or (self.note is not None and self.note.kind != BROKEN)


class Judge:
    """Listens to what is known of all ranks, and says who failed, if somebody did.

    Args:
        names: of the ranks, as in ``rank 2 (cp_rank 1 of 4, data_rank 0)``.
        now: on the clock that all calls go by, in seconds.
        look: what a rank that has become silent would say now, of its last word; for ranks whose position can
            be seen, which went on after that.
    """

    def __init__(
        self,
        names: Sequence[str],
        now: float,
        look: Callable[[int, Beat], Beat] = lambda rank, beat: beat,
    ) -> None:
        self._look = look
        self._members = [_Member(name, Beat(), now) for name in names]
        self._lost: list[int] = []
        self._noted: list[int] = []
        self._moved = now  # when some rank last made progress

    @property
    def all_know(self) -> bool:
        """Nobody is left waiting."""
        return all(member.knows for member in self._members)

    def raisers_are_gone(self, named: Sequence[int]) -> bool:
        """True if who has raised is gone, after a traceback, or waits for the others' end to show its error.

        Args:
            named: who is said to have raised, though its error might be another one's consequence.
        """
        own = [m for m in self._members if m.note is not None and m.note.kind == OWN]
        raisers = (*own, *(self._members[at] for at in named))
        return not any(member.here and not member.shows for member in raisers)

    def beats(self, rank: int, beat: Beat, now: float) -> None:
        """A sign of life."""
        member = self._members[rank]
        if beat.count != member.beat.count:
            self._moved = now
        member.beat, member.heard = beat, now

    def notes(self, rank: int, note: Note, now: float) -> None:
        """A rank has an error."""
        member = self._members[rank]
        member.note, member.noted, member.heard = note, now, now
        self._noted.append(rank)

    def shows(self, rank: int) -> None:
        """Nobody has caught a rank's error, which is about to be shown."""
        self._members[rank].shows = True

    def leaves(self, rank: int) -> None:
        """A rank ends in good order."""
        self._members[rank].left = True

    def goes(self, rank: int, place: PhasePosition | None = None) -> None:
        """A rank's connection is closed; ``place`` is where it was, if that is known."""
        member = self._members[rank]
        member.here = False
        if place is not None:
            member.beat = replace(member.beat, place=place)
        if not member.left and member.note is None:
            self._lost.append(rank)

    def verdict(self, now: float) -> Verdict | None:
        """The verdict on who failed, if somebody did and it is clear who."""
        for rank in self._noted:
            if self._note_of(rank).kind == OWN:
                return self._raised(rank)
        if self._lost:
            return self._all_of("lost", self._lost)
        if self._noted and now - self._members[self._noted[0]].noted > PATIENCE:
            left = [rank for rank, member in enumerate(self._members) if member.left]
            return self._all_of("left", left) if left else self._raised(self._noted[0])
        return self._silent(now)

    def _note_of(self, rank: int) -> Note:
        note = self._members[rank].note
        assert note is not None
        return note

    def _raised(self, rank: int) -> Verdict:
        note = self._note_of(rank)
        line = f"{self._members[rank].name} raised {note.place}: {note.error}"
        if note.error.startswith(KeyboardInterrupt.__name__):
            line = f"{self._members[rank].name} was interrupted (Ctrl-C) {note.place}"
        return Verdict("raised", (rank,), line, note.traceback, note.is_shown)

    def _all_of(self, kind: str, ranks: Sequence[int]) -> Verdict:
        how = {"lost": "lost", "left": "ended, and others go on,"}[kind]
        said = [f"{self._members[r].name} {how} {self._members[r].beat.place}" for r in ranks]
        why = f": {UNSAID}" if kind == "lost" else _calls(self._members)
        return Verdict(kind, tuple(ranks), _listed(said) + why)

    def _silent(self, now: float) -> Verdict | None:
        """Ranks that are there: one that gives no sign of life, or all of them without progress."""
        members = {at: m for at, m in enumerate(self._members) if m.here and not m.left}
        for rank, member in members.items():
            if now - member.heard > SILENT:
                member.beat = self._look(rank, member.beat)
        frozen = {at: m for at, m in members.items() if _later(now - m.heard, m.beat.limit)}
        if frozen:
            said = [without_life(m.name, now - m.heard, m.beat.place) for m in frozen.values()]
            return Verdict("frozen", tuple(frozen), _listed(said))
        waited = now - self._moved
        if not members or not all(_later(waited, m.beat.limit) for m in members.values()):
            return None
        left = [rank for rank, member in enumerate(self._members) if member.left]
        return self._all_of("left", left) if left else _stuck(members, waited)


def without_life(name: str, seconds: float, place: PhasePosition) -> str:
    """The line about a frozen rank."""
    return f"{name} gave no sign of life for {seconds:.0f} s, {place}"


def _listed(said: Sequence[str]) -> str:
    """Of thousands of ranks, a line that can be read, and sent."""
    more = f"; and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
    return "; ".join(said[:SHOWN]) + more


def _later(seconds: float, limit: float | None) -> bool:
    return limit is not None and seconds > limit


def _stuck(members: dict[int, _Member], waited: float) -> Verdict:
    """Nobody goes on: whoever is behind the others is what they wait for, in all likelihood."""
    made = {rank: (*m.beat.place[:2], m.beat.since) for rank, m in members.items()}
    behind = {rank: m for rank, m in members.items() if made[rank] == min(made.values())}
    waiting = {rank for rank, m in behind.items() if _WAITS.search(m.beat.stack)}
    if len(waiting) < len(behind):
        behind = {rank: m for rank, m in behind.items() if rank not in waiting}
    shown = list(behind.values())[:SHOWN]
    which = "all of them" if len(behind) == len(members) else "first to stop"
    who = [f"{member.name} {member.beat.place}" for member in behind.values()]
    line = f"no rank made progress for {waited:.0f} s; {which}: {_listed(who)}"
    line += _calls(list(members.values()))
    stacks = [f"{member.name} is here:\n{member.beat.stack}" for member in shown]
    return Verdict("stuck", tuple(behind), line, "\n".join(stacks))


def _calls(members: Sequence[_Member]) -> str:
    """Behind a line: which call of which module each rank is in, if any is in one."""
    if not any(member.beat.within for member in members):
        return ""
    said = [f"{m.name} {m.beat.place}, in {m.beat.within or 'none'}" for m in members if not m.left]
    return f". Ranks have to call these modules together: {_listed(said)}"


# The end of a rank once another has failed: it says so last, and is gone, wherever its main thread is.


FOLDER = "LIGHTNING_CP_VERDICTS"
"""Names the folder where the process that has started workers looks for what they say."""

SPEAKING = 1.0
"""Seconds that a rank waits for another one that shows the verdict: launchers end all when one has ended."""

before_end: list[Callable[[], None]] = []
"""What a process has to do even if it ends like this: nothing else of its ending is done."""


def end(verdict: Verdict) -> NoReturn:
    """Say who failed, and end this process with status 1, also where it waits in a collective for ever.

    Args:
        verdict: without a line where another rank writes it to the same place.
    """
    details = verdict.details.rstrip() + "\n" if verdict.stands else ""
    say = partial(os.write, 2, _encoded(f"\n{details}{verdict.line}\n"))
    if verdict.is_shown and FOLDER not in os.environ and (meeting := Meeting.here()) is not None:
        say = partial(meeting.give_way, verdict.line)
    acts = [partial(tell_parent, verdict), sys.stdout.flush, say, *before_end]
    if not verdict.line:
        acts = [sys.stdout.flush, partial(time.sleep, SPEAKING), *before_end]
    elif verdict.stands and FOLDER in os.environ:
        acts.remove(say)  # the process that has started this one shows it
    try:
        for act in acts:
            with suppress(BaseException):  # whatever it is: this process ends
                act()
    finally:
        os._exit(1)


def output() -> str:
    """The file that standard error is, as the machine numbers it; nothing if it is closed."""
    try:
        found = os.fstat(2)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def tell_parent(verdict: Verdict) -> None:
    """Leave a note for the process that has started this one, if it waits for one."""
    if folder := os.environ.get(FOLDER):
        place = Path(folder) / f"{os.getpid()}"
        with suppress(OSError):
            part = place.with_suffix(".part")
            part.write_bytes(_encoded(f"{verdict.line}\n{verdict.details}"))
            part.rename(place)


def _encoded(text: str) -> bytes:
    """Whatever the locale, and whatever a name of a file has brought into an error."""
    return text.encode(errors="backslashreplace")
