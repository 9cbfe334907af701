"""The settings of a context-parallel run: plain data, which ``check`` looks at and ``sizes`` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_cp.attention.exchange import Exchange
from lightning_cp.length.cross_entropy import DEFAULT_CHUNK_TOKENS
from lightning_cp.length.tiled import DEFAULT_TILE_TOKENS
from lightning_cp.profile.recorder import steps_of

GATHERING_MODE = "zigzag_llama3"
MODE_ALIASES = {"ulysses_only": "ulysses", "ring_only": "ring"}


@dataclass(frozen=True)
class Settings:
    """The user's choices: the strategies' constructor arguments, described there."""

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
    parity_check: str | None = "first_batch"
    parity_tokens: int = 4096
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
    chunked_loss: bool | int = False
    tiled_mlp: bool | int = False
    mlp_modules: str | Sequence[str] | None = None
    activation_checkpointing: str = "none"
    activation_offload: bool = False
    step_timeout: float | None = 120.0
    first_step_timeout: float | None = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", MODE_ALIASES.get(self.mode, self.mode))
        dims: Any = {} if self.sequence_dims is None else self.sequence_dims
        known = isinstance(dims, Mapping)  # anything else is refused by ``check``
        object.__setattr__(self, "sequence_dims", dict(dims) if known else dims)
        object.__setattr__(
            self, "activation_checkpointing", self.activation_checkpointing or "none"
        )
        if not self.parity_check:  # YAML reads a bare off as False
            object.__setattr__(self, "parity_check", "off")

    @classmethod
    def take(cls, arguments: Mapping[str, Any]) -> Settings:
        """From a mapping that holds at least the settings' names."""
        return cls(**{item.name: arguments[item.name] for item in fields(cls)})

    def with_sequence_dims(self, dims: Mapping[str, int | None]) -> Settings:
        """The same with more declared dimensions; the user's own win."""
        return replace(self, sequence_dims={**dims, **self.sequence_dims})

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
    def forward_is_shared(self) -> bool:
        """True if data ranks take part in each other's forward: each holds a part of the same parameters."""
        zero1 = self.data_parallel == "zero1" and self.data_parallel_size > 1
        return zero1 or self.data_parallel_axes[1] > 1

    @property
    def attention_exchange(self) -> Exchange:
        """The way of keys to the queries over the ring axis."""
        name = "all_gather" if self.mode == GATHERING_MODE else self.exchange
        return Exchange(
            name, self.forward_execution, self.backward_execution, self.kv_heads_per_gather
        )

    @property
    def loss_chunk_tokens(self) -> int | None:
        """Tokens whose logits exist at once; ``None``: all of them."""
        return DEFAULT_CHUNK_TOKENS if self.chunked_loss is True else self.chunked_loss or None

    @property
    def mlp_tile_tokens(self) -> int | None:
        """Tokens that an MLP computes at once; ``None``: all of them."""
        return DEFAULT_TILE_TOKENS if self.tiled_mlp is True else self.tiled_mlp or None

    @property
    def parity_steps(self) -> int | None:
        """After how many optimizer steps the model is checked again; ``None``: once, or never."""
        return parity_steps_of(self.parity_check)

    @property
    def profiled_steps(self) -> tuple[int, ...]:
        """Training steps to be recorded, in order; the first one is 1."""
        return steps_of(self.profile)

    @property
    def weights_globally(self) -> bool:
        """True if targets weigh the same over data ranks and accumulation windows."""
        return self.token_weighting == "global"  # noqa: S105 - no password

    @property
    def needs_heads(self) -> bool:
        """True if the split depends on the number of heads."""
        return (
            self.mode in ("auto", "hybrid") and self.ulysses_size is None and self.ring_size is None
        )


def parity_steps_of(every: object) -> int | None:
    """The n of ``every_<n>``; ``None`` for anything else."""
    given = str(every)
    number = given.removeprefix("every_")
    return int(number) if number != given and number.isdecimal() and int(number) else None
