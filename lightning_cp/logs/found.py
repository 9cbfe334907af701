"""What ranks tell each other at the end of a step: what was logged, and what was found on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_cp.comm.agreement import fingerprint, gathered_lists, require_equal, tell
from lightning_cp.comm.vote import tally
from lightning_cp.mesh import ContextParallelMesh, Flat


@dataclass(frozen=True)
class Found:
    """What was found in a step so far, that ranks have to be told."""

    checks: Sequence[str] = ()
    """Their names."""
    error: Exception | None = None
    """Why one of them failed."""
    need_gradients: Sequence[bool] = ()
    """Of each attention call: whether backward will come through it."""
    compared: Callable[[], None] = lambda: None
    """Called where the ranks that share a sample have the same ``need_gradients``."""


class Ranks(Protocol):
    """What is needed of the strategy's core."""

    @property
    def mesh(self) -> ContextParallelMesh: ...
    @property
    def shares(self) -> list[float]: ...
    def take_found(self) -> Found: ...
    def gathering(self) -> AbstractContextManager[None]: ...


def agree_on_calls(own: list[Any], ranks: Ranks, flat: Flat) -> list[list[Any]]:
    """Every rank's list of calls; with it they are told what was found in the step.

    Raises:
        RankFailure: a check failed on another rank; the rank itself raises its own error.
        BatchMismatchError: ranks are at different calls, or have made different checks.
    """
    mesh, step = ranks.mesh, ranks.take_found()
    group, error = mesh.control_group(flat), step.error
    part = 0 if flat is Flat.CP else mesh.data_rank
    own_facts = (step.checks, step.need_gradients)
    place = (part, mesh.cp_size)
    votes = tally(("log", own), group, dissents=error is not None, of=place, own=own_facts)
    if votes is not None:
        step.compared()
        return [own] * group.size()
    marks = {"calls of log": fingerprint(own), "checks": fingerprint(step.checks)}
    marks["gradients"] = fingerprint(step.need_gradients)
    texts = {"checks": ", ".join(step.checks) or "none"}
    table = tell(marks, group, what="step", error=error)
    for first in range(0, len(table), mesh.cp_size):
        of_group = table[first : first + mesh.cp_size]
        checks = [{"checks": row["checks"]} for row in table]
        of = range(first, first + mesh.cp_size)
        require_equal(checks, of, group, what="step", texts=texts, remedy=_CALL_ALL)
        if first == part * mesh.cp_size and len({row["gradients"] for row in of_group}) == 1:
            step.compared()
    if len({row["calls of log"] for row in table}) == 1:
        return [own] * group.size()
    return gathered_lists(own, group)


_CALL_ALL = "Models are called by all of them or by none: let no rank's own tokens decide that."
