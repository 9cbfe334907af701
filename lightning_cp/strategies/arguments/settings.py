"""The settings of a context-parallel run, and how they become sizes of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from lightning_cp.attention.exchange import Exchange
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import Factors, factorise
from lightning_cp.models.swap import num_heads_of
from lightning_cp.profile.recorder import steps_of
from lightning_cp.strategies.arguments.choices import CHOICES, check_choice, check_size
from lightning_cp.strategies.arguments.contradictions import (
    GATHERING_MODE,
    check_exchange,
    check_factors,
    check_mode,
    check_profile,
    check_tensor_parallel,
    check_timeouts,
    does_not_divide,
    explicit_size,
    of_tensor_parallel_rank,
)
from lightning_cp.strategies.engines.checks import check_engine
from lightning_cp.strategies.pretrained import check_pretrained

MODE_ALIASES = {"ulysses_only": "ulysses", "ring_only": "ring"}
SIZES = (
    "ulysses_size",
    "ring_size",
    "num_heads",
    "kv_heads_per_gather",
    "data_parallel_size",
    "tensor_parallel_size",
    "data_parallel_replicate_size",
)


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
    exchange: str = "ring"
    forward_execution: str = "two_kernel"
    backward_execution: str = "two_kernel"
    kv_heads_per_gather: int | None = 1
    data_parallel: str = "ddp"
    data_parallel_size: int = 1
    data_parallel_replicate_size: int = 1
    tensor_parallel_size: int = 1
    layout: str = "auto"
    kernel: str = "auto"
    token_weighting: str = "micro_batch"  # noqa: S105 - no password
    loss_reduction: str = "mean"
    labels: str = "auto"
    label_key: str = "labels"
    sequence_dims: Mapping[str, int | None] = field(default_factory=dict)
    padding: bool = True
    batch_sync: str = "check"
    parity_check: str | None = "off"
    profile: int | Sequence[int] | None = None
    profile_folder: str | None = None
    pretrained: Any = None
    check_finite: bool = True
    checkpoint: str = "full"
    async_save: bool = False
    tensor_parallel_plan: Any = None
    wrap_modules: str | Sequence[str] | None = None
    mixed_precision: Any = None
    cpu_offload: bool = False
    bucket_cap_mb: float | str | None = None
    step_timeout: float | None = 120.0
    first_step_timeout: float | None = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", MODE_ALIASES.get(self.mode, self.mode))
        object.__setattr__(self, "sequence_dims", dict(self.sequence_dims or {}))
        if not self.parity_check:  # YAML reads a bare off as False
            object.__setattr__(self, "parity_check", "off")
        for name in CHOICES:
            check_choice(name, getattr(self, name))
        for name in SIZES:
            check_size(name, getattr(self, name))
        if self.context_parallel_size != "auto":
            check_size("context_parallel_size", self.context_parallel_size)
        for name in ("padding", "check_finite", "async_save"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        check_mode(self)
        check_exchange(self)
        check_profile(self)
        check_pretrained(self)
        check_engine(self)
        check_timeouts(self)
        explicit_size(self)
        check_tensor_parallel(self)

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
        wanted = explicit_size(self)
        data = self.data_parallel_size
        others = data * self.tensor_parallel_size
        if wanted is None:
            if world_size % others:
                raise ConfigError(does_not_divide(self, world_size))
            return world_size // others
        if wanted * others != world_size:
            shown = [f"data_parallel_size={data}"]
            for name in ("context_parallel_size", "ring_size", "ulysses_size"):
                value = getattr(self, name)
                shown += [f"{name}={value}"] if value not in (None, "auto") else []
            inner = wanted * self.tensor_parallel_size
            if self.tensor_parallel_size > 1:
                shown.append(f"tensor_parallel_size={self.tensor_parallel_size}")
            rest, left = divmod(world_size, inner)
            fix = (
                f"data_parallel_size={rest}"
                if not left
                else (
                    f"{inner} devices, or a multiple of it with data_parallel_size=<that multiple>"
                )
            )
            raise ConfigError(
                f"the mesh sizes must multiply to the world size {world_size}, got "
                f"{' x '.join(shown)}, which is "
                f"{wanted * others} ranks. What would work: {fix}."
            )
        return wanted

    def known_heads(
        self, cp_size: int, model: nn.Module | None, declared: int | None
    ) -> int | None:
        """Query heads of a tensor-parallel rank; ``None`` if nobody tells.

        They are as set, or as the model declares them, or as its modules tell. A split that does not depend
        on the heads is checked against them here, so that setup refuses what the first attention call would.

        Args:
            cp_size: ranks that share a sample.
            model: where the number is looked for; ``None`` before there is one.
            declared: what the model's mixin says.

        Raises:
            ConfigError: the heads do not divide, or the split needs their number and no module tells.
        """
        heads = self.num_heads or declared
        if cp_size == 1:
            return heads
        if heads is None and model is not None:
            with nullcontext() if self.needs_heads else suppress(ConfigError):
                heads = num_heads_of(model)
        heads = of_tensor_parallel_rank(self, heads)
        if heads is not None and not self.needs_heads:
            self.factors(cp_size, heads, None)
        return heads

    @property
    def data_parallel_axes(self) -> tuple[int, int]:
        """Sizes of ``dp_replicate`` and ``dp_shard``: copies of the model, and data ranks that share one."""
        if self.data_parallel == "fsdp":
            return 1, self.data_parallel_size
        if self.data_parallel == "hsdp":
            replicas = self.data_parallel_replicate_size
            return replicas, self.data_parallel_size // replicas
        return self.data_parallel_size, 1

    @property
    def attention_exchange(self) -> Exchange:
        """How keys reach the queries over the ring axis."""
        name = "all_gather" if self.mode == GATHERING_MODE else self.exchange
        return Exchange(
            name, self.forward_execution, self.backward_execution, self.kv_heads_per_gather
        )

    @property
    def profiled_steps(self) -> tuple[int, ...]:
        """Training steps to be recorded, in order; the first one is 1."""
        return steps_of(self.profile)

    @property
    def weights_globally(self) -> bool:
        """Whether targets weigh the same over data ranks and accumulation windows."""
        return self.token_weighting == "global"  # noqa: S105 - no password

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
        elif self.mode in ("ring", GATHERING_MODE):
            factors = Factors(1, cp_size, f"mode={self.mode}")
        else:
            assert num_heads is not None
            limit = (
                ranks_per_node
                if self.mode == "auto"
                else min(ranks_per_node or cp_size, cp_size // 2)
            )
            factors = factorise(cp_size, num_heads, max(1, limit) if limit else None)
        check_factors(self, factors, cp_size, num_heads)
        return factors
