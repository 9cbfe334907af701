"""A run that is killed twice and started again by torchrun loses nothing."""

from __future__ import annotations

from pathlib import Path

from tests.nightly.faults.soak import Plan, differences, soak


def test_a_short_soak(tmp_path: Path) -> None:
    plan = Plan(steps=60, every=25, save_every=10, limit=400)
    killed, alone = soak(tmp_path, plan)
    assert [rank for _, rank in killed.kills] == [0, 3]  # the fault has fired
    assert killed.repeated > 0
    assert not differences(killed, alone)
