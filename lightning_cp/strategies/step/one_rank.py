"""A whole batch on one rank, its documents isolated: what a model computes that knows of them.

``cu_seqlens`` and ``segment_ids`` declare documents to this package; a model in one process reads neither. To
compare with one process, the model's attention is intercepted there too, and computed over the declared
documents by the plainest kernel: no exchange, no process group, and not the kernel of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_cp.attention.exchange import Exchange
from lightning_cp.axes import Axis, Flat
from lightning_cp.batch import BatchRules, ShardedBatch, documents_of, read_batch, shard_batch
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Mask, SequenceLayout
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.checks import Checks
from lightning_cp.models.facts import PositionFacts
from lightning_cp.models.swap import StepState, SwapHandle
from lightning_cp.strategies.step.sharding import position_facts_of

PLAINEST = "reference"
"""The kernel."""


class OneRank(ContextParallelMesh):
    """A rank that shares nothing, whatever the others do; it has no process groups."""

    def __init__(self, device_type: str) -> None:
        self.sizes = dict.fromkeys(Axis, 1)
        self.device_type = device_type
        self._ranks = dict.fromkeys((*Axis, *Flat), 0)
        self._destroyed = True


def with_unknown_documents(
    batch: Any, rules: BatchRules, mask: Mask
) -> tuple[ShardedBatch, PositionFacts] | None:
    """All of a batch that has documents which its model would not isolate by itself; ``None`` for others.

    transformers reads documents from positions that restart, for causal models; nothing else is read.
    """
    try:
        whole = read_batch(batch, rules, needs_labels=False)
        documents = documents_of(whole, rules)
    except (ConfigError, ShapeError):
        return None  # refused when it is sharded
    layout = SequenceLayout(whole.seq_len, 1, 1, "contiguous", documents, mask)
    positions = position_facts_of(whole, layout)
    reads_them = rules.reads_masks and mask.causal and positions.restart
    if reads_them or not positions.packed:
        return None
    return shard_batch(whole, layout, 0, rules), positions


@contextmanager
def whole_on(handle: SwapHandle, state: StepState) -> Iterator[None]:
    """Intercept attention of a whole batch on this rank alone."""
    kept = {name: getattr(handle, name) for name in _OF_RANKS}
    mesh = OneRank(handle.mesh.device_type)
    alone = (mesh, PLAINEST, Exchange(), Checks(mesh), {})
    vars(handle).update(zip(_OF_RANKS, alone, strict=True))
    try:
        handle.activate(state)
        yield
    finally:
        handle.deactivate()
        vars(handle).update(kept)


_OF_RANKS = ("mesh", "kernel", "exchange", "checks", "requests")
"""What a handle knows of the ranks, and of what these have agreed on."""
