"""A rank sends as many bytes as its row says."""

from __future__ import annotations

import pytest

from lightning_cp.bench.links import collectives
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.attention.wire import Wire
from tests.helpers.pool import run_ranks

Sent = dict[tuple[str, str, int], tuple[int, int]]


def sent_bytes(rank: int, world_size: int, ulysses: int) -> Sent:
    """By axis, collective and asked size: what the row says, and what is counted."""
    mesh = ContextParallelMesh(world_size // ulysses, ulysses)
    found: Sent = {}
    for axis, collective, make in collectives(mesh):
        for size in (0, 100_000):
            call = make(mesh, size)
            with Wire(mesh.ulysses_rank) as wire:
                call.step()
            found[axis, collective, size] = (call.sent, wire.traffic.total_bytes)
    mesh.destroy()
    return found


@pytest.mark.parametrize(
    ("ulysses", "names"),
    [
        (4, {"all-to-all"}),
        (2, {"all-to-all", "p2p", "all-gather", "reduce-scatter"}),
        (1, {"p2p", "all-gather", "reduce-scatter", "all-reduce"}),
    ],
)
def test_bytes(ulysses: int, names: set[str]) -> None:
    for found in run_ranks(4, sent_bytes, ulysses):
        assert {collective for _, collective, _ in found} == names
        for (_, collective, size), (said, counted) in found.items():
            assert size <= said <= size + 2 * 3 * 256  # whole tokens, for three others
            if collective != "all-reduce":  # which hides what it sends
                assert said == counted, collective
