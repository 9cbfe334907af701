"""A batch as one process is given it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lightning_cp.batch import BatchRules, completed
from lightning_cp.batch.noted import TARGETS
from lightning_cp.containers import map_tensors
from lightning_cp.models.hf_labels import same
from lightning_cp.models.swap import hf_models
from lightning_cp.module_hooks import add_hook


def copied(batch: Any) -> Any:
    """A batch that a step may change: others are given the same."""
    return map_tensors(batch, lambda _, x: x.clone())


def as_one_process_has_it(batch: Any, rules: BatchRules) -> Any:
    """A copy, with the positions and targets that a shard of it would have."""
    return copied(completed(batch, rules))


@contextmanager
def shifting_by_themselves(model: nn.Module, batch: Any, given: Any) -> Iterator[None]:
    """Within: Hugging Face models that are called with labels and our targets shift the labels themselves.

    What one process is compared with is the model's own; a step may pass all of its batch on.

    Args:
        model: that has them inside.
        batch: may have targets of its own, which are taken.
        given: what the step is given instead.
    """
    ours = given[TARGETS].clone() if _has_targets(given) and not _has_targets(batch) else None

    def leave_out(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        targets = kwargs.get(TARGETS)
        if targets is None or kwargs.get("labels") is None or not same(targets, ours):
            return None
        return args, {name: x for name, x in kwargs.items() if name != TARGETS}

    with ExitStack() as stack:
        for root in hf_models(model) if ours is not None else ():
            options = {"with_kwargs": True, "prepend": True}
            stack.callback(add_hook(root.register_forward_pre_hook, leave_out, **options))
        yield


def _has_targets(batch: Any) -> bool:
    return isinstance(batch, MutableMapping) and TARGETS in batch
