"""Labels: which tokens have no target, and how targets are shifted."""

from __future__ import annotations

import torch

IGNORED_LABEL = -100
"""The label of a token that has no target, as in torch's cross-entropy."""


def shift(labels: torch.Tensor) -> torch.Tensor:
    """The target of each token ``[B, S]``: the label of the next one, and none for the last."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
