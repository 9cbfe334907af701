"""Ranks that start with other settings, or another version of the code, are told so before they wait."""

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
from lightning_cp.comm.consensus import gather_lists
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.watchdog.watch import SWITCH

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
LONGEST = 200
"""Characters of a value that are shown."""
_OWN = ("profile_folder",)
"""Settings that each rank may have to itself."""
_TRAINER = (
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "val_check_interval"),
    "check_val_every_n_epoch",
)


def require_same_start(
    settings: StrategyConfig, trainer: Any = None, more: Mapping[str, object] | None = None
) -> None:
    """Compare what the ranks were started with; all of them must come here.

    Args:
        settings: the strategy's.
        trainer: whose own settings are compared as well.
        more: what else has to be equal, by the name that a user knows it by.

    Raises:
        ConfigError: on every rank, naming the first thing that differs, and the ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    own = list(facts(settings, trainer, more or {}).items())
    every = [dict(pairs) for pairs in gather_lists(own, world)]
    for found in differences(every):
        raise ConfigError(_differs(found))


def differences(every: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """The values that differ between ranks, as ``layout (rank 0: 'auto'; rank 1: 'zigzag')``."""
    for name in dict.fromkeys(name for found in every for name in found):
        values = [found.get(name, "missing") for found in every]
        if len(set(values)) > 1:
            yield f"{name} ({told_by_ranks(values)})"


def told_by_ranks(values: Sequence[str]) -> str:
    """Every rank's value, those that have the same one together."""
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
    """The values that have to be equal, the most telling first."""
    versions = {
        "lightning_cp version": lightning_cp.__version__,
        "torch version": torch.__version__,
        "lightning version": lightning.__version__,
        "Python version": platform.python_version(),
        "lightning_cp source": _source(),
        SWITCH: shown("off" if os.environ.get(SWITCH) == "0" else "on"),
    }
    names = [item.name for item in fields(settings) if item.name not in _OWN]
    chosen = {name: shown(getattr(settings, name)) for name in names}
    of_trainer = _TRAINER if trainer is not None else ()
    told = {f"Trainer({name}=)": shown(getattr(trainer, name, None)) for name in of_trainer}
    stage = {"Trainer.fit, validate, ...": str(trainer.state.fn)} if trainer is not None else {}
    besides = {name: shown(value) for name, value in more.items()}
    return {**stage, **versions, **chosen, **besides, **told}


def shown(value: object) -> str:
    """The same on ranks that mean the same, and another one on ranks that do not, however long it is."""
    text = _told(value)
    if len(text) <= LONGEST:
        return text
    hashed = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()
    return f"{text[:LONGEST]}... (hash {hashed})"


def _told(value: object) -> str:
    """As ``repr``, without addresses of objects and the order of sets, which every process has its own of."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_told(k)}: {_told(x)}" for k, x in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_told, value))) + "}"
    if type(value) in (list, tuple):
        return "(" + ", ".join(map(_told, cast(Sequence[object], value))) + ")"
    if isinstance(value, partial):
        return f"partial({_told((value.func, value.args, value.keywords))})"
    name = getattr(value, "__qualname__", None)
    if callable(value) and name is not None:
        return f"{getattr(value, '__module__', '')}.{name}"
    return _ADDRESS.sub("", repr(value))


@cache
def _source() -> str:
    """A checksum of this package's code: an installation to edit keeps its version."""
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


# Settings of an optimizer's next step, which have to be the same on all ranks that train one model.
#
# Ranks with other learning rates train parts of what is no model, or copies that drift apart: a scheduler
# that follows a value of its own rank does that, without an error anywhere.


def numbers_of(optimizer: Optimizer) -> bytes:
    """The numbers of its groups, at every step: equal ones are equal here, as 1 and 1.0 are."""
    return array("d", (x for _, _, numbers in _settings(optimizer) for x in numbers)).tobytes()


def settings_of(optimizer: Optimizer) -> list[tuple[str, str]]:
    """The same with names, for people."""
    return [
        (f"{key} of group {at}", ", ".join(repr(float(x)) for x in numbers))
        for at, key, numbers in _settings(optimizer)
    ]


def _settings(optimizer: Optimizer) -> Iterator[tuple[int, str, tuple[float, ...]]]:
    """By group and key; those on a device are left alone, as reading them would wait for it."""
    for at, group in enumerate(optimizer.param_groups):
        for key, x in group.items():
            if type(x) in _USUAL:  # looked up, not asked: recipes have hundreds of groups
                yield at, key, (x,)
            elif key != "params" and x is not None:
                every = x if isinstance(x, (tuple, list)) else (x,)
                if all(map(_is_number, every)):
                    yield at, key, tuple(map(float, every))


_USUAL = {float, int, bool}


def _is_number(x: Any) -> bool:
    if type(x) in _USUAL:
        return True
    if isinstance(x, torch.Tensor):
        return x.device.type == "cpu" and x.numel() == 1
    return isinstance(x, Real)


def refuse_settings(step: int, optimizer: Optimizer, group: dist.ProcessGroup) -> NoReturn:
    """Say in which settings ranks differ. Collective.

    Args:
        step: the number of the optimizer step.
        optimizer: which is about to step.
        group: ranks that have voted, and do not have the same.

    Raises:
        ConfigError: on every rank.
    """
    every = [dict(found) for found in gather_lists(settings_of(optimizer), group)]
    found = next(differences(every), "settings")
    raise ConfigError(
        f"step {step}: the optimizers of ranks have different {found}. All ranks train one model, so they "
        "have to step by the same. A scheduler that follows a value (ReduceLROnPlateau) needs one that all "
        "ranks share: log it with sync_dist=True, or average it over ranks before it is given to step(). No "
        "rank has taken this step; what is set between clipping and a step is seen at the next one."
    )
