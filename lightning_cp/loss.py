"""The loss contract: a mean over valid tokens, exact under context parallelism.

A rank's loss is the mean over its own ``n_local`` targets, and the engine averages gradients over all
``data * cp`` ranks. Scaled by ``n_local * cp_size / n_group`` before backward, that average is

    1/(data*cp) sum_d sum_r n_dr cp / n_d loss_dr = 1/data sum_d (sum_r n_dr loss_dr) / n_d,

exactly the gradient of one process per sample: context parallelism changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
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


def empty_shard_loss(loss: torch.Tensor, tokens: int) -> torch.Tensor:
    """A loss over no targets, made to add exactly nothing while its graph still runs.

    ``cross_entropy`` means over nothing are 0/0; its gradient is exactly zero nevertheless, because
    ignored targets are skipped and not multiplied. That is checked, not assumed: the gradient that
    leaves the loss must be finite.

    Args:
        loss: this rank's loss; the rank has no valid target.
        tokens: local tokens of all rows; what is larger than one entry per token can be a layer's.

    Raises:
        NonFiniteError: an infinite loss, or one whose gradient is not finite even when scaled by 0.
    """
    value = float(loss.detach())
    if math.isfinite(value):
        return loss * 0.0
    muted = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss)) * 0.0
    if math.isinf(value) or not _gradient_is_finite(muted, tokens):
        raise NonFiniteError(
            f"the loss is {value} on a rank whose part of the sequence has no valid label, and its gradient "
            "is not finite even when scaled by 0. Compute the mean so that no targets give 0, for example "
            "cross_entropy(..., ignore_index=-100), or a sum divided by max(number of targets, 1)."
        )
    return muted


def _gradient_is_finite(loss: torch.Tensor, tokens: int) -> bool:
    """Whether the gradients that leave the loss are finite.

    They are taken before the backward pass, so that all ranks can agree to stop, and no further than
    to the model's last layer: behind it are attention and checkpointed blocks, whose backward
    communicates, and would wait for ranks that are not asking.
    """
    edges = _end_of_model(loss, tokens)
    if not edges:
        return False  # nothing to look at
    gradients = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
    return all(bool(torch.isfinite(x).all()) for x in gradients if x is not None)


def _end_of_model(loss: torch.Tensor, tokens: int) -> list[GradientEdge]:
    """Going back from the loss, the first results of a layer that have more than one entry per token."""
    found: list[GradientEdge] = []
    seen: set[tuple[Any, int]] = set()
    ahead: list[tuple[Any, int]] = [(loss.grad_fn, 0)]
    while ahead:
        node, index = ahead.pop()
        if node is None or (node, index) in seen or _is_leaf(node):
            continue
        seen.add((node, index))
        large = math.prod(node._input_metadata[index].shape) > tokens
        if large and _is_layer(node):
            found.append(GradientEdge(node, index))
        else:
            ahead.extend(node.next_functions)
    return found


def _is_layer(node: Any) -> bool:
    """A matrix product, an autograd Function of its own (attention, a checkpointed block), or whatever
    has a parameter as an input, perhaps transposed, cast or viewed first."""
    if isinstance(node, BackwardCFunction) or "mm" in node.name().lower():
        return True
    for source, _ in node.next_functions:
        for _ in range(3):
            if source is None or _is_leaf(source) or len(source.next_functions) != 1:
                break
            source = source.next_functions[0][0]
        if source is not None and _is_leaf(source):
            return True
    return False


def _is_leaf(node: Any) -> bool:
    return not node.next_functions
