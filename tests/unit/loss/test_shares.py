"""Weights of ranks in averages, and the numbers that ranks compare: on the host and on a device."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.logging.reduce import weighted_mean
from lightning_cp.loss.shared_values import SharedValues
from lightning_cp.loss.weighting import average_weights, read_shares

COUNTS = {"on the host": [2, 0, 6], "on the device": torch.tensor([2.0, 0.0, 6.0]).double()}


@pytest.mark.parametrize("place", COUNTS)
def test_a_rank_without_targets_adds_nothing(place: str) -> None:
    rows = torch.tensor([[1.0, 2.0], [torch.nan, torch.inf], [5.0, -2.0]], dtype=torch.float64)
    mean = weighted_mean(rows, average_weights(COUNTS[place]))
    assert mean.tolist() == [0.25 * 1 + 0.75 * 5, 0.25 * 2 - 0.75 * 2]


@pytest.mark.parametrize("counts", [[0, 0], torch.zeros(2, dtype=torch.float64)])
def test_ranks_weigh_alike_where_nothing_counts(counts: list[int] | torch.Tensor) -> None:
    assert list(read_shares(average_weights(counts))) == [0.5, 0.5]


def test_numbers_of_several_losses_are_told_apart() -> None:
    losses = [
        SharedValues(2.0, joined=[torch.tensor([1.0, 2.0])], factors=[3.0, torch.tensor(0.5)]),
        SharedValues(torch.tensor(4), gradients=[torch.tensor([5.0, 6.0])], is_followed=True),
    ]
    SharedValues.read(losses)
    assert losses[0].votes[0] == [f"{x:.16e}" for x in (1, 2)]
    assert losses[0].weighed_factors == (2.0, [3.0, 0.5], 1e-5)
    assert losses[1].votes == ([], ["5.0000e+00", "6.0000e+00"], [], [])


def test_factors_in_half_precision_may_differ_by_its_rounding() -> None:
    third = torch.tensor(1 / 3, dtype=torch.bfloat16)
    assert SharedValues(3, factors=[third]).weighed_factors[2] == 2e-2
