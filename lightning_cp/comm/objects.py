"""Small objects of every rank for all ranks, and work that all of them do or none has done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_cp.errors import without_home

T = TypeVar("T")

_LONGEST = 2000
"""Characters of another rank's message: enough to name what failed, and no more."""


class World:
    """All ranks of the run; one process alone is a world too."""

    def __init__(self) -> None:
        alone = not (dist.is_available() and dist.is_initialized())
        self.size = 1 if alone else dist.get_world_size()
        self.rank = 0 if alone else dist.get_rank()

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, action: Callable[[], T], failure: Callable[[str], Exception]) -> list[T]:
        """Do something on every rank and exchange the results; an error on one is an error on all.

        Args:
            action: makes this rank's result; does not communicate.
            failure: makes what the other ranks raise, of ``rank 2: OSError: ...``.

        Raises:
            Exception: on the rank where ``action`` failed its own error, on the others ``failure``'s.
        """
        mine, error = None, None
        try:
            mine = action()
        except Exception as raised:
            error = raised
        every = self.gather((mine, None if error is None else told(error)))
        if error is not None:
            raise error
        failed = [
            f"rank {rank}: {said}" for rank, (_, said) in enumerate(every) if said is not None
        ]
        if failed:
            more = f" (and on {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
            raise failure(failed[0] + more)
        return [result for result, _ in every]  # type: ignore[misc]


def told(error: BaseException) -> str:
    """An error as other ranks and reports are told it: not long, and without the paths of one machine."""
    return _of_the_system(error) or told_by_name(error)


def told_by_name(error: BaseException) -> str:
    """The same with the error's class, also where the system's own words would do."""
    said = _of_the_system(error) or str(error)
    return without_home(f"{type(error).__name__}: {said}")[:_LONGEST]


def _of_the_system(error: BaseException) -> str:
    """The system's message about a file; empty for other errors."""
    if not isinstance(error, OSError) or error.errno is None:
        return ""
    name = Path(str(error.filename)).name if error.filename else ""
    hidden = not name or name.startswith(".")  # what is staged, whose name says nothing
    return f"{error.strerror}{'' if hidden else f' ({name})'}"
