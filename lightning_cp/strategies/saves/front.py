"""The part of saving that both strategies have: their settings, one saver, and no other plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_cp.checkpoint.pretrained.incomplete import require_complete
from lightning_cp.comm.objects import World
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.strategies.replaced import Replaced
from lightning_cp.strategies.saves.elsewhere import PlainCheckpointIO, adopted, is_plugin
from lightning_cp.strategies.saves.saver import Saver


class SavesOfBoth:
    """Comes before a ``DDPStrategy``."""

    _core: Any
    _trains_on = False
    _checkpoint_io: Any

    _saver: Saver

    def _prepare_saves(self) -> None:
        settings = self._core.settings
        self.checkpoint_io = self._checkpoint_io
        self._saver = Saver(settings.checkpoint, in_background=settings.async_save)
        self._adopted = Replaced()
        self._saved_names: dict[str, list[str]] = {}
        self._saved_kinds: dict[str, list[str]] = {}

    @property
    def checkpoint_io(self) -> Any:
        """A user's plugin, which has full checkpoints; else what Lightning moves weights with."""
        if self._checkpoint_io is None:
            self._checkpoint_io = PlainCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        if is_plugin(io) and self._core.settings.checkpoint == "sharded":
            raise ConfigError(
                f"checkpoint='sharded' is written by all ranks, and {type(io).__name__} writes what one "
                "process has. Leave the plugin out, or use checkpoint='full'."
            )
        self._checkpoint_io = adopted(io)

    @staticmethod
    def _require_complete(modules: Iterable[nn.Module]) -> None:
        """Refuse models whose pretrained weights are not all there; on every rank, if one has such."""

        def complete() -> None:
            for module in modules:
                require_complete(module)

        World().together(complete, lambda said: CheckpointError(f"nothing is saved: {said}"))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after the one that replaces it is complete; called on every rank."""
        self._saver.remove(filepath, self._checkpoint_io)

    def wait_for_saves(self) -> None:
        """Wait until the save in the background is complete. Collective.

        Raises:
            CheckpointError: on every rank: it failed on some.
        """
        self._saver.finish()
