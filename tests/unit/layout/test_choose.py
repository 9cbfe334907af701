"""What ``layout="auto"`` chooses, and the costs it goes by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.errors import ShapeError
from lightning_cp.layout import (
    CostModel,
    Documents,
    Mask,
    Schedule,
    SequenceLayout,
    choose_layout,
    explain_layout,
)
from lightning_cp.layout.cost import DEFAULT_HEADS, HeadCounts
from tests.helpers.layout.cases import documents, masks
from tests.unit.layout.test_balance import log_normal

FREE, DEAR = CostModel(0, 0), CostModel(10**6, 0)


@settings(max_examples=150)  # each makes a schedule of every layout
@given(st.integers(16, 900), st.integers(1, 4), st.integers(1, 2), masks(), st.data())
def test_the_choice_is_the_cheapest(
    length: int, ring: int, ulysses: int, mask: Mask, data: st.DataObject
) -> None:
    rows, model = (
        data.draw(documents(length)),
        data.draw(st.builds(CostModel, key=st.integers(0, 9))),
    )
    choice = explain_layout.__wrapped__(length, ring, ulysses, rows, mask, cost=model)
    costs = [
        (model.cost(Schedule(found.layout, rows, mask)), place)
        for place, found in enumerate(choice.predictions)
    ]
    if not costs:
        assert choice.layout.kind == "contiguous" or rows.is_dense
        return
    chosen = next(found for found in choice.predictions if found.layout == choice.layout)
    assert chosen.cost == min(costs)[0]
    assert choice.predictions.index(chosen) == min(costs)[1], "of equals the first"
    for (cost, _), found in zip(costs, choice.predictions, strict=True):
        assert found.compute == max(Schedule(found.layout, rows, mask).work)
        assert found.cost in (None, cost)
        assert found.cost is not None or found.compute > min(costs)[0]


DENSE: dict[str, tuple[Mask, str]] = {
    "causal": (Mask(), "zigzag"),
    "full": (Mask(causal=False), "contiguous"),
    "a window beyond the sequence": (Mask(window=(65535, -1)), "zigzag"),
    "a window of both sides beyond it": (Mask(False, (65535, 65535)), "contiguous"),
    "short window": (Mask(window=(512, -1)), "contiguous"),
    "half a shard": (Mask(window=(4096, -1)), "contiguous"),
    "short window of both sides": (Mask(False, (64, 64)), "contiguous"),
    "distance": (Mask(uses_distance=True), "zigzag"),
}


@pytest.mark.parametrize("cost", [CostModel(), CostModel.in_node()], ids=str)
@pytest.mark.parametrize(("mask", "kind"), DENSE.values(), ids=DENSE.keys())
def test_one_document(mask: Mask, kind: str, cost: CostModel) -> None:
    for whole in (None, Documents.single(1 << 16)):
        layout = choose_layout(1 << 16, 8, 1, whole, mask, cost=cost)
        assert layout.kind == kind
        assert layout.documents == whole


def test_packed_rows_go_from_even_to_quiet_as_communication_gets_dear() -> None:
    packed = log_normal(1 << 18, 200, 1)
    found = [
        explain_layout(1 << 18, 16, 1, packed, cost=CostModel(key, 0))
        for key in (0, 300, 3000, 30_000, 10**6)
    ]
    chunks = [choice.layout.chunks_per_rank for choice in found]
    assert found[0].layout.kind == "balanced"
    assert Schedule(found[0].layout, packed, Mask()).imbalance <= 1.02
    assert found[-1].layout.kind == "contiguous"
    assert chunks == sorted(chunks, reverse=True)
    assert len(set(chunks)) > 2
    assert "chunks a rank" in str(found[0])
    assert "at least" in str(found[0])


def test_the_choice_is_readable_where_nearly_all_is_waiting() -> None:
    """A hop costs a million pairs here, and the sequence has a thousand."""
    packed = Documents.from_cu_seqlens([0, 20, 64])
    choice = explain_layout(64, 2, 1, packed, cost=CostModel(0, 10**6))
    assert str(choice) == (
        "layout zigzag: the least predicted time (compute of the busiest rank 1.20, 1 being even); "
        "others: contiguous under 0.1% longer (1.52)"
    )
    even = explain_layout(
        64, 2, 1, Documents.from_cu_seqlens([0, 32, 64]), cost=CostModel(0, 10**6)
    )
    assert str(even).startswith("layout contiguous: the least predicted time (")
    assert "zigzag 1,895 times as long (1.00)" in str(even)


def test_a_ring_of_one_and_the_same_question_again() -> None:
    packed = log_normal(4096, 20, 1)
    assert choose_layout(4096, 1, 4, packed).kind == "contiguous"
    assert choose_layout(4096, 4, 1, packed) is choose_layout(
        4096, 4, 1, log_normal(4096, 20, 1)
    ), "cached"


def test_without_padding_only_what_divides() -> None:
    """130 x 8 tokens on 8 ranks: chunks a rank that divide 130."""
    packed = log_normal(1040, 6, 0)
    layout = choose_layout(1040, 8, 1, packed, cost=FREE, padding=False)
    assert layout.padded_len == 1040
    layout.check_unpadded()
    odd = Documents.from_cu_seqlens([0, 500, 1041])
    with pytest.raises(ShapeError, match="next valid length is 1048"):
        choose_layout(1041, 8, 1, odd, padding=False).check_unpadded()


def test_without_padding_a_length_that_only_contiguous_divides() -> None:
    assert choose_layout(20, 4).kind == "zigzag"
    assert choose_layout(20, 4, padding=False).kind == "contiguous"
    choose_layout(20, 4, padding=False).check_unpadded()


def test_padding_on_one_side_is_no_plain_document() -> None:
    """The late third of the rows is padding: zigzag would leave half of the ranks with less."""
    padded = Documents([np.array([[0, 40_000]])], 60_000)
    even = choose_layout(60_000, 4, 1, padded, cost=FREE)
    work = Schedule(even, padded, Mask()).imbalance
    assert work < Schedule(SequenceLayout(60_000, 4), padded, Mask()).imbalance


def test_a_machine_gives_the_documented_numbers() -> None:
    llama: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    between = CostModel.of_machine(600e12, 50e9, **llama)
    assert between.key == CostModel().key == 3000
    assert between.hop == pytest.approx(CostModel().hop, rel=1e-3)
    assert CostModel.of_machine(600e12, 450e9, **llama).key == CostModel.in_node().key == 333


@pytest.mark.parametrize(
    "heads", [HeadCounts(32, 32, 128), HeadCounts(64, 8, 64), HeadCounts(4, 1, 256)], ids=str
)
def test_other_heads_are_another_machine(heads: HeadCounts) -> None:
    measured = CostModel.of_machine(
        *(600e12, 50e9), heads=heads.query, kv_heads=heads.kv, head_dim=heads.dim
    )
    found = CostModel().with_heads(heads)
    assert found.key == pytest.approx(measured.key, abs=1)
    assert found.hop == pytest.approx(measured.hop, rel=1e-3)
    assert CostModel().with_heads(DEFAULT_HEADS) == CostModel()


def test_a_ulysses_rank_has_its_share_of_the_heads() -> None:
    assert HeadCounts(32, 8, 128).of_ulysses_rank(4) == HeadCounts(8, 2, 128)
    assert HeadCounts(32, 8, 128).of_ulysses_rank(16) == HeadCounts(2, 1, 128), (
        "sent to both that use it"
    )
    assert HeadCounts(12, 3, 128).of_ulysses_rank(4) == HeadCounts(3, 2, 128), (
        "two of the ranks straddle"
    )


def test_a_rotation_moves_all_keys_whatever_the_layout() -> None:
    """Keys that are too dear where only needed ones travel cost all layouts the same: work decides."""
    packed = log_normal(1 << 16, 60, 2)
    sparing, around = (
        choose_layout(1 << 16, 8, 1, packed, cost=CostModel(rotates=rotates))
        for rotates in (False, True)
    )
    work = [Schedule(layout, packed, Mask()) for layout in (sparing, around)]
    assert work[0].keys.sum() < work[1].keys.sum()
    assert work[0].imbalance > work[1].imbalance
