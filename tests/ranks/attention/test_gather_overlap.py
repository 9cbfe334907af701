"""Gathering hides communication behind compute: shown by the order of what a rank does."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.kernels.reference import ReferenceKernel
from tests.helpers.attention.distributed import Shards, attend_shards, mesh_of
from tests.helpers.attention.problems import Grid, Problem, gather
from tests.helpers.pool import run_ranks

GATHERS = ("all_gather_into_tensor", "all_gather_single")  # the name of torch 2.10, and a later one
FULL = Problem((6, 3), "divides", causal=False, dtype=torch.bfloat16)


class Watch:
    """Writes down the collectives that are started and waited for, and the kernel's calls.

    Args:
        delay: seconds to lose before each.
        postpone: really start a collective only when it is waited for, so that a buffer that is
            overwritten or given up before that shows.
    """

    def __init__(self, delay: Callable[[], float] = lambda: 0.0, *, postpone: bool = False) -> None:
        self._events: list[str] = []
        self._delay = delay
        self._postpone = postpone

    @property
    def events(self) -> list[str]:
        """In their order; the kernel's calls in a row are one."""
        return [event for event, _ in groupby(self._events)]

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Patch torch.distributed and the reference kernel; events start anew."""
        self._events = []
        with ExitStack() as stack:
            for name in GATHERS:
                if hasattr(dist, name):
                    watched = self._collective("keys", getattr(dist, name))
                    stack.enter_context(mock.patch.object(dist, name, watched))
            watched = self._collective("gradients", dist.all_to_all_single)
            stack.enter_context(mock.patch.object(dist, "all_to_all_single", watched))
            for name in ("forward", "backward"):
                watched = self._kernel(getattr(ReferenceKernel, name))
                stack.enter_context(mock.patch.object(ReferenceKernel, name, watched))
            yield self

    def note(self, event: str) -> None:
        """Lose time, then write down the event."""
        time.sleep(self._delay())
        self._events.append(event)

    def _kernel(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.note("kernel")
            method(*args)

        return call

    def _collective(self, load: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def start(into: Any, of: Any, *splits: Any, group: Any, **options: Any) -> Any:
            if splits or not options.get("async_op"):
                return collective(into, of, *splits, group=group, **options)  # Ulysses
            number = sum(event.startswith(f"post {load}") for event in self._events)
            self.note(f"post {load} {number}")
            buffers = weakref.ref(into), weakref.ref(of)
            later = lambda: collective(*_alive(buffers), group=group, **options)  # noqa: E731
            work = None if self._postpone else later()
            return _Work(work, later, lambda: self.note(f"wait {load} {number}"))

        return start


def _alive(buffers: tuple[weakref.ref[torch.Tensor], ...]) -> list[torch.Tensor]:
    tensors = [buffer() for buffer in buffers]
    assert all(x is not None for x in tensors), "a buffer was given up too early"
    return [x for x in tensors if x is not None]


class _Work:
    """A collective's work; starts it when it was not yet."""

    def __init__(self, work: Any, later: Callable[[], Any], note: Callable[[], None]) -> None:
        self._work, self._later, self._note = work, later, note

    def wait(self) -> None:
        self._note()
        (self._work or self._later()).wait()


def orders(rank: int, world_size: int, grid: Grid) -> tuple[list[str], list[str]]:
    """What this rank does in forward and in backward."""
    watch = Watch()
    with mesh_of(grid) as mesh:
        layout = FULL.layout(grid)
        q, k, v, dout = (mesh.shard(x, layout) for x in FULL.tensors())
        for x in (q, k, v):
            x.requires_grad_()
        how = {"mesh": mesh, "layout": layout, "spec": FULL.spec, "kernel": "reference"}
        with watch.watching():
            out = context_parallel_attention(q, k, v, **how, **grid.how)
        forward = watch.events
        with watch.watching():
            out.backward(dout)
        return forward, watch.events


FORWARD = """
post keys 0, post keys 1, wait keys 0, kernel, post keys 2, wait keys 1, kernel, wait keys 2, kernel
"""
BACKWARD = """
post keys 0, post keys 1, wait keys 0, kernel, post gradients 0,
post keys 2, wait keys 1, kernel, wait gradients 0, post gradients 1,
wait keys 2, kernel, wait gradients 1, post gradients 2, wait gradients 2
"""
"""Of three K/V heads, one at a time: the next keys are under way while the kernel works, and so are the
last gradients."""


@pytest.mark.parametrize("execution", ["two_kernel", "fused"])
@pytest.mark.parametrize("ring", [2, 3, 4])
def test_next_heads_are_under_way_before_these_are_computed(ring: int, execution: str) -> None:
    grid = Grid(ring, exchange=gather(execution, execution))
    for forward, backward in run_ranks(ring, orders, grid):
        assert forward == FORWARD.strip().split(", ")
        assert backward == BACKWARD.replace(",\n", ", ").strip().split(", ")


def attend_under(rank: int, world_size: int, problem: Problem, grid: Grid, how: str) -> Shards:
    """This rank's results under random delays, or with collectives that start when waited for."""
    draw = random.Random(1000 + rank)
    delay = (lambda: draw.uniform(0.0, 0.01)) if how == "delays" else lambda: 0.0
    with ExitStack() as stack:
        mesh = stack.enter_context(mesh_of(grid))
        if how != "plain":
            stack.enter_context(Watch(delay, postpone=how == "postponed").watching())
        return attend_shards(problem, grid, mesh, "reference")


@pytest.mark.parametrize("how", ["delays", "postponed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("ulysses", [1, 2])
def test_results_do_not_depend_on_when_data_moves(
    ulysses: int, dtype: torch.dtype, how: str
) -> None:
    """Postponed collectives read the send buffers last: they must live, unchanged, until then."""
    grid = Grid(4 // ulysses, ulysses, exchange=gather("two_kernel", "two_kernel"))
    problem = Problem((8, 4), "rows", dtype=dtype)
    plain = run_ranks(4, attend_under, problem, grid, "plain")
    moved = run_ranks(4, attend_under, problem, grid, how)
    for one, other in zip(plain, moved, strict=True):
        assert one.same_bits(other)
