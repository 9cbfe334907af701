"""Waits of the host for the device in one micro-batch, by the places of this package that cause them.

A failure lists file, line and kind of each wait. The operators of CUDA are emulated (``flash``), because the
reference kernel is not what runs there.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.helpers.pretended.runs import Cell, Outcome, compare

pytestmark = pytest.mark.filterwarnings("ignore:GPU available but not used")

PER_LAYER_OR_HOP = ("attention/", "kernels/", "models/", "layout/tile", "comm/ring", "comm/all_")
"""Beginnings of places that are called for each layer or hop."""

OF_BATCH = {"loss/counts.py": 1}
OF_DENSE = {"batch/sharder.py": 2, "comm/consensus.py": 2, "layout/sequence.py": 3, **OF_BATCH}
OF_PACKED = {
    "batch/sharder.py": 1,
    "batch/step_state.py": 1,
    "comm/consensus.py": 4,
    "layout/documents.py": 1,
    "layout/sequence.py": 5,
    **OF_BATCH,
}
OF_STEP = {"consistency/finite.py": 1}
OF_LOG = {"logging/reduce.py": 1}
OF_CLIP = {"engines/gradients.py": 1}
"""Fabric's clipping raises for a norm that is not finite."""

CELLS: dict[str, tuple[Cell, dict[str, int]]] = {
    "trainer": (Cell("ddp", flash=True), {**OF_DENSE, **OF_STEP, **OF_LOG}),
    "trainer, packed": (
        Cell("fsdp", "hybrid", "packed", flash=True),
        {**OF_PACKED, **OF_STEP, **OF_LOG},
    ),
    "fabric": (
        Cell("zero1", "zigzag_llama3", driver="fabric", flash=True),
        {**OF_BATCH, **OF_STEP},
    ),
    "fabric, packed": (
        Cell("ddp", "ulysses", "packed", "fabric", flash=True),
        {**OF_PACKED, **OF_STEP},
    ),
}


def waits_by_file(outcome: Outcome, phase: str) -> dict[str, int]:
    """How often the host waited in each file."""
    found: Counter[str] = Counter()
    for (place, _), count in outcome.ours(phase).items():
        found[place.rpartition(":")[0]] += count
    return dict(found)


@pytest.mark.quick("trainer")
@pytest.mark.parametrize("name", CELLS)
def test_waits_of_a_micro_batch(name: str) -> None:
    cell, wanted = CELLS[name]
    for outcome in compare(cell):
        for phase in ("batch 1", "batch 2"):  # the first batch has checks of its own
            listed = "\n".join(
                f"{n} {place} {kind}" for (place, kind), n in outcome.ours(phase).items()
            )
            assert waits_by_file(outcome, phase) == wanted, listed
        layers = [w for w in outcome.waits if w.is_ours and w.place.startswith(PER_LAYER_OR_HOP)]
        assert layers == []
