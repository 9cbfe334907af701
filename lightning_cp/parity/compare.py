"""Two passes of one step, compared: relative errors that are the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_cp.comm.reduce import all_max, all_sum
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.parity.passes import Event, LocalTokens, StepPass

# Numbers of all ranks, and what they are in proportion.


def largest(value: float, mesh: ContextParallelMesh) -> float:
    """Of what all ranks have."""
    own = torch.tensor([value], dtype=torch.float64)
    return float(all_max(own, mesh.control_group(Flat.LOSS)))


def ratio(square: float, of: float) -> float:
    """The root of two sums of squares; infinite where it is no number."""
    if square == 0.0:
        return 0.0
    ratio = (square / of) ** 0.5 if of else float("inf")
    return ratio if ratio == ratio else float("inf")


# Gradients of two passes, compared over all ranks.


FLOOR = 1e-3
"""Of a gradient's size, over that of an average parameter: smaller ones are compared with this."""


@dataclass(frozen=True)
class GradientErrors:
    """Of all parameters, the same on every rank."""

    by_name: dict[str, float]
    """Relative."""
    factor: float
    """What one process's are multiplied by, at best."""
    residual: float
    """What is left then, relative."""


def gradient_errors(
    alone: StepPass, parallel: StepPass, mesh: ContextParallelMesh
) -> GradientErrors:
    """Sums over ranks count a replicated gradient several times, in numerator and denominator alike."""
    names = sorted(alone.gradients.keys() | parallel.gradients.keys())
    unit = largest(max((_size(x) for x in alone.gradients.values()), default=0.0), mesh) or 1.0
    sums = torch.zeros(len(names), 5, dtype=torch.float64)
    for at, name in enumerate(names):
        sums[at] = _sums(alone.gradients.get(name), parallel.gradients.get(name), unit)
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


def _sums(alone: torch.Tensor | None, parallel: torch.Tensor | None, unit: float) -> torch.Tensor:
    """|p - a|^2, |a|^2, |p|^2, a p, and how many numbers; a gradient that is not there is zeros.

    In squares of ``unit``, the largest number of all, so that none of them overflows.
    """
    given = alone if alone is not None else parallel
    assert given is not None
    a = torch.zeros_like(given).double() if alone is None else alone.double() / unit
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


# The distance that two ways of computing the same may have, by the dtype that they compute in.
#
# Errors are relative norms, ``|a - b| / |b|``, of the whole tensor. In exact arithmetic both ways are
# equal; what is allowed is rounding, which grows with depth: several times what healthy models show
# (``docs/doctor.md``).


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors."""

    dtype: str
    loss: float
    logits: float
    gradient: float


TOLERANCES = {
    # Models that are float64 have norms, rotary rows and losses in float32 all the same.
    torch.float64: Tolerance("float64", 1e-5, 1e-5, 1e-4),
    torch.float32: Tolerance("float32", 1e-4, 1e-3, 2e-3),
    torch.float16: Tolerance("float16", 5e-3, 2e-2, 5e-2),
    torch.bfloat16: Tolerance("bfloat16", 1e-2, 5e-2, 1e-1),
}


def tolerance_of(dtypes: Iterable[torch.dtype]) -> Tolerance:
    """That of the coarsest dtype.

    Args:
        dtypes: of parameters, of autocast where that is on, and half precision that a step computes in.
    """
    coarsest = max(
        (dtype for dtype in dtypes if dtype.is_floating_point),
        key=lambda dtype: torch.finfo(dtype).eps,
        default=torch.float32,
    )
    return TOLERANCES.get(coarsest, TOLERANCES[torch.bfloat16])


def half_of(dtypes: Iterable[torch.dtype]) -> set[torch.dtype]:
    """Those below float32, whose rounding a float64 model's tolerance does not allow for."""
    limit = torch.finfo(torch.float32).eps
    return {x for x in dtypes if x.is_floating_point and torch.finfo(x).eps > limit}


@dataclass(frozen=True)
class Difference:
    """Of one tensor."""

    name: str
    error: float
    """Relative; infinite where only one pass has it, or one is not finite."""
    tolerance: float

    @property
    def is_fault(self) -> bool:
        return not self.error <= self.tolerance


@dataclass(frozen=True)
class Comparison:
    """Of a context-parallel pass with one on one process; the same on every rank."""

    loss: Difference
    logits: Difference | None
    """``None``: no module's output was seen that is along the sequence."""
    gradients: tuple[Difference, ...]
    """The largest in proportion first."""
    factor: float
    """What one process's gradients are multiplied by, at best."""
    residual: float
    """What is left then, relative."""
    spread: float
    """How far one process's losses are apart on ranks that share a sample, relative."""
    first_rank: float
    """The error of logits on the first rank of each group alone."""
    tolerance: Tolerance
    documents_isolated: bool = False
    """One process would not isolate the documents of the batch, and was made to."""

    @property
    def is_fault(self) -> bool:
        every = (self.loss, *self.gradients, *([self.logits] if self.logits else []))
        return any(one.is_fault for one in every) or self.is_spread

    @property
    def is_spread(self) -> bool:
        """Ranks that share a sample do not have one process's loss alike."""
        return self.spread > self.tolerance.loss

    @property
    def worst(self) -> Difference:
        """That which is the furthest beyond its tolerance, or the nearest to it."""
        every = [self.loss, *self.gradients, *([self.logits] if self.logits else [])]
        return max(every, key=lambda one: one.error / one.tolerance)


def compare(
    alone: StepPass, parallel: StepPass, mesh: ContextParallelMesh, tolerance: Tolerance
) -> Comparison:
    """Compare what ranks hold; all of the ``loss`` group come here together."""
    assert parallel.part is not None
    errors = gradient_errors(alone, parallel, mesh)
    gradients = tuple(
        Difference(name, error, tolerance.gradient) for name, error in errors.by_name.items()
    )
    logits = logits_of(alone.events, parallel.events, parallel.part)
    shared = _relative_norms([logits], mesh)[0] if _anywhere(logits, mesh) else None
    first = logits if parallel.part.cp_rank == 0 else None
    return Comparison(
        loss=Difference("loss", _loss_error(alone, parallel, mesh), tolerance.loss),
        logits=None if shared is None else Difference("logits", shared, tolerance.logits),
        # As they are shown: of equals the one that the model has first.
        gradients=tuple(sorted(gradients, key=lambda one: -float(f"{one.error:.1e}"))),
        factor=errors.factor,
        residual=errors.residual,
        spread=_spread(alone, mesh),
        first_rank=_relative_norms([first], mesh)[0],
        tolerance=tolerance,
        documents_isolated=bool(largest(float(alone.documents_isolated), mesh)),
    )


@dataclass(frozen=True)
class TokenGradients:
    """Those at the last output, compared with one process's: each token's has a direction, and a factor."""

    most_agree: bool
    """But for one factor of a rank."""
    all_along: bool
    """Every token's is a multiple of one process's."""
    one_factor: bool
    """That of all tokens is the same, or differs between ranks as their numbers of targets do."""
    of_other_tokens: bool = False
    """Factors are those of a mean over other tokens than the ones with targets, by which a rank's loss is
    weighed."""


def token_gradients(
    alone: StepPass, parallel: StepPass, mesh: ContextParallelMesh, tolerance: Tolerance
) -> TokenGradients | None:
    """Compare those of all ranks.

    Returns:
        ``None`` if there is no such output on some rank.
    """
    assert parallel.part is not None
    a, p = alone.at_output, parallel.at_output
    pair = None if a is None or p is None else parallel.part.by_token(a, p)
    if largest(float(pair is None), mesh):
        return None
    assert pair is not None
    whole, own = (x.reshape(-1, x.shape[-1]) for x in pair)
    kept = whole.abs().sum(-1) > 0
    extra = bool((own[~kept] != 0).any())
    whole, own = whole[kept], own[kept]
    factors = ((own * whole).sum(-1) / whole.square().sum(-1))[:, None]
    # The median token's, as those at seams have another target or none.
    factor = factors.median() if len(factors) else factors.sum()
    along = _apart(own, factors * whole) <= tolerance.gradient
    equal = _apart(own, factor * whole) <= tolerance.gradient
    most = not len(equal) or bool(equal.double().median())
    told = (most, bool(along.all()) and not extra, bool(equal.all()))
    most, along_all, equal_all = (not largest(float(not one), mesh) for one in told)
    own_factor = float(factor) if len(factors) else None
    shared = None if own_factor is None else own_factor / (parallel.share or 1.0)
    fixed = [_is_same(value, mesh, tolerance) for value in (own_factor, shared)]
    others = equal_all and _is_of_other_tokens(own_factor, parallel.share, mesh, tolerance)
    return TokenGradients(most, along_all, equal_all and any(fixed), others)


def _is_of_other_tokens(
    factor: float | None, share: float, mesh: ContextParallelMesh, tolerance: Tolerance
) -> bool:
    """True if ranks' shares of what a mean counts, as far as their factors tell, add up to 1.

    A rank's mean over k tokens of K is weighed by its share of the targets, and should be by k / K.
    """
    known = factor is not None and factor > 0 and share > 0
    size = mesh.cp_size
    told = torch.tensor([share * size / factor if known and factor else float("inf")])
    total = float(all_sum(told.double(), mesh.control_group(Flat.CP)))
    # Of one process's gradients, which are averaged over ranks.
    return not largest(float(not abs(total - 1) <= size * tolerance.gradient), mesh)


def _is_same(value: float | None, mesh: ContextParallelMesh, tolerance: Tolerance) -> bool:
    """On all ranks that have one."""
    high = largest(-float("inf") if value is None else value, mesh)
    low = -largest(-float("inf") if value is None else -value, mesh)
    return high - low <= tolerance.gradient * abs(high)


def _apart(own: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Of each token, relative; 1 where there is nothing."""
    return ((own - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(1.0)


Pair = tuple[torch.Tensor, torch.Tensor]
"""A whole tensor's part, and this rank's own."""


def allowing(found: Comparison, rounded: Comparison) -> Comparison:
    """The same differences, each allowed as far as rounding alone moves that tensor in one process."""
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
"""Times what one draw of other rounding does."""


def logits_of(alone: Sequence[Event], parallel: Sequence[Event], part: LocalTokens) -> Pair | None:
    """Of the last module whose output runs along the sequence and has several numbers a token; of those
    that train, if any does."""
    known = {event.key: event for event in alone}
    outputs = [event for event in reversed(parallel) if event.kind == "output"]
    for event in sorted(outputs, key=lambda event: not event.trains):
        pair = pair_of(known, event, part)
        if pair is not None and event.tensor is not None and event.tensor.dim() > 2:
            return pair
    return None


def pair_of(
    known: dict[tuple[str, str, int], Event], event: Event, part: LocalTokens
) -> Pair | None:
    """The two tensors of an event, where they are parts of one floating-point tensor."""
    other = known.get(event.key)
    if other is None or other.tensor is None or event.tensor is None:
        return None
    if not (event.tensor.is_floating_point() and other.tensor.is_floating_point()):
        return None
    return part.of_whole(other.tensor, event.tensor)


def first_deviation(
    alone: StepPass, parallel: StepPass, mesh: ContextParallelMesh, tolerance: Tolerance
) -> Event | None:
    """The first event whose tensor is another one on some rank; all ranks have the same events."""
    assert parallel.part is not None
    known = {event.key: event for event in alone.events}
    pairs = [pair_of(known, event, parallel.part) for event in parallel.events]
    errors = _relative_norms(pairs, mesh)
    for event, error in zip(parallel.events, errors, strict=True):
        if not error <= tolerance.logits:
            return event
    return None


def _relative_norms(pairs: Sequence[Pair | None], mesh: ContextParallelMesh) -> list[float]:
    """Over all ranks, |own - whole| / |whole| of each; ranks may have had more calls than others."""
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


def _loss_error(alone: StepPass, parallel: StepPass, mesh: ContextParallelMesh) -> float:
    """The largest of all groups."""
    a, b = float(parallel.loss), float(alone.loss)
    own = 0.0 if a == b else abs(a - b) / abs(b) if b else float("inf")
    return largest(own if own == own else float("inf"), mesh)


def _spread(alone: StepPass, mesh: ContextParallelMesh) -> float:
    """Between ranks that share a sample; the largest of all groups."""
    own, group = alone.loss.double().cpu().reshape(1), mesh.control_group(Flat.CP)
    high, low = float(all_max(own, group)), -float(all_max(-own, group))
    apart = (high - low) / max(abs(high), abs(low)) if high != low else 0.0
    return largest(apart if apart == apart else float("inf"), mesh)
