"""Methods replaced on an object of somebody else's, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replaced:
    """Remembers what was replaced, and what was there: a user may have replaced it before, or since."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Callable[..., Any]]] = []

    def replace(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Put ``make(the method that is there)`` in its place, on this object only."""
        ours = make(getattr(owner, name))
        self._done.append((owner, name, owner.__dict__.get(name), ours))
        object.__setattr__(owner, name, ours)

    def undo(self) -> None:
        """Give back everything that nobody else has replaced since."""
        while self._done:
            owner, name, before, ours = self._done.pop()
            if owner.__dict__.get(name) is not ours:
                continue
            if before is None:
                del owner.__dict__[name]
            else:
                object.__setattr__(owner, name, before)
