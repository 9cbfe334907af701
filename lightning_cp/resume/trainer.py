"""Exact resume under the Trainer: what is added to its checkpoints, and how a run goes on from one."""

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

from lightning_cp.loaders.position import at_pass
from lightning_cp.loaders.rng import RandomStates
from lightning_cp.loaders.synchronized import SharedLoader
from lightning_cp.resume.record import Point, Record, point_of, record_of
from lightning_cp.resume.replay import Buffers, CallbackStates, lay_out, orders_of
from lightning_cp.runtime.mesh_builder import MeshBuilder

# Lightning's loops: where a run was when it was saved, and how to have them go on exactly there.
#
# Lightning restarts by comparing counters, which tell several of these places from each other by the hook
# that happens to save: after a save at the end of a batch it leaves out the validation that was due, after
# one at the end of an epoch with ``max_steps`` it trains on one batch too many, and inside an accumulation
# window it steps without the batches before. So the place is saved with the checkpoint, and counters and
# restart stages are set to one of two cases that Lightning does right: after some batch of an epoch, or
# before an epoch. Everything here is Lightning's own and private; this is the only file that touches it.


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
    """Where the run is, by its counters and the hook that saves.

    Returns:
        ``kind``: one of the above; ``over``: the pass through the loaders is; ``inside``: a batch is being
        computed.
    """
    loop = trainer.fit_loop.epoch_loop
    epochs, batches = _counted(trainer.fit_loop.epoch_progress), _counted(loop.batch_progress)
    over = loop._num_ready_batches_reached()
    ended = epochs.processed == epochs.started
    if epochs.started < epochs.ready or (ended and (over or not loop.batch_progress.current.ready)):
        # The Trainer asks loaders for a new iterator then, except before the first epoch.
        return {"kind": EPOCH, "over": epochs.processed > 0, "inside": False}
    kind = BETWEEN  # also if the epoch has ended within a pass, since the run has
    if not ended and (batches.completed < batches.processed or trainer.validating):
        kind = BATCH_END if _hook(trainer) != "on_validation_end" else VALIDATED
    return {"kind": kind, "over": over, "inside": batches.ready > batches.processed}


def _counted(progress: Any) -> Any:
    """Over all epochs; what all of Lightning's counters of epochs and batches have."""
    return progress.total


def validation_interrupted(trainer: Trainer) -> bool:
    """True if the run is in the middle of a validation, which will be repeated from its beginning."""
    return trainer.validating and _hook(trainer) != "on_validation_end"


def _hook(trainer: Trainer) -> str | None:
    module = trainer.lightning_module
    return None if module is None else module._current_fx_name


def counts(trainer: Trainer) -> dict[str, Any]:
    """State that changes from one batch of an accumulation window to the next, before a batch begins."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    return {
        "epochs": trainer.fit_loop.epoch_progress.state_dict(),
        "current": progress.current.ready,
        "total": progress.total.ready,
        "is_last_batch": False,
        # A hook within a step comes after that was counted as begun.
        _AUTOMATIC: loop.automatic_optimization.optim_progress.state_dict(),
        _MANUAL: loop.manual_optimization.optim_step_progress.state_dict(),
        "stepped": loop._batches_that_stepped,
    }


def go_back(loops: dict[str, Any], to: dict[str, Any]) -> dict[str, Any]:
    """The loops' state with the counters of the beginning of the window."""
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
    """Of loaders without a state of their own, or Lightning alone would refuse to go on without ours."""
    states = loops["fit_loop"]["state_dict"]
    if not any(states.get("combined_loader", ())):
        states.pop("combined_loader", None)


def prepare(loops: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """The loops' state to load: the counters of one of the two cases that Lightning does right."""
    loops = deepcopy(loops)
    fit = loops["fit_loop"]
    fit["state_dict"].pop("combined_loader", None)  # of the first rank only
    for name in ("total", "current"):
        epochs, batches = fit[_EPOCH][name], fit[_BATCH][name]
        if place["kind"] == EPOCH:
            fit[_EPOCH][name] = dict.fromkeys(epochs, epochs["processed"])
        else:
            done = epochs["processed"] - (epochs["processed"] == epochs["started"])
            fit[_EPOCH][name] = {**epochs, "processed": done, "completed": done}
        fit[_BATCH][name] = dict.fromkeys(batches, batches["processed"])
    return loops


def go_on(trainer: Trainer, place: dict[str, Any]) -> None:
    """Once all hooks of the beginning have been called: have the loops go on from that place."""
    fit = trainer.fit_loop
    loop = fit.epoch_loop
    fit._restarting = loop.val_loop._restarting = False
    loop.val_loop._restart_stage = EvaluationStage.NONE
    if place["kind"] == EPOCH:
        loop.restarting = False  # of what is below as well
        fit._restart_stage, loop._restart_stage = FitStage.NONE, EpochStage.NONE
        fit._resuming_from_checkpoint = (
            False  # the loaders begin with the epoch, after its first hooks
        )
        return
    fit._restart_stage = FitStage.RESTARTED_MID_EPOCH
    loop._restarting = True
    assert fit._data_fetcher is not None
    due = loop._should_check_val_fx(fit._data_fetcher)
    # RESTARTED_ON_LAST has the loop leave out a validation that is due, and do what comes after it.
    loop._restart_stage = EpochStage.RESTARTED_ON_LAST
    if place["kind"] == BETWEEN and due:
        loop._batches_that_stepped -= 1  # was counted before, and will be once more
    elif place["kind"] == BATCH_END and due:
        loop.val_loop._restart_stage = EvaluationStage.RESTARTED_MID_EVALUATION  # all of it
    elif place["kind"] != BETWEEN and not due:
        loop._restart_stage = EpochStage.NONE  # counts the batch


def ahead(trainer: Trainer) -> int:
    """Batches that Lightning has read and not begun: one of loaders without a length."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def training_loaders(trainer: Trainer) -> list[Any]:
    """Every loader of the training set."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def accumulates(trainer: Trainer) -> bool:
    """True if the last batch has left gradients for the next one."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def begins_window(trainer: Trainer) -> bool:
    """True if the next batch is the first one of an accumulation window."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    return current.ready % trainer.accumulate_grad_batches == 0


KEY = "lightning_cp_resume"
"""Where it lies in a checkpoint."""


@dataclass
class _Window:
    """The state at the beginning of an accumulation window."""

    point: Point
    counts: dict[str, Any]


class TrainerResume:
    """One strategy's; everything is kept on this rank until something is saved."""

    def __init__(self) -> None:
        self._window: _Window | None = None
        self._stepped = True
        self._before_validation: RandomStates | None = None
        self._buffers, self._callbacks = Buffers(), CallbackStates()
        self._loaded: Record | None = None
        self._point: Point | None = None
        self._to_place: list[dict[str, Any]] = []

    # -- while training --------------------------------------------------------------------------

    def begins_batch(self, trainer: Trainer, device: torch.device) -> None:
        """A batch was read, and no hook has seen it yet: they may draw random numbers, and count."""
        automatic = trainer.lightning_module.automatic_optimization
        if not (begins_window(trainer) if automatic else self._stepped):
            return
        self._stepped = False
        waiting = 1 + ahead(trainer)
        # Also for windows of one batch: some hook may save between its beginning and its step.
        self._buffers.keep([trainer.lightning_module])
        self._callbacks.keep(trainer)
        self._window = _Window(
            Point.now(device, _places(trainer, waiting)),
            counts(trainer),
        )

    def steps(self) -> None:
        """An optimizer did."""
        self._stepped = True

    def begins_validation(self, trainer: Trainer) -> None:
        """A loader is about to be asked for an iterator."""
        if trainer.validating and self._before_validation is None:
            self._before_validation = RandomStates.now()

    def ends_validation(self) -> None:
        """Whatever is saved from here on comes after it."""
        self._before_validation = None

    # -- saving ----------------------------------------------------------------------------------

    def add_to(
        self,
        checkpoint: dict[str, Any],
        trainer: Trainer,
        run: MeshBuilder,
        device: torch.device,
    ) -> None:
        """Add what resuming needs; all ranks call this.

        Inside an accumulation window, the checkpoint becomes that of the window's beginning: gradients are
        not saved, and the weights are still those.
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

    def _point_at(self, trainer: Trainer, device: torch.device, kind: str) -> Point:
        places = _places(trainer, ahead(trainer), fresh=kind == EPOCH)
        point = Point.now(device, places)
        if validation_interrupted(trainer) and self._before_validation is not None:
            point.random = self._before_validation
        return point

    def _in_window(self, trainer: Trainer, place: Mapping[str, Any]) -> bool:
        """With manual optimization also across epochs; Lightning's own windows end with them."""
        if not trainer.lightning_module.automatic_optimization:
            return bool(trainer.optimizers) and not self._stepped
        if place["kind"] == EPOCH:
            return False
        begun = place["inside"] or self._has_read_first(trainer)
        return accumulates(trainer) or (begun and not self._stepped)

    def _has_read_first(self, trainer: Trainer) -> bool:
        """Of a window, and Lightning has not counted it yet: hooks before its transfer come then."""
        window = self._window
        return window is not None and window.counts["total"] == counts(trainer)["total"]

    def _go_back(self, checkpoint: dict[str, Any], window: _Window) -> None:
        checkpoint["loops"] = go_back(checkpoint["loops"], window.counts)
        checkpoint["callbacks"] = {**checkpoint["callbacks"], **self._callbacks.states()}
        checkpoint["state_dict"] = self._buffers.put_back(checkpoint["state_dict"])

    # -- resuming --------------------------------------------------------------------------------

    def take_from(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        """Remember where to go on, and have Lightning's loops begin there; there may be no mesh yet."""
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
                known.begins_validation(running)

        shared.tell(before_pass=before_pass)

    def _place_loader(self, shared: SharedLoader, run: MeshBuilder, rank: int) -> None:
        """The next training loader of the run begins where it was.

        Raises:
            CheckpointError: the state cannot be used on this mesh.
        """
        if self._loaded is not None and self._point is None:
            self._point = point_of(self._loaded, run.mesh, rank)
            over = self._loaded["place"]["over"]
            self._to_place = [{**saved, "over": over} for saved in self._point.loaders]
        if self._to_place:
            shared.place.begin_from(self._to_place.pop(0))

    def begins_training(self, trainer: Trainer, device: torch.device) -> None:
        """All hooks of the beginning have been called: from here on, it is the run that was saved."""
        record, self._loaded = self._loaded, None
        self._window, self._stepped = None, True
        _follow_steps(trainer.optimizers, self)
        if record is None or self._point is None:
            return
        go_on(trainer, record["place"])
        lay_out([trainer.model], record["buckets"])
        self._point.restore_random(device)
        self._point = None


def _follow_steps(optimizers: Sequence[Any], resume: TrainerResume) -> None:
    """Tell of every step, also where a user calls the optimizer itself, which the strategy does not see."""
    known = weakref.ref(resume)  # an optimizer may outlive its strategy

    def after_step(*_: Any) -> None:
        resume = known()
        if resume is not None:
            resume.steps()

    for optimizer in optimizers:
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_post_hook(after_step)


def _places(trainer: Trainer, waiting: int, *, fresh: bool = False) -> list[dict[str, Any]]:
    """Of all training loaders; ``fresh``: the next pass begins anew."""
    found = training_loaders(trainer)
    saved = [x.saved_place(waiting) for x in found if isinstance(x, SharedLoader)]
    return [at_pass(x["passes"], x["now"]) for x in saved] if fresh else saved
