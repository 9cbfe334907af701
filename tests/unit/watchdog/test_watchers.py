"""Two watchers of one process, connected as those of two ranks: what they hear, and whom they end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_cp.watchdog import attribution as verdicts
from lightning_cp.watchdog import thread as hubs
from lightning_cp.watchdog import thread as watchers
from lightning_cp.watchdog.messages import BROKEN, Note, RankIdentity, Verdict
from lightning_cp.watchdog.phase import Phase, PhasePosition, Position
from lightning_cp.watchdog.thread import Hub, Member, Watcher
from lightning_cp.watchdog.watch import LOOPBACK, _listen

TOKEN = "a5" * 16
PATIENCE, GRACE, PERIOD = 0.05, 0.3, 0.02


class Ended:
    """What a rank's watcher would have ended its process with."""

    def __init__(self) -> None:
        self.by: Verdict | None = None
        self.at = 0.0
        self._is_over = threading.Event()

    def __call__(self, verdict: Verdict) -> None:
        self.by, self.at = verdict, time.monotonic()
        self._is_over.set()

    def wait(self, seconds: float) -> bool:
        return self._is_over.wait(seconds)


Pair = tuple[list[Watcher], list[Ended]]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """The watchers of ranks 0 and 1, in a hurry, and their ends."""
    monkeypatch.setattr(verdicts, "PATIENCE", PATIENCE)
    monkeypatch.setattr(hubs, "GRACE", GRACE)
    for module in (hubs, watchers):
        monkeypatch.setattr(module, "PERIOD", PERIOD)
    identities = [
        RankIdentity(rank, f"rank {rank}", "here", os.getpid(), "", "1:2") for rank in range(2)
    ]
    ends = [Ended(), Ended()]
    listener = _listen(LOOPBACK)
    link = socket.create_connection((LOOPBACK, listener.getsockname()[1]))
    first = Hub(0, identities, Position(), {}, lambda *_: None, TOKEN, ends[0], listener=listener)
    second = Member(1, identities, Position(), {}, lambda *_: None, TOKEN, ends[1], hub=link)
    found: list[Watcher] = [first, second]
    for each in found:
        each.start()
    yield found, ends
    for each in (second, first):
        each.leave()
        each.join(10)
        assert not each.is_alive()


@pytest.mark.parametrize("rank", [0, 1])
def test_who_alone_has_a_connections_error_shows_it(rank: int, pair: Pair) -> None:
    """The others end once it had time to; it is not ended by its own watcher."""
    found, ends = pair
    note = Note(
        "RuntimeError: timed out", "its traceback", BROKEN, PhasePosition(3, 1, Phase.FORWARD)
    )
    found[rank].note(note)
    began = time.monotonic()
    found[rank].wait(10)
    assert found[rank].is_named
    assert ends[1 - rank].wait(10)
    by = ends[1 - rank].by
    assert by is not None
    assert by.line == f"rank {rank} raised at step 3, in forward: RuntimeError: timed out"
    assert ends[1 - rank].at - began > GRACE
    assert not ends[rank].wait(2 * GRACE)


def test_ranks_that_write_to_one_place_say_once_where_they_stand(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest that is there does; a rank that has ended shows nothing any more."""
    (first, second), ends = pair
    stuck, left = Verdict("stuck", (1,), "line", "stacks"), Verdict("left", (0,), "rank 0 ended")
    silent = {"line": "", "details": ""}
    for verdict, says in ((stuck, 0), (left, 1)):
        for rank, each in enumerate((first, second)):
            shown = each._verdict_to_print(verdict)
            assert shown == (verdict if rank == says else replace(verdict, **silent))
    identities = [
        RankIdentity(rank, f"rank {rank}", "here", 0, "", f"1:{rank}") for rank in range(2)
    ]
    monkeypatch.setattr(second, "_identities", identities)  # each has a file of its own
    assert second._verdict_to_print(stuck) == stuck
    monkeypatch.setattr(verdicts.FailureAttribution, "verdict", lambda self, now: stuck)
    assert all(end.wait(10) for end in ends)


def test_who_ends_has_said_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its thread waits long for its turn: the others would take it for killed."""
    (_, second), ends = pair
    monkeypatch.setattr(second, "_judge", lambda now: time.sleep(1.5))
    time.sleep(5 * PERIOD)
    second.leave()
    assert isinstance(second, Member)
    second._hub.close()  # as the process's end does
    assert not ends[0].wait(1.0)


def raise_a_mistake(*_: object) -> None:
    raise KeyError("of ours")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["_handle", "_judge"])
def test_a_mistake_in_the_watch_is_shown_and_ends_nobody(
    where: str,
    rank: int,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither the run nor the watch: who fails after it is still told to all."""
    found, ends = pair
    with monkeypatch.context() as patch:
        patch.setattr(found[rank], where, raise_a_mistake)
        until = time.monotonic() + 10
        while (
            found[rank]._internal_errors <= watchers.MAX_PRINTED_ERRORS and time.monotonic() < until
        ):
            time.sleep(PERIOD)
    said = capsys.readouterr().err
    assert "KeyError: 'of ours'" in said
    assert f"rank {rank}'s watch" in said
    assert said.count("Traceback") == watchers.MAX_PRINTED_ERRORS
    assert [each.by for each in ends] == [None, None]
    assert found[0].is_alive()
    assert found[1].is_alive()
    found[0].note(Note("ValueError: of yours", "its traceback"))
    assert ends[1].wait(10)
    assert ends[1].by is not None
    assert "rank 0 raised" in ends[1].by.line
