"""The end of a program whose save in the background has failed unasked: with status 120.

Python has the status by the time that it calls anything at the end. What still changes it is an output
that cannot be flushed, as the documentation of ``sys.exit`` has it; all else of the end is done before.
"""

from __future__ import annotations

import atexit
import functools
import io
import sys
from collections.abc import Callable
from typing import Any, TypeGuard


class UnaskedError:
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
