"""Failure attribution: decides which rank failed, words the verdict and ends the process. No sockets,
no threads."""

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

from lightning_cp.error_display import ErrorElection
from lightning_cp.watchdog.messages import BROKEN, OWN, Heartbeat, Note, Verdict
from lightning_cp.watchdog.phase import PhasePosition

PATIENCE = 3.0
"""Seconds to wait for the original error, when the one that was reported looks like a consequence."""
_WAITS = re.compile(r"lightning_cp/comm/|torch/distributed/")
"""Matches the stack of a rank that waits in communication."""
SILENT_SECONDS = 2.0
"""Seconds without a heartbeat after which a rank's position file is read instead."""
NO_MESSAGE = "its process ended without a word; if it was killed for want of memory, dmesg says so"
"""Text for a rank whose process ended without a message."""
MAX_NAMED = 8
"""Maximum number of ranks that a line names."""


@dataclass
class _Member:
    """The last known state of a rank."""

    name: str
    beat: Heartbeat
    last_heard: float
    """Time of its last sign of life, in seconds."""
    note: Note | None = None
    noted_at: float = 0.0
    is_connected: bool = True
    has_left: bool = False
    """True if the rank reported that it ends."""
    shows_error: bool = False
    """True if its error has ended its program and waits for the others to be shown."""

    @property
    def is_informed(self) -> bool:
        """True if the rank does not wait: it ends, or handles an error of its own."""
        return self.has_left or (self.note is not None and self.note.kind != BROKEN)


class FailureAttribution:
    """Heartbeats and notes of all ranks, and the decision which of them failed.

    Args:
        names: names of the ranks, as in ``rank 2 (cp_rank 1 of 4, data_rank 0)``.
        now: the present time on the clock of all later calls, in seconds.
        look: returns a newer heartbeat for a silent rank, from its position file if that can be read.
    """

    def __init__(
        self,
        names: Sequence[str],
        now: float,
        look: Callable[[int, Heartbeat], Heartbeat] = lambda rank, beat: beat,
    ) -> None:
        self._refresh = look
        self._members = [_Member(name, Heartbeat(), now) for name in names]
        self._lost: list[int] = []
        self._noted: list[int] = []
        self._progressed = now  # time of the last progress of any rank

    @property
    def all_informed(self) -> bool:
        """True if no rank is left waiting."""
        return all(member.is_informed for member in self._members)

    def raisers_are_gone(self, named: Sequence[int]) -> bool:
        """True if the ranks that raised are gone, or wait to show their error last.

        Args:
            named: ranks of the verdict, though their error might be a consequence of another one's.
        """
        own = [m for m in self._members if m.note is not None and m.note.kind == OWN]
        raisers = (*own, *(self._members[at] for at in named))
        return not any(member.is_connected and not member.shows_error for member in raisers)

    def record_beat(self, rank: int, beat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        member = self._members[rank]
        if beat.count != member.beat.count:
            self._progressed = now
        member.beat, member.last_heard = beat, now

    def record_note(self, rank: int, note: Note, now: float) -> None:
        """Record a rank's error."""
        member = self._members[rank]
        member.note, member.noted_at, member.last_heard = note, now, now
        self._noted.append(rank)

    def record_shown(self, rank: int) -> None:
        """Record that a rank's error was not caught and is about to be shown."""
        self._members[rank].shows_error = True

    def record_leave(self, rank: int) -> None:
        """Record that a rank ends in good order."""
        self._members[rank].has_left = True

    def record_disconnect(self, rank: int, place: PhasePosition | None = None) -> None:
        """Record that a rank's connection is closed; ``place`` is its last position, if known."""
        member = self._members[rank]
        member.is_connected = False
        if place is not None:
            member.beat = replace(member.beat, place=place)
        if not member.has_left and member.note is None:
            self._lost.append(rank)

    def verdict(self, now: float) -> Verdict | None:
        """Return the verdict, if a rank failed and it is clear which one."""
        for rank in self._noted:
            if self._note_of(rank).kind == OWN:
                return self._raised(rank)
        if self._lost:
            return self._verdict_on("lost", self._lost)
        if self._noted and now - self._members[self._noted[0]].noted_at > PATIENCE:
            left = [rank for rank, member in enumerate(self._members) if member.has_left]
            return self._verdict_on("left", left) if left else self._raised(self._noted[0])
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

    def _verdict_on(self, kind: str, ranks: Sequence[int]) -> Verdict:
        how = {"lost": "lost", "left": "ended, while others still run,"}[kind]
        said = [f"{self._members[r].name} {how} {self._members[r].beat.place}" for r in ranks]
        why = f": {NO_MESSAGE}" if kind == "lost" else _module_calls(self._members)
        return Verdict(kind, tuple(ranks), _join_limited(said) + why)

    def _silent(self, now: float) -> Verdict | None:
        """Find a rank without heartbeats, or a standstill of all ranks."""
        members = {at: m for at, m in enumerate(self._members) if m.is_connected and not m.has_left}
        for rank, member in members.items():
            if now - member.last_heard > SILENT_SECONDS:
                member.beat = self._refresh(rank, member.beat)
        frozen = {at: m for at, m in members.items() if _exceeds(now - m.last_heard, m.beat.limit)}
        if frozen:
            said = [frozen_line(m.name, now - m.last_heard, m.beat) for m in frozen.values()]
            return Verdict("frozen", tuple(frozen), _join_limited(said))
        waited = now - self._progressed
        if not members or not all(_exceeds(waited, m.beat.limit) for m in members.values()):
            return None
        left = [rank for rank, member in enumerate(self._members) if member.has_left]
        return self._verdict_on("left", left) if left else _stuck(members, waited)


def frozen_line(name: str, seconds: float, beat: Heartbeat) -> str:
    """Return the line about a frozen rank."""
    line = f"{name} gave no sign of life for {seconds:.0f} s, {beat.place}"
    if beat.device is None or not beat.device.is_busy:
        return line
    return f"{line}; its device {beat.device.name} was {beat.device.place}"


def _join_limited(said: Sequence[str]) -> str:
    """Join the texts; name at most ``MAX_NAMED`` ranks, so that thousands still give a readable line."""
    more = f"; and {len(said) - MAX_NAMED} more" if len(said) > MAX_NAMED else ""
    return "; ".join(said[:MAX_NAMED]) + more


def _exceeds(seconds: float, limit: float | None) -> bool:
    return limit is not None and seconds > limit


def _stuck(members: dict[int, _Member], waited: float) -> Verdict:
    """Return the verdict for a standstill: the ranks that are behind the others are probably the cause."""
    made = {rank: m.beat.reached for rank, m in members.items()}
    behind = {rank: m for rank, m in members.items() if made[rank] == min(made.values())}
    least = min(map(_waits_for, behind.values()))
    behind = {rank: m for rank, m in behind.items() if _waits_for(m) == least}
    shown = list(behind.values())[:MAX_NAMED]
    which = "all of them" if len(behind) == len(members) else "first to stop"
    who = [_place_of(member) for member in behind.values()]
    line = f"no rank made progress for {waited:.0f} s; {which}: {_join_limited(who)}"
    line += _module_calls(list(members.values()))
    stacks = [f"{member.name} is here:\n{member.beat.stack}" for member in shown]
    return Verdict("stuck", tuple(behind), line, "\n".join(stacks))


def _waits_for(member: _Member) -> int:
    """Return 0 for a rank that waits for no other, 1 if its device may do so unseen, 2 if host or device do.

    A device that waits in a collective of PyTorch's own is as busy as one that computes.
    """
    device = member.beat.device
    if device is not None and device.is_busy:
        return 2 if device.waits else 1
    return 2 if _WAITS.search(member.beat.stack) else 0


def _place_of(member: _Member) -> str:
    """Return the place at which a rank stands; its device's, if that has more to do."""
    host, device = member.beat.place, member.beat.device
    if device is None or not device.is_busy:
        return f"{member.name} {host}"
    does = "waits for other ranks" if device.waits else "stands still"
    return f"{member.name}, whose device {device.name} {does} {device.place} (its host is {host})"


def _module_calls(members: Sequence[_Member]) -> str:
    """Return which call of which module each rank is in, to append to a line; empty if none is in one."""
    if not any(member.beat.module_call for member in members):
        return ""
    said = [
        f"{m.name} {m.beat.place}, in {m.beat.module_call or 'none of them'}"
        for m in members
        if not m.has_left
    ]
    return f". Ranks have to call these modules together: {_join_limited(said)}"


# The end of a rank after another one's failure: it prints the verdict and exits, wherever its main thread
# is.


FOLDER = "LIGHTNING_CP_VERDICTS"
"""Environment variable: the folder where the process that started workers looks for their verdicts."""

VERDICT_WAIT = 1.0
"""Seconds that a rank waits for the rank that prints the verdict: launchers end all once one has ended."""

exit_actions: list[Callable[[], None]] = []
"""Calls to make before ``os._exit``, which skips all other handlers."""


def end_process(verdict: Verdict) -> NoReturn:
    """Print the verdict and exit with status 1, even if the main thread is blocked in a collective.

    Args:
        verdict: its line is empty where another rank prints it to the same place.
    """
    details = verdict.details.rstrip() + "\n" if verdict.is_standstill else ""
    say = partial(os.write, 2, _encoded(f"\n{details}{verdict.line}\n"))
    if (
        verdict.is_shown
        and FOLDER not in os.environ
        and (election := ErrorElection.here()) is not None
    ):
        say = partial(election.give_way, verdict.line)
    acts = [partial(report_to_parent, verdict), sys.stdout.flush, say, *exit_actions]
    if not verdict.line:
        acts = [sys.stdout.flush, partial(time.sleep, VERDICT_WAIT), *exit_actions]
    elif verdict.is_standstill and FOLDER in os.environ:
        acts.remove(say)  # the parent process shows it
    try:
        for act in acts:
            with suppress(BaseException):  # the process ends in any case
                act()
    finally:
        os._exit(1)


def stderr_identity() -> str:
    """Return the device and inode of standard error; empty if it is closed."""
    try:
        found = os.fstat(2)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def report_to_parent(verdict: Verdict) -> None:
    """Write the verdict to a file for the parent process, if it asked for one."""
    if folder := os.environ.get(FOLDER):
        place = Path(folder) / f"{os.getpid()}"
        with suppress(OSError):
            part = place.with_suffix(".part")
            part.write_bytes(_encoded(f"{verdict.line}\n{verdict.details}"))
            part.rename(place)


def _encoded(text: str) -> bytes:
    """Encode as UTF-8 whatever the locale; undecodable bytes of file names are escaped."""
    return text.encode(errors="backslashreplace")
