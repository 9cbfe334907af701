"""Checks of an engine's settings: contradictions, and settings that an engine does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_cp.config import ShardingSettings, StrategyConfig
from lightning_cp.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

SHARDING = ("fsdp", "hsdp", "zero1")
"""Engines that shard parameters or optimizer state over ranks."""
PER_PARAMETER = "per_parameter"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def check_engine(settings: StrategyConfig) -> None:
    """Check that the selected engine has these settings.

    Raises:
        ConfigError: naming what works.
    """
    _check_replicas(settings)
    _check_bucket(settings)
    _check_wrapping(settings)
    mixed_precision_policy(settings.mixed_precision)
    if settings.data_parallel in SHARDING:
        return
    for name in ("wrap_modules", "mixed_precision", "cpu_offload"):
        value = getattr(settings, name)
        if value != getattr(ShardingSettings, name):
            raise ConfigError(
                f"{name}={value!r} is for engines that shard parameters, got data_parallel='ddp', which "
                f"keeps the whole model on every rank. Use data_parallel='fsdp', 'hsdp' or 'zero1', or leave "
                f"{name} out{_INSTEAD.get(name, '')}."
            )


_INSTEAD = {"mixed_precision": " and pass precision='bf16-mixed' to the Trainer or Fabric"}


def mixed_precision_policy(value: Any) -> MixedPrecisionPolicy:
    """The policy for ``mixed_precision=``: compute in the given dtype, reduce gradients in float32.

    Raises:
        ConfigError: neither a policy nor the name of a dtype.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(value, MixedPrecisionPolicy):
        return value
    if value is None:
        return MixedPrecisionPolicy()
    dtype = DTYPES.get(str(value).removeprefix("torch."))
    if dtype is None:
        raise ConfigError(
            f"mixed_precision must be one of {', '.join(DTYPES)}, a "
            f"torch.distributed.fsdp.MixedPrecisionPolicy, or None, got {value!r}. "
            "Leave it out to use parameters in their own dtype."
        )
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def _check_replicas(settings: StrategyConfig) -> None:
    engine, replicas = settings.data_parallel, settings.data_parallel_replicate_size
    total = settings.data_parallel_size
    if engine != "hsdp":
        if replicas != 1:
            raise ConfigError(
                f"data_parallel_replicate_size={replicas} says how many copies of the model there are, which "
                f"data_parallel={engine!r} does not choose. Use data_parallel='hsdp', or leave it out: "
                "data_parallel_size is the number of groups of ranks with different samples."
            )
        return
    if replicas == 1:
        raise ConfigError(
            "data_parallel='hsdp' shards within groups of ranks and keeps a copy in each: say how many with "
            f"data_parallel_replicate_size= (of at least 2, dividing data_parallel_size={total}). One copy "
            "in all is data_parallel='fsdp'."
        )
    if total % replicas:
        works = [n for n in range(2, total + 1) if total % n == 0]
        fix = f"data_parallel_replicate_size can be {', '.join(map(str, works))}" if works else ""
        fix = fix or f"use data_parallel_size={replicas}, or a multiple of it"
        raise ConfigError(
            f"data_parallel_replicate_size={replicas} does not divide data_parallel_size={total}: replicas "
            f"are groups of data-parallel ranks. What would work: {fix}."
        )


def _check_bucket(settings: StrategyConfig) -> None:
    cap = settings.bucket_cap_mb
    if cap is None:
        return
    if settings.data_parallel != "ddp":
        raise ConfigError(
            f"bucket_cap_mb={cap!r} is the size of DistributedDataParallel's buckets, but "
            f"data_parallel={settings.data_parallel!r} reduces the gradients of one wrapped module at a time."
            " Leave it out, or use wrap_modules= to wrap other modules."
        )
    if isinstance(cap, (int, float)) and not isinstance(cap, bool) and cap > 0:
        return
    if cap != PER_PARAMETER:
        raise ConfigError(
            f"bucket_cap_mb must be a number of MiB larger than 0, {PER_PARAMETER!r} (a bucket for each "
            f"parameter), or None for PyTorch's 25, got {cap!r}. "
            "Leave it out for the default."
        )


def _check_wrapping(settings: StrategyConfig) -> None:
    if settings.wrap_modules is not None:
        example = "'LlamaDecoderLayer' or 'model.layers.*'"
        check_module_names("wrap_modules", settings.wrap_modules, example, "the blocks")


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
    listed: Any = [given] if isinstance(given, str) else given
    names = cast(Sequence[object], listed if isinstance(listed, (list, tuple)) else ())
    if names and all(isinstance(x, str) and x for x in names):
        return
    raise ConfigError(
        f"{name} must be class names or patterns of module names, such as {example}, or None to find "
        f"{found}, got {given!r}. "
        "Put names into a list."
    )
