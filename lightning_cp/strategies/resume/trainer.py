"""Exact resume under the Trainer: what is added to its checkpoints, and how a run goes on from one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_cp.strategies.loaders.shared import SharedLoader
from lightning_cp.strategies.resume import loops
from lightning_cp.strategies.resume.buckets import lay_out, orders_of
from lightning_cp.strategies.resume.place import at_pass
from lightning_cp.strategies.resume.random_state import Moment
from lightning_cp.strategies.resume.record import Point, Record, point_of, record_of
from lightning_cp.strategies.resume.taken_back import Buffers, CallbackStates
from lightning_cp.strategies.step.run_mesh import RunMesh

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
        self._before_validation: Moment | None = None
        self._buffers, self._callbacks = Buffers(), CallbackStates()
        self._loaded: Record | None = None
        self._point: Point | None = None
        self._to_place: list[dict[str, Any]] = []

    # -- while training --------------------------------------------------------------------------

    def begins_batch(self, trainer: Trainer, device: torch.device) -> None:
        """A batch was read, and no hook has seen it yet: they may draw random numbers, and count."""
        automatic = trainer.lightning_module.automatic_optimization
        if not (loops.begins_window(trainer) if automatic else self._stepped):
            return
        self._stepped = False
        waiting = 1 + loops.ahead(trainer)
        # Also for windows of one batch: some hook may save between its beginning and its step.
        self._buffers.keep([trainer.lightning_module])
        self._callbacks.keep(trainer)
        self._window = _Window(
            Point.now(device, _places(trainer, waiting)),
            loops.counts(trainer),
        )

    def steps(self) -> None:
        """An optimizer did."""
        self._stepped = True

    def begins_validation(self, trainer: Trainer) -> None:
        """A loader is about to be asked for an iterator."""
        if trainer.validating and self._before_validation is None:
            self._before_validation = Moment.now()

    def ends_validation(self) -> None:
        """Whatever is saved from here on comes after it."""
        self._before_validation = None

    # -- saving ----------------------------------------------------------------------------------

    def add_to(
        self,
        checkpoint: dict[str, Any],
        trainer: Trainer,
        run: RunMesh,
        device: torch.device,
    ) -> None:
        """Add what resuming needs; all ranks call this.

        Inside an accumulation window, the checkpoint becomes that of the window's beginning: gradients are
        not saved, and the weights are still those.
        """
        if trainer.state.fn != TrainerFn.FITTING or "optimizer_states" not in checkpoint:
            return
        place = loops.place_now(trainer)
        window = self._window if self._in_window(trainer, place) else None
        if window is None:
            record = record_of(lambda: self._point_at(trainer, device, place["kind"]), run.mesh)
        else:
            record = record_of(lambda: window.point, run.mesh)
            place = {"kind": loops.BETWEEN, "over": False}
            self._go_back(checkpoint, window)
        record["buckets"] = orders_of([trainer.model])
        record["place"] = {"kind": place["kind"], "over": place["over"]}
        checkpoint[KEY] = record
        loops.drop_empty_loader_states(checkpoint["loops"])

    def _point_at(self, trainer: Trainer, device: torch.device, kind: str) -> Point:
        places = _places(trainer, loops.ahead(trainer), fresh=kind == loops.EPOCH)
        point = Point.now(device, places)
        if loops.validation_interrupted(trainer) and self._before_validation is not None:
            point.random = self._before_validation
        return point

    def _in_window(self, trainer: Trainer, place: Mapping[str, Any]) -> bool:
        """With manual optimization also across epochs; Lightning's own windows end with them."""
        if not trainer.lightning_module.automatic_optimization:
            return bool(trainer.optimizers) and not self._stepped
        if place["kind"] == loops.EPOCH:
            return False
        begun = place["inside"] or self._has_read_first(trainer)
        return loops.accumulates(trainer) or (begun and not self._stepped)

    def _has_read_first(self, trainer: Trainer) -> bool:
        """Of a window, and Lightning has not counted it yet: hooks before its transfer come then."""
        window = self._window
        return window is not None and window.counts["total"] == loops.counts(trainer)["total"]

    def _go_back(self, checkpoint: dict[str, Any], window: _Window) -> None:
        checkpoint["loops"] = loops.go_back(checkpoint["loops"], window.counts)
        checkpoint["callbacks"] = {**checkpoint["callbacks"], **self._callbacks.states()}
        checkpoint["state_dict"] = self._buffers.put_back(checkpoint["state_dict"])

    # -- resuming --------------------------------------------------------------------------------

    def take_from(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        """Remember where to go on, and have Lightning's loops begin there; there may be no mesh yet."""
        record: Record | None = checkpoint.pop(KEY, None)
        if record is None or trainer.state.fn != TrainerFn.FITTING:
            return
        checkpoint["loops"] = loops.prepare(checkpoint["loops"], record["place"])
        self._loaded, self._point = record, None

    def place_loader(self, shared: SharedLoader, run: RunMesh, rank: int) -> None:
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
        loops.go_on(trainer, record["place"])
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
    found = loops.training_loaders(trainer)
    saved = [x.saved_place(waiting) for x in found if isinstance(x, SharedLoader)]
    return [at_pass(x["passes"], x["now"]) for x in saved] if fresh else saved
