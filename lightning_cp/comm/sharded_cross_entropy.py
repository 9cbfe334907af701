"""Cross-entropy of logits of which each rank of a group holds its own part of the vocabulary.

    loss = log sum exp(z) - z[target],        d loss / d z = softmax(z) - onehot(target)

The largest logit and the sum of exponentials are made of those of all ranks; the target's logit comes from
the rank that has it. No rank ever holds a whole row: three numbers per token are exchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.named_ranges import named


def sharded_cross_entropy(
    logits_NV: torch.Tensor,
    target_N: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The ``torch.nn.functional.cross_entropy`` of the whole vocabulary; the same on every rank.

    Args:
        logits_NV: this rank's ``[N, V / ranks]``; ranks hold the vocabulary in order, in equal parts.
        target_N: int64 ``[N]``, of the whole vocabulary, the same on every rank.
        group: the ranks that share the vocabulary.
        ignore_index: a target that counts nothing.
        reduction: ``mean`` over what counts, ``sum``, or ``none``: ``[N]``, 0 where nothing counts.
        label_smoothing: of each target, as much is spread over the vocabulary.

    Raises:
        IndexError: on the CPU, a target that is neither ``ignore_index`` nor in the vocabulary. Elsewhere
            its loss is NaN, as nothing waits for the device to look.
    """
    vocabulary = logits_NV.shape[-1] * group.size()
    counts = target_N != ignore_index
    strange = _out_of_bounds(target_N, counts, vocabulary)
    if target_N.device.type == "cpu" and bool(strange.any()):
        raise IndexError(f"a target is out of bounds of the vocabulary of {vocabulary}.")
    losses = losses_of_parts(logits_NV, target_N, counts, label_smoothing, group)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


def losses_of_parts(
    logits_NV: torch.Tensor,
    target_N: torch.Tensor,
    counts_N: torch.Tensor,
    smoothing: float,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Losses ``[N]``: 0 where nothing counts, NaN where no rank has the target."""
    losses: Any = _Losses.apply(logits_NV, target_N, counts_N, smoothing, group)
    strange = _out_of_bounds(target_N, counts_N, logits_NV.shape[-1] * group.size())
    return losses.masked_fill(strange, float("nan"))


def _out_of_bounds(target_N: torch.Tensor, counts_N: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return counts_N & ((target_N < 0) | (target_N >= vocabulary))


class _Losses(torch.autograd.Function):
    """Shapes over N tokens, a vocabulary of V and P ranks.

    ========  =======================================  =====================================  ==========
    pass      input                                    collective                             output
    ========  =======================================  =====================================  ==========
    forward   logits [N, V/P], target [N]              all-reduce: max [N], then sums [2-3, N]  losses [N]
    backward  d losses [N]                             none                                   [N, V/P]
    ========  =======================================  =====================================  ==========
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        counts: torch.Tensor,
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        size = logits.shape[-1]
        local = target - group.rank() * size
        here = counts & (local >= 0) & (local < size)
        local = local.where(here, 0)
        largest = logits.amax(-1)
        with named("tensor-parallel cross-entropy"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        exponentials = shifted.exp()
        rows = [exponentials.sum(-1), shifted.gather(-1, local[:, None])[:, 0].where(here, 0)]
        if smoothing:
            rows.append(shifted.sum(-1))
        sums = torch.stack(rows)
        with named("tensor-parallel cross-entropy"):
            dist.all_reduce(sums, group=group)
        losses = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            losses = losses - smoothing / (size * group.size()) * sums[2]
        ctx.save_for_backward(exponentials / sums[0][:, None], local, here, counts)
        ctx.smoothing, ctx.vocabulary = smoothing, size * group.size()
        return losses.where(counts, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        softmax, local, here, counts = ctx.saved_tensors
        ones = here.to(softmax) * (1 - ctx.smoothing)
        gradient = softmax.scatter_add(-1, local[:, None], -ones[:, None])
        if ctx.smoothing:
            gradient = gradient - ctx.smoothing / ctx.vocabulary
        scale = gradients[0].where(counts, 0)
        return torch.where(counts[:, None], gradient * scale[:, None], 0), None, None, None, None
