"""All that can be refused of settings before there are processes, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.arguments.choices import CHOICES, check_choice, check_size
from lightning_cp.strategies.arguments.contradictions import (
    check_exchange,
    check_mode,
    check_names,
    check_profile,
    check_tensor_parallel,
    check_timeouts,
)
from lightning_cp.strategies.arguments.length import check_length
from lightning_cp.strategies.arguments.parity import check_parity
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.arguments.sizes import explicit_size
from lightning_cp.strategies.engines.checks import check_engine
from lightning_cp.strategies.pretrained import check_pretrained

SIZES = (
    "ulysses_size",
    "ring_size",
    "num_heads",
    "kv_heads_per_gather",
    "data_parallel_size",
    "tensor_parallel_size",
    "data_parallel_replicate_size",
)
YES_OR_NO = ("padding", "check_finite", "async_save")
"""Settings by what they may be."""


def checked(arguments: Mapping[str, Any]) -> Settings:
    """Settings from a mapping that holds at least their names.

    Raises:
        ConfigError: a value that is not known, or settings that contradict each other.
    """
    settings = Settings.take(arguments)
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """Refuse settings that no run can have.

    Raises:
        ConfigError: a value that is not known, or settings that contradict each other.
    """
    for name in CHOICES:
        check_choice(name, getattr(settings, name))
    for name in SIZES:
        check_size(name, getattr(settings, name))
    if settings.context_parallel_size is None:
        raise ConfigError(
            "context_parallel_size is None. Leave it out, or pass 'auto' or a number of ranks."
        )
    if settings.context_parallel_size != "auto":
        check_size("context_parallel_size", settings.context_parallel_size, " or 'auto'")
    check_names(settings)
    for name in YES_OR_NO:
        if type(getattr(settings, name)) is not bool:
            raise ConfigError(
                f"{name} must be True or False, got {getattr(settings, name)!r}. "
                "Leave it out for the default."
            )
    check_mode(settings)
    check_exchange(settings)
    check_profile(settings)
    check_pretrained(settings)
    check_engine(settings)
    check_timeouts(settings)
    check_length(settings)
    check_parity(settings)
    explicit_size(settings)
    check_tensor_parallel(settings)
