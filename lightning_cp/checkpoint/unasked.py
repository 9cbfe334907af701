"""How a program ends in which a save in the background has failed and nobody has asked: not with status 0.

Python has the status by the time that it calls anything at the end, and tells nobody; whatever comes later
can only have 120 in its place, as its documentation of ``sys.exit`` has it for output that cannot be flushed.
So what the status is going to be has to be found out: by what ``sys.exit`` was called with, and by where the
program has stopped.
"""

from __future__ import annotations

import atexit
import dis
import functools
import io
import sys
import threading
from types import FrameType
from typing import Any, TypeGuard

_asked: list[Any] = []
"""What the main thread has called ``sys.exit`` with, the last time."""


class UnaskedError:
    """An error that takes the place of status 0 once it is there, until somebody asks for it.

    Made while the program runs: it has to see where that begins, and what it exits with.
    """

    def __init__(self) -> None:
        self._begun = _outermost(sys._current_frames().get(threading.main_thread().ident or 0))
        self._error: Exception | None = None
        _note_exits()

    def have(self, error: Exception) -> None:
        """There is one."""
        self._error = error
        atexit.register(self._end_badly)

    def ask(self) -> Exception | None:
        """The error; whoever asks sees to it."""
        atexit.unregister(self._end_badly)
        return self._error

    def _end_badly(self) -> None:
        error = self._error
        if error is None or _ends_badly_anyway(self._begun):
            return
        if not _is_open(sys.stdout):
            sys.stdout = io.StringIO()
        raised: list[Exception] = []
        for stream in (
            sys.stdout,
            sys.__stdout__,
        ):  # who has put one in the other's place may undo that
            if _is_open(stream):
                stream.flush = functools.partial(_flush, stream.flush, error, raised)


def _is_open(stream: Any) -> TypeGuard[Any]:
    return stream is not None and not getattr(stream, "closed", False)


def _flush(own: Any, error: Exception, raised: list[Exception]) -> None:
    """Fail where Python itself flushes last, which shows the error; what others do before is done.

    Raises:
        Exception: the error, once.
    """
    own()
    if sys.is_finalizing() and not raised:
        raised.append(error)
        raise error


def _note_exits() -> None:
    own = sys.exit
    if getattr(own, "notes", None) is _asked:
        return

    @functools.wraps(own)
    def noting(*status: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            _asked[:] = status
        own(*status)

    noting.notes = _asked  # type: ignore[attr-defined]
    sys.exit = noting  # type: ignore[assignment]


def _outermost(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _ends_badly_anyway(begun: FrameType | None) -> bool:
    """Whether the status is another one than 0, as far as it can be known.

    It is not known of a ``SystemExit`` that was raised without ``sys.exit``.
    """
    if begun is None or _returned(begun):
        return False  # and if something was raised before, it was caught
    if getattr(sys, "last_value", None) is not None:
        return True  # it was shown, as nobody had caught it
    status = _asked[0] if _asked else None
    return bool(status & 0xFF) if isinstance(status, int) else status is not None


def _returned(frame: FrameType) -> bool:
    """Whether it came to its end, and nothing was raised out of it: its last instruction tells."""
    last = frame.f_code.co_code[frame.f_lasti] if frame.f_lasti >= 0 else 0
    return dis.opname[last].startswith("RETURN")
