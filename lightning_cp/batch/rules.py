"""Rules for reading batches: names that run along the sequence, their padding, and reads of positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils import _pytree as pytree

from lightning_cp.utils.labels import IGNORED_LABEL

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


KNOWN_DIMS: dict[str, int] = {
    "input_ids": 1,
    "labels": 1,
    "shift_labels": 1,
    "attention_mask": 1,
    "token_type_ids": 1,
    "position_ids": -1,
    "inputs_embeds": 1,
    "segment_ids": -1,
    "seq_idx": -1,
    "logits": 1,
    "last_hidden_state": 1,
    "hidden_states": 1,
}
"""Sequence dimensions of the names that Hugging Face models use."""

PAD_VALUES = {
    "labels": IGNORED_LABEL,
    "shift_labels": IGNORED_LABEL,
    "segment_ids": -1,
    "seq_idx": -1,
}


@dataclass(frozen=True)
class BatchRules:
    """Rules for reading the batches of one run.

    Args:
        sequence_dims: dotted name of a tensor -> its sequence dimension, ``None`` to replicate it.
        label_key: dotted name of the labels.
        labels: ``shift`` (a token's target is the next token's label), ``aligned`` (already shifted) or
            ``ignore`` (the step needs none).
        padding: pad sequences that do not divide.
        reads_masks: the model reads padding masks and restarting positions (Hugging Face models do), so
            documents are read from them.
    """

    sequence_dims: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    label_key: str = "labels"
    labels: str = "ignore"
    padding: bool = True
    reads_masks: bool = False

    @property
    def without_targets(self) -> BatchRules:
        """The same rules for a step that needs no targets of tokens; labels of rows stay labels of rows."""
        return self if self.labels == "none" else replace(self, labels="ignore")
