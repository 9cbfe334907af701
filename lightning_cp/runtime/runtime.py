"""Common parts of the Trainer's strategy and Fabric's: mesh, sharding, loss scale, averages.

Nothing here knows of a Trainer. A strategy calls, in this order: ``build_mesh`` once processes exist,
``attach`` once the model does, then for every batch ``shard``, ``begin_step``, in training ``require_loss``,
``scale_loss`` and ``after_backward``, then ``end_step``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_cp import error_display as console
from lightning_cp.batch import ShardedBatch, completed
from lightning_cp.batch.sharder import already_sharded, shard_batch_checked
from lightning_cp.batch.step_state import StepState
from lightning_cp.errors import ConfigError
from lightning_cp.layout import LayoutChoice
from lightning_cp.loss.weighting import StepLoss
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf.labels import check_labels_used
from lightning_cp.randomness.token_draws import StepTokens
from lightning_cp.runtime.probe import StepsAside
from lightning_cp.utils.containers import tensors_of
from lightning_cp.utils.labels import are_shifted
from lightning_cp.utils.tracing import profile_range

_log = logging.getLogger("lightning_cp")
_begun: list[weakref.ref[ContextParallelCore]] = []
"""Whose step began last, in this process: attention and random functions are replaced in all of it."""


class ContextParallelCore(StepsAside):
    """One run's context parallelism, independent of who drives it."""

    def shard(self, batch: Any, *, needs_labels: bool) -> Any:
        """This rank's part of a batch that every rank of its cp group holds whole.

        Raises:
            ConfigError: a batch that cannot be read.
            ShapeError: sequences that are too short, unequal, or (padding=False) do not divide.
            BatchMismatchError: ranks of a cp group hold different batches.
            RankFailure: another rank's batch was refused.
        """
        self.watch.position.progress()
        if not self.enabled:
            return completed(batch, self.rules, positions=self._gives_positions)
        before, self._part, self._loss = self._part, None, None
        if self._handle is None:
            raise ConfigError(
                "a batch was sharded before there is a model. Call fabric.setup(model, ...) first: the "
                "model tells how labels are read and has its attention swapped."
            )
        if needs_labels and self.mesh.cp_size > 1:
            self.recorder.begin(self.mesh)
        with profile_range("shard batch"):
            sharding = shard_batch_checked(
                batch,
                self.rules,
                self._rule,
                self.mesh,
                training=needs_labels,
                together=needs_labels or self.settings.forward_is_shared,
                before=before,
                draws=None if self._is_aside else self._draws,
            )
        self._say_once(sharding.choice)
        self._warn_if_shifted_twice(batch)
        self._part, self._loss = sharding.part, StepLoss(sharding, self.mesh, self._accumulated)
        self.batches += not self._is_aside
        self._positions, self._trains = sharding.positions, needs_labels
        return self._part.batch

    def _say_once(self, choice: LayoutChoice | None) -> None:
        if self.layout_choice is None and choice is not None and not self._is_aside:
            rank_zero_info(f"context parallel {choice} (of the first batch; each gets its own)")
        self.layout_choice = choice

    def _warn_if_shifted_twice(self, batch: Any) -> None:
        """Look at the labels of the first batches, on the first rank."""
        first = self.mesh.sample_rank == 0 and self.mesh.data_rank == 0
        if self._is_aside or not first or not self._looks_at_labels or self.rules.labels != "shift":
            return
        tensors = dict(tensors_of(batch))
        labels, ids = tensors.get(self.rules.label_key), tensors.get("input_ids")
        shifted = None if labels is None or ids is None else are_shifted(labels, ids)
        self._looks_at_labels -= 1 if shifted is None else self._looks_at_labels
        if shifted:
            console.warn(_SHIFTED_TWICE)

    def was_sharded(self, batch: Any) -> bool:
        """True if ``batch`` is a shard that this core made last; to shard it again will be refused."""
        return bool(already_sharded(batch, self._part))

    def begin_step(self) -> None:
        """Intercept attention from here on."""
        self.end_other_steps()
        _begun[:] = [weakref.ref(self)]
        if not self._is_aside:
            self._first_compile.begin()
        if not self.enabled:
            self._patches.begin()
            return
        if self._handle is None or self._part is None:
            raise ConfigError(
                "a context-parallel step began without a sharded batch. Let the strategy move the "
                "batch (do not override transfer with a step that takes dataloader_iter)."
            )
        state = self._state_of(self._part, self._positions, self.mesh.cp_rank)
        self._looks_at_values -= bool(self._trains and self._looks_at_values and not self._is_aside)
        self._intercept(self._handle, state, self._part)

    def _intercept(self, handle: SwapHandle, state: StepState, part: ShardedBatch) -> None:
        handle.activate(state)
        if self._draws is not None:
            mesh = self.mesh
            data = (mesh.data_rank, mesh.data_size)
            self._draws.begin(StepTokens.of(part.layout, mesh.cp_rank, part.rows, data))
        self._patches.begin()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Within, the current step has ended; afterwards it lasts on."""
        assert self._handle is not None
        state, part = self._handle.state, self._part
        self._handle.deactivate()
        try:
            yield
        finally:
            if state is not None and part is not None:
                self._intercept(self._handle, state, part)
                state.ended = False

    def end_other_steps(self) -> None:
        """What begins ends a step that another strategy of this process has left open."""
        for core in [begun() for begun in _begun]:
            if core is not None and core is not self:
                core.end_step()

    def check_step(self) -> None:
        """Refuse a step in which attention stayed local, or labels were shifted by nobody knows whom; say
        once if it did not ask for positions. A step that did not call the model has nothing to check."""
        if not self.enabled or self._handle is None or self._model is None or self.is_unused:
            return
        self.require_intercepted()
        if self._handle.state is not None:
            check_labels_used(self._handle.state)
        if self.positions_ignored:
            self._positions_taken = True
            if self.mesh.sample_rank == 0 and self.mesh.data_rank == 0:
                _log.warning(_NO_POSITIONS)

    def require_intercepted(self) -> None:
        """Refuse a step in which attention stayed local."""
        if self._handle is not None and self._model is not None:
            self._handle.check_intercepted(self._model)

    @property
    def is_unused(self) -> bool:
        """True if a step is under way that has called nothing of the model, and intercepted nothing."""
        state = self._handle.state if self._handle is not None else None
        return state is not None and not state.calls and not state.model_called

    @property
    def is_left(self) -> bool:
        """True if a step is under way that is unused, and the loop that gave its batch is over."""
        state = self._handle.state if self._handle is not None else None
        return self.is_unused and state is not None and state.left

    @property
    def step_calls(self) -> int:
        """Attention calls that were intercepted in the current step."""
        state = self._handle.state if self._handle is not None else None
        return 0 if state is None else state.calls

    @property
    def is_pending(self) -> bool:
        """True if a step of training is under way that no backward has come to."""
        state = self._handle.state if self._handle is not None else None
        return state is not None and state.trains and not state.weighted

    @property
    def positions_ignored(self) -> bool:
        """Nothing has asked for the positions of the step's tokens, as far as can be seen."""
        if self._handle is None or self._part is None:
            return False
        asked = self._positions_taken or self._handle.provides_position_ids
        return not asked and self._part.positions_ignored

    def close_step(self) -> None:
        """End the step, if one is under way, once it was checked.

        Raises:
            ConfigError: the models were called in the step, and no attention call was intercepted.
        """
        try:
            if self.in_step:
                self.check_step()
        finally:
            self.end_step()

    def leave_step(self) -> None:
        """End the step; one that is unused waits for a call with its batch, if that comes, and models are
        plain until then."""
        if self.is_unused and self._handle is not None:
            self._handle.leave()
        else:
            self.end_step()

    def end_step(self) -> None:
        """The model is the plain model again."""
        for line in [] if self._is_aside else self._patches.told():
            rank_zero_info(line)
        self._patches.end()
        self._first_compile.end()
        if self._draws is not None:
            self._draws.end()
        if self._handle is not None:
            self._handle.deactivate()


_NO_POSITIONS = (
    "the step took no positions from the batch, so a model that counts its tokens from 0 would give every "
    "rank's part of the sequence the same positions, which is silently wrong. Take them from "
    "batch['position_ids'], or from ContextParallelMixin.token_positions, which works for batches that are "
    "no dict too; a model without positions is fine."
)

_SHIFTED_TWICE = (
    "the labels of the batch are shifted already (labels[i] is input_ids[i + 1] nearly everywhere), and are "
    "shifted again for the loss: a token is trained on the one after the next. Leave the dataset's labels "
    "unshifted (labels[i] belongs to input_ids[i]); or call the model without labels, compute the loss in "
    "the step, and declare labels='aligned'."
)


# Values that Lightning is asked to reduce over ranks, which it would get wrong.


def in_floating_point(x: Any, reduce_op: Any) -> Any:
    """Integers whose mean over ranks is asked for, in float64: Lightning would cut the mean off.

    Its epoch means divide by the mean of the batch sizes that ranks have seen.
    """
    mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    integer = isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex())
    return x.to(torch.float64) if mean and integer else x
