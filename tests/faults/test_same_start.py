"""Ranks that start with something else are told so, all of them, at setup."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.watch import same
from tests import pool


def _start(rank: int, world_size: int, odd: int, what: str) -> None:
    if rank == odd and what in ("lightning_cp source", "torch version"):
        changed = {**same.facts(Settings()), what: "another one"}
        made: Any = same
        made.facts, before = lambda *_: changed, same.facts
        try:
            same.require_same_start(Settings())
        finally:
            made.facts = before
        return
    same.require_same_start(Settings(layout="zigzag") if rank == odd else Settings())


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("what", ["layout", "lightning_cp source", "torch version"])
def test_what_differs_is_named(odd: int, what: str) -> None:
    ranks = "rank 0: .*; rank 1: .*" if what != "layout" else "rank 0: '.*'; rank 1: '.*'"
    match = rf"different values of {what} \({ranks}\)"
    pool.expect_on_every_rank(2, _start, odd, what, error=ConfigError, match=match)


def test_equal_starts_pass() -> None:
    pool.run_ranks(2, _start, 9, "layout")


def test_values_are_compared_without_addresses() -> None:
    assert same._shown([object()]) == same._shown([object()])
