"""Checks that each rank makes of its own tokens: what one finds, all are told before they wait for it.

A check costs a message, unless another one is to come anyway. Two kinds can go along with a later one: a
check that is followed by another before ranks do anything together, and what is found while a step is
``gathering``, at the end of which ranks agree on everything, before a weight is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

from lightning_cp.comm.agreement import agree
from lightning_cp.mesh import ContextParallelMesh, Flat

T = TypeVar("T")


@dataclass
class Waiting:
    """Checks whose outcome the other ranks were not told yet."""

    names: list[str] = field(default_factory=list)
    error: Exception | None = None
    """What the first of them raised that failed."""
    before_data: bool = False
    """They have to be told before ranks exchange anything else."""


class Checks:
    """Those of one model, within one step."""

    def __init__(self, mesh: ContextParallelMesh) -> None:
        self._mesh = mesh
        self._gathers = False
        self._waiting = Waiting()
        self._refused: Exception | None = None

    def agreed(self, what: str, check: Callable[[], T], *, more_follow: bool = False) -> T:
        """Run a check that this rank's own tokens decide; every rank of the cp group must come here.

        Args:
            what: what is checked, the same on every rank.
            check: raises if something is wrong.
            more_follow: ranks come to another check before anything else that they do together, so that
                this one's success is told with it. A failure is told at once.

        Raises:
            Exception: its own, if the check raised here.
            RankFailure: it raised on another rank.
            BatchMismatchError: another rank is at another check.
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
            self.tell(error)
        return cast(T, result)

    def noted(self, what: str, check: Callable[[], None]) -> None:
        """As ``agreed``; while ``gathering`` the step goes on, and what was found is told at its end.

        A rank must not leave the step alone: what follows in it may be something that ranks do together.
        """
        if not self._gathers:
            self.agreed(what, check)
            return
        self._waiting.names.append(what)
        try:
            check()
        except Exception as refused:
            self._waiting.error = self._waiting.error or refused

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """A block at whose end ranks agree, also on what ``take`` and ``take_refused`` give."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False

    def before_data(self) -> None:
        """Ranks are about to exchange something else."""
        if self._waiting.before_data:
            self.tell()

    def tell(self, error: Exception | None = None) -> None:
        """Tell all ranks of the cp group which checks passed here, or why one did not; if there are any."""
        waiting = self.take()
        error = waiting.error or error
        try:
            if waiting.names and self._mesh.sample_size > 1:
                facts = {", ".join(waiting.names): 0}
                agree(facts, self._mesh.control_group(Flat.CP), what="step", error=error)
            if error is not None:
                raise error
        except Exception as refused:
            if self._gathers:  # nobody else takes it, and it keeps all frames of the step alive
                self._refused = refused
            raise

    def take(self) -> Waiting:
        """Findings that the caller has to tell now."""
        taken, self._waiting = self._waiting, Waiting()
        return taken

    def take_refused(self) -> Exception | None:
        """The error of this rank when all ranks of the cp group knew that the step had failed."""
        refused, self._refused = self._refused, None
        return refused

    def drop(self) -> None:
        """The step is over, or failed."""
        self._waiting, self._refused = Waiting(), None
