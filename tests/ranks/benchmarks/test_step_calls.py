"""Python calls of a training step: what each step costs the host, whatever the model."""

from __future__ import annotations

import pytest

from benchmarks.step_calls import trace_step
from lightning_cp.bench.processes import on_ranks

CALLS = 905
"""Python 3.11; later versions count fewer, as they inline comprehensions."""
FILES = 80
FILES_TO_KERNEL = 10


@pytest.mark.nightly
def test_a_step_has_few_calls_and_a_short_way_to_the_kernel() -> None:
    settings = {"ring_size": 2, "ulysses_size": 1, "parity_check": "off"}
    trace = on_ranks(2, trace_step, settings)[0]
    ours = [name for name in trace.to_kernel if not name.startswith("bench/")]
    assert ours[0] == "strategies/trainer.py"
    assert ours[-1] == "kernels/per_tile.py"
    assert len(ours) <= FILES_TO_KERNEL
    assert 100 < sum(trace.calls.values()) <= CALLS
    assert len(trace.calls) <= FILES
