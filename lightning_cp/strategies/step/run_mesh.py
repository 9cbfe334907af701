"""The mesh of a run: made once, as soon as its sizes can be known."""

from __future__ import annotations

import weakref

from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.layout import CostModel
from lightning_cp.layout.choose import DEFAULT_COST
from lightning_cp.mesh import ContextParallelMesh, Factors
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.arguments.sizes import context_size, known_heads, split


class RunMesh:
    """Owns the mesh: its groups end with this object, or with the process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._mesh: ContextParallelMesh | None = None
        self.cost = DEFAULT_COST
        """How dear communication on the ring is thought to be, for ``layout="auto"``."""

    @property
    def mesh(self) -> ContextParallelMesh:
        """The mesh.

        Raises:
            ConfigError: it does not exist yet.
        """
        if self._mesh is None:
            raise ConfigError(
                "the mesh does not exist yet: processes start first, and the split of the context-parallel "
                "ranks may need the model. It is available from setup on, or in configure_model if "
                "num_heads, or ulysses_size and ring_size, are given to the strategy."
            )
        return self._mesh

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Ranks of each axis by its name; empty before there is a mesh."""
        sizes = {} if self._mesh is None else self._mesh.sizes
        return {str(axis): size for axis, size in sizes.items()}

    def data_rank(self, global_rank: int, world_size: int) -> int:
        """The sample that this rank works on; known before the mesh, as those that share it are the inner."""
        if self._mesh is not None:
            return self._mesh.data_rank
        sharing = context_size(self.settings, world_size) * self.settings.tensor_parallel_size
        return global_rank // sharing

    def build_mesh(
        self,
        world_size: int,
        device_type: str,
        ranks_per_node: int | None,
        model: nn.Module | None = None,
        num_heads: int | None = None,
    ) -> Factors | None:
        """Make the mesh, once; ``None`` if it exists, or if the model must be known first.

        Args:
            world_size: all ranks.
            device_type: ``cpu`` or ``cuda``.
            ranks_per_node: with fast links between them.
            model: where the number of heads is looked for, if it is needed and not given.
            num_heads: what the model declares; the setting of the same name goes first.

        Raises:
            ConfigError: sizes that do not fit the world or the heads.
        """
        cp_size, tp_size = (
            context_size(self.settings, world_size),
            self.settings.tensor_parallel_size,
        )
        heads = known_heads(self.settings, cp_size, model, num_heads)
        waits = heads is None and self.settings.needs_heads and cp_size > 1
        if self._mesh is not None or waits:
            return None
        if self.settings.attention_exchange.name == "all_gather":
            self.cost = CostModel.gathered()
        elif ranks_per_node is not None and ranks_per_node % (cp_size * tp_size) == 0:
            self.cost = CostModel.in_node()
        if cp_size == 1:
            factors = Factors(1, 1, "one rank per sample")
        else:
            near = ranks_per_node and max(
                1, ranks_per_node // tp_size
            )  # tp ranks are the innermost
            factors = split(self.settings, cp_size, heads, near)
        replicas, shards = self.settings.data_parallel_axes
        self._mesh = ContextParallelMesh(
            ring_size=factors.ring_size,
            ulysses_size=factors.ulysses_size,
            device_type=device_type,
            data_parallel_replicate_size=replicas,
            data_parallel_shard_size=shards,
            tensor_parallel_size=tp_size,
        )
        weakref.finalize(self, self._mesh.destroy)  # with the strategy, or when the process ends
        return factors
