"""Errors of ours on a terminal that several ranks write to: each once, last, with the user's own frames.

Python shows an error in every process that it ends, with every frame. Here the ranks of a machine that end
with an error meet in a folder, where each leaves a card. The lowest rank whose error is no report of another
rank's shows it, once the others have named that rank in one line; nobody ends before that, since launchers
end all processes when one has ended. ``LIGHTNING_CP_FULL_ERROR=1``: every rank shows all, as Python does.

Errors install the hooks when the first one is made, so that programs without one are left alone.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

FULL = "LIGHTNING_CP_FULL_ERROR"
"""``1``: every rank shows its error with all frames."""
MEETING = 4.0
"""Seconds in which the other ranks of a machine come, which have an error as well."""
SHOWING = 8.0
"""Seconds that the others wait until the error is shown."""

RANKS_HERE = "LIGHTNING_CP_RANKS_HERE"
"""How many ranks a launcher has started on this machine, in their environment, where it sets no other."""

_HYDRA_FULL = "HYDRA_FULL_ERROR"
_asked_hydra = os.environ.get(_HYDRA_FULL) == "1"  # before it is set here
_LIBRARIES = {
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"),
    *("hydra", "jsonargparse", "omegaconf", "torch"),
    *("accelerate", "huggingface_hub", "peft", "tokenizers", "transformers"),
}
_OWN_FOLDER, _PYTHON = str(Path(__file__).parent), sysconfig.get_path("stdlib")

Listener = Callable[[BaseException], None]
_listeners: list[weakref.WeakMethod[Listener]] = []
_ours: type[BaseException] | None = None
"""The base of the errors; ``None`` until the first one is made."""


class RankTraceback(Exception):  # noqa: N818 - the cause of an error, not one
    """The traceback of another process.

    Args:
        text: all of it.
        frames: the user's own.
    """

    def __init__(self, text: str, frames: str = "") -> None:
        super().__init__(text)
        self.frames = frames


@dataclass(frozen=True)
class Seat:
    """This process among those of its machine."""

    rank: int = 0
    name: str = "rank 0"
    """As in ``rank 2 (cp_rank 1 of 4, data_rank 0)``."""
    count: int = 1
    """Ranks of this machine."""
    launches: bool = False
    """This process has started the others; else somebody has started all of them."""


_seat: Seat | None = None


def take(seat: Seat) -> None:
    """Say which rank this process is, once that is known better than from the environment."""
    global _seat
    _seat = seat


def is_full() -> bool:
    """Every rank shows all of its error."""
    return os.environ.get(FULL) == "1" or _asked_hydra


def is_ours(error: object) -> bool:
    """True if it is an error of this package."""
    return _ours is not None and isinstance(error, _ours)


def install(kind: type[BaseException]) -> None:
    """Show errors of this kind, if they end the program, as this file says."""
    global _ours
    _ours = kind
    _listen()
    _follow_hydra()


def listen(method: Listener) -> None:
    """Have an object's method called with the error that ends the program, before it is shown."""
    _listeners.append(weakref.WeakMethod(method))
    _listen()


def leave(method: Listener) -> None:
    """Take that back."""
    _listeners[:] = [one for one in _listeners if one() not in (None, method)]
    if not _listeners and _ours is None and isinstance(sys.excepthook, _Hook):
        sys.excepthook = sys.excepthook.before


def _listen() -> None:
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Python's hook for errors that nobody has caught.

    Args:
        before: the hook that was there; it shows errors that are not ours.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if is_ours(error) and not is_full():
            show(error, self._program_s_own(kind, error, trace))
            return
        _tell(error)
        self.before(kind, error, trace)

    def _program_s_own(self, *error: Any) -> Callable[[], None] | None:
        """The program's own hook, called with an error, if there is one besides Python's and PyTorch's."""
        hook = self.before
        # PyTorch's, one for each process group, mark lines with the rank.
        while inspect.isfunction(hook):
            within = inspect.getclosurevars(hook).nonlocals.get("old_hook")
            if within is None:
                break
            hook = within
        if hook is sys.__excepthook__ or isinstance(hook, _Hook):
            return None
        return lambda: hook(*error)


def _tell(error: BaseException) -> None:
    for listener in list(_listeners):
        if (method := listener()) is not None:
            method(error)


def show(error: BaseException, act: Callable[[], None] | None = None) -> None:
    """Show an error that ends this process; of ours, one rank of a machine does, and the others say which.

    Args:
        error: of any kind.
        act: shows it in another way.
    """
    act = act or (lambda: write(text_of(error)))
    with _without_sigterm():
        meeting = Meeting.here() if is_ours(error) and not is_full() else None
        if meeting is None:
            _tell(error)
            act()
        else:
            meeting.show(error, act)


def write(text: str) -> None:
    """In one piece, after a progress bar."""
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(f"\n{text.rstrip()}", file=sys.stderr, flush=True)


def text_of(error: BaseException) -> str:
    """The message of an error of ours, after the user's own frames; else what Python shows."""
    if is_full() or not is_ours(error):
        return "".join(traceback.format_exception(error))
    frames, who = user_frames(error), f" of {_here().name}" * (_here().count > 1)
    head = f"Traceback{who}, your own frames ({FULL}=1 shows all, of every rank):\n{frames}"
    return (
        f"{head if frames else f'{FULL}=1 shows where this was raised:{chr(10)}'}{line_of(error)}"
    )


def line_of(error: BaseException) -> str:
    """``ConfigError: ...``."""
    return f"{type(error).__name__}: {error}"


def short_line_of(error: BaseException) -> str:
    """The beginning of that, for ranks that do not show the error."""
    first = line_of(error).splitlines()[0]
    return f"{first[:200]}{'...' * (len(first) > 200)}"


def user_frames(error: BaseException) -> str:
    """The frames of a traceback that are the user's, as Python shows them."""
    walk = traceback.walk_tb(error.__traceback__)
    own = traceback.StackSummary.extract((frame, at) for frame, at in walk if _is_user_s(frame))
    cause = error.__cause__
    return "".join(own.format()) + (cause.frames if isinstance(cause, RankTraceback) else "")


class Line(NamedTuple):
    """A line of code that a warning points at."""

    filename: str
    lineno: int
    module: str
    registry: dict[Any, Any]
    """What was said of its module, by which Python says a thing once."""


def user_line() -> Line:
    """The innermost line of the user's that this is called from; without one, the caller's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user_s(frame):
        frame = frame.f_back
    found = frame or sys._getframe(1)
    names = found.f_globals
    registry = names.setdefault("__warningregistry__", {})
    return Line(found.f_code.co_filename, found.f_lineno, names.get("__name__", ""), registry)


def warn(message: str, line: Line | None = None) -> None:
    """Warn of the user's code, at a line of it: by default the innermost that this is called from."""
    warnings.warn_explicit(message, UserWarning, *(line or user_line()))


def _is_user_s(frame: FrameType) -> bool:
    return not is_library_s(frame) and not frame.f_code.co_filename.startswith(_OWN_FOLDER)


def is_library(module: str) -> bool:
    """True if a module, or the logger of its name, is of a library that programs of Lightning are made of."""
    return module.partition(".")[0] in _LIBRARIES


def is_library_s(frame: FrameType) -> bool:
    """True if code is of such a library, or of Python's own."""
    path = frame.f_code.co_filename
    if is_library(str(frame.f_globals.get("__name__", ""))) or path.startswith("<frozen"):
        return True
    return path.startswith(_PYTHON) and "-packages" not in path


def error_of(cause: object) -> BaseException | None:
    """The error of ours that this is, or that Hydra has wrapped in its own."""
    while isinstance(cause, BaseException) and not is_ours(cause):
        cause = cause.__cause__ if type(cause).__module__.startswith("hydra.") else None
    return cause if isinstance(cause, BaseException) else None


# -- ranks of one machine ------------------------------------------------------------------------------


class Meeting:
    """A folder where the ranks of one machine that end with an error find each other.

    Args:
        folder: the same for all of them.
        seat: this rank's.
    """

    def __init__(self, folder: Path, seat: Seat) -> None:
        self._folder, self._seat = folder, seat

    @classmethod
    def here(cls) -> Meeting | None:
        """This process's; ``None``: it is alone, or there is no room."""
        seat = _here()
        if seat.count < 2:
            return None
        folder = Path(tempfile.gettempdir(), f"lightning_cp-error-{_name(seat)}")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            return cls(folder, seat) if folder.lstat().st_uid == os.getuid() else None
        except OSError:
            return None

    def show(self, error: BaseException, act: Callable[[], None]) -> None:
        """Act if this rank is the one to show its error, else say in one line who is."""
        kind = "report" if not getattr(error, "is_own", True) else "own"
        self._leave("card", kind, self._seat.name, type(error).__name__, str(error))
        _tell(error)
        self._wait(lambda: len(self._cards()) >= self._seat.count, MEETING)
        cards = self._cards()
        rank = self._rank_that_shows(cards)
        if rank != self._seat.rank:
            self._end(self._line(error, cards[rank]))
            return
        self._wait(lambda: len(self._there("line")) >= len(self._cards()) - 1, MEETING)
        act()
        if len(self._cards()) < self._seat.count:
            self._leave("shown")  # for one that comes later
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def give_way(self, line: str) -> None:
        """This rank ends because of another one's error."""
        self._leave("card", "ended", self._seat.name, "", "")
        self._end(line, any(card[0] == "own" for card in self._cards().values()))

    def _end(self, line: str, waits: bool = True) -> None:
        write(line)
        self._leave("line")
        if waits:
            self._wait(lambda: bool(self._there("shown")) or not self._folder.exists(), SHOWING)

    def _line(self, error: BaseException, shown: tuple[str, ...]) -> str:
        _, name, kind, message = shown
        own = self._seat.name
        if getattr(error, "is_own", True) and (type(error).__name__, str(error)) != (kind, message):
            return f"{own} ended with {short_line_of(error)} ({name} shows its own)"
        return f"{own} ended: {name} shows the {kind}"

    def _rank_that_shows(self, cards: dict[int, tuple[str, ...]]) -> int:
        """The lowest rank with an error that is its own, unless one has claimed that already."""
        own = [rank for rank, card in cards.items() if card[0] == "own"]
        reports = [rank for rank, card in cards.items() if card[0] == "report"]
        elected = min(own or reports, default=self._seat.rank)
        claim = self._folder / "claim"
        if elected == self._seat.rank:
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
        """A file, which is there as a whole or not at all."""
        path = self._folder / f"{self._seat.rank}.{kind}"
        with suppress(OSError):
            part = path.with_suffix(".part")
            part.write_text(json.dumps(text))
            part.rename(path)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)


def _here() -> Seat:
    """The seat that was given to this process, or that its environment tells."""
    if _seat is not None or (local := _number("LOCAL_RANK", "SLURM_LOCALID")) is None:
        return _seat or Seat()
    rank = _number("RANK", "SLURM_PROCID")
    rank = local if rank is None else rank
    names = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", RANKS_HERE, "WORLD_SIZE")
    count = _number(*names) or 1
    return Seat(rank, f"rank {rank}", count)


def _number(*names: str) -> int | None:
    return next(
        (int(value) for name in names if (value := os.environ.get(name, "")).isdigit()), None
    )


def _name(seat: Seat) -> str:
    """Of the process that has started the ranks, and of this attempt: the same for all, and for no others."""
    root, began = os.getpid() if seat.launches else os.getppid(), ""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{root}/stat").read_text().rpartition(")")[2].split()[19]
    names = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    attempt = [os.environ.get(name) for name in names]
    return hashlib.sha256(repr((os.getuid(), root, began, attempt)).encode()).hexdigest()[:16]


@contextmanager
def _without_sigterm() -> Iterator[None]:
    """A launcher ends the others once one has failed: here the error comes first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: of a library in C


# -- Hydra ---------------------------------------------------------------------------------------------


def _follow_hydra() -> None:
    """Errors of ours leave Hydra's job as they are: it would show them in each process, and exit."""
    result = getattr(sys.modules.get("hydra.core.utils"), "JobReturn", None)
    own = getattr(result, "return_value", None)
    if own is None or getattr(own.fget, "__module__", None) == __name__:
        return

    def value(self: Any) -> Any:
        error = error_of(self._return_value)
        if error is None:
            return own.fget(self)
        os.environ[_HYDRA_FULL] = "1"  # Hydra raises, too, instead of showing
        raise error

    result.return_value = property(value, own.fset)  # type: ignore[union-attr]
