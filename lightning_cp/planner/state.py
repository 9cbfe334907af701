"""Bytes of parameters, gradients and optimizer state on a rank, between and within steps, in closed form.

A parameter of ``[d0, ...]`` is sharded along d0 into ``ceil(d0 / ranks)`` rows per rank, so the last ranks
may have fewer rows, or none; FSDP2 allocates the full number on every rank. Scalars are not sharded.
Optimizer state covers only rows that a rank really has. Activations are not counted; buffers of collectives
only in ``UnitBytes``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from lightning_cp.planner.activations import FLOAT32_BYTES, RankStep
from lightning_cp.planner.model import Parameter, Shape


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a model's trained parameters, each once: before, in and after its blocks, in order of use."""

    before: tuple[Shape, ...]
    blocks: tuple[tuple[Shape, ...], ...]
    after: tuple[Shape, ...]


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank."""

    parameters: int
    """Between steps."""
    gradients: int
    """From the end of backward to the optimizer's step."""
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
    """Return the bytes of a rank, without mixed precision.

    Args:
        model: shapes of its parameters.
        engine: ``ddp``, ``fsdp``, ``hsdp`` or ``zero1``.
        rank: this rank among those that shard a parameter.
        ranks: ranks that shard a parameter: all of ``loss``, but with ``hsdp`` those of one replica.
        itemsize: bytes of a parameter's and a gradient's element.
        states: state tensors of the optimizer per parameter: 2 for Adam, 1 for momentum.
        state_itemsize: bytes of their elements.
    """
    each = [*model.before, *model.after, *(shape for block in model.blocks for shape in block)]
    if engine == "ddp":
        whole = _full_bytes(each, itemsize)
        return StateBytes(whole, whole, states * _full_bytes(each, state_itemsize))
    cut = _shard_bytes(each, ranks, itemsize)
    held = sum(_held_rows(shape, rank, ranks) * _row_size(shape) for shape in each)
    return StateBytes(cut, cut, states * held * state_itemsize)


def _full_bytes(shapes: Sequence[Shape], itemsize: int) -> int:
    return sum(math.prod(shape) for shape in shapes) * itemsize


def _shard_bytes(shapes: Sequence[Shape], ranks: int, itemsize: int) -> int:
    return sum(_rows_per_rank(shape, ranks) * _row_size(shape) for shape in shapes) * itemsize


def _rows_per_rank(shape: Shape, ranks: int) -> int:
    """Return the rows that every rank allocates."""
    return -(-shape[0] // ranks) if shape else 1


def _held_rows(shape: Shape, rank: int, ranks: int) -> int:
    """Return the rows of a parameter that a rank really has."""
    if not shape:
        return 1
    most = _rows_per_rank(shape, ranks)
    return max(0, min(most, shape[0] - rank * most))


def _row_size(shape: Shape) -> int:
    return math.prod(shape[1:])


def unit_bytes(step: RankStep) -> UnitBytes:
    """Return the unit bytes of a step; cached for steps that differ only in activations."""
    bare = {"recompute": "none", "offload": False, "chunked_loss": 0, "tiled_mlp": 0}
    return _cached_unit_bytes(replace(step, tokens=1, cp_size=1, attention=(0, 0), **bare))


@lru_cache(maxsize=4096)
def _cached_unit_bytes(step: RankStep) -> UnitBytes:
    return UnitBytes(step)


class UnitBytes:
    """Bytes of whole parameters, gradients and reduction buffers within one rank's step, by engine.

    ============  ============================  ===============================  ============================
    engine        whole parameters              gradients                        reduction buffers
    ============  ============================  ===============================  ============================
    ddp           its own parameters            whole                            buckets: all of them, always
    fsdp, hsdp    the model's own; a block,     whole until a unit's backward    a unit's whole gradients,
                  and the next one's buffer     ends, then a rank's rows         until the next reduction
    zero1         all                           like fsdp                        like fsdp
    ============  ============================  ===============================  ============================

    Units are blocks; parameters outside of them are the model's own, whose gradients are reduced at the end.
    """

    def __init__(self, step: RankStep) -> None:
        self._step = step
        self._model = step.model
        self._block: Sequence[Parameter] = step.model.layers[0].parameters
        self._own: Sequence[Parameter] = (*step.model.before, *step.model.after)
        self._shards = step.engine != "ddp"
        self._stays = step.engine == "zero1"

    @cached_property
    def own(self) -> int:
        """Parameters always whole: the model's own; with ``zero1`` all; with ``ddp`` autocast's copies."""
        if not self._shards:
            casts = self._step.itemsize != self._step.parameter_itemsize
            return self._count_all * self._step.itemsize * casts
        blocks = len(self._model.layers) * self._gathered(self._block) if self._stays else 0
        return self._gathered(self._own) + blocks

    @cached_property
    def block(self) -> int:
        """Whole parameters of the block in use."""
        return self._gathered(self._block) if self._shards and not self._stays else 0

    @cached_property
    def arriving(self) -> int:
        """Receive buffer of the next or last block; 0 without other ranks."""
        return self.block if self._step.shard_ranks > 1 else 0

    @cached_property
    def standing(self) -> int:
        """Buckets of ``ddp``, which exist all the time."""
        size = self._step.parameter_itemsize
        return 0 if self._shards else self._count_all * size

    @cached_property
    def sums(self) -> int:
        """Reduction buffer of the last reduced block."""
        return self._summed(self._block) if self._shards else 0

    @cached_property
    def sums_of_own(self) -> int:
        """Reduction buffer of the model's own parameters."""
        return self._summed(self._own) if self._shards else 0

    @cached_property
    def head(self) -> int:
        """Gradient of the head's weight, or of the embedding."""
        return self._step.vocabulary * self._model.features * self._gradient_itemsize

    def done(self, blocks: int) -> int:
        """Return the gradients of ``blocks`` finished blocks, of the head and of the last norm."""
        norms = [one for one in self._model.after if len(one.shape) == 1]
        return blocks * self._reduced(self._block) + self.head + self._whole(norms)

    @cached_property
    def all(self) -> int:
        """Gradients after backward."""
        return self._reduced(self._own) + len(self._model.layers) * self._reduced(self._block)

    @cached_property
    def of_block(self) -> int:
        """A block's gradients before their reduction."""
        return self._whole(self._block)

    @cached_property
    def behind_attention(self) -> int:
        """Gradients of a block that exist during attention's backward."""
        before = ("self_attn.q", "self_attn.k", "self_attn.v", "input_layernorm")
        return self._whole([one for one in self._block if not one.name.startswith(before)])

    @cached_property
    def of_mlp(self) -> int:
        """Gradients of the MLP."""
        return self._whole(self._mlp)

    @cached_property
    def of_down(self) -> int:
        """Gradient of the MLP's last product."""
        return self._whole([one for one in self._mlp if "down_proj" in one.name])

    @cached_property
    def sums_of_tiles(self) -> int:
        """Sums of the MLP's gradients over tiles, in float32."""
        return self._count(self._mlp) * FLOAT32_BYTES

    @cached_property
    def stepped(self) -> int:
        """AdamW's temporaries, one parameter at a time: two like it, and one like the previous parameter."""
        # Layers are equal: two of them contain every pair of neighbours.
        each = (*self._model.before, *self._block, *self._block, *self._model.after)
        sizes = [self._reduced([one]) for one in each]
        return max(before + 2 * size for before, size in pairwise([0, *sizes]))

    @cached_property
    def _mlp(self) -> list[Parameter]:
        return [one for one in self._block if one.name.startswith("mlp.")]

    @cached_property
    def _gradient_itemsize(self) -> int:
        """Bytes of a gradient's entry before its reduction; with ``ddp`` those of the parameter."""
        return self._step.itemsize if self._shards else self._step.parameter_itemsize

    @cached_property
    def _count_all(self) -> int:
        return self._count(self._own) + len(self._model.layers) * self._count(self._block)

    def _count(self, parameters: Iterable[Parameter]) -> int:
        return sum(math.prod(one.local_shape(self._step.tp_size)) for one in parameters)

    def _whole(self, parameters: Iterable[Parameter]) -> int:
        return self._count(parameters) * self._gradient_itemsize

    def _rows(self, one: Parameter) -> int:
        """Return the entries of a rank's allocated rows."""
        shape = one.local_shape(self._step.tp_size)
        ranks = self._step.shard_ranks if self._shards else 1
        return -(-shape[0] // ranks) * math.prod(shape[1:])

    def _reduced(self, parameters: Iterable[Parameter]) -> int:
        """Return the bytes of reduced gradients."""
        return sum(map(self._rows, parameters)) * self._step.parameter_itemsize

    def _gathered(self, parameters: Iterable[Parameter]) -> int:
        return sum(map(self._rows, parameters)) * self._step.shard_ranks * self._step.itemsize

    def _summed(self, parameters: Iterable[Parameter]) -> int:
        size = self._step.reduce_itemsize or self._gradient_itemsize
        return sum(map(self._rows, parameters)) * self._step.shard_ranks * size
