"""Notes on autograd nodes: a tensor's origin, which decides its loss's weight. They live with the graph."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

Count = torch.Tensor | float
"""The number of targets of a mean; the sum of their weights if classes have weights."""


class Origin(Enum):
    """The origin of a tensor."""

    SEQUENCE = "unshard: the whole sequence, on every rank"
    TOKENS = "attention: a rank's own tokens"


def note_mean(loss: torch.Tensor, count: Count) -> None:
    """Note that ``loss`` is a mean over ``count`` targets of this rank."""
    _note(loss, count)


def note_sequence(x: torch.Tensor) -> None:
    """Note that ``x`` belongs to the whole sequence, and its backward is summed over ranks."""
    _note(x, Origin.SEQUENCE)


def note_tokens(x: torch.Tensor) -> None:
    """Note that ``x`` belongs to this rank's own tokens."""
    _note(x, Origin.TOKENS)


NOTE = "lightning_cp"
"""The key of a note in the metadata of a node."""


def _note(x: torch.Tensor, origin: Origin | Count) -> None:
    if x.grad_fn is not None:
        node: Any = x.grad_fn
        node.metadata[NOTE] = origin


def origin_of(node: Any) -> Origin | Count | None:
    """Return the note of a node."""
    return node.metadata.get(NOTE)
