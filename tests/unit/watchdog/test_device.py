"""The progress of devices, by stand-ins: who waits for them is not ended, and who stands still is named."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.comm.all_gather import PendingShards
from lightning_cp.comm.all_to_all import AllToAll
from lightning_cp.comm.transfer import PendingMessage, Transfer
from lightning_cp.comm.waits import wait_for
from lightning_cp.config import StrategyConfig
from lightning_cp.strategies.validation import check
from lightning_cp.watchdog import device as devices
from lightning_cp.watchdog import thread as watchers
from lightning_cp.watchdog.attribution import FailureAttribution
from lightning_cp.watchdog.device import DeviceQueue, device_queue
from lightning_cp.watchdog.messages import Heartbeat, RankIdentity, Verdict
from lightning_cp.watchdog.phase import (
    DevicePosition,
    Phase,
    PhasePosition,
    Position,
    ProgressHooks,
    Slot,
    count,
    ignore,
    sign_of_work,
)
from lightning_cp.watchdog.thread import Hub, Member, Watcher
from lightning_cp.watchdog.watch import LOOPBACK, _listen, seconds_of_step

PERIOD, LIMIT = 0.02, 1.0
BACKWARD, OPTIMIZER = PhasePosition(7, 1, Phase.BACKWARD), PhasePosition(7, 1, Phase.OPTIMIZER)


class Stub:
    """A device that has done as many of its events as it is told."""

    def __init__(self) -> None:
        self.done = self.made = self.recorded = 0
        self.error: Exception | None = None

    def __call__(self) -> StubEvent:
        self.made += 1
        return StubEvent(self)


class StubEvent:
    def __init__(self, device: Stub) -> None:
        self._device, self._number = device, 0

    def record(self) -> None:
        self._device.recorded += 1
        self._number = self._device.recorded

    def query(self) -> bool:
        if self._device.error is not None:
            raise self._device.error
        return self._number <= self._device.done


def with_device(rank: int = 0) -> tuple[Position, Stub]:
    position, stub = Position(), Stub()
    position.device = DeviceQueue(f"cuda:{rank}", stub)
    return position, stub


def busy(since: int = 30, rank: int = 1, *, waits: bool = False) -> DevicePosition:
    return DevicePosition(BACKWARD, since, is_busy=True, waits=waits, name=f"cuda:{rank}")


def test_events_are_counted_in_their_order() -> None:
    stub = Stub()
    queue: DeviceQueue[str] = DeviceQueue("cuda:0", stub)
    for mark in "abc":
        queue.record(mark)
    queue.poll()
    assert (queue.completed, queue.reached, queue.is_busy) == (0, None, True)
    stub.done = 2
    queue.poll()
    assert (queue.completed, queue.reached, queue.is_busy) == (2, "b", True)
    queue.record("d")
    assert stub.made == 3  # one is used again
    stub.done = 4
    queue.poll()
    assert (queue.completed, queue.reached, queue.is_busy) == (4, "d", False)


def test_events_are_bounded_and_left_out_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "MAX_EVENTS", 3)
    stub, may = Stub(), [True]
    queue: DeviceQueue[int] = DeviceQueue("cuda:0", stub, lambda: may[0])
    for mark in range(9):
        queue.record(mark)
    assert stub.recorded == 3
    stub.done, may[0] = 3, False
    queue.poll()
    queue.record(9)
    assert stub.recorded == 3


def test_a_device_that_failed_is_asked_no_more() -> None:
    """The watcher lives, and the main thread's next call raises the error."""
    position, stub = with_device()
    position.record_work()
    stub.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    found = position.poll_device()
    assert found is not None
    assert not found.is_busy
    position.record_work()
    assert stub.recorded == 1


def test_cpus_have_no_queue() -> None:
    assert device_queue(torch.device("cpu")) is None
    position = Position()
    position.record_work()
    assert (position.signs, position.poll_device()) == (1, None)


def test_what_is_recorded() -> None:
    """Attention calls, gradients, groups of sharded gradients, and phases; no bytes of files."""
    position, stub = with_device()
    hooks, model = ProgressHooks(position), nn.Linear(2, 2)

    class OwnAttention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def recorded(act: Callable[[], Any]) -> int:
        before = stub.recorded
        act()
        return stub.recorded - before

    attention = OwnAttention()
    hooks.follow(nn.Sequential(model, attention), attention=True)
    assert recorded(lambda: attention(torch.ones(1))) == 1
    assert recorded(lambda: model(torch.ones(1, 2)).sum().backward()) == 2
    assert recorded(lambda: position.enter(Phase.OPTIMIZER)) == 1
    assert recorded(position.progress) == 0
    count(position)
    assert recorded(sign_of_work) == 1
    ignore(position)
    hooks.forget()


class Message:
    """As in flight."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self.found: DevicePosition | None = None

    def wait(self) -> None:
        self.found = self._position.poll_device()


def test_waits_for_messages_are_recorded() -> None:
    position, stub = with_device()
    position.begin_micro_batch()
    stub.done, message = 99, Message(position)
    count(position)
    for pending in (
        Transfer(None, None, [message]),  # type: ignore[list-item]
        PendingMessage(torch.ones(1), None, message),  # type: ignore[arg-type]
        AllToAll(torch.ones(1), None, message, lambda x: (x,)),  # type: ignore[arg-type]
        PendingShards(torch.ones(1), torch.ones(1), message),  # type: ignore[arg-type]
    ):
        before, message.found = stub.recorded, None
        pending.wait()
        assert stub.recorded == before + 2
        assert message.found == DevicePosition(position.place, 1, False, True, "cuda:0")
        after = position.poll_device()
        assert after is not None
        assert not after.waits
    ignore(position)
    wait_for(message)  # type: ignore[arg-type]
    assert stub.recorded == before + 2


def test_a_device_s_position_is_that_of_the_work_which_it_has_done() -> None:
    position, stub = with_device(3)
    position.begin_micro_batch()
    position.enter(Phase.BACKWARD)
    position.record_work()
    position.enter(Phase.OPTIMIZER)
    stub.done = 3
    place = PhasePosition(1, 1, Phase.BACKWARD)
    assert position.poll_device() == DevicePosition(place, 3, is_busy=True, name="cuda:3")
    stub.done = 4
    found = position.poll_device()
    assert found == DevicePosition(position.place, 4, is_busy=False, name="cuda:3")
    assert position.signs == position.count + 4


def test_other_ranks_can_read_a_device_s_position() -> None:
    position, stub = with_device()
    slot = Slot(token=bytes(16))
    other = Slot(slot.path, bytes(16))
    position.connect(slot)
    position.begin_micro_batch()
    position.enter(Phase.BACKWARD)
    stub.done = 2
    position.poll_device()
    assert other.read() == PhasePosition(1, 1, Phase.BACKWARD)
    assert other.read_device() == DevicePosition(
        PhasePosition(1, 1, Phase.FORWARD), 1, is_busy=True
    )
    position.connect(None)
    slot.unlink()
    slot.close()
    other.close()


def test_a_message_has_the_device_s_position() -> None:
    for device in (None, busy(), busy(waits=True)):
        beat = Heartbeat(4, 2, OPTIMIZER, 8.0, "here", "", device)
        assert Heartbeat.of_message(beat.as_message()) == beat


# Watchers of two ranks, with connections, in one process.


Pair = tuple[list[Position], list[Stub], list[Verdict]]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Hosts that have enqueued a backward and stand in the optimizer's step: nine events of each device."""
    monkeypatch.setattr(watchers, "PERIOD", PERIOD)
    positions, stubs = map(list, zip(*map(with_device, range(2)), strict=True))
    for position in positions:
        position.begin_micro_batch(after=6)
        position.enter(Phase.BACKWARD)
        for _ in range(6):
            position.record_work()
        position.enter(Phase.OPTIMIZER)
    identities = [RankIdentity(rank, f"rank {rank}", "here", os.getpid(), "") for rank in range(2)]
    listener, ends = _listen(LOOPBACK), list[Verdict]()
    link = socket.create_connection((LOOPBACK, listener.getsockname()[1]))
    shared: Any = ({}, lambda *_: LIMIT, "a5" * 16, ends.append)
    first = Hub(0, identities, positions[0], *shared, listener=listener)
    found: list[Watcher] = [first, Member(1, identities, positions[1], *shared, hub=link)]
    for each in found:
        each.start()
    yield positions, stubs, ends
    for each in reversed(found):
        each.leave()
        each.join(10)
        assert not each.is_alive()


def verdict_of(ends: list[Verdict]) -> Verdict:
    until = time.monotonic() + 20
    while not ends and time.monotonic() < until:
        time.sleep(PERIOD)
    return ends[0]


def test_hosts_may_wait_for_a_device_that_works(pair: Pair) -> None:
    """Twice as long as the limit and longer, while events become complete."""
    _, stubs, ends = pair
    stubs[0].done = 9
    until = time.monotonic() + 3 * LIMIT
    while time.monotonic() < until:
        time.sleep(LIMIT / 3)
        stubs[1].done += 1
    assert stubs[1].done <= 9
    assert not ends
    assert "rank 0" in verdict_of(ends).line  # it is done, and its host goes no further


def test_the_device_that_stands_still_is_named(pair: Pair) -> None:
    _, stubs, ends = pair
    stubs[0].done, stubs[1].done = 9, 5
    verdict = verdict_of(ends)
    assert verdict.ranks == (1,)
    assert verdict.line.endswith(
        "first to stop: rank 1, whose device cuda:1 stands still at step 7, in backward "
        "(its host is at step 7, in optimizer)"
    )


# What the attribution makes of it.


def line_of(*beats: Heartbeat, now: float = 10.6) -> str:
    attribution = FailureAttribution([f"rank {rank}" for rank in range(len(beats))], 0.0)
    for rank, beat in enumerate(beats):
        attribution.record_beat(rank, beat, 0.0)
        attribution.record_beat(rank, beat, now - 0.1)
    found = attribution.verdict(now)
    assert found is not None
    return found.line


def test_a_device_that_waits_for_one_that_is_behind_is_not_named() -> None:
    said = line_of(
        *(Heartbeat(90, 50, OPTIMIZER, 10.0, device=busy(32 - at, at)) for at in range(3))
    )
    assert "first to stop: rank 2, whose device cuda:2 stands still at step 7, in backward" in said
    assert "rank 1" not in said


def test_a_device_that_waits_in_a_collective_is_not_named() -> None:
    """It has done all of its own at this place; the one that it waits for has not."""
    said = line_of(
        *(Heartbeat(90, 50, OPTIMIZER, 10.0, device=busy(30, at, waits=at != 2)) for at in range(3))
    )
    assert "first to stop: rank 2, whose device cuda:2 stands still at step 7, in backward" in said
    assert "rank 1" not in said
    said = line_of(
        *(Heartbeat(90, 50, OPTIMIZER, 10.0, device=busy(30, at, waits=True)) for at in range(2))
    )
    assert "all of them: rank 0, whose device cuda:0 waits for other ranks at step 7" in said


def test_a_host_that_gives_its_device_no_work_is_named() -> None:
    """The other's device waits for it in a collective, at the same place."""
    idle = DevicePosition(BACKWARD, 30, is_busy=False, name="cuda:0")
    said = line_of(
        Heartbeat(90, 30, BACKWARD, 10.0, "x.py, in sleep", device=idle),
        Heartbeat(90, 50, OPTIMIZER, 10.0, device=busy(30)),
    )
    assert said.endswith("first to stop: rank 0 at step 7, in backward")


def test_a_host_that_waits_for_another_s_device_is_not_named() -> None:
    idle = DevicePosition(BACKWARD, 30, is_busy=False, name="cuda:0")
    said = line_of(
        Heartbeat(90, 30, BACKWARD, 10.0, "torch/distributed/x.py, in wait", device=idle),
        Heartbeat(90, 50, OPTIMIZER, 10.0, device=busy(30)),
    )
    assert "first to stop: rank 1, whose device cuda:1 stands still" in said


def test_a_rank_without_signs_of_life_had_a_device() -> None:
    attribution = FailureAttribution(["rank 0", "rank 1"], 0.0)
    attribution.record_beat(0, Heartbeat(1, 1, OPTIMIZER, 10.0), 10.4)
    attribution.record_beat(1, Heartbeat(1, 1, OPTIMIZER, 10.0, device=busy()), 0.0)
    found = attribution.verdict(10.6)
    assert found is not None
    assert found.line == (
        "rank 1 gave no sign of life for 11 s, at step 7, in optimizer; its device cuda:1 was at step 7, in "
        "backward"
    )


@pytest.mark.parametrize(
    ("given", "first", "device", "seconds"),
    [
        ("auto", 600.0, "cpu", 120.0),
        ("auto", 600.0, "cuda", 360.0),
        ("auto", None, "cuda", 360.0),
        ("auto", 200.0, "cuda", 200.0),
        (90.0, 600.0, "cuda", 90.0),
        (None, 600.0, "cuda", None),
    ],
)
def test_a_device_is_given_longer_unless_seconds_are_set(
    given: Any, first: float | None, device: str, seconds: float | None
) -> None:
    check(StrategyConfig(step_timeout=given, first_step_timeout=first))
    assert seconds_of_step(given, first, torch.device(device)) == seconds
