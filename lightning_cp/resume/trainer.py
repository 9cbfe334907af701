"""Exact resume under the Trainer: entries added to its checkpoints, and resuming from them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import RestartStage as EvaluationStage
from lightning.pytorch.loops.fit_loop import RestartStage as FitStage
from lightning.pytorch.loops.training_epoch_loop import RestartStage as EpochStage
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_cp.loaders.position import position_before_pass
from lightning_cp.loaders.rng import RandomStates
from lightning_cp.loaders.shared_loader import SharedLoader
from lightning_cp.resume.record import (
    BufferCopies,
    CallbackStates,
    Record,
    ResumePoint,
    orders_of,
    point_of,
    record_of,
    set_orders,
)
from lightning_cp.runtime.mesh_builder import MeshBuilder

# Positions in Lightning's loops: read at a save, and restored exactly.
#
# Lightning restarts by comparing counters, which distinguish several positions only by the hook that saves:
# after a save at the end of a batch it skips the validation that was due, after one at the end of an epoch
# with ``max_steps`` it trains on one batch too many, and inside an accumulation window it steps without the
# earlier batches. So the position is saved, and counters and restart stages are set to one of two cases
# that Lightning handles right: after some batch of an epoch, or before an epoch. All names here are private
# to Lightning; this is the only file that uses them.


BATCH_END = "batch end"
"""After a batch, before what follows it: validation, the end of the epoch."""
VALIDATED = "validated"
"""After the validation that followed a batch."""
BETWEEN = "between"
"""After a batch and all that follows it, before the next batch."""
EPOCH = "epoch"
"""Before an epoch begins."""

_EPOCH = "epoch_progress"
_BATCH = "epoch_loop.batch_progress"
_AUTOMATIC = "epoch_loop.automatic_optimization.optim_progress"
_MANUAL = "epoch_loop.manual_optimization.optim_step_progress"


def place_now(trainer: Trainer) -> dict[str, Any]:
    """Return the position of the run, from its counters and the hook that saves.

    Returns:
        ``kind``: one of the constants above; ``over``: the pass through the loaders has ended; ``inside``: a
        batch is being computed.
    """
    loop = trainer.fit_loop.epoch_loop
    epochs, batches = _counted(trainer.fit_loop.epoch_progress), _counted(loop.batch_progress)
    over = loop._num_ready_batches_reached()
    ended = epochs.processed == epochs.started
    if epochs.started < epochs.ready or (ended and (over or not loop.batch_progress.current.ready)):
        # The Trainer opens new iterators then, except before the first epoch.
        return {"kind": EPOCH, "over": epochs.processed > 0, "inside": False}
    kind = BETWEEN  # also if the epoch ended within a pass because the run did
    if not ended and (batches.completed < batches.processed or trainer.validating):
        kind = BATCH_END if _hook(trainer) != "on_validation_end" else VALIDATED
    return {"kind": kind, "over": over, "inside": batches.ready > batches.processed}


def _counted(progress: Any) -> Any:
    """Return a total over all epochs; all of Lightning's counters of epochs and batches have one."""
    return progress.total


def validation_interrupted(trainer: Trainer) -> bool:
    """True if the run is inside a validation, which will be repeated from its beginning."""
    return trainer.validating and _hook(trainer) != "on_validation_end"


def _hook(trainer: Trainer) -> str | None:
    module = trainer.lightning_module
    return None if module is None else module._current_fx_name


def counts(trainer: Trainer) -> dict[str, Any]:
    """Return state that changes within an accumulation window, as it was before the batch began."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    return {
        "epochs": trainer.fit_loop.epoch_progress.state_dict(),
        "current": progress.current.ready,
        "total": progress.total.ready,
        "is_last_batch": False,
        # A hook within a step is called after the step was counted as begun.
        _AUTOMATIC: loop.automatic_optimization.optim_progress.state_dict(),
        _MANUAL: loop.manual_optimization.optim_step_progress.state_dict(),
        "stepped": loop._batches_that_stepped,
    }


def rewind_counters(loops: dict[str, Any], to: dict[str, Any]) -> dict[str, Any]:
    """Return the loops' state with the counters of the beginning of the window."""
    loops = deepcopy(loops)
    fit = loops["fit_loop"]
    fit[_EPOCH] = deepcopy(to["epochs"])
    fit[_AUTOMATIC], fit[_MANUAL] = deepcopy(to[_AUTOMATIC]), deepcopy(to[_MANUAL])
    for name in ("current", "total"):
        fit[_BATCH][name] = dict.fromkeys(fit[_BATCH][name], to[name])
    fit[_BATCH]["is_last_batch"] = to["is_last_batch"]
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = to["stepped"]
    return loops


def drop_empty_loader_states(loops: dict[str, Any]) -> None:
    """Remove empty states of loaders, which Lightning alone (without this package) would refuse to
    resume from."""
    states = loops["fit_loop"]["state_dict"]
    if not any(states.get("combined_loader", ())):
        states.pop("combined_loader", None)


def prepare(loops: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Return the loops' state to load: the counters of one of the two cases that Lightning handles
    right."""
    loops = deepcopy(loops)
    fit = loops["fit_loop"]
    fit["state_dict"].pop("combined_loader", None)  # saved on the first rank only
    for name in ("total", "current"):
        epochs, batches = fit[_EPOCH][name], fit[_BATCH][name]
        if place["kind"] == EPOCH:
            fit[_EPOCH][name] = dict.fromkeys(epochs, epochs["processed"])
        else:
            done = epochs["processed"] - (epochs["processed"] == epochs["started"])
            fit[_EPOCH][name] = {**epochs, "processed": done, "completed": done}
        fit[_BATCH][name] = dict.fromkeys(batches, batches["processed"])
    return loops


def resume_loops(trainer: Trainer, place: dict[str, Any]) -> None:
    """Have the loops resume from the position, after all hooks of the beginning were called."""
    fit = trainer.fit_loop
    loop = fit.epoch_loop
    fit._restarting = loop.val_loop._restarting = False
    loop.val_loop._restart_stage = EvaluationStage.NONE
    if place["kind"] == EPOCH:
        loop.restarting = False  # also its nested counters
        fit._restart_stage, loop._restart_stage = FitStage.NONE, EpochStage.NONE
        fit._resuming_from_checkpoint = (
            False  # the loaders begin with the epoch, after its first hooks
        )
        return
    fit._restart_stage = FitStage.RESTARTED_MID_EPOCH
    loop._restarting = True
    assert fit._data_fetcher is not None
    due = loop._should_check_val_fx(fit._data_fetcher)
    # RESTARTED_ON_LAST makes the loop skip a validation that is due, and do what comes after it.
    loop._restart_stage = EpochStage.RESTARTED_ON_LAST
    if place["kind"] == BETWEEN and due:
        loop._batches_that_stepped -= 1  # was counted before, and will be once more
    elif place["kind"] == BATCH_END and due:
        loop.val_loop._restart_stage = EvaluationStage.RESTARTED_MID_EVALUATION  # the whole pass
    elif place["kind"] != BETWEEN and not due:
        loop._restart_stage = EpochStage.NONE  # counts the batch


def ahead(trainer: Trainer) -> int:
    """Return the number of batches that Lightning read ahead: one with a loader without a length."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def training_loaders(trainer: Trainer) -> list[Any]:
    """Return every loader of the training set."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def accumulates(trainer: Trainer) -> bool:
    """True if the last batch left gradients for the next one."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def begins_window(trainer: Trainer) -> bool:
    """True if the next batch is the first one of an accumulation window."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    return current.ready % trainer.accumulate_grad_batches == 0


KEY = "lightning_cp_resume"
"""Key of the resume state in a checkpoint."""


@dataclass
class _Window:
    """The state at the beginning of an accumulation window."""

    point: ResumePoint
    counts: dict[str, Any]


class TrainerResume:
    """Exact resume of one strategy; state stays on this rank until a checkpoint is saved."""

    def __init__(self) -> None:
        self._window: _Window | None = None
        self._stepped = True
        self._before_validation: RandomStates | None = None
        self._buffers, self._callbacks = BufferCopies(), CallbackStates()
        self._loaded: Record | None = None
        self._point: ResumePoint | None = None
        self._to_place: list[dict[str, Any]] = []

    # -- while training --------------------------------------------------------------------------

    def start_batch(self, trainer: Trainer, device: torch.device) -> None:
        """Record a batch that was read; no hook has seen it yet, and hooks may draw random numbers and
        count."""
        automatic = trainer.lightning_module.automatic_optimization
        if not (begins_window(trainer) if automatic else self._stepped):
            return
        self._stepped = False
        waiting = 1 + ahead(trainer)
        # Also for windows of one batch: a hook may save between its beginning and its step.
        self._buffers.save([trainer.lightning_module])
        self._callbacks.save(trainer)
        self._window = _Window(
            ResumePoint.now(device, _positions(trainer, waiting)),
            counts(trainer),
        )

    def steps(self) -> None:
        """Record an optimizer step."""
        self._stepped = True

    def start_validation(self, trainer: Trainer) -> None:
        """Record that validation is about to open its loaders."""
        if trainer.validating and self._before_validation is None:
            self._before_validation = RandomStates.now()

    def end_validation(self) -> None:
        """Record the end of validation: later saves come after it."""
        self._before_validation = None

    # -- saving ----------------------------------------------------------------------------------

    def add_to_checkpoint(
        self,
        checkpoint: dict[str, Any],
        trainer: Trainer,
        run: MeshBuilder,
        device: torch.device,
    ) -> None:
        """Add the resume state to a checkpoint. Collective.

        Inside an accumulation window, the checkpoint becomes that of the window's beginning: gradients are
        not saved, and the weights have not changed since.
        """
        if trainer.state.fn != TrainerFn.FITTING or "optimizer_states" not in checkpoint:
            return
        place = place_now(trainer)
        window = self._window if self._in_window(trainer, place) else None
        if window is None:
            record = record_of(lambda: self._point_at(trainer, device, place["kind"]), run.mesh)
        else:
            record = record_of(lambda: window.point, run.mesh)
            place = {"kind": BETWEEN, "over": False}
            self._go_back(checkpoint, window)
        record["buckets"] = orders_of([trainer.model])
        record["place"] = {"kind": place["kind"], "over": place["over"]}
        checkpoint[KEY] = record
        drop_empty_loader_states(checkpoint["loops"])

    def _point_at(self, trainer: Trainer, device: torch.device, kind: str) -> ResumePoint:
        places = _positions(trainer, ahead(trainer), fresh=kind == EPOCH)
        point = ResumePoint.now(device, places)
        if validation_interrupted(trainer) and self._before_validation is not None:
            point.random = self._before_validation
        return point

    def _in_window(self, trainer: Trainer, place: Mapping[str, Any]) -> bool:
        """True inside an accumulation window; with manual optimization windows may span epochs."""
        if not trainer.lightning_module.automatic_optimization:
            return bool(trainer.optimizers) and not self._stepped
        if place["kind"] == EPOCH:
            return False
        begun = place["inside"] or self._has_read_first(trainer)
        return accumulates(trainer) or (begun and not self._stepped)

    def _has_read_first(self, trainer: Trainer) -> bool:
        """True if the window's first batch was read, and Lightning has not counted it: hooks before its
        transfer."""
        window = self._window
        return window is not None and window.counts["total"] == counts(trainer)["total"]

    def _go_back(self, checkpoint: dict[str, Any], window: _Window) -> None:
        checkpoint["loops"] = rewind_counters(checkpoint["loops"], window.counts)
        checkpoint["callbacks"] = {**checkpoint["callbacks"], **self._callbacks.states()}
        checkpoint["state_dict"] = self._buffers.replace_in(checkpoint["state_dict"])

    # -- resuming --------------------------------------------------------------------------------

    def load_from(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        """Remember the position to resume at, and set Lightning's loops to it; the mesh may not exist
        yet."""
        record: Record | None = checkpoint.pop(KEY, None)
        if record is None or trainer.state.fn != TrainerFn.FITTING:
            return
        checkpoint["loops"] = prepare(checkpoint["loops"], record["place"])
        self._loaded, self._point = record, None

    def follow_loader(
        self, shared: SharedLoader, trainer: Trainer, run: MeshBuilder, rank: int
    ) -> None:
        """Place a new training loader where it was; note random numbers before a validation loader's pass."""
        if trainer.training:
            self._place_loader(shared, run, rank)
            return
        resume, runs = weakref.ref(self), weakref.ref(trainer)  # a loader may outlive both

        def before_pass() -> None:
            known, running = resume(), runs()
            if known is not None and running is not None:
                known.start_validation(running)

        shared.set_callbacks(before_pass=before_pass)

    def _place_loader(self, shared: SharedLoader, run: MeshBuilder, rank: int) -> None:
        """Set the position at which the run's next training loader begins.

        Raises:
            CheckpointError: the saved positions do not fit this mesh.
        """
        if self._loaded is not None and self._point is None:
            self._point = point_of(self._loaded, run.mesh, rank)
            over = self._loaded["place"]["over"]
            self._to_place = [{**saved, "over": over} for saved in self._point.loaders]
        if self._to_place:
            shared.place.start_next_pass_at(self._to_place.pop(0))

    def start_training(self, trainer: Trainer, device: torch.device) -> None:
        """Restore the saved state, after all hooks of the beginning were called."""
        record, self._loaded = self._loaded, None
        self._window, self._stepped = None, True
        _follow_steps(trainer.optimizers, self)
        if record is None or self._point is None:
            return
        resume_loops(trainer, record["place"])
        set_orders([trainer.model], record["buckets"])
        self._point.restore_random(device)
        self._point = None


def _follow_steps(optimizers: Sequence[Any], resume: TrainerResume) -> None:
    """Record every step, also where a user calls the optimizer itself, past the strategy."""
    known = weakref.ref(resume)  # an optimizer may outlive its strategy

    def after_step(*_: Any) -> None:
        resume = known()
        if resume is not None:
            resume.steps()

    for optimizer in optimizers:
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_post_hook(after_step)


def _positions(trainer: Trainer, waiting: int, *, fresh: bool = False) -> list[dict[str, Any]]:
    """Return the positions of all training loaders; ``fresh``: the next pass starts at its beginning."""
    found = training_loaders(trainer)
    saved = [x.saved_place(waiting) for x in found if isinstance(x, SharedLoader)]
    return [position_before_pass(x["passes"], x["now"]) for x in saved] if fresh else saved
