"""Labels: which tokens have no target, and how targets are shifted."""

from __future__ import annotations

import torch

IGNORED_LABEL = -100
"""The label of a token that has no target, as in torch's cross-entropy."""


def are_shifted(labels: torch.Tensor, input_ids: torch.Tensor) -> bool | None:
    """True if a dataset has shifted its labels ``[B, S]`` already; ``None``: these do not tell.

    Shifted, nearly all are the next token's id; unshifted, their own token's. Waits for a GPU.
    """
    if labels.shape != input_ids.shape or labels.dim() != 2 or labels.size(1) < 2:
        return None
    own, at = labels[:, :-1], input_ids[:, :-1]
    counted = own != IGNORED_LABEL
    counts = torch.stack(
        [counted.sum(), (counted & (own == input_ids[:, 1:])).sum(), (counted & (own == at)).sum()]
    )
    total, following, same = counts.tolist()
    if (
        total < _ENOUGH
        or max(following, same) < _NEARLY * total
        or min(following, same) * 2 > total
    ):
        return None
    return following > same


_ENOUGH, _NEARLY = 8, 0.95
"""Targets that tell, and how many of them have to agree."""


def shift(labels: torch.Tensor) -> torch.Tensor:
    """The target of each token ``[B, S]``: the label of the next one, and none for the last."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
