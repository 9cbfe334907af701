"""Leaving out the batches of a pass that were used before, without reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


@contextmanager
def skipping(loader: Any, count: int) -> Iterator[Callable[[], int]]:
    """Within the block, an iterator of the loader begins after ``count`` batches, if samples have an index.

    Yields:
        What skips them, and says how many it has skipped.
    """
    by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not count or not by_index:
        yield lambda: 0
        return
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    before = getattr(loader, name)
    skips = _Skips(before, count)
    object.__setattr__(loader, name, skips)  # a DataLoader refuses it once it is made
    try:
        yield skips.skip
    finally:
        object.__setattr__(loader, name, before)


class _Skips:
    """A sampler whose next pass, and only that one, leaves out what comes first."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count
        self._going: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._going is not None:
            return iter(self._sampler)
        self._going = iter(self._sampler)
        return self._after(self._going)

    def _after(self, indices: Iterator[Any]) -> Iterator[Any]:
        self.skip()
        yield from indices

    def skip(self) -> int:
        """Take the first ones, now or before; how many."""
        left, self._count, self._skipped = self._count, 0, getattr(self, "_skipped", 0)
        if left:
            assert self._going is not None
            self._skipped += sum(1 for _ in islice(self._going, left))
        return self._skipped
