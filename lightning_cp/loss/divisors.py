"""Numbers that terms of a loss are divided by: what ranks count may equal, and be no number of one process.

Where all ranks count as many targets, nothing differs between them if a sum over a rank's tokens is divided
by something else than its count, or a value of whole sequences by a number of the rank's tokens::

    (losses * mask).sum(1).mean()                   # divided by rows; one process's sum is larger
    sequence_sum(losses).sum() / losses.numel()     # the rank's tokens; one process has more

So each sum needs its count among its divisors, and no other term may have one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations, dropwhile
from math import prod
from typing import Any

import torch

from lightning_cp.loss.derivatives import TokenSums, mean_size
from lightning_cp.loss.terms import (
    SCALING,
    LossTerms,
    constants_of,
    is_shared,
    is_trained,
    is_whole,
    operator_of,
    producing_edge,
    sources_of,
)
from lightning_cp.utils.autograd_notes import Count


@dataclass(eq=False)
class Divisor:
    """A divisor of a term, or the inverse of its factor."""

    value: Count
    """A number, or float64 [2] on the device: the least and the greatest of some numbers."""
    limit: float = 1e-5
    """Relative rounding error."""


Path = tuple[Divisor, ...]
"""Divisors between a loss and a term."""
Kind = tuple[frozenset[int], int]


def _is_number(divisor: Divisor) -> bool:
    return not isinstance(divisor.value, torch.Tensor)


@dataclass
class Divisors:
    """Divisors of the terms of a loss."""

    tokens: int
    local_len: int
    """Tokens of this rank, and of a row of it."""
    own: list[Path] = field(default_factory=list[Path])
    """Of each sum over a rank's own tokens, if the step declares what they count."""
    shared: list[Divisor] = field(default_factory=list[Divisor])
    """Of values of whole sequences, and of parameters."""
    alike: torch.Tensor | bool = False
    """All ranks that share a sample have as many targets."""

    @property
    def kind(self) -> Kind:
        """Numbers of divisors of own and of shared terms: equal for losses that are written alike."""
        return frozenset(map(len, self.own)), len(self.shared)

    @property
    def inner_kind(self) -> Kind:
        """The same without last divisions by numbers, as for accumulation, which a check does not see."""
        own = (list(dropwhile(_is_number, path)) for path in self.own)
        return frozenset(map(len, own)), sum(not _is_number(x) for x in self.shared)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Values on a device: each divisor once, and ``alike``."""
        every = dict.fromkeys(chain(*self.own, self.shared))
        values = [x.value for x in every] + [self.alike]
        return [x for x in values if isinstance(x, torch.Tensor)]

    def doubt(self, targets: float, numbers: list[float]) -> str | None:
        """Return the start of a message about a divisor, or ``None``.

        Args:
            targets: of this rank.
            numbers: of ``tensors``.
        """
        known = dict(zip(map(id, self.tensors), _pairs_of(self.tensors, numbers), strict=True))

        def bounds(x: Count | bool) -> tuple[float, float]:
            return known[id(x)] if isinstance(x, torch.Tensor) else (float(x), float(x))

        def is_one_of(divisor: Divisor, counts: Collection[float]) -> bool:
            ends = bounds(divisor.value)
            return any(all(abs(x - n) <= divisor.limit * n for x in ends) for n in counts)

        alike = bool(bounds(self.alike)[0]) and targets > 0
        if alike and not all(_has_product(path, bounds, targets) for path in self.own):
            return OWN_DIVISOR.format(targets)
        counts = {self.tokens, self.local_len, *([targets] if alike else [])} - {0, 1}
        for divisor in self.shared:
            if is_one_of(divisor, counts):
                return SHARED_DIVISOR.format(bounds(divisor.value)[0])
        return None


OWN_DIVISOR = (
    "the step declares {:g} targets on every rank, but a sum of the loss over a rank's tokens is not divided "
    "by that number, or is not the last thing that is computed of its tokens, so "
)
"""Start of a message that ``ASK`` completes."""

SHARED_DIVISOR = (
    "a term of whole sequences, or of parameters, is divided by {:g}, which is a number of this rank's "
    "tokens alone (sequence_sum(mask) counts those of whole sequences), so "
)
"""Start of a message that ``ASK`` completes."""


def _pairs_of(tensors: list[torch.Tensor], numbers: list[float]) -> Iterator[tuple[float, float]]:
    at = 0
    for x in tensors:
        yield numbers[at], numbers[at + x.numel() - 1]
        at += x.numel()


def _has_product(
    path: Path, bounds: Callable[[Count], tuple[float, float]], targets: float
) -> bool:
    """True if some divisors of a path multiply to the targets."""
    limit = max((x.limit for x in path), default=0.0)
    ends = [bounds(x.value) for x in path]
    numbers = [least for least, greatest in ends if abs(greatest - least) <= limit * abs(least)]
    some = chain.from_iterable(combinations(numbers[:_MOST], n) for n in range(_MOST + 1))
    return any(abs(abs(prod(each)) - targets) <= limit * targets for each in some)


_MOST = 8
"""Maximum number of divisors whose products are looked at."""


def divisors_of(
    loss: torch.Tensor,
    means: LossTerms,
    sums: TokenSums | None,
    rows: int,
    local_len: int,
) -> Divisors:
    """Return the divisors of a loss; nothing waits for a device.

    Args:
        loss: before its backward.
        means: its terms.
        sums: its sums over a rank's own tokens, if the step declares what they count.
        rows: of the batch.
        local_len: tokens of a row on this rank.
    """
    found = Divisors(rows * local_len, local_len)
    divisors: dict[Any, Divisor | None] = {}

    def divisor_at(node: Any) -> Divisor | None:
        """Return one object for a node, however many paths it is on."""
        if node not in divisors:
            divisors[node] = _divisor_at(node, rows)
        return divisors[node]

    sums = TokenSums() if sums is None else sums
    end = producing_edge(loss.grad_fn, loss.output_nr)[0]
    found.own += _own_paths(end, sums, found.tokens, divisor_at)
    starts = [end, *(node for node, _ in sums.whole_inputs)]
    found.shared += _shared_divisors(starts, means.between.difference(sums.nodes), divisor_at)
    return found


def _own_paths(
    end: Any, sums: TokenSums, tokens: int, divisor_at: Callable[[Any], Divisor | None]
) -> dict[Path, None]:
    """Return the divisors of each sum over tokens: between the loss and it, and below it up to a function.

    Of a loss with more paths than can be looked at, one without divisors, which is in doubt.
    """
    means = dict(zip(sums.nodes, sums.sizes, strict=True))
    nodes = _nodes_towards(
        means.__contains__, [end], lambda x: sources_of(x) if x in sums.visited else []
    )
    sizes: dict[Any, Path] = {}
    found: dict[Path, None] = {}
    ahead: list[tuple[Any, Path, bool]] = [(end, (), False)]
    seen: set[tuple[Any, Path, bool]] = set()
    while ahead:
        node, path, is_below = ahead.pop()
        if (node, path, is_below) in seen:
            continue
        if len(seen) == _MOST_PATHS:
            return {(): None}
        seen.add((node, path, is_below))
        sources = sources_of(node)
        if not is_below and node in means:
            if node not in sizes:
                sizes[node] = _sizes_at(node, means[node], tokens)
            path = (*path, *sizes[node])
            below = [(x, path, True) for x in sources if not is_shared(x)]
            ahead += below
            if not below:  # values of whole sequences, for each token
                found[path] = None
        elif is_below and (len(sources) != 1 or operator_of(node) not in SCALING):
            found[path] = None
        elif is_below or node in nodes:
            divisor = divisor_at(node)
            path = path if divisor is None else (*path, divisor)
            ahead += [(x, path, is_below) for x in sources]
    return found


_MOST_PATHS = 10_000


def _sizes_at(node: Any, size: Count, tokens: int) -> Path:
    """Return the divisor of a mean over tokens; of a sum, the inverse of how many numbers a token has."""
    if isinstance(size, torch.Tensor):
        return (Divisor(size.detach().double().expand(2)),)
    shape = _shape_of_source(node)
    of_token = {prod(shape) // tokens, prod(shape[1:])} if size == 1 else set[int]()
    return (Divisor(size), *(Divisor(1 / n) for n in of_token if n > 1))


def _shape_of_source(node: Any) -> tuple[int, ...]:
    source, number = producing_edge(*node.next_functions[0])
    return () if source is None else tuple(source._input_metadata[number].shape)


def _shared_divisors(
    starts: Iterable[Any], between: Collection[Any], divisor_at: Callable[[Any], Divisor | None]
) -> list[Divisor]:
    """Return the divisors of values of whole sequences and of parameters.

    Divisors of a product with a rank's own tokens are not those of its other factor.
    """

    def sources(node: Any) -> list[Any]:
        every = sources_of(node) if node in between else []
        is_product = operator_of(node) in ("Mul", "Div")
        return ([x for x in every if not is_shared(x)] if is_product else []) or every

    def is_end(node: Any) -> bool:
        return node in between and (is_whole(node) or hasattr(node, "variable"))

    nodes = _nodes_towards(is_end, starts, sources)
    found = [divisor_at(x) for x in nodes if not (is_end(x) or _is_of_coefficient(x))]
    return [x for x in found if x is not None]


def _nodes_towards(
    is_end: Callable[[Any], bool], starts: Iterable[Any], sources: Callable[[Any], list[Any]]
) -> dict[Any, None]:
    """Return the nodes between starts and ends, with the ends."""
    found: dict[Any, None] = {}
    ahead = [(start, False) for start in starts]
    seen: set[Any] = set()
    while ahead:
        node, is_done = ahead.pop()
        if is_done or is_end(node):
            if is_end(node) or any(x in found for x in sources(node)):
                found[node] = None
        elif node not in seen:
            seen.add(node)
            ahead += [(node, True), *((x, False) for x in sources(node))]
    return found


def _is_of_coefficient(node: Any) -> bool:
    """True for a product with 0.1, for example, which is no inverse of a number of tokens; and for a mean."""
    if operator_of(node) in ("Mean", "Sum"):
        return True
    factors = constants_of(node) if operator_of(node) == "Mul" else []
    return any(isinstance(x, float) and abs(x) > _LEAST_INVERSE for x in factors)


_LEAST_INVERSE = 0.01


def _divisor_at(node: Any, most: int) -> Divisor | None:
    """Return the size of a mean, or what a constant divides by; ``None`` for one of more than ``most``
    numbers.
    """
    operator = operator_of(node)
    if operator == "Mean":
        return Divisor(mean_size(node))
    if operator == "Sum":  # of the numbers of each token: a count times these may be the divisor
        size = prod(_shape_of_source(node))
        return Divisor(prod(node._input_metadata[0].shape) / size) if size else None
    constants = constants_of(node) if operator in ("Mul", "Div") else []
    constants = [x for x in constants if not (isinstance(x, torch.Tensor) and is_trained(x))]
    if len(constants) != 1:
        return None
    (x,) = constants
    if not isinstance(x, torch.Tensor):
        return Divisor(x if operator == "Div" else 1 / x if x else 0.0)
    if not 0 < x.numel() <= most:
        return None
    ends = torch.stack(x.detach().double().aminmax())
    is_short = x.is_floating_point() and x.itemsize < 4
    limit = 2 * torch.finfo(x.dtype).eps if is_short else Divisor.limit
    return Divisor(ends if operator == "Div" else 1 / ends, limit)
