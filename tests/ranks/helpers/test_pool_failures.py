"""The pool of ranks: every way to fail is reported, and survived by the next case."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.helpers.pool import RankError, expect_on_every_rank, run_ranks
from tests.helpers.pool import master as pool_master
from tests.helpers.pool import worker as pool_worker
from tests.helpers.pool.handle import Worker


def ready(rank: int, world_size: int) -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


def raise_on(rank: int, world_size: int, ranks: tuple[int, ...], error: Exception) -> str:
    print(f"rank {rank} was here", file=sys.stderr)
    if rank in ranks:
        raise error
    return "fine"


def test_a_failure_shows_each_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, raise_on, (1, 2), ValueError("too odd"))
    message = str(caught.value)
    assert (
        "2 of 3 ranks did not return from tests.ranks.helpers.test_pool_failures.raise_on"
        in message
    )
    for rank in (1, 2):
        assert f"--- rank {rank} raised: ValueError: too odd" in message
        assert f"| rank {rank} was here" in message
    assert "in raise_on" in message
    assert "--- rank 0 returned" in message
    assert {rank: str(error) for rank, error in caught.value.errors.items()} == {
        1: "too odd",
        2: "too odd",
    }
    assert [report.value for report in caught.value.reports] == ["fine", None, None]
    assert run_ranks(3, ready) == [3.0] * 3


class PicklesBadlyError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_badly(rank: int, world_size: int) -> None:
    raise PicklesBadlyError(1, 2)


def test_an_exception_that_cannot_travel_is_still_shown() -> None:
    with pytest.raises(
        RankError, match=r"ranks 0, 1 raised: .*PicklesBadlyError: 1 and 2"
    ) as caught:
        run_ranks(2, raise_badly)
    assert caught.value.errors == {}


def wait_for_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("gone")
    dist.barrier()


def sleep_on_rank_1(rank: int, world_size: int) -> None:
    print("dozing off", flush=True)
    if rank == 1:
        time.sleep(600)


def stop_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.nightly
def test_a_hang_ends_at_the_limit_and_says_where() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(2, sleep_on_rank_1, timeout=1.0)
    assert time.monotonic() - start < 60.0, "it sleeps for 600"
    assert caught.value.stuck == [1]
    message = str(caught.value)
    assert re.search(r"rank 1 still running: after [1-9]\.\d s \(limit 1 s\)", message)
    assert "in sleep_on_rank_1" in message
    assert "die_with_parent" not in message
    assert "| dozing off" in message
    assert run_ranks(2, ready) == [2.0, 2.0]


WRITES_ITS_STACKS_SLOWLY = """
import os, signal, sys, time
own = sys.argv[2]
parts = [
    'Thread 0x1 (most recent call first):\\n' + own + ' in die_with_parent\\n\\n',
    'Current thread 0x2 (most recent call first):\\n  File "case.py", line 7 in sleeps\\n' + own,
]
def dump(*_):
    for part in parts:
        with open(sys.argv[1], "a") as stacks:
            stacks.write(part)
        time.sleep(1.0)
signal.signal(signal.SIGUSR2, dump)
print("ready", flush=True)
while True:
    time.sleep(1.0)
"""


def test_a_stack_that_is_written_slowly_is_waited_for(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    stacks.touch()
    own_frame = f'  File "{pool_worker.__file__}", line 1'
    command = [sys.executable, "-c", WRITES_ITS_STACKS_SLOWLY, str(stacks), own_frame]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            worker = Worker(0, cast(Any, process), cast(Any, None), stacks, stacks)
            assert worker.dump_stacks().endswith("line 7 in sleeps")
        finally:
            process.kill()


@pytest.mark.nightly
def test_ranks_that_wait_for_a_failed_one_are_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_master, "GRACE", 1.0)
    with pytest.raises(RankError, match="rank 0 raised: ValueError: gone") as caught:
        run_ranks(3, wait_for_rank_0)
    assert caught.value.stuck == [1, 2]
    assert "in barrier" in caught.value.reports[1].trace


@pytest.mark.nightly
def test_a_stopped_rank_is_reported_and_killed() -> None:
    with pytest.raises(RankError, match="the process does not react"):
        run_ranks(2, stop_on_rank_1, timeout=1.0)
    assert run_ranks(2, ready) == [2.0, 2.0]


def die(rank: int, world_size: int, how: str) -> None:
    if rank == 1 and how == "exit":
        os._exit(3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("how", "code"), [("exit", "3"), ("kill", "-9")])
def test_a_dead_rank_is_reported(how: str, code: str) -> None:
    with pytest.raises(RankError, match=f"rank 1 died: .* exit code {code}") as caught:
        run_ranks(2, die, how)
    assert caught.value.died == [1]
    assert run_ranks(2, ready) == [2.0, 2.0]


def reduce_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


@pytest.mark.nightly
def test_ranks_out_of_step_fail_their_own_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_master, "SETTLE_LIMIT", 2.0)
    monkeypatch.setattr(pool_master, "GRACE", 1.0)
    with pytest.raises(RankError, match=r"did not return from .*reduce_on_rank_0"):
        run_ranks(2, reduce_on_rank_0)
    assert run_ranks(2, ready) == [2.0, 2.0]


def warn(rank: int, world_size: int) -> None:
    warnings.warn("old ways", DeprecationWarning, stacklevel=1)


def test_a_warning_in_a_rank_is_an_error() -> None:
    expect_on_every_rank(2, warn, error=DeprecationWarning, match="old ways")


@pytest.mark.filterwarnings("ignore:old ways:DeprecationWarning")
def test_a_mark_of_the_test_reaches_the_ranks() -> None:
    run_ranks(2, warn)


class FailsInDel:
    def __del__(self) -> None:
        raise OSError("lost in __del__")


def fail_in_del(rank: int, world_size: int) -> None:
    cycle: list[object] = [FailsInDel()]
    cycle.append(cycle)


def fail_in_thread(rank: int, world_size: int) -> None:
    thread = threading.Thread(target=raise_on, args=(0, 1, (0,), OSError("lost in a thread")))
    thread.start()
    thread.join()


@pytest.mark.parametrize("case", [fail_in_del, fail_in_thread])
def test_an_error_nobody_can_catch_fails_the_case(case: Any) -> None:
    expect_on_every_rank(2, case, error=RuntimeError, match=r"(?s)left errors behind.*lost in")


def test_expecting_an_error_returns_it_per_rank() -> None:
    found = expect_on_every_rank(
        2, raise_on, (0, 1), KeyError("which"), error=LookupError, match="whi"
    )
    assert [type(error) for error in found] == [KeyError, KeyError]


@pytest.mark.parametrize(
    ("ranks", "error", "reason"),
    [
        ((0,), ValueError("right"), "rank 1 returned"),
        ((0, 1), ValueError("wrong"), "ValueError: wrong"),
        ((0, 1), OSError("right"), "OSError: right"),
    ],
)
def test_expecting_an_error_refuses_anything_else(
    ranks: tuple[int, ...], error: Exception, reason: str
) -> None:
    with pytest.raises(
        RankError, match="where ValueError matching 'right' on every rank"
    ) as caught:
        expect_on_every_rank(2, raise_on, ranks, error, error=ValueError, match="right")
    assert reason in str(caught.value)


def test_expecting_an_error_refuses_a_hang() -> None:
    with pytest.raises(RankError, match="still running"):
        expect_on_every_rank(2, sleep_on_rank_1, error=ValueError, match="right", timeout=0.5)
