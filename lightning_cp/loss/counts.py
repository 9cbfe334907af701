"""Checks of losses before the optimizer's step: target counts against weights, padding, equal shared values.

Numbers stay on the device. The result is one flag, which the vote on a step reads together with the flag of
finite gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap, zip_longest
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_cp.comm.consensus import gather_objects
from lightning_cp.errors import ConfigError
from lightning_cp.loss.derivatives import TokenSums, derivatives, shared_factors
from lightning_cp.loss.divisors import OWN, VALUES, Divisors, Look
from lightning_cp.loss.shared_values import (
    SharedValues,
    first_difference,
    is_near,
    norm_and_projection,
)
from lightning_cp.loss.terms import DECLARE, LossFactors, LossTerms
from lightning_cp.utils.autograd_notes import Count

COUNTS = "count_targets was given a mask, or weights, that counts padding"
TRAINS = "a loss trains on padding"
NUMBER = "count_targets was given a number, of which it cannot be seen that it leaves out padding,"
MORE_TOKENS = (
    ": a sequence whose length does not divide among ranks is padded there, and one process has no such "
    "tokens. Leave them out of what the loss counts and adds up: mask = mask & self.token_mask(mask) (of "
    "ContextParallelMixin, or of the strategy), before count_targets(mask)."
)

JOINED = (
    "a term of the loss is made of parameters and of another tensor, which differs between ranks that share "
    "a sample (its norm is {:g} on rank {} and {:g} on rank {}), so "
)
"""Start of a message that ``ASK`` completes."""

GATHERED = (
    "the loss combines whole sequences or parameters with something that each rank computes of its own "
    "tokens (the norm of its derivative by them is {:g} on rank {} and {:g} on rank {}), which has to come "
    "from sequence_sum, sequence_mean, sequence_pick or unshard, too; so "
)
"""Start of a message that ``ASK`` completes."""

COUNTED = (
    "the step declares a count of targets, but tokens of its loss do not weigh the same on ranks that share "
    "a sample (the weight of a token in a sum of the loss, times the declared count, is {:g} on rank {} and "
    "{:g} on rank {}): a sum is divided by another number than the one that count_targets returned, or the "
    "loss is a function of the mean, such as its root; so "
)
"""Start of a message that ``ASK`` completes."""

FACTORS = (
    "a loss by hand is multiplied or divided by {:g} on rank {} and by {:g} on rank {}, which share a "
    "sample, and their numbers of targets do not explain that, so "
)
"""Start of a message that ``ASK`` completes."""

ASK = (
    "it is not known what this loss is a mean over: it is more than cross-entropies of PyTorch "
    "(reduction='mean'), times numbers of Python, and values of whole sequences, so that its gradient could "
    "be wrong silently. A mean over a mask: call {owner}.count_targets(mask or number) before its backward, "
    "if every term of the loss is a sum over that mask, divided by its count. A loss of rows (DPO, rewards, "
    "classes): compute it from {owner}.sequence_sum(values), sequence_mean, sequence_pick or unshard, which "
    "are the same on all ranks; labels='none' if the batch has no labels of tokens. Any other: {check}."
)
"""Message about a loss of no known kind."""

Form = tuple[str, tuple[Any, ...]]
"""Name of a look, and how that is written."""

RATIOS = 16
"""Maximum number of known ratios between factors and weights."""


@dataclass
class ProbeLoss:
    """Facts about the loss of the last probe step, which is not a step of the run."""

    counts: TargetCounts
    is_known: bool = True
    """It is a mean over targets or of whole sequences, or the loss of a rank without targets."""
    is_declared: bool = False
    """The step declared its count."""
    zeros: tuple[bool, ...] = ()
    """One flag per factor of the loss: it is 0; see ``factors_of``."""
    leaves_out: bool = False
    """Its loss functions ignore some labels."""
    is_of_sequences: bool = False
    """It is computed from values of whole sequences, and of no mean over targets."""

    @property
    def needs_fewer_labels(self) -> bool:
        """True if the loss may be right by chance where every token has a target."""
        return not (self.is_known or self.is_declared)


class TargetCounts:
    """Counts of all losses since the last step of an optimizer."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._numbers: list[tuple[Count, list[float] | None]] = []
        self._padding: list[tuple[str, torch.Tensor]] = []
        self._refusals: list[tuple[str, torch.Tensor]] = []
        self._shared: list[SharedValues] = []
        self._ratios = {1.0: None}
        """Known ratios between factors of losses by hand and the weights of their ranks."""
        self.clear = set[Form]()
        """Forms of divisors of shared terms that were in no doubt."""
        self.in_doubt = set[Form]()
        """Forms of divisors that were in doubt in the last vote."""
        self.exact = set[Form]()
        """Forms, without numbers, of divisors of losses that a check found exact."""
        self.are_asked = False
        """A loss went backward whose counts matter; all ranks know this, while a mean is known locally."""
        self.beside_other_terms = False
        """The loss has means over targets, and another term."""
        self.asks = False
        """A loss of no known kind went backward without a check."""

    def note(self, means: LossTerms, weighted: Count, *, is_probe: bool = False) -> None:
        """Record a loss, before its backward, with its means and its weight of ``weighted`` targets.

        Means beside other terms count in a probe step (``is_probe``) only.
        """
        self.are_asked = True
        self._numbers.append((weighted, None if means.other_terms else means.numbers))
        self.beside_other_terms = bool(means.counts) and means.other_terms
        for count in means.counts if is_probe or not means.other_terms else ():
            of_mean = torch.as_tensor(count)
            if not isinstance(
                weighted, torch.Tensor
            ):  # without a copy, for which the host would wait
                weighted = torch.full((), weighted, device=of_mean.device)
            self._pairs.append((of_mean, weighted.to(of_mean.device)))

    def equal_rows(self, rows: int) -> bool:
        """True if each count that differs from its weight is the number of rows."""
        return all(float(count) == rows for count, weight in self._pairs if _differ(count, weight))

    def note_shared(
        self,
        loss: torch.Tensor,
        weighted: Count,
        means: LossTerms | None,
        factors: LossFactors | None = None,
        whole: torch.Tensor | None = None,
        sums: TokenSums | None = None,
        divisors: Divisors | None = None,
    ) -> None:
        """Record the values of a loss that must be equal on ranks that share a sample, before its backward.

        Every rank records every loss, so that the same ones are compared.

        Args:
            loss: before it is weighted.
            weighted: the targets of this rank.
            means: the terms of the loss; ``None``: none are compared.
            factors: of a loss by hand.
            whole: a loss that must be the same number on all ranks; it stays on the device.
            sums: of a loss with a declared count.
            divisors: of its terms.
        """
        values = SharedValues(weighted)
        if divisors is not None and any(map(self._asks_about, divisors.looks)):
            values.divisors, values.is_followed = divisors, True
        if factors is not None:
            values.factors = [*factors.values, *factors.divisors]
            values.is_followed |= bool(values.factors)
        self._shared.append(values)
        if means is not None:
            values.is_followed |= bool(means.joined)
            values.joined = list(map(norm_and_projection, means.joined))
        is_exact = divisors is not None and (VALUES, (divisors.form,)) in self.exact
        if means is not None and not is_exact:
            found = _by_shared_values(loss, means, sums)
            every = [x for of_outputs in found for x in of_outputs if x is not None]
            gradients = [x for x in every if not isinstance(x, DTensor)]
            values.gradients = list(map(norm_and_projection, gradients))
            values.is_followed |= bool(found)
            if any(x.itemsize < 4 for x in gradients):
                values.digits = 3
        if sums is not None and sums.nodes and not is_exact:
            weights = [x for x in sums.weights(loss, weighted) if not isinstance(x, DTensor)]
            # A number is compared with its sign.
            values.counted = [
                x.expand(2) if x.dim() == 0 else norm_and_projection(x) for x in weights
            ]
            values.is_followed = True
            if sums.is_short:
                values.digits = 3
        if whole is not None:
            values.value = [norm_and_projection(whole)]
            values.value_digits = 6 if torch.finfo(whole.dtype).eps < 1e-6 else 2
            values.is_followed = True

    @property
    def shares(self) -> bool:
        """True if a loss has values that must be equal on ranks."""
        return any(each.is_followed for each in self._shared)

    def note_padding(self, how: str, found: torch.Tensor | None) -> None:
        """Record the flag of padding in the count or in the gradient of a loss; ``None``: no padding."""
        if found is not None:
            self._padding.append((how, found))

    def note_refusals(self, refusals: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Record errors of a step with their flags; every rank records as many."""
        self.are_asked |= bool(refusals)
        self._refusals += refusals

    def take(self) -> TargetCounts:
        """Remove and return all counts."""
        taken = TargetCounts()
        taken._pairs, self._pairs = self._pairs, []
        taken._numbers, self._numbers = self._numbers, []
        taken._padding, self._padding = self._padding, []
        taken._refusals, self._refusals = self._refusals, []
        taken._shared, self._shared = self._shared, []
        taken._ratios, taken.clear, taken.exact = self._ratios, self.clear, self.exact
        taken.in_doubt = self.in_doubt
        taken.are_asked, self.are_asked = self.are_asked, False
        taken.asks, self.asks = self.asks, False
        return taken

    @property
    def numbers(self) -> list[Any]:
        """Values that must be equal on ranks that share a sample: numeric factors of each loss, and norms.

        Waits for the device once, for the norms of all losses.
        """
        if followed := [each for each in self._shared if each.is_followed]:
            SharedValues.read(followed)
        nothing: tuple[list[str], ...] = ([], [], [], [], [])
        shared = [
            (*each.votes, each.factors_by(self._ratios)) if each.is_followed else nothing
            for each in self._shared
        ]
        return [numbers for _, numbers in self._numbers] + shared

    def check_values(self, where: str, group: dist.ProcessGroup, sample_size: int) -> None:
        """Check that losses of whole sequences are the same numbers on ranks that share a sample. Collective.

        Raises:
            ConfigError: on every rank, with both numbers.
        """
        own = [(each.texts()[2], each.value_digits) for each in self._shared]
        for _, (first, of_ranks) in gather_by_sample(own, group, sample_size):
            values, digits = of_ranks[0]
            for rank, (others, _) in enumerate(of_ranks):
                if first_difference(values, others, digits) is not None:
                    shown = (
                        float(x[1]) / 2 for x in (values, others)
                    )  # a sum of two, with the sign
                    raise ConfigError(f"{where}: {_values_text(first, first + rank, *shown)}")

    def difference_of_values(self, group: dist.ProcessGroup, sample_size: int) -> str | None:
        """Return the start of a message if values differ, or a divisor may be wrong. Collective."""
        return (
            self.shared_difference(group, sample_size)
            or self.factor_difference(group, sample_size)
            or self.doubt(group)
        )

    def _asks_about(self, look: Look) -> bool:
        """True if no step and no check has cleared divisors that are written like this."""
        is_clear = (look.what, look.written) in self.clear
        return not (is_clear or (look.what, look.without_numbers) in self.exact)

    def has_doubts(self) -> bool:
        """True if a divisor of a loss may be wrong on all ranks alike; waits for the device.

        Divisors of shared terms may meet a count in a later step, by chance.
        """
        self.in_doubt.clear()
        if all(each.divisors is None for each in self._shared):
            return False
        looked = [pair for each in self._shared for pair in each.doubts.items()]
        shared = [look for look, said in looked if look.what != OWN and said is None]
        self.clear |= {(look.what, look.written) for look in shared}
        self.in_doubt.update((look.what, look.written) for look in self._own_doubts)
        return bool(self.in_doubt)

    @property
    def _own_doubts(self) -> dict[Look, str]:
        looked = [pair for each in self._shared for pair in each.doubts.items()]
        return {look: said for look, said in looked if said is not None and self._asks_about(look)}

    def checked_forms(self, *, weighs_alike: bool) -> set[Form]:
        """Return the forms, without numbers, that a check of these losses clears.

        Args:
            weighs_alike: tokens of own terms weigh the same on ranks; such terms are cleared only if they
                are in doubt.
        """
        found = set[Form]()
        for each in self._shared:
            for look in () if each.divisors is None else each.divisors.looks:
                if not (look.what == OWN and weighs_alike and each.doubts.get(look, "") is None):
                    found.add((look.what, look.without_numbers))
            if each.divisors is not None and not weighs_alike:
                found.add((VALUES, (each.divisors.form,)))
        return found

    def doubt(self, group: dist.ProcessGroup | None) -> str | None:
        """Return the start of a message about the first doubtful divisor of any rank. Collective."""
        every = gather_objects(list(self._own_doubts.values())[:1], group)
        return next(chain.from_iterable(every), None)

    def shared_difference(self, group: dist.ProcessGroup, sample_size: int) -> str | None:
        """Return the start of a message if shared values differ by more than rounding. Collective."""
        own = [(each.texts(), each.digits) for each in self._shared]
        for _, (first, of_ranks) in gather_by_sample(own, group, sample_size):
            fewest = min(digits for _, digits in of_ranks)  # a rank without targets has no gradient
            kinds = ((0, JOINED, 17), (1, GATHERED, fewest), (3, COUNTED, fewest))
            for kind, said, digits in kinds:
                found = [(first + rank, x[kind]) for rank, (x, _) in enumerate(of_ranks) if x[kind]]
                for rank, values in found[1:]:
                    apart = first_difference(found[0][1], values, digits)
                    if apart is not None:
                        return said.format(apart[0], found[0][0], apart[1], rank)
        return None

    def factor_difference(self, group: dist.ProcessGroup, sample_size: int) -> str | None:
        """Return the start of a message if a factor of a loss by hand differs between ranks. Collective.

        A factor proportional to the ranks' weights is accepted.
        """
        own = [each.weighed_factors for each in self._shared]
        for _, (first, of_ranks) in gather_by_sample(own, group, sample_size):
            found = [(first + at, *each) for at, each in enumerate(of_ranks) if each[0]]
            if len({len(factors) for _, _, factors, _ in found}) != 1:
                continue  # another loss on some rank
            limit = max(limit for *_, limit in found)
            for values in zip(*(factors for _, _, factors, _ in found), strict=True):
                ratios = [x / each[1] for x, each in zip(values, found, strict=True)]
                if all(is_near(x, ratios[0], limit) for x in ratios):
                    self._ratios.update({ratios[0]: None} if len(self._ratios) < RATIOS else {})
                    continue
                other = [at for at, x in enumerate(values) if not is_near(x, values[0], limit)]
                if other:
                    shown = values[0], found[0][0], values[other[0]], found[other[0]][0]
                    return FACTORS.format(*shown)
        return None

    def check_numbers(self, step: int, group: dist.ProcessGroup, sample_size: int) -> None:
        """Check that losses are multiplied by the same numbers on ranks that share a sample. Collective.

        A rank without targets may have another loss; a loss of no known kind is not compared.

        Raises:
            ConfigError: on every rank, with both numbers.
        """
        own = [numbers if float(weighted) else None for weighted, numbers in self._numbers]
        for _, (first, of_ranks) in gather_by_sample(own, group, sample_size):
            found = [(first + at, x) for at, x in enumerate(of_ranks) if x is not None]
            for rank, numbers in found[1:]:
                if repr(numbers) != repr(found[0][1]):
                    raise ConfigError(_numbers_text(step, *found[0], rank, numbers))

    @property
    def differ(self) -> torch.Tensor | None:
        """True if a mean counted something else, or padding; on the device. ``None`` without any counts."""
        on_host: list[torch.Tensor] = []
        on_device: list[torch.Tensor] = []
        noted = map(itemgetter(1), (*self._padding, *self._refusals))
        for flag in (*starmap(_differ, self._pairs), *noted):
            (on_host if flag.is_cpu else on_device).append(flag.any())
        if not on_device:
            return torch.stack(on_host).any() if on_host else None
        found = torch.stack(on_device).any()
        # A copy of flags to the device would wait for it.
        return torch.ones_like(found) if any(on_host) else found

    def check(self, step: int, group: dist.ProcessGroup | None) -> None:
        """Check that the losses of all ranks counted their targets, and no padding. Collective.

        Raises:
            ConfigError: on every rank, with both numbers of each rank where they differ; or for a refusal of
                a step.
        """
        refused = [message for message, found in self._refusals if found][:1]
        for rank, messages in enumerate(gather_objects(refused, group)):
            for message in messages:
                raise ConfigError(f"step {step}, rank {rank}: {message} No rank has stepped.")
        padding = self.padding(group)
        if padding is not None:
            raise ConfigError(f"step {step}: {padding} No rank has stepped.")
        found = self.difference(group)
        if found is not None:
            raise ConfigError(
                f"step {step}: {found}. {DECLARE} Do not shift or cut labels in the step. No rank has "
                "stepped."
            )

    def padding(self, group: dist.ProcessGroup | None) -> str | None:
        """Return the message about the first rank on which padding counts, or ``None``. Collective."""
        own = [how for how, found in self._padding if found][:1]
        every = gather_objects(own, group)
        said = next(((how, rank) for rank, hows in enumerate(every) for how in hows), None)
        if said is None:
            return None
        how, rank = said
        return f"{how} on rank {rank}{MORE_TOKENS}"

    def difference(self, group: dist.ProcessGroup | None) -> str | None:
        """Return a message with both numbers of each rank where they differ, or ``None``. Collective."""
        own = [(float(a), float(b)) for a, b in self._pairs if _differ(a, b)][:1]
        every = gather_objects(own, group)
        found = [
            f"{counted:g} on rank {rank}, which is weighted by {weight:g}"
            for rank, pairs in enumerate(every)
            for counted, weight in pairs
        ]
        if not found:
            return None
        more = f" ({len(found)} ranks in all)" if len(found) > 4 else ""
        return (
            "a loss counted other targets than its rank is weighted by: "
            f"{'; '.join(found[:4])}{more}"
        )


def _by_shared_values(
    loss: torch.Tensor, means: LossTerms, sums: TokenSums | None
) -> list[Sequence[torch.Tensor | None]]:
    """Return derivatives by values of whole sequences, and of parameters, which are equal on ranks.

    Weighted by targets, products with a mean over a rank's tokens add up to one process's. So their other
    factor counts here without them.
    """
    nodes = means.gathered if sums is None else (*means.gathered, *means.parameters)
    if not nodes:
        return []
    sums = TokenSums() if sums is None else sums
    own = (*means.products, *sums.nodes)
    found = derivatives(loss, nodes, means.between, constants=own)
    factors = shared_factors(means.products) + sums.whole_inputs
    return found + (derivatives(loss, nodes, means.between, values=factors) if factors else [])


def gather_by_sample(
    own: list[Any], group: dist.ProcessGroup, sample_size: int
) -> Iterator[tuple[int, tuple[int, tuple[Any, ...]]]]:
    """Gather values per loss: yield its index, a sample's first rank, and its values. Collective."""
    every = gather_objects(own, group)
    for first in range(0, len(every), sample_size):
        of_ranks = zip(*every[first : first + sample_size], strict=False)
        yield from enumerate((first, each) for each in of_ranks)


def _values_text(rank: int, other: int, value: float, of_other: float) -> str:
    return (
        f"the loss is {value:g} on rank {rank} and {of_other:g} on rank {other}, which share a "
        "sample, but with labels='none' it must be the same number on both. Compute all of it from "
        "self.sequence_sum(values), sequence_mean, sequence_pick or unshard (divide by sequence_sum(mask), "
        "not by what a rank counts), and draw random numbers for it from a generator that is equal on these "
        "ranks. No rank has stepped."
    )


def _numbers_text(step: int, rank: int, own: list[float], other: int, others: list[float]) -> str:
    pairs = zip_longest(own, others, fillvalue=1)
    a, b = next((a, b) for a, b in pairs if repr(a) != repr(b))
    return (
        f"step {step}: a loss is multiplied or divided by {a:g} on rank {rank} and by {b:g} on rank {other}, "
        "which share a sample, so that their tokens would not weigh the same. Take out what a rank counts "
        "or computes of its own tokens: the strategy weights a mean by them. A number of the whole sample "
        "comes from unshard(...), such as (unshard(labels) != -100).sum().item(). No rank has stepped."
    )


def _differ(count: torch.Tensor, weighted: torch.Tensor) -> torch.Tensor:
    """True if a count differs from its weight; only sums of class weights may differ by rounding."""
    if not count.is_floating_point():
        return count.double() != weighted.double()
    return (count.double() - weighted.double()).abs() > 1e-5 * weighted.double().abs()
