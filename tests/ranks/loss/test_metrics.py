"""Units and labels against closed forms, and the loss of validation over ranks with unequal shares."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_cp.apps.train.model import TokenLoss, aligned_labels, bits_per_byte
from lightning_cp.errors import ConfigError
from lightning_cp.utils.labels import IGNORED_LABEL
from tests.helpers.pool import run_ranks


def test_bits_per_byte_of_a_uniform_guess() -> None:
    assert bits_per_byte(math.log(256)) == pytest.approx(8.0, abs=1e-12)
    nats = torch.tensor([0.0, math.log(2), math.log(4)], dtype=torch.float64)
    torch.testing.assert_close(
        bits_per_byte(nats), torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    )


def test_labels_of_a_whole_batch_are_shifted() -> None:
    labels = torch.tensor([[5, 6, IGNORED_LABEL, 8]])
    expected = torch.tensor([[6, IGNORED_LABEL, 8, IGNORED_LABEL]])
    assert torch.equal(aligned_labels({"labels": labels}), expected)


def test_labels_of_a_sharded_batch_were_shifted_before() -> None:
    shifted = torch.tensor([[6, 7]])
    batch = {"labels": torch.tensor([[5, 6]]), "shift_labels": shifted}
    assert aligned_labels(batch) is shifted


def test_a_batch_without_labels() -> None:
    with pytest.raises(ConfigError, match=r"needs batch\['labels'\].*got keys \['input_ids'\]"):
        aligned_labels({"input_ids": torch.zeros(1, 4)})


def test_loss_of_a_uniform_guess_is_the_logarithm_of_the_vocabulary() -> None:
    mean = TokenLoss()
    mean.update(torch.tensor(0.0), torch.zeros(2, 5, 256), torch.randint(256, (2, 5)))
    assert mean.compute().item() == pytest.approx(math.log(256), rel=1e-6)


def share_of_loss(
    rank: int, world_size: int, logits_BLV: torch.Tensor, labels_BL: torch.Tensor, chunked: bool
) -> tuple[float, int]:
    """The loss that a rank computes from its slice of the sequence row by row, and its valid tokens."""
    logits, labels = (x.chunk(world_size, dim=1)[rank] for x in (logits_BLV, labels_BL))
    mean = TokenLoss()
    for row in range(len(logits)):
        loss = torch.nn.functional.cross_entropy(logits[row], labels[row])  # NaN without a target
        given = None if chunked else logits[row : row + 1]
        mean.update(loss, given, labels[row : row + 1])
    return mean.compute().item(), int((labels != IGNORED_LABEL).sum())


@pytest.mark.parametrize("chunked", [False, True])
def test_every_rank_computes_the_loss_of_the_whole_sequence(chunked: bool) -> None:
    logits = torch.randn(2, 8, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(16).view(2, 8) % 11
    labels[:, :4] = IGNORED_LABEL  # nothing to predict on ranks 0 and 1
    labels[1, 4:6] = IGNORED_LABEL
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    results = run_ranks(4, share_of_loss, logits, labels, chunked)
    assert [count for _, count in results] == [0, 0, 2, 4]
    for value, _ in results:
        assert value == pytest.approx(loss.item(), rel=1e-6)


def test_a_loss_that_is_not_finite_stays_so() -> None:
    mean = TokenLoss()
    mean.update(torch.tensor(math.nan), None, torch.tensor([[1, 2]]))
    mean.update(torch.tensor(1.0), None, torch.tensor([[1, 2]]))
    assert mean.compute().isnan()
