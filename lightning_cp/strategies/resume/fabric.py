"""Exact resume under Fabric: an object for the state that ``fabric.save`` and ``fabric.load`` are given."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import CheckpointError
from lightning_cp.strategies.loaders.proxy import LoaderProxy
from lightning_cp.strategies.loaders.shared import SharedLoader
from lightning_cp.strategies.resume.buckets import lay_out, orders_of
from lightning_cp.strategies.resume.place import at_pass
from lightning_cp.strategies.resume.record import Point, point_of, record_of
from lightning_cp.strategies.step.run_mesh import RunMesh


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
    inside an accumulation window, with the window's first. All ranks save and load together.
    """

    def __init__(self, run: RunMesh) -> None:
        self._run = run
        self._loaders: list[weakref.ref[SharedLoader]] = []
        self._wrapped: list[weakref.ref[nn.Module]] = []
        self._begun: Point | None = None
        self._to_place: list[dict[str, Any]] = []
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
        """What a checkpoint keeps; all ranks call this."""
        record = record_of(lambda: self._begun or self._now(), self._run.mesh)
        return {**record, "buckets": orders_of(self._models)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there: random numbers at once, loaders with their next pass; all ranks call this.

        Raises:
            CheckpointError: written by a later version, or with fewer loaders than there are.
        """
        point = self.fitting(state_dict)
        self._to_place = list(point.loaders)
        for known in self._loaders:
            self._place(known())
        self._begun = None
        lay_out(self._models, state_dict["buckets"])
        point.restore_random(self.device)

    # -- for the strategy ------------------------------------------------------------------------

    def fitting(self, state_dict: dict[str, Any]) -> Point:
        """What this rank would go on from; nothing is changed yet.

        Raises:
            CheckpointError: written by a later version, or with fewer loaders than there are.
        """
        point = point_of(state_dict, self._run.mesh, torch.distributed.get_rank())
        if len(self._loaders) > len(point.loaders):
            raise CheckpointError(
                f"the checkpoint has the places of {len(point.loaders)} loaders, but "
                f"fabric.setup_dataloaders was given {len(self._loaders)}. Set up the same loaders, in the "
                "same order."
            )
        return point

    def follow(self, shared: SharedLoader) -> None:
        """One more loader, in the order of the script."""
        self._loaders.append(weakref.ref(shared))
        known = weakref.ref(self)  # a loader may outlive its strategy

        def before_training() -> None:
            state = known()
            if state is not None:
                state._begins_batch()

        shared.tell(before_training=before_training)
        self._place(shared)

    def follow_model(self, wrapped: nn.Module) -> None:
        """One more model, in the order of the script."""
        self._wrapped.append(weakref.ref(wrapped))

    @property
    def _models(self) -> list[nn.Module]:
        return [model for known in self._wrapped if (model := known()) is not None]

    def steps(self) -> None:
        """An optimizer did: what was read so far is used."""
        self._begun = None

    def _begins_batch(self) -> None:
        if self._begun is None:
            self._begun = self._now()

    def _now(self) -> Point:
        alive = [known() for known in self._loaders]
        return Point.now(self.device, [_NOWHERE if x is None else x.saved_place() for x in alive])

    def _place(self, shared: SharedLoader | None) -> None:
        if self._to_place:
            saved = self._to_place.pop(0)
            if shared is not None:
                shared.place.begin_from(saved, counts_epochs=True)


_NOWHERE = at_pass(0)


def _shared(loader: Any) -> SharedLoader:
    found = getattr(loader, "_dataloader", loader)  # Fabric's own wrapper
    while isinstance(found, LoaderProxy) and not isinstance(found, SharedLoader):
        found = found._loader
    if not isinstance(found, SharedLoader):
        raise TypeError(
            f"expected a loader of fabric.setup_dataloaders, got {type(loader).__name__}."
        )
    return found
