"""The unloaded entries of a checkpoint, which are read on first use."""

from __future__ import annotations

import os
from collections.abc import ItemsView, Iterable, Iterator, ValuesView
from typing import Any, Self

from lightning_cp.checkpoint.atomic import display_path
from lightning_cp.checkpoint.manifest import read_manifest
from lightning_cp.checkpoint.read import Checkpoint, map_stored
from lightning_cp.errors import CheckpointError

_UNREAD = object()
"""Marks a value that was not read yet."""


class LazyEntries(dict[Any, Any]):
    """Some entries of a checkpoint's top level; this rank reads those with tensors on first use.

    A whole model or optimizer that is not used need not fit into memory. It is a dictionary, as Fabric
    documents for a load, so all methods of ``dict`` that bypass ``__getitem__`` are overridden. Pickles and
    copies by the module ``copy`` are plain dictionaries of values.
    """

    _opened: Checkpoint | None = None

    @classmethod
    def of(cls, opened: Checkpoint, keys: Iterable[Any]) -> Self:
        """Entries of an opened checkpoint.

        Args:
            opened: the checkpoint.
            keys: of its top level.
        """
        made = cls(dict.fromkeys(keys, _UNREAD))
        made._opened = opened.for_this_rank()
        at_once = [key for key in made if not _has_tensors(opened.tree[key])]
        made.update(made._opened.read(keys=at_once))
        return made

    def __getitem__(self, key: Any) -> Any:
        """The value, with whole tensors.

        Raises:
            KeyError: unknown key.
            CheckpointError: it can no longer be read.
        """
        value = super().__getitem__(key)
        if value is _UNREAD:
            assert self._opened is not None
            _check_unchanged(self._opened, key)
            value = self._opened.read(keys=[key])[key]
            self[key] = value
        return value

    def __iter__(self) -> Iterator[Any]:
        """As in any dictionary; without this override ``dict(rest)`` would bypass ``__getitem__``."""
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        """The value, or ``default`` if there is none."""
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The value; if there is none, ``default``, which is stored."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove a key and return its value."""
        if key in self:
            self[key]  # read it first
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        """Remove the last entry and return it."""
        for key in reversed(self):
            return key, self.pop(key)
        raise KeyError("there is nothing left")

    def items(self) -> Any:
        """A view that reads each value when it is reached."""
        return ItemsView(self)

    def values(self) -> Any:
        """A view that reads each value when it is reached."""
        return ValuesView(self)

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return dict(self) != other

    def copy(self) -> Self:
        """Another object with the same entries, which reads separately."""
        made = type(self)()
        made._opened = self._opened
        dict.update(made, dict.items(self))
        return made

    def __or__(self, other: Any) -> Any:
        if not isinstance(other, dict):
            return NotImplemented
        made = self.copy()
        made.update(other)
        return made

    def __ror__(self, other: Any) -> Any:
        return {**other, **self} if isinstance(other, dict) else NotImplemented

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        where = f"{display_path(self._opened.path)}: " if self._opened is not None else ""
        return f"LazyEntries({where}{', '.join(map(str, self))})"


def _has_tensors(tree: Any) -> bool:
    found: list[Any] = []
    map_stored(tree, lambda place, leaf: found.append(place))
    return bool(found)


def _check_unchanged(opened: Checkpoint, key: Any) -> None:
    """Check that a folder was not replaced or deleted; a file stays open since the start."""
    if opened.manifest is None or opened.manifest.form != "sharded":
        return
    is_there = os.path.lexists(opened.path)
    if opened.path.is_dir() and read_manifest(opened.path).save == opened.manifest.save:
        return
    raise CheckpointError(
        f"{display_path(opened.path)} was {'replaced' if is_there else 'removed'} after it was opened, so "
        f"{key!r} "
        "cannot be read any more. Load it again, and name in the state what is needed of it."
    )
