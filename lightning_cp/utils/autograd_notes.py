"""Notes on autograd nodes: a tensor's origin, which decides its loss's weight. They live with the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch

Count = torch.Tensor | float
"""The number of targets of a mean; the sum of their weights if classes have weights."""


class Origin(Enum):
    """The origin of a tensor."""

    SEQUENCE = "unshard: the whole sequence, on every rank"
    """Its backward is summed over ranks."""
    FROZEN = "the same, without a gradient to what computed it"
    TOKENS = "attention: a rank's own tokens"


NOTE = "lightning_cp"
"""The key of a note in the metadata of a node."""


def note_origin(x: torch.Tensor, origin: Origin | Count) -> None:
    """Note the origin of ``x``; a count if ``x`` is a mean over that many targets of this rank."""
    if x.grad_fn is not None:
        node: Any = x.grad_fn
        node.metadata[NOTE] = origin


def note_sequence(x: torch.Tensor) -> torch.Tensor:
    """Return a value of whole sequences with the note of its origin.

    One without a gradient, of frozen layers, gets a node of its own where gradients are recorded: otherwise
    the graph of a head behind it would not show what it is computed from.
    """
    if x.grad_fn is not None:
        note_origin(x, Origin.SEQUENCE)
    elif torch.is_grad_enabled() and x.is_floating_point():
        x = x.detach().requires_grad_().clone()
        note_origin(x, Origin.FROZEN)
    else:
        setattr(x, NOTE, Origin.SEQUENCE)
    return x


def is_sequence_number(x: torch.Tensor) -> bool:
    """True for a value of whole sequences without a gradient, such as a number of tokens."""
    return getattr(x, NOTE, None) is Origin.SEQUENCE or is_frozen(x)


def is_frozen(x: torch.Tensor) -> bool:
    """True for a value of whole sequences without a gradient to what computed it."""
    return x.grad_fn is not None and origin_of(x.grad_fn) is Origin.FROZEN


def origin_of(node: Any) -> Origin | Count | None:
    """Return the note of a node."""
    return node.metadata.get(NOTE)


def in_backward() -> bool:
    """True if this thread runs autograd's backward, in which calls of modules are recomputations."""
    return torch._C._current_graph_task_id() != -1


def graph_nodes(starts: Iterable[Any], sources: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yield each node of a graph once, from its end.

    Args:
        starts: the nodes to begin with; ``None`` among them is left out.
        sources: returns the nodes to continue with behind a node.
    """
    ahead, seen = list(starts), set[Any]()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead.extend(sources(node))
