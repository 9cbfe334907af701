"""The values that settings may have: those that work now, and those that are named but not built yet.

The public names are fixed before everything behind them exists, so that configs and scripts need not be
rewritten later. A value from ``later`` is refused with what gives the same result today.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from lightning_cp.attention.exchange import EXCHANGES
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.api import ALIASES, kernels
from lightning_cp.layout.gathered import EXECUTIONS
from lightning_cp.layout.sequence import LAYOUT_KINDS


@dataclass(frozen=True)
class Choice:
    """Values of one setting."""

    now: tuple[str, ...]
    later: tuple[str, ...] = ()
    instead: str = ""
    """What works now in place of the later ones."""


CHOICES: dict[str, Choice] = {
    "mode": Choice(("auto", "ulysses", "ring", "hybrid", "zigzag_llama3")),
    "exchange": Choice(EXCHANGES),
    "forward_execution": Choice(EXECUTIONS),
    "backward_execution": Choice(EXECUTIONS),
    "data_parallel": Choice(
        ("ddp", "fsdp", "hsdp", "zero1"),
        instead="zero1 for what DeepSpeed calls stage 1, fsdp for its stages 2 and 3",
    ),
    "activation_checkpointing": Choice(("none", "blocks", "keep_attention")),
    "layout": Choice(("auto", *LAYOUT_KINDS)),
    "kernel": Choice(("auto", *ALIASES, *kernels())),
    "token_weighting": Choice(("micro_batch", "global")),
    "loss_reduction": Choice(
        ("mean",), instead="a loss that is the mean over its targets; others are not available yet"
    ),
    "labels": Choice(("auto", "aligned", "shift")),
    "batch_sync": Choice(("check", "broadcast")),
    "checkpoint": Choice(("full", "sharded")),
}


def check_choice(name: str, value: object) -> None:
    """Check one setting against the table.

    Raises:
        ConfigError: a value that is not known, or not available yet.
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
        value: what was given.
        otherwise: what else it may be, for the message.

    Raises:
        ConfigError: it is not.
    """
    if value is not None and (type(value) is not int or value < 1):
        none = ", or None for all heads at once" if name == "kv_heads_per_gather" else ""
        raise ConfigError(
            f"{name} must be an integer of at least 1{otherwise}{none}, got {value!r}. "
            "Leave it out for the default."
        )


def refuse_unknown(unknown: Sequence[str], settings: Sequence[str], others: Sequence[str]) -> None:
    """Refuse arguments that nothing takes, naming the nearest that something does.

    Args:
        unknown: the names that were given.
        settings: the strategy's own.
        others: options that are passed on.

    Raises:
        ConfigError: there are any.
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
    """Refuse what names no modules.

    Args:
        name: of the setting.
        given: class names or patterns of module names, one or several.
        example: of both.
        found: what ``None`` finds.

    Raises:
        ConfigError: it is something else.
    """
    names = [given] if isinstance(given, str) else given
    if isinstance(names, (list, tuple)) and names and all(isinstance(x, str) and x for x in names):
        return
    raise ConfigError(
        f"{name} must be class names or patterns of module names, such as {example}, or None to find "
        f"{found}, got {given!r}. "
        "Put names into a list."
    )
