"""Agreement: every rank raises, or none does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_cp.comm.consensus import Facts, check_equal, check_gathered, gather_facts
from lightning_cp.errors import BatchMismatchError, RankFailure, ShapeError
from tests.helpers.pool import RankError, expect_on_every_rank, run_ranks

PAIRS = ((0, 1), (2, 3))


def agree_on(rank: int, world_size: int, facts: list[dict[str, int]]) -> list[Facts]:
    assert dist.group.WORLD is not None
    check_equal(facts[rank], dist.group.WORLD, what="the batch")
    return [*gather_facts(facts[rank], dist.group.WORLD, what="the batch")]


def agree_in_pairs(
    rank: int, world_size: int, facts: list[dict[str, int]], what: str = "the batch"
) -> list[Facts]:
    group, own = dist.group.WORLD, facts[rank]
    assert group is not None
    every: list[Facts] = [*gather_facts(own, group, what=what)]
    check_gathered(every, group, what=what, within=PAIRS)
    return every


def agree_after(rank: int, world_size: int, errors: dict[int, Exception]) -> None:
    assert dist.group.WORLD is not None
    check_equal({"tokens": rank}, dist.group.WORLD, what="the batch", error=errors.get(rank))


def test_equal_facts_come_back_from_every_rank() -> None:
    facts = {"tokens": 12, "checksum": -(2**63)}
    for table in run_ranks(3, agree_on, [facts] * 3):
        assert table == [facts] * 3


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_different_fact_is_named_on_every_rank(odd: int) -> None:
    facts = [{"batch": 2, "tokens": 12 + (rank == odd)} for rank in range(3)]
    shown = ", ".join(f"rank {rank}: {12 + (rank == odd)}" for rank in range(3))
    expect_on_every_rank(
        3,
        agree_on,
        facts,
        error=BatchMismatchError,
        match=f"the batch: ranks that share one sample disagree on tokens {re.escape(f'({shown})')}",
    )


@pytest.mark.parametrize(
    "other", [{"batch": 2}, {"batch": 2, "rows": 12}, {"tokens": 12, "batch": 2}]
)
def test_different_names_are_refused_on_every_rank(other: dict[str, int]) -> None:
    facts = [{"batch": 2, "tokens": 12}, other]
    errors = expect_on_every_rank(
        2, agree_on, facts, error=BatchMismatchError, match="not at the same call"
    )
    assert "This rank has: batch, tokens" in str(errors[0])
    assert f"This rank has: {', '.join(other)}" in str(errors[1])


def test_only_ranks_of_one_list_must_agree() -> None:
    facts = [{"tokens": 12 + rank // 2} for rank in range(4)]
    assert run_ranks(4, agree_in_pairs, facts) == [facts] * 4
    expect_on_every_rank(4, agree_on, facts, error=BatchMismatchError, match="tokens")


def test_disagreement_in_one_list_raises_in_the_others_too() -> None:
    facts = [{"tokens": tokens} for tokens in (12, 12, 13, 14)]
    expect_on_every_rank(
        4,
        agree_in_pairs,
        facts,
        error=BatchMismatchError,
        match=r"tokens \(rank 2: 13, rank 3: 14\)",
    )


def test_lists_may_have_other_names() -> None:
    facts = [{"tokens": 1}, {"tokens": 1}, {"images": 2}, {"images": 2}]
    assert run_ranks(4, agree_in_pairs, facts) == [facts] * 4


def test_a_refused_rank_raises_its_own_error_and_the_others_carry_it() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, agree_after, {1: ShapeError("too short")})
    errors = caught.value.errors
    assert isinstance(errors[1], ShapeError)
    assert str(errors[1]) == "too short"
    for rank in (0, 2):
        assert isinstance(errors[rank], RankFailure)
        assert "rank 1 raised ShapeError: too short" in str(errors[rank])


def test_every_refused_rank_raises_its_own_error() -> None:
    errors = {0: ShapeError("too short"), 1: ShapeError("too long")}
    found = expect_on_every_rank(2, agree_after, errors, error=ShapeError, match="too")
    assert [str(error) for error in found] == ["too short", "too long"]


def test_an_error_comes_before_a_disagreement() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, agree_after, {0: ShapeError("too short")})
    assert [type(error) for error in caught.value.errors.values()] == [ShapeError, RankFailure]


def test_any_number_of_facts() -> None:
    facts = {f"fact {index}": index for index in range(200)}
    assert run_ranks(2, agree_on, [facts] * 2)[0] == [facts] * 2


def test_a_difference_in_names_that_only_one_list_has_is_told_to_all() -> None:
    """The other list sees no difference in its own names."""
    facts = [{"tokens": 1}, {"tokens": 1}, {"tokens": 1, "images": 2}, {"tokens": 1, "images": 3}]
    match = r"disagree on images \(rank 2: 2, rank 3: 3\)"
    expect_on_every_rank(4, agree_in_pairs, facts, error=BatchMismatchError, match=match)


def agree_elsewhere(rank: int, world_size: int) -> None:
    agree_in_pairs(
        rank, world_size, [{"tokens": 12}] * 4, "the batch" if rank < 2 else "the loader"
    )


def test_lists_at_different_calls_are_refused() -> None:
    match = "not at the same call"
    expect_on_every_rank(4, agree_elsewhere, error=BatchMismatchError, match=match)


def test_other_ranks_are_not_told_where_files_are() -> None:
    home = str(Path.home() / "secret" / "x.bin")
    errors = {
        0: FileNotFoundError(2, "No such file or directory", home),
        1: ValueError(f"cannot read {home}"),
    }
    with pytest.raises(RankError) as caught:
        run_ranks(3, agree_after, errors)
    told = str(caught.value.errors[2])
    assert "rank 0 raised FileNotFoundError: No such file or directory (x.bin)" in told
    assert "rank 1 raised ValueError: cannot read ~/secret/x.bin" in told
