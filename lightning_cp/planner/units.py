"""Bytes of whole parameters, of gradients and of the buffers they are added in, within a step, by engine.

============  ===========================  =============================  ===============================
engine        whole parameters             gradients                      buffers of their sums
============  ===========================  =============================  ===============================
ddp           none beside its own          whole                          buckets: all of them, always
fsdp, hsdp    the model's own; a block,    whole until a unit is through,  a unit's whole gradients, until
              and the next one's buffer    a rank's rows from then on      the next unit's are added
zero1         all                          the same                       the same
============  ===========================  =============================  ===============================

Units are blocks; what is outside of them is the model's own, and its gradients wait until the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import pairwise

from lightning_cp.planner.activations import WIDE, RankStep
from lightning_cp.planner.model import Parameter


def units_of(step: RankStep) -> Units:
    """Those of a step; steps that differ in tokens or in what they keep share them."""
    bare = {"recompute": "none", "offload": False, "chunked_loss": 0, "tiled_mlp": 0}
    return _units_of(replace(step, tokens=1, cp_size=1, attention=(0, 0), **bare))


@lru_cache(maxsize=4096)
def _units_of(step: RankStep) -> Units:
    return Units(step)


class Units:
    """Of one rank's step."""

    def __init__(self, step: RankStep) -> None:
        self._step = step
        self._model = step.model
        self._block: Sequence[Parameter] = step.model.layers[0].parameters
        self._own: Sequence[Parameter] = (*step.model.before, *step.model.after)
        self._shards = step.engine != "ddp"
        self._stays = step.engine == "zero1"

    @cached_property
    def own(self) -> int:
        """What is whole all the time: the model's own; with ``zero1`` all; of ``ddp`` autocast's copies."""
        if not self._shards:
            casts = self._step.itemsize != self._step.parameter_itemsize
            return self._count_all * self._step.itemsize * casts
        blocks = len(self._model.layers) * self._gathered(self._block) if self._stays else 0
        return self._gathered(self._own) + blocks

    @cached_property
    def block(self) -> int:
        """A block that is in use."""
        return self._gathered(self._block) if self._shards and not self._stays else 0

    @cached_property
    def arriving(self) -> int:
        """The buffer in which the next block arrives, or the last one did; alone, nothing does."""
        return self.block if self._step.shard_ranks > 1 else 0

    @cached_property
    def standing(self) -> int:
        """Buckets, which are there all the time."""
        size = self._step.parameter_itemsize
        return 0 if self._shards else self._count_all * size

    @cached_property
    def sums(self) -> int:
        """The buffer of a block that was added last."""
        return self._summed(self._block) if self._shards else 0

    @cached_property
    def sums_of_own(self) -> int:
        """The buffer of the model's own parameters."""
        return self._summed(self._own) if self._shards else 0

    @cached_property
    def head(self) -> int:
        """The gradient of the head's weight, or of the embedding."""
        return self._step.vocabulary * self._model.features * self._gradient_itemsize

    def done(self, blocks: int) -> int:
        """Gradients of so many blocks that are through, of the head and of the last norm."""
        norms = [one for one in self._model.after if len(one.shape) == 1]
        return blocks * self._kept(self._block) + self.head + self._whole(norms)

    @cached_property
    def all(self) -> int:
        """Gradients after backward."""
        return self._kept(self._own) + len(self._model.layers) * self._kept(self._block)

    @cached_property
    def of_block(self) -> int:
        """A block's gradients, before they are added."""
        return self._whole(self._block)

    @cached_property
    def behind_attention(self) -> int:
        """Those that are there when attention is differentiated."""
        before = ("self_attn.q", "self_attn.k", "self_attn.v", "input_layernorm")
        return self._whole([one for one in self._block if not one.name.startswith(before)])

    @cached_property
    def of_mlp(self) -> int:
        """Those of the MLP."""
        return self._whole(self._mlp)

    @cached_property
    def of_down(self) -> int:
        """Those of the MLP's last product."""
        return self._whole([one for one in self._mlp if "down_proj" in one.name])

    @cached_property
    def sums_of_tiles(self) -> int:
        """Of the MLP's gradients in float32."""
        return self._count(self._mlp) * WIDE

    @cached_property
    def stepped(self) -> int:
        """AdamW's tensors, a parameter at a time: two like it, while one like that before is still there."""
        # Layers are alike: two of them have every neighbour.
        each = (*self._model.before, *self._block, *self._block, *self._model.after)
        sizes = [self._kept([one]) for one in each]
        return max(before + 2 * size for before, size in pairwise([0, *sizes]))

    @cached_property
    def _mlp(self) -> list[Parameter]:
        return [one for one in self._block if one.name.startswith("mlp.")]

    @cached_property
    def _gradient_itemsize(self) -> int:
        """Until they are added; ``ddp`` has them as parameters are."""
        return self._step.itemsize if self._shards else self._step.parameter_itemsize

    @cached_property
    def _count_all(self) -> int:
        return self._count(self._own) + len(self._model.layers) * self._count(self._block)

    def _count(self, parameters: Iterable[Parameter]) -> int:
        return sum(math.prod(one.local_shape(self._step.tp_size)) for one in parameters)

    def _whole(self, parameters: Iterable[Parameter]) -> int:
        return self._count(parameters) * self._gradient_itemsize

    def _rows(self, one: Parameter) -> int:
        """Entries of a rank's rows, with those that there is memory for only."""
        shape = one.local_shape(self._step.tp_size)
        ranks = self._step.shard_ranks if self._shards else 1
        return -(-shape[0] // ranks) * math.prod(shape[1:])

    def _kept(self, parameters: Iterable[Parameter]) -> int:
        """Gradients that were added."""
        return sum(map(self._rows, parameters)) * self._step.parameter_itemsize

    def _gathered(self, parameters: Iterable[Parameter]) -> int:
        return sum(map(self._rows, parameters)) * self._step.shard_ranks * self._step.itemsize

    def _summed(self, parameters: Iterable[Parameter]) -> int:
        size = self._step.reduce_itemsize or self._gradient_itemsize
        return sum(map(self._rows, parameters)) * self._step.shard_ranks * size
