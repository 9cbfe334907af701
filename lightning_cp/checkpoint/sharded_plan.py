"""The ranks' parts of a sharded checkpoint, and the folder in which all write."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.durable import SAVING, beside, discard, make_folder
from lightning_cp.checkpoint.encode import encode
from lightning_cp.checkpoint.failures import failed_save
from lightning_cp.checkpoint.manifest import About
from lightning_cp.checkpoint.plain import Place, name_of
from lightning_cp.checkpoint.shard_file import Block
from lightning_cp.checkpoint.sharded import ShardedSave
from lightning_cp.comm.objects import World
from lightning_cp.errors import CheckpointError, without_home

_PAUSE = 0.02
_SEEN = 10.0
"""Seconds until a folder that one rank has made has to be there for another."""


def plan_sharded(
    tree: dict[str, Any],
    ours: dict[str, Any],
    target: Path,
    about: About,
    objects: Mapping[str, bytes],
) -> ShardedSave:
    """Decide who writes what, and make the folder. Collective.

    Tensors that are spread (``DTensor``) are written by the ranks that hold them, replicas once; all else is
    the first rank's.

    Args:
        tree: plain.
        ours: what is noted beside it, plain and without tensors.
        target: the checkpoint.
        about: for the manifest.
        objects: none: this form has no pickles.

    Raises:
        CheckpointError: on the other ranks: one of them cannot begin.
        Exception: on that one: why it cannot.
    """
    assert not objects
    world, staging = World(), beside(target, SAVING)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state: dict[str, Any] = {}

    def begin() -> tuple[SavePlan, str, str]:
        tensors: dict[str, torch.Tensor] = {}
        for name, part in (("tree", tree), ("ours", ours)):
            state[name] = encode(part, lambda place, x: _named(tensors, place, x))
        if world.rank > 0:
            tensors = {key: x for key, x in tensors.items() if isinstance(x, DTensor)}
        planner.set_up_planner(tensors, is_coordinator=world.rank == 0)
        if world.rank == 0:
            make_folder(target.parent)
            staging.mkdir()
        return planner.create_local_plan(), staging.name, secrets.token_hex(8)

    blocks: list[Block] = []

    def end() -> None:
        plans, _ = planner.create_global_plan([plan for plan, _, _ in begun])
        blocks.extend(
            _block(item, planner) for item in planner.finish_plan(plans[world.rank]).items
        )

    try:
        begun = world.together(begin, lambda said: failed_save(target, said))
        _, folder, save = begun[0]
        world.together(
            lambda: _require_seen(target.with_name(folder)), lambda said: failed_save(target, said)
        )
        world.together(end, lambda said: failed_save(target, said))
    except BaseException:
        if world.rank == 0:
            discard(staging)
        raise
    kept = state if world.rank == 0 else None
    return ShardedSave(target, target.with_name(folder), save, about, world, blocks, kept)


def _require_seen(folder: Path) -> None:
    """Wait until this rank sees what the first one has made: it may take a moment over a network."""
    until = time.monotonic() + _SEEN
    while not folder.is_dir():
        if time.monotonic() > until:
            raise CheckpointError(
                f"this rank does not see {without_home(str(folder.parent.absolute()))}, in which rank 0 has "
                "made a folder for the parts of all. A sharded checkpoint needs a file system that all "
                "ranks share, and the same path on all of them; checkpoint='full' needs neither"
            )
        time.sleep(_PAUSE)


def _named(tensors: dict[str, torch.Tensor], place: Place, tensor: torch.Tensor) -> str:
    key = name_of(place, tensors)
    tensors[key] = tensor
    return key


def _block(item: WriteItem, planner: DefaultSavePlanner) -> Block:
    assert item.tensor_data is not None
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor)
    chunk, size = item.tensor_data.chunk, tuple(item.tensor_data.size)
    if data.shape != chunk.sizes:
        raise CheckpointError(
            f"{item.index.fqn} {list(size)} is spread unevenly: its placements say that this rank holds "
            f"a block of {list(chunk.sizes)}, and it holds {list(data.shape)}, so where that belongs is "
            "not known. Tensor parallelism has to divide evenly what it shares; checkpoint='full' saves it."
        )
    return Block(item.index.fqn, size, tuple(chunk.offsets), data.detach())
