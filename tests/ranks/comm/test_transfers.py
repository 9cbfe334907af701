"""One hop's transfer: what moves, and how long its buffers live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_cp.comm.all_gather import PendingShards, start_all_gather, start_reduce_scatter
from lightning_cp.comm.all_to_all import scatter_heads
from lightning_cp.comm.transfer import start_transfer
from tests.helpers.pool import run_ranks

Start = Callable[[torch.Tensor, dist.ProcessGroup], PendingShards]


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def rotate(rank: int, world_size: int, hop: int) -> None:
    send = torch.full((3, 2), float(rank))
    source = (rank - hop) % world_size
    transfer = start_transfer(send, (rank + hop) % world_size, (3, 2), source, send, world())
    received = transfer.wait()
    assert received is not None
    assert torch.equal(received, torch.full((3, 2), float(source)))


@pytest.mark.parametrize(("world_size", "hop"), [(2, 1), (3, 1), (3, 2), (4, 3)])
def test_a_rotation(world_size: int, hop: int) -> None:
    run_ranks(world_size, rotate, hop)


def one_way(rank: int, world_size: int) -> None:
    """Rank 0 sends to rank 1; rank 2 does nothing, and must not call anything."""
    send = torch.arange(4.0) if rank == 0 else None
    shape = (4,) if rank == 1 else None
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as posted:
        received = start_transfer(send, 1, shape, 0, torch.empty(0), world()).wait()
    assert posted.call_count == (rank != 2)
    assert (received is not None) == (rank == 1)
    if received is not None:
        assert torch.equal(received, torch.arange(4.0))


def test_either_direction_may_be_missing() -> None:
    run_ranks(3, one_way)


class Unfinished:
    """A transfer's work that ends when it is waited for."""

    waited = False

    def wait(self) -> None:
        """End it."""
        self.waited = True


def hold_sent(rank: int, world_size: int) -> None:
    works = [Unfinished(), Unfinished()]
    send = torch.ones(5)
    alive = weakref.ref(send)
    with mock.patch.object(dist, "batch_isend_irecv", return_value=works) as posted:
        transfer = start_transfer(send, 0, (5,), 0, send, world())
    posted.reset_mock()  # it remembers its arguments
    del send
    assert alive() is not None, "the send buffer was given up while the transfer was under way"
    transfer.wait()
    assert all(work.waited for work in works)
    assert alive() is None, "the send buffer is kept after the transfer"


def test_a_send_buffer_lives_until_it_was_waited_for() -> None:
    run_ranks(1, hold_sent)


def hold_scattered(rank: int, world_size: int) -> None:
    sent: list[weakref.ref[torch.Tensor]] = []

    def post(received: torch.Tensor, send: torch.Tensor, *_: object, **__: object) -> Unfinished:
        sent.append(weakref.ref(send._base if send._base is not None else send))
        return Unfinished()

    with mock.patch.object(dist, "all_to_all_single", post):
        pending = scatter_heads([(torch.ones(1, 2, 2, 3),)], [[(0, 1), (1, 2)]], 0, world())
    assert sent[0]() is not None, "the send buffer was given up while the exchange was under way"
    pending.wait()
    assert sent[0]() is None, "the send buffer is kept after the exchange"


def test_the_buffer_of_an_all_to_all_lives_until_it_was_waited_for() -> None:
    run_ranks(1, hold_scattered)


def hold_shards(rank: int, world_size: int, start: Start, collectives: list[str]) -> None:
    sent: list[weakref.ref[torch.Tensor]] = []

    def post(received: torch.Tensor, send: torch.Tensor, **_: object) -> Unfinished:
        assert send.is_contiguous(), "NCCL takes dense memory only, whatever gloo does"
        sent.append(weakref.ref(send))
        return Unfinished()

    heads_of_a_slice = torch.ones(2 * world_size, 2, 4)[:, :, 2:]
    with pytest.MonkeyPatch.context() as patch:
        for name in collectives:
            if hasattr(dist, name):
                patch.setattr(dist, name, post)
        pending = start(heads_of_a_slice, world())
    assert sent[0]() is not None, "the send buffer was given up while the collective was under way"
    pending.wait()
    assert sent[0]() is None, "the send buffer is kept after the collective"


@pytest.mark.parametrize(
    ("start", "collectives"),
    [
        (start_all_gather, ["all_gather_single", "all_gather_into_tensor"]),
        (start_reduce_scatter, ["all_to_all_single"]),
    ],
    ids=["all_gather", "reduce_scatter"],
)
def test_shards_are_sent_from_dense_memory_that_lives(start: Start, collectives: list[str]) -> None:
    run_ranks(2, hold_shards, start, collectives)
