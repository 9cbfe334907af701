"""Library warnings once per job: every rank raises them, rank 0 shows them.

The other ranks drop what Python or a library's logger would write to the terminal. Every rank shows
errors, and warnings of the user's code and of this package, which may concern that rank only. Filters that
turn warnings into errors, ``catch_warnings(record=True)`` and a program's own ``warnings.showwarning`` get
all warnings. With ``LIGHTNING_CP_FULL_ERROR=1`` every rank shows everything.
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from lightning_cp import error_display

_PYTHON_S: Any = getattr(warnings, "_showwarning_orig", None)
"""Python's default ``warnings.showwarning``."""
_FROM_CPP = "(Triggered internally at"
"""Matches messages of PyTorch's C++ code, which has no Python frame."""
_DEPRECATED = {"warnings", "typing_extensions"}
"""Modules whose ``deprecated`` decorator warns on behalf of others."""


class LibraryWarnings(logging.Filter):
    """A switch that hides library warnings on this rank, also as a filter of the libraries' log
    handlers."""

    def __init__(self) -> None:
        super().__init__()
        self._hides = False
        self._before: Any = None
        self._hook: Any = None
        self._handlers: list[logging.Handler] = []

    def hide(self) -> None:
        """Hide warnings; called again, include handlers of modules imported since."""
        if error_display.is_full():
            return
        for handler in _terminal_handlers():
            if self not in handler.filters:
                handler.addFilter(self)
                self._handlers.append(handler)
        if not self._hides:
            self._hides, self._before = True, warnings.showwarning
            self._hook = warnings.showwarning = self._show_warning

    def show(self) -> None:
        """Undo ``hide``, except a hook that replaced ours since then."""
        self._hides = False
        for handler in self._handlers:
            handler.removeFilter(self)
        self._handlers.clear()
        if self._hook is not None and warnings.showwarning is self._hook:
            warnings.showwarning = self._shown_before()
        self._hook = None

    def _shown_before(self) -> Any:
        """Return the previous hook, skipping those of runs that have ended."""
        hook = self._before
        while isinstance(run := getattr(hook, "__self__", None), LibraryWarnings):
            if run._hides:
                break
            hook = run._before
        return hook

    def _show_warning(
        self, message: Any, category: Any, filename: str, lineno: int, *where: Any, **named: Any
    ) -> None:
        shown = not self._hides or any(where) or any(named.values()) or not self._is_for_terminal()
        if shown or not (_FROM_CPP in str(message) or _warns_in_library()):
            self._before(message, category, filename, lineno, *where, **named)

    def _is_for_terminal(self) -> bool:
        """True if Python itself would print the warning: no recording, no hook of the program."""
        before = self._shown_before()
        of_run = isinstance(getattr(before, "__self__", None), LibraryWarnings)
        prints = inspect.isfunction(getattr(warnings, "_showwarnmsg_impl", None))
        return prints and (of_run or before is _PYTHON_S)

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        """Drop warnings of libraries; lower levels were requested by the user, higher ones are errors."""
        of_library = error_display.is_library(record.name)
        return not (self._hides and of_library and record.levelno == logging.WARNING)


def _warns_in_library() -> bool:
    """True if a library's code called ``warnings.warn``, wherever ``stacklevel`` points."""
    frame: Any = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__") in {__name__, *_DEPRECATED}:
        frame = frame.f_back
    return error_display.is_library_frame(frame)


def _terminal_handlers() -> Iterator[logging.Handler]:
    """Return the handlers that write library logs to the terminal, those of parent loggers included."""
    named = logging.root.manager.loggerDict.items()
    loggers = [one for name, one in named if error_display.is_library(name)]
    handlers = [
        handler for one in (logging.root, *loggers) for handler in getattr(one, "handlers", [])
    ]
    terminal = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for handler in [*handlers, *filter(None, [logging.lastResort])]:
        if getattr(handler, "stream", None) in terminal:
            yield handler
