"""What a program's ranks wait for when they end."""

from __future__ import annotations

import threading
import time
from multiprocessing import util
from unittest import mock

import torch
import torch.distributed as dist

from lightning_cp.launch import ranks as end
from tests.helpers.pool import run_ranks


def of_a_rank(rank: int, world_size: int) -> list[str]:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
    return end.thread_states(end.GLOO_THREAD)


def test_gloo_s_threads_are_known_by_their_name() -> None:
    for states in run_ranks(2, of_a_rank):
        if torch.__version__ < "2.11":  # it does not name them: they are given a moment
            assert not states
        else:
            assert set(states) == {"S"}


def test_a_thread_that_has_something_to_do_is_waited_for() -> None:
    over = threading.Event()

    def work() -> None:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass
        over.set()

    worker = threading.Thread(target=work)
    worker.start()
    states = mock.Mock(side_effect=lambda _: ["S" if over.is_set() else "R"])
    with mock.patch.object(end, "thread_states", states):
        end.wait_for_gloo()
    assert over.is_set()
    worker.join()


def test_nobody_is_waited_for_for_ever() -> None:
    began = time.monotonic()
    states = mock.patch.object(end, "thread_states", return_value=["R"])
    with states, mock.patch.object(end, "IDLE_TIMEOUT", 0.1):
        end.wait_for_gloo()
    assert 0.1 <= time.monotonic() - began < 5


def test_it_is_called_once_when_a_process_ends() -> None:
    with mock.patch.object(end, "_registered", []):
        end.wait_for_gloo_at_exit()
        end.wait_for_gloo_at_exit()
        (made,) = end._registered
        assert made.still_active()
        assert made in util._finalizer_registry.values()  # type: ignore[attr-defined]
        made.cancel()
