"""Values that must be equal on ranks: rounding is no difference, wherever it falls between two digits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from lightning_cp.loss.counts import TargetCounts
from lightning_cp.loss.shared_values import norm_and_projection
from tests.helpers.pool import run_ranks


def compared(
    rank: int, world_size: int, dtype: torch.dtype, values: list[float]
) -> tuple[str, str | None, str | None]:
    """The vote's texts, and the differences of gradients and of losses that ranks find; NaN: no targets."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.tensor([values[rank]], dtype=torch.float64).to(dtype)
    has_none = math.isnan(values[rank])
    counts = TargetCounts()
    counts.note_shared(x, 0.0 if has_none else 1.0, None, whole=None if has_none else x)
    if not has_none:
        counts._shared[0].gradients = [norm_and_projection(x)]
        counts._shared[0].digits = 3 if dtype is torch.bfloat16 else 5
    of_loss = None
    try:
        counts.check_values("step 1", group, world_size)
    except Exception as error:
        of_loss = str(error)
    return str(counts.numbers), counts.shared_difference(group, world_size), of_loss


NEAR = [
    (torch.bfloat16, [1.9921875, 2.0]),
    (torch.float32, [1.00004999, 1.00005001]),
    (torch.float32, [0.99999949, 0.99999952]),
]


@pytest.mark.parametrize(("dtype", "values"), NEAR, ids=str)
def test_a_digit_that_rounding_changes_is_no_difference(
    dtype: torch.dtype, values: list[float]
) -> None:
    (first, *found), (second, *others) = run_ranks(2, compared, dtype, values)
    assert first != second  # the vote sees two texts
    assert found == others == [None, None]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(torch.bfloat16, [1.0, 1.25]), (torch.float32, [1.0, 1.001]), (torch.float64, [1.0, 1.001])],
    ids=str,
)
def test_more_than_rounding_is_a_difference(dtype: torch.dtype, values: list[float]) -> None:
    for _, of_gradients, of_loss in run_ranks(2, compared, dtype, values):
        assert of_gradients is not None
        assert f"is 1 on rank 0 and {values[1]:g} on rank 1" in of_gradients
        assert of_loss is not None


def test_a_rank_without_targets_decides_as_the_others() -> None:
    """It has no gradient, and does not know how precise those of the others are."""
    found = run_ranks(3, compared, torch.bfloat16, [1.9921875, 2.0, math.nan])
    assert [of_gradients for _, of_gradients, _ in found] == [None] * 3
