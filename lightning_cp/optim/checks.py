"""Checks of settings: each is what it has to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning_cp.errors import ConfigError


def require_number(values: Mapping[str, Any], fits: Callable[[float], bool], wanted: str) -> None:
    """Refuse settings that are no finite numbers, or do not fit.

    Args:
        values: by name.
        fits: of each number.
        wanted: says what fits: ``above 0``.

    Raises:
        ConfigError: naming the first one that does not.
    """
    for name, x in values.items():
        if not is_number(x) or not fits(x):
            raise ConfigError(
                f"{name} is a number {wanted}, got {x!r}. Leave it out for the default."
            )


def require_known(name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse a setting that is none of the known ones.

    Raises:
        ConfigError: naming them.
    """
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown. Known: {', '.join(known)}.")


def is_number(x: object) -> bool:
    """True if it is one, finite, and no bool."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
