"""Lightning's warning of few workers, of a loader that ranks share."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import DataLoader

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import RING, RING3, Small, loader, trainer_of

SUGGESTED = "lightning.pytorch.trainer.connectors.data_connector.suggested_max_num_workers"


def warned(
    rank: int, world_size: int, settings: dict[str, Any]
) -> tuple[list[str], tuple[bool, type]]:
    """What a run says of its loader's workers where there could be seven; and the Trainer's loader."""
    trainer = trainer_of(world_size, settings)
    with warnings.catch_warnings(record=True) as seen, mock.patch(SUGGESTED, return_value=7):
        warnings.simplefilter("always")
        trainer.fit(Small(), loader(4))
    its: Any = trainer.train_dataloader
    texts = [str(one.message) for one in seen if "many workers" in str(one.message)]
    return texts, (isinstance(its, DataLoader), type(its.dataset))


@pytest.mark.parametrize(("ranks", "settings"), [(2, RING), (3, RING3)], ids=["ring", "ring 3"])
def test_the_first_rank_warns_once(ranks: int, settings: dict[str, Any]) -> None:
    (first, *others), loaders = zip(*run_ranks(ranks, warned, settings), strict=True)
    (text,) = first
    assert text.startswith("The 'train_dataloader' does not have many workers")
    assert not any(others)
    assert set(loaders) == {(True, list)}
