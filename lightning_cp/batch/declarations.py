"""Names and forms of tensors that declare a batch's documents, padding and positions.

Documents: ``cu_seqlens`` (and flash-attention's names of it) and ``segment_ids`` (or ``seq_idx``). Padding:
``attention_mask``. Positions: ``position_ids``. A name counts at any depth of a batch; a nested tensor of
another sequence is ignored if ``sequence_dims`` declares it ``None``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lightning_cp.batch.rules import KNOWN_DIMS, BatchRules
from lightning_cp.batch.tracked_batch import POSITIONS
from lightning_cp.errors import ConfigError
from lightning_cp.utils.containers import nodes_of, tensors_of

MASK = "attention_mask"
SEGMENTS = ("segment_ids", "seq_idx")
_BOUNDARIES = ("cu_seqlens", "cu_seq_lens")
"""Prefixes of the names: flash-attention's end in ``_q``, ``_k`` or ``_kv``."""

EXPRESSIBLE = (
    "What can be expressed: a 2-D padding mask, packed documents (restarting position_ids, cu_seqlens or "
    "segment_ids), causality and sliding windows."
)


def last_part(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


def has_boundaries(name: str) -> bool:
    """True if a tensor of this dotted name holds the boundaries of documents."""
    return name.rpartition(".")[2].startswith(_BOUNDARIES)


def check_forms(nodes: Iterable[tuple[str, Any]], rules: BatchRules) -> None:
    """Check that values under known names are ordinary (strided) tensors.

    Args:
        nodes: everything inside a batch, as from ``nodes_of``.
        rules: for reading it.

    Raises:
        ConfigError: naming the value and its kind.
    """
    for name, value in nodes:
        if value is None or rules.sequence_dims.get(name, 0) is None:
            continue
        if isinstance(value, torch.Tensor):
            if value.is_nested or value.layout is not torch.strided:
                _check_unknown(name, value, rules)
        elif last_part(name) == MASK and rules.reads_masks:
            raise ConfigError(f"{name!r} is {_kind(value)}, which cannot be sharded. {EXPRESSIBLE}")
        elif has_boundaries(name) or (
            last_part(name) in (POSITIONS, *SEGMENTS) and not any(tensors_of(value))
        ):
            raise ConfigError(
                f"{name!r} must be one tensor, got {_kind(value)}. Make a tensor of it in the dataset or the "
                "collate function; rows of cu_seqlens with fewer documents repeat their last entry."
            )


def _check_unknown(name: str, x: torch.Tensor, rules: BatchRules) -> None:
    """Refuse a tensor that is not strided under a known name."""
    if last_part(name) in KNOWN_DIMS or name in rules.sequence_dims or has_boundaries(name):
        raise ConfigError(
            f"{name!r} is {_kind(x)}, which cannot be sharded. Give an ordinary (strided) tensor: rows "
            "padded to one length, or packed into one row."
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        layout = str(value.layout).removeprefix("torch.")
        return "a nested tensor" if value.is_nested else f"a tensor of layout {layout}"
    inside = ", ".join(sorted({_of_type(item) for _, item in nodes_of(value)[1:]}))
    return f"a {type(value).__name__}{f' of {inside}' if inside else ''}"


def _of_type(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        ordinary = not item.is_nested and item.layout is torch.strided
        return f"tensors {tuple(item.shape)}" if ordinary else "tensors"
    return type(item).__name__
