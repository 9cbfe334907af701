"""Models that count positions in their own way: refused, unless the batch brings the positions."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.errors import ConfigError
from tests.models.steps import Case, Outcome, make_batch, make_model, one_process, parallel, start
from tests.models.test_windows import compare
from tests.pool import expect_on_every_rank, run_ranks


def parallel_opt(rank: int, world_size: int, batch: str) -> Outcome:
    return parallel(rank, world_size, Case(model="opt", batch=batch), 1, 2)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        (Case(model="roberta"), "RobertaEmbeddings does not count positions from 0 on"),
        (Case(model="roberta", batch="right"), "Put the position_ids that it would make into the batch"),
        (Case(model="opt", batch="left"), "OPTLearnedPositionalEmbedding does not count positions"),
    ],
)  # fmt: skip
def test_models_that_count_otherwise_are_refused(case: Case, match: str) -> None:
    expect_on_every_rank(2, parallel, case, 1, 2, error=ConfigError, match=match, timeout=20)


def test_opt_without_left_padding_counts_from_zero() -> None:
    want = one_process(Case(model="opt", batch="right"))
    for got in run_ranks(2, parallel_opt, "right", timeout=20):
        assert got.loss == pytest.approx(want.loss, rel=1e-12)
    compare(Case(model="opt"), 1, 2)


def with_positions(rank: int, world_size: int) -> torch.Tensor:
    """RoBERTa with the positions that it would have made."""
    case = Case(model="roberta")
    model = make_model(case)
    core = start(1, 2, model)
    try:
        batch = make_batch(case)
        batch["input_ids"] = batch["input_ids"].clamp(min=3)  # none is padding
        batch["position_ids"] = torch.arange(1, 38).expand(3, -1)
        local = core.shard(batch, needs_labels=True)
        core.begin_step()
        logits = model(input_ids=local["input_ids"], position_ids=local["position_ids"]).logits
        return core.unshard(logits.detach(), {})
    finally:
        core.detach()


def test_positions_of_the_batch_are_taken() -> None:
    case = Case(model="roberta")
    ids = make_batch(case)["input_ids"].clamp(min=3)
    want = make_model(case)(input_ids=ids).logits.detach()
    for got in run_ranks(2, with_positions, timeout=20):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
