"""Waits of the host for the device in one micro-batch, by the places of this package that cause them.

A failure lists file, line and kind of each wait. The operators of CUDA are emulated (``flash``), because the
reference kernel is not what runs there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.gpu_one_rank import ONE_RANK
from benchmarks.gpu_synchronisations import WAITS_OF_STEP as OF_STEP
from tests.helpers.pretended.runs import ALONE, STEPS, Cell, Outcome, compare
from tests.helpers.versions import BROADCASTS_WRITE

pytestmark = pytest.mark.filterwarnings("ignore:GPU available but not used")

PER_LAYER_OR_HOP = (
    "attention/",
    "kernels/",
    "models/",
    "layout/tile",
    "comm/transfer",
    "comm/all_",
)
"""Beginnings of places that are called for each layer or hop."""

OF_LOG = {"logging/reduce.py": 1}
"""Of the first batches, whose logged values are compared with the losses."""
OF_ROWS = {"loss/shared_values.py": 1}
"""Norms that ranks compare in the same vote, once it has waited."""
OF_BUFFERS = {"loss/shared_values.py": 2} if BROADCASTS_WRITE else {}
"""Two buffers that are compared in the votes on steps 2, 4, 8, ..., as steps have written to them."""
OF_CLIP = {"engines/gradients.py": 1}
OF_DDP_CLIP = {"engines/ddp.py": 1}
"""Fabric's clipping raises for a norm that is not finite."""
OF_MUON = {"optim/muon.py": 1, "comm/consensus.py": 2, "optim/qk_layers.py": 2}
"""Within the optimizer's step: its own check of gradients, its vote, and the largest score of each head; with
gloo a copy of each layer's."""
CHECKED = (("parity_check", "first_batch"),)
"""The strategy's default."""
RECHECKED = 2
"""The second batch that the parity check runs on, after the first one."""
ON_DEVICE = {"batch/read.py": 1}
"""Of batches that are on the device when they are sharded."""

WINDOW: dict[str, Any] = {"flash": True, "accumulate": 2, "value_looks": 1}
HOST: dict[str, Any] = {"driver": "fabric", "moves": False, "flash": True}
CELLS: dict[str, tuple[Cell, dict[str, int]]] = {
    "trainer": (Cell("ddp", flash=True), {**OF_STEP, **OF_LOG}),
    "trainer, later": (Cell("fsdp", "ulysses", flash=True, value_looks=1), OF_STEP),
    "trainer, packed": (Cell("fsdp", "hybrid", "packed", flash=True), {**OF_STEP, **OF_LOG}),
    "trainer, whole rows": (
        Cell("ddp", "ulysses", rows=True, value_looks=1),
        {**OF_STEP, **OF_ROWS},
    ),
    "trainer, a mask is declared": (
        Cell("ddp", declares="mask", value_looks=1),
        {**OF_STEP, **OF_ROWS},
    ),
    "trainer, a number is declared": (
        Cell("fsdp", "ulysses", declares="number", value_looks=1),
        {**OF_STEP, **OF_ROWS},
    ),
    "trainer, a mask is declared in a window": (
        Cell("zero1", declares="mask", value_looks=1, accumulate=2),
        {**OF_STEP, **OF_ROWS},
    ),
    "fabric, a mask is declared": (
        Cell("fsdp", declares="mask", **HOST),
        {**OF_STEP, **OF_CLIP, **OF_ROWS},
    ),
    "trainer, muon with QK-clip": (
        Cell("fsdp", optimizer="muon", value_looks=1),
        {**OF_STEP, **OF_MUON},
    ),
    "transformers": (Cell("ddp", model="hf", value_looks=1), OF_STEP),
    "transformers, packed": (
        Cell("fsdp", "hybrid", "packed", model="hf", value_looks=1),
        OF_STEP,
    ),
    "transformers, padded": (
        Cell("ddp", "ulysses", "padded", model="hf", value_looks=1),
        OF_STEP,
    ),
    "fabric": (Cell("zero1", "zigzag_llama3", **HOST), {**OF_STEP, **OF_CLIP}),
    "fabric, packed": (Cell("ddp", "ulysses", "packed", **HOST), {**OF_STEP, **OF_DDP_CLIP}),
    "fabric, batches on the device": (
        Cell("ddp", "ulysses", "packed", "fabric", flash=True),
        {**ON_DEVICE, **OF_STEP, **OF_DDP_CLIP},
    ),
    "fabric, dense batches on the device": (
        Cell("ddp", "ulysses", driver="fabric", flash=True),
        {**ON_DEVICE, **OF_STEP, **OF_DDP_CLIP},
    ),
    "fabric, transformers, padded on the device": (
        Cell("ddp", "ulysses", "padded", "fabric", model="hf"),
        {**ON_DEVICE, **OF_STEP, **OF_DDP_CLIP},
    ),
    "fabric, transformers, packed on the device": (
        Cell("fsdp", "ring", "packed", "fabric", model="hf"),
        {**ON_DEVICE, **OF_STEP, **OF_CLIP},
    ),
    "trainer, zero1": (Cell("zero1", "zigzag_llama3", flash=True, value_looks=1), OF_STEP),
    "trainer, hsdp": (Cell("hsdp", flash=True, value_looks=1), OF_STEP),
    "fabric, fsdp": (Cell("fsdp", "ulysses", "packed", **HOST), {**OF_STEP, **OF_CLIP}),
    "one rank": (
        Cell("ddp", ALONE, model="hf", value_looks=1, more=tuple(ONE_RANK.items())),
        OF_STEP,
    ),
    "trainer, accumulation": (Cell("ddp", "ulysses", "packed", **WINDOW), OF_STEP),
    "trainer, accumulation, fsdp": (Cell("fsdp", **WINDOW), OF_STEP),
    "fabric, accumulation": (
        Cell("ddp", "ulysses", "packed", **{**HOST, **WINDOW}),
        {**OF_STEP, **OF_DDP_CLIP},
    ),
    "fabric, accumulation, zero1": (
        Cell("zero1", **{**HOST, **WINDOW}),
        {**OF_STEP, **OF_CLIP},
    ),
    "trainer, parity check": (
        Cell("ddp", "ulysses", "packed", flash=True, value_looks=1, more=CHECKED),
        OF_STEP,
    ),
}
"""Cells, and the waits of the micro-batch that ends a window; the others have none."""
AT_MOST, WITH_MUON, FROM_DEVICE = 2, 6, 3
"""Waits of a micro-batch, of one with Muon, and of one on the device, with Fabric's clip; docs/guides/data.md
has all."""


def test_a_micro_batch_on_the_host_waits_at_most_twice() -> None:
    counts = {name: sum(waits.values()) for name, (_, waits) in CELLS.items()}
    on_device = {name: counts.pop(name) for name in CELLS if name.endswith("on the device")}
    assert set(on_device.values()) == {FROM_DEVICE}
    assert counts.pop("trainer, muon with QK-clip") == WITH_MUON
    two = {"fabric, a mask is declared": AT_MOST + 1}  # a clip of Fabric as well
    assert {name: count for name, count in counts.items() if count > AT_MOST} == two


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_global_weights_wait_once_in_the_later_micro_batches_of_a_window(engine: str) -> None:
    """A loop of Fabric may have zeroed the gradients in between."""
    cell = Cell(engine, more=tuple(ONE_RANK.items()), **{**HOST, **WINDOW, "accumulate": 3})
    for outcome in compare(cell):
        for batch in range(STEPS * cell.accumulate):
            counts = waits_by_file(outcome, f"batch {batch}")
            assert counts.get("loss/accumulation.py", 0) == bool(batch % cell.accumulate)


def waits_by_file(outcome: Outcome, phase: str) -> dict[str, int]:
    """How often the host waited in each file."""
    found: Counter[str] = Counter()
    for (place, _), count in outcome.ours(phase).items():
        found[place.rpartition(":")[0]] += count
    return dict(found)


@pytest.mark.quick(
    "trainer",
    "trainer, a number is declared",
    "trainer, a mask is declared in a window",
    "transformers, padded",
    "one rank",
    "fabric, accumulation",
    "trainer, parity check",
)
@pytest.mark.parametrize("name", CELLS)
def test_waits_of_a_micro_batch(name: str) -> None:
    cell, of_window = CELLS[name]
    for outcome in compare(cell):
        for batch in range(cell.accumulate, STEPS * cell.accumulate):
            if cell.more == CHECKED and batch == RECHECKED:
                continue
            phase = f"batch {batch}"  # the first window has checks of its own
            listed = "\n".join(
                f"{n} {place} {kind}" for (place, kind), n in outcome.ours(phase).items()
            )
            is_broadcast = (cell.engine, cell.model, batch) == ("ddp", "hf", 1) and cell.cp > 1
            wanted = {**of_window, **(OF_BUFFERS if is_broadcast else {})}
            ends_window = batch % cell.accumulate == cell.accumulate - 1
            assert waits_by_file(outcome, phase) == (wanted if ends_window else {}), listed
        layers = [w for w in outcome.waits if w.is_ours and w.place.startswith(PER_LAYER_OR_HOP)]
        assert layers == []
        # Lightning's loop would broadcast before each batch whether SIGTERM has come, and wait for it.
        assert [w.place for w in outcome.waits if "training_epoch_loop" in w.place] == []
