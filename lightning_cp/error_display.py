"""Display of the package's errors by one rank of a machine: once, last, with only the user's own frames.

Python shows an error in every process that it ends, with every frame. Here the failed ranks of a machine meet
in a folder, where each writes a card. The lowest rank whose error is not a report of another rank's error
shows it, after the others have named that rank in one line. No rank ends before that, because launchers end
all processes when one has ended. With ``LIGHTNING_CP_FULL_ERROR=1`` every rank shows all, as Python does, and
none ends before the others have.

The first error installs the hooks, so programs without an error are not changed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

from lightning_cp.utils.signals import signal_handler

FULL = "LIGHTNING_CP_FULL_ERROR"
"""``1``: every rank shows its error with all frames."""
ELECTION_SECONDS = 4.0
"""Seconds to wait for the other failed ranks of the machine."""
SHOWING = 8.0
"""Seconds that the other ranks wait until the error is shown."""

RANKS_HERE = "LIGHTNING_CP_RANKS_HERE"
"""Environment variable with the number of ranks on this machine, set by launchers that set no other."""

_HYDRA_FULL = "HYDRA_FULL_ERROR"
_asked_hydra = os.environ.get(_HYDRA_FULL) == "1"  # the user's value, before this file sets it
_LIBRARIES = {
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"),
    *("hydra", "jsonargparse", "omegaconf", "torch"),
    *("accelerate", "huggingface_hub", "peft", "tokenizers", "transformers"),
}
_OWN_FOLDER, _PYTHON = str(Path(__file__).parent), sysconfig.get_path("stdlib")

Listener = Callable[[BaseException], None]
_listeners: list[weakref.WeakMethod[Listener]] = []
_ours: type[BaseException] | None = None
"""The base class of the package's errors; ``None`` until the first error."""


class RankTraceback(Exception):  # noqa: N818 - the cause of an error, not one
    """The traceback of another process.

    Args:
        text: the whole traceback.
        frames: only the user's frames.
    """

    def __init__(self, text: str, frames: str = "") -> None:
        super().__init__(text)
        self.frames = frames


@dataclass(frozen=True)
class ProcessPlace:
    """The place of this process among those of its machine."""

    rank: int = 0
    name: str = "rank 0"
    """The name in messages, such as ``rank 2 (cp_rank 1 of 4, data_rank 0)``."""
    count: int = 1
    """Ranks of this machine."""
    launches: bool = False
    """True if this process started the others; else a launcher started all of them."""


_place: ProcessPlace | None = None


def set_place(place: ProcessPlace) -> None:
    """Set the place of this process, in place of the one from the environment."""
    global _place
    _place = place


def is_full() -> bool:
    """True if every rank shows its whole error."""
    return os.environ.get(FULL) == "1" or _asked_hydra


def is_ours(error: object) -> bool:
    """True for an error of this package."""
    return _ours is not None and isinstance(error, _ours)


def install(kind: type[BaseException]) -> None:
    """Install the display for errors of this kind that end the program."""
    global _ours
    _ours = kind
    _listen()
    _follow_hydra()


def add_listener(method: Listener) -> None:
    """Register a method that receives the error that ends the program, before it is shown."""
    _listeners.append(weakref.WeakMethod(method))
    _listen()


def remove_listener(method: Listener) -> None:
    """Remove a method that :func:`add_listener` registered."""
    _listeners[:] = [one for one in _listeners if one() not in (None, method)]
    if not _listeners and _ours is None and isinstance(sys.excepthook, _Hook):
        sys.excepthook = sys.excepthook.before


def _listen() -> None:
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Python's hook for uncaught errors.

    Args:
        before: the previous hook, which shows errors of other packages.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not is_ours(error):
            _notify(error)
            self.before(kind, error, trace)
        elif is_full():
            show(error, lambda: self.before(kind, error, trace))
        else:
            show(error, self._other_hook(kind, error, trace))

    def _other_hook(self, *error: Any) -> Callable[[], None] | None:
        """Return a call of the program's hook, if it has one besides Python's and PyTorch's."""
        hook = self.before
        # PyTorch installs one for each process group, to mark lines with the rank.
        while inspect.isfunction(hook):
            within = inspect.getclosurevars(hook).nonlocals.get("old_hook")
            if within is None:
                break
            hook = within
        if hook is sys.__excepthook__ or isinstance(hook, _Hook):
            return None
        return lambda: hook(*error)


def _notify(error: BaseException) -> None:
    for listener in list(_listeners):
        if (method := listener()) is not None:
            method(error)


def show(error: BaseException, act: Callable[[], None] | None = None) -> None:
    """Show an error that ends this process; one of this package's is shown by one rank, the others name it.

    Args:
        error: an error of any kind.
        act: function that shows it; by default to stderr.
    """
    act = act or (lambda: write(text_of(error)))
    # A launcher ends the others after a failure, but the error comes first.
    with signal_handler(signal.SIG_IGN, signal.SIGTERM):
        election = ErrorElection.here() if is_ours(error) else None
        if election is not None and not is_full():
            election.show(error, act)
            return
        _notify(error)
        act()
        if election is not None:
            election.wait()


def write(text: str) -> None:
    """Write a text to stderr in one piece, on a new line after a progress bar."""
    with suppress(OSError, ValueError):  # stderr is closed
        print(f"\n{text.rstrip()}", file=sys.stderr, flush=True)


def text_of(error: BaseException) -> str:
    """Return the user's frames and the message for an error of this package; else Python's traceback."""
    if is_full() or not is_ours(error):
        return "".join(traceback.format_exception(error))
    frames, who = user_frames(error), f" of {_here().name}" * (_here().count > 1)
    head = f"Traceback{who}, your own frames ({FULL}=1 shows all, of every rank):\n{frames}"
    return (
        f"{head if frames else f'{FULL}=1 shows where this was raised:{chr(10)}'}{line_of(error)}"
    )


def line_of(error: BaseException) -> str:
    """Return type and message, as in ``ConfigError: ...``."""
    return f"{type(error).__name__}: {error}"


def short_line_of(error: BaseException) -> str:
    """Return the beginning of :func:`line_of`, for ranks that do not show the error."""
    first = line_of(error).splitlines()[0]
    return f"{first[:200]}{'...' * (len(first) > 200)}"


def user_frames(error: BaseException) -> str:
    """Return the user's frames of an error and of what caused it, in Python's format, outermost first."""
    lines: list[str] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:  # an error may be its own cause
        seen.add(id(at))
        if isinstance(at, RankTraceback):
            lines.append(at.frames)
            break
        walk = traceback.walk_tb(at.__traceback__)
        own = ((frame, line) for frame, line in walk if _is_user_frame(frame))
        lines.extend(traceback.StackSummary.extract(own).format())
        at = at.__cause__
    return "".join(lines)


class SourceLine(NamedTuple):
    """The line of code of a warning."""

    filename: str
    lineno: int
    module: str
    registry: dict[Any, Any]
    """The module's registry of warnings, with which Python shows each once."""


def user_line() -> SourceLine:
    """Return the innermost line of user code on the stack; without one, the caller's line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user_frame(frame):
        frame = frame.f_back
    found = frame or sys._getframe(1)
    names = found.f_globals
    registry = names.setdefault("__warningregistry__", {})
    return SourceLine(found.f_code.co_filename, found.f_lineno, names.get("__name__", ""), registry)


def warn(message: str, line: SourceLine | None = None) -> None:
    """Warn about the user's code at one of its lines, by default :func:`user_line`."""
    warnings.warn_explicit(message, UserWarning, *(line or user_line()))


def _is_user_frame(frame: FrameType) -> bool:
    return not is_library_frame(frame) and not frame.f_code.co_filename.startswith(_OWN_FOLDER)


def is_library(module: str) -> bool:
    """True if a module, or the logger of its name, belongs to a library of Lightning programs."""
    return module.partition(".")[0] in _LIBRARIES


def is_library_frame(frame: FrameType) -> bool:
    """True if a frame belongs to such a library, or to Python's standard library."""
    path = frame.f_code.co_filename
    if is_library(str(frame.f_globals.get("__name__", ""))) or path.startswith("<frozen"):
        return True
    return path.startswith(_PYTHON) and "-packages" not in path


def error_of(cause: object) -> BaseException | None:
    """Return this package's error, itself or wrapped by Hydra; else ``None``."""
    while isinstance(cause, BaseException) and not is_ours(cause):
        cause = cause.__cause__ if type(cause).__module__.startswith("hydra.") else None
    return cause if isinstance(cause, BaseException) else None


# -- ranks of one machine ------------------------------------------------------------------------------


class ErrorElection:
    """A folder in which the failed ranks of one machine agree on the one that shows the error.

    Args:
        folder: the same folder for all of them.
        place: this rank's place.
    """

    def __init__(self, folder: Path, place: ProcessPlace) -> None:
        self._folder, self._place = folder, place

    @classmethod
    def here(cls) -> ErrorElection | None:
        """Return the election of this machine; ``None`` for a single rank, or without a folder."""
        place = _here()
        if place.count < 2:
            return None
        folder = Path(tempfile.gettempdir(), f"lightning_cp-error-{_name(place)}")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            return cls(folder, place) if folder.lstat().st_uid == os.getuid() else None
        except OSError:
            return None

    def show(self, error: BaseException, act: Callable[[], None]) -> None:
        """Show the error if this rank is elected, else write one line that names the elected rank."""
        kind = "report" if not getattr(error, "is_own", True) else "own"
        self._leave("card", kind, self._place.name, type(error).__name__, str(error))
        _notify(error)
        self._wait(lambda: len(self._cards()) >= self._place.count, ELECTION_SECONDS)
        cards = self._cards()
        rank = self._rank_that_shows(cards)
        if rank != self._place.rank:
            self._end(self._line(error, cards[rank]))
            return
        self._wait(lambda: len(self._there("line")) >= len(self._cards()) - 1, ELECTION_SECONDS)
        act()
        if len(self._cards()) < self._place.count:
            self._leave("shown")  # for a rank that arrives later
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self) -> None:
        """Wait until every rank has shown its whole error."""
        self._leave("card", "full", self._place.name, "", "")
        self._wait(
            lambda: len(self._cards()) >= self._place.count or not self._folder.exists(),
            ELECTION_SECONDS,
        )
        if len(self._cards()) >= self._place.count:
            shutil.rmtree(self._folder, ignore_errors=True)

    def give_way(self, line: str) -> None:
        """End this rank because of another rank's error."""
        self._leave("card", "ended", self._place.name, "", "")
        self._end(line, any(card[0] == "own" for card in self._cards().values()))

    def _end(self, line: str, waits: bool = True) -> None:
        write(line)
        self._leave("line")
        if waits:
            self._wait(lambda: bool(self._there("shown")) or not self._folder.exists(), SHOWING)

    def _line(self, error: BaseException, shown: tuple[str, ...]) -> str:
        _, name, kind, message = shown
        own = self._place.name
        if getattr(error, "is_own", True) and (type(error).__name__, str(error)) != (kind, message):
            return f"{own} ended with {short_line_of(error)} ({name} shows its own)"
        return f"{own} ended: {name} shows the {kind}"

    def _rank_that_shows(self, cards: dict[int, tuple[str, ...]]) -> int:
        """Return the lowest rank with its own error, unless a rank has claimed the display already."""
        own = [rank for rank, card in cards.items() if card[0] == "own"]
        reports = [rank for rank, card in cards.items() if card[0] == "report"]
        elected = min(own or reports, default=self._place.rank)
        claim = self._folder / "claim"
        if elected == self._place.rank:
            with suppress(OSError), claim.open("x") as file:
                file.write(str(elected))
        with suppress(OSError, ValueError):
            claimed = int(claim.read_text())
            elected = claimed if claimed in cards else elected
        return elected

    def _cards(self) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        for path in self._there("card"):
            with suppress(OSError, ValueError):
                found[int(path.stem)] = tuple(json.loads(path.read_text()))
        return found

    def _there(self, kind: str) -> list[Path]:
        with suppress(OSError):  # another rank removes the folder at the end
            return list(self._folder.glob(f"*.{kind}"))
        return []

    def _leave(self, kind: str, *text: str) -> None:
        """Write a file atomically, also where a watcher's thread writes another one."""
        path = self._folder / f"{self._place.rank}.{kind}"
        with suppress(OSError):
            part = path.with_name(f"{path.name}-{threading.get_ident()}")
            part.write_text(json.dumps(text))
            part.rename(path)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)


def _here() -> ProcessPlace:
    """Return this process's place, as set by :func:`set_place` or from the environment."""
    if _place is not None or (local := _number("LOCAL_RANK", "SLURM_LOCALID")) is None:
        return _place or ProcessPlace()
    rank = _number("RANK", "SLURM_PROCID")
    rank = local if rank is None else rank
    names = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", RANKS_HERE, "WORLD_SIZE")
    count = _number(*names) or 1
    return ProcessPlace(rank, f"rank {rank}", count)


def _number(*names: str) -> int | None:
    return next(
        (int(value) for name in names if (value := os.environ.get(name, "")).isdigit()), None
    )


def _name(place: ProcessPlace) -> str:
    """Return a name unique to the launcher process and this attempt, equal on all of its ranks."""
    root, began = os.getpid() if place.launches else os.getppid(), ""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{root}/stat").read_text().rpartition(")")[2].split()[19]
    names = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    attempt = [os.environ.get(name) for name in names]
    return hashlib.sha256(repr((os.getuid(), root, began, attempt)).encode()).hexdigest()[:16]


# -- Hydra ---------------------------------------------------------------------------------------------


class _JobReturn(Protocol):
    """Hydra's result of a job."""

    _return_value: Any


def _follow_hydra() -> None:
    """Make Hydra's jobs raise this package's errors unchanged, instead of showing them in each process."""
    result = getattr(sys.modules.get("hydra.core.utils"), "JobReturn", None)
    own = getattr(result, "return_value", None)
    if own is None or getattr(own.fget, "__module__", None) == __name__:
        return

    def value(self: _JobReturn) -> Any:
        error = error_of(self._return_value)
        if error is None:
            return own.fget(self)
        os.environ[_HYDRA_FULL] = "1"  # so that Hydra raises, too
        raise error

    result.return_value = property(value, own.fset)  # type: ignore[union-attr]
