"""What the strategy says of itself, once."""

from __future__ import annotations

import logging

import pytest

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import Staged, loader, trainer_of

SAID = "context parallel attention in"


def said(rank: int, world_size: int, models: int) -> list[str]:
    """What was logged over all stages of some models under one Trainer."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Keep()
    logger.addHandler(handler)
    try:
        trainer = trainer_of(world_size, {"ring_size": 2, "ulysses_size": 1})
        for _ in range(models):
            module = Staged()
            trainer.validate(module, loader(2), verbose=False)
            trainer.fit(module, loader(4), loader(2))
            trainer.test(module, loader(2), verbose=False)
    finally:
        logger.removeHandler(handler)
    return [message for message in messages if SAID in message]


@pytest.mark.nightly
def test_where_attention_was_swapped_is_said_once_of_each_model() -> None:
    for models in (1, 2):
        assert len(run_ranks(2, said, models)[0]) == models
