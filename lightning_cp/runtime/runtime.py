"""ContextParallelRuntime: the context parallelism of one run, independent of Trainer and Fabric.

A strategy calls, in this order: ``meshes.build`` when processes exist, ``attach`` when the model exists, and
for every batch ``shard``, ``begin_step``, the methods of ``step``, and ``end_step``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_cp import error_display
from lightning_cp.batch import ShardedBatch, add_positions_and_targets
from lightning_cp.batch.sharder import Sharding, already_sharded, shard_batch_checked
from lightning_cp.batch.step_state import StepState
from lightning_cp.comm.reduce import all_sum
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.layout import LayoutChoice
from lightning_cp.layout.axes import Flat
from lightning_cp.logging.reduce import equal, side_by_side
from lightning_cp.loss.accumulation import AccumulatedTokens, Unreduced
from lightning_cp.loss.averages import NO_LOSS, as_logged, zero_where_uncounted
from lightning_cp.loss.review import ProbeLosses, RunLosses
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.profile.recorder import StepRecorder
from lightning_cp.randomness.token_draws import StepTokens
from lightning_cp.runtime.mesh_builder import MeshBuilder
from lightning_cp.runtime.records import RunRecords
from lightning_cp.utils.containers import tensors_of
from lightning_cp.utils.labels import are_shifted
from lightning_cp.utils.tracing import FirstCompile, profile_range
from lightning_cp.watchdog.phase import Position, ProgressHooks
from lightning_cp.watchdog.watch import RunWatch

if TYPE_CHECKING:
    from lightning_cp.models.handle import Listener
    from lightning_cp.runtime.model_binding import ModelBinding
    from lightning_cp.runtime.step_context import StepContext

_log = logging.getLogger("lightning_cp")
_COMPILES = "torch.compile begins: the first steps take longer, often by minutes"
_last_begun: list[weakref.ref[ContextParallelRuntime]] = []
"""The run of the last step in this process: attention and random functions are patched process-wide."""


class ContextParallelRuntime:
    """Components of one run, and its steps.

    Args:
        settings: the user's.
    """

    def __init__(self, settings: StrategyConfig) -> None:
        self.settings = settings
        self.watch = RunWatch(Position(), settings.step_timeout, settings.first_step_timeout)
        self.progress = ProgressHooks(self.watch.position)
        recorder = StepRecorder(settings.profiled_steps, Path(settings.profile_folder or "profile"))
        accumulated = AccumulatedTokens() if settings.weights_globally else None
        self.records = RunRecords(recorder, accumulated)
        self.listeners: list[Listener] = [recorder.note] if settings.profiled_steps else []
        """Callbacks of every attention call."""
        self.meshes = MeshBuilder(settings)
        self.losses = RunLosses()
        self._is_single = False
        self._first_compile = FirstCompile(partial(rank_zero_info, _COMPILES))

    @cached_property
    def binding(self) -> ModelBinding:
        """The model of the run, with its swapped attention and the rules for its batches."""
        from lightning_cp.runtime.model_binding import ModelBinding  # loads all kinds of models

        progress = self.watch.position.record_work
        return ModelBinding(self.settings, self.meshes, progress, self.listeners, self)

    @cached_property
    def step(self) -> StepContext:
        """The current step, or the last one."""
        return self._new_step()

    @property
    def mesh(self) -> ContextParallelMesh:
        """The process groups.

        Raises:
            ConfigError: they do not exist yet.
        """
        return self.meshes.mesh

    @property
    def enabled(self) -> bool:
        """True if ranks share a sample, targets of data ranks are counted, or scores are collected."""
        if self._is_single:
            return False
        counts = self.records.accumulated is not None
        return self.meshes.mesh.sample_size > 1 or counts or bool(self.binding.clips)

    @property
    def part(self) -> ShardedBatch | None:
        """This rank's part of the current batch, and facts of the whole."""
        return self.step.part

    @property
    def in_step(self) -> bool:
        """True if a context-parallel step is current."""
        handle = self.binding.handle
        return handle is not None and handle.state is not None

    @property
    def is_probe(self) -> bool:
        """True if the current step is not a step of the run."""
        return self.records.is_probe

    # -- the model -----------------------------------------------------------------------------------

    def attach(
        self, model: nn.Module, options: Mapping[str, Any], *, needs_labels: bool
    ) -> list[str]:
        """Bind the model of the run; see ``ModelBinding.attach``."""
        if self.settings.profiled_steps and self.mesh.cp_size == 1 and self.mesh.data_rank == 0:
            _log.warning(_NO_HOPS, self.settings.profile)
        self.losses.forget_model()
        if self.enabled:
            self._forget_steps()
        return self.binding.attach(
            model, options, needs_labels=needs_labels, is_shared=self.enabled
        )

    def attach_clips(self, optimizers: Iterable[Optimizer]) -> None:
        """Connect the QK-clips of the run's optimizers with the model's attention.

        Raises:
            ConfigError: attention whose scores its projections do not scale.
        """
        if self.binding.attach_clips(optimizers):  # no sample is shared: they alone need the swap
            self.binding.attach_again()

    def detach(self) -> None:
        """Restore the model's own attention; forget its optimizers."""
        self._forget_steps()
        if "binding" in vars(self):
            self.binding.detach()

    def _forget_steps(self) -> None:
        self.records.recorder.abandon()
        self._first_compile.end()
        vars(self).pop("step", None)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every attention call, of later models too; return its removal."""
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def follow_progress(self, model: nn.Module) -> None:
        """Watch a model, wrapped for data parallelism, for signs of progress."""
        if self.watch.is_on:
            self.progress.follow(model, attention=self.binding.handle is None)

    def end_watch(self) -> None:
        """End the watch: the run is over."""
        self.watch.stop()
        self.progress.forget()

    # -- steps ---------------------------------------------------------------------------------------

    def shard(self, batch: Any, *, needs_labels: bool, device: torch.device | None = None) -> Any:
        """Return this rank's part of a batch, and make its step the current one.

        Args:
            batch: the whole batch, the same on every rank of the cp group.
            needs_labels: the step trains.
            device: where the part is put; by default it stays where the batch is.

        Raises:
            ConfigError: a batch that cannot be read.
            ShapeError: sequences that are too short, unequal, or (padding=False) do not divide.
            BatchMismatchError: ranks of a cp group hold different batches.
            RankFailure: another rank's batch was refused.
        """
        if not self.enabled:
            self.watch.position.progress()
            self.step.whole_batch = batch
            return add_positions_and_targets(
                batch, self.binding.rules, positions=self.binding.adds_positions
            )
        try:
            self._begin_recording(needs_labels=needs_labels)
            before = self.step.part
            step = self.prepare(batch, needs_labels=needs_labels, before=before, device=device)
            self.enter(step)
        except BaseException:
            if not self.is_sharded(batch):  # with its own shard, the current step continues
                self.step = self._new_step()
            raise
        return self.step.batch

    def prepare(
        self,
        batch: Any,
        *,
        needs_labels: bool,
        before: ShardedBatch | None = None,
        device: torch.device | None = None,
    ) -> StepContext:
        """Return the step of a batch that begins later, by ``enter``; the current step stays as it is.

        Args:
            batch: the whole batch, the same on every rank of the cp group.
            needs_labels: the step trains.
            before: the last shard, which is refused as a batch.
            device: where the part is put; by default it stays where the batch is.

        Raises:
            ConfigError, ShapeError, BatchMismatchError, RankFailure: as ``shard``.
        """
        self.watch.position.progress()
        binding, records = self.binding, self.records
        if binding.handle is None:
            raise ConfigError(_NO_MODEL)
        with profile_range("shard batch"):
            sharding = shard_batch_checked(
                batch,
                binding.rules,
                binding.layout_rule,
                self.meshes.mesh,
                training=needs_labels,
                together=needs_labels or self.settings.forward_is_shared,
                before=before,
                draws=None if records.is_probe else binding.draws,
                device=device,
            )
        self._warn_if_shifted_twice(batch)
        records.batches += 1
        return self._new_step(sharding)

    def enter(self, step: StepContext) -> None:
        """Make a step the current one."""
        self.step = step
        self._note_layout(step.layout_choice)

    def _begin_recording(self, *, needs_labels: bool) -> None:
        if needs_labels and self.binding.handle is not None and self.meshes.mesh.cp_size > 1:
            self.records.recorder.begin(self.meshes.mesh)

    def _new_step(self, sharding: Sharding | None = None) -> StepContext:
        """Make the step of a batch, or a plain one for code outside of steps."""
        from lightning_cp.runtime.step_context import StepContext

        losses = ProbeLosses(self.losses) if self.records.is_probe else self.losses
        return StepContext(self.meshes, self.binding, losses, self.records, sharding)

    def begin_step(self) -> None:
        """Begin the step of the current batch: attention is intercepted from here on.

        Raises:
            ConfigError: there is no batch.
        """
        self.end_other_steps()
        _last_begun[:] = [weakref.ref(self)]
        if not self.records.is_probe:
            self._first_compile.begin()
        if not self.enabled:
            self.binding.patches.begin()
            return
        self._intercept(self.step.make_state())

    def end_step(self) -> None:
        """End the step: the model is the plain model again."""
        self._first_compile.end()
        binding: ModelBinding | None = vars(self).get("binding")
        if binding is not None:  # a model was bound, maybe
            for line in [] if self.records.is_probe else binding.patches.pop_reports():
                rank_zero_info(line)
            binding.patches.end()
            if binding.draws is not None:
                binding.draws.end()
            if binding.handle is not None:
                binding.handle.deactivate()
        if "step" in vars(self):
            self.step.end()

    @contextmanager
    def between_steps(self) -> Generator[None]:
        """A block outside of the current step, which continues after it."""
        handle, state = self.binding.handle, self.step.state
        assert handle is not None
        handle.deactivate()
        try:
            yield
        finally:
            if state is not None:
                self._intercept(state)
                state.ended = False

    def _intercept(self, state: StepState) -> None:
        handle, part, mesh = self.binding.handle, self.step.part, self.meshes.mesh
        assert handle is not None
        assert part is not None
        handle.activate(state)
        if self.binding.draws is not None:
            data = (mesh.data_rank, mesh.data_size)
            tokens = StepTokens.of(part.layout, mesh.cp_rank, part.rows, data)
            self.binding.draws.begin(tokens)
        self.binding.patches.begin()

    def end_other_steps(self) -> None:
        """End a step that another strategy of this process left open."""
        for begun in list(_last_begun):
            run = begun()
            if run is not None and run is not self:
                run.end_step()

    def before_data(self) -> None:
        """Send the results of checks, before ranks exchange data; also called within a model's forward."""
        self.step.before_data()

    def check_step(self) -> None:
        """Check the current step; warn once if it did not read positions.

        Raises:
            ConfigError: attention stayed local, or it is unknown who shifted the labels.
        """
        step = self.step
        if not self.enabled or self.binding.model is None or step.is_unused:
            return
        step.check()
        if step.positions_ignored:
            self.records.positions_taken = True
            if self.mesh.sample_rank == 0 and self.mesh.data_rank == 0:
                _log.warning(_NO_POSITIONS)

    def is_sharded(self, batch: Any) -> bool:
        """Return True if ``batch`` is the shard that was made last."""
        return bool(already_sharded(dict(tensors_of(batch)), self.step.part))

    @contextmanager
    def use_records(self, records: RunRecords) -> Generator[None]:
        """A block whose steps use other records."""
        own, self.records = (self.step, self.records), records
        self.step = self._new_step()
        try:
            yield
        finally:
            self.step, self.records = own

    @contextmanager
    def as_one_process(self) -> Generator[None]:
        """A block without sharing: a step has the values of one process."""
        own, self.step = self.step, self._new_step()
        self._is_single = True
        try:
            yield
        finally:
            self._is_single = False
            self.step = own

    def _note_layout(self, choice: LayoutChoice | None) -> None:
        first = self.records.layout_choice is None and choice is not None
        if first and not self.records.is_probe:
            rank_zero_info(f"context parallel {choice} (of the first batch; each gets its own)")
        self.records.layout_choice = choice

    def _warn_if_shifted_twice(self, batch: Any) -> None:
        """Warn if the labels of the first batches are shifted already; on the first rank."""
        rules, records = self.binding.rules, self.records
        if records.is_probe or not records.label_checks_left or rules.labels != "shift":
            return
        if self.mesh.sample_rank or self.mesh.data_rank:
            return
        tensors = dict(tensors_of(batch))
        labels, ids = tensors.get(rules.label_key), tensors.get("input_ids")
        shifted = None if labels is None or ids is None else are_shifted(labels, ids)
        records.label_checks_left -= 1 if shifted is None else records.label_checks_left
        if shifted:
            error_display.warn(_SHIFTED_TWICE)

    # -- windows of several batches ----------------------------------------------------------------------

    def follow_unreduced(self, unreduced: Callable[[], Unreduced]) -> None:
        """Let accumulation windows include gradients that an engine holds elsewhere than in ``grad``."""
        if self.records.accumulated is not None:
            self.records.accumulated.unreduced = unreduced

    def end_window(self, optimizer: Optimizer, batches: int | None = None) -> None:
        """Weight all targets of a complete window equally, with ``token_weighting="global"``."""
        if self.records.accumulated is not None:
            self.records.accumulated.end(optimizer, batches)

    def token_mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return (sum of totals) / (sum of counts) over the ranks that share a sample."""
        self.step.before_data()
        sums = torch.stack([zero_where_uncounted(total.double(), count), count.double()])
        if self.enabled:
            sums = all_sum(sums.to(self.mesh.device_type), self.mesh.group(Flat.CP))
        return as_logged(sums[0] / sums[1])

    def closure_value(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """Return a closure's loss as one process has it, the same on all ranks.

        With different values, an optimizer that searches along its loss would take different steps on each
        rank, and ranks would wait for each other.

        Args:
            closure: function that returns this rank's value.
            optimizer: the caller.

        Raises:
            ConfigError: the optimizer searches along the value, and its targets are unknown: it is of several
                batches, or not a loss of the step.
        """
        begun = self.records.batches
        value = closure()
        one_batch = self.records.batches - begun <= 1
        is_number, loss = isinstance(value, Real), self.step.loss
        own = torch.tensor(float(value), dtype=torch.float64) if is_number else value
        if not isinstance(own, torch.Tensor) or own.numel() != 1 or loss is None:
            return value
        mean, is_known = self.step.weighted_mean(own) if one_batch else self._equal_sum(own)
        if not is_known:
            if isinstance(optimizer, LBFGS):
                several = _SEVERAL_BATCHES.format(type(optimizer).__name__)
                raise ConfigError(NO_LOSS if one_batch else several)
            return value
        if self.mesh.data_size > 1:
            every = side_by_side([mean * loss.data_weight], self.mesh, Flat.LOSS)[0]
            mean = (every.sum(0) / every.shape[0]).to(mean)
        return mean.item() if is_number else mean

    def _equal_sum(self, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return a value of several batches, and True if all ranks that share them have the same value."""
        self.step.before_data()
        (rows,) = side_by_side([value], self.mesh)
        weighs_alike = self.records.accumulated is None or self.mesh.data_size == 1
        return value, weighs_alike and bool(equal(rows).all())


_NO_HOPS = "profile=%s records nothing: no sample is shared between ranks, so there are no hops."

_NO_MODEL = (
    "a batch was sharded before there is a model. Call fabric.setup(model, ...) first: the model tells how "
    "labels are read and has its attention swapped."
)

_NO_POSITIONS = (
    "the step took no positions from the batch, so a model that counts its tokens from 0 would give every "
    "rank's part of the sequence the same positions, which is silently wrong. Take them from "
    "batch['position_ids'], or from ContextParallelMixin.token_positions, which also works for batches that "
    "are not dicts; a model without positions is fine."
)

_SHIFTED_TWICE = (
    "the labels of the batch are shifted already (labels[i] is input_ids[i + 1] nearly everywhere), and are "
    "shifted again for the loss: a token is trained on the one after the next. Leave the dataset's labels "
    "unshifted (labels[i] belongs to input_ids[i]); or call the model without labels, compute the loss in "
    "the step, and declare labels='aligned'."
)

_SEVERAL_BATCHES = (
    "The closure of {} goes over several batches, and ranks that share a sample return other sums of their "
    "losses, so that it is not known what it should search along. Return the sum of self.average(loss), or "
    "of fabric.strategy.average(loss), of each batch; with token_weighting='global' take one batch a step."
)
