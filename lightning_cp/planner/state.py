"""Bytes of parameters, gradients and optimizer state that a rank holds, in closed form. Plain integers.

A parameter of ``[d0, ...]`` is cut along d0 into ``ceil(d0 / ranks)`` rows a rank, so the last ranks may hold
fewer rows, or none; FSDP2 takes memory for the full number on every rank. Scalars are not cut. Optimizer
state is made of what a rank does hold.

Not counted: activations, and the buffers of collectives, which are one unit's parameters or gradients each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a model's trained parameters, each once: of its blocks, and around them in order of use."""

    before: tuple[Shape, ...]
    blocks: tuple[tuple[Shape, ...], ...]
    after: tuple[Shape, ...]


@dataclass(frozen=True)
class StateBytes:
    """Of one rank."""

    parameters: int
    """Between steps."""
    parameters_peak: int
    """Within a step, with what is gathered."""
    gradients: int
    """From the end of backward to the optimizer's step."""
    gradients_peak: int
    """Within a backward, with those that were not reduced yet."""
    optimizer: int


def state_bytes(
    model: ModelShapes,
    engine: str,
    *,
    rank: int,
    ranks: int,
    itemsize: int = 4,
    states: int = 2,
    state_itemsize: int = 4,
) -> StateBytes:
    """What a rank holds, without mixed precision.

    Args:
        model: shapes of its parameters.
        engine: ``ddp``, ``fsdp``, ``hsdp`` or ``zero1``.
        rank: this rank's place among those that a parameter is cut for.
        ranks: that many: all of ``loss``, but with ``hsdp`` those of one replica.
        itemsize: bytes of a parameter's and a gradient's element.
        states: tensors that the optimizer keeps for each parameter: 2 for Adam, 1 for momentum.
        state_itemsize: bytes of their elements.
    """
    own, blocks = (*model.before, *model.after), model.blocks
    each = [*own, *(shape for block in blocks for shape in block)]
    if engine == "ddp":
        whole = _whole(each, itemsize)
        return StateBytes(whole, whole, whole, whole, states * _whole(each, state_itemsize))
    cut = _cut(each, ranks, itemsize)
    gathered = _whole_in_memory(own, ranks, itemsize)
    sizes = [_whole_in_memory(block, ranks, itemsize) for block in blocks]
    if engine == "zero1":
        gathered += sum(sizes)
    else:  # the next one is still in its collective's buffer while a block is in use
        gathered += max(sizes, default=0)
    held = sum(_rows(shape, rank, ranks) * _row(shape) for shape in each)
    peak = _gradients_peak(model, ranks, itemsize)
    return StateBytes(cut, cut + gathered, cut, peak, states * held * state_itemsize)


def _gradients_peak(model: ModelShapes, ranks: int, itemsize: int) -> int:
    """Backward goes through ``after``, the blocks from the last to the first, and ``before``.

    The model's own are reduced at the end, each block's once it is through.
    """
    whole, reduced = _whole(model.after, itemsize), 0
    peak = whole
    for block in reversed(model.blocks):
        peak = max(peak, whole + reduced + _whole(block, itemsize))
        reduced += _cut(block, ranks, itemsize)
    whole += _whole(model.before, itemsize)
    return max(peak, whole + reduced)


def _whole(shapes: Sequence[Shape], itemsize: int) -> int:
    return sum(math.prod(shape) for shape in shapes) * itemsize


def _whole_in_memory(shapes: Sequence[Shape], ranks: int, itemsize: int) -> int:
    """Gathered, with the rows that are not there; scalars are whole anyway."""
    cut = [shape for shape in shapes if shape]
    return ranks * sum(_most(shape, ranks) * _row(shape) for shape in cut) * itemsize


def _cut(shapes: Sequence[Shape], ranks: int, itemsize: int) -> int:
    return sum(_most(shape, ranks) * _row(shape) for shape in shapes) * itemsize


def _most(shape: Shape, ranks: int) -> int:
    """Rows that there is memory for, on every rank."""
    return -(-shape[0] // ranks) if shape else 1


def _rows(shape: Shape, rank: int, ranks: int) -> int:
    """Rows of a parameter that a rank holds."""
    if not shape:
        return 1
    most = _most(shape, ranks)
    return max(0, min(most, shape[0] - rank * most))


def _row(shape: Shape) -> int:
    return math.prod(shape[1:])
