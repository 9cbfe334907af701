"""Saving a state, at once or in the background; every rank learns whether it worked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from lightning_cp.checkpoint.durable import sweep
from lightning_cp.checkpoint.failures import GivenUpError, failed_save
from lightning_cp.checkpoint.full import OURS, FullSave, plan_full
from lightning_cp.checkpoint.in_the_way import require_replaceable
from lightning_cp.checkpoint.manifest import About
from lightning_cp.checkpoint.objects import pickled_objects
from lightning_cp.checkpoint.plain import plain
from lightning_cp.checkpoint.same_states import require_same_states
from lightning_cp.checkpoint.sharded_plan import plan_sharded
from lightning_cp.checkpoint.unasked import UnaskedError
from lightning_cp.comm.objects import World, told
from lightning_cp.errors import CheckpointError

FORMS = {"full": plan_full, "sharded": plan_sharded}
_log = logging.getLogger("lightning_cp")
LIMIT = 1800.0
"""Seconds that the first rank waits in the background for the others' parts."""


class Save(Protocol):
    """One save, as one rank sees it."""

    @property
    def target(self) -> Path:
        """The checkpoint."""
        ...

    @property
    def world(self) -> World:
        """All ranks."""
        ...

    def copy(self) -> None:
        """Take the values as they are now."""

    def write(self) -> Any:
        """Write this rank's part."""

    def commit(self, parts: list[Any]) -> None:
        """Complete the checkpoint."""

    def give_up(self) -> None:
        """Remove what was written so far."""

    def finish_alone(self, limit: float) -> None:
        """All of it without communication."""


def plan(
    tree: dict[str, Any],
    target: Path,
    *,
    form: str = "full",
    about: About | None = None,
    ours: dict[str, Any] | None = None,
    may_lack: Sequence[str] = (),
    may_differ: Collection[str] = (),
    elsewhere: Callable[[dict[str, Any], About], None] | None = None,
) -> tuple[Save, list[str]]:
    """Begin a save: what is sent between ranks is sent here. Collective.

    Args:
        tree: the state; what differs between ranks is the first rank's, but for ``DTensor``.
        target: the checkpoint.
        form: ``full`` or ``sharded``.
        about: for the manifest.
        ours: noted beside the state; plain.
        may_lack: keys of the top level whose entries are left out if they cannot be written; in the full form
            what is no plain container has a pickle beside its plain form.
        may_differ: keys of the top level below which only what is spread is compared.
        elsewhere: writes a full checkpoint on the first rank, in another place than a file of this machine.

    Returns:
        The save, and names of what was left out.

    Raises:
        CheckpointError: on every rank: something cannot be written, or ranks have different states.
    """
    world = World()
    target = Path(target)

    def begin() -> Any:
        _require_no_notes(tree)
        made = plain(tree, may_lack)
        if world.rank == 0 and elsewhere is None:
            require_replaceable(target)
            sweep(target.parent)
        return made

    mine: list[Any] = []
    try:
        world.together(lambda: mine.append(begin()), lambda said: failed_save(target, said))
    except OSError as error:
        raise failed_save(target, told(error)) from error
    made = mine[0]
    require_same_states(world, target, lambda: made.tree, may_differ=may_differ)
    notes = {**(ours or {}), "notes": made.notes}
    objects, left_out = dict[str, bytes](), made.left_out
    if form == "full" and world.rank == 0:
        objects, left_out = pickled_objects(tree, may_lack)
    try:
        planned = FORMS[form](made.tree, notes, target, about or About(), objects)
        if isinstance(planned, FullSave):
            planned.elsewhere = elsewhere
        return planned, left_out
    except CheckpointError:
        raise
    except Exception as error:
        raise failed_save(target, told(error)) from error


def _require_no_notes(tree: dict[str, Any]) -> None:
    if OURS in tree:
        raise CheckpointError(
            f"the state has a key {OURS!r}, under which checkpoints keep their own notes. Give it another "
            "name."
        )


def finish(save: Save) -> None:
    """Write and complete a save. Collective.

    Raises:
        CheckpointError: on every rank: it could not be written; what was there before still is.
    """
    with _or_given_up(save):
        failure = _other(save)
        parts = save.world.together(save.write, failure)
        save.world.together(lambda: save.commit(parts) if save.world.rank == 0 else None, failure)


@contextmanager
def _or_given_up(save: Save) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, KeyboardInterrupt):
        save.give_up()
        raise
    except Exception as error:
        save.give_up()
        raise failed_save(save.target, told(error)) from error


def _other(save: Save) -> Any:
    return lambda said: failed_save(save.target, said)


def save_checkpoint(tree: dict[str, Any], target: str | Path, **options: Any) -> list[str]:
    """Save a state: ``plan`` and ``finish``, with the options of ``plan``."""
    planned, left_out = plan(tree, Path(target), **options)
    finish(planned)
    return left_out


class Background:
    """A save that goes on while training does: in a thread that neither sends nor waits for tensors.

    Beginning one is collective: training goes on once all ranks have copied their values. That it failed is
    logged at once. If nobody has asked for the error by the end of the program, that ends with status 120
    (but not in a worker that was forked: Python calls nothing of ``atexit`` there).

    Args:
        planned: the save; its values are copied before anything goes on.
        limit: seconds that the first rank waits for the others' parts.

    Raises:
        CheckpointError: on every rank: some cannot copy its values.
    """

    def __init__(self, planned: Save, limit: float = LIMIT) -> None:
        self.target = planned.target
        self._error = UnaskedError()
        self.is_first = True  # an error of it is no consequence of another rank's
        with _or_given_up(planned):
            planned.world.together(planned.copy, _other(planned))
        self._thread = threading.Thread(target=self._run, args=(planned, limit), name="checkpoint")
        self._thread.start()

    def _run(self, planned: Save, limit: float) -> None:
        try:
            planned.finish_alone(limit)
        except Exception as error:
            self.is_first = not isinstance(error, GivenUpError)
            made = failed_save(self.target, told(error))
            made.__cause__ = error
            _log.error("%s", made)
            self._error.have(made)

    @property
    def error(self) -> Exception | None:
        """Why it failed; whoever asks sees to it."""
        return self._error.ask()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended; whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()
