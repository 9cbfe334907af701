"""Balanced layouts of several processes are the same, though none tells another."""

from __future__ import annotations

import subprocess
import sys

from lightning_cp.layout import SequenceLayout
from tests.unit.layout.test_balance import log_normal

SCRIPT = """
from lightning_cp.layout import SequenceLayout
from tests.unit.layout.test_balance import log_normal
print(SequenceLayout(1 << 18, 16, 2, "balanced", log_normal(1 << 18, 200, 3)).checksum)
"""


def test_other_processes_deal_alike() -> None:
    """Whatever their hash seed."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    here = SequenceLayout(1 << 18, 16, 2, "balanced", log_normal(1 << 18, 200, 3))
    assert int(found.stdout) == here.checksum
