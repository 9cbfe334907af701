"""What the ranks of one case did, and the failure that shows it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["returned", "raised", "running", "died"]


@dataclass(frozen=True)
class RankReport:
    """How one rank ended a case.

    Args:
        rank: its rank.
        status: ``running`` if it had to be killed, ``died`` if its process was gone.
        value: what it returned.
        error: what it raised; ``None`` too if the exception could not be pickled.
        headline: one line: the exception, the exit status, or how long it had been running.
        trace: the exception's traceback, or the stacks of a rank that was still running.
        stderr: the end of what it wrote to stdout and stderr during the case.
    """

    rank: int
    status: Status
    value: Any = None
    error: BaseException | None = None
    headline: str = ""
    trace: str = ""
    stderr: str = ""


class RankError(Exception):
    """At least one rank did not return. ``reports`` has one entry per rank."""

    def __init__(self, what: str, reports: Sequence[RankReport]) -> None:
        self.reports = list(reports)
        super().__init__(_message(what, self.reports))

    @property
    def errors(self) -> dict[int, BaseException]:
        """The exceptions, by the ranks that raised them."""
        return {report.rank: report.error for report in self.reports if report.error is not None}

    @property
    def stuck(self) -> list[int]:
        """Ranks that were still running when the case was given up."""
        return [report.rank for report in self.reports if report.status == "running"]

    @property
    def died(self) -> list[int]:
        """Ranks whose process ended during the case."""
        return [report.rank for report in self.reports if report.status == "died"]


def _message(what: str, reports: Sequence[RankReport]) -> str:
    failed = sum(report.status != "returned" for report in reports)
    parts = [f"{failed} of {len(reports)} ranks did not return from {what}"]
    alike: dict[tuple[str, ...], list[int]] = {}
    for report in sorted(reports, key=lambda report: _CAUSES_FIRST.index(report.status)):
        alike.setdefault(_content(report), []).append(report.rank)
    for (status, headline, trace, stderr), ranks in alike.items():
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        verb = "still running" if status == "running" else status
        parts.append(f"--- {names} {verb}{': ' + headline if headline else ''}")
        if trace:
            parts.append(textwrap.indent(trace.rstrip(), "    "))
        if stderr:
            parts.append(f"    end of the output of {names}:")
            parts.append(textwrap.indent(stderr.rstrip(), "    | "))
    return "\n".join(parts)


_CAUSES_FIRST: tuple[Status, ...] = ("died", "raised", "running", "returned")
"""A rank that waits for one that failed is a consequence."""


def _content(report: RankReport) -> tuple[str, str, str, str]:
    """What is printed of a report; the output of a rank that returned explains nothing."""
    stderr = "" if report.status == "returned" else report.stderr
    return (report.status, report.headline, report.trace, stderr)
