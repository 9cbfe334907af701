"""What a case may change in its worker, and how it is put back."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch

Filters = tuple[tuple[str, str, Any, str, int], ...]
"""Warning filters, most important first: (action, message regex, category, module regex, line)."""

GC_THRESHOLD = (20_000, 20, 100)
"""Less often than by default, with which collecting takes a fifth of a case's time."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def current_filters() -> Filters:
    """The warning filters in force here; inside a test these are pytest's."""
    return tuple(
        (action, _regex(message), category, _regex(module), line)
        for action, message, category, module, line in warnings.filters
    )


def _regex(pattern: Any) -> str:
    if pattern is None:
        return ""
    return re.escape(pattern) + r"\Z" if isinstance(pattern, str) else str(pattern.pattern)


@contextmanager
def isolated(filters: Filters, directory: str) -> Iterator[None]:
    """Run a case in ``directory`` from a known state; restore environment, signals and torch after.

    Seeds and torch's modes are set on entry, so that a case never sees what another one left.
    """
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = os.getcwd()  # noqa: PTH109 - restored as it was, not as it resolves
    os.chdir(directory)
    _reset_torch()
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for action, message, category, module, line in reversed(filters):
                warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]
            yield
    finally:
        os.chdir(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
        _reset_torch()


def _reset_torch() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


class Unraisables:
    """Collects errors that Python can only print: in ``__del__`` and in threads.

    A ResourceWarning made an error ends up here, as it does under pytest.
    """

    def __init__(self) -> None:
        self._found: list[str] = []

    def __enter__(self) -> Unraisables:
        self._hooks = sys.unraisablehook, threading.excepthook
        sys.unraisablehook = self._unraisable
        threading.excepthook = self._in_thread
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        sys.unraisablehook, threading.excepthook = self._hooks

    def check(self) -> None:
        """Raise if any were collected."""
        if self._found:
            raise RuntimeError("the case left errors behind:\n" + "\n".join(self._found))

    def _unraisable(self, found: Any) -> None:
        where = f"{found.err_msg or 'Exception ignored in'}: {found.object!r}"
        self._add(where, found.exc_type, found.exc_value, found.exc_traceback)

    def _in_thread(self, found: Any) -> None:
        name = found.thread.name if found.thread else "?"
        self._add(f"thread {name}", found.exc_type, found.exc_value, found.exc_traceback)

    def _add(self, where: str, kind: Any, error: Any, tb: Any) -> None:
        self._found.append(where + "\n" + "".join(traceback.format_exception(kind, error, tb)))
