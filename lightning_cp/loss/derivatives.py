"""Derivatives of a loss by values near its end: of whole sequences, and sums over a rank's own tokens.

The autograd engine would go on behind these values, through the model and its collectives. Here only nodes
between the loss and them are called, and may be called again by the engine. Nothing waits for a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch

from lightning_cp.loss.terms import (
    LINEAR,
    OPAQUE,
    SCALING,
    SELECTIONS,
    count_of,
    inputs_of,
    is_of_rows,
    is_of_sequence,
    is_shared,
    is_whole,
    operator_of,
    producing_edge,
    reduces_by_mean,
    signed,
    sources_of,
)
from lightning_cp.randomness.token_draws import find_token_dims
from lightning_cp.utils.autograd_notes import Count, Origin, origin_of

Edge = tuple[Any, int]
"""A node, and the number of its output."""

_GATHER = "_AllGather"
"""Node of ``all_gather``, whose backward is a collective."""
_SUMS = {"Sum", "Nansum", "Mean", "Dot", "Mv", "Mm", "Bmm"}
"""Linear reductions; of a product if its other operand has no graph."""
_FUNCTIONS_OF_SETS = {
    *("Logsumexp", "Norm", "LinalgVectorNorm", "Prod", "Var", "Std", "VarMean", "StdMean"),
    *("Max", "Min", "Amax", "Amin", "Median", "Nanmedian", "Kthvalue", "Topk"),
}
"""Reductions that parts of a sequence cannot compute apart."""


def derivatives(
    loss: torch.Tensor,
    nodes: Sequence[Any],
    between: Collection[Any],
    constants: Collection[Any] = (),
    values: Sequence[Edge] | None = None,
) -> list[Sequence[torch.Tensor | None]]:
    """Return the derivatives of a loss by the outputs of nodes; none for a node without influence.

    Args:
        loss: before its backward.
        nodes: behind them nothing is called; outputs of others are held constant.
        between: nodes between the loss and these, among others.
        constants: nodes whose outputs are held constant, too.
        values: the derivatives are those of their sum, and not of the loss, which is computed from them.
    """
    found: dict[Any, list[torch.Tensor | None]] = {}
    ends = [producing_edge(loss.grad_fn, loss.output_nr)] if values is None else values
    for end, number in ends:
        like = end._input_metadata[number]
        _add(found, end, number, loss.detach().new_ones(like.shape, dtype=like.dtype))
    with torch.no_grad(), torch.autocast(loss.device.type, enabled=False):
        path = _path([end for end, _ in ends], nodes, frozenset(between).difference(constants))
        for node in path:
            if node in nodes or node not in found:
                continue
            for edge, x in _call(node, found.pop(node)):
                source, number = producing_edge(*edge)
                if source in path:
                    _add(found, source, number, x)
    return [found.get(node, ()) for node in nodes]


def shared_factors(products: Iterable[Any]) -> list[Edge]:
    """Return the factors of products that are values of whole sequences or parameters."""
    edges = [producing_edge(*edge) for node in products for edge in node.next_functions]
    return [edge for edge in edges if edge[0] is not None and is_shared(edge[0])]


def _call(node: Any, by_outputs: list[torch.Tensor | None]) -> list[tuple[Any, torch.Tensor]]:
    """Return the edges to the inputs of a node and the derivatives by them, given those by its outputs.

    Nothing is exchanged: of rows that ``gather_data`` gathered, this rank passes on what its own ones have.
    """
    edges: Sequence[Any] = node.next_functions
    if operator_of(node) == _GATHER:
        passed: Sequence[Any] = [by_outputs[node.group.rank()]]
    elif callable(node):
        passed = _as_tuple(node(*by_outputs))
    else:  # of a Python autograd function, which is given zeros for missing ones
        given = [
            torch.zeros(like.shape, dtype=like.dtype, device=like.device) if x is None else x
            for x, like in zip(by_outputs, node._input_metadata, strict=True)
        ]
        # It returns something for each argument, while edges belong to tensors.
        passed = list(itertools.compress(_as_tuple(node.apply(*given)), node.needs_input_grad))
        edges = [edge for edge in edges if edge[0] is not None]
    return [(edge, x) for edge, x in zip(edges, passed, strict=True) if x is not None]


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", result if isinstance(result, tuple) else (result,))


def _add(
    found: dict[Any, list[torch.Tensor | None]], node: Any, number: int, x: torch.Tensor
) -> None:
    """Add a derivative by an output of a node, in its shape and dtype, as the autograd engine does."""
    of_output = node._input_metadata[number]
    x = x.sum_to_size(of_output.shape).to(of_output.dtype)
    sums = found.setdefault(node, [None] * len(node._input_metadata))
    before = sums[number]
    sums[number] = x if before is None else before + x


def _path(ends: Iterable[Any], nodes: Collection[Any], between: Collection[Any]) -> dict[Any, None]:
    """Return the nodes from ends of a graph to ``nodes``, each behind all its users.

    No others: calling a parameter's node would change its gradient.
    """
    found: dict[Any, None] = {}
    ahead = [(end, False) for end in ends]
    seen: set[Any] = set()
    while ahead:
        node, is_done = ahead.pop()
        if is_done:
            if node in nodes or any(source in found for source in inputs_of(node)):
                found[node] = None
        elif (node in between or node in nodes) and node not in seen:
            seen.add(node)
            ahead.append((node, True))
            ahead += [(source, False) for source in inputs_of(node)]
    return dict.fromkeys(reversed(found))


@dataclass
class TokenSums:
    """Sums and means over a rank's own tokens of which a loss is a function, in the order of the graph."""

    nodes: list[Any] = field(default_factory=list[Any])
    sizes: list[Count] = field(default_factory=list[Count])
    """Divisor of each node's mean; 1 for a sum."""
    visited: set[Any] = field(default_factory=set[Any])
    """Nodes between the loss and these, among others."""
    functions: list[str] = field(default_factory=list[str])
    """Names of other functions of all tokens, such as a maximum."""
    is_complete: bool = True
    """The loss is a function of these sums, and of nothing else that a rank computes from its own tokens."""
    whole_inputs: list[Edge] = field(default_factory=list[Edge])
    """Values of whole sequences that tokens in these sums are computed from."""
    is_short: bool = False
    """Some number between the loss and the sums has fewer than 32 bits."""

    def add_sum(self, node: Any, whole_inputs: Sequence[Edge]) -> None:
        """Add a sum or a mean, unless it is equal on all ranks.

        A value of whole sequences is not where a mask or a number for each token selects how often it counts.
        """
        if whole_inputs or not is_shared(node):
            self.nodes.append(node)
            self.sizes.append(mean_size(node))
            self.whole_inputs += whole_inputs

    def weights(self, loss: torch.Tensor, targets: Count) -> list[torch.Tensor]:
        """Return the weight of a token in each sum, times the rank's targets; float64 of the sum's shape.

        A loss that is the mean over these targets has the same weights on all ranks, whatever they count.
        """
        found = zip(self.sizes, derivatives(loss, self.nodes, self.visited), strict=True)
        return [
            x.double() * targets / size
            for size, of_outputs in found
            for x in of_outputs
            if x is not None
        ]


def token_sums(loss: torch.Tensor, rows: int, local_len: int) -> TokenSums:
    """Return the sums over a rank's own tokens that are nearest to the tokens.

    Functions of C++ are read; what is compiled, checkpointed or a Python autograd function is left out.

    Args:
        loss: before its backward.
        rows: of the batch.
        local_len: tokens of a row on this rank.
    """
    found = TokenSums()
    of_tokens: dict[Any, bool] = {}
    end = producing_edge(loss.grad_fn, loss.output_nr)[0]
    ahead = [(end, False)]
    while ahead:
        node, is_done = ahead.pop()
        if node is None or (node in found.visited and not is_done):
            continue
        found.visited.add(node)
        shape = node._input_metadata[0].shape
        if is_done:
            of_tokens[node] = any(of_tokens[x] for x in sources_of(node))
            is_small = of_tokens[node] and prod(shape) <= rows
            is_small = is_small and not _is_of_selected(node, rows, local_len)
            if is_small and operator_of(node) in _FUNCTIONS_OF_SETS:
                of_tokens[node] = False
                found.functions.append(operator_of(node))
            elif is_small and _is_sum(node):
                of_tokens[node] = False
                found.add_sum(node, _whole_inputs(node, rows, local_len))
            continue
        of_tokens[node] = False
        count = count_of(node, operator_of(node), origin_of(node))
        if is_whole(node) or hasattr(node, "variable"):
            continue
        if count is not None:
            if not is_of_rows(node):
                found.nodes.append(node)
                found.sizes.append(count)
        elif _is_closed(node):
            found.is_complete = False
        elif _is_sum(node) and _is_over_tokens(node, rows, local_len):
            found.add_sum(node, _whole_inputs(node, rows, local_len))
        elif (
            origin_of(node) is Origin.TOKENS or find_token_dims(shape, rows, local_len) is not None
        ):
            of_tokens[node] = True
        else:
            ahead.append((node, True))
            ahead += [(x, False) for x in sources_of(node)]
    found.is_complete &= not of_tokens.get(end, False)
    found.is_short = any(not x and _is_short(node) for node, x in of_tokens.items())
    return found


def _whole_inputs(end: Any, rows: int, local_len: int) -> list[Edge]:
    """Return the values of whole sequences that a sum's tokens are computed from: the last without tokens."""
    found: list[Edge] = []
    ahead, seen = [end], {end}
    while ahead:
        node = ahead.pop()
        for source, number in (producing_edge(*edge) for edge in node.next_functions):
            if source is None or source in seen:
                continue
            seen.add(source)
            shape = source._input_metadata[number].shape
            if operator_of(source) in SELECTIONS:
                shape = shape_of_source(source)
            if not is_shared(source):
                ahead += [source] if operator_of(source) in SCALING else []
            elif find_token_dims(shape, rows, local_len) is not None:
                ahead.append(source)
            elif node is not end and is_of_sequence([source]):
                found.append((source, number))
    return found


def _is_closed(node: Any) -> bool:
    """True for a function whose inner operations have no nodes, or which only its author knows."""
    return node.name() in OPAQUE or not (callable(node) or operator_of(node) in LINEAR)


def _is_short(node: Any) -> bool:
    dtype = node._input_metadata[0].dtype
    return dtype.is_floating_point and dtype.itemsize < 4 and not hasattr(node, "variable")


def _is_over_tokens(node: Any, rows: int, local_len: int) -> bool:
    """True for a sum over a dimension of tokens, which may leave many features."""
    dims: Any = getattr(node, "_saved_dim", None)
    if not isinstance(dims, tuple):
        return False
    shape = shape_of_source(node)
    place = find_token_dims(shape, rows, local_len)
    if place is None:
        return False
    reduced = [signed(dim) % len(shape) for dim in cast("tuple[int, ...]", dims)]
    return (place.token or 0) in reduced


def _is_of_selected(node: Any, rows: int, local_len: int) -> bool:
    """True for a reduction of features of tokens that a mask or an index selected, which stay apart."""
    source, shape = node, node._input_metadata[0].shape
    first = shape[0] if shape else None
    while first is not None:
        below = shape_of_source(source)
        if below[:1] != (first,):
            break
        source = next(producing_edge(*x)[0] for x in source.next_functions if x[0] is not None)
        if operator_of(source) not in SELECTIONS and not sources_of(source):
            return False
        if operator_of(source) in SELECTIONS:
            whole = shape_of_source(source)
            place = find_token_dims(whole, rows, local_len)
            return place is not None and (place.token is None or len(whole) > len(below))
        if find_token_dims(below, rows, local_len) is not None:
            return False
    return False


def _is_sum(node: Any) -> bool:
    return operator_of(node) in _SUMS or getattr(node, "_saved_reduction", None) in (1, 2)


def mean_size(node: Any) -> float:
    """Return the number of values in a mean; 1 for a sum."""
    if operator_of(node) != "Mean" and not reduces_by_mean(node):
        return 1.0
    return prod(shape_of_source(node)) / max(1, prod(node._input_metadata[0].shape))


def shape_of_source(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's first input with a graph."""
    source, number = next(
        producing_edge(*edge) for edge in node.next_functions if edge[0] is not None
    )
    return tuple(source._input_metadata[number].shape)
