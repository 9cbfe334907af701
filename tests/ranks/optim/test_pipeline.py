"""Messages of neighbouring rounds are on their way while matrices are computed; one owner computes each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.op_counts import Counts
from lightning_cp.comm.transfer import PendingMessage
from lightning_cp.optim import Muon, matrix_step
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.pool import run_ranks

SIDE = 64
ONE = SIDE * SIDE * 4
"""Bytes of a matrix."""


def optimizer(world_size: int, matrices: int, matrices_at_once: int, copies: int = 1) -> Muon:
    """Of equal matrices, whose rows are sharded; with gradients."""
    forget_meshes()
    mesh = init_device_mesh("cpu", (copies, world_size // copies))
    torch.manual_seed(0)
    named: list[tuple[str, torch.Tensor]] = []
    for at in range(matrices):
        x = distribute_tensor(
            torch.randn(SIDE, SIDE), mesh, [Replicate(), Shard(0)], src_data_rank=None
        )
        named.append((f"w{at}", nn.Parameter(x)))
        named[-1][1].grad = x.clone()
    at_once = matrices_at_once * ONE / 2**20
    return Muon(named, ns_dtype="float32", chunk_mib=at_once)


POSTS = ("post_all_to_all", "post_broadcast")


def events(rank: int, world_size: int, copies: int) -> list[str]:
    """In the order in which this rank does them, for three rounds of two matrices."""
    steps: list[str] = []
    muon = optimizer(world_size, 6 * world_size, 2, copies)
    muon.step()
    posted = {name: getattr(matrix_step, name) for name in POSTS}
    computed, waited = matrix_step.orthogonalise, PendingMessage.wait

    def posts(name: str) -> Any:
        def post(send: Any, *rest: Any) -> Any:
            message = posted[name](send, *rest)
            kind = "" if name == POSTS[0] else "copy "
            message.number = f"{kind}{sum(step.startswith(f'post {kind}') for step in steps)}"
            if not kind:
                message.number = str(sum(s.startswith("post") and "copy" not in s for s in steps))
            steps.append(f"post {message.number}")
            return message

        return post

    def wait(self: Any) -> Any:
        steps.append(f"wait {self.number}")
        return waited(self)

    def compute(x: Any, *rest: Any) -> Any:
        steps.append("compute")
        return computed(x, *rest)

    PendingMessage.wait, matrix_step.orthogonalise = wait, compute  # type: ignore[assignment,method-assign]
    for name in POSTS:
        setattr(matrix_step, name, posts(name))
    try:
        muon.step()
    finally:
        for name, before in posted.items():
            setattr(matrix_step, name, before)
        PendingMessage.wait, matrix_step.orthogonalise = waited, computed  # type: ignore[method-assign]
    return steps


def test_gather_compute_and_scatter_overlap() -> None:
    """Even numbers but 0 are what is given back: 0, 1, 3 are gathered, 2, 4, 5 given back."""
    for steps in run_ranks(2, events, 1):
        assert steps == [
            *("post 0", "wait 0"),
            *("post 1", "compute", "compute", "post 2", "wait 1"),
            *("post 3", "compute", "compute", "post 4", "wait 2", "wait 3"),
            *("compute", "compute", "post 5", "wait 4", "wait 5"),
        ]


def test_copies_are_sent_while_the_next_round_is_computed() -> None:
    """Whole parameters: the results of each of two ranks go to the other."""
    for steps in run_ranks(2, events, 2):
        assert steps == [
            *("compute", "compute"),
            *("post copy 0", "post copy 1", "compute", "compute", "wait copy 0", "wait copy 1"),
            *("post copy 2", "post copy 3", "compute", "compute", "wait copy 2", "wait copy 3"),
            *("post copy 4", "post copy 5", "wait copy 4", "wait copy 5"),
        ]


def test_parts_and_copies_overlap_together() -> None:
    """Two copies of two parts: those of round 0 are sent to the other copy while round 2 is computed."""
    for steps in run_ranks(4, events, 2):
        assert steps == [
            *("post 0", "wait 0"),
            *("post 1", "compute", "compute", "post 2", "wait 1"),
            *("post 3", "compute", "compute", "post 4", "wait 2", "wait 3"),
            *("post copy 0", "post copy 1", "compute", "compute", "post 5"),
            *("wait copy 0", "wait copy 1", "wait 4", "wait 5"),
            *("post copy 2", "post copy 3", "wait copy 2", "wait copy 3"),
            *("post copy 4", "post copy 5", "wait copy 4", "wait copy 5"),
        ]


def peak(rank: int, world_size: int, matrices_at_once: int) -> float:
    """Beside what is there between steps, in matrices: the least of three steps.

    On a busy machine gloo's threads hold a message for a moment after it was waited for.
    """
    muon = optimizer(world_size, 12 * world_size, matrices_at_once)
    muon.step()
    peaks: list[float] = []
    for _ in range(3):
        counts = Counts()
        with counts:
            muon.step()
        peaks.append(counts.peak / ONE)
    return min(peaks)


@pytest.mark.quick("1")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_chunk_bounds_memory(ranks: int) -> None:
    """Of four chunks (matrices, messages of three rounds); and what Newton-Schulz needs for one matrix."""
    found = {many: max(run_ranks(ranks, peak, many)) for many in (1, 2, 3)}
    assert found[1] < found[2] < found[3]
    for many, matrices in found.items():
        assert matrices <= 4 * many + 6, (many, matrices)
