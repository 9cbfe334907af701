"""Numbers that terms of a loss are divided by: what ranks count may equal, and be no number of one process.

Where all ranks count as many targets, nothing differs between them if a sum over a rank's tokens is divided
by something else than its count, or a value of whole sequences by a number of the rank's tokens::

    (losses * mask).sum(1).mean()                   # divided by rows; one process's sum is larger
    sequence_sum(losses).sum() / losses.numel()     # the rank's tokens; one process has more

So each sum needs its count among its divisors, and no other term may have one. There a number may equal a
count by chance: one that is written like a number that did not is in no doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations, dropwhile, product
from math import prod
from typing import Any, NamedTuple

import torch

from lightning_cp.loss.derivatives import TokenSums, mean_size, shape_of_source
from lightning_cp.loss.terms import (
    LINEAR,
    SCALING,
    SELECTIONS,
    LossTerms,
    constants_of,
    count_of,
    is_shared,
    is_trained,
    is_whole,
    operator_of,
    producing_edge,
    sources_of,
)
from lightning_cp.randomness.token_draws import find_token_dims
from lightning_cp.utils.autograd_notes import Count, is_sequence_number, origin_of


@dataclass(eq=False)
class Divisor:
    """A divisor of a term, or the inverse of its factor; 1 for another function."""

    operator: str
    value: Count = 1
    """A number, or float64 [2] on the device: the least and the greatest of some numbers."""
    limit: float = 1e-5
    """Relative rounding error."""
    of: str = ""
    """The operator whose result is divided."""
    is_row_wise: bool = False
    """There are several numbers, for rows."""
    is_of_tokens: bool = False
    """It is the size of a mean over tokens."""

    @property
    def divides(self) -> bool:
        """True for what the step divides a term by; not for a mean of the numbers of each token."""
        return self.operator in SCALES or self.is_of_tokens

    @property
    def is_number(self) -> bool:
        """True for a number of Python that the step multiplies or divides by."""
        return self.operator in SCALES and not isinstance(self.value, torch.Tensor)

    @property
    def without_number(self) -> tuple[Any, ...]:
        """Values that are equal wherever the step is written alike, but for numbers of Python."""
        return self.operator, self.of, isinstance(self.value, torch.Tensor)

    @property
    def written(self) -> tuple[Any, ...]:
        """Values that are equal wherever the step is written alike."""
        return *self.without_number, self.value if self.is_number else None


SCALES = ("Mul", "Div")
Path = tuple[Divisor, ...]
"""Functions between a loss and a term, from the loss on; linear ones that divide by nothing are left out."""
OWN, BY_TOKENS, BY_TARGETS, FUNCTIONS = "own", "by tokens", "by targets", "functions"
"""Names of looks: at divisors of own terms; of shared terms, for numbers of tokens, and of targets; at
functions of all tokens."""
VALUES = "values"
"""Name of what is compared between ranks."""


class Look(NamedTuple):
    """A look at divisors, and how these are written in the step."""

    what: str
    """One of the names of looks."""
    written: tuple[Any, ...]
    without_numbers: tuple[Any, ...]
    """Last products with numbers are left out, too: a check does not see those of accumulation."""


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
    functions: tuple[str, ...] = ()
    """Functions of all tokens other than sums."""
    widths: frozenset[int] = frozenset({1})
    """Numbers that a value of whole sequences has for each row."""
    alike: torch.Tensor | bool = False
    """All ranks of a sample that have targets have as many."""

    @property
    def form(self) -> frozenset[tuple[Any, ...]]:
        """The looks of the loss, without numbers."""
        return frozenset(look.without_numbers for look in self.looks)

    @cached_property
    def looks(self) -> dict[Look, Path]:
        """All that is looked at."""
        found: dict[Look, Path] = {}
        for path in self.own:
            inner = dropwhile(lambda x: x.is_number, path)
            forms = tuple(x.written for x in path), tuple(x.without_number for x in inner)
            found[Look(OWN, *forms)] = path
        for x, what in product(self.shared, (BY_TOKENS, BY_TARGETS)):
            found[Look(what, x.written, x.without_number)] = (x,)
        if self.functions:
            found[Look(FUNCTIONS, self.functions, self.functions)] = ()
        return found

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Values on a device: each divisor once, and ``alike``."""
        every = dict.fromkeys(chain.from_iterable(self.looks.values()))
        values = [x.value for x in every] + [self.alike]
        return [x for x in values if isinstance(x, torch.Tensor)]

    def doubts(self, targets: float, numbers: list[float]) -> dict[Look, str | None]:
        """Return the start of a message, or ``None``, for all that could be looked at.

        Args:
            targets: of this rank.
            numbers: of ``tensors``.
        """
        known = dict(zip(map(id, self.tensors), _pairs_of(self.tensors, numbers), strict=True))

        def bounds(x: Count | bool) -> tuple[float, float]:
            return known[id(x)] if isinstance(x, torch.Tensor) else (float(x), float(x))

        tokens = {n * width for n in (self.tokens, self.local_len) for width in self.widths}
        is_looked_at = bool(bounds(self.alike)[0]) and targets > 0
        found: dict[Look, str | None] = {}
        for look, path in self.looks.items():
            ends = [bounds(x.value) for x in path]
            if look.what == FUNCTIONS:
                found[look] = OTHER_FUNCTION.format(", ".join(self.functions))
            elif look.what == BY_TOKENS:
                counts = {self.local_len} if path[0].is_row_wise else tokens
                is_count = _is_one_of(ends[0], path[0].limit, counts)
                found[look] = SHARED_DIVISOR.format(ends[0][0]) if is_count else None
            elif is_looked_at and look.what == BY_TARGETS:
                is_count = not path[0].is_row_wise and _is_one_of(ends[0], path[0].limit, {targets})
                found[look] = SHARED_DIVISOR.format(ends[0][0]) if is_count else None
            elif look.what == OWN and targets > 0:
                # Ranks whose counts differ compare what does not depend on their numbers of tokens.
                is_right = _is_divided(path, ends, targets, {*tokens, targets}) or not (
                    is_looked_at or _has_count(path, ends, tokens)
                )
                found[look] = None if is_right else OWN_DIVISOR.format(targets)
        return found


OWN_DIVISOR = (
    "ranks have targets, here {:g}, but a sum of the loss over a rank's tokens is not seen to be divided by "
    "that number, and by no other number of its tokens. Divide by the count alone, before other numbers: "
    "(values * mask).sum() / count. As it is, "
)
"""Start of a message that ``ASK`` completes."""

OTHER_FUNCTION = (
    "the step declares a count of targets, but its loss has a function of all of a rank's tokens that is no "
    "sum ({}), which ranks cannot compute apart, so "
)
"""Start of a message that ``ASK`` completes."""

SHARED_DIVISOR = (
    "a term of whole sequences, or of parameters, is divided by {:g}, which is as many as this rank's "
    "tokens or targets, and maybe not those of whole sequences (sequence_sum(mask) counts these), so "
)
"""Start of a message that ``ASK`` completes."""


def _pairs_of(tensors: list[torch.Tensor], numbers: list[float]) -> Iterator[tuple[float, float]]:
    at = 0
    for x in tensors:
        yield numbers[at], numbers[at + x.numel() - 1]
        at += x.numel()


def _is_one_of(ends: tuple[float, float], limit: float, counts: Collection[float]) -> bool:
    """True if a divisor is one of some counts, or the inverse of one that is no usual coefficient."""
    values = (ends, (1 / ends[1], 1 / ends[0])) if 0 < min(ends) <= _LEAST_INVERSE else (ends,)
    return any(
        all(abs(x - n) <= limit * n for x in each) for each in values for n in counts if n > 1
    )


def _is_divided(
    path: Path, ends: Sequence[tuple[float, float]], targets: float, counts: Collection[float]
) -> bool:
    """True if some divisors of a path multiply to the targets, and no other one is a count."""
    limit = max((x.limit for x in path), default=0.0)
    every = [
        (abs(each[0]), x.divides and not (x.is_number and _is_coefficient(each[0])))
        for each, x in zip(ends, path, strict=True)
        if each != (1, 1) and abs(each[1] - each[0]) <= limit * abs(each[0])
    ]
    every.sort(key=lambda pair: _is_one_of((pair[0], pair[0]), limit, {targets}), reverse=True)
    every = every[:_MOST]
    for at in chain.from_iterable(combinations(range(len(every)), n) for n in range(_MOST + 1)):
        if abs(prod(every[x][0] for x in at) - targets) <= limit * targets:
            others = (every[x] for x in range(len(every)) if x not in at)
            if not any(scales and _is_one_of((x, x), limit, counts) for x, scales in others):
                return True
    return False


def _has_count(path: Path, ends: Sequence[tuple[float, float]], counts: Collection[float]) -> bool:
    pairs = zip(path, ends, strict=True)
    return any(x.divides and _is_one_of(each, x.limit, counts) for x, each in pairs)


_MOST = 8
"""Maximum number of divisors whose products are looked at."""


def divisors_of(
    loss: torch.Tensor, means: LossTerms, sums: TokenSums | None, rows: int, local_len: int
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
    shapes = [x._input_metadata[0].shape for x in means.gathered]
    found.widths |= {prod(shape[1:]) for shape in shapes if shape and shape[0] == rows}
    divisors: dict[Any, Divisor | None] = {}

    def divisor_at(node: Any) -> Divisor | None:
        """Return one object for a node, however many paths it is on."""
        if node not in divisors:
            divisors[node] = _divisor_at(node, rows)
        return divisors[node]

    sums = TokenSums() if sums is None else sums
    end = producing_edge(loss.grad_fn, loss.output_nr)[0]
    found.functions = tuple(dict.fromkeys(sums.functions))
    found.own += _own_paths(end, sums, rows, local_len, divisor_at)
    starts = [end, *(node for node, _ in sums.whole_inputs)]
    found.shared += _shared_divisors(starts, means.between.difference(sums.nodes), divisor_at)
    return found


def _own_paths(
    end: Any,
    sums: TokenSums,
    rows: int,
    local_len: int,
    divisor_at: Callable[[Any], Divisor | None],
) -> dict[Path, None]:
    """Return the divisors of each sum over tokens: between the loss and it, and below it up to a function.

    Of a loss with more paths than can be looked at, one without divisors, which is in doubt. Below sums only
    nodes with a number for each token are read: further down, that could recompute a checkpointed layer.
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
                sizes[node] = _sizes_at(node, means[node], rows * local_len)
            path = (*path, *sizes[node])
            below = [x for x in sources if not is_shared(x)] if len(sources) > 1 else sources
            if count_of(node, operator_of(node), origin_of(node)) is None:
                ahead += [(x, path, True) for x in below]
            else:
                found[path] = None
        elif is_below and (
            len(sources) != 1
            or operator_of(node) not in SCALING | SELECTIONS
            or _has_features(node, rows, local_len)
        ):
            found[path] = None
        elif is_below or node in nodes:
            divisor = divisor_at(node)
            path = path if divisor is None else (*path, divisor)
            ahead += [(x, path, is_below) for x in sources]
    return found


_MOST_PATHS = 50_000


def _has_features(node: Any, rows: int, local_len: int) -> bool:
    """True for a result with several numbers for each token."""
    shape = node._input_metadata[0].shape
    return prod(shape) > rows * local_len and find_token_dims(shape, rows, local_len) is not None


def _sizes_at(node: Any, size: Count, tokens: int) -> Path:
    """Return the divisor of a mean over tokens, and the inverse of how many numbers a token has.

    A count times these numbers may be the divisor, too.
    """
    operator = operator_of(node)
    if isinstance(size, torch.Tensor):
        return (Divisor(operator, size.detach().double().expand(2), is_of_tokens=True),)
    shape = shape_of_source(node)
    of_token = {prod(shape) // tokens, prod(shape[1:])} - {0, 1}
    form = f"{operator} of {len(shape)} to {len(node._input_metadata[0].shape)}"
    return (
        Divisor(form, size, is_of_tokens=True),
        *(Divisor(operator, 1 / n) for n in sorted(of_token)),
    )


def _shared_divisors(
    starts: Iterable[Any], between: Collection[Any], divisor_at: Callable[[Any], Divisor | None]
) -> list[Divisor]:
    """Return the divisors of values of whole sequences and of parameters.

    Divisors of a product with a rank's own tokens are not those of its other factor. A mean over such values
    has as many of them in one process.
    """

    def is_end(node: Any) -> bool:
        return node in between and (is_whole(node) or hasattr(node, "variable"))

    starts = list(starts)
    is_own: dict[Any, bool] = {}
    for node, behind in _users_last(starts, lambda x: sources_of(x) if x in between else []):
        is_own[node] = node not in between or (not is_end(node) and any(is_own[x] for x in behind))

    def sources(node: Any) -> list[Any]:
        every = sources_of(node) if node in between else []
        own = [x for x in every if is_own[x]] if operator_of(node) in SCALES else []
        return own or every

    nodes = _nodes_towards(is_end, starts, sources)
    found = (divisor_at(x) for x in nodes if not (is_end(x) or _has_coefficient(x)))
    return [x for x in found if x is not None and x.operator in SCALES]


def _users_last(
    starts: Iterable[Any], sources: Callable[[Any], list[Any]]
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each node of a graph once, behind its sources, with these."""
    ahead: list[tuple[Any, list[Any] | None]] = [(start, None) for start in starts]
    seen: set[Any] = set()
    while ahead:
        node, found = ahead.pop()
        if found is not None:
            yield node, found
        elif node not in seen:
            seen.add(node)
            found = sources(node)
            ahead += [(node, found), *((x, None) for x in found)]


def _nodes_towards(
    is_end: Callable[[Any], bool], starts: Iterable[Any], sources: Callable[[Any], list[Any]]
) -> dict[Any, None]:
    """Return the nodes between starts and ends, with the ends."""
    found: dict[Any, None] = {}
    for node, behind in _users_last(starts, lambda x: [] if is_end(x) else sources(x)):
        if is_end(node) or any(x in found for x in behind):
            found[node] = None
    return found


def _has_coefficient(node: Any) -> bool:
    """True for a factor such as 0.1, which is no inverse of a number of tokens."""
    factors = constants_of(node) if operator_of(node) == "Mul" else []
    return any(isinstance(x, float) and abs(x) > _LEAST_INVERSE for x in factors)


_LEAST_INVERSE = 0.01


def _is_coefficient(x: float) -> bool:
    """True for a usual coefficient, or a number of accumulated batches; not a number of tokens."""
    return _LEAST_INVERSE < abs(x) < 1 / _LEAST_INVERSE


def _divisor_at(node: Any, most: int) -> Divisor | None:
    """Return the size of a mean, or what a constant of at most ``most`` numbers divides by; ``None`` for a
    linear function that divides by nothing.
    """
    operator = operator_of(node)
    if operator == "Mean":
        return Divisor(operator, mean_size(node))
    if operator == "Sum":  # of the numbers of each token: a count times these may be the divisor
        size = prod(shape_of_source(node))
        inverse = prod(node._input_metadata[0].shape) / size if size else 1
        return Divisor(operator, inverse) if inverse != 1 else None
    if operator in LINEAR:
        return None
    constants = constants_of(node) if operator in SCALES else []
    constants = [x for x in constants if not (isinstance(x, torch.Tensor) and is_trained(x))]
    is_numerator = operator == "Div" and node.next_functions[0][0] is None
    if len(constants) != 1 or is_numerator:
        return Divisor(f"{operator} of {len(node.next_functions)}")
    (x,), of = constants, "".join(map(operator_of, sources_of(node)))
    if not isinstance(x, torch.Tensor):
        return Divisor(operator, x if operator == "Div" else 1 / x if x else 0.0, of=of)
    if not 0 < x.numel() <= most:
        return Divisor(f"{operator} by a tensor")
    if is_sequence_number(x):
        return Divisor(f"{operator} by a number of whole sequences")
    ends = torch.stack(x.detach().double().aminmax())
    is_short = x.is_floating_point() and x.itemsize < 4
    limit = 2 * torch.finfo(x.dtype).eps if is_short else Divisor.limit
    return Divisor(operator, ends if operator == "Div" else 1 / ends, limit, of, x.numel() > 1)
