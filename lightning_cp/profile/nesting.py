"""Which range a moment lies in: ranges of one thread contain each other or follow each other."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """Something that lasts."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def thread(self) -> int: ...


R = TypeVar("R", bound=Timed)


class Nesting(Generic[R]):
    """Ranges of some threads, and how they lie within each other."""

    def __init__(self, ranges: Iterable[R]) -> None:
        self._threads: dict[int, list[R]] = defaultdict(list)
        self._parents: dict[int, list[int | None]] = defaultdict(list)
        for r in sorted(ranges, key=lambda r: (r.start, -r.end)):
            self._add(r)
        self._starts = {thread: [r.start for r in of] for thread, of in self._threads.items()}

    def _add(self, r: R) -> None:
        of, parents = self._threads[r.thread], self._parents[r.thread]
        parent = len(of) - 1 if of else None
        while parent is not None and of[parent].end < r.end:
            parent = parents[parent]
        of.append(r)
        parents.append(parent)

    def at(self, thread: int, moment: float) -> R | None:
        """The innermost range around a moment of a thread."""
        of = self._threads.get(thread, [])
        at: int | None = bisect_right(self._starts.get(thread, []), moment) - 1
        if at == -1:
            return None
        while at is not None and of[at].end < moment:
            at = self._parents[thread][at]
        return None if at is None else of[at]

    def with_children(self) -> list[tuple[R, list[R]]]:
        """Every range, with those directly inside it."""
        found: list[tuple[R, list[R]]] = []
        for thread, of in self._threads.items():
            pairs: list[tuple[R, list[R]]] = [(r, []) for r in of]
            for r, parent in zip(of, self._parents[thread], strict=True):
                if parent is not None:
                    pairs[parent][1].append(r)
            found += pairs
        return found
