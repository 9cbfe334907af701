"""The loss contract: a mean over valid tokens, exact under context parallelism.

A rank's loss is the mean over its own ``n_local`` targets, and the engine averages gradients over all
``data * cp`` ranks. Scaled by ``n_local * cp_size / n_group`` before backward, that average is

    1/(data*cp) sum_d sum_r n_dr cp / n_d loss_dr = 1/data sum_d (sum_r n_dr loss_dr) / n_d,

exactly the gradient of one process per sample: context parallelism changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_cp.errors import ConfigError, NonFiniteError


def loss_scale(valid: Sequence[int], cp_rank: int) -> float:
    """The factor on this rank's mean loss; 0.0 where there are no targets at all."""
    total = sum(valid)
    return valid[cp_rank] * len(valid) / total if total else 0.0


def declared_scale(counts: torch.Tensor, cp_rank: int) -> torch.Tensor:
    """As ``loss_scale``, of counts that are on a device, where they stay."""
    total = counts.sum()
    return torch.where(total > 0, counts[cp_rank] * len(counts) / total, 0.0)


def average_weight(valid: Sequence[float], cp_rank: int) -> float:
    """This rank's share of the group's targets, for averages that are logged."""
    total = sum(valid)
    return valid[cp_rank] / total if total else 1.0 / len(valid)


def mute(loss: torch.Tensor) -> torch.Tensor:
    """A loss over no targets, made to add exactly nothing while its graph still runs.

    Other ranks' dK and dV pass through that graph. ``cross_entropy`` means over nothing are 0/0, but
    their gradient is exactly zero, because ignored targets are skipped and not multiplied: scaled by 0
    they are harmless, and replacing NaN by 0 in front of the factor keeps them so.
    """
    return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss)) * 0.0


def require_connected(loss: torch.Tensor | None) -> None:
    """Before backward: refuse a loss over no targets that was not computed from the model.

    Raises:
        ConfigError: no loss, or one whose graph ends before any parameter.
    """
    ahead: list[Any] = [loss.grad_fn] if loss is not None else []
    seen: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        # A scalar that is no parameter is a constant that somebody made.
        if leaf is not None and (leaf.dim() or isinstance(leaf, torch.nn.Parameter)):
            return
        ahead.extend(source for source, _ in node.next_functions)
    shown = (
        "no loss"
        if loss is None
        else f"a loss of {float(loss.detach())} that is not computed from the model"
    )
    raise ConfigError(
        f"training_step returned {shown} on a rank whose part of the sequence has no valid label, but the "
        "gradients of other ranks pass through this rank's model, and would wait for it. Return the loss "
        "as computed: where there are no targets it is weighted by 0, NaN or not."
    )


def require_muted(value: float, gradients: Iterable[torch.Tensor]) -> None:
    """After backward: refuse a loss over no targets that did add something.

    Args:
        value: the loss before it was muted.
        gradients: what it sent into the model.

    Raises:
        NonFiniteError: an infinite loss, or a NaN whose gradient is NaN even when scaled by 0.
    """
    if math.isfinite(value):
        return
    if math.isnan(value) and not any(bool(gradient.isnan().any()) for gradient in gradients):
        return
    raise NonFiniteError(
        f"the loss is {value} on a rank whose part of the sequence has no valid label, and it cannot be made "
        "to add nothing: its gradient is not finite even when scaled by 0. Compute the mean so that no "
        "targets give 0, for example cross_entropy(..., ignore_index=-100), or a sum divided by "
        "max(number of targets, 1)."
    )
