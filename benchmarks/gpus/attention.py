"""Attention against the dense answer while ranks sleep by turns; meshes, made and destroyed twice.

A rank that sleeps before it posts sends late; one that sleeps before it computes is sent to early. So a wait
that is missing, or memory that is used again too soon, shows in the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpus.line import Line, Place, WrongResultError, check_error
from lightning_cp.kernels.protocol import Request
from lightning_cp.kernels.select import kernels
from lightning_cp.layout.axes import FLATTENED, Axis
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers import oracle
from tests.helpers.attention.checking import norm_error
from tests.helpers.attention.distributed import Shards, attend_shards, joined
from tests.helpers.attention.problems import (
    GATHERS,
    RINGS,
    ROTATIONS,
    Grid,
    Problem,
    expected,
    gather,
    voids,
)

POSTS = (
    *("batch_isend_irecv", "all_to_all_single", "broadcast"),
    *(
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    ),
)
"""Functions of torch.distributed that attention posts with."""
SLEEP_CYCLES = 20_000_000
"""About 10 ms of a GPU."""
SLEEP_SECONDS = 0.002
"""On CPU."""
TURNS = tuple(product(("posts", "computes"), (1, 0)))
"""Before what ranks sleep, and which: odd ones, then even ones."""
LIMITS = {torch.float64: 1e-10, torch.bfloat16: 2e-2}
"""Norm of an error over the norm of the answer."""


class Sleeps:
    """Sleeps of this rank before posts or computes, counted.

    Args:
        before: ``posts`` or ``computes``.
        parity: 1: odd ranks sleep; 0: even ones.
        device_type: on CUDA the stream sleeps, not the host.
    """

    def __init__(self, before: str, parity: int, device_type: str) -> None:
        self.count = 0
        self.is_mine = dist.get_rank() % 2 == parity
        self._before, self._device_type = before, device_type

    @contextmanager
    def around(self, kernel: str) -> Iterator[Sleeps]:
        """A block in which ranks sleep; ``kernel`` is the one that computes."""
        owner: Any = dist
        names = tuple(name for name in POSTS if hasattr(dist, name))
        if self._before == "computes":
            owner, names = type(kernels()[kernel]), ("forward", "backward")
        with ExitStack() as stack:
            for name in names if self.is_mine else ():
                stack.enter_context(
                    mock.patch.object(owner, name, self._late(getattr(owner, name)))
                )
            yield self

    def _late(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self._device_type == "cuda":
                torch.cuda._sleep(SLEEP_CYCLES)
            else:
                time.sleep(SLEEP_SECONDS)
            return own(*args, **kwargs)

        return late


def grids(count: int) -> list[Grid]:
    """Grids of so many ranks: every exchange and layout."""
    known = [grid for grid in (*RINGS, *ROTATIONS, *GATHERS) if grid.world_size == count]
    more = [Grid(count), Grid(1, count), Grid(count, kind="contiguous")]
    more += [Grid(count, exchange=gather(both, both)) for both in ("two_kernel", "fused")]
    return list(dict.fromkeys([*more, *known]))


def problems(place: Place, grid: Grid) -> list[tuple[Problem, str]]:
    """Problems and the kernels that can compute them there."""
    heads = (4 * grid.ulysses, 2 * grid.ulysses)
    if place.rehearses:
        found = [Problem(heads, sequences) for sequences in ("dense", "rows")]
        return [(problem, "reference") for problem in found]
    exact = [Problem(heads, sequences) for sequences in ("512", "512 rows")]
    half = [
        Problem(heads, sequences, dtype=torch.bfloat16, head_dim=64)
        for sequences in ("512", "512 rows")
    ]
    able = [
        name
        for name, kernel in kernels().items()
        if name != "reference"
        and kernel.capabilities.refusal(
            Request("cuda", torch.bfloat16, 64, frozenset({"full", "causal"}))
        )
        is None
    ]
    pairs = [(problem, "reference") for problem in exact]
    return [*pairs, *((problem, name) for name in able for problem in half if _fits(name, problem))]


def _fits(kernel: str, problem: Problem) -> bool:
    """Some kernels refuse packed rows."""
    return problem.shape.documents is None or not kernels()[kernel].capabilities.no_packs


def oracle_line(grid: Grid, place: Place) -> str:
    """Compute every problem in every turn, and compare with the dense answer."""
    mesh = ContextParallelMesh(grid.ring, grid.ulysses, place.device_type)
    try:
        worst, slept, missing = 0.0, 0, ""
        cells = problems(place, grid)
        for (problem, kernel), (before, parity) in product(cells, TURNS):
            sleeps = Sleeps(before, parity, place.device_type)
            with sleeps.around(kernel):
                shards = _attend(problem, grid, mesh, kernel, place)
            worst = max(worst, _error(problem, grid, kernel, shards))
            is_dense = problem.shape.documents is None  # documents may lie within one rank
            if is_dense and sleeps.is_mine and not sleeps.count:
                missing = missing or f"no sleep before {before} in {problem} with {kernel}"
            slept += sleeps.count
        if missing:  # not before: the other ranks have to compute all cells with this one
            raise WrongResultError(missing)
    finally:
        mesh.destroy()
    return (
        f"{len(cells)} cells x {len(TURNS)} turns, off by {worst:.1e} at most, {slept} sleeps here"
    )


def _attend(
    problem: Problem, grid: Grid, mesh: ContextParallelMesh, kernel: str, place: Place
) -> list[Shards]:
    """Return every rank's part, on the CPU."""
    q, k, v, dout = (x.to(place.device_type) for x in problem.tensors())
    own = attend_shards(problem, grid, mesh, kernel, (q, k, v, dout))
    own = Shards(*(None if x is None else x.cpu() for x in own))  # type: ignore[arg-type]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def _error(problem: Problem, grid: Grid, kernel: str, shards: list[Shards]) -> float:
    """Return the largest error.

    Raises:
        WrongResultError: a result is wrong, or a wrong one would not be noticed.
    """
    limit, want = LIMITS[problem.dtype], expected(problem)
    got = joined(problem, grid, shards)
    errors = {name: norm_error(x, getattr(want, name)) for name, x in got.items()}
    for name, error in errors.items():
        check_error(f"{name} of {problem} with {kernel}", error, limit)
    oracle.assert_not_vacuous(want, voids(problem, grid), limit, norm_error)
    return max(errors.values())


def mesh_sizes(count: int) -> list[tuple[int, int, int, int]]:
    """(data, ring, Ulysses, tp) of so many ranks, with at least two axes, if there can be."""
    sizes = [
        (data, ring, ulysses, tp)
        for data, ring, ulysses, tp in product(range(1, count + 1), repeat=4)
        if data * ring * ulysses * tp == count
    ]
    mixed = [each for each in sizes if sum(size > 1 for size in each) > 1]
    return mixed or sizes


def mesh_line(sizes: tuple[int, int, int, int], place: Place) -> str:
    """Make a mesh, add up ranks in each of its groups, destroy it; and once more."""
    data, ring, ulysses, tp = sizes
    groups = 0
    for _ in range(2):
        mesh = ContextParallelMesh(ring, ulysses, place.device_type, 1, data, tp)
        try:
            for name, axes in {**{axis: (axis,) for axis in Axis}, **FLATTENED}.items():
                members = _members(mesh, axes)
                if len(members) == 1:
                    continue
                total = torch.tensor([1.0, dist.get_rank()], device=place.device_type)
                dist.all_reduce(total, group=mesh.group(name))
                if total.tolist() != [len(members), sum(members)]:
                    raise WrongResultError(f"{name} adds up {total.tolist()}, not {members}")
                groups += 1
        finally:
            mesh.destroy()
    return f"{groups} sums in groups are right"


def _members(mesh: ContextParallelMesh, axes: tuple[Axis, ...]) -> list[int]:
    """Return the ranks that differ from this one in these axes alone, by arithmetic."""
    ranks = np.arange(dist.get_world_size()).reshape(tuple(mesh.sizes[axis] for axis in Axis))
    at = np.argwhere(ranks == dist.get_rank())[0]
    index = tuple(
        slice(None) if axis in axes else int(place) for axis, place in zip(Axis, at, strict=True)
    )
    return ranks[index].flatten().tolist()


def lines(count: int) -> list[Line]:
    """Every grid, and every mesh."""
    short = {str(grid) for grid in grids(count)[:2]}
    found = [
        Line(f"oracle, {grid}", partial(oracle_line, grid), is_short=str(grid) in short)
        for grid in grids(count)
    ]
    return found + [
        Line(
            "mesh twice, data {} x ring {} x ulysses {} x tp {}".format(*sizes),
            partial(mesh_line, sizes),
            is_short=index == 0,
        )
        for index, sizes in enumerate(mesh_sizes(count))
    ]
