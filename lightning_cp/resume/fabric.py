"""Exact resume under Fabric: an object to put into the state of ``fabric.save`` and ``fabric.load``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_cp.errors import CheckpointError
from lightning_cp.loaders.shared_loader import LoaderProxy, SharedLoader
from lightning_cp.resume.record import (
    BufferCopies,
    ResumePoint,
    orders_of,
    point_of,
    record_of,
    set_orders,
)
from lightning_cp.runtime.mesh_builder import MeshBuilder
from lightning_cp.utils.tensors import optimizer_parameters


class RunState:
    """Random numbers of every rank and position of every loader: ``fabric.strategy.run_state``.

    Put it into the state, and load last, after ``setup`` and ``setup_dataloaders``::

        state = {"model": model, "optimizer": optimizer, "run": fabric.strategy.run_state}
        if resume:
            fabric.load(path, state)
        for epoch in range(run.epoch(loader), epochs):
            for index, batch in enumerate(loader, run.batches(loader)):
                ...

    The next pass through a loader begins with the first batch that no optimizer step has used: after a save
    inside an accumulation window, with the window's first. A step uses all batches that were read before it.
    Buffers of models saved with it are those of that position, too. All ranks save and load together.
    """

    def __init__(self, run: MeshBuilder) -> None:
        self._run = run
        self._loaders: list[weakref.ref[SharedLoader]] = []
        self._wrapped: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._begun: ResumePoint | None = None
        self._buffers = BufferCopies()
        self.device = torch.device("cpu")
        """This rank's device, set by the strategy."""

    # -- for scripts -----------------------------------------------------------------------------

    def epoch(self, loader: Any) -> int:
        """Return the number of finished passes through a loader of ``fabric.setup_dataloaders``."""
        return _shared(loader).place.finished

    def batches(self, loader: Any) -> int:
        """Return the number of batches read in the current pass; 0 between passes."""
        place = _shared(loader).place
        return 0 if place.ended else place.read

    def state_dict(self) -> dict[str, Any]:
        """Return the entries for a checkpoint. Collective."""
        record = record_of(lambda: self._begun or self._now(), self._run.mesh)
        return {**record, "buckets": orders_of(self._models)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from the entries: random numbers at once, loaders with their next pass. Collective.

        Raises:
            CheckpointError: a later version wrote the state, or the number of loaders differs.
        """
        point = self.state_to_resume(state_dict)
        for shared, saved in zip(self._followed, point.loaders, strict=True):
            shared.place.start_next_pass_at(saved, counts_epochs=True)
        self._begun = None
        set_orders(self._models, state_dict["buckets"])
        point.restore_random(self.device)

    # -- for the strategy ------------------------------------------------------------------------

    def state_to_resume(self, state_dict: dict[str, Any]) -> ResumePoint:
        """Return the state that this rank would resume from; changes nothing.

        Raises:
            CheckpointError: a later version wrote the state, or the number of loaders differs.
        """
        point = point_of(state_dict, self._run.mesh, torch.distributed.get_rank())
        saved, there = len(point.loaders), len(self._followed)
        if saved != there:
            raise CheckpointError(
                f"the checkpoint has positions of {saved} loaders, but there are {there} of "
                "fabric.setup_dataloaders. Before fabric.load, set up the loaders of the saved run in the "
                "same order, and keep references to them."
            )
        return point

    def restore_buffers(self, tree: dict[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Replace the buffers of ``modules`` in a tree to save by those of the point that
        ``state_dict`` returns."""
        if self._begun is not None:
            for key in modules:
                tree[key] = self._buffers.replace_in(tree[key])

    def follow(self, shared: SharedLoader) -> None:
        """Track a loader; call it in the order of the script."""
        self._loaders.append(weakref.ref(shared))
        known = weakref.ref(self)  # a loader may outlive its strategy

        def before_training() -> None:
            state = known()
            if state is not None:
                state._begins_batch()

        shared.set_callbacks(before_training=before_training)

    def track_model(self, wrapped: nn.Module) -> None:
        """Track a model; call it in the order of the script."""
        if not self._wrapped:
            _follow_steps(self)
        self._wrapped.append(weakref.ref(wrapped))

    def track_optimizer(self, optimizer: Optimizer) -> None:
        """Track an optimizer."""
        self._optimizers.append(weakref.ref(optimizer))

    @property
    def _followed(self) -> list[SharedLoader]:
        return [loader for known in self._loaders if (loader := known()) is not None]

    @property
    def _models(self) -> list[nn.Module]:
        return [model for known in self._wrapped if (model := known()) is not None]

    def steps(self) -> None:
        """Record an optimizer step: all batches read so far are used."""
        self._begun = None

    def note_step(self, optimizer: Optimizer) -> None:
        """Record the step of any optimizer, also one that Fabric was not given, if it holds a tracked
        parameter."""
        if not any(known() is optimizer for known in self._optimizers):
            own = {id(p) for model in self._models for p in model.parameters()}
            if not any(id(p) in own for p in optimizer_parameters(optimizer)):
                return
            self.track_optimizer(optimizer)
        self.steps()

    def _begins_batch(self) -> None:
        if self._begun is None:
            self._begun = self._now()
            self._buffers.save(self._models)

    def _now(self) -> ResumePoint:
        return ResumePoint.now(self.device, [loader.saved_place() for loader in self._followed])


def _follow_steps(state: RunState) -> None:
    """Record the steps of all optimizers, also where a user calls one itself instead of Fabric's
    wrapper."""
    known = weakref.ref(state)

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        state = known()
        if state is not None:
            state.note_step(optimizer)

    weakref.finalize(state, register_optimizer_step_post_hook(after_step).remove)


def _shared(loader: Any) -> SharedLoader:
    found = getattr(loader, "_dataloader", loader)  # Fabric's own wrapper
    while isinstance(found, LoaderProxy) and not isinstance(found, SharedLoader):
        found = found._loader
    if not isinstance(found, SharedLoader):
        raise TypeError(
            f"expected a loader of fabric.setup_dataloaders, got {type(loader).__name__}."
        )
    return found
