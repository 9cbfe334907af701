"""Handlers of signals for the time of a block. This file imports neither torch nor lightning."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def may_handle_signals() -> bool:
    """True in the main thread; Python lets no other set handlers."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def signal_handler(handler: Any, *numbers: int) -> Iterator[None]:
    """Handle signals by ``handler`` within the block; in another thread than the main one, change nothing."""
    if not may_handle_signals():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in before.items():
            restore_handler(number, own)


def restore_handler(number: int, own: Any) -> None:
    """Set a handler that ``signal.signal`` or ``getsignal`` returned: ``None`` for one of a C library."""
    signal.signal(number, own or signal.SIG_DFL)
