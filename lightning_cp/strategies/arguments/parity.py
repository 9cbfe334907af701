"""Settings of the parity check."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_cp import console
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.arguments.settings import Settings, parity_steps_of


def check_parity(settings: Settings) -> None:
    """Refuse what is no number.

    Raises:
        ConfigError: naming the setting.
    """
    require_known(settings.parity_check)
    tokens = settings.parity_tokens
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(
            "parity_tokens must be a number of tokens that one device can train on, at least 1, got "
            f"{tokens!r}. "
            "Leave it out for 4096."
        )


def require_known(every: Any) -> None:
    """Refuse what says no time for a check.

    Raises:
        ConfigError: saying what does.
    """
    if every in ("off", "first_batch") or parity_steps_of(every) is not None:
        return
    raise ConfigError(
        "parity_check must be 'first_batch', 'off', or 'every_<n>' for each n-th optimizer step, such as "
        f"'every_100', got {every!r}. "
        "Leave it out for 'first_batch'."
    )


def check_asked(settings: Settings, *, given: bool) -> None:
    """Of Fabric, where nothing is checked unless the loop asks: refuse what promises more, or say so.

    ``first_batch`` is not refused even if it was given: what builds strategies from files gives every
    argument its default.

    Args:
        settings: of the strategy.
        given: ``parity_check`` was among the arguments.

    Raises:
        ConfigError: checks that should come again in every so many steps.
    """
    every = settings.parity_check
    if settings.parity_steps is not None:
        raise ConfigError(
            f"parity_check={every!r} is the Trainer's, which makes the check by itself. With Fabric the loop "
            f"asks for it, as often as it likes: {_ASK}."
        )
    if given and every != "off":
        rank_zero_only(console.warn)(
            f"parity_check={every!r} checks nothing by itself with Fabric: call {_ASK}. "
            "parity_check='off' says nothing."
        )


_ASK = "fabric.strategy.check_parity(batch, step=lambda batch: model(**batch).loss)"
