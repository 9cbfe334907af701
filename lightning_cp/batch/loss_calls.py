"""Comparison of logged values with the loss functions that a step calls, to find wrong averages over ranks.

A logged value has no graph that shows its terms (as ``lightning_cp.loss.terms`` reads them), so values are
compared in evaluation and in the first steps of training: a value that equals a loss is that loss. Nothing
here waits for a device, except ``mismatch_warning``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import torch

from lightning_cp.utils.autograd_notes import Count
from lightning_cp.utils.tensors import to_list


class Mismatch(Enum):
    """Reason why a value's mean over ranks differs from one process's; its index in ``find_mismatches``."""

    MEAN = 0
    """A mean over other targets."""
    SUM = 1
    """A sum, times the same number on all ranks."""
    STEP = 2
    """A loss counted other targets, and the value may be made of it."""
    ROWS = 3
    """A mean over rows of means over a rank's part of each row, times the same number on all ranks."""


class LossCalls:
    """Calls of loss functions in one step, on one rank."""

    def __init__(self) -> None:
        self._means: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._last_sum: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        self._of_tokens: tuple[torch.Tensor, torch.Tensor] | None = None

    def note_each(self, losses: torch.Tensor, targets: torch.Tensor) -> None:
        """Record a loss function's losses per token.

        Args:
            losses: in the order of ``targets``, of any shape.
            targets: bool [B, L]: the tokens that have a label.
        """
        if losses.numel() == targets.numel():
            self._of_tokens = losses.detach().reshape(targets.shape), targets

    def note(self, loss: torch.Tensor, count: Count | None) -> None:
        """Record a loss function's scalar result.

        Args:
            loss: the result.
            count: number of this rank's targets that it is a mean over; ``None``: it is their sum.
        """
        loss = loss.detach()
        if count is not None:
            self._means = [*self._means[-7:], (loss, _number(count, loss.device))]
            return
        self._last_sum = loss  # a mean may be made of several
        self._sums = loss + (0 if self._sums is None else self._sums.to(loss))

    def evidence(self, value: torch.Tensor, targets: torch.Tensor | float) -> torch.Tensor:
        """Return float64 [7]: evidence about the origin of a logged value; NaN where there is none.

        The entries: the count of the loss that the value equals, its ratio to the sum of losses, the count of
        a loss with another count, that loss, the rank's targets, the value's ratio to the mean of row means,
        and 1 if that mean differs from the mean over all targets.

        Args:
            value: one number.
            targets: of this rank, the weight of the value.
        """
        value, own = value.detach(), _number(targets, value.device)
        known = ratio = other = loss = rows = apart = _number(torch.nan, value.device)
        for mean, count in self._means:
            count = count.to(value.device)
            found = _close(value, mean) & (known != own)
            known = torch.where(found, count, known)
            loss = torch.where(count != own, mean.to(known), loss)
            other = torch.where(count != own, count, other)
        for total in (self._last_sum, self._sums):
            if total is not None:
                known = torch.where(_close(value, total / own.to(total)), own, known)
        sums = self._sums
        if self._of_tokens is not None:
            total, mean, *of_rows = _means(*self._of_tokens, value.device)
            labels = _number(self._of_tokens[1].sum(), value.device)
            known = torch.where(_close(value, mean), labels, known)
            sums = total if sums is None else sums
            rows, differs = _ratio_to_rows(value, mean, of_rows)
            apart = differs.double()
        if sums is not None and not _is_narrow(value) and not _is_narrow(sums):
            ratio = value.double() / sums.to(value.device).double()
        return torch.stack([known, ratio, other, loss, own, rows, apart])


def find_mismatches(evidence: torch.Tensor) -> torch.Tensor:
    """Return bool [4], by ``Mismatch``; at most one is true.

    Args:
        evidence: float64 [ranks, 7], of the ranks that share a sample.
    """
    known, ratio, other, loss, targets, rows, apart = evidence.unbind(1)
    held = targets > 0
    is_mean = held.any() & (known.isfinite() | ~held).all()
    of_mean = is_mean & _misfit(known, targets, held)
    of_rows = ~is_mean & _is_same(*_range(rows, held)) & (apart > 0).any() & (held.sum() > 1)
    low, high = _range(ratio, held)
    same = _is_same(low, high)
    fewest, most = _range(targets, held)
    tells = (most - fewest > 1e-3 * most) | ((high - 1).abs() < 1e-5)  # not c / targets
    of_sum = ~is_mean & ~of_rows & same & tells & (held.sum() > 1)
    besides = torch.where(other.isfinite(), other, targets)
    least, largest = _range(loss, loss.isfinite())
    is_whole = (loss.isfinite().sum() > 1) & (least == largest)  # of the sequence, from unshard
    of_step = ~is_mean & ~of_sum & ~of_rows & ~is_whole
    of_step &= _misfit(besides, targets, held)
    return torch.stack([of_mean, of_sum, of_step, of_rows])


def mismatch_warning(
    doubt: Mismatch, where: str, names: Sequence[str], evidence: torch.Tensor
) -> str:
    """Return the warning about logged values; waits for the device.

    Args:
        doubt: the kind of mismatch.
        where: the hook.
        names: of the values.
        evidence: of the first of them.
    """
    known, _, other, _, targets, *_ = to_list(evidence.T)
    besides = [y if math.isnan(x) else x for x, y in zip(other, targets, strict=True)]
    counts = _listed(besides if doubt is Mismatch.STEP else known)
    name = ", ".join(map(repr, names))
    return _WARNINGS[doubt].format(name=name, where=where, counts=counts, labels=_listed(targets))


def _listed(counts: Sequence[float]) -> str:
    """Format the first four counts, as ``61, 55``."""
    return ", ".join(f"{count:g}" for count in counts[:4]) + (", ..." if counts[4:] else "")


_WARNINGS = {
    Mismatch.MEAN: "self.log({name}, ...) in {where} was given a mean over other targets than the batch's "
    "labels ({counts} on the ranks that share a sample, which have {labels} labels), so it shows another "
    "value than one process would. Log self.cp_log({name}, loss * count, count) of ContextParallelMixin, "
    "where count is what the loss divides by on this rank (the number of its targets, or the sum of their "
    "classes' weights); or call self.count_targets(count) in the step.",
    Mismatch.SUM: "self.log({name}, ...) in {where} was given a sum over targets (a loss with "
    "reduction='sum'), and shows its mean over the ranks that share a sample ({labels} labels), not what one "
    "process would show. Log the mean, self.cp_log({name}, total, count) of ContextParallelMixin; for the "
    "sum, self.sequence_sum(losses of tokens, mask) or self.unshard(losses of tokens), which all ranks have.",
    Mismatch.STEP: "a loss function in {where} counted {counts} targets on the ranks that share a sample, "
    "which have {labels} labels, so what self.log shows of it (maybe {name}) is another value than one "
    "process would show. Log self.cp_log(name, loss * count, count) of ContextParallelMixin; or call "
    "self.count_targets(count) in the step.",
    Mismatch.ROWS: "self.log({name}, ...) in {where} was given a mean over rows of means over each row's "
    "tokens, of which a rank has a part, so it shows another value than one process would, or "
    "NaN where a row has no labels on a rank. Compute it by self.sequence_mean(losses of tokens, mask), or "
    "from self.unshard(losses of tokens) and self.unshard(mask), of ContextParallelMixin, which all ranks "
    "have whole.",
}


def _means(
    losses: torch.Tensor, targets: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return sum and mean of losses [B, L], and mean of row means: NaN, or 0, for rows without targets."""
    held = targets.to(device)
    wide = torch.promote_types(losses.dtype, torch.float32)
    kept = losses.to(device, wide).masked_fill(~held, 0)
    sums, counts = kept.sum(1), held.sum(1).to(wide)
    of_rows = sums / counts
    return (
        sums.sum(),
        sums.sum() / counts.sum(),
        of_rows.mean(),
        (sums / counts.clamp(min=1)).mean(),
    )


def _ratio_to_rows(
    value: torch.Tensor, mean: torch.Tensor, of_rows: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ratio of a value to the mean of row means, and if that differs from the mean of targets.

    A mean of row means is NaN if some row has no targets; a NaN from a loss itself is not counted.
    """
    strict, clamped = of_rows
    apart = clamped.isfinite() & ~_close(strict, mean)
    ratio = value.double() / strict.double()
    ratio = torch.where(strict.isnan() & value.isnan() & mean.isfinite(), 1.0, ratio)
    ratio = torch.where(strict.isnan() & _close(value, clamped), 1.0, ratio)
    return ratio, apart


def _misfit(counts: torch.Tensor, targets: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """True if the ranks' shares of the counts differ from their shares of the targets."""
    counts = counts.where(held, 0.0)
    shares, wanted = counts / counts.sum(), targets / targets.sum()
    return ((shares - wanted).abs() > 1e-5 * wanted).any()


def _is_same(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """True if a ratio between these is equal on all ranks with targets, up to rounding."""
    return ((high - low).abs() <= 1e-5 * high.abs()) & (high != 0) & high.isfinite()


def _range(x: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.where(held, torch.inf).amin(), x.where(held, -torch.inf).amax()


def _close(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """True if values are equal up to rounding in the coarser dtype; NaN equals NaN."""
    eps = max([torch.finfo(x.dtype).eps for x in (value, other) if x.is_floating_point()])
    a, b = value.double(), other.to(value.device).double()
    return ((a - b).abs() <= 4 * eps * b.abs()) | (a.isnan() & b.isnan())


def _number(x: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """Return float64 [] on the device; a Python number is filled in there, as a copy would wait."""
    if isinstance(x, torch.Tensor):
        return x.detach().to(device, torch.float64)
    return torch.full((), x, dtype=torch.float64, device=device)


def _is_narrow(x: torch.Tensor) -> bool:
    return x.is_floating_point() and torch.finfo(x.dtype).bits < 32
