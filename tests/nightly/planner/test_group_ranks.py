"""The groups of a rank that one process plays: those of plain counting, whatever the sizes."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_cp.apps.plan.verify import coordinates, fake_world, ranks_along
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Axis
from tests.helpers.planner.apart import Call, apart
from tests.helpers.pool import expect_on_every_rank

MESHES: dict[str, tuple[dict[str, int], int]] = {
    "one rank": ({}, 0),
    "all axes": ({str(axis): 2 for axis in Axis}, 21),
    "hybrid": ({"ring": 2, "ulysses": 4, "dp_shard": 2}, 11),
    "different": ({"dp_replicate": 2, "dp_shard": 3, "ring": 5, "ulysses": 4, "tp": 2}, 239),
    "405b": ({"dp_shard": 4, "ring": 4, "ulysses": 8, "tp": 8}, 517),
    "replicas only": ({"dp_replicate": 1024}, 1023),
}
OTHER: dict[str, dict[str, int]] = {
    "ring and ulysses swapped": {"dp_shard": 2, "ring": 4, "ulysses": 2},
    "all of it ulysses": {"dp_shard": 2, "ulysses": 8},
    "replicas in place of shards": {"dp_replicate": 2, "ring": 2, "ulysses": 4},
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Of all meshes, by name; and of one of them with other sizes expected."""
    hybrid, rank = MESHES["hybrid"]
    calls: dict[str, Call] = {
        name: ("groups", {"sizes": sizes, "rank": own}) for name, (sizes, own) in MESHES.items()
    }
    calls |= {
        name: ("groups", {"sizes": hybrid, "rank": rank, "expected": expected})
        for name, expected in OTHER.items()
    }
    calls["no such rank"] = ("groups", {"sizes": hybrid, "rank": 16})
    return dict(zip(calls, apart([*calls.values()]), strict=True))


@pytest.mark.parametrize("name", MESHES)
def test_every_group_holds_the_ranks_that_counting_gives(
    answers: dict[str, Any], name: str
) -> None:
    found = answers[name]["groups"]
    names = [*Axis, "cp", "fsdp", "data", "loss", "control cp", "control loss"]
    assert [each["name"] for each in found] == names
    assert [each for each in found if not each["agrees"]] == []


def test_the_ranks_of_one_mesh_by_hand(answers: dict[str, Any]) -> None:
    """Rank 21 of 2 x 2 x 2 x 2 x 2 is 10101 in binary."""
    found = {each["name"]: each["found"] for each in answers["all axes"]["groups"]}
    assert answers["all axes"]["places"] == [0b10, 1, 0, 1]
    assert found == {
        "dp_replicate": [5, 21],
        "dp_shard": [21, 29],
        "ring": [17, 21],
        "ulysses": [21, 23],
        "tp": [20, 21],
        "cp": [17, 19, 21, 23],
        "fsdp": [17, 19, 21, 23, 25, 27, 29, 31],
        "data": [5, 13, 21, 29],
        "loss": [*range(1, 32, 2)],
        "control cp": [*range(16, 24)],
        "control loss": [*range(32)],
    }


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ring and ulysses swapped", ["ring", "ulysses"]),
        ("all of it ulysses", ["ring", "ulysses"]),
        ("replicas in place of shards", ["dp_replicate", "dp_shard", "fsdp"]),
    ],
)
def test_groups_of_other_sizes_are_named(
    answers: dict[str, Any], name: str, wrong: list[str]
) -> None:
    """Rank 11 of dp_shard 2 x ring 2 x ulysses 4."""
    found = answers[name]["groups"]
    assert [each["name"] for each in found if not each["agrees"]] == wrong
    assert all((each["found"] != each["expected"]) != each["agrees"] for each in found)


def test_counting() -> None:
    sizes = {Axis.DP_SHARD: 3, Axis.ULYSSES: 2, Axis.TP: 5}
    assert coordinates(sizes, 17) == {
        Axis.DP_REPLICATE: 0,
        Axis.DP_SHARD: 1,
        Axis.RING: 0,
        Axis.ULYSSES: 1,
        Axis.TP: 2,
    }
    assert ranks_along(sizes, 17, [Axis.DP_SHARD]) == (7, 17, 27)
    assert ranks_along(sizes, 17, [Axis.ULYSSES, Axis.DP_SHARD]) == (2, 7, 12, 17, 22, 27)
    assert ranks_along(sizes, 17, []) == (17,)


def test_a_rank_that_is_not_there(answers: dict[str, Any]) -> None:
    assert answers["no such rank"]["error"] == (
        "rank must be from 0 to 15, as there are 16, got 16. Name one of these ranks."
    )


def within_a_group(rank: int, world_size: int) -> None:
    with fake_world({Axis.RING: 2}, 0):
        raise AssertionError("a process has two worlds")


def test_a_process_that_is_in_a_group() -> None:
    expect_on_every_rank(
        *(1, within_a_group),
        error=ConfigError,
        match=r"a separate process, but this one is rank 0 of a process group of 1 \(gloo\)",
    )
