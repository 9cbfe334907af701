"""One attention call taken apart: its compute alone, its communication alone, and both.

All four runs execute the same plan, with the same code. Without compute the kernel returns at once, so
that every message is posted and waited for as in the real call. Without communication the groups of the
ring and Ulysses axes are PyTorch's ``fake`` ones, which complete at once and move nothing, so that the
kernel is called with tensors of the same shapes; what it reads was not received (an all-gather copies this
rank's own part). They answer to the backend's name of the groups they stand for, so that all but the
collectives is the same, operation by operation. What is left without either, tensors made and copied, the
time of Python, is in all of them, and taken off once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lightning_cp.attention.api import attend
from lightning_cp.attention.plan import AttentionPlan, make_plan
from lightning_cp.axes import Axis, Flat
from lightning_cp.bench.case import Case
from lightning_cp.bench.ways import Ours, Step
from lightning_cp.kernels.api import QKV, Capabilities, Kernel, Merged, Scores
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.sums import GradientSums
from lightning_cp.layout import Tile
from lightning_cp.mesh import ContextParallelMesh


@dataclass(frozen=True)
class Apart:
    """The four runs of one rank."""

    both: Step
    compute: Step
    comm: Step
    neither: Step


def plan_of(
    way: Ours, case: Case, inputs: Sequence[torch.Tensor], mesh: ContextParallelMesh
) -> AttentionPlan:
    """This rank's plan of a way for its q, k and v; the ranks need not agree on it any more."""
    q, k, v = inputs
    layout = way.sequence_layout(case)
    return make_plan(q, k, v, mesh, layout, case.spec, way.kernel, exchange=way.how)


@contextmanager
def take_apart(
    plan: AttentionPlan, inputs: Sequence[torch.Tensor], *, backward: bool
) -> Iterator[Apart]:
    """The four runs of a plan that the ranks agree on; the groups that move nothing end with the block.

    Args:
        plan: every rank's own.
        inputs: q, k and v, which want gradients.
        backward: whether a run is forward and backward, or forward alone.
    """
    silent = replace(plan, kernel=SilentKernel(plan.kernel))
    with still_mesh(plan.mesh) as still:
        yield Apart(
            both=_step(plan, inputs, backward),
            compute=_harmless(_step(replace(plan, mesh=still), inputs, backward)),
            comm=_step(silent, inputs, backward),
            neither=_harmless(_step(replace(silent, mesh=still), inputs, backward)),
        )


def _step(plan: AttentionPlan, inputs: Sequence[torch.Tensor], backward: bool) -> Step:
    q, k, v = inputs
    gradient = torch.randn_like(q)

    def step() -> object:
        out = attend(q, k, v, plan)
        assert isinstance(out, torch.Tensor)
        return torch.autograd.grad(out, [q, k, v], gradient) if backward else out

    return step


def _harmless(step: Step) -> Step:
    """The step, in which memory that nobody has filled costs no more than numbers do.

    Read as numbers it may be denormal, with which a CPU computes many times slower.
    """

    def harmless() -> object:
        torch.set_flush_denormal(True)
        try:
            return step()
        finally:
            torch.set_flush_denormal(False)

    return harmless


@dataclass(frozen=True)
class SilentKernel:
    """Stands where a kernel was, and computes nothing."""

    instead_of: Kernel

    @property
    def name(self) -> str:
        """Of the kernel it stands for."""
        return self.instead_of.name

    @property
    def capabilities(self) -> Capabilities:
        """Of the kernel it stands for."""
        return self.instead_of.capabilities

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Nothing."""

    def backward(
        self,
        merged: Merged,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Nothing."""


class _StillMesh(ContextParallelMesh):
    """A mesh on which keys and heads do not travel; all else is another mesh's."""

    def __init__(self, mesh: ContextParallelMesh) -> None:
        self.__dict__.update(mesh.__dict__)
        self.still = {axis: _fake_twin(mesh.group(axis)) for axis in (Axis.RING, Axis.ULYSSES)}

    def group(self, axis: Axis | Flat | str) -> dist.ProcessGroup:
        """The group that moves nothing."""
        return self.still[Axis(axis)]


@contextmanager
def still_mesh(mesh: ContextParallelMesh) -> Iterator[ContextParallelMesh]:
    """The same ranks in groups that move nothing; all ranks of the mesh come here together."""
    made = _StillMesh(mesh)
    try:
        yield made
    finally:
        for group in made.still.values():
            dist.destroy_process_group(group)


def _fake_twin(group: dist.ProcessGroup) -> dist.ProcessGroup:
    # Its import makes the backend known to versions of PyTorch that do not know it by themselves.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    ranks = dist.get_process_group_ranks(group)
    twin = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    assert isinstance(twin, dist.ProcessGroup)
    # What asks for the backend takes the path of the group that is stood for: its copies are compute.
    known = dist.distributed_c10d._world.pg_map
    known[twin] = (known[group][0], known[twin][1])
    return twin
