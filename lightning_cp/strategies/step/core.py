"""What the Trainer's strategy and Fabric's share: mesh, sharding, loss scale, averages.

Nothing here knows of a Trainer. A strategy calls, in this order: ``build_mesh`` once processes exist,
``attach`` once the model does, then for every batch ``shard``, ``begin_step``, in training ``require_loss``,
``scale_loss`` and ``after_backward``, then ``end_step``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_cp.attention.delegate import THEIR_KERNELS
from lightning_cp.batch import BatchRules, with_positions
from lightning_cp.errors import ConfigError
from lightning_cp.faults.position import Position
from lightning_cp.kernels.api import Request, explain_kernels
from lightning_cp.layout import CostModel, LayoutChoice
from lightning_cp.layout.cost import Heads
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.expected import expected_heads, expected_mask
from lightning_cp.models.facts import PositionFacts
from lightning_cp.models.hf_labels import require_taken
from lightning_cp.models.hf_positions import take_positions
from lightning_cp.models.patches import StepPatches
from lightning_cp.models.swap import Listener, StepState, SwapHandle, hf_models, swap_attention
from lightning_cp.named_ranges import named
from lightning_cp.profile.recorder import StepRecorder
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.step.layouts import LayoutRule
from lightning_cp.strategies.step.losses import StepLosses
from lightning_cp.strategies.step.patches import patches_of
from lightning_cp.strategies.step.sharding import label_kind, shard_agreed, shared_with
from lightning_cp.strategies.step.weighting import StepLoss
from lightning_cp.strategies.watch.progress import Progress
from lightning_cp.strategies.watch.run import RunWatch

_log = logging.getLogger("lightning_cp")


class ContextParallelCore(StepLosses):
    """One run's context parallelism, independent of who drives it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rules = BatchRules()
        self._requests: dict[Request, None] = {}
        self._model: nn.Module | None = None
        self._listed: Sequence[nn.Module] | None = None
        self._patches = StepPatches()
        self._is_aside = False
        self._loss_outside = False
        self._needs_loss = self._trains = True
        self._positions = PositionFacts()
        self._gives_positions = False  # where no rank shares a batch
        self._rule = LayoutRule(settings.layout)
        self.recorder = StepRecorder(
            settings.profiled_steps, Path(settings.profile_folder or "profile")
        )
        self._listeners: list[Listener] = [self.recorder.note] if settings.profiled_steps else []
        self.watch = RunWatch(Position(), settings.step_timeout, settings.first_step_timeout)
        self.progress = Progress(self.watch.position)
        self.layout_choice: LayoutChoice | None = None
        """Why the current batch has its layout, with ``layout="auto"``."""

    def attach(
        self, model: nn.Module, options: Mapping[str, Any], *, needs_labels: bool
    ) -> list[str]:
        """Swap the model's attention and fix how batches are read; says what was swapped.

        Args:
            model: the user's module.
            options: what the mixin declares: ``sequence_dims``, ``label_key``, ``labels``, ``modules``.
            needs_labels: the run weights a loss by labels.

        Raises:
            ConfigError: attention that cannot be swapped, or labels of unknown kind.
        """
        self._say_if_nothing_is_profiled()
        settings = self.settings.with_sequence_dims(options.get("sequence_dims") or {})
        self._patches.end()
        self._patches = patches_of(model, settings)
        if not self.enabled:
            self.rules = BatchRules(sequence_dims=settings.sequence_dims)
            self._gives_positions = take_positions(hf_models(model))
            return []
        self.detach()
        declared = options.get("labels") or settings.labels
        self.rules = BatchRules(
            sequence_dims=settings.sequence_dims,
            label_key=options.get("label_key") or settings.label_key,
            labels=label_kind(model, declared, required=needs_labels),
            padding=settings.padding,
            reads_masks=bool(hf_models(model)),
        )
        self._rule = LayoutRule(settings.layout, expected_mask(model), self._cost_for(model))
        self._loss_outside = declared != "auto"
        self._needs_loss = needs_labels
        self._model = model
        self._listed = options.get("modules")
        handle = self._swap(model)
        return [str(line) for line in handle.report]

    def _swap(self, model: nn.Module) -> SwapHandle:
        settings = self.settings
        exchange = settings.attention_exchange
        handle = swap_attention(model, self.mesh, settings.kernel, self._listed, exchange=exchange)
        handle.progress = self.watch.position.progress
        handle.listeners = self._listeners
        self._handle, self._requests = handle, handle.requests
        return handle

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell of every attention call, of models that come later too; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def follow_progress(self, model: nn.Module) -> None:
        """A model, wrapped for data parallelism, in which signs of progress are to be seen."""
        if self.watch.is_on:
            self.progress.follow(model, attention=self._handle is None)

    def end_watch(self) -> None:
        """The run is over."""
        self.watch.stop()
        self.progress.forget()

    def _say_if_nothing_is_profiled(self) -> None:
        if self.settings.profiled_steps and self.mesh.cp_size == 1 and self.mesh.data_rank == 0:
            _log.warning(
                "profile=%s records nothing: no sample is shared between ranks, so there are no hops.",
                self.settings.profile,
            )

    def _cost_for(self, model: nn.Module) -> CostModel:
        """How dear communication is for the heads that a ring rank has."""
        heads, size = expected_heads(model), self.mesh.ulysses_size
        sharing = self.mesh.tp_size
        if heads is not None and not heads.query % sharing and not heads.kv % sharing:
            heads = Heads(heads.query // sharing, heads.kv // sharing, heads.dim)
        if heads is None or heads.query % heads.kv or heads.query % size:
            return self.cost  # other attention than that one is shared, then
        return self.cost.with_heads(heads.of_ulysses_rank(size))

    def explain(self) -> str:
        """Which kernel each kind of attention call got so far, and why each other one did not."""
        kernel = self.settings.kernel
        if self.settings.exchange == "ring_flash_attn":
            return THEIR_KERNELS
        lines = [explain_kernels(kernel, request) for request in self._requests]
        return "\n".join(lines) or "no attention call came through context parallelism yet"

    def require_label_kind(self) -> None:
        """Refuse to train where nothing says how labels are read.

        Raises:
            ConfigError: saying what to declare.
        """
        if self.enabled and self._model is not None and self.rules.labels == "ignore":
            label_kind(self._model, self.settings.labels, required=True)

    @property
    def model(self) -> nn.Module | None:
        """Whose attention is swapped."""
        return self._model

    def detach(self) -> None:
        """Give the model its own attention back."""
        self.recorder.abandon()
        self._patches.end()
        if self._handle is not None:
            self._handle.undo()
        self._handle = self._part = self._loss = None

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
            return with_positions(batch, self.rules) if self._gives_positions else batch
        before, self._part, self._loss = self._part, None, None
        if self._handle is None:
            raise ConfigError(
                "a batch was sharded before there is a model. Call fabric.setup(model, ...) first: the "
                "model tells how labels are read and has its attention swapped."
            )
        if needs_labels and self.mesh.cp_size > 1:
            self.recorder.begin(self.mesh)
        with named("shard batch"):
            sharding = shard_agreed(
                batch,
                self.rules,
                self._rule,
                self.mesh,
                training=needs_labels,
                together=needs_labels or self.settings.forward_is_shared,
                before=before,
            )
        self._say_once(sharding.choice)
        self._part, self._loss = sharding.part, StepLoss(sharding, self.mesh, self._accumulated)
        self._positions, self._trains = sharding.positions, needs_labels
        return self._part.batch

    def _say_once(self, choice: LayoutChoice | None) -> None:
        if self.layout_choice is None and choice is not None and not self._is_aside:
            rank_zero_info(f"context parallel {choice} (of the first batch; each gets its own)")
        self.layout_choice = choice

    def was_sharded(self, batch: Any) -> bool:
        """Whether ``batch`` is a shard that this core made last; to shard it again will be refused."""
        return bool(shared_with(batch, self._part))

    def begin_step(self) -> None:
        """Intercept attention from here on."""
        if not self.enabled:
            self._patches.begin()
            return
        if self._handle is None or self._part is None:
            raise ConfigError(
                "a context-parallel step began without a sharded batch. Let the strategy move the "
                "batch (do not override transfer with a step that takes dataloader_iter)."
            )
        part = self._part
        self._handle.activate(
            StepState(
                layout=part.layout,
                position_ids=part.position_ids,
                aligned_labels=_copy(part.aligned_labels),
                labels=_copy(part.labels),
                valid_local=part.valid[self.mesh.cp_rank],
                loss_outside=self._loss_outside,
                positions=self._positions,
                labels_read=self.rules.labels,
                needs_loss=self._needs_loss or self._trains,
            )
        )
        self._patches.begin()

    def check_step(self) -> None:
        """Refuse a step in which attention stayed local, or labels were shifted by nobody knows whom; say
        once if it did not ask for positions."""
        if not self.enabled or self._handle is None or self._model is None:
            return
        self.require_intercepted()
        if self._handle.state is not None:
            require_taken(self._handle.state)
        if self.positions_ignored:
            self._positions_taken = True
            if self.mesh.sample_rank == 0 and self.mesh.data_rank == 0:
                _log.warning(_NO_POSITIONS)

    def require_intercepted(self) -> None:
        """Refuse a step in which attention stayed local."""
        if self._handle is not None and self._model is not None:
            self._handle.require_intercepted(self._model)

    @property
    def positions_ignored(self) -> bool:
        """Nothing has asked for the positions of the step's tokens, as far as can be seen."""
        if self._handle is None or self._part is None:
            return False
        asked = self._positions_taken or self._handle.tells_positions
        return not asked and self._part.positions_ignored

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

    def end_step(self) -> None:
        """The model is the plain model again."""
        for line in [] if self._is_aside else self._patches.told():
            rank_zero_info(line)
        self._patches.end()
        if self._handle is not None:
            self._handle.deactivate()


_OF_A_STEP = (
    *("_part", "_loss", "_positions", "_trains", "_positions_taken", "_accumulated"),
    *("recorder", "layout_choice", "_is_aside"),
)
"""What a step leaves on a core."""

_NO_POSITIONS = (
    "the step took no positions from the batch, so a model that counts its tokens from 0 would give every "
    "rank's part of the sequence the same positions, which is silently wrong. Take them from "
    "batch['position_ids'], or from ContextParallelMixin.token_positions, which works for batches that are "
    "no dict too; a model without positions is fine."
)


def _copy(labels: torch.Tensor | None) -> torch.Tensor | None:
    """The step may change its own, which is noticed."""
    return None if labels is None else labels.clone()
