"""Settings of an optimizer's next step, which have to be the same on all ranks that train one model.

Ranks with other learning rates train parts of what is no model, or copies that drift apart: a scheduler that
follows a value of its own rank does that, without an error anywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from numbers import Real
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_cp.comm.agreement import gathered_lists
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.watch.same import differences


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
    every = [dict(found) for found in gathered_lists(settings_of(optimizer), group)]
    found = next(differences(every), "settings")
    raise ConfigError(
        f"step {step}: the optimizers of ranks have different {found}. All ranks train one model, so they "
        "have to step by the same. A scheduler that follows a value (ReduceLROnPlateau) needs one that all "
        "ranks share: log it with sync_dist=True, or average it over ranks before it is given to step(). No "
        "rank has taken this step; what is set between clipping and a step is seen at the next one."
    )
