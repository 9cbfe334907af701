"""Running attention problems on a grid of ranks, and putting the ranks' results together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.layout import SequenceLayout
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers import oracle
from tests.helpers.attention.problems import Grid, Problem, Tensors
from tests.helpers.pool import run_ranks


class Shards(NamedTuple):
    """One rank's out [B, L, H, D], lse [B, H, L] and gradients; its share of the sinks' gradient [H]."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None = None
    max_logits: torch.Tensor | None = None

    def same_bits(self, other: Shards) -> bool:
        """Whether all that is there is equal; a NaN never is."""
        pairs = zip(self, other, strict=True)
        return all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)


@contextmanager
def mesh_of(grid: Grid) -> Iterator[ContextParallelMesh]:
    """The mesh of a grid, destroyed afterwards."""
    mesh = ContextParallelMesh(ring_size=grid.ring, ulysses_size=grid.ulysses)
    try:
        yield mesh
    finally:
        mesh.destroy()


def attend_shards(
    problem: Problem,
    grid: Grid,
    mesh: ContextParallelMesh,
    kernel: str,
    tensors: Tensors | None = None,
    pad_value: float = 0.0,
    layout: SequenceLayout | None = None,
    attend: Callable[..., Any] = context_parallel_attention,
) -> Shards:
    """Forward and backward of this rank's tokens, of ``problem`` or of other inputs of its shape."""
    layout = layout or problem.layout(grid)
    q, k, v, dout = (
        mesh.shard(x, layout, pad_value=pad_value) for x in tensors or problem.tensors()
    )
    spec = problem.spec
    leaves = [q, k, v] if spec.sinks is None else [q, k, v, spec.sinks]
    for x in leaves:
        x.requires_grad_()
    how: dict[str, Any] = {"mesh": mesh, "layout": layout, "spec": spec, "kernel": kernel}
    how.update(grid.how)
    if problem.max_logits:
        how["return_max_logits"] = True
    out, lse, *peak = attend(q, k, v, **how, return_lse=True)
    dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, dout)
    shards = Shards(*(x.detach().contiguous() for x in (out, lse, dq, dk, dv)))
    if dsinks:
        shards = shards._replace(dsinks=dsinks[0])
    return shards._replace(max_logits=peak[0].contiguous()) if peak else shards


def attend_all(
    rank: int, world_size: int, problems: Sequence[Problem], grid: Grid, kernel: str
) -> list[Shards]:
    """This rank's part of every problem."""
    with mesh_of(grid) as mesh:
        return [attend_shards(problem, grid, mesh, kernel) for problem in problems]


def joined(
    problem: Problem, grid: Grid, shards: Sequence[Shards], layout: SequenceLayout | None = None
) -> oracle.Attention:
    """The whole sequence, in original order and length, from every rank's part."""
    layout = layout or problem.layout(grid)
    out, lse, dq, dk, dv, dsinks, peak = zip(*shards, strict=True)
    return oracle.Attention(
        layout.unshard(out, dim=1),
        layout.unshard(lse, dim=2),
        layout.unshard(dq, dim=1),
        layout.unshard(dk, dim=1),
        layout.unshard(dv, dim=1),
        torch.stack(dsinks).sum(0) if problem.sinks else None,
        layout.unshard(peak, dim=2) if problem.max_logits else None,
    )


def answers(problems: Sequence[Problem], grid: Grid, kernel: str) -> list[oracle.Attention]:
    """Every problem on a grid of ranks; one call for all, since ranks meet before and after it."""
    limit = 240.0 if kernel == "triton" else 60 + 0.5 * len(problems)  # in its interpreter
    ranks = run_ranks(grid.world_size, attend_all, problems, grid, kernel, timeout=limit)
    return [
        joined(problem, grid, shards)
        for problem, shards in zip(problems, zip(*ranks, strict=True), strict=True)
    ]
