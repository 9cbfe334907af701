"""Batch that records if a step read the positions of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils import _pytree as pytree

POSITIONS, TARGETS = "position_ids", "shift_labels"
"""Names of the tensors that are added to a step's batch."""


class TrackedBatch(dict[Any, Any]):
    """Dict with the flag ``positions_read``, set by a lookup of the key or by an iteration over items.

    A step that passes everything on (``model(**batch)``) gives the model its positions, so that counts.
    """

    positions_read = False

    def __getitem__(self, key: Any) -> Any:
        self.positions_read |= key == POSITIONS
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        # Without this, `model(**batch)` would read a dict's content past these methods.
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


def _flatten(batch: TrackedBatch) -> tuple[list[Any], list[Any]]:
    return list(batch.values()), [key for key, _ in batch.items()]


def _unflatten(values: Any, keys: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))


# To torch's pytree a subclass of dict is a leaf, and a step that maps over its batch would break.
pytree.register_pytree_node(TrackedBatch, _flatten, _unflatten)
