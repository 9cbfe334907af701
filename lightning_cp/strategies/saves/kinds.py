"""The kind of optimizer that a state is of: another would fail at its next step, or train otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_cp.errors import CheckpointError

_OF_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)
_NO_OPTIONS = frozenset(("params", "param_names")) | _OF_SCHEDULERS


def kinds_of(optimizer: Optimizer) -> list[str]:
    """PyTorch's own class that it is or is made from, by any name: ``AdamW`` is an ``Adam`` as well.

    None for others: two of those may do the same under two names.
    """
    return [x.__name__ for x in type(optimizer).__mro__ if x is not Optimizer and _is_torchs(x)]


def _is_torchs(kind: type) -> bool:
    return issubclass(kind, Optimizer) and f"{kind.__module__}.".startswith("torch.optim.")


def require_kind(
    groups: Sequence[Mapping[str, Any]], optimizer: Optimizer, kinds: Sequence[str]
) -> None:
    """Refuse the state of another kind of optimizer.

    Options that only one of the two has are fine, as new versions of PyTorch add some.

    Args:
        groups: that were saved.
        optimizer: into which the state is to go.
        kinds: what it was, as ``kinds_of`` says it; empty if nobody knows.

    Raises:
        CheckpointError: saying what it was, or which options it had.
    """
    for saved, own in zip(groups, optimizer.param_groups, strict=True):
        strange = sorted(saved.keys() - own.keys() - _OF_SCHEDULERS)
        missing = sorted(own.keys() - saved.keys() - _OF_SCHEDULERS)
        if strange and missing:
            raise _another(
                f"with {', '.join(strange[:3])}, without {', '.join(missing[:3])}, which "
                f"{type(optimizer).__name__} has"
            )
    own_kinds = kinds_of(optimizer)
    if own_kinds and not kinds:
        kinds = _kinds_with_options(groups, own_kinds[0])
    if own_kinds and kinds and not set(kinds) & set(own_kinds):
        raise _another(f"of {kinds[0]}, and this one is {own_kinds[0]}")


def _another(how: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint has the state of another kind of optimizer: {how}. The optimizer was left as it "
        "is. Use the one that was saved, or load the weights alone."
    )


def _kinds_with_options(groups: Sequence[Mapping[str, Any]], likely: str) -> list[str]:
    """Of PyTorch's, those with just these options, ``likely`` among them or not; often none or one."""
    found = [
        kind.__name__
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and kind is not Optimizer and _is_torchs(kind)
        if all(group.keys() - _NO_OPTIONS == _options_of(kind) for group in groups)
    ]
    return [likely] if likely in found else found


def _options_of(kind: Any) -> set[str]:
    """Names that a group of its parameters has."""
    made: Optimizer = kind([torch.nn.Parameter(torch.zeros(1, 1))])
    return made.param_groups[0].keys() - _NO_OPTIONS
