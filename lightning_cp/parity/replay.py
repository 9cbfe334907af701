"""An iterator in another one's place: what was drawn comes again, as it came."""

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
class _Drawn:
    """A value of an iterator, as it came."""

    value: Any
    copy: Any
    moved: list[tuple[Any, Any, Any]]
    """Generators of random numbers that it was drawn from, and where they stood before and after."""

    def again(self) -> Any:
        """The same object, unless it has changed meanwhile; generators go where they would have gone."""
        for generator, before, after in self.moved:
            if is_same(state_of(generator), before):
                set_state(generator, after)
        return self.value if _is_equal(self.value, self.copy) else _copy_of(self.copy)


class Replay:
    """An iterator in another one's place, whose values can come again.

    Args:
        source: what it draws from.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._ahead: deque[_Drawn] = deque()
        self._drawn: list[_Drawn] | None = None
        self._generators: Iterable[Any] = ()
        self.is_ahead = False
        """The source has been drawn from while values were kept."""

    def begin(self, generators: Iterable[Any]) -> None:
        """Keep what is drawn from now on, and give copies, which a step may change.

        Args:
            generators: of random numbers, which are put back too.
        """
        self._drawn, self._generators = [], generators

    def rewind(self) -> None:
        """What was drawn since comes next."""
        drawn, self._drawn, self._generators = self._drawn or [], None, ()
        self._ahead.extendleft(reversed(drawn))

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        if self._drawn is None:
            return self._ahead.popleft().again() if self._ahead else next(self.source)
        if self._ahead:
            drawn = self._ahead.popleft()
            drawn.again()
        else:
            self.is_ahead = True
            drawn = self._draw()
        self._drawn.append(drawn)
        return _copy_of(drawn.copy)

    def _draw(self) -> _Drawn:
        before = [(x, state_of(x)) for x in (*shared(), *self._generators)]
        value = next(self.source)
        states = [(x, then, state_of(x)) for x, then in before]
        moved = [(x, then, now) for x, then, now in states if not is_same(then, now)]
        return _Drawn(value, _copy_of(value), moved)

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
"""Iterators that have a place in what they run over, and nothing else; the original is not drawn from."""


def stand_in_for(x: Iterator[Any]) -> Iterator[Any]:
    """A copy, or where there can be none, a ``Replay``."""
    if type(x) in _COPIED:
        with warnings.catch_warnings():  # Python 3.14 copies no iterators of itertools
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                return copy.copy(x)
            except TypeError:
                return Replay(x)
    return Replay(x)


def is_strided(x: torch.Tensor) -> bool:
    """True if a tensor can be compared: not sparse, not nested, and not only a shape."""
    return x.layout is torch.strided and not x.is_nested and not x.is_meta


def has_numbers(x: Any) -> bool:
    """True if a tensor or an array has numbers that can be copied and written."""
    if type(x) is np.ndarray:
        return not x.dtype.hasobject and x.flags.writeable
    if type(x) is not torch.Tensor or x.requires_grad:
        return False
    return is_strided(x)


def _copy_of(value: Any) -> Any:
    """The same containers, tensors and arrays in other memory; what is trained stays."""
    leaves, spec = pytree.tree_flatten(value)
    copies = [copy.deepcopy(x) if has_numbers(x) else x for x in leaves]
    return pytree.tree_unflatten(copies, spec)


def _is_equal(value: Any, of: Any) -> bool:
    """True if containers have the same objects, and equal numbers."""
    (leaves, spec), (others, other) = pytree.tree_flatten(value), pytree.tree_flatten(of)
    return spec == other and all(
        x is y or (has_numbers(x) and bool((x == y).all()))
        for x, y in zip(leaves, others, strict=True)
    )
