"""The Trainer's hooks that exact resume needs, in front of the strategy that saves and loads."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any

from lightning_cp.loaders.synchronized import SharedLoader
from lightning_cp.resume.trainer import TrainerResume


class ResumesExactly:
    """Mixed into the Trainer's strategy, which has a ``_core`` and all of Lightning's methods."""

    @cached_property
    def _resume(self) -> TrainerResume:
        return TrainerResume()

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save with what an exact resume needs, if a run has begun in this process; all ranks come here."""
        trainer = self.lightning_module._trainer
        checkpoint = {**checkpoint}  # the one that hooks were shown is theirs
        if trainer is not None and self._core.mesh_sizes:
            self._resume.add_to(checkpoint, trainer, self._core, self.root_device)
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A checkpoint's content; in ``fit`` the run goes on where it was saved."""
        checkpoint = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            self._resume.take_from(checkpoint, module._trainer)
        return checkpoint

    def on_train_start(self: Any) -> None:
        """All hooks of the beginning have been called."""
        super().on_train_start()  # type: ignore[misc]
        self._resume.begins_training(self._trainer, self.root_device)

    def on_validation_end(self) -> None:
        """All hooks of its end have been called."""
        super().on_validation_end()  # type: ignore[misc]
        self._resume.ends_validation()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, and remember it."""
        stepped = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        self._resume.steps()
        return stepped

    def _begins_batch(self: Any) -> None:
        """A batch was read, in whatever loop."""
        if self._trainer.training:
            self._resume.begins_batch(self._trainer, self.root_device)

    def _follow_loader(self: Any, shared: SharedLoader, *, training: bool) -> None:
        if training:
            self._resume.place_loader(shared, self._core, self.global_rank)
        else:
            known = weakref.ref(self)  # a loader may outlive its strategy

            def before_pass() -> None:
                strategy = known()
                if strategy is not None:
                    strategy._resume.begins_validation(strategy._trainer)

            shared.tell(before_pass=before_pass)

    @property
    def _trainer(self: Any) -> Any:
        return self.lightning_module.trainer
