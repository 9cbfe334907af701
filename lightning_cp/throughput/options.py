"""The settings of a throughput count, and the peak that MFU is a share of."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.engines.checks import precision_of
from lightning_cp.throughput.ranks import core_of


@dataclass(frozen=True)
class Options:
    """Options of a user; see ``ThroughputCallback``."""

    every_n_steps: int = 50
    warmup_steps: int = 1
    peak_flops: float | None = None
    active_parameters: int | None = None
    sequence_dims: Mapping[str, int | None] | None = None

    def __post_init__(self) -> None:
        _require_count("every_n_steps", self.every_n_steps, 1, "50 logs every 50 optimizer steps")
        _require_count("warmup_steps", self.warmup_steps, 0, "1 leaves out the first, 0 none")
        if self.active_parameters is not None:
            what = "None counts the model's own; a dense model of 7e9 would say 7_000_000_000"
            _require_count("active_parameters", self.active_parameters, 1, what)
        peak: Any = self.peak_flops
        is_number = isinstance(peak, Real) and not isinstance(peak, bool)
        if peak is not None and not (is_number and 0 < float(peak) < math.inf):
            raise ConfigError(
                f"peak_flops must be the FLOP/s of one device, a positive number, got {peak!r}. 989e12 is an "
                "H100 SXM in bfloat16; None looks the device up."
            )
        dims: Any = self.sequence_dims
        if dims is not None and not isinstance(dims, Mapping):
            raise ConfigError(
                f"sequence_dims must map names of a batch's tensors to sequence dimensions, got {dims!r}. "
                "{'tokens': 1, 'weights': None} would do; None where the strategy knows them."
            )

    def with_dims(self, declared: Mapping[str, int | None]) -> Options:
        """With what a module declares of its batches; what is asked for goes first."""
        return replace(self, sequence_dims={**declared, **(self.sequence_dims or {})})


def _require_count(name: str, value: object, least: int, works: str) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}, got {value!r}. {works}."
        )


@dataclass(frozen=True)
class Peak:
    """The FLOP/s of one device."""

    flops: float | None
    where: str
    """What it is of, or what it is not known of."""


def peak_of(
    options: Options, device: torch.device, precision: object, strategy: Any, model: nn.Module
) -> Peak:
    """The FLOP/s that MFU is a share of: as the user says, or Lightning's table of devices.

    Args:
        options: may say.
        device: of this rank.
        precision: the plugin of a Trainer or a Fabric.
        strategy: has the dtype of layers that an engine casts.
        model: has the dtype of its own weights.
    """
    if options.peak_flops is not None:
        return Peak(float(options.peak_flops), "peak_flops=")
    if device.type != "cuda":
        return Peak(None, device.type)
    dtype = dtype_of(precision, strategy, model)
    name = torch.cuda.get_device_name(device)
    with warnings.catch_warnings():  # it is said here, once
        warnings.simplefilter("ignore")
        try:
            found = get_available_flops(device, dtype)
        except Exception:  # a name that it cannot take apart
            found = None
    return Peak(found, f"{name} in {str(dtype).removeprefix('torch.')}")


def dtype_of(precision: Any, strategy: Any, model: nn.Module) -> torch.dtype:
    """The dtype that matrix products are computed in."""
    core = core_of(strategy)
    cast = None if core is None else precision_of(core.settings.mixed_precision).param_dtype
    if cast is not None:
        return cast
    asked = _plugin_to_compute_dtype(precision)
    if asked is not torch.float32:
        return asked
    matrix = next((p for p in model.parameters() if p.dim() > 1 and p.is_floating_point()), None)
    return asked if matrix is None else matrix.dtype
