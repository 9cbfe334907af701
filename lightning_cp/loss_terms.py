"""The terms of a loss, by its autograd graph: means over counted targets, and values of whole sequences.

Losses, attention and ``unshard`` leave a note on the node of what they return. A loss is known if nothing but
such terms reaches it::

    loss ──┬── * 0.1 ─── cross_entropy  (a mean over 512 targets)
           └── logsigmoid ── sum ── unshard  (the same number on all ranks)

Only what takes part in backward is seen: a metric under ``no_grad`` and a detached loss are not in the graph.
Nothing here waits for a device, and no note outlives its graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_cp.errors import ConfigError

Count = torch.Tensor | float
"""How many targets a mean was taken over; the sum of their weights where classes have any."""


class Origin(Enum):
    """Where a tensor comes from."""

    SEQUENCE = "unshard: the whole sequence, on every rank"
    TOKENS = "attention: a rank's own tokens"


def note_mean(loss: torch.Tensor, count: Count) -> None:
    """Note that ``loss`` is a mean over ``count`` targets of this rank."""
    _note(loss, count)


def note_sequence(x: torch.Tensor) -> None:
    """Note that ``x`` is of the whole sequence, and its backward adds up over ranks."""
    _note(x, Origin.SEQUENCE)


def note_tokens(x: torch.Tensor) -> None:
    """Note that ``x`` is of this rank's own tokens."""
    _note(x, Origin.TOKENS)


class Means(NamedTuple):
    """The means over targets that a loss is a linear combination of."""

    counts: list[Count]
    own_factor: bool
    """A factor is a tensor, of which each rank may have another one: the number of its targets, say."""
    numbers: list[float]
    """Factors and divisors that are numbers of Python, in the order of the graph; then those within terms of
    parameters."""
    other_terms: bool = False
    """The loss has another term: a sum or a mean by hand, or a function of a mean."""
    joined: tuple[torch.Tensor, ...] = ()
    """The values that terms of parameters compute from where another tensor is added to these: a function of
    parameters alone has the same ones on all ranks."""
    gathered: tuple[Any, ...] = ()
    """The nodes of what ``unshard`` has returned that terms are computed from."""


def counted_means(loss: torch.Tensor) -> Means:
    """The means that a loss is a linear combination of, besides terms of whole sequences."""
    counts: list[Count] = []
    numbers: list[float] = []
    own_factor = other_terms = False
    shared: list[Any] = []
    ahead: list[Any] = [_producer(loss.grad_fn, loss.output_nr)]
    while ahead:
        node = ahead.pop()
        if node is None:
            continue
        count = _count_of(node)
        if count is not None:
            if not _is_of_sequence(_sources(node)):
                counts.append(count)
        elif _operator(node) in _LINEAR:
            numbers += [node._saved_alpha] if getattr(node, "_saved_alpha", 1) != 1 else []
            ahead.extend(_sources(node))
        elif _operator(node) in ("Mul", "Div"):
            factors = [x for x in _sources(node) if not _is_shared(x)]
            if len(factors) > 1 or (factors and _divides(node, factors[0])):
                other_terms = True
                continue
            other_terms |= not factors and not _is_shared(node)
            shared += [x for x in (_sources(node) if factors else [node]) if x not in factors]
            constants = _constants(node)
            numbers += [] if _is_of_parameters(node) else _numbers_of(node)
            own_factor |= bool(factors) and not all(map(_is_number, constants))
            ahead.extend(factors)
        elif _is_shared(node):
            shared.append(node)
        else:
            other_terms = True
    numbers += _numbers_within(shared)
    return Means(counts, own_factor, numbers, other_terms, _joined_to(shared), _gathered(shared))


def leaves_out(loss: torch.Tensor, label: int) -> bool:
    """True if the graph has a loss function of PyTorch that counts nothing where it is given ``label``."""
    ahead, seen = [loss.grad_fn], set()
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _operator(node) in _NLL and _ignored(node) == label:
            return True
        ahead.extend(_sources(node))
    return False


class LossFactors(NamedTuple):
    """Numbers and tensors of one element that terms of a loss are multiplied by, in the order of the graph.

    What is multiplied by 0 has no say in its gradient: a penalty that is going to be warmed up, say.
    """

    values: list[float | torch.Tensor]
    divisors: list[float | torch.Tensor]
    """Those that they are divided by, and how many values a mean is taken over."""

    @property
    def zeros(self) -> tuple[bool, ...]:
        """Which are 0; waits for the device."""
        return tuple(not x for x in self.values)

    def have(self, zeros: tuple[bool, ...]) -> bool:
        """True if all that are 0 there are 0 here; waits for the device only where these are tensors."""
        if not any(zeros):
            return True
        pairs = zip(zeros, self.values, strict=False)
        return len(zeros) == len(self.values) and all(not x for zero, x in pairs if zero)


def factors_of(loss: torch.Tensor, tokens: int) -> LossFactors:
    """Those of a loss, as far down as what has a number for each of ``tokens`` and no features.

    Below, autograd could compute a layer again to tell a factor, where it is checkpointed.
    """
    found = LossFactors([], [])
    ahead, seen = [loss.grad_fn], set()
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen or prod(node._input_metadata[0].shape) > tokens:
            continue
        seen.add(node)
        ahead.extend(_sources(node))
        operator = _operator(node)
        if operator in ("Mul", "Div"):
            single = [x for x in _constants(node) if x.numel() == 1 and not x.requires_grad]
            numbers = [_value_of(x) if _is_number(x) else x.detach() for x in single]
            (found.values if operator == "Mul" else found.divisors).extend(numbers)
        elif operator == "Mean" or (operator not in _NLL and _reduces_by_mean(node)):
            sizes = [prod(x._input_metadata[0].shape) for x in (*_sources(node), node)]
            found.divisors.append(sizes[0] / max(1, sizes[-1]))
    return found


def _reduces_by_mean(node: Any) -> bool:
    return getattr(node, "_saved_reduction", None) == 1


DECLARE = (
    "For targets that the step draws or leaves out, and for weights of classes, call count_targets(mask or "
    "number) in the step (of ContextParallelMixin, or of the strategy); compute a further loss of other "
    "targets from unshard(...)."
)
"""The way out for a loss that counts other targets than the labels."""


def targets_of(
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    classes: int = 0,
) -> torch.Tensor:
    """The divisor of a mean of ``cross_entropy`` or ``nll_loss``.

    Args:
        target: class numbers, or probabilities of classes.
        weight: of each class.
        ignore_index: a class number that counts nothing.
        classes: how many there are; needed for probabilities.
    """
    if target.is_floating_point():
        return torch.tensor(target.numel() // classes, device=target.device)
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return _wide_sum(weight[target.where(counts, 0)].where(counts, 0))


def _wide_sum(x: torch.Tensor) -> torch.Tensor:
    """Of weights in at least float32: bfloat16 has 8 bits, and float16 ends at 65504."""
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else None
    return x.sum(dtype=wide)


_KEY = "lightning_cp"

_LINEAR = {
    *("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Stack", "Cat", "Clone", "Alias", "ToCopy"),
    "NanToNum",
    *("View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "Unbind"),
    *("_Shown", "_ToTorchTensor", "_FromTorchTensor", "Redistribute"),
}
"""Operators, and functions of Python that hand on what they are given."""
_NLL = ("NllLoss", "NllLoss2D")
_IDENTITIES = {"_DDPSink", "BackwardHookFunction", "RegisterPostBackwardFunction"}
"""Functions of Python around several tensors, which return each of them; the others are no terms of it."""
_OF_ONE = {
    *("Pow", "Abs", "Sqrt", "Exp", "Log", "Sigmoid", "Softplus", "Norm", "LinalgVectorNorm"),
    *("T", "Transpose", "Permute"),
}
"""Functions of one tensor."""
_OF_PARAMETERS = _OF_ONE | _LINEAR - {"Slice"}
"""Of those, without one that takes a size, which may be that of a rank's tokens."""
_OPAQUE = {"CheckpointFunction", "CompiledFunction"}
"""What is computed inside has no nodes in the graph."""


def _note(x: torch.Tensor, origin: Origin | Count) -> None:
    if x.grad_fn is not None:
        node: Any = x.grad_fn
        node.metadata[_KEY] = origin


def _origin_of(node: Any) -> Origin | Count | None:
    return node.metadata.get(_KEY)


def _sources(node: Any) -> list[Any]:
    found = (_producer(*edge) for edge in node.next_functions)
    return [source for source in found if source is not None]


def _producer(node: Any, number: int) -> Any:
    """The node that has computed an output of this one: behind functions that return what they are given."""
    while node is not None and _operator(node) in _IDENTITIES and _origin_of(node) is None:
        node, number = node.next_functions[number]
    return node


def _count_of(node: Any) -> Count | None:
    """Of a mean over targets."""
    origin = _origin_of(node)
    if origin is not None and not isinstance(origin, Origin):
        return origin
    if _operator(node) in _NLL and node._saved_reduction == 1:
        return targets_of(node._saved_target, node._saved_weight, _ignored(node))
    return None


def _ignored(node: Any) -> int:
    ignored = node._saved_ignore_index
    return ignored - 2**64 * (ignored >= 2**63)  # shown without its sign


def _operator(node: Any) -> str:
    return node.name().rstrip("0123456789").removesuffix("Backward")


def _divides(node: Any, factor: Any) -> bool:
    return _operator(node) == "Div" and _producer(*node.next_functions[0]) is not factor


def _constants(node: Any) -> list[torch.Tensor]:
    """The factors of a product or a quotient that have no graph."""
    names = ("_saved_self", "_saved_other", "_saved_mat2")
    saved = (getattr(node, name, None) for name in names)
    return [x for x in saved if x is not None] if len(_sources(node)) < 2 else []


def _is_number(x: torch.Tensor) -> bool:
    """Recognise a Python number that autograd has wrapped: beside it a tensor keeps its dtype."""
    if x.dtype not in (torch.float64, torch.int64):
        return False
    narrow = torch.tensor(1, dtype=torch.float16 if x.is_floating_point() else torch.int8)
    return not x.dim() and torch.result_type(narrow, x) == narrow.dtype


def _numbers_of(node: Any) -> list[float]:
    """Those that a product or a quotient has for factors."""
    return [_value_of(x) for x in _constants(node) if _is_number(x)]


def _value_of(number: torch.Tensor) -> float:
    """Read a wrapped number; a dispatch mode of the user (a FLOP counter) would be handed it unwrapped."""
    with _disable_current_modes():
        return number.item()


def _is_shared(node: Any) -> bool:
    """True if all ranks have the same: a value of whole sequences and parameters, or of parameters alone."""
    if _is_of_parameters(node):
        return True
    if not _is_of_sequence([node]):
        return False
    whole = _made_of_sequence(node)
    besides = {source for each in whole for source in _inputs(each)} - whole
    return all(map(_is_of_parameters, besides))


def _inputs(node: Any) -> list[Any]:
    """The sources of a node, unless it is what ``unshard`` has returned."""
    return [] if _origin_of(node) is Origin.SEQUENCE else _sources(node)


def _made_of_sequence(node: Any) -> set[Any]:
    """Of the nodes that a value is computed from, those that something of ``unshard`` goes through."""
    users: dict[Any, list[Any]] = {node: []}
    ahead = [node]
    while ahead:
        user = ahead.pop()
        for source in _inputs(user):
            if source not in users:
                ahead.append(source)
            users.setdefault(source, []).append(user)
    found = {each for each in users if _origin_of(each) is Origin.SEQUENCE}
    ahead = list(found)
    while ahead:
        more = [user for user in users[ahead.pop()] if user not in found]
        found.update(more)
        ahead.extend(more)
    return found


def _is_of_parameters(node: Any) -> bool:
    """True if it is computed from parameters and numbers, as a regulariser is; of no tensor besides.

    A tensor of a parameter's size, such as its value before training, is taken for the same on all ranks.
    """
    ahead, seen = [node], set()
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if _origin_of(node) is not None:
            return False
        if hasattr(node, "variable"):
            if not isinstance(node.variable, torch.nn.Parameter):
                return False
        elif _operator(node) in ("Mul", "Div", "Mm"):
            if not all(map(_is_number, _constants(node))):
                return False
            ahead.extend(_sources(node))
        elif _operator(node) in _OF_PARAMETERS and _sources(node) and not _joins_another(node):
            ahead.extend(_sources(node))
        else:
            return False
    return True


def _joined_to(terms: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """What terms have kept for backward in which a tensor without a graph is added to parameters.

    Their gradients depend on nothing else. Parts of tensors differ between ranks, and are left out.
    """
    found: list[torch.Tensor] = []
    for term in filter(_is_of_parameters, terms):
        ahead, seen, joins = [term], dict[Any, None](), False
        while ahead:
            node = ahead.pop()
            if node not in seen and not hasattr(node, "variable"):
                seen[node] = None
                joins |= _operator(node) in ("Add", "Sub", "Rsub") and len(_sources(node)) < 2
                ahead.extend(_sources(node))
        if joins:
            found += [x for node in seen for x in _kept(node)]
    return tuple({id(x): x for x in found}.values())


def _numbers_within(terms: Iterable[Any]) -> list[float]:
    """Those that parameters are multiplied or divided by in terms of nothing else."""
    ahead, seen, found = [*filter(_is_of_parameters, terms)], set(), []
    while ahead:
        node = ahead.pop()
        if node not in seen and not hasattr(node, "variable"):
            seen.add(node)
            found += _numbers_of(node) if _operator(node) in ("Mul", "Div") else []
            ahead.extend(_sources(node))
    return found


def _gathered(terms: Iterable[Any]) -> tuple[Any, ...]:
    """The values of ``unshard`` that terms are computed from, in the order of the graph."""
    ahead, seen, found = list(terms), set(), []
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            found += [node] if _origin_of(node) is Origin.SEQUENCE else []
            ahead.extend(_inputs(node))
    return tuple(found)


def _kept(node: Any) -> list[torch.Tensor]:
    # Here: where it is imported before a mesh is made, PyTorch keeps the mesh's groups until Python exits.
    from torch.distributed.tensor import DTensor

    names = ("_saved_self", "_saved_other", "_saved_result")
    saved = [getattr(node, name, None) for name in names]
    tensors = [x for x in saved if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
    return [x for x in tensors if x.is_floating_point() and not _is_number(x)]


def _joins_another(node: Any) -> bool:
    """True if an operand of a sum, or of what joins tensors, has no graph, and may be a rank's own."""
    operands = node.next_functions
    if all(source is not None for source, _ in operands):
        return False
    (source, number), *_ = [operand for operand in operands if operand[0] is not None]
    sizes = [x._input_metadata[at].shape for x, at in ((node, 0), (source, number))]
    return _operator(node) not in ("Add", "Sub") or sizes[0] != sizes[1] or not sizes[0]


def _is_of_sequence(nodes: Iterable[Any]) -> bool:
    """True if something comes from ``unshard``, and nothing from a rank's own tokens past it."""
    ahead, seen, found = list(nodes), set(), False
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        origin = _origin_of(node)
        if origin is Origin.SEQUENCE:
            found = True
        elif origin is Origin.TOKENS or _operator(node) in _OPAQUE:
            return False
        else:
            ahead.extend(_sources(node))
    return found


def declared_count(counted: torch.Tensor | float) -> torch.Tensor:
    """The number of targets that a mask, weights of tokens, or a number says.

    Raises:
        ConfigError: a number that is negative or NaN.
    """
    if isinstance(counted, torch.Tensor):
        return _wide_sum(counted.detach())
    if not counted >= 0:
        raise ConfigError(
            f"count_targets({counted}) declares no number of targets. Pass a mask of this rank's tokens, "
            "or how many targets the loss of this rank counts, at least 0."
        )
    return torch.tensor(counted)


def divisor(count: Any) -> Any:
    """The count, and 1 where nothing is counted: a sum divided by it is 0 there, and not NaN."""
    if isinstance(count, torch.Tensor):
        return torch.where(count > 0, count, torch.ones_like(count))
    return max(count, 1)
