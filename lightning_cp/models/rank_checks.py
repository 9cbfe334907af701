"""Checks that each rank makes of its own tokens within a step, and whose failure every rank learns of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

from lightning_cp.comm.consensus import Facts, check_equal
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh

T = TypeVar("T")


@dataclass
class PendingChecks:
    """Checks whose outcome the other ranks do not know yet."""

    names: list[str] = field(default_factory=list)
    error: Exception | None = None
    """Error of the first check that failed."""
    before_data: bool = False
    """Ranks must exchange the outcome before any other data."""


class RankChecks:
    """Checks that each rank makes of its own tokens, within one step; every rank learns of a failure.

    Sending an outcome costs one message. Two kinds of outcome travel with a later message instead: that of a
    check which another check follows before any other collective, and that of a check within ``deferring``,
    at the end of which ranks agree on everything, before a weight changes.
    """

    def __init__(self, mesh: ContextParallelMesh) -> None:
        self._mesh = mesh
        self._defers = False
        self._waiting = PendingChecks()
        self._error: Exception | None = None

    def run(
        self,
        what: str,
        check: Callable[[], T],
        *,
        more_follow: bool = False,
        facts: Callable[[T], Facts] = lambda _: {},
        remedy: str | None = None,
    ) -> T:
        """Run a check that depends on this rank's tokens; every rank of the cp group must call this.

        Args:
            what: name of the check, the same on every rank.
            check: raises if something is wrong.
            more_follow: ranks run another check before their next collective, so the success of this one
                is sent with that. A failure is sent at once.
            facts: of the check's result, which ranks compare in the same message; not with ``more_follow``.
            remedy: the fix of facts that differ, for the message.

        Raises:
            Exception: the check's error, if it failed on this rank.
            RankFailure: the check failed on another rank.
            BatchMismatchError: another rank runs another check, or a fact differs.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = check()
        except Exception as refused:  # any: a rank that raised alone would leave the others waiting
            error = refused
        self._waiting.names.append(what)
        self._waiting.before_data = more_follow
        if error is not None or not more_follow:
            self.flush(error, {} if error is not None else facts(cast(T, result)), remedy)
        return cast(T, result)

    def run_deferred(self, what: str, check: Callable[[], None]) -> None:
        """Run a check as ``run`` does; within ``deferring`` an error is raised at the end of the step.

        A rank must not leave the step alone: a collective may follow in it.
        """
        if not self._defers:
            self.run(what, check)
            return
        self._waiting.names.append(what)
        try:
            check()
        except Exception as refused:
            self._waiting.error = self._waiting.error or refused

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defer outcomes of checks; at the end of the block ranks agree on ``pop`` and ``pop_error`` too."""
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def flush_before_data(self) -> None:
        """Send the outcomes that must precede the next collective."""
        if self._waiting.before_data:
            self.flush()

    def flush(
        self, error: Exception | None = None, facts: Facts | None = None, remedy: str | None = None
    ) -> None:
        """Send the pending outcomes to all ranks of the cp group; raise the error of a failed check."""
        waiting = self.pop()
        error = waiting.error or error
        try:
            if waiting.names and self._mesh.sample_size > 1:
                group, what = self._mesh.control_group(Flat.CP), ", ".join(waiting.names)
                check_equal(facts or {}, group, what=what, error=error, remedy=remedy)
            if error is not None:
                raise error
        except Exception as refused:
            if (
                self._defers
            ):  # kept for ``pop_error``; the caller must pop it, since it keeps frames alive
                self._error = refused
            raise

    def pop(self) -> PendingChecks:
        """Remove and return the pending checks, whose outcome the caller sends."""
        taken, self._waiting = self._waiting, PendingChecks()
        return taken

    def pop_error(self) -> Exception | None:
        """Remove and return this rank's error of a step whose failure all ranks of the cp group know."""
        refused, self._error = self._error, None
        return refused

    def clear(self) -> None:
        """Forget all outcomes, when a step ends or fails."""
        self._waiting, self._error = PendingChecks(), None
