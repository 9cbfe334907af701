"""What is replaced in a model from the beginning of a step to its end, attention aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Patch = Callable[[], Callable[[], None]]
"""Replaces something; returns what puts it back."""


class StepPatches:
    """Enters all patches when a step begins, and leaves them in reverse order when it ends."""

    def __init__(self, patches: Sequence[Patch] = ()) -> None:
        self._patches = patches
        self._leave: list[Callable[[], None]] = []

    def begin(self) -> None:
        """A step begins; the one before it ends, if nobody said so."""
        self.end()
        for enter in self._patches:
            self._leave.append(enter())

    def end(self) -> None:
        """The model is as it was."""
        while self._leave:
            self._leave.pop()()
