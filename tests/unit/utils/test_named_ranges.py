"""Named ranges: nothing without a profiler, a name in a trace with one."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_cp.utils.tracing import profile_range


class Unnameable:
    """Must not be asked for its name."""

    def __format__(self, spec: str) -> str:
        raise AssertionError("formatted although nobody profiles")


def test_nothing_is_made_or_formatted_while_nobody_profiles() -> None:
    first = profile_range("hop {} compute", Unnameable())
    assert first is profile_range("merge")
    with first, first:
        pass


def test_any_profiler_sees_them() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded, profile_range("hop {} compute", 3):
        torch.ones(2).sum()
    events: Any = recorded.events()
    names = [event.name for event in events]
    assert names.count("cp: hop 3 compute") == 1
