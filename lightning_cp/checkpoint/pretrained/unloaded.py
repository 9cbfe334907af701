"""Tensors that a load has left out unasked: ``strict=False`` takes any checkpoint, of another model, too."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning_cp.checkpoint.pretrained.options import Options
from lightning_cp.checkpoint.pretrained.plan import LoadPlan
from lightning_cp.checkpoint.pretrained.same_names import Allowed
from lightning_cp.comm.objects import World

_log = logging.getLogger("lightning_cp")
_SHOWN = 5


def tell_unloaded(plan: LoadPlan, options: Options) -> None:
    """Log it on the first rank, but for what a pattern allows: that was asked for by name."""
    if options.strict or World().rank:
        return
    lists = Allowed(options.allow_missing, options.allow_unexpected)
    missing = lists.refused_missing([*plan.missing, *plan.beside])
    if missing:
        _log.warning(
            "strict=False: %d of %d parameters of the model are not in the checkpoint, and keep the values "
            "they had or are initialised: %s",
            len(missing),
            len(plan.tensors.by_name) + len(plan.beside),
            _some(missing),
        )
    unexpected = lists.refused_unexpected(plan.unexpected)
    if unexpected:
        _log.warning(
            "strict=False: %d of %d tensors of the checkpoint were left unread: %s",
            len(unexpected),
            len(plan.files),
            _some(unexpected),
        )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
