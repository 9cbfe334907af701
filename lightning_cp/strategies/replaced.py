"""Methods replaced on an object of somebody else's, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_cp.module_hooks import replace_method


class Replaced:
    """Remembers what was replaced, and what was there: a user may have replaced it before, or since."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Put ``make(the method that is there)`` in its place, on this object only."""
        self._undo.append(replace_method(owner, name, make(getattr(owner, name))))

    def undo(self) -> None:
        """Give back everything that nobody else has replaced since."""
        while self._undo:
            self._undo.pop()()
