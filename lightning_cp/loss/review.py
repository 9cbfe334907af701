"""Review of losses: each has its weight by a known rule, is looked at by a check, or is refused."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.loss.counts import ProbeLoss, TargetCounts
from lightning_cp.loss.derivatives import TokenSums, token_sums
from lightning_cp.loss.divisors import Divisors, divisors_of
from lightning_cp.loss.terms import LossTerms, factors_of, ignores_label, loss_terms
from lightning_cp.loss.weighting import StepLoss
from lightning_cp.utils.labels import IGNORED_LABEL

_Zeros = tuple[bool, ...]
"""One flag per factor of a loss: it is 0."""


class LossReview(Protocol):
    """Review of the losses of a run or of a probe."""

    @property
    def counts(self) -> TargetCounts:
        """Notes about losses, which ranks compare before a weight changes."""
        ...

    def check(
        self, loss: torch.Tensor, weight: StepLoss, *, padding_asked: bool, is_shared: bool
    ) -> None:
        """Check a loss that goes backward; raises ``ConfigError`` and ``RankFailure``."""
        ...


class RunLosses:
    """Losses of a run: which kinds were found exact, and notes about the others."""

    def __init__(self) -> None:
        self.counts = TargetCounts()
        self.probe = ProbeLoss(TargetCounts())
        """Facts of the loss of the last probe step."""
        self.question: str | None = None
        """Text of the error about a loss of no known kind; ``None``: a parity check looks at the first."""
        self.exact_zeros: set[_Zeros] = set()
        """Zero factors of losses of no known kind that equalled one process's; others with the same pass."""
        self.follows_factors = True
        """Ranks compare factors of losses by hand; no check found that they may differ."""

    @property
    def findings(self) -> tuple[Any, ...]:
        """A copy of what checks have found."""
        counts = self.counts
        return set(self.exact_zeros), self.follows_factors, set(counts.exact), set(counts.clear)

    def forget_model(self) -> None:
        """Forget the checks of another model's steps."""
        self.exact_zeros.clear()
        self.follows_factors = True
        self.counts.clear.clear()
        self.counts.exact.clear()

    def check(
        self, loss: torch.Tensor, weight: StepLoss, *, padding_asked: bool, is_shared: bool
    ) -> None:
        """Compare what a loss counts with its weight; refuse a loss of no known kind, or have it looked at.

        Raises:
            ConfigError: saying what to declare.
            RankFailure: another rank's loss is refused, and this rank's is not.
        """
        if not weight.depends_on_counts:
            return
        means = loss_terms(loss)
        check_sequence_terms(means, weight)
        sums = self.sums_of(loss, weight) if is_shared and weight.is_declared else None
        passes, is_known = self.passes(loss, weight), _is_known(means)
        is_clear = is_known or passes
        if self.question is not None:  # a loss that is refused leaves no notes
            weight.check_known(None if is_clear else ConfigError(self.question))
        else:
            self.counts.asks |= not (is_clear or weight.is_without_targets) and is_shared
        self.counts.note(means, weight.targets)
        divisors = self.divisors_of(loss, weight, means, sums)
        _note(
            *(self.counts, loss, weight, means, sums, divisors),
            is_known=is_known,
            passes=passes,
            padding_asked=padding_asked,
            follows=is_shared and self.follows_factors,
        )

    def sums_of(self, loss: torch.Tensor, weight: StepLoss) -> TokenSums | None:
        """Return the sums over tokens of a loss with a declared count; ``None``: a check found it exact."""
        return None if self.exact_zeros else token_sums(loss, weight.rows, weight.local_len)

    def divisors_of(
        self, loss: torch.Tensor, weight: StepLoss, means: LossTerms, sums: TokenSums | None
    ) -> Divisors | None:
        """Return the divisors of a loss; ``None``: it has none to look at, or a check found it exact."""
        is_of_means = sums is None and not means.between
        if self.exact_zeros or weight.has_whole_rows or is_of_means:
            return None
        found = divisors_of(loss, means, sums, weight.rows, weight.local_len)
        found.alike = weight.ranks_count_alike
        return found if found.looks else None

    def passes(self, loss: torch.Tensor, weight: StepLoss) -> bool:
        """Return True for a declared loss, and for one like a loss that a check found exact."""
        if weight.is_declared or not self.exact_zeros or self.passes_all:
            return weight.is_declared or bool(self.exact_zeros)
        return any(map(factors_of(loss, weight.tokens).are_zero, self.exact_zeros))

    @property
    def passes_all(self) -> bool:
        """True if a loss with all its terms was found exact."""
        return any(not any(zeros) for zeros in self.exact_zeros)

    def raise_unknown(self, why: str) -> NoReturn:
        """Raise the error about a loss of no known kind, before the optimizer's step.

        Raises:
            ConfigError: saying what to declare.
        """
        raise ConfigError(f"{why}{self.question}")

    def note_exact(self, zeros: _Zeros = ()) -> None:
        """Note a loss of no known kind as exact: others pass whose factors are 0 at least there."""
        self.exact_zeros.add(zeros)


def check_sequence_terms(means: LossTerms, weight: StepLoss) -> None:
    """Check that a loss of whole sequences is one, and that rows weigh alike.

    Raises:
        ConfigError: labels are declared as absent, and the loss is a rank's own mean; or ``token_weighting``
            would weight a row's term by its tokens.
    """
    if weight.without_labels and not weight.is_declared:
        if means.counts or not _is_known(means):
            raise ConfigError(_OWN_MEAN)
        if not means.gathered:
            raise ConfigError(_NOT_OF_SEQUENCES)
    if means.gathered and weight.of_window:
        raise ConfigError(_WEIGHED_BY_TOKENS)


_WAYS = (
    "Compute it from self.sequence_sum(values), sequence_mean, sequence_pick or unshard (of "
    "ContextParallelMixin, or of the strategy), which are equal on all ranks; or, for a mean over tokens "
    "that the step chooses, divide by self.count_targets(mask)."
)
_OWN_MEAN = (
    "with labels='none' a loss must be the same number on all ranks that share a sample, but this one is "
    f"computed from a rank's own tokens. {_WAYS}"
)
_NOT_OF_SEQUENCES = (
    "with labels='none' the loss of this step is computed from no value of whole sequences and declares no "
    f"targets. {_WAYS}"
)
_WEIGHED_BY_TOKENS = (
    "a term of whole sequences (of sequence_sum, sequence_mean, sequence_pick or unshard, or the loss of a "
    "model's routers) would be weighted by the tokens of its rows, as token_weighting='global' says. Use "
    "token_weighting='micro_batch', or a mean over tokens alone: for routers, output_router_logits=False."
)


class ProbeLosses:
    """Losses of probe steps: facts for the check that made the step; nothing is refused."""

    def __init__(self, run: RunLosses) -> None:
        self._run = run

    @property
    def counts(self) -> TargetCounts:
        """Notes about the probe's loss."""
        return self._run.probe.counts

    def check(
        self, loss: torch.Tensor, weight: StepLoss, *, padding_asked: bool, is_shared: bool
    ) -> None:
        """Keep the facts of a loss."""
        if not weight.depends_on_counts:
            return
        means = loss_terms(loss)
        check_sequence_terms(means, weight)
        self._run.probe = _facts_of(loss, means, weight)
        sums = self._run.sums_of(loss, weight) if is_shared and weight.is_declared else None
        passes = self._run.passes(loss, weight)
        divisors = self._run.divisors_of(loss, weight, means, sums)
        _note(
            *(self.counts, loss, weight, means, sums, divisors),
            is_known=_is_known(means),
            passes=passes,
            padding_asked=padding_asked,
            follows=is_shared,
        )


def _note(
    counts: TargetCounts,
    loss: torch.Tensor,
    weight: StepLoss,
    means: LossTerms,
    sums: TokenSums | None,
    divisors: Divisors | None,
    *,
    is_known: bool,
    passes: bool,
    padding_asked: bool,
    follows: bool,
) -> None:
    counts.note_padding(*weight.padding(by_hand=not is_known, asked=padding_asked))
    is_read = sums is not None and bool(sums.nodes) and sums.is_complete
    factors = factors_of(loss, weight.tokens) if follows and not is_known and not is_read else None
    whole = weight.own_value(loss) if weight.without_labels and not weight.is_declared else None
    # The declared count of a mean says nothing about values of whole sequences that are added to it.
    compared = means if weight.is_declared or not passes else None
    counts.note_shared(loss, weight.targets, compared, factors, whole, sums, divisors)


def _facts_of(loss: torch.Tensor, means: LossTerms, weight: StepLoss) -> ProbeLoss:
    counts = TargetCounts()
    counts.note(means, weight.targets, is_probe=True)
    shared = means.joined or means.gathered
    zeros = factors_of(loss, weight.tokens).zeros if shared or not _is_known(means) else ()
    is_clear, declared = _is_known(means) or weight.is_without_targets, weight.is_declared
    return ProbeLoss(
        *(counts, is_clear, declared, zeros),
        leaves_out=not is_clear and ignores_label(loss, IGNORED_LABEL),
        is_of_sequences=bool(means.gathered) and not means.counts,
    )


def _is_known(means: LossTerms) -> bool:
    return not (means.other_terms or means.own_factor)
