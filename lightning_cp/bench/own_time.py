"""Which CPU time of a process is spent in named functions, and not in what they call of others.

A function that is watched under a name counts from its call to its return, without the time of watched
functions that it calls: they count under their own name, or under none.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class OwnTime:
    """Seconds by name, of the thread or process that ``clock`` counts."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = clock
        self._names: list[str | None] = []
        self._since = 0.0
        self._undo: list[Callable[[], None]] = []

    def watch(self, owner: Any, attribute: str, name: str | None) -> None:
        """Count calls of ``owner.attribute`` under a name; ``None``: under none.

        Args:
            owner: a module or a class; callers have to look the attribute up there.
            attribute: a function or method.
            name: what its own time counts as.
        """
        self.replace(owner, attribute, self.counted(getattr(owner, attribute), name))

    def replace(self, owner: Any, attribute: str, other: Any) -> None:
        """Put something in the place of an attribute, until :meth:`unwatch`."""
        missing = object()
        before = vars(owner).get(attribute, missing)

        def undo() -> None:
            delattr(owner, attribute) if before is missing else setattr(owner, attribute, before)

        setattr(owner, attribute, other)
        self._undo.append(undo)

    def counted(self, function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        """The function, counting."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.during(name):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def during(self, name: str | None) -> Iterator[None]:
        """A block that counts under a name."""
        self._charge()
        self._names.append(name)
        try:
            yield
        finally:
            self._charge()
            self._names.pop()

    def unwatch(self) -> None:
        """Every function as it was."""
        while self._undo:
            self._undo.pop()()

    def _charge(self) -> None:
        """What has passed since the last call or return, to who was running."""
        now = self._clock()
        if self._names and self._names[-1] is not None:
            self.seconds[self._names[-1]] += now - self._since
        self._since = now
