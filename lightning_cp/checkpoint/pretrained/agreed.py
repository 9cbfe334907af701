"""Every rank loads the same: what each has found alone is compared before anything is allocated."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import NoReturn

from lightning_cp.checkpoint.paths import local_path
from lightning_cp.checkpoint.pretrained.options import Options, dtype_of
from lightning_cp.checkpoint.pretrained.plan import LoadPlan
from lightning_cp.comm.checksum import fingerprint
from lightning_cp.comm.objects import World
from lightning_cp.errors import CheckpointError, without_home

_log = logging.getLogger("lightning_cp")

Facts = dict[str, Mapping[str, str]]


def require_same_plan(plan: LoadPlan, options: Options) -> None:
    """Refuse ranks whose files, names, parts of the model or dtypes differ. Collective.

    Machines may have copies of their own, of which one is older. What a rank reads of a tensor is its own
    matter; which tensor that is, is not.

    Raises:
        CheckpointError: on every rank, naming what differs first, and between which ranks.
    """
    world, facts = World(), _facts(plan, options)
    own = {what: fingerprint(sorted(said.items())) for what, said in facts.items()}
    every = world.gather(own)
    odd = next((rank for rank, others in enumerate(every) if others != every[0]), None)
    if odd is not None:
        shown = world.gather(facts if world.rank in (0, odd) else {})
        what = next(name for name in facts if every[odd][name] != every[0][name])
        _refuse(what, shown[0][what], shown[odd][what], odd)


def tell_other_paths(path: str | os.PathLike[str]) -> None:
    """Log on the first rank that another one loads from another path. Collective.

    Machines may have copies of their own, so that is no error; but one that is of other training has the same
    names and shapes, and its values are not compared.
    """
    world = World()
    every = world.gather(str(local_path(path)))
    odd = next((rank for rank, other in enumerate(every) if other != every[0]), None)
    if odd is not None and world.rank == 0:
        _log.warning(
            "ranks load from different paths: %s on rank 0, %s on rank %d. Names, dtypes and shapes in their "
            "files are the same; that their values are, too, is not looked at.",
            without_home(every[0]),
            without_home(every[odd]),
            odd,
        )


def _facts(plan: LoadPlan, options: Options) -> Facts:
    """By what they are of, in the order in which a difference is named."""
    return {
        "the files are": {
            repr(key): f"{entry.dtype} {list(entry.shape)}" for key, entry in plan.files.items()
        },
        "the option dtype is": {"it": str(dtype_of(options.dtype))},
        "the part of the model is": {"it": repr(plan.prefix)},
        "the names in the files are": {
            repr(name): " + ".join(map(repr, keys)) or "missing"
            for name, keys in plan.names.items()
        },
    }


def _refuse(what: str, first: Mapping[str, str], other: Mapping[str, str], odd: int) -> NoReturn:
    name = min(x for x in {*first, *other} if first.get(x) != other.get(x))
    said = [x.get(name, "not there") for x in (first, other)]
    raise CheckpointError(
        f"{what} not the same on ranks 0 and {odd}: {name} is {said[0]} on rank 0 and {said[1]} on rank "
        f"{odd}. Every machine needs the same files, and every rank the same model and options. Nothing was "
        "loaded."
    )
