"""Batches and the positions of their tokens: one that knows whether they were taken, one that makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

POSITIONS = "position_ids"


class NotedBatch(dict[Any, Any]):
    """A dict like the one that a step would get, and ``positions_read``.

    Looking for one key counts, and so does going through all of them by name: a step that passes
    everything on (``model(**batch)``) gives the model its positions.
    """

    positions_read = False

    def __getitem__(self, key: Any) -> Any:
        self.positions_read |= key == POSITIONS
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        # Without this, `model(**batch)` would take what is inside a dict without asking it.
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        self.positions_read |= key == POSITIONS
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self.positions_read |= key == POSITIONS
        return super().pop(key, *default)

    def items(self) -> Any:
        self.positions_read = True
        return super().items()


class UnsharedBatch(dict[Any, Any]):
    """A batch that no other rank shares: what it was, and positions for a step that asks for them by name.

    A step that reads ``batch["position_ids"]`` runs on one device, too. ``model(**batch)`` passes on what the
    dataset gave and no more, because a model may have a way of its own to count from there.
    """

    positions: Callable[[], torch.Tensor | None]
    """None where it cannot be said what the sequence is."""

    def __missing__(self, key: Any) -> Any:
        made = self.positions() if key == POSITIONS else None
        if made is None:
            raise KeyError(key)
        return made

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def pop(self, key: Any, *default: Any) -> Any:
        made = None if key in self or key != POSITIONS else self.positions()
        return super().pop(key, *default) if made is None else made


def _flatten(batch: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    return list(batch.values()), [key for key, _ in batch.items()]


def _unflatten(values: Any, keys: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))


# To torch's pytree a subclass of dict is a leaf, and a step that maps over its batch would break.
for kind in (NotedBatch, UnsharedBatch):
    pytree.register_pytree_node(kind, _flatten, _unflatten)
