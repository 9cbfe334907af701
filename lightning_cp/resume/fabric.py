"""Exact resume under Fabric: an object for the state that ``fabric.save`` and ``fabric.load`` are given."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_cp.errors import CheckpointError
from lightning_cp.loaders.synchronized import LoaderProxy, SharedLoader
from lightning_cp.resume.record import Point, point_of, record_of
from lightning_cp.resume.replay import Buffers, lay_out, orders_of
from lightning_cp.runtime.mesh_builder import MeshBuilder


class RunState:
    """Random numbers of every rank and the place of every loader: ``fabric.strategy.run_state``.

    Put it into the state, and load last, after ``setup`` and ``setup_dataloaders``::

        state = {"model": model, "optimizer": optimizer, "run": fabric.strategy.run_state}
        if resume:
            fabric.load(path, state)
        for epoch in range(run.epoch(loader), epochs):
            for index, batch in enumerate(loader, run.batches(loader)):
                ...

    The next pass through a loader goes on with the first batch that no optimizer step has used: after a save
    inside an accumulation window, with the window's first. A step uses all batches that were read before it.
    Buffers of the models that are saved with it are those of that place, too. All ranks save and load
    together.
    """

    def __init__(self, run: MeshBuilder) -> None:
        self._run = run
        self._loaders: list[weakref.ref[SharedLoader]] = []
        self._wrapped: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._begun: Point | None = None
        self._buffers = Buffers()
        self.device = torch.device("cpu")
        """Of this rank; the strategy says which."""

    # -- for scripts -----------------------------------------------------------------------------

    def epoch(self, loader: Any) -> int:
        """Passes through a loader of ``fabric.setup_dataloaders`` that are finished."""
        return _shared(loader).place.finished

    def batches(self, loader: Any) -> int:
        """Batches of the current pass that were read; 0 between passes."""
        place = _shared(loader).place
        return 0 if place.ended else place.read

    def state_dict(self) -> dict[str, Any]:
        """The entries of a checkpoint; all ranks call this."""
        record = record_of(lambda: self._begun or self._now(), self._run.mesh)
        return {**record, "buckets": orders_of(self._models)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there: random numbers at once, loaders with their next pass; all ranks call this.

        Raises:
            CheckpointError: written by a later version, or with another number of loaders than there are.
        """
        point = self.fitting(state_dict)
        for shared, saved in zip(self._followed, point.loaders, strict=True):
            shared.place.begin_from(saved, counts_epochs=True)
        self._begun = None
        lay_out(self._models, state_dict["buckets"])
        point.restore_random(self.device)

    # -- for the strategy ------------------------------------------------------------------------

    def fitting(self, state_dict: dict[str, Any]) -> Point:
        """The state that this rank would resume from; nothing is changed yet.

        Raises:
            CheckpointError: written by a later version, or with another number of loaders than there are.
        """
        point = point_of(state_dict, self._run.mesh, torch.distributed.get_rank())
        saved, there = len(point.loaders), len(self._followed)
        if saved != there:
            raise CheckpointError(
                f"the checkpoint has the places of {saved} loaders, but there are {there} of "
                "fabric.setup_dataloaders. Before fabric.load set up those that there were when it was "
                "saved, in the same order, and keep them: one that is dropped has no place."
            )
        return point

    def take_back(self, tree: dict[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Of what is about to be saved: buffers are those of the point that ``state_dict`` gives."""
        if self._begun is not None:
            for key in modules:
                tree[key] = self._buffers.put_back(tree[key])

    def follow(self, shared: SharedLoader) -> None:
        """One more loader, in the order of the script."""
        self._loaders.append(weakref.ref(shared))
        known = weakref.ref(self)  # a loader may outlive its strategy

        def before_training() -> None:
            state = known()
            if state is not None:
                state._begins_batch()

        shared.tell(before_training=before_training)

    def follow_model(self, wrapped: nn.Module) -> None:
        """One more model, in the order of the script."""
        if not self._wrapped:
            _follow_steps(self)
        self._wrapped.append(weakref.ref(wrapped))

    def follow_optimizer(self, optimizer: Optimizer) -> None:
        """One more optimizer."""
        self._optimizers.append(weakref.ref(optimizer))

    @property
    def _followed(self) -> list[SharedLoader]:
        return [loader for known in self._loaders if (loader := known()) is not None]

    @property
    def _models(self) -> list[nn.Module]:
        return [model for known in self._wrapped if (model := known()) is not None]

    def steps(self) -> None:
        """An optimizer did: what was read so far is used."""
        self._begun = None

    def has_stepped(self, optimizer: Optimizer) -> None:
        """It did, whosever it is: one that Fabric was never given may step parameters of a model."""
        if not any(known() is optimizer for known in self._optimizers):
            own = {id(p) for model in self._models for p in model.parameters()}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return
            self.follow_optimizer(optimizer)
        self.steps()

    def _begins_batch(self) -> None:
        if self._begun is None:
            self._begun = self._now()
            self._buffers.keep(self._models)

    def _now(self) -> Point:
        return Point.now(self.device, [loader.saved_place() for loader in self._followed])


def _follow_steps(state: RunState) -> None:
    """Tell of the steps of all optimizers, also where a user calls one itself, past Fabric's wrapper."""
    known = weakref.ref(state)

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        state = known()
        if state is not None:
            state.has_stepped(optimizer)

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
