"""Steps that are none of the run's: what looks at a model in between leaves the run as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from lightning_cp.batch import ShardedBatch, read_batch
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import LayoutChoice, SequenceLayout
from lightning_cp.loss_calls import LossCalls
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.facts import PositionFacts
from lightning_cp.models.swap import StepState
from lightning_cp.models.token_draws import Tokens
from lightning_cp.profile.recorder import StepRecorder
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.step.attached import AttachedModel
from lightning_cp.strategies.step.one_rank import whole_on, with_unknown_documents


class StepsAside(AttachedModel):
    """The traces of a step, and blocks within which it leaves none."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._trains = True
        self._looks_at_values = 8  # batches of training; of evaluation at all of them
        self._positions = PositionFacts()
        self.layout_choice: LayoutChoice | None = None
        """Why the current batch has its layout, with ``layout="auto"``."""

    def _state_of(self, part: ShardedBatch, positions: PositionFacts, cp_rank: int) -> StepState:
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
                self._draws.take_asked()

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
                self._draws.begin(Tokens.of(layout, 0, whole.rows, data))
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
