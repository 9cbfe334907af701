"""A batch as one process is given it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lightning_cp.batch import BatchRules, read_batch, with_positions
from lightning_cp.containers import map_tensors

TARGETS = "shift_labels"


class _Whole(dict[Any, Any]):
    """Has shifted labels for who asks for them: a model that is given everything shifts its labels itself."""

    def __init__(self, batch: dict[Any, Any], targets: torch.Tensor) -> None:
        super().__init__(batch)
        self._targets = targets

    def __missing__(self, key: Any) -> torch.Tensor:
        if key != TARGETS:
            raise KeyError(key)
        return self._targets

    def get(self, key: Any, default: Any = None) -> Any:
        return self._targets if key == TARGETS and key not in self else super().get(key, default)


pytree.register_pytree_node(
    _Whole,
    lambda batch: (list(batch.values()), list(batch)),
    lambda values, keys: dict(zip(keys, values, strict=True)),
)


def copied(batch: Any) -> Any:
    """A batch that a step may change: others are given the same."""
    return map_tensors(batch, lambda _, x: x.clone())


def as_one_process_has_it(batch: Any, rules: BatchRules) -> Any:
    """A copy, with the positions and targets that a shard of it would have."""
    given = with_positions(copied(batch), rules)
    if rules.labels != "shift" or not isinstance(given, MutableMapping) or TARGETS in given:
        return given
    targets = read_batch(batch, rules, needs_labels=False).aligned_labels
    if targets is None:
        return given
    if type(given) is dict:
        return _Whole(given, targets.clone())
    given[TARGETS] = targets.clone()
    return given
