"""What both strategies have of saving: their settings, one saver, and no other plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_cp.checkpoint.pretrained.incomplete import require_complete
from lightning_cp.comm.objects import World
from lightning_cp.errors import CheckpointError
from lightning_cp.strategies.replaced import Replaced
from lightning_cp.strategies.saves.reading import PlainCheckpointIO, require_ours
from lightning_cp.strategies.saves.saver import Saver


class SavesOfBoth:
    """Comes before a ``DDPStrategy``."""

    _core: Any
    _trains_on = False
    _checkpoint_io: Any

    _saver: Saver

    def _prepare_saves(self) -> None:
        require_ours(self._checkpoint_io)
        settings = self._core.settings
        self._saver = Saver(settings.checkpoint, in_background=settings.async_save)
        self._adopted = Replaced()
        self._saved_names: dict[str, list[str]] = {}
        self._saved_kinds: dict[str, list[str]] = {}

    @property
    def checkpoint_io(self) -> Any:
        """What Lightning moves between its own processes with; checkpoints do not go through it."""
        if self._checkpoint_io is None:
            self._checkpoint_io = PlainCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        require_ours(io)
        self._checkpoint_io = io

    @staticmethod
    def _require_complete(modules: Iterable[nn.Module]) -> None:
        """Refuse models whose pretrained weights are not all there; on every rank, if one has such."""

        def complete() -> None:
            for module in modules:
                require_complete(module)

        World().together(complete, lambda said: CheckpointError(f"nothing is saved: {said}"))

    @staticmethod
    def _require_local(storage_options: object) -> None:
        if storage_options is not None:
            raise CheckpointError(
                "storage_options are for remote storage, and checkpoints are local."
            )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after the one that replaces it is complete; called on every rank."""
        self._saver.remove(filepath)

    def wait_for_saves(self) -> None:
        """Wait until the save in the background is complete. Collective.

        Raises:
            CheckpointError: on every rank: it failed on some.
        """
        self._saver.finish()
