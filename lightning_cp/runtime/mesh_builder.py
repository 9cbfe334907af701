"""The mesh of a run: its sizes, from settings, ranks and heads; and its builder."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

from torch import nn

from lightning_cp.config import GATHERING_MODE, StrategyConfig, resolve_cp_size
from lightning_cp.errors import ConfigError, UndeclaredError
from lightning_cp.layout import CostModel
from lightning_cp.layout.auto import DEFAULT_COST
from lightning_cp.layout.axes import Factors, divisors, factorise, join_with_or
from lightning_cp.mesh import ContextParallelMesh


def resolve_heads(
    settings: StrategyConfig, cp_size: int, model: nn.Module | None, declared: int | None
) -> int | None:
    """Return the query heads of a tensor-parallel rank; ``None`` if they are unknown.

    Sources are, in this order, the setting, the mixin's declaration and the model's modules. A split that
    does not depend on the heads is checked here, at setup, and not in the first attention call.

    Args:
        settings: the user's.
        cp_size: ranks that share a sample.
        model: the model to search; ``None`` before there is one.
        declared: declaration of the model's mixin.

    Raises:
        ConfigError: the heads do not divide, or the split needs their number and no module has it.
    """
    heads = settings.num_heads or declared
    if cp_size == 1:
        return heads
    if heads is None and model is not None:
        from lightning_cp.models.swap import num_heads_of  # loads all kinds of models

        try:
            heads = num_heads_of(model)
        except UndeclaredError as unknown:
            if settings.needs_heads:
                ranks = cp_size * settings.data_parallel_size
                *others, last = unknown.questions
                without = (
                    "A model without attention cannot share a sequence: pass context_parallel_size=1 and "
                    f"data_parallel_size={ranks}; ranks then have different samples, as with ddp."
                )
                raise UndeclaredError([*others, f"{last} {without}"], unknown.arguments) from None
    heads = _heads_of_tensor_parallel_rank(settings, heads)
    if heads is not None and not settings.needs_heads:
        split(settings, cp_size, heads, None)
    return heads


def split(
    settings: StrategyConfig, cp_size: int, num_heads: int | None, ranks_per_node: int | None
) -> Factors:
    """Return the split of ``cp_size`` into Ulysses and ring.

    Raises:
        ConfigError: a split that the sizes or the heads do not allow.
    """
    if settings.ulysses_size is not None or settings.ring_size is not None:
        ulysses = settings.ulysses_size or cp_size // (settings.ring_size or 1)
        factors = Factors(ulysses, settings.ring_size or cp_size // ulysses, "as set")
    elif settings.mode == "ulysses":
        factors = Factors(cp_size, 1, "mode=ulysses")
    elif settings.mode in ("ring", GATHERING_MODE):
        factors = Factors(1, cp_size, f"mode={settings.mode}")
    else:
        assert num_heads is not None
        limit = (
            ranks_per_node
            if settings.mode == "auto"
            else min(ranks_per_node or cp_size, cp_size // 2)
        )
        factors = factorise(cp_size, num_heads, max(1, limit) if limit else None)
    _check_split(settings, factors, cp_size, num_heads)
    return factors


def _check_split(
    settings: StrategyConfig, factors: Factors, cp_size: int, heads: int | None
) -> None:
    """Check that the mode and the heads allow a split of ``cp_size`` ranks.

    Raises:
        ConfigError: naming sizes that work.
    """
    if factors.ulysses_size * factors.ring_size != cp_size:
        name = "ring_size" if settings.ulysses_size is None else "ulysses_size"
        works = [n for n in divisors(cp_size) if name == "ring_size" or not (heads or 0) % n]
        raise ConfigError(
            f"{name}={getattr(settings, name)} does not divide the {cp_size} context-parallel ranks. With "
            f"{cp_size} ranks, {name} can be {join_with_or(works)}."
        )
    other = {"ulysses": factors.ring_size, "ring": factors.ulysses_size}.get(settings.mode, 1)
    if other != 1:
        raise ConfigError(
            f"mode={settings.mode!r} uses one axis only, but ulysses_size={settings.ulysses_size} and "
            f"ring_size={settings.ring_size} split {cp_size} ranks into ulysses {factors.ulysses_size} x "
            f"ring {factors.ring_size}. Leave the sizes out, or use mode='hybrid' or 'auto'."
        )
    if settings.mode == "hybrid" and 1 in (factors.ulysses_size, factors.ring_size) and cp_size > 1:
        raise ConfigError(
            f"mode='hybrid' cannot split {cp_size} ranks into two axes larger than 1"
            + (f" with {heads} heads" if heads else "")
            + ". Use mode='auto', 'ulysses' or 'ring', or set ulysses_size and ring_size."
        )
    if settings.mode == GATHERING_MODE and factors.ring_size == 1 < cp_size:
        raise ConfigError(
            f"mode={GATHERING_MODE!r} gathers keys over the ring axis, but "
            f"ulysses_size={factors.ulysses_size} leaves a ring of 1 of {cp_size} ranks. Use a smaller "
            "ulysses_size, or mode='ulysses'."
        )
    if settings.exchange == "ring_flash_attn" and factors.ring_size == 1 < cp_size:
        raise ConfigError(
            f"exchange='ring_flash_attn' needs a ring, but Ulysses takes all {cp_size} ranks. Use "
            "mode='ring', or a smaller ulysses_size."
        )
    if heads is not None and heads % factors.ulysses_size:
        works = [n for n in divisors(cp_size) if heads % n == 0]
        tensor = settings.tensor_parallel_size
        left = f" that tensor_parallel_size={tensor} leaves to a rank" if tensor > 1 else ""
        raise ConfigError(
            f"ulysses_size={factors.ulysses_size} does not divide the model's {heads} attention heads{left}. "
            f"With {cp_size} ranks, ulysses_size can be {join_with_or(works)} and the ring the rest; "
            "mode='auto' "
            "chooses. If the attention to be shared has other heads than that, pass num_heads=."
        )


def _heads_of_tensor_parallel_rank(settings: StrategyConfig, heads: int | None) -> int | None:
    """Return the query heads that tensor parallelism leaves to a rank.

    Raises:
        ConfigError: they do not divide.
    """
    size = settings.tensor_parallel_size
    if heads is not None and heads % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the model's {heads} attention heads. With {heads} "
            f"heads, tensor_parallel_size can be {join_with_or(divisors(heads))}."
        )
    return None if heads is None else heads // size


class MeshBuilder:
    """Owner of a run's mesh: its groups end with this object, or with the process."""

    def __init__(self, settings: StrategyConfig) -> None:
        self._settings = settings
        self.cost = DEFAULT_COST
        """Estimated cost of communication on the ring, for ``layout="auto"``."""

    @cached_property
    def mesh(self) -> ContextParallelMesh:
        """The mesh, which ``build`` sets.

        Raises:
            ConfigError: it does not exist yet.
        """
        raise ConfigError(
            "the mesh does not exist yet: processes start first, and the split of the context-parallel "
            "ranks may need the model. It is available from setup on, or in configure_model if "
            "num_heads, or ulysses_size and ring_size, are given to the strategy."
        )

    @property
    def is_built(self) -> bool:
        """True if the mesh exists."""
        return "mesh" in vars(self)

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks of each axis by its name; empty before there is a mesh."""
        sizes = self.mesh.sizes if self.is_built else {}
        return {str(axis): size for axis, size in sizes.items()}

    @contextmanager
    def use(self, mesh: ContextParallelMesh) -> Generator[None]:
        """A block in which another mesh of the same ranks replaces the run's."""
        own, self.mesh = self.mesh, mesh
        try:
            yield
        finally:
            self.mesh = own

    def data_rank(self, global_rank: int, world_size: int) -> int:
        """Return the number of this rank's sample; known before the mesh, as data axes are the outer ones."""
        if self.is_built:
            return self.mesh.data_rank
        sharing = resolve_cp_size(self._settings, world_size) * self._settings.tensor_parallel_size
        return global_rank // sharing

    def build(
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
            ranks_per_node: ranks with fast links between them.
            model: the model to search for its number of heads, if that is needed and not given.
            num_heads: the model's declaration; the setting of the same name takes precedence.

        Raises:
            ConfigError: sizes that do not fit the world or the heads.
        """
        cp_size, tp_size = (
            resolve_cp_size(self._settings, world_size),
            self._settings.tensor_parallel_size,
        )
        heads = resolve_heads(self._settings, cp_size, model, num_heads)
        waits = heads is None and self._settings.needs_heads and cp_size > 1
        if self.is_built or waits:
            return None
        if self._settings.attention_exchange.name == "all_gather":
            self.cost = CostModel.gathered()
        elif ranks_per_node is not None and ranks_per_node % (cp_size * tp_size) == 0:
            self.cost = CostModel.in_node()
        if self._settings.attention_exchange.name == "rotation":
            self.cost = replace(self.cost, rotates=True)
        if cp_size == 1:
            factors = Factors(1, 1, "one rank per sample")
        else:
            near = ranks_per_node and max(
                1, ranks_per_node // tp_size
            )  # tp ranks are the innermost
            factors = split(self._settings, cp_size, heads, near)
        replicas, shards = self._settings.data_parallel_axes
        self.mesh = ContextParallelMesh(
            ring_size=factors.ring_size,
            ulysses_size=factors.ulysses_size,
            device_type=device_type,
            data_parallel_replicate_size=replicas,
            data_parallel_shard_size=shards,
            tensor_parallel_size=tp_size,
        )
        weakref.finalize(self, self.mesh.destroy)  # with the strategy, or when the process ends
        return factors
