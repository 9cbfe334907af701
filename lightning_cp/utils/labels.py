"""Labels: the value of tokens without a target, and the shift by one token."""

from __future__ import annotations

import torch

IGNORED_LABEL = -100
"""The label of a token that has no target, as in torch's cross-entropy."""


def are_shifted(labels: torch.Tensor, input_ids: torch.Tensor) -> bool | None:
    """True if a dataset has already shifted its labels ``[B, S]``; ``None`` if these do not show it.

    Nearly all shifted labels equal the next token's id, unshifted ones their own token's. Waits for a GPU.
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
"""The fewest targets that show it, and the share of them that must agree."""


def shift(labels: torch.Tensor) -> torch.Tensor:
    """Return the target of each token ``[B, S]``: the next one's label, and none for the last."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
