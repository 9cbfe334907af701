"""Values of a step over the ranks that share a sample: averages, positions, whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from lightning_cp.batch import ShardedBatch, unshard_output
from lightning_cp.comm.reduce import all_sum
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.logging.pending import PendingFindings
from lightning_cp.logging.reduce import equal, side_by_side, weighted_mean
from lightning_cp.loss.accumulation import AccumulatedTokens, Unreduced
from lightning_cp.loss.averages import as_logged, zero_where_uncounted
from lightning_cp.loss.counts import TRAINS, ProbeLoss, TargetCounts
from lightning_cp.loss.terms import (
    LossTerms,
    declared_count,
    divisor,
    factors_of,
    ignores_label,
    loss_terms,
)
from lightning_cp.loss.weighting import StepLoss
from lightning_cp.models.handle import SwapHandle, raise_gradient_mismatch
from lightning_cp.optim.qk_clip import QKClip
from lightning_cp.randomness.token_draws import TokenDraws
from lightning_cp.runtime.mesh_builder import RunMesh
from lightning_cp.utils.labels import IGNORED_LABEL


class StepValues(RunMesh):
    """The current step's batch and weights, and what can be asked of them."""

    def __init__(self, settings: StrategyConfig) -> None:
        super().__init__(settings)
        self._handle: SwapHandle | None = None
        self._draws: TokenDraws | None = None
        self._part: ShardedBatch | None = None
        self._loss: StepLoss | None = None
        self._accumulated = AccumulatedTokens() if settings.weights_globally else None
        self.batches = 0
        """That were begun so far."""
        self._positions_taken = False
        self._is_alone = False
        self._is_aside = False
        self._clips: list[QKClip] = []
        self.counts = TargetCounts()
        self.loss_aside = ProbeLoss(TargetCounts())
        self.ask_for_counts: str | None = None
        """What to say of a loss of no known kind; ``None``: a parity check looks at the first one."""
        self.cleared: set[tuple[bool, ...]] = set()
        """Of each loss of no known kind that was compared with one process, which factors were 0: others
        pass of which the same ones are."""
        self.follows_factors = True
        """Ranks compare factors of losses by hand; a check has not found that they may differ."""

    @contextmanager
    def as_one_process(self) -> Iterator[None]:
        """Within, nothing is shared: what a step asks for is what one process has."""
        kept, self._part, self._loss = (self._part, self._loss), None, None
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False
            self._part, self._loss = kept

    @property
    def enabled(self) -> bool:
        """True if there is anything to do: ranks that share a sample, or targets to be counted, or scores."""
        if self._is_alone:
            return False
        return self.mesh.sample_size > 1 or self._accumulated is not None or bool(self._clips)

    @property
    def in_step(self) -> bool:
        """True if a context-parallel step is under way."""
        return self._handle is not None and self._handle.active

    @property
    def batch(self) -> Any:
        """This rank's part of the current batch, if it was sharded here."""
        return None if self._part is None else self._part.batch

    @property
    def part(self) -> ShardedBatch | None:
        """This rank's part of the current batch, and what is known of the whole."""
        return self._part

    def own_loss(self, loss: torch.Tensor) -> torch.Tensor | None:
        """This rank's own, where callbacks are shown the group's; ``None`` if it is the mean of nothing."""
        return loss if self._loss is None else self._loss.own(loss)

    @property
    def shares(self) -> list[float]:
        """Each cp rank's share of the current batch's targets."""
        return self._loss.shares if self._loss else [1 / self.mesh.cp_size] * self.mesh.cp_size

    @property
    def weights_by_loss(self) -> StepLoss | None:
        """The losses of a step that has several counts; ``None``: one weight of a rank fits all values."""
        return self._loss if self._loss is not None and self._loss.has_several_counts else None

    @property
    def looks_at_values(self) -> bool:
        """True in a step whose logged values are compared with its loss functions; on all ranks alike."""
        state = self._handle.state if self._handle is not None else None
        return state is not None and state.losses is not None and self._loss is not None

    @property
    def declares_targets(self) -> bool:
        """True in a step that called ``count_targets``; on all ranks alike."""
        return self._loss is not None and self._loss.is_declared

    def evidence(self, value: torch.Tensor) -> torch.Tensor:
        """How a value may have come about that is going to be weighted by ``shares``."""
        state = self._handle.state if self._handle is not None else None
        assert state is not None
        assert state.losses is not None
        assert self._loss is not None
        return state.losses.evidence(value, self._loss.targets)

    def gathering(self) -> AbstractContextManager[None]:
        """A block at whose end ranks agree, also on what ``take_found`` gives."""
        return nullcontext() if self._handle is None else self._handle.checks.deferring()

    def take_found(self) -> PendingFindings:
        """The findings that ranks were not told yet."""
        state = self._handle.state if self._handle is not None else None
        if self._handle is None or state is None:
            return PendingFindings()
        waiting, needs = self._handle.checks.pop(), list(state.need_gradients)

        def compared() -> None:
            state.compared = len(needs)

        return PendingFindings(
            waiting.names, waiting.error, needs, compared, raise_gradient_mismatch
        )

    def take_refused(self) -> Exception | None:
        """The error of this rank when all ranks that share a sample knew that the step had failed."""
        return None if self._handle is None else self._handle.checks.pop_error()

    def before_data(self) -> None:
        """Ranks are about to exchange something, maybe between a model's call and the one inside it."""
        if self._handle is not None:
            self._handle.checks.flush_before_data()

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the cp group, weighted by targets: what one process would have computed.

        Where losses of several counts went backward in the step, by those of the loss that it is; another
        value between ``count_targets`` and the backward of its loss by that count.

        Raises:
            ConfigError: it is none of these.
        """
        mean, is_known = self._averaged(value)
        if not is_known:
            raise ConfigError(_NO_LOSS)
        return mean

    def _averaged(self, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The mean, and whether it is known which targets it is of."""
        if self._loss is None:
            return value, True
        self.before_data()
        if not self._loss.has_several_counts:
            (rows,) = side_by_side([value], self.mesh)
            return weighted_mean(rows, self.shares).to(value), True
        rows, alike = side_by_side([value, self._loss.likeness(value)], self.mesh)
        shares = self._loss.shares_by(alike)
        is_known = shares is not None or self._loss.awaits_loss or bool(equal(rows).all())
        return weighted_mean(rows, shares or self.shares).to(value), is_known

    def closure_value(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """What an optimizer is given of a closure: the loss that gradients are of, the same on all ranks.

        One that searches along it would go another way on each rank, and other ranks would wait for it.

        Args:
            closure: whose value is this rank's.
            optimizer: that called it.

        Raises:
            ConfigError: it searches along the value, of which it is not known what it is a mean over: of
                several batches, or none of a step's losses.
        """
        begun = self.batches
        value = closure()
        one_batch = self.batches - begun <= 1
        is_number = isinstance(value, Real)
        own = torch.tensor(float(value), dtype=torch.float64) if is_number else value
        if not isinstance(own, torch.Tensor) or own.numel() != 1 or self._loss is None:
            return value
        mean, is_known = self._averaged(own) if one_batch else self._alike(own)
        if not is_known:
            if isinstance(optimizer, LBFGS):
                raise ConfigError(
                    _NO_LOSS if one_batch else _BATCHES.format(type(optimizer).__name__)
                )
            return value
        if self.mesh.data_size > 1:
            every = side_by_side([mean * self._loss.data_weight], self.mesh, Flat.LOSS)[0]
            mean = (every.sum(0) / every.shape[0]).to(mean)
        return mean.item() if is_number else mean

    def _alike(self, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """A value of several batches, and whether it is that of all ranks that share them already."""
        self.before_data()
        (rows,) = side_by_side([value], self.mesh)
        weighs_alike = self._accumulated is None or self.mesh.data_size == 1
        return value, weighs_alike and bool(equal(rows).all())

    def token_mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """(sum of totals) / (sum of counts) over the ranks that share a sample."""
        self.before_data()
        sums = torch.stack([zero_where_uncounted(total.double(), count), count.double()])
        if self.enabled:
            sums = all_sum(sums.to(self.mesh.device_type), self.mesh.group(Flat.CP))
        return as_logged(sums[0] / sums[1])

    def unshard(self, output: Any, dims: Mapping[str, int | None]) -> Any:
        """An output of the current step in original order and length, on every rank.

        Raises:
            ConfigError: a tensor that is neither along the sequence nor the same on all ranks.
        """
        if self._part is None:
            return output
        return unshard_output(output, self.mesh, self._part.layout, dims)

    def unshard_tensor(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A local tensor of the current step, whole, in original order and length; differentiable."""
        self.before_data()
        return x if self._part is None else self.mesh.unshard(x, self._part.layout, dim=dim)

    def token_positions(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """int64 [B or 1, L]: the global positions of a step's tokens; 0, 1, ... of ``x`` outside."""
        self._positions_taken = True
        if not self.in_step or self._part is None:
            return torch.arange(x.size(dim), device=x.device)[None]
        return self._part.position_ids

    def token_mask(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """bool [1, L]: which of a step's tokens are of the sequence, and no padding; all of ``x`` outside."""
        size, real = x.size(dim), x.size(dim)
        if self._part is not None and self._handle is not None and self._handle.state is not None:
            self._handle.state.padding_asked = True
            size = self._part.layout.local_len
            real = self._part.layout.real_len(self.mesh.cp_rank)
        return (torch.arange(size, device=x.device) < real)[None]


_NO_LOSS = (
    "average was given a value that is none of the losses which went backward, in a step that declared "
    "several counts, so that it is not known which targets it is a mean over. Average each loss by itself, "
    "between its count_targets and its backward, or after that as it was given to it, and add up the "
    "averages; average other values before the next count_targets."
)

_BATCHES = (
    "The closure of {} goes over several batches, and ranks that share a sample return other sums of their "
    "losses, so that it is not known what it should search along. Return the sum of self.average(loss), or "
    "of fabric.strategy.average(loss), of each batch; with token_weighting='global' take one batch a step."
)


# The losses of a step and the gradients of a window: what they weigh, and ranks that have no targets.


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
            count = self._handle.checks.run("count_targets", checked)
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
        means = loss_terms(loss)
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
            weight.check_known(None if is_clear else ConfigError(self.ask_for_counts))

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

    def _aside_of(self, loss: torch.Tensor, means: LossTerms, weight: StepLoss) -> ProbeLoss:
        counts = TargetCounts()
        counts.note(means, weight.targets, aside=True)
        shared = means.joined or means.gathered
        zeros = factors_of(loss, weight.tokens).zeros if shared or not _is_known(means) else ()
        if _is_known(means) or weight.is_muted:
            return ProbeLoss(counts, zeros=zeros)
        leaves, declared = ignores_label(loss, IGNORED_LABEL), weight.is_declared
        return ProbeLoss(counts, False, is_declared=declared, zeros=zeros, leaves_out=leaves)

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
            self._handle.check_same_gradients()
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
            self._loss.check_connected(loss)

    def after_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse a rank without targets whose loss did add something; note if padding was trained on."""
        state = self._handle.state if self._handle is not None else None
        if self._loss is not None and state is not None:
            self._counts.note_padding(TRAINS, state.take_padding_gradients())
            self._loss.after_backward(state, parameters)


def _is_known(means: LossTerms) -> bool:
    return not (means.other_terms or means.own_factor)
