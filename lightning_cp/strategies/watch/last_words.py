"""SIGTERM that comes because another rank was lost: whoever has started the ranks ends the others at once.

torchrun's agent and PyTorch's ``spawn`` do, maybe before the others have said which rank it was, and where.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from lightning_cp.faults.watch import Watch

SOON = 2.0
"""Seconds in which a lost rank is heard of: its connection has closed already."""


class LastWords:
    """A handler that ends the process, as SIGTERM does by default, once it has had time to say why.

    Args:
        watch: says it, and ends the process by itself, if another rank was lost.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def begin(self) -> None:
        """From here on, unless the program handles SIGTERM in a way of its own."""
        in_main = threading.current_thread() is threading.main_thread()  # no other one may
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self)

    def end(self) -> None:
        """As before, unless somebody has set another handler since."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __call__(self, number: int, frame: Any) -> None:
        self._watch.hear(SOON)
        self.end()
        os.kill(os.getpid(), signal.SIGTERM)
