"""Comparison of two passes of one step, by relative errors that are the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_cp.comm.reduce import all_max, all_sum
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.parity.passes import Event, LocalTokens, StepPass

# Numbers over all ranks, and their ratios.


def largest(value: float, mesh: ContextParallelMesh) -> float:
    """The largest value of all ranks."""
    own = torch.tensor([value], dtype=torch.float64)
    return float(all_max(own, mesh.control_group(Flat.LOSS)))


def ratio(square: float, of: float) -> float:
    """The root of the ratio of two sums of squares; infinite if it is not a number."""
    if square == 0.0:
        return 0.0
    ratio = (square / of) ** 0.5 if of else float("inf")
    return ratio if ratio == ratio else float("inf")


# Gradients of two passes, compared over all ranks.


FLOOR = 1e-3
"""Least size of a gradient, relative to an average parameter's; smaller gradients are compared with it."""


@dataclass(frozen=True)
class GradientErrors:
    """Errors of all parameters' gradients; the same on every rank."""

    by_name: dict[str, float]
    """Relative error by name."""
    factor: float
    """The best single factor from one process's gradients to these."""
    residual: float
    """The relative error that remains with this factor."""


def gradient_errors(
    single: StepPass, parallel: StepPass, mesh: ContextParallelMesh
) -> GradientErrors:
    """Sums over ranks count a replicated gradient several times, in numerator and denominator alike."""
    names = sorted(single.gradients.keys() | parallel.gradients.keys())
    unit = largest(max((_size(x) for x in single.gradients.values()), default=0.0), mesh) or 1.0
    sums = torch.zeros(len(names), 5, dtype=torch.float64)
    for at, name in enumerate(names):
        sums[at] = _sums(single.gradients.get(name), parallel.gradients.get(name), unit)
    found = all_sum(sums, mesh.control_group(Flat.LOSS))
    difference, reference, own, product, count = found.unbind(1)
    mean = float(reference.sum() / count.sum().clamp(min=1))
    floors = (FLOOR**2) * mean * count
    by_name = {
        name: ratio(float(difference[at]), max(float(reference[at]), float(floors[at])))
        for at, name in enumerate(names)
    }
    whole = float(reference.sum())
    factor = float(product.sum()) / whole if whole else float("nan")
    left = float(own.sum()) - 2 * factor * float(product.sum()) + factor**2 * whole
    return GradientErrors(by_name, factor, ratio(max(left, 0.0), whole * factor**2))


def _size(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _sums(single: torch.Tensor | None, parallel: torch.Tensor | None, unit: float) -> torch.Tensor:
    """Sums of |p - a|^2, |a|^2, |p|^2, a p, and the number of elements; a missing gradient counts as zeros.

    In units of ``unit`` squared, the largest absolute value, so that none of them overflows.
    """
    given = single if single is not None else parallel
    assert given is not None
    a = torch.zeros_like(given).double() if single is None else single.double() / unit
    p = torch.zeros_like(given).double() if parallel is None else parallel.double() / unit
    return torch.stack(
        [
            (p - a).square().sum(),
            a.square().sum(),
            p.square().sum(),
            (a * p).sum(),
            a.new_tensor(a.numel()),
        ]
    ).cpu()


# Tolerances between two computations of the same step, by their dtype.
#
# Errors are relative norms, ``|a - b| / |b|``, of the whole tensor. In exact arithmetic both are equal; the
# tolerance is for rounding, which grows with depth: several times the error of healthy models
# (``docs/guides/doctor.md``).


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors."""

    dtype: str
    loss: float
    logits: float
    gradient: float


TOLERANCES = {
    # Float64 models still have norms, rotary rows and losses in float32.
    torch.float64: Tolerance("float64", 1e-5, 1e-5, 1e-4),
    torch.float32: Tolerance("float32", 1e-4, 1e-3, 2e-3),
    torch.float16: Tolerance("float16", 5e-3, 2e-2, 5e-2),
    torch.bfloat16: Tolerance("bfloat16", 1e-2, 5e-2, 1e-1),
}


def tolerance_of(dtypes: Iterable[torch.dtype]) -> Tolerance:
    """The tolerance of the coarsest dtype.

    Args:
        dtypes: of parameters, of autocast if on, and half precision that a step computes in.
    """
    coarsest = max(
        (dtype for dtype in dtypes if dtype.is_floating_point),
        key=lambda dtype: torch.finfo(dtype).eps,
        default=torch.float32,
    )
    return TOLERANCES.get(coarsest, TOLERANCES[torch.bfloat16])


def half_dtypes(dtypes: Iterable[torch.dtype]) -> set[torch.dtype]:
    """The dtypes below float32, for which a float64 model's tolerance is too small."""
    limit = torch.finfo(torch.float32).eps
    return {x for x in dtypes if x.is_floating_point and torch.finfo(x).eps > limit}


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor."""

    name: str
    error: float
    """Relative; infinite where only one pass has the tensor, or one is not finite."""
    tolerance: float

    @property
    def is_fault(self) -> bool:
        return not self.error <= self.tolerance


@dataclass(frozen=True)
class Comparison:
    """A context-parallel pass compared with one process; the same on every rank."""

    loss: Difference
    logits: Difference | None
    """``None`` if no module had an output along the sequence."""
    gradients: tuple[Difference, ...]
    """Sorted by error relative to tolerance, largest first."""
    factor: float
    """The best single factor from one process's gradients to these."""
    residual: float
    """The relative error that remains with this factor."""
    spread: float
    """Relative spread of one process's losses over ranks that share a sample."""
    first_rank: float
    """Error of the logits on the first rank of each group."""
    tolerance: Tolerance
    documents_isolated: bool = False
    """True if one process was made to isolate the batch's documents, which the model alone would not."""

    @property
    def is_fault(self) -> bool:
        every = (self.loss, *self.gradients, *([self.logits] if self.logits else []))
        return any(one.is_fault for one in every) or self.is_spread

    @property
    def is_spread(self) -> bool:
        """True if ranks that share a sample computed different losses for one process."""
        return self.spread > self.tolerance.loss

    @property
    def worst(self) -> Difference:
        """The difference with the largest ratio of error to tolerance."""
        every = [self.loss, *self.gradients, *([self.logits] if self.logits else [])]
        return max(every, key=lambda one: one.error / one.tolerance)


def compare(
    single: StepPass, parallel: StepPass, mesh: ContextParallelMesh, tolerance: Tolerance
) -> Comparison:
    """Compare what ranks hold. Collective over the ``loss`` group."""
    assert parallel.part is not None
    errors = gradient_errors(single, parallel, mesh)
    gradients = tuple(
        Difference(name, error, tolerance.gradient) for name, error in errors.by_name.items()
    )
    logits = find_logits(single.events, parallel.events, parallel.part)
    shared = _relative_norms([logits], mesh)[0] if _anywhere(logits, mesh) else None
    first = logits if parallel.part.cp_rank == 0 else None
    return Comparison(
        loss=Difference("loss", _loss_error(single, parallel, mesh), tolerance.loss),
        logits=None if shared is None else Difference("logits", shared, tolerance.logits),
        # In their order in the table: of equal ones the model's first.
        gradients=tuple(sorted(gradients, key=lambda one: -float(f"{one.error:.1e}"))),
        factor=errors.factor,
        residual=errors.residual,
        spread=_spread(single, mesh),
        first_rank=_relative_norms([first], mesh)[0],
        tolerance=tolerance,
        documents_isolated=bool(largest(float(single.documents_isolated), mesh)),
    )


@dataclass(frozen=True)
class TokenGradients:
    """Gradients of each token at the last output, compared with one process's by direction and factor."""

    most_agree: bool
    """True if most tokens agree, up to one factor per rank."""
    all_along: bool
    """True if the gradient of every token is a multiple of one process's."""
    one_factor: bool
    """True if the factor is the same for all tokens, or differs between ranks as their numbers of
    targets do.
    """
    of_other_tokens: bool = False
    """True if the factors are those of a mean over other tokens than the ones with targets, which weight a
    rank's loss.
    """
    one_a_row: bool = False
    """True if one process has a gradient at one token of each row at most, and not at all of the same tokens
    as ranks.
    """
    of_sequences: bool = False
    """True if tokens share factors, as those of a row or a document do whose sum is taken."""


def token_gradients(
    single: StepPass, parallel: StepPass, mesh: ContextParallelMesh, tolerance: Tolerance
) -> TokenGradients | None:
    """Compare the token gradients of all ranks.

    Returns:
        ``None`` if there is no such output on some rank.
    """
    assert parallel.part is not None
    a, p = single.at_output, parallel.at_output
    pair = None if a is None or p is None else parallel.part.by_token(a, p)
    if largest(float(pair is None), mesh):
        return None
    assert pair is not None
    by_rows = (x.transpose(0, 1) if x.dim() > 2 else x for x in pair)
    whole, own = (x.reshape(-1, x.shape[-1]) for x in by_rows)
    kept = whole.abs().sum(-1) > 0
    extra = bool((own[~kept] != 0).any())
    whole, own = whole[kept], own[kept]
    factors = ((own * whole).sum(-1) / whole.square().sum(-1))[:, None]
    # The median token's factor, since tokens at seams have another target or none.
    factor = factors.median() if len(factors) else factors.sum()
    along = _relative_distance(own, factors * whole) <= tolerance.gradient
    equal = _relative_distance(own, factor * whole) <= tolerance.gradient
    most = not len(equal) or bool(equal.double().median())
    told = (
        most,
        bool(along.all()) and not extra,
        bool(equal.all()),
        _is_shared(factors, tolerance),
    )
    most, along_all, equal_all, shared_all = (not largest(float(not one), mesh) for one in told)
    own_factor = float(factor) if len(factors) else None
    shared = None if own_factor is None else own_factor / (parallel.share or 1.0)
    fixed = [_is_same(value, mesh, tolerance) for value in (own_factor, shared)]
    others = equal_all and _is_of_other_tokens(own_factor, parallel.share, mesh, tolerance)
    is_few = int((a.abs().sum(-1) > 0).sum()) <= len(a) if a is not None else False
    one_a_row = bool(largest(float(extra), mesh)) and not largest(float(not is_few), mesh)
    return TokenGradients(most, along_all, equal_all and any(fixed), others, one_a_row, shared_all)


def _is_shared(factors: torch.Tensor, tolerance: Tolerance) -> bool:
    """True if most tokens have the factor of the token before them, as those of a row or a document do."""
    if len(factors) < 2:
        return True
    changes = factors.flatten().diff().abs() > tolerance.gradient * factors.abs().max()
    return 2 * int(changes.sum()) < len(factors)


def _is_of_other_tokens(
    factor: float | None, share: float, mesh: ContextParallelMesh, tolerance: Tolerance
) -> bool:
    """True if ranks' shares of a mean's count, estimated from their factors, add up to 1.

    A rank's mean over k tokens of K has the weight of its share of the targets, where k / K would be right.
    """
    known = factor is not None and factor > 0 and share > 0
    size = mesh.cp_size
    told = torch.tensor([share * size / factor if known and factor else float("inf")])
    total = float(all_sum(told.double(), mesh.control_group(Flat.CP)))
    # Relative to one process's gradients, which are averaged over ranks.
    return not largest(float(not abs(total - 1) <= size * tolerance.gradient), mesh)


def _is_same(value: float | None, mesh: ContextParallelMesh, tolerance: Tolerance) -> bool:
    """True if the value is the same on all ranks that have one."""
    high = largest(-float("inf") if value is None else value, mesh)
    low = -largest(-float("inf") if value is None else -value, mesh)
    return high - low <= tolerance.gradient * abs(high)


def _relative_distance(own: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative difference per token; 1 where one process has none."""
    return ((own - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(1.0)


Pair = tuple[torch.Tensor, torch.Tensor]
"""This rank's slice of a whole tensor, and its own tensor."""


def allow_rounding(found: Comparison, rounded: Comparison) -> Comparison:
    """The same differences, with tolerances raised to the effect of rounding alone in one process."""
    moved = {one.name: MARGIN * one.error for one in rounded.gradients}

    def allowed(one: Difference, by: float) -> Difference:
        return replace(one, tolerance=max(one.tolerance, by if by < float("inf") else 0.0))

    logits = found.logits
    if logits is not None and rounded.logits is not None:
        logits = allowed(logits, MARGIN * rounded.logits.error)
    return replace(
        found,
        loss=allowed(found.loss, MARGIN * rounded.loss.error),
        logits=logits,
        gradients=tuple(allowed(one, moved.get(one.name, 0.0)) for one in found.gradients),
    )


MARGIN = 2
"""Factor on the effect of one draw of other rounding."""


def find_logits(
    single: Sequence[Event], parallel: Sequence[Event], part: LocalTokens
) -> Pair | None:
    """The output of the last module with several numbers per token along the sequence; of trained modules
    first.
    """
    known = {event.key: event for event in single}
    outputs = [event for event in reversed(parallel) if event.kind == "output"]
    for event in sorted(outputs, key=lambda event: not event.trains):
        pair = event_pair(known, event, part)
        if pair is not None and event.tensor is not None and event.tensor.dim() > 2:
            return pair
    return None


def event_pair(
    known: dict[tuple[str, str, int], Event], event: Event, part: LocalTokens
) -> Pair | None:
    """Both tensors of an event, if they are slices of one floating-point tensor."""
    other = known.get(event.key)
    if other is None or other.tensor is None or event.tensor is None:
        return None
    if not (event.tensor.is_floating_point() and other.tensor.is_floating_point()):
        return None
    return part.real_values(other.tensor, event.tensor)


def first_deviation(
    single: StepPass, parallel: StepPass, mesh: ContextParallelMesh, tolerance: Tolerance
) -> Event | None:
    """The first event whose tensor differs on some rank; all ranks return the same."""
    assert parallel.part is not None
    known = {event.key: event for event in single.events}
    pairs = [event_pair(known, event, parallel.part) for event in parallel.events]
    errors = _relative_norms(pairs, mesh)
    for event, error in zip(parallel.events, errors, strict=True):
        if not error <= tolerance.logits:
            return event
    return None


def _relative_norms(pairs: Sequence[Pair | None], mesh: ContextParallelMesh) -> list[float]:
    """|own - whole| / |whole| of each pair over all ranks; some ranks may have more calls than others."""
    most = int(largest(float(len(pairs)), mesh))
    sums = torch.zeros(most, 2, dtype=torch.float64)
    for at, pair in enumerate(pairs):
        if pair is not None:
            whole, own = pair
            sums[at, 0], sums[at, 1] = (own - whole).square().sum(), whole.square().sum()
    total = all_sum(sums, mesh.control_group(Flat.LOSS))
    return [ratio(float(a), float(b)) for a, b in total.tolist()[: len(pairs)]]


def _anywhere(pair: Pair | None, mesh: ContextParallelMesh) -> bool:
    return bool(largest(float(pair is not None), mesh))


def _loss_error(single: StepPass, parallel: StepPass, mesh: ContextParallelMesh) -> float:
    """The largest relative error of the loss over groups."""
    a, b = float(parallel.loss), float(single.loss)
    own = 0.0 if a == b else abs(a - b) / abs(b) if b else float("inf")
    return largest(own if own == own else float("inf"), mesh)


def _spread(single: StepPass, mesh: ContextParallelMesh) -> float:
    """The largest spread between ranks that share a sample, over groups."""
    own, group = single.loss.double().cpu().reshape(1), mesh.control_group(Flat.CP)
    high, low = float(all_max(own, group)), -float(all_max(-own, group))
    apart = (high - low) / max(abs(high), abs(low)) if high != low else 0.0
    return largest(apart if apart == apart else float("inf"), mesh)
