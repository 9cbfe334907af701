"""The mesh of a run: axis sizes, DeviceMesh and process groups.

Axes, outer to inner: ``dp_replicate, dp_shard, ring, ulysses, tp``. Flattened groups: ``cp`` = ring
x ulysses (ranks that share a sample), ``fsdp`` = dp_shard x cp, ``data`` = dp_replicate x dp_shard,
``loss`` = data x cp (ranks whose gradients are averaged).
"""

from __future__ import annotations

import math
import weakref
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.comm.all_gather import all_gather
from lightning_cp.comm.groups import flatten, gloo_group, lasts, mesh_of_groups, warm_up
from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.layout.axes import FLATTENED, Axis, Flat
from lightning_cp.layout.axes import Factors as Factors
from lightning_cp.layout.axes import factorise as factorise
from lightning_cp.utils.autograd_notes import Origin, note_origin
from lightning_cp.utils.dtensor import forget_meshes


class ContextParallelMesh:
    """The process groups of one run. ``torch.distributed`` must be initialised.

    Args:
        ring_size: ranks that K/V travel around.
        ulysses_size: ranks that trade sequence for heads.
        device_type: ``cpu`` or ``cuda``.
        data_parallel_replicate_size: groups of ranks that hold copies of the whole model state.
        data_parallel_shard_size: data-parallel ranks that share one copy of the model state.
        tensor_parallel_size: ranks that share each layer.

    Raises:
        ConfigError: a size that is not a positive integer, no process group yet, or sizes that do
            not multiply to the world size.
    """

    def __init__(
        self,
        ring_size: int = 1,
        ulysses_size: int = 1,
        device_type: str = "cpu",
        data_parallel_replicate_size: int = 1,
        data_parallel_shard_size: int = 1,
        tensor_parallel_size: int = 1,
    ) -> None:
        self.sizes: dict[Axis, int] = {
            Axis.DP_REPLICATE: data_parallel_replicate_size,
            Axis.DP_SHARD: data_parallel_shard_size,
            Axis.RING: ring_size,
            Axis.ULYSSES: ulysses_size,
            Axis.TP: tensor_parallel_size,
        }
        _check_sizes(self.sizes)
        forget_meshes()
        self.device_type = device_type
        self.device_mesh: DeviceMesh = mesh_of_groups(
            device_type,
            tuple(self.sizes.values()),
            mesh_dim_names=tuple(axis.value for axis in self.sizes),
        )
        # Cached: slicing a DeviceMesh takes about 100 us, and attention needs a group at every hop.
        self._meshes: dict[Axis | Flat, DeviceMesh] = {
            axis: self.device_mesh[axis.value] for axis in Axis
        }
        for flat, axes in FLATTENED.items():
            if all(self.sizes[axis] == 1 for axis in axes):
                self._meshes[flat] = self._meshes[axes[0]]
                continue
            names = tuple(axis.value for axis in axes)
            self._meshes[flat] = flatten(self.device_mesh[names], flat.value)
        self._groups = {axis: mesh.get_group() for axis, mesh in self._meshes.items()}
        self._ranks = {axis: mesh.get_local_rank() for axis, mesh in self._meshes.items()}
        self._control = self._control_groups()
        if device_type == "cuda" and ring_size > 1:
            warm_up(self._groups[Axis.RING], torch.device("cuda", torch.cuda.current_device()))
        # A rank that destroys the mesh at once would disconnect from a rank that still connects.
        dist.barrier(self.everyone)  # pyright: ignore[reportUnknownMemberType] (its device_ids have no type)
        self._destroyed = False
        # PyTorch's meshes hold references to each other in cycles, and to their groups.
        registries = [getattr(mesh, "_pg_registry", {}) for mesh in self._meshes.values()]
        registries.append(getattr(self.device_mesh, "_pg_registry", {}))
        self._release = weakref.finalize(
            *(self.device_mesh, _release_groups, self._groups, self._control, *registries)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelMesh:
        """Return the mesh itself: its groups belong to the process, and cannot be copied."""
        return self

    @cached_property
    def ring_size(self) -> int:
        """Ranks of the ring."""
        return self.sizes[Axis.RING]

    @cached_property
    def ulysses_size(self) -> int:
        """Ranks that trade sequence for heads."""
        return self.sizes[Axis.ULYSSES]

    @cached_property
    def cp_size(self) -> int:
        """Ranks that share one sample."""
        return self.ring_size * self.ulysses_size

    @cached_property
    def tp_size(self) -> int:
        """Ranks that share each layer."""
        return self.sizes[Axis.TP]

    @cached_property
    def sample_size(self) -> int:
        """Ranks with the same sample: each has a part of its tokens, of the layers, or of both."""
        return self.cp_size * self.tp_size

    @cached_property
    def data_size(self) -> int:
        """Groups of ranks with different samples."""
        return self.sizes[Axis.DP_REPLICATE] * self.sizes[Axis.DP_SHARD]

    @cached_property
    def ring_rank(self) -> int:
        """This rank within its ring."""
        return self._ranks[Axis.RING]

    @cached_property
    def ulysses_rank(self) -> int:
        """This rank within its Ulysses group."""
        return self._ranks[Axis.ULYSSES]

    @cached_property
    def cp_rank(self) -> int:
        """This rank within the ranks that share its sample."""
        return self._ranks[Flat.CP]

    @cached_property
    def tp_rank(self) -> int:
        """This rank within the ranks that share its layers."""
        return self._ranks[Axis.TP]

    @cached_property
    def sample_rank(self) -> int:
        """This rank within the ranks with its sample, and within the control group of ``cp``."""
        return self.cp_rank * self.tp_size + self.tp_rank

    @cached_property
    def data_rank(self) -> int:
        """This rank's number among data ranks, which determines its samples."""
        return self._ranks[Flat.DATA]

    def axis_mesh(self, axis: Axis | Flat | str) -> DeviceMesh:
        """Return the one-dimensional mesh of an axis or a flattened group."""
        return self._meshes[_parse_axis(axis)]

    def group(self, axis: Axis | Flat | str) -> dist.ProcessGroup:
        """Return the process group of an axis or a flattened group.

        Raises:
            ConfigError: the mesh was destroyed.
        """
        if self._destroyed:
            raise ConfigError("this mesh was destroyed, and its groups with it. Make a new one.")
        return self._groups[axis if isinstance(axis, Axis | Flat) else _parse_axis(axis)]

    def control_group(self, flat: Flat) -> dist.ProcessGroup:
        """Return a group for small CPU messages (agreement), tensor-parallel ranks included.

        ``cp``: the ``sample_size`` ranks with one sample; ``loss``: all ranks. Without tensor
        parallelism the group itself on CPU, a gloo twin otherwise.
        """
        return self._control.get(flat) or self.group(flat)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """Group of all ranks, tensor-parallel ones included, for small CPU messages."""
        world = dist.group.WORLD
        assert world is not None
        return self._control.get(Flat.LOSS) or world

    def _control_groups(self) -> dict[Flat, dist.ProcessGroup]:
        if self.device_type == "cpu" and self.tp_size == 1:
            return {flat: self._groups[flat] for flat in (Flat.CP, Flat.LOSS)}
        shape = (self.data_size, self.sample_size)
        ranks = {Flat.CP: torch.arange(math.prod(shape)).view(shape)}
        ranks[Flat.LOSS] = ranks[Flat.CP].reshape(1, -1)
        return {flat: gloo_group(partition) for flat, partition in ranks.items()}

    def shard(
        self,
        x: torch.Tensor,
        layout: SequenceLayout,
        dim: int = 1,
        pad_value: float | int | bool = 0,
    ) -> torch.Tensor:
        """Return this rank's tokens of ``x``, which is whole on all ranks of the group; no communication."""
        self.check_layout(layout)
        return layout.shard(x, self.cp_rank, dim=dim, pad_value=pad_value)

    def unshard(self, x_local: torch.Tensor, layout: SequenceLayout, dim: int = 1) -> torch.Tensor:
        """Gather the whole sequence, in original order and length, from every rank's tokens.

        Differentiable: gradients of all ranks are summed.
        """
        self.check_layout(layout)
        if self.cp_size == 1:
            return layout.unshard([x_local], dim=dim)
        whole = layout.unshard(all_gather(x_local, self.group(Flat.CP)), dim=dim)
        note_origin(whole, Origin.SEQUENCE)
        return whole

    def check_layout(self, layout: SequenceLayout) -> None:
        """Check that a layout has the sizes of the mesh.

        Raises:
            ConfigError: naming both.
        """
        if (layout.ring_size, layout.ulysses_size) != (self.ring_size, self.ulysses_size):
            raise ConfigError(
                f"the layout is for ring_size={layout.ring_size}, ulysses_size={layout.ulysses_size}, "
                f"but the mesh has ring_size={self.ring_size}, ulysses_size={self.ulysses_size}. "
                "Make the layout with the sizes of the mesh."
            )

    def destroy(self) -> None:
        """Destroy the mesh's groups, but not the world group; repeated calls do nothing."""
        if self._destroyed:
            return
        self._destroyed = True
        groups = {*self._groups.values(), *self._control.values()}
        # PyTorch has no public list of groups.
        known = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}  # pyright: ignore[reportPrivateUsage]
        for group in groups:
            if group in known and not lasts(group):  # the end of the world's group is that of all
                dist.destroy_process_group(group)
        # Threads and sockets of a group live as long as a reference to it.
        self._release()
        self._meshes = {}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"ContextParallelMesh({sizes}, device_type={self.device_type})"


class SingleRankMesh(ContextParallelMesh):
    """The mesh of a rank that shares nothing, without process groups."""

    def __init__(self, device_type: str) -> None:
        self.sizes = dict.fromkeys(Axis, 1)
        self.device_type = device_type
        self._ranks = dict.fromkeys((*Axis, *Flat), 0)
        self._destroyed = True


def _check_sizes(sizes: dict[Axis, int]) -> None:
    for axis, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"mesh axis {axis} must be an integer of at least 1, got {size!r}. "
                "Leave it out for 1."
            )
    if not dist.is_initialized():
        raise ConfigError(
            "ContextParallelMesh needs torch.distributed to be initialised: use it inside a strategy, "
            "or call torch.distributed.init_process_group first."
        )
    world = dist.get_world_size()
    if math.prod(sizes.values()) != world:
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ConfigError(
            f"the mesh sizes must multiply to the world size {world}, got {shown} = "
            f"{math.prod(sizes.values())}. Change a size, or start that many processes."
        )


def _release_groups(*groups: dict[Any, dist.ProcessGroup]) -> None:
    """Drop all references to groups, at the latest when Python exits.

    A gloo group that lives longer can abort the process ("terminate called without an active exception") if
    another rank has exited before.
    """
    for by_axis in groups:
        by_axis.clear()


def _parse_axis(axis: Axis | Flat | str) -> Axis | Flat:
    return Flat(axis) if axis in set(Flat) else Axis(axis)
