"""The loss contract: a mean over valid tokens, exact under context parallelism.

A rank's loss is the mean over its own ``n_local`` targets, and the engine averages gradients over all
``data * cp`` ranks. Scaled by ``n_local * cp_size / n_group`` before backward, that average is

    1/(data*cp) sum_d sum_r n_dr cp / n_d loss_dr = 1/data sum_d (sum_r n_dr loss_dr) / n_d,

exactly the gradient of one process per sample: context parallelism changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge

from lightning_cp.errors import NonFiniteError


def loss_scale(valid: Sequence[int], cp_rank: int) -> float:
    """The factor on this rank's mean loss; 0.0 where there are no targets at all."""
    total = sum(valid)
    return valid[cp_rank] * len(valid) / total if total else 0.0


def average_weight(valid: Sequence[int], cp_rank: int) -> float:
    """This rank's share of the group's targets, for averages that are logged."""
    total = sum(valid)
    return valid[cp_rank] / total if total else 1.0 / len(valid)


def empty_shard_loss(loss: torch.Tensor, last_attention: GradientEdge | None) -> torch.Tensor:
    """A loss over no targets, made to add exactly nothing while its graph still runs.

    ``cross_entropy`` means over nothing are 0/0; its gradient is exactly zero nevertheless, because
    ignored targets are skipped and not multiplied. That is checked, not assumed: the gradient that
    arrives at the last attention call must be finite.

    Args:
        loss: this rank's loss; the rank has no valid target.
        last_attention: where the gradient of the last attention output arrives.

    Raises:
        NonFiniteError: an infinite loss, or one whose gradient is not finite even when scaled by 0.
    """
    value = float(loss.detach())
    if value == value and abs(value) != float("inf"):
        return loss * 0.0
    muted = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss)) * 0.0
    gradient = None
    if value != value and last_attention is not None:
        (gradient,) = torch.autograd.grad(
            muted, [last_attention], retain_graph=True, allow_unused=True
        )
    if gradient is None or not bool(torch.isfinite(gradient).all()):
        raise NonFiniteError(
            f"the loss is {value} on a rank whose part of the sequence has no valid label, and its gradient "
            "is not finite even when scaled by 0. Compute the mean so that no targets give 0, for example "
            "cross_entropy(..., ignore_index=-100), or a sum divided by max(number of targets, 1)."
        )
    return muted
