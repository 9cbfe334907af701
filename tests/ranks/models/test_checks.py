"""Checks that wait for another message, and are told in time."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from lightning_cp.errors import BatchMismatchError, ConfigError, RankFailure
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.rank_checks import RankChecks
from tests.helpers.attention.wire import Wire
from tests.helpers.pool import RankError, expect_on_every_rank, run_ranks


def passes() -> None:
    """Nothing is wrong."""


def fails() -> None:
    raise ConfigError("told to all")


def votes(rank: int, world_size: int) -> list[int]:
    """How many messages there were after each call."""
    mesh = ContextParallelMesh(ring_size=2, device_type="cpu")
    checks, found = RankChecks(mesh), []
    with Wire() as wire:
        for call in (
            lambda: checks.run("outer", passes, more_follow=True),
            lambda: checks.run("inner", passes),
            checks.flush_before_data,
            lambda: checks.run("outer", passes, more_follow=True),
            checks.flush_before_data,
            checks.flush_before_data,
            lambda: checks.run_deferred("loss", passes),
        ):
            call()
            found.append(wire.counts.get("allreduce_", 0))
        with checks.deferring():
            checks.run_deferred("loss", fails)
            checks.flush_before_data()
            found.append(wire.counts.get("allreduce_", 0))
        assert checks.pop().names == ["loss"]
    mesh.destroy()
    return found


def test_a_check_waits_for_the_next_one_but_not_for_data() -> None:
    assert run_ranks(2, votes) == [[0, 1, 1, 1, 2, 2, 3, 3]] * 2


def on_rank_1(rank: int, world_size: int, call: Callable[[RankChecks, int], None]) -> None:
    mesh = ContextParallelMesh(ring_size=2, device_type="cpu")
    try:
        call(RankChecks(mesh), rank)
    finally:
        mesh.destroy()


def outer_fails(checks: RankChecks, rank: int) -> None:
    checks.run("outer", fails if rank else passes, more_follow=True)
    checks.run("inner", passes)


def noted_fails(checks: RankChecks, rank: int) -> None:
    with checks.deferring():
        checks.run_deferred("loss", fails if rank else passes)
        checks.run("another call", passes)


def other_checks(checks: RankChecks, rank: int) -> None:
    if rank:
        checks.run("outer", passes, more_follow=True)
    checks.run("inner", passes)


@pytest.mark.parametrize("call", [outer_fails, noted_fails])
def test_a_failure_that_was_not_told_yet_comes_with_the_next_message(call: object) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, on_rank_1, call, timeout=20)
    errors = caught.value.errors
    assert [type(errors[rank]) for rank in (0, 1)] == [RankFailure, ConfigError]
    assert "rank 1 raised ConfigError: told to all" in str(errors[0])


def test_checks_that_only_one_rank_makes_are_refused() -> None:
    match = "not at the same call"
    expect_on_every_rank(2, on_rank_1, other_checks, error=BatchMismatchError, match=match)


def test_the_steps_end_drops_what_waits() -> None:
    checks = RankChecks(mock.Mock(cp_size=2, sample_size=2))
    checks.run("outer", passes, more_follow=True)
    checks.clear()
    checks.flush_before_data()  # nobody is told
    assert not checks.pop().names
