"""Saving a state, at once or in the background; every rank learns whether it worked."""

from __future__ import annotations

import atexit
import functools
import io
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from lightning_cp.checkpoint.atomic import GivenUpError, save_error, sweep
from lightning_cp.checkpoint.consistency import check_same_states
from lightning_cp.checkpoint.full import NOTES_KEY, FullSave, plan_full
from lightning_cp.checkpoint.manifest import SaveInfo, check_replaceable
from lightning_cp.checkpoint.objects import pickled_objects
from lightning_cp.checkpoint.sharded import plan_sharded
from lightning_cp.checkpoint.tree import make_plain
from lightning_cp.comm.consensus import World, error_summary
from lightning_cp.errors import CheckpointError

# The end of a program whose save in the background has failed unasked: with status 120.
#
# Python has the status by the time that it calls anything at the end. What still changes it is an output
# that cannot be flushed, as the documentation of ``sys.exit`` has it; all else of the end is done before.


class UnretrievedError:
    """An error that ends the program with status 120 once it is there, until somebody asks for it."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def have(self, error: Exception) -> None:
        """There is one."""
        self._error = error
        atexit.register(self._end_badly)

    def ask(self) -> Exception | None:
        """The error; whoever asks sees to it."""
        atexit.unregister(self._end_badly)
        return self._error

    def _end_badly(self) -> None:
        assert self._error is not None
        if not _is_open(sys.stdout):
            sys.stdout = io.StringIO()
        raised: list[Exception] = []
        for stream in (sys.stdout, sys.__stdout__):  # who has replaced one may undo that
            if _is_open(stream):
                stream.flush = functools.partial(_flush, stream.flush, self._error, raised)


def _is_open(stream: Any) -> TypeGuard[Any]:
    return stream is not None and not getattr(stream, "closed", False)


def _flush(own: Callable[[], object], error: Exception, raised: list[Exception]) -> None:
    """Fail where Python itself flushes last, which shows the error; others at the end may flush.

    Raises:
        Exception: the error, once.
    """
    own()
    if sys.is_finalizing() and not raised:
        raised.append(error)
        raise error


FORMS = {"full": plan_full, "sharded": plan_sharded}
_log = logging.getLogger("lightning_cp")
WAIT_LIMIT = 1800.0
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


def plan_save(
    tree: dict[str, Any],
    target: Path,
    *,
    form: str = "full",
    about: SaveInfo | None = None,
    ours: dict[str, Any] | None = None,
    may_lack: Sequence[str] = (),
    may_differ: Collection[str] = (),
    elsewhere: Callable[[dict[str, Any], SaveInfo], None] | None = None,
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
        _check_no_notes(tree)
        made = make_plain(tree, may_lack)
        if world.rank == 0 and elsewhere is None:
            check_replaceable(target)
            sweep(target.parent)
        return made

    mine: list[Any] = []
    try:
        world.run_on_all(lambda: mine.append(begin()), lambda said: save_error(target, said))
    except OSError as error:
        raise save_error(target, error_summary(error)) from error
    made = mine[0]
    check_same_states(world, target, lambda: made.tree, may_differ=may_differ)
    notes = {**(ours or {}), "notes": made.notes}
    objects, left_out = dict[str, bytes](), made.left_out
    if form == "full" and world.rank == 0:
        objects, left_out = pickled_objects(tree, may_lack)
    try:
        planned = FORMS[form](made.tree, notes, target, about or SaveInfo(), objects)
        if isinstance(planned, FullSave):
            planned.elsewhere = elsewhere
        return planned, left_out
    except CheckpointError:
        raise
    except Exception as error:
        raise save_error(target, error_summary(error)) from error


def _check_no_notes(tree: dict[str, Any]) -> None:
    if NOTES_KEY in tree:
        raise CheckpointError(
            f"the state has a key {NOTES_KEY!r}, under which checkpoints keep their own notes. Give it "
            "another "
            "name."
        )


def finish_save(save: Save) -> None:
    """Write and complete a save. Collective.

    Raises:
        CheckpointError: on every rank: it could not be written; what was there before still is.
    """
    with _give_up_on_error(save):
        failure = _error_elsewhere(save)
        parts = save.world.run_on_all(save.write, failure)
        save.world.run_on_all(lambda: save.commit(parts) if save.world.rank == 0 else None, failure)


@contextmanager
def _give_up_on_error(save: Save) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, KeyboardInterrupt):
        save.give_up()
        raise
    except Exception as error:
        save.give_up()
        raise save_error(save.target, error_summary(error)) from error


def _error_elsewhere(save: Save) -> Any:
    return lambda said: save_error(save.target, said)


def save_checkpoint(tree: dict[str, Any], target: str | Path, **options: Any) -> list[str]:
    """Save a state: ``plan_save`` and ``finish_save``, with the options of ``plan_save``."""
    planned, left_out = plan_save(tree, Path(target), **options)
    finish_save(planned)
    return left_out


class BackgroundSave:
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

    def __init__(self, planned: Save, limit: float = WAIT_LIMIT) -> None:
        self.target = planned.target
        self._error = UnretrievedError()
        self.is_first = True  # an error of it is no consequence of another rank's
        with _give_up_on_error(planned):
            planned.world.run_on_all(planned.copy, _error_elsewhere(planned))
        self._thread = threading.Thread(target=self._run, args=(planned, limit), name="checkpoint")
        self._thread.start()

    def _run(self, planned: Save, limit: float) -> None:
        try:
            planned.finish_alone(limit)
        except Exception as error:
            self.is_first = not isinstance(error, GivenUpError)
            made = save_error(self.target, error_summary(error))
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
