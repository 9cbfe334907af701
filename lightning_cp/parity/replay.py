"""A substitute for an iterator that can return the values again that were drawn from it."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from lightning_cp.loaders.rng import is_same, set_state, shared, state_of


@dataclass
class _ReplayedValue:
    """A value of an iterator, with a copy."""

    value: Any
    copy: Any
    generators: list[tuple[Any, Any, Any]]
    """Random generators that the value was drawn from, with their states before and after."""

    def replay(self) -> Any:
        """The same object, unless it has changed meanwhile; generators advance as they did."""
        for generator, before, after in self.generators:
            if is_same(state_of(generator), before):
                set_state(generator, after)
        return self.value if _is_equal(self.value, self.copy) else _copy_of(self.copy)


class Replay:
    """A substitute for an iterator, whose values can be drawn again.

    Args:
        source: the iterator.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._ahead: deque[_ReplayedValue] = deque()
        self._drawn: list[_ReplayedValue] | None = None
        self._generators: Iterable[Any] = ()
        self.is_ahead = False
        """True if the source was drawn from while values were recorded."""

    def begin(self, generators: Iterable[Any]) -> None:
        """Record values from now on, and return copies, which a step may change.

        Args:
            generators: random generators, which are restored too.
        """
        self._drawn, self._generators = [], generators

    def rewind(self) -> None:
        """Return the recorded values next."""
        drawn, self._drawn, self._generators = self._drawn or [], None, ()
        self._ahead.extendleft(reversed(drawn))

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        if self._drawn is None:
            return self._ahead.popleft().replay() if self._ahead else next(self.source)
        if self._ahead:
            drawn = self._ahead.popleft()
            drawn.replay()
        else:
            self.is_ahead = True
            drawn = self._draw()
        self._drawn.append(drawn)
        return _copy_of(drawn.copy)

    def _draw(self) -> _ReplayedValue:
        before = [(x, state_of(x)) for x in (*shared(), *self._generators)]
        value = next(self.source)
        states = [(x, then, state_of(x)) for x, then in before]
        generators = [(x, then, now) for x, then, now in states if not is_same(then, now)]
        return _ReplayedValue(value, _copy_of(value), generators)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)


_COPIED = {
    *(type(iter(x)) for x in ([], (), range(0), range(2**65), "", "é", b"", bytearray())),
    *(type(reversed([])), type(reversed(range(0))), itertools.count, itertools.repeat),
    type(itertools.tee([], 1)[0]),
}
"""Iterators whose only state is a position; the copy is used, and the original is not drawn from."""


def replayable(x: Iterator[Any]) -> Iterator[Any]:
    """A copy of the iterator, or a ``Replay`` if it cannot be copied."""
    if type(x) in _COPIED:
        with warnings.catch_warnings():  # Python 3.14 cannot copy iterators of itertools
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                return copy.copy(x)
            except TypeError:
                return Replay(x)
    return Replay(x)


def is_strided(x: torch.Tensor) -> bool:
    """True if a tensor can be compared: not sparse, not nested, and not on the meta device."""
    return x.layout is torch.strided and not x.is_nested and not x.is_meta


def has_numbers(x: Any) -> bool:
    """True if a tensor or an array has values that can be copied and written."""
    if type(x) is np.ndarray:
        return not x.dtype.hasobject and x.flags.writeable
    if type(x) is not torch.Tensor or x.requires_grad:
        return False
    return is_strided(x)


def _copy_of(value: Any) -> Any:
    """The same containers with copied tensors and arrays; trained parameters are not copied."""
    leaves, spec = pytree.tree_flatten(value)
    copies = [copy.deepcopy(x) if has_numbers(x) else x for x in leaves]
    return pytree.tree_unflatten(copies, spec)


def _is_equal(value: Any, of: Any) -> bool:
    """True if containers hold the same objects, and equal values."""
    (leaves, spec), (others, other) = pytree.tree_flatten(value), pytree.tree_flatten(of)
    return spec == other and all(
        x is y or (has_numbers(x) and bool((x == y).all()))
        for x, y in zip(leaves, others, strict=True)
    )
