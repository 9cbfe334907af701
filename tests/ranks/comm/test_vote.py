"""Votes: unanimous on every rank or on none, in one sum of 16 bytes."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch.distributed as dist

from lightning_cp.comm.consensus import all_equal, all_equal_sum, check_equal, gather_by_vote
from lightning_cp.errors import BatchMismatchError
from tests.helpers.attention.wire import Wire
from tests.helpers.pool import expect_on_every_rank, run_ranks

Ballot = tuple[object, bool]
"""What a rank votes, and whether it dissents."""


def votes(rank: int, world_size: int, polls: list[list[Ballot]]) -> list[bool]:
    assert dist.group.WORLD is not None
    return [all_equal(poll[rank][0], dist.group.WORLD, dissents=poll[rank][1]) for poll in polls]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_vote_alike_or_not(ranks: int) -> None:
    same = [[(value, False)] * ranks for value in ("a", ("a", 1), -(2**63), None, 2**70)]
    dissent = [[("a", rank in who) for rank in range(ranks)] for who in ({0}, {ranks - 1})]
    every = [[("a", True)] * ranks]
    polls = [*same, *dissent, *every]
    assert run_ranks(ranks, votes, polls) == [[True] * len(same) + [False] * 3] * ranks


def test_whoever_is_odd_is_found() -> None:
    """Whatever cancels between two ranks, or two groups, must not cancel here."""
    polls = [
        [(value, False) for value in values]
        for values in {*permutations("aabb"), *permutations("aaab"), *permutations("abcd")}
    ]
    assert run_ranks(4, votes, polls) == [[False] * len(polls)] * 4


def tallies(
    rank: int, world_size: int, polls: list[tuple[str, ...]], size: int
) -> list[int | None]:
    """Parts of ``size`` ranks; every rank counts 10 ** rank."""
    assert dist.group.WORLD is not None
    of = (rank // size, size)
    return [
        all_equal_sum("call", dist.group.WORLD, number=10**rank, of=of, own=poll[rank])
        for poll in polls
    ]


def test_parts_may_differ_and_ranks_of_a_part_may_not() -> None:
    good = [tuple("aaaa"), tuple("aabb"), tuple("bbaa")]
    bad = [tuple("abab"), tuple("abba"), tuple("aaab"), tuple("baaa"), tuple("abcd")]
    assert run_ranks(4, tallies, good + bad, 2) == [[1111] * 3 + [None] * 5] * 4


def other_calls(rank: int, world_size: int) -> None:
    """The parts are each of one mind, but at different calls."""
    assert dist.group.WORLD is not None
    what = "batch" if rank < 2 else "loader"
    assert all_equal_sum(what, dist.group.WORLD, of=(rank // 2, 2), own="a") is None


def test_parts_at_different_calls_find_that_out() -> None:
    run_ranks(4, other_calls)


def at_different_calls(rank: int, world_size: int) -> None:
    assert dist.group.WORLD is not None
    if rank:
        gather_by_vote([1], dist.group.WORLD, what="names")
    else:
        check_equal({"tokens": 1}, dist.group.WORLD, what="batch")


def test_ranks_at_different_calls_are_refused_on_every_rank() -> None:
    match = "not at the same call"
    expect_on_every_rank(3, at_different_calls, error=BatchMismatchError, match=match)


def messages(rank: int, world_size: int) -> dict[str, int]:
    assert dist.group.WORLD is not None
    with Wire() as wire:
        check_equal({"tokens": 1}, dist.group.WORLD, what="batch")
        assert gather_by_vote([1], dist.group.WORLD, what="names") == [[1]] * world_size
    return wire.counts


def test_who_agrees_sends_nothing_but_votes() -> None:
    assert run_ranks(2, messages) == [{"allreduce_": 2}] * 2
