"""The settings of a context-parallel run, and how they become sizes of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_cp.errors import ConfigError
from lightning_cp.kernels.api import ALIASES, kernels
from lightning_cp.layout.sequence import LAYOUT_KINDS
from lightning_cp.mesh import Factors, factorise

MODES = ("auto", "ulysses", "ring", "hybrid")
MODE_ALIASES = {"ulysses_only": "ulysses", "ring_only": "ring"}
ENGINES = ("ddp",)
LABELS = ("auto", "aligned", "shift")


@dataclass(frozen=True)
class Settings:
    """What the user chose; the strategies' constructor arguments, described there.

    Raises:
        ConfigError: a value that is not known, or sizes that contradict each other.
    """

    context_parallel_size: int | str = "auto"
    mode: str = "auto"
    ulysses_size: int | None = None
    ring_size: int | None = None
    num_heads: int | None = None
    data_parallel: str = "ddp"
    data_parallel_size: int = 1
    layout: str = "auto"
    kernel: str = "auto"
    labels: str = "auto"
    sequence_dims: Mapping[str, int | None] = field(default_factory=dict)
    padding: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", MODE_ALIASES.get(self.mode, self.mode))
        object.__setattr__(self, "sequence_dims", dict(self.sequence_dims or {}))
        _one_of("mode", self.mode, MODES)
        _one_of("data_parallel", self.data_parallel, ENGINES)
        _one_of("layout", self.layout, ("auto", *LAYOUT_KINDS))
        _one_of("labels", self.labels, LABELS)
        _one_of("kernel", self.kernel, ("auto", *ALIASES, *kernels()))
        for name in ("ulysses_size", "ring_size", "num_heads", "data_parallel_size"):
            _positive(name, getattr(self, name))
        if self.context_parallel_size != "auto":
            _positive("context_parallel_size", self.context_parallel_size)
        _check_mode(self)
        _explicit_size(self)

    @classmethod
    def take(cls, arguments: Mapping[str, Any]) -> Settings:
        """From a mapping that holds at least the settings' names."""
        return cls(**{item.name: arguments[item.name] for item in fields(cls)})

    def with_sequence_dims(self, dims: Mapping[str, int | None]) -> Settings:
        """The same with more declared dimensions; the user's own win."""
        return replace(self, sequence_dims={**dims, **self.sequence_dims})

    def context_size(self, world_size: int) -> int:
        """Ranks that share a sample, of ``world_size`` ranks.

        Raises:
            ConfigError: the sizes do not multiply to the world size.
        """
        wanted = _explicit_size(self)
        if wanted is None:
            if world_size % self.data_parallel_size:
                raise ConfigError(
                    f"data_parallel_size={self.data_parallel_size} does not divide the world size "
                    f"{world_size}."
                )
            return world_size // self.data_parallel_size
        if wanted * self.data_parallel_size != world_size:
            shown = [f"data_parallel_size={self.data_parallel_size}"]
            for name in ("context_parallel_size", "ring_size", "ulysses_size"):
                value = getattr(self, name)
                shown += [f"{name}={value}"] if value not in (None, "auto") else []
            rest, left = divmod(world_size, wanted)
            fix = f"data_parallel_size={rest}" if not left else f"{wanted} or a multiple as devices"
            raise ConfigError(
                f"the mesh sizes must multiply to the world size {world_size}, got "
                f"{' x '.join(shown)}, which is "
                f"{wanted * self.data_parallel_size} ranks. What would work: {fix}."
            )
        return wanted

    @property
    def needs_heads(self) -> bool:
        """Whether the split depends on the number of heads."""
        return (
            self.mode in ("auto", "hybrid") and self.ulysses_size is None and self.ring_size is None
        )

    def factors(self, cp_size: int, num_heads: int | None, ranks_per_node: int | None) -> Factors:
        """The split of ``cp_size`` into Ulysses and ring.

        Raises:
            ConfigError: a split that the sizes or the heads do not allow.
        """
        if self.ulysses_size is not None or self.ring_size is not None:
            ulysses = self.ulysses_size or cp_size // (self.ring_size or 1)
            factors = Factors(ulysses, self.ring_size or cp_size // ulysses, "as set")
        elif self.mode == "ulysses":
            factors = Factors(cp_size, 1, "mode=ulysses")
        elif self.mode == "ring":
            factors = Factors(1, cp_size, "mode=ring")
        else:
            assert num_heads is not None
            limit = (
                ranks_per_node
                if self.mode == "auto"
                else min(ranks_per_node or cp_size, cp_size // 2)
            )
            factors = factorise(cp_size, num_heads, max(1, limit) if limit else None)
        _check_factors(self, factors, cp_size, num_heads)
        return factors


def _explicit_size(settings: Settings) -> int | None:
    """The context-parallel size that was given, if it was."""
    ulysses, ring = settings.ulysses_size, settings.ring_size
    given = settings.context_parallel_size
    if ulysses is not None and ring is not None:
        if given not in ("auto", ulysses * ring):
            raise ConfigError(
                f"context_parallel_size={given} contradicts ulysses_size={ulysses} x ring_size={ring} = "
                f"{ulysses * ring}. Leave one of them out."
            )
        return ulysses * ring
    return None if given == "auto" else int(given)


def _check_mode(settings: Settings) -> None:
    other = {"ulysses": "ring_size", "ring": "ulysses_size"}.get(settings.mode)
    if other is not None and getattr(settings, other) not in (None, 1):
        raise ConfigError(
            f"mode={settings.mode!r} has {other}=1, got {other}={getattr(settings, other)}. Use "
            "mode='hybrid' or "
            "'auto' for both axes."
        )
    if settings.mode == "hybrid" and 1 in (settings.ulysses_size, settings.ring_size):
        raise ConfigError(
            f"mode='hybrid' needs both axes larger than 1, got ulysses_size={settings.ulysses_size}, "
            f"ring_size={settings.ring_size}. Use mode='ulysses' or 'ring'."
        )


def _check_factors(settings: Settings, factors: Factors, cp_size: int, heads: int | None) -> None:
    if factors.ulysses_size * factors.ring_size != cp_size:
        raise ConfigError(
            f"ulysses_size={settings.ulysses_size} and ring_size={settings.ring_size} do not make up the "
            f"{cp_size} context-parallel ranks: sizes that work divide {cp_size}."
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
    if heads is not None and heads % factors.ulysses_size:
        works = [n for n in range(1, cp_size + 1) if heads % n == 0 and cp_size % n == 0]
        raise ConfigError(
            f"ulysses_size={factors.ulysses_size} does not divide the model's {heads} attention heads. With "
            f"{cp_size} ranks, ulysses_size can be {', '.join(map(str, works))} and the ring the rest; "
            "mode='auto' chooses."
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def _positive(name: str, value: object) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
