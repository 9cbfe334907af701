"""Steps that are none of the run's: what looks at a model in between leaves the run as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from lightning_cp.batch import BatchRules, ShardedBatch, documents_of, read_batch, shard_batch
from lightning_cp.batch.loss_calls import LossCalls
from lightning_cp.batch.sharder import batch_position_info
from lightning_cp.batch.step_state import PositionInfo, StepState
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import LayoutChoice, Mask, SequenceLayout
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.layout.exchange import Exchange
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.handle import RankChecks, SwapHandle
from lightning_cp.profile.recorder import StepRecorder
from lightning_cp.randomness.token_draws import StepTokens
from lightning_cp.runtime.model_binding import AttachedModel

# A whole batch on one rank, its documents isolated: what a model computes that knows of them.
#
# ``cu_seqlens`` and ``segment_ids`` declare documents to this package; a model in one process reads
# neither. To compare with one process, the model's attention is intercepted there too, and computed over
# the declared documents by the plainest kernel: no exchange, no process group, and not the kernel of the
# run.


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
) -> tuple[ShardedBatch, PositionInfo] | None:
    """All of a batch that has documents which its model would not isolate by itself; ``None`` for others.

    transformers reads documents from positions that restart, for causal models; nothing else is read.
    """
    try:
        whole = read_batch(batch, rules, needs_labels=False)
        documents = documents_of(whole, rules)
    except (ConfigError, ShapeError):
        return None  # refused when it is sharded
    layout = SequenceLayout(whole.seq_len, 1, 1, "contiguous", documents, mask)
    positions = batch_position_info(whole, layout)
    reads_them = rules.reads_masks and mask.causal and positions.restart
    if reads_them or not positions.packed:
        return None
    return shard_batch(whole, layout, 0, rules), positions


@contextmanager
def whole_on(handle: SwapHandle, state: StepState) -> Iterator[None]:
    """Intercept attention of a whole batch on this rank alone."""
    kept = {name: getattr(handle, name) for name in _OF_RANKS}
    mesh = OneRank(handle.mesh.device_type)
    alone = (mesh, PLAINEST, Exchange(), RankChecks(mesh), {})
    vars(handle).update(zip(_OF_RANKS, alone, strict=True))
    try:
        handle.activate(state)
        yield
    finally:
        handle.deactivate()
        vars(handle).update(kept)


_OF_RANKS = ("mesh", "kernel", "exchange", "checks", "requests")
"""What a handle knows of the ranks, and of what these have agreed on."""


class StepsAside(AttachedModel):
    """The traces of a step, and blocks within which it leaves none."""

    def __init__(self, settings: StrategyConfig) -> None:
        super().__init__(settings)
        self._trains = True
        self._looks_at_values = 8  # batches of training; of evaluation at all of them
        self._positions = PositionInfo()
        self.layout_choice: LayoutChoice | None = None
        """Why the current batch has its layout, with ``layout="auto"``."""

    def _state_of(self, part: ShardedBatch, positions: PositionInfo, cp_rank: int) -> StepState:
        """The state of a step on a part of a batch."""
        return StepState(
            layout=part.layout,
            position_ids=part.position_ids,
            aligned_labels=_copy(part.aligned_labels),
            labels=_copy(part.labels),
            valid_local=part.valid[cp_rank],
            real_local=part.layout.real_len(cp_rank),
            loss_outside=self._loss_outside,
            positions=positions,
            labels_read=self.rules.labels,
            needs_loss=self._needs_loss or self._trains,
            trains=self._trains,
            losses=LossCalls() if self._looks_at_values or not self._trains else None,
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A step within is none of the run's: nothing is counted, recorded or said, and all comes back."""
        kept = {name: vars(self)[name] for name in _OF_A_STEP}
        listeners, self._listeners[:] = list(self._listeners), []
        self._is_aside, self._positions_taken, self._accumulated = True, False, None
        self.recorder = StepRecorder((), self.recorder.folder)
        try:
            yield
        finally:
            vars(self).update(kept)
            self._listeners[:] = listeners
            if self._draws is not None:
                self._draws.pop_calls()

    @contextmanager
    def alone(self, batch: Any) -> Iterator[bool]:
        """A step on the whole batch within, on this rank by itself: as one process has it.

        Yields:
            Whether documents of the batch are isolated that the model alone would not isolate.
        """
        assert self._handle is not None
        found = with_unknown_documents(batch, self.rules, self._rule.mask)
        with self.aside(), self.as_one_process(), self._drawing_for(batch):
            if found is None:
                yield False
                return
            state = self._state_of(*found, cp_rank=0)
            state.weighted = True  # by 1: it has all targets
            with whole_on(self._handle, state):
                yield True

    @contextmanager
    def _drawing_for(self, batch: Any) -> Iterator[None]:
        """Tokens of a whole batch draw what they draw as parts of it."""
        if self._draws is not None:
            with suppress(ConfigError, ShapeError):  # refused when it is sharded
                whole = read_batch(batch, self.rules, needs_labels=False)
                layout = SequenceLayout(whole.seq_len, 1, 1, "contiguous")
                data = (self.mesh.data_rank, self.mesh.data_size)
                self._draws.begin(StepTokens.of(layout, 0, whole.rows, data))
        try:
            yield
        finally:
            if self._draws is not None:
                self._draws.end()

    @contextmanager
    def on_mesh(self, mesh: ContextParallelMesh) -> Iterator[None]:
        """Attention over other process groups, of the same ranks, within."""
        assert self._handle is not None
        assert self._model is not None
        kept, self._mesh = self._mesh, mesh
        self._handle.undo()
        self._swap(self._model)
        try:
            yield
        finally:
            self._handle.undo()
            self._mesh = kept
            self._swap(self._model)

    @contextmanager
    def with_layout(self, kind: str) -> Iterator[None]:
        """Batches get another layout within."""
        kept, self._rule = self._rule, replace(self._rule, kind=kind)
        try:
            yield
        finally:
            self._rule = kept


_OF_A_STEP = (
    *("_part", "_loss", "_positions", "_trains", "_positions_taken", "_accumulated"),
    *("recorder", "layout_choice", "_is_aside"),
)
"""What a step leaves on a core."""


def _copy(labels: torch.Tensor | None) -> torch.Tensor | None:
    """The step may change its own, which is noticed."""
    return None if labels is None else labels.clone()
