"""Ranks that start with something else are told so, all of them, at setup."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
from lightning.fabric import Fabric

import lightning_cp
from lightning_cp import fabric
from lightning_cp.config import StrategyConfig
from lightning_cp.consistency import settings as same
from lightning_cp.errors import ConfigError
from tests.helpers import pool
from tests.helpers.pool.environment import PoolEnvironment


def _start(rank: int, world_size: int, odd: int, what: str) -> None:
    if rank == odd and what in ("lightning_cp source", "torch version"):
        own = same.facts(StrategyConfig())
        assert what in own
        changed = {**own, what: "another one"}
        made: Any = same
        made.facts, before = lambda *_: changed, same.facts
        try:
            same.check_same_start(StrategyConfig())
        finally:
            made.facts = before
        return
    same.check_same_start(StrategyConfig(layout="zigzag") if rank == odd else StrategyConfig())


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("what", ["layout", "lightning_cp source", "torch version"])
def test_what_differs_is_named(odd: int, what: str) -> None:
    ranks = "rank 0: .*; rank 1: .*" if what != "layout" else "rank 0: '.*'; rank 1: '.*'"
    match = rf"different values of {what} \({ranks}\)"
    pool.expect_on_every_rank(2, _start, odd, what, error=ConfigError, match=match)


def test_equal_starts_pass() -> None:
    pool.run_ranks(2, _start, 9, "layout")


def test_values_are_compared_without_addresses() -> None:
    assert same.value_text([object()]) == same.value_text([object()])
    assert same.value_text({"a": _start}) == "{'a': tests.ranks.watchdog.test_same_start._start}"
    assert same.value_text(partial(_start, 1)) == same.value_text(partial(_start, 1))
    assert same.value_text(partial(_start, 1)) != same.value_text(partial(_start, 2))


def test_sets_have_no_order() -> None:
    """Strings are hashed with another seed in each process; these numbers collide."""
    one, other = {8, 0}, {0, 8}
    assert list(one) != list(other)
    assert same.value_text({"a": one}) == same.value_text({"a": other})


@pytest.mark.parametrize("end", ["y", "z"])
def test_long_values_are_compared_to_their_end(end: str) -> None:
    long = same.value_text({"a": ["x" * 2 * same.LONGEST + "y"]})
    assert len(long) < same.LONGEST + 40
    again = same.value_text({"a": ["x" * 2 * same.LONGEST + end]})
    assert (again == long) == (end == "y")


def _hook(state: object, bucket: Any) -> Any:
    raise NotImplementedError


CHOICES: dict[str, Any] = {
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "hook": {"ddp_comm_hook": _hook},
}


@pytest.mark.parametrize("what", CHOICES)
@pytest.mark.parametrize("kind", [lightning_cp.UlyssesRingStrategy, fabric.UlyssesRingStrategy])
def test_what_is_ddp_s_own_is_compared(what: str, kind: Any) -> None:
    chosen = kind(**CHOICES[what])._compared_options(precision=None)
    assert chosen[what] != kind()._compared_options(precision=None).get(what)


def test_fabric_s_precision_is_compared() -> None:
    found: set[str] = set()
    for name in ("32-true", "64-true", "bf16-mixed"):
        own: Any = fabric.UlyssesRingStrategy()
        Fabric(accelerator="cpu", devices=1, precision=name, strategy=own)
        found.add(str(own._compared_options(own.precision)["precision"]))
    assert len(found) == 3


def _watched(rank: int, world_size: int, odd: int) -> None:
    os.environ["LIGHTNING_CP_WATCH"] = "0" if rank == odd else "1"
    plugins: Any = [PoolEnvironment()]
    strategy = fabric.UlyssesRingStrategy()
    Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins).launch()


@pytest.mark.parametrize("odd", [0, 1])
def test_a_watch_that_is_off_on_some_ranks_is_named(odd: int) -> None:
    """Otherwise it is begun by some, who wait for the others."""
    match = r"different values of LIGHTNING_CP_WATCH \(rank 0: '\w+'; rank 1: '\w+'\)"
    pool.expect_on_every_rank(2, _watched, odd, error=ConfigError, match=match)
