"""Checks of settings that need neither ranks nor a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_cp import error_display
from lightning_cp.checkpoint.pretrained.strategy_argument import check_pretrained
from lightning_cp.config import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_TILE_TOKENS,
    GATHERING_MODE,
    GROUPS,
    STEP_SECONDS,
    AttentionSettings,
    BatchSettings,
    DiagnosticsSettings,
    MemorySettings,
    MeshSettings,
    StrategyConfig,
    explicit_cp_size,
    parity_steps_of,
)
from lightning_cp.engines.checks import check_engine, check_module_names
from lightning_cp.errors import ConfigError, advise_choice

TENSOR_PARALLEL_ENGINES = ("fsdp", "hsdp")


def check_mode(settings: MeshSettings) -> None:
    """Check that the mode has the axes of the sizes.

    Raises:
        ConfigError: naming the mode and the size.
    """
    other = {"ulysses": "ring_size", "ring": "ulysses_size"}.get(settings.mode)
    if other is not None and getattr(settings, other) not in (None, 1):
        raise ConfigError(
            f"mode={settings.mode!r} has {other}=1, got {other}={getattr(settings, other)}. Use "
            "mode='hybrid' or 'auto' for both axes."
        )
    if settings.mode == GATHERING_MODE and settings.ring_size == 1:
        raise ConfigError(
            f"mode={GATHERING_MODE!r} gathers keys over the ring axis, got ring_size=1. Leave ring_size "
            "out, or use mode='ulysses'."
        )
    if settings.mode == "hybrid" and 1 in (settings.ulysses_size, settings.ring_size):
        raise ConfigError(
            f"mode='hybrid' needs both axes larger than 1, got ulysses_size={settings.ulysses_size}, "
            f"ring_size={settings.ring_size}. Use mode='ulysses' or 'ring'."
        )


def check_names(settings: BatchSettings) -> None:
    """Check the names and dimensions of a batch's tensors.

    Raises:
        ConfigError: naming the setting.
    """
    key = settings.label_key
    if not isinstance(key, str) or not key:
        raise ConfigError(
            "label_key must be the dotted name of the labels in a batch ('labels'; '1' of a tuple), got "
            f"{key!r}. "
            "Leave it out if the batch has labels."
        )
    dims = settings.sequence_dims
    if not isinstance(dims, Mapping):
        raise ConfigError(
            f"sequence_dims must map names to dimensions, got {dims!r}. "
            "Write sequence_dims={'images': None, 'features': 1}."
        )
    for name, dim in dims.items():
        if not isinstance(name, str) or not (dim is None or type(dim) is int):
            raise ConfigError(
                "sequence_dims must map the dotted name of a batch tensor to its sequence dimension, an "
                f"integer, or to None to replicate it; got {name!r}: {dim!r}. "
                "Write sequence_dims={'images': None, 'features': 1}."
            )


def check_exchange(settings: StrategyConfig) -> None:
    """Check that the mode has the exchange, and the exchange the other settings.

    Raises:
        ConfigError: naming the settings that contradict each other.
    """
    if settings.mode == GATHERING_MODE and settings.exchange not in ("ring", "all_gather"):
        raise ConfigError(
            f"mode={GATHERING_MODE!r} is a ring axis with exchange='all_gather', got "
            f"exchange={settings.exchange!r}. Leave one of them out."
        )
    _ = settings.attention_exchange  # raises for settings that it has no use for


def check_profile(settings: StrategyConfig) -> None:
    """Check that steps can be recorded.

    Raises:
        ConfigError: no steps, a folder without steps, or an exchange that is not recorded.
    """
    steps, folder = settings.profiled_steps, settings.profile_folder
    if folder is not None and (not isinstance(folder, (str, PathLike)) or not str(folder)):
        raise ConfigError(
            f"profile_folder must be a path, or None, got {folder!r}. "
            "Leave it out to write beside the logs."
        )
    if folder is not None and not steps:
        raise ConfigError(
            f"profile_folder={str(folder)!r} says where recorded steps are written, but none is recorded. "
            "Say which, profile=3, or leave the folder out."
        )
    blocked = None if folder is None else _blocking_path(Path(folder))
    if blocked is not None:
        raise ConfigError(
            f"profile_folder={str(folder)!r} cannot be made: {str(blocked)!r} is not a folder. Name "
            "another one, or leave it out."
        )
    if steps and settings.exchange == "ring_flash_attn":
        raise ConfigError(
            "profile= shows the hops of our exchanges, and exchange='ring_flash_attn' leaves them to a "
            "package that names none. Use exchange='ring', or torch.profiler without profile=."
        )


def _blocking_path(folder: Path) -> Path | None:
    """Return the part of a path that exists and is not a folder, or ``None``."""
    parts = (folder.absolute(), *folder.absolute().parents)
    there = next(part for part in parts if os.path.exists(part))  # noqa: PTH110  # never raises
    return None if there.is_dir() else there


def check_tensor_parallel(settings: StrategyConfig) -> None:
    """Check that tensor parallelism works with the other settings.

    Raises:
        ConfigError: an engine that cannot wrap sharded layers, or a plan that nothing uses.
    """
    size, engine = settings.tensor_parallel_size, settings.data_parallel
    plan = settings.tensor_parallel_plan
    if plan is not None and not (isinstance(plan, Mapping) or callable(plan)):
        raise ConfigError(
            "tensor_parallel_plan must be None (automatic), a mapping from module names ('layers.*.q_proj') "
            f"to parallel styles, or a function of (model, device_mesh), got {plan!r}. "
            "Leave it out for the automatic plan."
        )
    names_only = not isinstance(plan, Mapping) or all(isinstance(name, str) for name in plan)
    if not names_only or (isinstance(plan, Mapping) and not plan):
        raise ConfigError(
            f"tensor_parallel_plan must map names of modules to styles, at least one, got {plan!r}. None "
            "finds those of llama-like models."
        )
    if isinstance(plan, Mapping):
        _check_styles(cast(Mapping[str, Any], plan))
    if plan is not None and size == 1:
        raise ConfigError(
            "tensor_parallel_plan says how layers are shared, but tensor_parallel_size=1 shares none. Give a "
            "size, or leave the plan out."
        )
    if size > 1 and engine not in TENSOR_PARALLEL_ENGINES:
        why = {
            "ddp": "DistributedDataParallel cannot wrap layers that are sharded (DTensors)",
            "zero1": "it keeps whole layers on every rank",
        }
        raise ConfigError(
            f"tensor_parallel_size={size} does not go with data_parallel={engine!r}: "
            f"{why.get(engine, 'it does not know of sharded layers')}. Use "
            f"data_parallel={' or '.join(map(repr, TENSOR_PARALLEL_ENGINES))}."
        )


def _check_styles(plan: Mapping[str, Any]) -> None:
    # imported for a plan only: it loads PyTorch's tensor parallelism
    from lightning_cp.engines.tensor_parallel.user_plan import check_style

    for pattern, style in plan.items():
        check_style(pattern, style)


def check_group_timeout(limit: object) -> None:
    """Check that the limit of PyTorch's collectives is a ``timedelta``.

    Raises:
        ConfigError: naming the option.
    """
    if limit is not None and not isinstance(limit, timedelta):
        raise ConfigError(
            f"timeout must be a datetime.timedelta, such as timedelta(minutes=30), got {limit!r}. It is that "
            "of PyTorch's collectives; step_timeout is in seconds."
        )


def check_backend(backend: str | None) -> None:
    """Check that PyTorch knows a backend when the processes connect: a program may register one.

    Raises:
        ConfigError: naming the option.
    """
    known = dist.Backend.backend_list
    parts = str(backend).split(",") if backend is not None else []
    if any(part.split(":")[-1].lower() not in known for part in parts):
        raise ConfigError(
            f"process_group_backend must be one of {', '.join(known)}, or one for each kind of device "
            f"('cpu:gloo,cuda:nccl'), got {backend!r}. Leave it out to have it chosen by the device, or "
            "register it with torch.distributed.Backend.register_backend before the run."
        )


def check_timeouts(settings: DiagnosticsSettings) -> None:
    """Check that limits are seconds, and that the first step may take as long as others.

    Raises:
        ConfigError: naming the setting.
    """
    for name in ("step_timeout", "first_step_timeout"):
        value: object = getattr(settings, name)
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
        others = (None, "auto") if name == "step_timeout" else (None,)
        if not 0 < number < float("inf") and value not in others:
            what = "the ranks do not watch each other" if name == "step_timeout" else "no limit"
            raise ConfigError(
                f"{name} must be a number of seconds above 0, or None ({what}), got {value!r}. "
                "Leave it out for the default."
            )
    usual, first = settings.step_timeout, settings.first_step_timeout
    if isinstance(usual, str):
        usual = STEP_SECONDS["cpu"]
    if usual is not None and first is not None and first < usual:
        raise ConfigError(
            f"first_step_timeout={first} is shorter than step_timeout={usual}, but the first step also makes "
            "and compiles what the others use. Make it at least as long."
        )


def check_memory(settings: StrategyConfig) -> None:
    """Check settings that save memory of long sequences: numbers of tokens, and settings without a use.

    Raises:
        ConfigError: naming the setting.
    """
    _check_tokens("chunked_loss", settings.chunked_loss, "logits exist", DEFAULT_CHUNK_TOKENS)
    _check_tokens("tiled_mlp", settings.tiled_mlp, "an MLP is computed", DEFAULT_TILE_TOKENS)
    size = settings.tensor_parallel_size
    if settings.chunked_loss and size > 1:
        raise ConfigError(
            f"chunked_loss={settings.chunked_loss} does not go with tensor_parallel_size={size}: there each "
            "rank has its own part of the vocabulary, and makes that part of the logits. Use one of the two."
        )
    if settings.tiled_mlp and size > 1:
        raise ConfigError(
            f"tiled_mlp={settings.tiled_mlp} does not go with tensor_parallel_size={size}: there ranks share "
            "each MLP, and would communicate for every tile. Use one of the two."
        )
    if settings.mlp_modules is not None:
        _check_mlp_modules(settings)
    if settings.activation_offload and settings.activation_checkpointing == "none":
        raise ConfigError(
            "activation_offload=True moves what activation checkpointing keeps to host memory, got "
            "activation_checkpointing='none', which keeps everything. Use 'blocks' or 'keep_attention'."
        )


def _check_tokens(name: str, given: object, what: str, default: int) -> None:
    if type(given) is bool or (type(given) is int and given >= 1):
        return
    raise ConfigError(
        f"{name} must be a number of tokens of which {what} at once, an integer of at least 1, "
        f"True ({default}) or False, got {given!r}. "
        "Leave it out for False."
    )


def _check_mlp_modules(settings: MemorySettings) -> None:
    given = settings.mlp_modules
    check_module_names(
        "mlp_modules", given, "'LlamaMLP' or 'model.layers.*.mlp'", "the MLPs of blocks"
    )
    if not settings.tiled_mlp:
        raise ConfigError(
            f"mlp_modules={given!r} says which modules tiled_mlp= is of, got tiled_mlp=False. Use "
            "tiled_mlp=True, or leave mlp_modules out."
        )


def check_parity(settings: DiagnosticsSettings) -> None:
    """Check the settings of the parity check.

    Raises:
        ConfigError: naming the setting.
    """
    check_parity_schedule(settings.parity_check)
    tokens = settings.parity_tokens
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(
            "parity_tokens must be a number of tokens that one device can train on, at least 1, got "
            f"{tokens!r}. Leave it out for {DiagnosticsSettings.parity_tokens}."
        )


def check_parity_schedule(every: Any) -> None:
    """Check that ``parity_check`` says when to check.

    Raises:
        ConfigError: naming the values that do.
    """
    if every in ("off", "first_batch") or parity_steps_of(every) is not None:
        return
    raise ConfigError(
        "parity_check must be 'first_batch', 'off', or 'every_<n>' (again after every n optimizer steps), "
        f"such as 'every_100', got {every!r}. Leave it out for {DiagnosticsSettings.parity_check!r}."
    )


def check_fabric_parity(settings: DiagnosticsSettings, arguments: Mapping[str, Any]) -> None:
    """Check that Fabric's strategy can do what ``parity_check`` says: only its loop starts a check.

    A given ``first_batch`` is not refused: programs that build strategies from files pass every default.

    Args:
        settings: of the strategy.
        arguments: of the strategy, by name.

    Raises:
        ConfigError: checks in every n-th step.
    """
    every = settings.parity_check
    if settings.parity_steps is not None:
        raise ConfigError(
            f"parity_check={every!r} is the Trainer's, which makes the check by itself. With Fabric the loop "
            f"asks for it, as often as it likes: {_ASK}."
        )
    if "parity_check" in given_settings(arguments) and every != "off":
        rank_zero_only(error_display.warn)(
            f"parity_check={every!r} checks nothing by itself with Fabric: call {_ASK}. "
            "parity_check='off' says nothing."
        )


def given_settings(arguments: Mapping[str, Any]) -> set[str]:
    """Return the names among a strategy's arguments, and those in mappings of groups."""
    groups = [arguments.get(group) for group in GROUPS]
    return {*arguments}.union(*(group for group in groups if isinstance(group, Mapping)))


_ASK = "fabric.strategy.check_parity(batch, step=lambda batch: model(**batch).loss)"


def check_choices(settings: StrategyConfig) -> None:
    """Check the settings whose allowed values are listed.

    Raises:
        ConfigError: an unknown value.
    """
    for item in fields(settings):
        value, choices = getattr(settings, item.name), item.metadata["choices"]
        if choices and value not in choices:
            instead = item.metadata["instead"]
            works = f"What works now: {instead}." if instead else advise_choice(value, choices)
            raise ConfigError(
                f"{item.name} must be one of {', '.join(choices)}, got {value!r}. {works}"
            )


def check_sizes(settings: StrategyConfig) -> None:
    """Check sizes: every number among the settings of the mesh and of attention.

    Raises:
        ConfigError: anything but a positive integer, or ``None`` where the size is optional.
    """
    for item in (*fields(MeshSettings), *fields(AttentionSettings)):
        value = getattr(settings, item.name)
        if item.type in ("int", "int | None") and not _is_size(value, item.type):
            none = ", or None for all heads at once" if item.name == "kv_heads_per_gather" else ""
            raise ConfigError(
                f"{item.name} must be an integer of at least 1{none}, got {value!r}. Leave it out for the "
                "default."
            )
    size = settings.context_parallel_size
    if size is None:
        raise ConfigError(
            "context_parallel_size is None. Leave it out, or pass 'auto' or a number of ranks."
        )
    if size != "auto" and not _is_size(size):
        raise ConfigError(
            f"context_parallel_size must be an integer of at least 1 or 'auto', got {size!r}. Leave it out "
            "for the default."
        )


def _is_size(value: object, kind: str = "int") -> bool:
    if value is None:
        return kind == "int | None"
    return type(value) is int and value >= 1


def check_switches(settings: StrategyConfig) -> None:
    """Check settings that are True or False.

    Raises:
        ConfigError: any other value.
    """
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.type == "bool" and type(value) is not bool:
            raise ConfigError(
                f"{item.name} must be True or False, got {value!r}. Leave it out for {item.default}."
            )


def make_config(arguments: Mapping[str, Any]) -> StrategyConfig:
    """Make settings from a strategy's arguments, and check them.

    Raises:
        ConfigError: a value that is not known, or settings that contradict each other.
    """
    settings = StrategyConfig.from_flat(arguments)
    check(settings)
    return settings


def check(settings: StrategyConfig) -> None:
    """Check settings, before there are processes.

    Raises:
        ConfigError: a value that is not known, or settings that contradict each other.
    """
    check_choices(settings)
    check_sizes(settings)
    check_switches(settings)
    check_names(settings)
    check_mode(settings)
    check_exchange(settings)
    check_profile(settings)
    check_pretrained(settings)
    check_engine(settings)
    check_timeouts(settings)
    check_memory(settings)
    check_parity(settings)
    explicit_cp_size(settings)
    check_tensor_parallel(settings)
