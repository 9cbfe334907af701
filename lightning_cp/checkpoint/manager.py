"""The saves of one run: one at a time in the background; nothing is removed before its replacement is
complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from torch import nn

from lightning_cp import error_display
from lightning_cp.checkpoint.atomic import (
    display_path,
    local_path,
    remove,
    replace_link,
    save_error,
)
from lightning_cp.checkpoint.checkpoint_io import (
    PlainCheckpointIO,
    WriteFunction,
    is_plugin,
    remove_anywhere,
    with_plain_core,
)
from lightning_cp.checkpoint.manifest import SaveInfo, check_replaceable, is_foreign
from lightning_cp.checkpoint.pretrained.options import check_complete
from lightning_cp.checkpoint.save import BackgroundSave, finish_save, plan_save
from lightning_cp.checkpoint.store import SHARDED_ADVICE, is_store
from lightning_cp.comm.consensus import World, error_summary
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.utils.containers import tensors_of

_log = logging.getLogger("lightning_cp")
LARGE_BYTES = 4 * 2**30
"""Bytes of weights that, with optimizer states, may take a minute to gather and to write."""


class CheckpointManager:
    """Saves, links and removes checkpoints in the order in which it was asked to.

    Args:
        form: ``full`` or ``sharded``.
        in_background: training continues during saves.
    """

    def __init__(self, form: str, *, in_background: bool) -> None:
        self._form, self._in_background = form, in_background
        self._running: BackgroundSave | None = None
        self._postponed: list[Callable[[], bool]] = []
        self._warned: set[str] = set()

    def save(
        self,
        tree: dict[str, Any],
        path: str | Path,
        about: SaveInfo,
        ours: dict[str, Any],
        *,
        may_lack: Sequence[str] = (),
        may_differ: Collection[str] = (),
        elsewhere: WriteFunction | None = None,
        wait: bool = False,
    ) -> None:
        """Save a state. Collective.

        Args:
            tree: the state.
            path: the checkpoint.
            about: for its manifest.
            ours: notes beside the state.
            may_lack: keys whose entries are left out, with one warning, if they cannot be written.
            may_differ: keys in which ranks may differ; the first rank's values are saved.
            elsewhere: writes it on the first rank, in another place than a file of this machine.
            wait: do not save in the background.

        Raises:
            CheckpointError: on every rank: it cannot be written, or the last save in the background
                failed.
        """
        self.finish()
        if elsewhere is not None and self._form == "sharded":
            raise CheckpointError(f"cannot save {path}. {SHARDED_ADVICE}")
        target = local_path(path) if elsewhere is None else Path(path)
        self._log_large(tree, display_path(target))
        planned, left_out = plan_save(
            tree,
            target,
            form=self._form,
            about=about,
            ours=ours,
            may_lack=may_lack,
            may_differ=may_differ,
            elsewhere=elsewhere,
        )
        self._warn_left_out(left_out)
        if self._in_background and not wait:
            self._running = BackgroundSave(planned)
        else:
            finish_save(planned)

    def _log_large(self, tree: dict[str, Any], name: str) -> None:
        """Log it once before a save that may take minutes."""
        weights = tensors_of(tree.get("state_dict", tree))
        size = sum(x.numel() * x.element_size() for _, x in weights)
        if size >= LARGE_BYTES and "large" not in self._warned:
            self._warned.add("large")
            rank_zero_info(f"saving {name}, weights of {size / 1e9:,.1f} GB: this may take minutes")

    def finish(self) -> None:
        """Wait for the save in the background, then do the postponed actions. Collective.

        Raises:
            CheckpointError: on every rank: it failed on some.
        """
        if self._in_background:
            running, self._running = self._running, None
            if running is not None:
                self._check_done(running)
                # The others wait for what the first one does: they may look for a link, too.
                self._run_on_all(running.target, self._run_postponed)
                return
        self._run_postponed()

    def _run_on_all(self, target: Path, action: Callable[[], None]) -> None:
        try:
            World().run_on_all(action, lambda said: save_error(target, said))
        except OSError as error:
            raise save_error(target, error_summary(error)) from error

    def _check_done(self, running: BackgroundSave) -> None:
        def done() -> None:
            running.wait()
            error = running.error
            if error is not None and running.is_first:
                raise error

        try:
            self._run_on_all(running.target, done)
        except CheckpointError:
            self._postponed.clear()  # the checkpoint to be replaced is still needed
            raise

    def abandon(self, seconds: float = 60.0) -> None:
        """Wait for the save in the background without the other ranks; its failure has been logged."""
        running, self._running = self._running, None
        self._postponed.clear()
        if running is not None and not running.wait(seconds):
            _log.error(
                "the save of %s did not end within %g s", display_path(running.target), seconds
            )

    def remove(self, path: str | Path, io: Any = None) -> None:
        """Remove a checkpoint once it is no longer needed; called on every rank, done by the first.

        A failure does not end a run: it is logged, once.

        Args:
            path: of the checkpoint.
            io: the plugin that has written it, if any.
        """
        self._schedule(lambda: self._remove(path, io))

    def link(self, to: str | Path, link: str | Path) -> None:
        """Point a link to a checkpoint once that is complete. Collective.

        Raises:
            CheckpointError: on every rank: it cannot be made.
        """
        target, linked = local_path(to), local_path(link)
        if target != linked:
            self._run_on_all(linked, lambda: self._schedule(lambda: self._link(target, linked)))

    def _schedule(self, action: Callable[[], bool]) -> None:
        if World().rank:
            return
        self._postponed.append(action)
        if self._running is None:
            self._run_postponed()

    def _run_postponed(self) -> None:
        before = None
        while before != len(self._postponed):  # a removal may wait for a later link
            before = len(self._postponed)
            todo, self._postponed = self._postponed, []
            for at, action in enumerate(todo):
                try:
                    done = action()
                except BaseException:  # failed actions are not retried
                    self._postponed += todo[at + 1 :]
                    raise
                if not done:
                    self._postponed.append(action)

    def _remove(self, path: str | Path, io: Any) -> bool:
        try:
            return remove_anywhere(io, path) or self._try_remove(local_path(path))
        except Exception as error:  # any type: stores and plugins have their own
            name = path if is_store(path) else display_path(Path(path))
            self.warn_once(f"{name} cannot be removed: {error_summary(error)}. The run continues.")
            return True

    def _try_remove(self, target: Path) -> bool:
        """Remove a checkpoint, and return False if it must wait because a link still names it; links are
        removed at once.
        """
        if target.is_symlink():
            remove(target)
            return True
        if not target.exists():
            return True
        if any(x.is_symlink() and x.resolve() == target.resolve() for x in target.parent.iterdir()):
            return False
        if is_foreign(target):
            self.warn_once(
                f"{display_path(target)} is not removed: it has no manifest.json of ours, so it is not a "
                "complete checkpoint of lightning_cp."
            )
            return True
        remove(target)
        return True

    def _link(self, target: Path, link: Path) -> bool:
        check_replaceable(link)
        replace_link(link, target)
        return True

    def _warn_left_out(self, names: Sequence[str]) -> None:
        if names:
            self.warn_once(
                f"{', '.join(names[:3])}{', ...' * (len(names) > 3)} cannot be saved and is left out of "
                "checkpoints: they hold tensors, numbers, strings and plain containers. Nothing is lost "
                "where the module is made by your own code; say save_hyperparameters(ignore=[...]) to agree."
            )

    def warn_once(self, text: str, about: str = "") -> None:
        """Warn on the first rank, once per subject or, without one, per text."""
        if (about or text) not in self._warned:
            self._warned.add(about or text)
            rank_zero_only(error_display.warn)(text)


def checked_io(io: Any, form: str) -> Any:
    """Return what Lightning moves weights with: a user's plugin, or ours.

    Args:
        io: a plugin or ``None``.
        form: ``full`` or ``sharded``.

    Raises:
        ConfigError: a plugin, which writes what one process has, and checkpoints that all ranks write.
    """
    if io is None:
        return PlainCheckpointIO()
    if is_plugin(io) and form == "sharded":
        raise ConfigError(
            f"checkpoint='sharded' is written by all ranks, and {type(io).__name__} writes what one process "
            "has. Leave the plugin out, or use checkpoint='full'."
        )
    return with_plain_core(io)


def check_models_complete(modules: Iterable[nn.Module]) -> None:
    """Check that pretrained weights of models are all there. Collective.

    Raises:
        CheckpointError: on every rank: some are not, on some rank.
    """

    def complete() -> None:
        for module in modules:
            check_complete(module)

    World().run_on_all(complete, lambda said: CheckpointError(f"nothing is saved: {said}"))
