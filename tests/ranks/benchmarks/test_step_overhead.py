"""The strategy's own time: who is charged with what, and that both ways to train do the same."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.step_overhead import (
    _WATCHED,
    HEAD,
    NAMES,
    RESUME,
    STEP,
    Job,
    OwnTime,
    Share,
    StepTimes,
    cells,
    modes,
    train_by_hand,
    train_by_trainer,
)
from lightning_cp.bench.processes import on_ranks

TINY = Job(64, hidden=32, layers=1, heads=4)


def test_time_is_charged_to_who_runs() -> None:
    """A clock that the functions themselves move on; inner ones are not charged to outer ones."""
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    def outer() -> None:
        spend(1.0)
        place.inner()
        spend(2.0)
        place.theirs()
        spend(4.0)

    def theirs() -> None:
        spend(100.0)
        place.inner()

    place = SimpleNamespace(inner=lambda: spend(10.0), outer=outer, theirs=theirs)
    time_of = OwnTime(lambda: now[0])
    own = dict(vars(place))
    for attribute, name in (("inner", "in"), ("outer", "out"), ("theirs", None)):
        time_of.watch(place, attribute, name)
    spend(1000.0)
    place.outer()
    spend(1000.0)
    place.inner()
    assert time_of.seconds == {"out": 7.0, "in": 30.0}
    time_of.unwatch()
    assert vars(place) == own


def test_a_function_that_raises_is_charged_too() -> None:
    now = [0.0]

    def fail() -> None:
        now[0] += 1.0
        raise ValueError("told")

    time_of = OwnTime(lambda: now[0])
    with pytest.raises(ValueError, match="told"), time_of.during("outer"):
        time_of.counted(fail, "inner")()
    now[0] += 5.0
    time_of.counted(lambda: None, "other")()
    assert time_of.seconds == {"outer": 0.0, "inner": 1.0, "other": 0.0}


def test_an_inherited_method_is_inherited_again() -> None:
    class Parent:
        def method(self) -> int:
            return 3

    class Child(Parent):
        pass

    time_of = OwnTime()
    time_of.watch(Child, "method", "child")
    assert "method" in vars(Child)
    assert Child().method() == 3
    time_of.unwatch()
    assert "method" not in vars(Child)


def test_only_functions_of_the_package_are_charged() -> None:
    """An inherited one would be charged with the backward of the model, or with its optimizer."""
    ours = [(owner, attribute) for owner, attribute, name in _WATCHED if name in (STEP, RESUME)]
    assert ours
    for owner, attribute in ours:
        assert getattr(owner, attribute).__module__.startswith("lightning_cp."), attribute


def both_ways() -> list[tuple[StepTimes, StepTimes, float]]:
    """The runs of one rank, one document and packed, and how far the trained weights are apart."""
    found: list[tuple[StepTimes, StepTimes, float]] = []
    for job in (TINY, Job(64, 3, hidden=32, layers=1, heads=4, hooks=True, states=2)):
        recorder = train_by_trainer(job, modes(2)["ring"], 2)
        steps, network = train_by_hand(job, recorder)
        pairs = zip(network.parameters(), recorder.network.parameters(), strict=True)
        apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
        found.append((recorder.steps, steps, apart))
    return found


@pytest.mark.nightly
def test_both_ways_train_alike_and_every_part_is_seen() -> None:
    ranks = on_ranks(2, both_ways)
    for runs in zip(*ranks, strict=True):
        for trained, looped, apart in runs:
            assert apart < 1e-4  # AdamW's steps are 3e-3 whatever the gradients
            assert len(trained.cpu) == len(trained.own) == len(looped.cpu) == 2
            assert all(set(NAMES) <= own.keys() for own in trained.own)
            assert all(
                sum(own.values()) < cpu for own, cpu in zip(trained.own, trained.cpu, strict=True)
            )
        share = Share.of([(trained, looped) for trained, looped, _ in runs])
        assert 0 < share.share < 1
        row = cells([share, share])
        assert len(row) == len(HEAD) - 3
        assert all(math.isfinite(float(cell.rstrip("%"))) for cell in row)


def test_shares_are_of_the_sums_over_ranks() -> None:
    one, two = (
        StepTimes([2.0, 4.0], [{"step": 0.5}, {"step": 0.1}]),
        StepTimes([1.0, 1.0], [{}, {}]),
    )
    share = Share.of([(one, StepTimes([1.0])), (two, StepTimes([2.0]))])
    assert (share.step, share.own["step"], share.cpu_by_hand) == (4.0, 0.3, 3.0)
    assert share.share == pytest.approx(0.075)
    assert torch.tensor(sum(share.own.values())) == pytest.approx(0.3)
