"""Replacements in a model from the beginning of a step to its end, attention aside."""

from __future__ import annotations

from collections.abc import Callable

Patch = Callable[[], Callable[[], None]]
"""Replaces something; returns what puts it back."""


class StepPatches:
    """Enters all patches when a step begins, and leaves them in reverse order when it ends."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._leave: list[Callable[[], None]] = []
        self._reports: list[Callable[[], str | None]] = []

    def add(self, patch: Patch, report: Callable[[], str | None] | None = None) -> None:
        """One patch more; ``report`` says what came of it in a step, to be told once."""
        self._patches.append(patch)
        if report is not None:
            self._reports.append(report)

    def begin(self) -> None:
        """A step begins; the one before it ends, if nobody said so."""
        self.end()
        for enter in self._patches:
            self._leave.append(enter())

    def end(self) -> None:
        """The model is as it was."""
        while self._leave:
            self._leave.pop()()

    def told(self) -> list[str]:
        """Lines about the step that ends now, each kind once."""
        said = [(report, line) for report in self._reports if (line := report()) is not None]
        for report, _ in said:
            self._reports.remove(report)
        return [line for _, line in said]
