"""A line of the report: its name, its check, and the place where it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """The ranks of a check."""

    device_type: str
    """``cuda``, or ``cpu`` for a rehearsal."""
    count: int
    folder: Path
    """For files that ranks share."""

    @property
    def accelerator(self) -> str:
        """Lightning's name of the devices."""
        return "gpu" if self.device_type == "cuda" else "cpu"

    @property
    def rehearses(self) -> bool:
        """True on CPU: sizes are small."""
        return self.device_type == "cpu"


class WrongResultError(AssertionError):
    """A check found another result than it has to be."""


@dataclass(frozen=True)
class Line:
    """One check."""

    name: str
    run: Callable[[Place], str]
    """Called on every rank, in the process group of all; returns the figure of the verdict, or raises."""
    on_ranks: bool = True
    """``False``: called once, in a process without a group, and starts its own ranks."""
    is_short: bool = False
    """Part of the short rehearsal, which has a line of each kind."""


def check_error(what: str, error: float, limit: float) -> None:
    """Check that an error is within its limit; NaN is not.

    Raises:
        WrongResultError: it is not.
    """
    if not error <= limit:
        raise WrongResultError(f"{what} is off by {error:.3g}, and {limit:.3g} is allowed")
