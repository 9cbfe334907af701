"""The settings of a strategy: groups of fields with defaults, descriptions and allowed values.

A setting is declared here alone. ``docs/generate_settings.py`` writes the strategies' signature and
docstring, the Hydra config and the table of the docs from these fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from lightning_cp.errors import ConfigError, nearest_name
from lightning_cp.kernels.select import ALIASES, kernels
from lightning_cp.layout.axes import divisors, join_with_or
from lightning_cp.layout.exchange import EXCHANGES, EXECUTIONS, KEY_GRADIENTS, Exchange
from lightning_cp.layout.sequence import LAYOUT_KINDS

GATHERING_MODE = "zigzag_llama3"
MODE_ALIASES = {"ulysses_only": "ulysses", "ring_only": "ring"}
DEFAULT_CHUNK_TOKENS = 1024
"""Enough for matrix products at full speed, and for few reads of the weight's gradient."""
DEFAULT_TILE_TOKENS = 4096
"""Enough for matrix products at full speed, and for few additions to the parameters' gradients."""
STEP_SECONDS = {"cpu": 120.0, "cuda": 360.0}
"""``step_timeout="auto"`` by type of device: docs/concepts/faults.md says why."""

T = TypeVar("T")


def setting(
    default: T, text: str, *, choices: tuple[str, ...] = (), instead: str = "", guide: str = ""
) -> T:
    """Return a dataclass field of one setting.

    Args:
        default: of the setting; an empty dict is ``None`` in the strategies' signature.
        text: description in Markdown; ``--help`` shows its first sentence.
        choices: all allowed values, if they can be listed.
        instead: replacement of values that are not allowed, for the message.
        guide: page of the docs with details.
    """
    metadata = {"text": text, "choices": choices, "instead": instead, "guide": guide}
    if isinstance(default, dict):
        return cast(T, field(default_factory=dict, metadata=metadata))
    return cast(T, field(default=default, metadata=metadata))


@dataclass(frozen=True)
class MeshSettings:
    """Mesh: ranks that share a sample, a layer or the model."""

    context_parallel_size: int | str = setting(
        "auto", "ranks that share a sample; `auto`: all ranks that the other sizes leave."
    )
    mode: str = setting(
        "auto",
        "division of a sequence: `ulysses` (an all-to-all trades sequence for heads), `ring` (keys and "
        "values travel from rank to rank), `hybrid` (a ring of Ulysses groups), `zigzag_llama3` (a ring "
        'axis with `exchange="all_gather"`, also around Ulysses, with `ulysses_size`), or `auto` (as much '
        "Ulysses as the heads allow, ring for the rest). `ulysses_only` and `ring_only` are aliases.",
        choices=("auto", "ulysses", "ring", "hybrid", GATHERING_MODE),
        guide="guides/modes.md",
    )
    ulysses_size: int | None = setting(
        None, "ranks that trade sequence for heads; must divide the number of heads."
    )
    ring_size: int | None = setting(
        None,
        "ranks that K/V travel around.",
    )
    num_heads: int | None = setting(
        None,
        "query heads, for a mesh that is made before the model, or for a model that does not declare them.",
    )
    data_parallel: str = setting(
        "ddp",
        "storage of the model: `ddp` (whole on every rank), `fsdp` (sharded over all ranks), `hsdp` "
        "(sharded within groups of ranks, with one copy per group), or `zero1` (optimizer state and "
        "gradients sharded, parameters whole from a step's forward to its backward).",
        choices=("ddp", "fsdp", "hsdp", "zero1"),
        instead="zero1 for what DeepSpeed calls stage 1, fsdp for its stages 2 and 3",
        guide="guides/engines.md",
    )
    data_parallel_size: int = setting(1, "groups of ranks with different samples.")
    data_parallel_replicate_size: int = setting(
        1, "copies of the model with `hsdp`; must divide `data_parallel_size`."
    )
    tensor_parallel_size: int = setting(
        1,
        "ranks that share each layer, next to each other; with `fsdp` or `hsdp`.",
        guide="guides/tensor-parallel.md",
    )

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
    def needs_heads(self) -> bool:
        """True if the split depends on the number of heads."""
        return (
            self.mode in ("auto", "hybrid") and self.ulysses_size is None and self.ring_size is None
        )


@dataclass(frozen=True)
class AttentionSettings:
    """Attention: the exchange of keys, the layout of tokens, the kernel."""

    exchange: str = setting(
        "ring",
        "movement of keys and values on the ring axis: `ring` (hop by hop, only those that another rank "
        "needs), `rotation` (all of them, from each rank to the next: for nodes with few network cards), "
        "`all_gather` (all at once), or `ring_flash_attn` (by that package, where it is exact).",
        choices=EXCHANGES,
        guide="guides/kernels.md",
    )
    forward_execution: str = setting(
        "two_kernel",
        "forward with gathered keys: `two_kernel` (one kernel call per chunk of queries, with the least "
        "memory) or `fused` (one call, with copies of the keys that several chunks see).",
        choices=EXECUTIONS,
    )
    backward_execution: str = setting("two_kernel", "the same for backward.", choices=EXECUTIONS)
    kv_heads_per_gather: int | None = setting(
        1,
        "K/V heads that are gathered at a time, which bounds the memory; `None`: all heads at once.",
    )
    key_gradients: str = setting(
        "accumulate",
        "dtype in which a ring sends gradients of keys and values home: `accumulate` (that of their sums, "
        "float32 for 16-bit inputs) or `compute` (that of the inputs: half the bytes, and each hop's part "
        "is rounded once).",
        choices=KEY_GRADIENTS,
        guide="guides/modes.md",
    )
    layout: str = setting(
        "auto",
        "tokens that each rank holds: `contiguous` (one stretch of the sequence), `zigzag` (even work on "
        "one causal document), `balanced` (even work on packed and padded rows), or `auto` (the layout "
        "that is predicted to be the fastest, for each batch). Every layout is exact.",
        choices=("auto", *LAYOUT_KINDS),
        guide="concepts/how_it_works.md#layouts",
    )
    kernel: str = setting(
        "auto",
        "kernel of attention: `aten` (PyTorch's own operators), `flash_attn` (the packages), the name of "
        "one kernel, such as `triton` (ours) or `reference`, or `auto` (the first kernel that can do the "
        "call).",
        choices=("auto", *ALIASES, *kernels()),
        guide="guides/kernels.md",
    )


@dataclass(frozen=True)
class BatchSettings:
    """Batches: labels, tensors, and weights of the loss."""

    token_weighting: str = setting(
        "micro_batch",
        "weights of targets: `micro_batch` (the loss is the mean over each micro-batch, as with DDP; data "
        "ranks and the micro-batches of an accumulation window have equal weights) or `global` (all "
        "targets have equal weights, over data ranks and over an accumulation window).",
        choices=("micro_batch", "global"),
    )
    loss_reduction: str = setting(
        "mean",
        "reduction of the loss over its targets; `mean` is the only one. A step computes a sum with "
        "`sequence_sum`.",
        choices=("mean",),
        instead="the mean, or in the step self.sequence_sum(losses).sum() for a sum",
    )
    labels: str = setting(
        "auto",
        "meaning of the labels: `auto` (for Hugging Face models that are called with `labels=`: labels "
        "are shifted on the whole sequence), `shift` (the same, and the step takes its targets from "
        '`batch["shift_labels"]`), `aligned` (`labels[i]` is the target of token i; any other module '
        "must declare this), or `none` (no labels of tokens: a loss of whole sequences, or of "
        "`count_targets`).",
        choices=("auto", "aligned", "shift", "none"),
    )
    label_key: str = setting(
        "labels", 'dotted name of the labels in a batch; an index for a tuple, such as `"1"`.'
    )
    sequence_dims: Mapping[str, int | None] = setting(
        {},
        "dotted name of a batch tensor -> its sequence dimension, for names that are not known; `None` as "
        "the dimension: every rank gets the whole tensor.",
    )
    padding: bool = setting(
        True,
        "pad sequences that do not divide, which is exact, and free in attention; `False` refuses them.",
    )
    batch_sync: str = setting(
        "check",
        "reading of batches: `check` (every rank reads, and all ranks compare what they read) or "
        "`broadcast` (the first rank of each cp group reads for the group).",
        choices=("check", "broadcast"),
        guide="guides/data.md",
    )

    @property
    def weights_globally(self) -> bool:
        """True if targets have equal weights over data ranks and accumulation windows."""
        return self.token_weighting == "global"  # noqa: S105 - no password


@dataclass(frozen=True)
class ShardingSettings:
    """Sharding: options of the engines and of tensor parallelism."""

    tensor_parallel_plan: Any = setting(
        None,
        "layers that tensor parallelism shares, and how: `None` (those of llama-like models), a mapping "
        'from patterns of module names to styles (`{"layers.*.mlp.up_proj": "colwise"}`), or a function '
        "of (module, device_mesh).",
        guide="guides/tensor-parallel.md",
    )
    wrap_modules: str | Sequence[str] | None = setting(
        None,
        "modules whose parameters engines that shard gather together, as class names or patterns of module "
        'names (`"LlamaDecoderLayer"`, `"model.layers.*"`). `None` finds the blocks.',
        guide="guides/engines.md",
    )
    mixed_precision: Any = setting(
        None,
        'dtype in which engines that shard gather and use parameters (`"bfloat16"`; gradients are then '
        "added in float32), or a `MixedPrecisionPolicy`.",
        guide="guides/engines.md",
    )
    cpu_offload: bool = setting(
        False,
        "engines that shard keep parameters, gradients and optimizer state in host memory.",
        guide="guides/engines.md",
    )
    bucket_cap_mb: float | str | None = setting(
        None,
        'MiB of gradients that `ddp` reduces together, or `"per_parameter"`; `None`: PyTorch\'s 25.',
        guide="guides/engines.md",
    )


@dataclass(frozen=True)
class MemorySettings:
    """Memory of long sequences: logits, MLPs and activations."""

    chunked_loss: bool | int = setting(
        False,
        "compute the loss of a Hugging Face model with a language-modelling head for this many tokens at "
        f"a time, so that only their logits exist; `True`: {DEFAULT_CHUNK_TOKENS}.",
        guide="guides/long-sequences.md",
    )
    tiled_mlp: bool | int = setting(
        False,
        "compute the MLP of each block for this many tokens at a time, forward and again in backward, and "
        f"keep nothing inside; `True`: {DEFAULT_TILE_TOKENS}.",
        guide="guides/long-sequences.md#tiled-mlps",
    )
    mlp_modules: str | Sequence[str] | None = setting(
        None,
        "modules that `tiled_mlp` is for, as class names or patterns of module names; `None` finds the "
        "MLPs of the blocks.",
        guide="guides/long-sequences.md#tiled-mlps",
    )
    activation_checkpointing: str = setting(
        "none",
        "layers that are computed again in backward: `none`, `blocks` (only their inputs are kept), or "
        "`keep_attention` (blocks, but the results of attention are kept as well, so that no "
        "communication is repeated).",
        choices=("none", "blocks", "keep_attention"),
        guide="guides/long-sequences.md#activation-checkpointing",
    )
    activation_offload: bool = setting(
        False,
        "keep in (pinned) host memory what activation checkpointing keeps.",
        guide="guides/long-sequences.md#activation-checkpointing",
    )

    @property
    def loss_chunk_tokens(self) -> int | None:
        """Tokens per chunk of the logits; ``None``: all tokens."""
        return DEFAULT_CHUNK_TOKENS if self.chunked_loss is True else self.chunked_loss or None

    @property
    def mlp_tile_tokens(self) -> int | None:
        """Tokens per tile of an MLP; ``None``: all tokens."""
        return DEFAULT_TILE_TOKENS if self.tiled_mlp is True else self.tiled_mlp or None


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints: weights to begin with, and files that a run writes."""

    pretrained: Any = setting(
        None,
        "weights to begin with: the path of a Hugging Face checkpoint (safetensors), or a mapping with "
        "`path` and options of `load_pretrained` (`dtype`, `strict`, `keys`, ...). Each rank reads only "
        "what it holds. The model may be on the meta device.",
        guide="guides/pretrained.md",
    )
    checkpoint: str = setting(
        "full",
        "form of checkpoints: `full` (one file that plain PyTorch and Lightning read) or `sharded` (a "
        "folder to which every rank writes what it holds).",
        choices=("full", "sharded"),
        guide="guides/checkpoints.md",
    )
    async_save: bool = setting(
        False,
        "write checkpoints during training, from a copy in memory.",
        guide="guides/checkpoints.md",
    )


@dataclass(frozen=True)
class DiagnosticsSettings:
    """Diagnostics: checks of a run, records of its steps, limits of time."""

    parity_check: str | None = setting(
        "first_batch",
        "comparison with one process: `first_batch` (before the first step and before the third, a prefix "
        "of the batch goes through the user's step on one process and context parallel; a difference of "
        "losses, logits or gradients stops the run), `every_<n>` (again after every n optimizer steps), "
        "or `off` or `None`. With Fabric a check is made only when the loop calls `check_parity`.",
        guide="guides/doctor.md",
    )
    parity_tokens: int = setting(
        4096, "tokens of the parity check's prefix, all rows together.", guide="guides/doctor.md"
    )
    profile: int | Sequence[int] | None = setting(
        None,
        "a training step, or several, to record, counted from 1: when each rank computes, communicates and "
        "waits. `None` records nothing.",
        guide="guides/profiling.md",
    )
    profile_folder: str | None = setting(
        None,
        "folder for the records, with a folder such as `step-3` for each; `None`: `profile` in the "
        "Trainer's log folder, or with Fabric in the working directory.",
        guide="guides/profiling.md",
    )
    check_finite: bool = setting(
        True,
        "stop all ranks before any rank steps, if a loss or a gradient of one rank is NaN or inf. A "
        "`GradScaler`, which expects them, is left alone. `False`: step all the same.",
        guide="guides/restarts.md",
    )
    step_timeout: float | str | None = setting(
        "auto",
        "seconds within a step after which ranks that make no progress end, and name the rank that they "
        "wait for; `auto`: 120, and 360 on CUDA; `None`: ranks do not watch each other.",
        guide="concepts/faults.md",
    )
    first_step_timeout: float | None = setting(
        600.0,
        "the same for the first step, and for everything outside of steps; `None`: no limit there.",
        guide="concepts/faults.md",
    )

    @property
    def parity_steps(self) -> int | None:
        """Optimizer steps between repeated parity checks; ``None``: one check, or none."""
        return parity_steps_of(self.parity_check)

    @property
    def profiled_steps(self) -> tuple[int, ...]:
        """Training steps to record, in order; the first one is 1."""
        return profile_steps(self.profile)


GROUPS: dict[str, type[Any]] = {
    "mesh": MeshSettings,
    "attention": AttentionSettings,
    "batch": BatchSettings,
    "sharding": ShardingSettings,
    "memory": MemorySettings,
    "checkpoints": CheckpointSettings,
    "diagnostics": DiagnosticsSettings,
}
"""Groups of settings by the strategies' argument for each; ``checkpoint`` is the name of a setting."""


@dataclass(frozen=True)
class StrategyConfig(  # the order of its fields: a dataclass begins with those of its last base
    DiagnosticsSettings,
    CheckpointSettings,
    MemorySettings,
    ShardingSettings,
    BatchSettings,
    AttentionSettings,
    MeshSettings,
):
    """All settings of a strategy."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", MODE_ALIASES.get(self.mode, self.mode))
        dims: Any = self.sequence_dims
        if dims is None or isinstance(dims, Mapping):  # validation refuses anything else
            object.__setattr__(self, "sequence_dims", dict(cast(Mapping[str, Any], dims or {})))
        object.__setattr__(
            self, "activation_checkpointing", self.activation_checkpointing or "none"
        )
        if not self.parity_check:  # YAML reads a bare off as False
            object.__setattr__(self, "parity_check", "off")

    @classmethod
    def from_flat(cls, arguments: Mapping[str, Any]) -> StrategyConfig:
        """Make it from settings and groups of settings, by name; other names are ignored.

        Args:
            arguments: a group (``GROUPS``) is an object, a mapping or ``None``. A setting at its default,
                alone or in an object, counts as not set: Hydra and LightningCLI pass every argument.

        Raises:
            ConfigError: an unknown setting of a group, or a setting that is set twice.
        """
        names = [item.name for item in fields(cls)]
        flat = cls(**{name: arguments[name] for name in names if name in arguments})
        groups = {group: _settings_of(group, arguments.get(group)) for group in GROUPS}
        if not any(groups.values()):
            return flat
        alone = not_default(flat)
        for group, settings in groups.items():
            for name, value in settings.items():
                if name in alone:
                    raise ConfigError(
                        f"{name} is set twice: {name}={alone[name]!r}, and in {group}= {name}={value!r}. "
                        "Leave one of them out."
                    )
            flat = replace(flat, **settings)
        return flat

    def with_sequence_dims(self, dims: Mapping[str, int | None]) -> StrategyConfig:
        """Return a copy with more declared dimensions; the user's take precedence."""
        return replace(self, sequence_dims={**dims, **self.sequence_dims})

    @property
    def attention_exchange(self) -> Exchange:
        """The exchange of keys over the ring axis."""
        name = "all_gather" if self.mode == GATHERING_MODE else self.exchange
        executions = self.forward_execution, self.backward_execution
        return Exchange(name, *executions, self.kv_heads_per_gather, self.key_gradients)


def not_default(settings: Any) -> dict[str, Any]:
    """Return those settings of an object that are not at their defaults, by name."""
    default = type(settings)()
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _settings_of(group: str, given: Any) -> dict[str, Any]:
    """Return the settings of a group by name."""
    kind = GROUPS[group]
    if given is None:
        return {}
    if type(given) is kind:
        return not_default(given)
    names = _names_of(kind)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{group} must be a {kind.__name__} or a mapping of its settings, got {given!r}. Its settings "
            f"are {', '.join(names)}."
        )
    settings = dict(cast(Mapping[str, Any], given))
    for name in settings:
        if name not in names:
            homes = [other for other, kind in GROUPS.items() if name in _names_of(kind)]
            near = nearest_name(name, names)
            hint = f"It is a setting of {homes[0]}=. " if homes else ""
            hint = hint or (f"Did you mean {near}? " if near else "")
            raise ConfigError(
                f"{group}= has no setting {name!r}. {hint}Its settings are {', '.join(names)}."
            )
    return settings


def _names_of(group: type) -> list[str]:
    return [item.name for item in fields(group)]


def profile_steps(profile: Any) -> tuple[int, ...]:
    """Return the steps of the setting ``profile``, in order.

    Raises:
        ConfigError: not steps.
    """
    if profile is None:
        return ()
    given = [profile] if isinstance(profile, (int, str)) else profile
    steps = cast(Sequence[Any], given if isinstance(given, Sequence) else ())
    if (
        not steps
        or any(type(step) is not int or step < 1 for step in steps)
        or len(set(steps)) < len(steps)
    ):
        raise ConfigError(
            f"profile must be a training step, counted from 1, or a list of different ones, got {profile!r}. "
            "profile=3 records the third, when caches are warm; profile=[3, 100] two of them; None records "
            "nothing."
        )
    return tuple(sorted(steps))


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
        if not world_size % others:
            fix += f", or no size of context parallelism, so that {world_size // others} ranks share a sample"
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
