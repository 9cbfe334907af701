"""Metrics of the main job, in units that do not depend on how the batch was sharded.

Shapes: ``logits_BLV`` float [batch, local length, vocabulary]; labels int64 ``[B, L]`` with -100
where there is nothing to predict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import torch
from torchmetrics.text import Perplexity

from lightning_cp.errors import ConfigError
from lightning_cp.labels import IGNORED_LABEL, shift

Number = TypeVar("Number", float, torch.Tensor)


def bits_per_byte(loss: Number) -> Number:
    """Mean cross-entropy in nats per byte, as losses give it, in bits per byte."""
    return loss / math.log(2)


def aligned_labels(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """For each position of the batch, the token that its logits predict ``[B, L]``.

    A sharded batch brings them as ``shift_labels``: they were shifted before the sequence was
    split, and a shift of a shard would lose its last target. A whole batch is shifted here.

    Raises:
        ConfigError: the batch has neither ``shift_labels`` nor ``labels``.
    """
    if "shift_labels" in batch:
        return batch["shift_labels"]
    if "labels" not in batch:
        raise ConfigError(
            f"a metric needs batch['labels'] or batch['shift_labels'], got keys {sorted(batch)}. "
            "Have the dataset give labels."
        )
    return shift(batch["labels"])


def token_perplexity() -> Perplexity:
    """Perplexity over every valid token of every rank.

    It is updated with what a rank holds, ``(logits_BLV, aligned_labels(batch))``. Its state is the
    sum of log-probabilities and the count of valid tokens, summed over the whole world: the ranks
    of a context-parallel group hold different tokens of one sample, so nothing is counted twice,
    and a rank without a valid token adds nothing.
    """
    return Perplexity(ignore_index=IGNORED_LABEL)
