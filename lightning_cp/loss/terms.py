"""Terms of a loss, read from its autograd graph: means over counted targets, and values of whole sequences.

Losses, attention and ``unshard`` put a note on the node of their result. A loss is known if it consists of
such terms only::

    loss ──┬── * 0.1 ─── cross_entropy  (a mean over 512 targets)
           └── logsigmoid ── sum ── unshard  (the same number on all ranks)

The graph contains only what takes part in backward: no metric under ``no_grad``, no detached loss.
Nothing here waits for a device, and no note outlives its graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import filterfalse
from math import prod
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] (it has no public name)
)

from lightning_cp.errors import ConfigError
from lightning_cp.utils.autograd_notes import (
    NOTE,
    Count,
    Origin,
    graph_nodes,
    is_frozen,
    origin_of,
)


class LossTerms(NamedTuple):
    """Terms of a loss: the means over targets that it is a linear combination of, and other terms."""

    counts: list[Count]
    own_factor: bool
    """A factor is a tensor, which may differ between ranks: the number of its targets, for example."""
    numbers: list[float]
    """Python numbers that are factors or divisors, in the order of the graph; then those within terms of
    parameters."""
    other_terms: bool = False
    """The loss has another term: a sum or a mean by hand, or a function of a mean."""
    joined: tuple[torch.Tensor, ...] = ()
    """Saved values of parameter terms to which another tensor is added; a function of parameters alone is
    equal on all ranks."""
    gathered: tuple[Any, ...] = ()
    """Nodes of values of whole sequences that terms are computed from."""
    between: frozenset[Any] = frozenset()
    """Nodes between the loss and these values, among others; none behind a mean over targets."""
    parameters: tuple[Any, ...] = ()
    """Nodes of terms of parameters."""
    products: tuple[Any, ...] = ()
    """Nodes at which a value of whole sequences, or of parameters, is multiplied by a rank's own one."""


def loss_terms(loss: torch.Tensor) -> LossTerms:
    """Return the terms of a loss; terms of whole sequences do not count as other terms."""
    counts: list[Count] = []
    numbers: list[float] = []
    own_factor = other_terms = False
    parameters: list[Any] = []
    products: list[Any] = []
    shared: list[Any] = []
    linear: list[Any] = []
    ahead: list[Any] = [producing_edge(loss.grad_fn, loss.output_nr)[0]]
    seen: set[Any] = {None}
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        sources, operator, origin = sources_of(node), operator_of(node), origin_of(node)
        count = count_of(node, operator, origin)
        if count is not None:
            if is_of_rows(node):
                shared.append(node)
            else:
                counts.append(count)
        elif origin is Origin.SEQUENCE or origin is Origin.FROZEN:
            shared.append(node)
        elif operator in LINEAR:
            linear.append(node)
            numbers += [node._saved_alpha] if getattr(node, "_saved_alpha", 1) != 1 else []
            ahead.extend(sources)
        elif operator in ("Mul", "Div"):
            factors = list(filterfalse(is_shared, sources))
            if len(factors) > 1 or (factors and _divides(node, factors[0])):
                other_terms = True
                continue
            if not factors and not is_shared(node):
                other_terms = True
                parameters += filter(_is_of_parameters, sources)
            of_sequence = [x for x in (sources if factors else [node]) if x not in factors]
            if factors:
                linear.append(node)
                products += [node] if of_sequence else []
            shared += of_sequence
            if factors or not _is_of_parameters(node):
                constants = _constants(node)
                own_numbers = list(filter(_is_number, constants))
                numbers += map(_value_of, own_numbers)
                own_factor |= bool(factors) and len(own_numbers) < len(constants)
            ahead.extend(factors)
        elif is_shared(node):
            shared.append(node)
        else:
            other_terms = True
    if not shared:
        return LossTerms(counts, own_factor, numbers, other_terms)
    numbers += _numbers_within(shared)
    gathered = tuple(x for x in graph_nodes(shared, inputs_of) if is_whole(x))
    between = frozenset((*linear, *graph_nodes(shared, inputs_of)))
    joined = _joined_values(shared)
    parameters += filter(_is_of_parameters, shared)
    nodes = (joined, gathered, between, tuple(dict.fromkeys(parameters)), tuple(products))
    return LossTerms(counts, own_factor, numbers, other_terms, *nodes)


def ignores_label(loss: torch.Tensor, label: int) -> bool:
    """True if the graph has a PyTorch loss function that ignores ``label``."""
    nodes = graph_nodes([loss.grad_fn], sources_of)
    return any(operator_of(node) in _NLL and _ignored(node) == label for node in nodes)


def has_sequence_values(loss: torch.Tensor) -> bool:
    """True if a loss is computed from values of whole sequences, among others; reads down to attention."""
    nodes = graph_nodes([loss.grad_fn], _sources_above_attention)
    return any(is_whole(node) for node in nodes)


def _sources_above_attention(node: Any) -> list[Any]:
    return [] if origin_of(node) is Origin.TOKENS else inputs_of(node)


class LossFactors(NamedTuple):
    """Numbers and one-element tensors that terms of a loss are multiplied by, in the order of the graph.

    A term times 0 does not affect the gradient: a penalty before its warm-up, for example.
    """

    values: list[float | torch.Tensor]
    divisors: list[float | torch.Tensor]
    """Divisors of terms, and sizes of means."""

    @property
    def zeros(self) -> tuple[bool, ...]:
        """One flag per factor: it is 0; waits for the device."""
        return tuple(not x for x in self.values)

    def are_zero(self, zeros: tuple[bool, ...]) -> bool:
        """True if all factors that ``zeros`` marks are 0; waits for the device for tensors only."""
        if not any(zeros):
            return True
        pairs = zip(zeros, self.values, strict=False)
        return len(zeros) == len(self.values) and all(not x for zero, x in pairs if zero)


def factors_of(loss: torch.Tensor, tokens: int) -> LossFactors:
    """Return the factors of a loss, down to values with one number for each of ``tokens``, without features.

    Further down, reading a factor could make autograd recompute a checkpointed layer.
    """
    found = LossFactors([], [])
    ahead = [loss.grad_fn]
    seen: set[Any] = set()
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen or prod(node._input_metadata[0].shape) > tokens:
            continue
        seen.add(node)
        ahead.extend(sources_of(node))
        operator = operator_of(node)
        if operator in ("Mul", "Div"):
            numbers = list(map(_factor_of, filter(_is_single, _constants(node))))
            (found.values if operator == "Mul" else found.divisors).extend(numbers)
        elif operator == "Mean" or (operator not in _NLL and reduces_by_mean(node)):
            sizes = [prod(x._input_metadata[0].shape) for x in (*sources_of(node), node)]
            found.divisors.append(sizes[0] / max(1, sizes[-1]))
    return found


def reduces_by_mean(node: Any) -> bool:
    return getattr(node, "_saved_reduction", None) == 1


DECLARE = (
    "For targets that the step draws or leaves out, and for weights of classes, call count_targets(mask or "
    "number) in the step (of ContextParallelMixin, or of the strategy); compute a further loss of other "
    "targets from unshard(...)."
)
"""Advice for a loss that counts other targets than the labels."""

LINEAR = {
    *("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Stack", "Cat", "Clone", "Alias", "ToCopy"),
    "NanToNum",
    *("View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "Unbind"),
    *("_WithValue", "_ToTorchTensor", "_FromTorchTensor", "Redistribute"),
}
"""Linear operators, and Python autograd functions that return their input."""
SCALING = LINEAR | {"Mul", "Div"}
SELECTIONS = {"Index", "MaskedSelect", "IndexSelect", "MaskedFill", "Where"}
"""Functions that leave some values out, or replace them by constants."""
_NLL = ("NllLoss", "NllLoss2D")
_IDENTITIES = {
    "_DDPSinkBackward",
    "BackwardHookFunctionBackward",
    "RegisterPostBackwardFunctionBackward",
}
"""Nodes of Python autograd functions that return each of several tensors: an output depends on one input
only."""
_UNARY = {
    *("Pow", "Abs", "Sqrt", "Exp", "Log", "Sigmoid", "Softplus", "Norm", "LinalgVectorNorm"),
    *("T", "Transpose", "Permute"),
}
"""Functions of one tensor."""
_PARAMETER_OPERATORS = _UNARY | LINEAR - {"Slice"}
"""Operators of parameter terms; without Slice, whose size may be that of a rank's tokens."""
OPAQUE = {"CheckpointFunctionBackward", "CompiledFunctionBackward"}
"""Nodes of functions whose inner operations have no nodes in the graph."""


def targets_of(
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    classes: int = 0,
) -> torch.Tensor:
    """Return the divisor of a mean of ``cross_entropy`` or ``nll_loss``.

    Args:
        target: class numbers, or probabilities of classes.
        weight: of each class.
        ignore_index: class number that is ignored.
        classes: number of classes; needed for probabilities.
    """
    if target.is_floating_point():
        return torch.tensor(target.numel() // classes, device=target.device)
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return _wide_sum(weight[target.where(counts, 0)].where(counts, 0))


def _wide_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum weights in at least float32: bfloat16 has 8 bits, and float16 ends at 65504."""
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else None
    return x.sum(dtype=wide)


def sources_of(node: Any, *, frozen: bool = False) -> list[Any]:
    """Return the nodes that computed the inputs of this one.

    Args:
        node: of a graph.
        frozen: those of values of frozen layers, too; by default these values count as numbers do.
    """
    found: list[Any] = []
    for source, number in node.next_functions:
        if source is not None and source.name() in _IDENTITIES:
            source = producing_edge(source, number)[0]
        if source is not None and (frozen or source.metadata.get(NOTE) is not Origin.FROZEN):
            found.append(source)
    return found


def producing_edge(node: Any, number: int) -> tuple[Any, int]:
    """Return the node that computed an output of this one, and the number of its output.

    Functions that return their inputs are left out.
    """
    while node is not None and node.name() in _IDENTITIES and origin_of(node) is None:
        node, number = node.next_functions[number]
    return node, number


def count_of(node: Any, operator: str, origin: Origin | Count | None) -> Count | None:
    """Return the count of a node that is a mean over targets, or ``None``."""
    if origin is not None and not isinstance(origin, Origin):
        return origin
    if operator in _NLL and node._saved_reduction == 1:
        return targets_of(node._saved_target, node._saved_weight, _ignored(node))
    return None


def _ignored(node: Any) -> int:
    return signed(node._saved_ignore_index)


def signed(saved: int) -> int:
    """Return an integer of a node, which shows it without its sign."""
    return saved - 2**64 * (saved >= 2**63)


def operator_of(node: Any) -> str:
    return node.name().rstrip("0123456789").removesuffix("Backward")


def _divides(node: Any, factor: Any) -> bool:
    return operator_of(node) == "Div" and producing_edge(*node.next_functions[0])[0] is not factor


def constants_of(node: Any) -> list[torch.Tensor | float]:
    """Return the factors of a product or a quotient that have no graph; numbers of Python as such."""
    return [_value_of(x) if _is_number(x) else x for x in _constants(node)]


def _constants(node: Any) -> list[torch.Tensor | float]:
    """Return the factors of a product or a quotient that have no graph.

    Operators of C++ save their scalars as numbers, while those of Python are wrapped in tensors.
    """
    if len(sources_of(node)) > 1:
        return []
    names = ("_saved_self", "_saved_other", "_saved_mat2")
    return [x for name in names if (x := getattr(node, name, None)) is not None]


def _is_number(x: torch.Tensor | float) -> bool:
    """True for a number, also one that autograd has wrapped: it does not promote a tensor's dtype."""
    if not isinstance(x, torch.Tensor):
        return True
    if x.dtype not in (torch.float64, torch.int64):
        return False
    narrow = torch.tensor(1, dtype=torch.float16 if x.is_floating_point() else torch.int8)
    return not x.dim() and torch.result_type(narrow, x) == narrow.dtype


def _is_single(x: torch.Tensor | float) -> bool:
    if not isinstance(x, torch.Tensor):
        return True
    return x.numel() == 1 and not is_trained(x)


def is_trained(x: torch.Tensor) -> bool:
    """True if a gradient goes through a tensor, other than to a value of frozen layers."""
    return x.requires_grad and not is_frozen(x)


def _factor_of(x: torch.Tensor | float) -> torch.Tensor | float:
    return x.detach() if isinstance(x, torch.Tensor) and not _is_number(x) else _value_of(x)


def _numbers_of(node: Any) -> list[float]:
    """Return the Python numbers among the factors of a product or a quotient."""
    return [_value_of(x) for x in _constants(node) if _is_number(x)]


def _value_of(number: torch.Tensor | float) -> float:
    """Read a number; a wrapped one without the user's dispatch modes (a FLOP counter), which would unwrap
    it.
    """
    if not isinstance(number, torch.Tensor):
        return number
    with _disable_current_modes():
        return number.item()


def is_shared(node: Any) -> bool:
    """True if the value is equal on all ranks: made of whole sequences and parameters only."""
    if _is_of_parameters(node):
        return True
    if not is_of_sequence([node]):
        return False
    whole = _made_of_sequence(node)
    besides = {source for each in whole for source in inputs_of(each)} - whole
    return all(map(_is_of_parameters, besides))


def is_whole(node: Any) -> bool:
    """True for the node of a value of whole sequences, which ``sequence_*`` or ``unshard`` returned."""
    origin = origin_of(node)
    return origin is Origin.SEQUENCE or origin is Origin.FROZEN


def inputs_of(node: Any) -> list[Any]:
    """Return all sources of a node; none for a value of whole sequences."""
    return [] if is_whole(node) else sources_of(node, frozen=True)


def _made_of_sequence(node: Any) -> set[Any]:
    """Return the nodes on the paths from values of ``unshard`` to a node."""
    users: dict[Any, list[Any]] = {node: []}
    ahead = [node]
    while ahead:
        user = ahead.pop()
        for source in inputs_of(user):
            if source not in users:
                ahead.append(source)
            users.setdefault(source, []).append(user)
    found = {each for each in users if is_whole(each)}
    ahead = list(found)
    while ahead:
        more = [user for user in users[ahead.pop()] if user not in found]
        found.update(more)
        ahead.extend(more)
    return found


def _is_of_parameters(node: Any) -> bool:
    """True if a value is computed from parameters and numbers only, as a regulariser is.

    A tensor of a parameter's size, such as its value before training, is assumed equal on all ranks.
    """
    ahead = [node]
    seen: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if origin_of(node) is not None:
            return False
        sources, operator = sources_of(node), operator_of(node)
        if hasattr(node, "variable"):
            if not isinstance(node.variable, torch.nn.Parameter):
                return False
        elif operator in ("Mul", "Div", "Mm"):
            if not all(map(_is_number, _constants(node))):
                return False
            ahead.extend(sources)
        elif operator in _PARAMETER_OPERATORS and sources and not _joins_another(node):
            ahead.extend(sources)
        else:
            return False
    return True


def _joined_values(terms: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """Return the saved values of parameter terms to which a tensor without a graph is added.

    Their gradients depend on nothing else. DTensors are excluded, as their parts differ between ranks.
    """
    found: list[torch.Tensor] = []
    for term in filter(_is_of_parameters, terms):
        nodes = [x for x in graph_nodes([term], sources_of) if not hasattr(x, "variable")]
        if any(operator_of(x) in ("Add", "Sub", "Rsub") and len(sources_of(x)) < 2 for x in nodes):
            found += [x for node in nodes for x in _saved_tensors(node)]
    return tuple({id(x): x for x in found}.values())


def _numbers_within(terms: Iterable[Any]) -> list[float]:
    """Return the numbers that parameters are multiplied or divided by within parameter terms."""
    nodes = graph_nodes(filter(_is_of_parameters, terms), sources_of)
    return [x for node in nodes if operator_of(node) in ("Mul", "Div") for x in _numbers_of(node)]


def _saved_tensors(node: Any) -> list[torch.Tensor]:
    # Imported here: imported before a mesh is made, it makes PyTorch keep the mesh's groups until exit.
    from torch.distributed.tensor import DTensor

    names = ("_saved_self", "_saved_other", "_saved_result")
    saved = [getattr(node, name, None) for name in names]
    tensors = [x for x in saved if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
    return [x for x in tensors if x.is_floating_point() and not _is_number(x)]


def _joins_another(node: Any) -> bool:
    """True if an operand of a sum, or of a concatenation, has no graph, and may differ between ranks."""
    operands = [operand for operand in node.next_functions if operand[0] is not None]
    if len(operands) == len(node.next_functions):
        return False
    source, number = operands[0]
    own, other = node._input_metadata[0].shape, source._input_metadata[number].shape
    return operator_of(node) not in ("Add", "Sub") or own != other or not own


def is_of_rows(mean: Any) -> bool:
    """True for a mean over values of whole rows, not over tokens beside which frozen layers gave such values.

    Frozen layers leave no note that their tokens are a rank's own.
    """
    sources = inputs_of(mean)
    if not is_of_sequence(sources):
        return False
    has_frozen = any(origin_of(x) is Origin.FROZEN for x in graph_nodes(sources, inputs_of))
    return not has_frozen or all(map(is_shared, sources))


def is_of_sequence(nodes: Iterable[Any]) -> bool:
    """True if nodes depend on ``unshard``, and not on a rank's own tokens in another way.

    It reads every node above attention, so it calls no function of ours at each of them.
    """
    ahead: list[tuple[Any, int]] = [(node, 0) for node in nodes]
    seen: set[Any] = set()
    found = False
    while ahead:
        node, number = ahead.pop()
        if node is None or node in seen:
            continue
        origin, name = node.metadata.get(NOTE), node.name()
        if origin is None and name in _IDENTITIES:
            ahead.append(node.next_functions[number])
            continue
        seen.add(node)
        if origin is Origin.SEQUENCE or origin is Origin.FROZEN:
            found = True
        elif origin is Origin.TOKENS or name in OPAQUE:
            return False
        else:
            ahead.extend(node.next_functions)
    return found


def declared_count(counted: torch.Tensor | float) -> torch.Tensor:
    """Return the number of targets of a mask, of weights of tokens, or of a number.

    Raises:
        ConfigError: no tensor or number; or a number, or a sum on the host, that is negative or NaN.
    """
    is_tensor = isinstance(counted, torch.Tensor)
    if not isinstance(counted, torch.Tensor | Real):
        raise ConfigError(NO_COUNT.format(f"a {type(counted).__name__}"))
    count = _wide_sum(counted.detach()) if is_tensor else torch.tensor(counted)
    if count.is_cpu and not count >= 0:
        raise ConfigError(NO_COUNT.format("a tensor" if is_tensor else counted))
    return count


NO_COUNT = (
    "count_targets({}) declares no number of targets: it is neither a tensor nor a number, or adds up to "
    "less than 0 or NaN. Pass a mask of this rank's tokens, or how many targets the loss of this rank "
    "counts, at least 0."
)


def divisor(count: Any) -> Any:
    """Return the count, or 1 where it is 0: a sum divided by it is then 0, and not NaN."""
    if isinstance(count, torch.Tensor):
        return torch.where(count > 0, count, torch.ones_like(count))
    return max(count, 1)
