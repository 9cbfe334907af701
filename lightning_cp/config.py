"""The settings of a context-parallel run (``StrategyConfig``), their allowed values, and checks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from lightning_cp.errors import ConfigError
from lightning_cp.kernels.select import ALIASES, kernels
from lightning_cp.layout.axes import divisors, join_with_or
from lightning_cp.layout.exchange import EXCHANGES, EXECUTIONS, Exchange
from lightning_cp.layout.sequence import LAYOUT_KINDS

GATHERING_MODE = "zigzag_llama3"
MODE_ALIASES = {"ulysses_only": "ulysses", "ring_only": "ring"}
DEFAULT_CHUNK_TOKENS = 1024
"""Enough for matrix products at full speed, and for few reads of the weight's gradient."""
DEFAULT_TILE_TOKENS = 4096
"""Enough for matrix products at full speed, and for few additions to the parameters' gradients."""


@dataclass(frozen=True)
class AllowedValues:
    """Allowed values of one setting.

    Public names are fixed before all of them are implemented, so that configs and scripts need no change
    later. A value from ``later`` is refused with the setting that gives the same result today.
    """

    now: tuple[str, ...]
    later: tuple[str, ...] = ()
    instead: str = ""
    """Today's replacement of the later ones, for the message."""


CHOICES: dict[str, AllowedValues] = {
    "mode": AllowedValues(("auto", "ulysses", "ring", "hybrid", "zigzag_llama3")),
    "exchange": AllowedValues(EXCHANGES),
    "forward_execution": AllowedValues(EXECUTIONS),
    "backward_execution": AllowedValues(EXECUTIONS),
    "data_parallel": AllowedValues(
        ("ddp", "fsdp", "hsdp", "zero1"),
        instead="zero1 for what DeepSpeed calls stage 1, fsdp for its stages 2 and 3",
    ),
    "activation_checkpointing": AllowedValues(("none", "blocks", "keep_attention")),
    "layout": AllowedValues(("auto", *LAYOUT_KINDS)),
    "kernel": AllowedValues(("auto", *ALIASES, *kernels())),
    "token_weighting": AllowedValues(("micro_batch", "global")),
    "loss_reduction": AllowedValues(
        ("mean",), instead="a loss that is the mean over its targets; others are not available yet"
    ),
    "labels": AllowedValues(("auto", "aligned", "shift")),
    "batch_sync": AllowedValues(("check", "broadcast")),
    "checkpoint": AllowedValues(("full", "sharded")),
}


def check_choice(name: str, value: object) -> None:
    """Check one setting against ``CHOICES``.

    Raises:
        ConfigError: an unknown value, or one that is not available yet.
    """
    choice = CHOICES[name]
    if value in choice.now:
        return
    works = f" What works now: {choice.instead}." if choice.instead else ""
    if value in choice.later:
        raise ConfigError(f"{name}={value!r} is not available yet.{works}")
    raise ConfigError(f"{name} must be one of {', '.join(choice.now)}, got {value!r}.{works}")


def check_size(name: str, value: object, otherwise: str = "") -> None:
    """Check that a size is unset or a positive integer.

    Args:
        name: of the setting.
        value: to check.
        otherwise: other allowed values, for the message.

    Raises:
        ConfigError: any other value.
    """
    if value is not None and (type(value) is not int or value < 1):
        none = ", or None for all heads at once" if name == "kv_heads_per_gather" else ""
        raise ConfigError(
            f"{name} must be an integer of at least 1{otherwise}{none}, got {value!r}. "
            "Leave it out for the default."
        )


def check_known_arguments(
    unknown: Sequence[str], settings: Sequence[str], others: Sequence[str]
) -> None:
    """Check that there are no unknown arguments; the error names the nearest known ones.

    Args:
        unknown: names of the unknown arguments.
        settings: names of the strategy's settings.
        others: names of options that are passed on.

    Raises:
        ConfigError: ``unknown`` is not empty.
    """
    if not unknown:
        return
    nearest = {name: get_close_matches(name, [*settings, *others], n=1) for name in unknown}
    hints = [
        f" Did you mean {near[0]} instead of {name}?" for name, near in nearest.items() if near
    ]
    raise ConfigError(
        f"unknown argument(s) {', '.join(unknown)}.{''.join(hints)} Settings of this strategy: "
        f"{', '.join(settings)}. Others are DDPStrategy's, such as find_unused_parameters."
    )


def check_module_names(name: str, given: object, example: str, found: str) -> None:
    """Check that a setting names modules.

    Args:
        name: of the setting.
        given: class names or patterns of module names, one or several.
        example: of both.
        found: modules that ``None`` stands for, for the message.

    Raises:
        ConfigError: any other value.
    """
    names = [given] if isinstance(given, str) else given
    if isinstance(names, (list, tuple)) and names and all(isinstance(x, str) and x for x in names):
        return
    raise ConfigError(
        f"{name} must be class names or patterns of module names, such as {example}, or None to find "
        f"{found}, got {given!r}. "
        "Put names into a list."
    )


def profile_steps(profile: Any) -> tuple[int, ...]:
    """Return the steps of the setting ``profile``, in order.

    Raises:
        ConfigError: not steps.
    """
    if profile is None:
        return ()
    steps = [profile] if isinstance(profile, (int, str)) else profile
    if (
        not isinstance(steps, Sequence)
        or isinstance(steps, str)
        or not steps
        or any(type(step) is not int or step < 1 for step in steps)
        or len(set(steps)) < len(steps)
    ):
        raise ConfigError(
            f"profile must be a training step, counted from 1, or a list of different ones, got {profile!r}. "
            "profile=3 records the third, when caches are warm; profile=[3, 100] two of them; None records "
            "nothing."
        )
    return tuple(sorted(steps))


@dataclass(frozen=True)
class StrategyConfig:
    """The strategies' constructor arguments, which are documented there."""

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
        known = isinstance(dims, Mapping)  # validation refuses anything else
        object.__setattr__(self, "sequence_dims", dict(dims) if known else dims)
        object.__setattr__(
            self, "activation_checkpointing", self.activation_checkpointing or "none"
        )
        if not self.parity_check:  # YAML reads a bare off as False
            object.__setattr__(self, "parity_check", "off")

    @classmethod
    def take(cls, arguments: Mapping[str, Any]) -> StrategyConfig:
        """Make it from a mapping that contains at least all settings."""
        return cls(**{item.name: arguments[item.name] for item in fields(cls)})

    def with_sequence_dims(self, dims: Mapping[str, int | None]) -> StrategyConfig:
        """Return a copy with more declared dimensions; the user's take precedence."""
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
        """True if data ranks depend on each other's forward, since each holds a part of the parameters."""
        zero1 = self.data_parallel == "zero1" and self.data_parallel_size > 1
        return zero1 or self.data_parallel_axes[1] > 1

    @property
    def attention_exchange(self) -> Exchange:
        """The exchange of keys over the ring axis."""
        name = "all_gather" if self.mode == GATHERING_MODE else self.exchange
        return Exchange(
            name, self.forward_execution, self.backward_execution, self.kv_heads_per_gather
        )

    @property
    def loss_chunk_tokens(self) -> int | None:
        """Tokens per chunk of the logits; ``None``: all tokens."""
        return DEFAULT_CHUNK_TOKENS if self.chunked_loss is True else self.chunked_loss or None

    @property
    def mlp_tile_tokens(self) -> int | None:
        """Tokens per tile of an MLP; ``None``: all tokens."""
        return DEFAULT_TILE_TOKENS if self.tiled_mlp is True else self.tiled_mlp or None

    @property
    def parity_steps(self) -> int | None:
        """Optimizer steps between repeated parity checks; ``None``: one check, or none."""
        return parity_steps_of(self.parity_check)

    @property
    def profiled_steps(self) -> tuple[int, ...]:
        """Training steps to record, in order; the first one is 1."""
        return profile_steps(self.profile)

    @property
    def weights_globally(self) -> bool:
        """True if targets have equal weights over data ranks and accumulation windows."""
        return self.token_weighting == "global"  # noqa: S105 - no password

    @property
    def needs_heads(self) -> bool:
        """True if the split depends on the number of heads."""
        return (
            self.mode in ("auto", "hybrid") and self.ulysses_size is None and self.ring_size is None
        )


def parity_steps_of(every: object) -> int | None:
    """Return the n of ``every_<n>``; ``None`` for anything else."""
    given = str(every)
    number = given.removeprefix("every_")
    return int(number) if number != given and number.isdecimal() and int(number) else None


def explicit_cp_size(settings: StrategyConfig) -> int | None:
    """Return the context-parallel size if it is set, else ``None``.

    Raises:
        ConfigError: two sizes that contradict each other.
    """
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


def resolve_cp_size(settings: StrategyConfig, world_size: int) -> int:
    """Return the number of ranks that share a sample.

    Raises:
        ConfigError: the sizes do not multiply to the world size.
    """
    wanted = explicit_cp_size(settings)
    data = settings.data_parallel_size
    others = data * settings.tensor_parallel_size
    if wanted is None:
        if world_size % others:
            raise ConfigError(_world_size_message(settings, world_size))
        return world_size // others
    if wanted * others != world_size:
        shown = [f"data_parallel_size={data}"]
        for name in ("context_parallel_size", "ring_size", "ulysses_size"):
            value = getattr(settings, name)
            shown += [f"{name}={value}"] if value not in (None, "auto") else []
        inner = wanted * settings.tensor_parallel_size
        if settings.tensor_parallel_size > 1:
            shown.append(f"tensor_parallel_size={settings.tensor_parallel_size}")
        rest, left = divmod(world_size, inner)
        fix = (
            f"data_parallel_size={rest}"
            if not left
            else (f"{inner} devices, or a multiple of it with data_parallel_size=<that multiple>")
        )
        raise ConfigError(
            f"the mesh sizes must multiply to the world size {world_size}, got "
            f"{' x '.join(shown)}, which is {wanted * others} ranks. What would work: {fix}."
        )
    return wanted


def _world_size_message(settings: StrategyConfig, world_size: int) -> str:
    """Return the message for data and tensor parallel sizes that do not divide the world size."""
    data, tensor = settings.data_parallel_size, settings.tensor_parallel_size
    if tensor == 1 or world_size % tensor:
        name, value = ("data", data) if tensor == 1 else ("tensor", tensor)
        return (
            f"{name}_parallel_size={value} does not divide the world size {world_size}. With {world_size} "
            f"ranks, {name}_parallel_size can be {join_with_or(divisors(world_size))}."
        )
    return (
        f"data_parallel_size={data} x tensor_parallel_size={tensor} does not divide the world size "
        f"{world_size}. With {world_size} ranks and tensor_parallel_size={tensor}, data_parallel_size can be "
        f"{join_with_or(divisors(world_size // tensor))}."
    )
