"""Checks that ranks have the same settings and version of the code, before they wait for each other."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, cast

import lightning
import torch
import torch.distributed as dist
from torch.optim import Optimizer

import lightning_cp
from lightning_cp.comm.consensus import World, gather_objects
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.watchdog.watch import SWITCH

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
LONGEST = 200
"""Limit of characters of a value in a message."""
_OWN = ("profile_folder",)
"""Settings that may differ between ranks."""
_TRAINER = (
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "val_check_interval"),
    "check_val_every_n_epoch",
)


def check_same_start(
    settings: StrategyConfig, trainer: Any = None, more: Mapping[str, object] | None = None
) -> None:
    """Check that ranks were started with the same values. Collective.

    Args:
        settings: the strategy's.
        trainer: its settings are compared as well.
        more: other values that must be equal, by the names that users know.

    Raises:
        ConfigError: on every rank, naming the first difference, and the ranks.
    """
    for found in differences(World().gather(facts(settings, trainer, more or {}))):
        raise ConfigError(_differs(found))


def differences(every: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """The values that differ between ranks, as ``layout (rank 0: 'auto'; rank 1: 'zigzag')``."""
    for name in dict.fromkeys(name for found in every for name in found):
        values = [found.get(name, "missing") for found in every]
        if len(set(values)) > 1:
            yield f"{name} ({values_by_rank(values)})"


def values_by_rank(values: Sequence[str]) -> str:
    """Each value with the ranks that have it."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:8]))}"
        f"{', ...' if len(ranks) > 8 else ''}: {value}"
        for value, ranks in by_value.items()
    )


def facts(
    settings: StrategyConfig, trainer: Any = None, more: Mapping[str, object] = MappingProxyType({})
) -> dict[str, str]:
    """The values that must be equal, the most informative first."""
    versions = {
        "lightning_cp version": lightning_cp.__version__,
        "torch version": torch.__version__,
        "lightning version": lightning.__version__,
        "Python version": platform.python_version(),
        "lightning_cp source": _source(),
        SWITCH: value_text("off" if os.environ.get(SWITCH) == "0" else "on"),
    }
    names = [item.name for item in fields(settings) if item.name not in _OWN]
    chosen = {name: value_text(getattr(settings, name)) for name in names}
    of_trainer = _TRAINER if trainer is not None else ()
    told = {f"Trainer({name}=)": value_text(getattr(trainer, name, None)) for name in of_trainer}
    stage = {"Trainer.fit, validate, ...": str(trainer.state.fn)} if trainer is not None else {}
    besides = {name: value_text(value) for name, value in more.items()}
    return {**stage, **versions, **chosen, **besides, **told}


def value_text(value: object) -> str:
    """Text of a value, equal exactly on ranks with the same value, shortened if it is long."""
    text = _text(value)
    if len(text) <= LONGEST:
        return text
    hashed = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()
    return f"{text[:LONGEST]}... (hash {hashed})"


def _text(value: object) -> str:
    """The ``repr`` without addresses of objects and the order of sets, which differ between processes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)}: {_text(x)}" for k, x in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if type(value) in (list, tuple):
        return "(" + ", ".join(map(_text, cast(Sequence[object], value))) + ")"
    if isinstance(value, partial):
        return f"partial({_text((value.func, value.args, value.keywords))})"
    name = getattr(value, "__qualname__", None)
    if callable(value) and name is not None:
        return f"{getattr(value, '__module__', '')}.{name}"
    return _ADDRESS.sub("", repr(value))


@cache
def _source() -> str:
    """A checksum of this package's code: an editable installation keeps its version."""
    root = Path(lightning_cp.__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _differs(found: str) -> str:
    return (
        f"ranks were started with different values of {found}. All ranks of a run must have the "
        "same settings and the same code: start them all with one command, from one environment."
    )


# Settings of an optimizer's next step, which must be the same on all ranks that train one model.
#
# Different learning rates would train shards that do not fit together, or copies that drift apart, without an
# error. A scheduler that depends on a value of its rank causes that.


def numbers_of(optimizer: Optimizer) -> bytes:
    """The numbers of an optimizer's groups for the vote of each step; 1 and 1.0 are equal."""
    return array("d", [x for _, _, numbers in _settings(optimizer) for x in numbers]).tobytes()


def settings_of(optimizer: Optimizer) -> list[tuple[str, str]]:
    """The same numbers with names, for messages."""
    return [
        (f"{key} of group {at}", ", ".join(repr(float(x)) for x in numbers))
        for at, key, numbers in _settings(optimizer)
    ]


def _settings(optimizer: Optimizer) -> list[tuple[int, str, tuple[float, ...]]]:
    """Numbers by group and key; tensors on a device are skipped, since reading them would wait for it."""
    found: list[tuple[int, str, tuple[float, ...]]] = []
    for at, group in enumerate(optimizer.param_groups):
        for key, x in group.items():
            if type(x) in _USUAL:  # a lookup is quick: recipes have hundreds of groups
                found.append((at, key, (x,)))
            elif key != "params" and x is not None:
                every = x if isinstance(x, (tuple, list)) else (x,)
                if {*map(type, every)} <= _USUAL or all(map(_is_number, every)):
                    found.append((at, key, tuple(map(float, every))))
    return found


_USUAL = {float, int, bool}


def _is_number(x: Any) -> bool:
    if type(x) in _USUAL:
        return True
    if isinstance(x, torch.Tensor):
        return x.device.type == "cpu" and x.numel() == 1
    return isinstance(x, Real)


def raise_setting_mismatch(step: int, optimizer: Optimizer, group: dist.ProcessGroup) -> NoReturn:
    """Raise for the settings in which ranks differ. Collective.

    Args:
        step: the number of the optimizer step.
        optimizer: the optimizer of this step.
        group: ranks that have voted, with different settings.

    Raises:
        ConfigError: on every rank.
    """
    every = gather_objects(dict(settings_of(optimizer)), group)
    found = next(differences(every), "settings")
    raise ConfigError(
        f"step {step}: the optimizers of ranks have different {found}. Give the optimizers of all ranks "
        "equal settings: they train one model. A scheduler that follows a value (ReduceLROnPlateau) needs "
        "one that all ranks share: log it with sync_dist=True, or average it over ranks before it is given "
        "to step(). No rank has taken this step; what is set between clipping and a step is seen at the next "
        "one."
    )
