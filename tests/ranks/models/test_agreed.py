"""What one rank alone can notice in its tokens: every rank raises, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_cp.batch.step_state import PositionInfo, position_info
from lightning_cp.errors import ConfigError, RankFailure
from lightning_cp.layout import Documents, SequenceLayout
from tests.helpers.models.steps import Case, make_batch, make_model, restarting, start
from tests.helpers.pool import RankError, expect_on_every_rank, run_ranks

LENGTH = 37
CACHED = Case(batch="packed")
PLAIN = Case(batch="packed", use_cache=False)

Batch = dict[str, torch.Tensor]


def late_document(case: Case) -> Batch:
    """In zigzag on two ranks, rank 1 holds tokens 10 to 29: within the first document."""
    batch = make_batch(case)
    batch["position_ids"] = restarting([0, 30, LENGTH])[None].expand(3, -1).contiguous()
    return batch


def refused(rank: int, world_size: int, case: Case, what: str) -> None:
    model = make_model(case)
    runtime = start(1, 2, model)
    try:
        batch = late_document(case) if case.batch == "packed" else make_batch(case)
        local = runtime.shard(batch, needs_labels=True)
        runtime.begin_step()
        CALLS[what](rank, model, local)
    finally:
        runtime.detach()


def plainly(rank: int, model: Any, batch: Batch) -> None:
    model(input_ids=batch["input_ids"])


def counting_by_itself(rank: int, model: Any, batch: Batch) -> None:
    ids = batch["position_ids"].clone()
    ids[:, -1] += int(rank == 0)
    model(input_ids=batch["input_ids"], position_ids=ids)


def with_another_mask(rank: int, model: Any, batch: Batch) -> None:
    mask = batch["attention_mask"].clone()
    mask[0, 0] -= int(rank == 0)
    model(input_ids=batch["input_ids"], attention_mask=mask)


def with_other_labels(rank: int, model: Any, batch: Batch) -> None:
    labels = batch["labels"].clone()
    if rank == 0:
        labels[:] = -100
    model(input_ids=batch["input_ids"], labels=labels)


def not_reading_positions(rank: int, model: Any, batch: Batch) -> None:
    from transformers.models.llama import modeling_llama

    create = modeling_llama.create_causal_mask
    without: Any = lambda position_ids, **given: create(**given)  # noqa: E731
    modeling_llama.create_causal_mask = without
    try:
        model(input_ids=batch["input_ids"])
    finally:
        modeling_llama.create_causal_mask = create


CALLS: dict[str, Callable[[int, Any, Batch], None]] = {
    "plainly": plainly,
    "counting by itself": counting_by_itself,
    "with another mask": with_another_mask,
    "with other labels": with_other_labels,
    "not reading positions": not_reading_positions,
}


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_fact_of_the_whole_batch_is_an_error_of_its_own_on_every_rank(model: str) -> None:
    expect_on_every_rank(
        2, refused, replace(CACHED, model=model), "plainly", error=ConfigError, timeout=20,
        match=r"position_ids restart \(packed documents\).*use_cache=True",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("case", "what", "match"),
    [
        (Case(), "counting by itself", "position_ids that the model was given are not the batch's"),
        (Case(batch="right"), "with another mask", "attention_mask that the model was given is not"),
        (Case(), "with other labels", "labels= are not the batch's"),
    ],
)  # fmt: skip
def test_what_one_rank_alone_notices_stops_all(case: Case, what: str, match: str) -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(2, refused, case, what, timeout=20)
    first, second = (report.error for report in raised.value.reports)
    assert isinstance(first, ConfigError)
    assert match in str(first)
    assert isinstance(second, RankFailure)
    assert match in str(second)


def test_a_mask_without_positions_stops_all() -> None:
    """Zigzag local positions jump on every rank of this batch or on none."""
    with pytest.raises(RankError) as raised:
        run_ranks(2, refused, PLAIN, "not reading positions", timeout=20)
    assert all(
        isinstance(report.error, ConfigError | RankFailure) for report in raised.value.reports
    )


# -- the facts --------------------------------------------------------------------------------------


def facts(row: list[int], cuts: list[int] | None = None) -> PositionInfo:
    documents = None if cuts is None else Documents.from_cu_seqlens(cuts)
    return position_info(torch.tensor([row]), SequenceLayout(len(row), documents=documents))


def test_how_positions_run() -> None:
    assert facts([0, 1, 2, 3]) == PositionInfo(longest=3)
    assert facts([2, 3, 4, 5]) == PositionInfo(from_zero=False, longest=5)
    assert facts([0, 1, 0, 1]) == PositionInfo(from_zero=False, not_sequential=True, longest=1)
    assert facts([0, 1, 0, 1], [0, 2, 4]).restart
    assert facts([2, 3, 4, 5], [0, 2, 4]).restart
    assert not facts([0, 1, 2, 3], [0, 2, 4]).restart
    assert position_info(None, SequenceLayout(4)) == PositionInfo(longest=3)
