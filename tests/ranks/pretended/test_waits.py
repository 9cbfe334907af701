"""Waits of the host for the device in one micro-batch, by the places of this package that cause them.

A failure lists file, line and kind of each wait. The operators of CUDA are emulated (``flash``), because the
reference kernel is not what runs there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.helpers.pretended.runs import Cell, Outcome, compare
from tests.helpers.versions import BROADCASTS_WRITE

pytestmark = pytest.mark.filterwarnings("ignore:GPU available but not used")

PER_LAYER_OR_HOP = ("attention/", "kernels/", "models/", "layout/tile", "comm/ring", "comm/all_")
"""Beginnings of places that are called for each layer or hop."""

OF_STEP = {"consistency/finite.py": 1}
"""The vote before the optimizer step."""
OF_LOG = {"logging/reduce.py": 1}
"""Of the first batches, whose logged values are compared with the losses."""
OF_ROWS = {"loss/counts.py": 1}
"""Norms that ranks compare in the same vote, once it has waited."""
OF_BUFFERS = {"loss/counts.py": 2} if BROADCASTS_WRITE else {}
"""Two buffers that are compared in the votes on steps 2, 4, 8, ..., as steps have written to them."""
OF_CLIP = {"engines/gradients.py": 1}
OF_DDP_CLIP = {"engines/ddp.py": 2}
"""Fabric's clipping raises for a norm that is not finite; PyTorch's reads two flags for that."""
ON_DEVICE = {
    "batch/sharder.py": 1,
    "batch/step_state.py": 1,
    "comm/consensus.py": 4,
    "layout/documents.py": 1,
}
"""Of packed batches that are on the device when they are sharded."""

HOST: dict[str, Any] = {"driver": "fabric", "moves": False, "flash": True}
CELLS: dict[str, tuple[Cell, dict[str, int]]] = {
    "trainer": (Cell("ddp", flash=True), {**OF_STEP, **OF_LOG}),
    "trainer, later": (Cell("fsdp", "ulysses", flash=True, value_looks=1), OF_STEP),
    "trainer, packed": (Cell("fsdp", "hybrid", "packed", flash=True), {**OF_STEP, **OF_LOG}),
    "trainer, whole rows": (
        Cell("ddp", "ulysses", rows=True, value_looks=1),
        {**OF_STEP, **OF_ROWS},
    ),
    "transformers": (Cell("ddp", model="hf", value_looks=1), OF_STEP),
    "transformers, packed": (
        Cell("fsdp", "hybrid", "packed", model="hf", value_looks=1),
        OF_STEP,
    ),
    "fabric": (Cell("zero1", "zigzag_llama3", **HOST), {**OF_STEP, **OF_CLIP}),
    "fabric, packed": (Cell("ddp", "ulysses", "packed", **HOST), {**OF_STEP, **OF_DDP_CLIP}),
    "fabric, batches on the device": (
        Cell("ddp", "ulysses", "packed", "fabric", flash=True),
        {**ON_DEVICE, **OF_STEP, **OF_DDP_CLIP},
    ),
}


def waits_by_file(outcome: Outcome, phase: str) -> dict[str, int]:
    """How often the host waited in each file."""
    found: Counter[str] = Counter()
    for (place, _), count in outcome.ours(phase).items():
        found[place.rpartition(":")[0]] += count
    return dict(found)


@pytest.mark.quick("trainer", "trainer, later", "trainer, whole rows", "transformers")
@pytest.mark.parametrize("name", CELLS)
def test_waits_of_a_micro_batch(name: str) -> None:
    cell, wanted = CELLS[name]
    for outcome in compare(cell):
        for phase in ("batch 1", "batch 2"):  # the first batch has checks of its own
            listed = "\n".join(
                f"{n} {place} {kind}" for (place, kind), n in outcome.ours(phase).items()
            )
            is_broadcast = (cell.engine, cell.model, phase) == ("ddp", "hf", "batch 1")
            of_buffers = OF_BUFFERS if is_broadcast else {}
            assert waits_by_file(outcome, phase) == {**wanted, **of_buffers}, listed
        layers = [w for w in outcome.waits if w.is_ours and w.place.startswith(PER_LAYER_OR_HOP)]
        assert layers == []
