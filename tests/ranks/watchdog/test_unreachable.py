"""A watcher that cannot be reached, as firewalls let one port through only: all ranks are told."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_cp.errors import ConfigError
from lightning_cp.watchdog import watch
from lightning_cp.watchdog.phase import Position
from lightning_cp.watchdog.watch import SWITCH, Watch
from tests.helpers import pool


def _start(rank: int, world_size: int, folder: str) -> None:
    """Rank 1 is on another machine, which nothing comes out of."""

    def refuse(address: Any, timeout: float) -> Any:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    machine = f"machine {rank}"
    with (
        patch.dict(os.environ, {SWITCH: "1"}),
        patch.object(tempfile, "tempdir", folder),
        patch.object(watch, "_machine", lambda: machine),
        patch.object(watch.socket, "create_connection", refuse),
    ):
        made = Watch(Position())
        try:
            made.start(f"rank {rank}", "node0.example")
        finally:
            assert not made.is_on
            assert not made._slots


def test_every_rank_is_told(tmp_path: Path) -> None:
    match = r"rank 1 cannot reach node0.example port \d+ \(No route to host\).*step_timeout=None"
    pool.expect_on_every_rank(2, _start, str(tmp_path), error=ConfigError, match=match)
    assert not list(tmp_path.iterdir())
