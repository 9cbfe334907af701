"""The losses of a step and the gradients of a window: what they weigh, and ranks that have no targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.optim import Optimizer

from lightning_cp.errors import ConfigError
from lightning_cp.labels import IGNORED_LABEL
from lightning_cp.loss_terms import (
    Means,
    counted_means,
    declared_count,
    divisor,
    factors_of,
    leaves_out,
)
from lightning_cp.strategies.step.accumulation import Unreduced
from lightning_cp.strategies.step.counts import TRAINS, LossAside, TargetCounts
from lightning_cp.strategies.step.values import StepValues
from lightning_cp.strategies.step.weighting import StepLoss


class StepLosses(StepValues):
    """Of the current step, from its forward to its optimizer's step."""

    def count_targets(self, counted: torch.Tensor | float) -> torch.Tensor:
        """Weight this step's loss by what it counts on this rank, and not by the batch's labels.

        Returns:
            The count of this rank, and 1 where it is 0: what a sum over targets is to be divided by.

        Raises:
            ConfigError: no count, or a second one for the same loss.
            RankFailure: that happened on another rank.
            BatchMismatchError: another rank does not declare any.
        """
        state = self._handle.state if self._handle is not None else None
        if self._loss is None or self._handle is None or state is None:
            count = declared_count(counted)
        else:
            checked = partial(self._loss.checked_count, counted)
            count = self._handle.checks.agreed("count_targets", checked)
            self._loss.declare(count)
        if state is not None:
            state.counted = count
        return divisor(count)

    def _require_known(self, loss: torch.Tensor) -> None:
        """Compare what a loss counts with its weight; refuse one of no known kind, or have it looked at.

        The first one of a run, whichever step it comes in.

        Raises:
            ConfigError: saying what to declare.
            RankFailure: another rank's loss is refused, and this rank's is not.
        """
        if self._loss is None or not self._loss.depends_on_counts:
            return
        means = counted_means(loss)
        is_known = _is_known(means)
        if self._is_aside:
            self.loss_aside = self._aside_of(loss, means, self._loss)
        else:
            self.counts.note(means, self._loss.targets)
        state = self._handle.state if self._handle is not None else None
        asked = state is not None and state.padding_asked
        self._counts.note_padding(*self._loss.padding(by_hand=not is_known, asked=asked))
        passes = self._loss.is_declared or self._is_cleared(loss, self._loss)
        factors = None
        if not is_known and self.mesh.sample_size > 1 and (self._is_aside or self.follows_factors):
            factors = factors_of(loss, self._loss.tokens)
        self._counts.note_shared(self._loss.targets, None if passes else means, factors)
        if not self._is_aside:
            self._look_at(self._loss, is_known or passes)

    def _is_cleared(self, loss: torch.Tensor, weight: StepLoss) -> bool:
        """True of a loss like one of no known kind that was looked at."""
        if not self.cleared or self.passes_all:
            return bool(self.cleared)
        return any(map(factors_of(loss, weight.tokens).have, self.cleared))

    @property
    def passes_all(self) -> bool:
        """A loss was cleared that had all its terms."""
        return any(not any(zeros) for zeros in self.cleared)

    def _look_at(self, weight: StepLoss, is_clear: bool) -> None:
        """Refuse a loss now, or have the ranks look at it before they step, where a check can."""
        if self.ask_for_counts is None:
            self.counts.asks |= not (is_clear or weight.is_muted) and self.mesh.sample_size > 1
        else:
            weight.require_known(None if is_clear else ConfigError(self.ask_for_counts))

    def refuse_unknown(self, why: str) -> None:
        """Refuse a loss of no known kind, before the optimizer's step.

        Raises:
            ConfigError: saying what to declare.
        """
        raise ConfigError(f"{why}{self.ask_for_counts}")

    def clear_unknown(self, zeros: tuple[bool, ...] = ()) -> None:
        """A loss of no known kind is right: others pass of which the same factors are 0, at least."""
        self.cleared.add(zeros)

    @property
    def _counts(self) -> TargetCounts:
        return self.loss_aside.counts if self._is_aside else self.counts

    def _aside_of(self, loss: torch.Tensor, means: Means, weight: StepLoss) -> LossAside:
        counts = TargetCounts()
        counts.note(means, weight.targets, aside=True)
        shared = means.joined or means.gathered
        zeros = factors_of(loss, weight.tokens).zeros if shared or not _is_known(means) else ()
        if _is_known(means) or weight.is_muted:
            return LossAside(counts, zeros=zeros)
        leaves, declared = leaves_out(loss, IGNORED_LABEL), weight.is_declared
        return LossAside(counts, False, is_declared=declared, zeros=zeros, leaves_out=leaves)

    def follow_unreduced(self, unreduced: Callable[[], Unreduced]) -> None:
        """Have windows of accumulation know of gradients that an engine keeps elsewhere than in ``grad``."""
        if self._accumulated is not None:
            self._accumulated.unreduced = unreduced

    def scale_loss(
        self,
        loss: torch.Tensor,
        optimizers: Iterable[Optimizer] = (),
        *,
        automatic: bool = False,
    ) -> torch.Tensor:
        """The loss to call backward on.

        Args:
            loss: what the step computed.
            optimizers: all that the run has.
            automatic: gradients are zeroed after steps only.

        Raises:
            ConfigError: backward would come through attention on some ranks only.
        """
        self.takes_own_weights()
        if self._handle is not None and self._handle.state is not None:
            self._handle.require_same_gradients()
        if self._loss is None:
            return loss
        self._require_known(loss)
        return self._loss.scale(loss, optimizers, automatic=automatic)

    def takes_own_weights(self) -> None:
        """The loss of this step was weighted by who calls backward."""
        if self._handle is not None and self._handle.state is not None:
            self._handle.state.weighted = True

    def end_window(self, optimizer: Optimizer, batches: int | None = None) -> None:
        """Gradients are complete: weight the targets of the whole window alike, if that was asked for."""
        if self._accumulated is not None:
            self._accumulated.end(optimizer, batches)

    def shown_loss(self, loss: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The loss that a step returns for callbacks: one process's ``value``, with this rank's gradient."""
        return loss if self._loss is None else self._loss.shown(loss, value)

    def require_loss(self, loss: torch.Tensor | None) -> None:
        """Refuse a rank without targets whose backward would leave the others waiting."""
        if self._loss is not None:
            self._loss.require(loss)

    def after_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse a rank without targets whose loss did add something; note if padding was trained on."""
        state = self._handle.state if self._handle is not None else None
        if self._loss is not None and state is not None:
            self._counts.note_padding(TRAINS, state.take_padding_gradients())
            self._loss.after_backward(state, parameters)


def _is_known(means: Means) -> bool:
    return not (means.other_terms or means.own_factor)
