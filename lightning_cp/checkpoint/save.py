"""Saving of a state, at once or in the background; every rank learns of an error."""

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

from lightning_cp.checkpoint.atomic import AbortedSaveError, save_error, sweep
from lightning_cp.checkpoint.consistency import check_same_states
from lightning_cp.checkpoint.full import NOTES_KEY, FullSave, plan_full
from lightning_cp.checkpoint.manifest import SaveInfo, check_replaceable
from lightning_cp.checkpoint.objects import pickled_objects
from lightning_cp.checkpoint.shards import plan_sharded
from lightning_cp.checkpoint.tree import make_plain
from lightning_cp.comm.consensus import World, error_summary
from lightning_cp.errors import CheckpointError

# Exit of a program whose save in the background failed, if the error was never retrieved: status 120.
#
# Python fixes the exit status before it calls any exit handler. Only an output that cannot be flushed still
# changes it, as documented for ``sys.exit``; everything else of the exit is done before.


class UnretrievedError:
    """An error that ends the program with status 120 unless it is retrieved."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def store(self, error: Exception) -> None:
        """Store the error."""
        self._error = error
        atexit.register(self._fail_exit)

    def retrieve(self) -> Exception | None:
        """Retrieve the error; the caller handles it."""
        atexit.unregister(self._fail_exit)
        return self._error

    def _fail_exit(self) -> None:
        assert self._error is not None
        if not _is_open(sys.stdout):
            sys.stdout = io.StringIO()
        raised: list[Exception] = []
        for stream in (sys.stdout, sys.__stdout__):  # code that replaced a stream may restore it
            if _is_open(stream):
                stream.flush = functools.partial(_flush, stream.flush, self._error, raised)


def _is_open(stream: Any) -> TypeGuard[Any]:
    return stream is not None and not getattr(stream, "closed", False)


def _flush(own: Callable[[], object], error: Exception, raised: list[Exception]) -> None:
    """Fail where Python itself flushes last, which shows the error; other exit handlers may flush.

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
"""Limit in seconds for which the first rank waits in the background for the others' parts."""


class Save(Protocol):
    """One save on one rank."""

    @property
    def target(self) -> Path:
        """The checkpoint."""
        ...

    @property
    def world(self) -> World:
        """All ranks."""
        ...

    def copy(self) -> None:
        """Copy the current values."""

    def write(self) -> Any:
        """Write this rank's part."""

    def commit(self, parts: list[Any]) -> None:
        """Complete the checkpoint."""

    def abort(self) -> None:
        """Remove what was written."""

    def finish_locally(self, limit: float) -> None:
        """Write and commit without communication."""


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
    """Plan a save, including all of its communication except that of ``finish_save``. Collective.

    Args:
        tree: the state; the first rank's values are saved, and all ranks' parts of ``DTensor``.
        target: the checkpoint.
        form: ``full`` or ``sharded``.
        about: for the manifest.
        ours: plain notes beside the state.
        may_lack: keys of the top level whose entries are left out if they cannot be written; in the full
            form, entries that are not plain containers have a pickle beside their plain form.
        may_differ: keys of the top level below which only distributed tensors are compared.
        elsewhere: writes a full checkpoint on the first rank, in another place than a file of this
            machine.

    Returns:
        The save, and names of entries that were left out.

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

    try:
        made = world.run_on_all(begin, lambda said: save_error(target, said))
    except OSError as error:
        raise save_error(target, error_summary(error)) from error
    check_same_states(world, target, lambda: made.tree, may_differ=may_differ)
    notes = {**(ours or {}), "notes": made.notes}
    objects, left_out = dict[str, bytes](), made.unwritable
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
        CheckpointError: on every rank: it could not be written; the former checkpoint is unchanged.
    """
    with _abort_on_error(save):
        failure = _error_elsewhere(save)
        parts = save.world.gather_results(save.write, failure)
        save.world.run_on_all(lambda: save.commit(parts) if save.world.rank == 0 else None, failure)


@contextmanager
def _abort_on_error(save: Save) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, KeyboardInterrupt):
        save.abort()
        raise
    except Exception as error:
        save.abort()
        raise save_error(save.target, error_summary(error)) from error


def _error_elsewhere(save: Save) -> Any:
    return lambda said: save_error(save.target, said)


def save_checkpoint(tree: dict[str, Any], target: str | Path, **options: Any) -> list[str]:
    """Save a state with ``plan_save`` and its options, then ``finish_save``."""
    planned, left_out = plan_save(tree, Path(target), **options)
    finish_save(planned)
    return left_out


class BackgroundSave:
    """A save during training, in a thread that does not communicate.

    Its start is collective: training continues once all ranks have copied their values. A failure is logged
    at once. If the error is not retrieved by the end of the program, the exit status is 120 (but not in a
    forked worker, where Python calls nothing of ``atexit``).

    Args:
        planned: the save; its values are copied first.
        limit: seconds for which the first rank waits for the others' parts.

    Raises:
        CheckpointError: on every rank: some rank cannot copy its values.
    """

    def __init__(self, planned: Save, limit: float = WAIT_LIMIT) -> None:
        self.target = planned.target
        self._error = UnretrievedError()
        self.is_first = True  # its error is no consequence of another rank's
        with _abort_on_error(planned):
            planned.world.run_on_all(planned.copy, _error_elsewhere(planned))
        self._thread = threading.Thread(target=self._run, args=(planned, limit), name="checkpoint")
        self._thread.start()

    def _run(self, planned: Save, limit: float) -> None:
        try:
            planned.finish_locally(limit)
        except Exception as error:
            self.is_first = not isinstance(error, AbortedSaveError)
            made = save_error(self.target, error_summary(error))
            made.__cause__ = error
            _log.error("%s", made)
            self._error.store(made)

    @property
    def error(self) -> Exception | None:
        """Retrieve the error; the caller handles it."""
        return self._error.retrieve()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end; return True if it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()
