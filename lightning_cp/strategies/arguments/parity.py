"""Settings of the parity check."""

from __future__ import annotations

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.arguments.settings import Settings


def check_parity(settings: Settings) -> None:
    """Refuse what is no number.

    Raises:
        ConfigError: naming the setting.
    """
    every = settings.parity_check
    known = every in ("off", "first_batch")
    if not known and settings.parity_steps is None:
        raise ConfigError(
            "parity_check must be 'first_batch', 'off', or 'every_<n>' for each n-th optimizer step, such as "
            f"'every_100', got {every!r}."
        )
    tokens = settings.parity_tokens
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(
            "parity_tokens must be a number of tokens that one device can train on, at least 1, got "
            f"{tokens!r}."
        )
