"""The most that a rank holds of parameters and gradients within a step, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_cp.planner.state import (
    ModelShapes,
    Shape,
    _full_bytes,
    _row_size,
    _rows_per_rank,
    _shard_bytes,
)


class PeakBytes(NamedTuple):
    """Bytes of one rank."""

    parameters: int
    """With gathered parameters."""
    gradients: int
    """Within a backward, with gradients that are not reduced yet."""


def peak_bytes(model: ModelShapes, engine: str, *, ranks: int, itemsize: int) -> PeakBytes:
    """Return the peaks of a rank; arguments of ``state_bytes``."""
    own = (*model.before, *model.after)
    each = [*own, *(shape for block in model.blocks for shape in block)]
    if engine == "ddp":
        whole = _full_bytes(each, itemsize)
        return PeakBytes(whole, whole)
    gathered = _gathered_bytes(own, ranks, itemsize)
    sizes = [_gathered_bytes(block, ranks, itemsize) for block in model.blocks]
    if engine == "zero1":
        gathered += sum(sizes)
    else:  # one block is whole at a time; the next one is in its collective's buffer
        gathered += max(sizes, default=0)
    cut = _shard_bytes(each, ranks, itemsize)
    return PeakBytes(cut + gathered, _gradients_peak(model, ranks, itemsize))


def _gathered_bytes(shapes: Sequence[Shape], ranks: int, itemsize: int) -> int:
    """Return the bytes of gathered parameters, padding rows included; scalars are whole anyway."""
    cut = [shape for shape in shapes if shape]
    return ranks * sum(_rows_per_rank(shape, ranks) * _row_size(shape) for shape in cut) * itemsize


def _gradients_peak(model: ModelShapes, ranks: int, itemsize: int) -> int:
    """Return the peak of gradients in backward: ``after``, the blocks in reverse, then ``before``.

    A block's gradients are reduced after its backward, the model's own at the end.
    """
    whole, reduced = _full_bytes(model.after, itemsize), 0
    peak = whole
    for block in reversed(model.blocks):
        peak = max(peak, whole + reduced + _full_bytes(block, itemsize))
        reduced += _shard_bytes(block, ranks, itemsize)
    whole += _full_bytes(model.before, itemsize)
    return max(peak, whole + reduced)
