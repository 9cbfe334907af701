"""Waits for messages, noted for the watchdog: a GPU may wait for other ranks, or not finish its own work."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

marks: tuple[Callable[[bool], None], ...] = ()
"""Called with True before a stream waits for messages, and with False after it; replaced as a whole."""


def wait_for(*works: dist.Work) -> None:
    """Have the present stream wait for messages; a CPU waits itself."""
    for mark in marks:
        mark(True)
    for work in works:
        work.wait()
    for mark in marks:
        mark(False)
