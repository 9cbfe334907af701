"""Rules for reading batches: names that run along the sequence, and their padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_cp.utils.labels import IGNORED_LABEL

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
