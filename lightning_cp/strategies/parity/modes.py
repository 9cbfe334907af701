"""The same step with all ranks on the Ulysses axis, or on the ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from lightning_cp.axes import Axis
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.expected import expected_heads
from lightning_cp.parity.diagnosis import RING, ULYSSES
from lightning_cp.strategies.step.core import ContextParallelCore

Mode = Callable[[], AbstractContextManager[None]]
"""The core has another mesh within."""


def other_modes(core: ContextParallelCore) -> dict[str, Mode | str]:
    """By name; or why one is not possible."""
    mesh = core.mesh
    modes: dict[str, Mode | str] = {}
    sizes = {ULYSSES: (mesh.cp_size, 1), RING: (1, mesh.cp_size)}
    for name, (ulysses, ring) in sizes.items():
        if (ulysses, ring) == (mesh.ulysses_size, mesh.ring_size):
            modes[name] = "the mode of this run"
            continue
        heads = expected_heads(core.model) if core.model is not None else None
        if heads is not None and heads.query % ulysses:
            modes[name] = f"not possible: {heads.query} heads, {ulysses} ranks"
            continue
        modes[name] = partial(_with_mesh, core, ulysses, ring)
    return modes


@contextmanager
def _with_mesh(core: ContextParallelCore, ulysses: int, ring: int) -> Iterator[None]:
    """Process groups are made and destroyed by all ranks together."""
    mesh = core.mesh
    other = ContextParallelMesh(
        ring_size=ring,
        ulysses_size=ulysses,
        device_type=mesh.device_type,
        data_parallel_replicate_size=mesh.sizes[Axis.DP_REPLICATE],
        data_parallel_shard_size=mesh.sizes[Axis.DP_SHARD],
        tensor_parallel_size=mesh.tp_size,
    )
    try:
        with core.on_mesh(other):
            yield
    finally:
        other.destroy()
