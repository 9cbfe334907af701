"""DistributedDataParallel's own options among a strategy's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.arguments.choices import refuse_unknown
from lightning_cp.strategies.arguments.settings import Settings


def without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say something: LightningCLI passes every argument that it finds, at its default."""
    parameters = inspect.signature(DistributedDataParallel).parameters
    return {
        name: value
        for name, value in options.items()
        if name not in parameters or value is not parameters[name].default
    }


def require_known(options: Mapping[str, Any]) -> None:
    """Refuse what is left of the strategy's arguments unless DistributedDataParallel takes it.

    Raises:
        ConfigError: naming what it does not take, before any process starts.
    """
    known = _arguments(DistributedDataParallel) - {"module", "device_ids", "process_group"}
    refuse_unknown(
        sorted(set(options) - known),
        [item.name for item in fields(Settings)],
        sorted(known | _arguments(DDPStrategy)),
    )


def _arguments(made: type) -> set[str]:
    return set(inspect.signature(made).parameters) - {"kwargs"}


def require_ddp(data_parallel: str, options: Mapping[str, Any], hook: Mapping[str, Any]) -> None:
    """Refuse DistributedDataParallel's own options with another engine.

    Args:
        data_parallel: the engine.
        options: what was passed for DistributedDataParallel.
        hook: what was passed for its communication hook.

    Raises:
        ConfigError: naming them.
    """
    given = [*options, *(name for name, value in hook.items() if value is not None)]
    if data_parallel == "ddp" or not given:
        return
    why = {
        "find_unused_parameters": "it needs none: parameters without a gradient are found at every step",
        "static_graph": "it follows the graph of every step",
    }
    said = f" With {data_parallel!r} {why[given[0]]}." if given[0] in why else ""
    raise ConfigError(
        f"{', '.join(given)}: an option of data_parallel='ddp', got data_parallel={data_parallel!r}.{said} "
        f"Leave it out, or use data_parallel='ddp'."
    )
