"""The sharded form: a folder in which every rank has written its own part, in three steps.

    1. all ranks    plan: which rank writes which block (``torch.distributed.checkpoint``'s planner)
    2. every rank   write: its blocks into ``shard-00003-of-00008.safetensors`` of a folder beside the target
    3. first rank   commit: ``index.json`` (where blocks are), ``state.json`` (everything except tensors),
                    ``manifest.json``, and only then the name

Steps 2 and 3 need not communicate, so they can run in the background: a rank leaves a note in the folder once
its part is on disk, and the first rank waits for the notes of all.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.atomic import (
    SAVING,
    AbortedSaveError,
    discard,
    discard_shared,
    make_folder,
    put_in_place,
    save_error,
    sync,
    temporary_path,
    write_durably,
    write_note,
)
from lightning_cp.checkpoint.manifest import NAME, FileEntry, Manifest, SaveInfo, sha256_of
from lightning_cp.checkpoint.shard_file import INDEX, Block, BlockLocation, index_of, write_shard
from lightning_cp.checkpoint.tree import Place, encode, unique_name
from lightning_cp.comm.consensus import World, error_summary
from lightning_cp.errors import CheckpointError, without_home

# Notes between ranks: one that saves in the background leaves a note for the first one, which waits for it.


def report_failure(note: Path, why: str, part: Path) -> bool:
    """Report an error to the first rank, on a disk that may be full; return True if that rank still waits.

    Args:
        note: path that the first rank reads.
        why: the error.
        part: the partial file, deleted first to make room.
    """
    discard(part)
    try:
        write_note(note, json.dumps({"failed": why}))
        return True
    except OSError:
        with suppress(OSError):
            note.touch()  # an empty file needs no room
        return note.parent.is_dir()


def read_note(note: Path) -> dict[str, Any]:
    """Content of a note; ``failed`` if there was no room for the reason."""
    return json.loads(note.read_text() or '{"failed": "its part could not be written"}')


STATE = "state.json"
_NOTE, _PAUSE = "done-", 0.02


@dataclass
class RankPart:
    """The part that one rank has written: its file, and the locations of its blocks."""

    file: str = ""
    sha256: str = ""
    bytes: int = 0
    blocks: list[BlockLocation] = field(default_factory=list)


@dataclass
class ShardedSave:
    """One save, as one rank sees it.

    Args:
        target: the checkpoint.
        staging: the temporary folder beside it.
        save: id of the save.
        about: for the manifest.
        world: all ranks.
        blocks: the blocks of this rank.
        state: on the first rank, the tree for JSON.
    """

    target: Path
    staging: Path
    save: str
    about: SaveInfo
    world: World
    blocks: list[Block]
    state: Any

    def copy(self) -> None:
        """Copy the current values; a shard may share memory with the weights in training."""
        for at, block in enumerate(self.blocks):
            data = torch.empty(block.data.shape, dtype=block.data.dtype, device="cpu")
            data.copy_(block.data)
            self.blocks[at] = Block(block.key, block.shape, block.offsets, data)

    def write(self) -> RankPart:
        """Write this rank's blocks; do nothing without any.

        Raises:
            OSError: they could not be written.
        """
        if not self.blocks:
            return RankPart()
        said = {"format": "lightning_cp shard", "save": self.save, "step": str(self.about.step)}
        written, digest, size = write_shard(self.staging / self._file, self.blocks, said)
        return RankPart(self._file, digest, size, written)

    def commit(self, parts: list[RankPart]) -> None:
        """Complete the checkpoint on the first rank.

        Raises:
            OSError: it could not be completed; the former checkpoint is unchanged.
        """
        entries = {part.file: FileEntry(part.sha256, part.bytes) for part in parts if part.file}
        index = index_of([block for part in parts for block in part.blocks])
        for name, content in ((INDEX, index), (STATE, self.state)):
            path = self.staging / name
            write_durably(path, json.dumps(content).encode())
            entries[name] = FileEntry(sha256_of(path), path.stat().st_size)
        sync(self.staging)
        manifest = Manifest("sharded", self.save, self.about, entries)
        write_durably(self.staging / NAME, manifest.render().encode())
        put_in_place(self.staging, self.target)

    def abort(self) -> None:
        """Remove everything that was written."""
        if self.world.rank == 0:
            discard_shared(self.staging)

    def finish_locally(self, limit: float) -> None:
        """Write, and on the first rank commit once the others' notes exist, without communication.

        Args:
            limit: seconds for which the first rank waits for the others.

        Raises:
            OSError: this rank's part could not be written.
            CheckpointError: another part could not be written, or did not arrive.
            AbortedSaveError: the first rank failed before.
        """
        note = self.staging / f"{_NOTE}{self.world.rank:05d}.json"
        try:
            part = self.write()
            if self.world.rank:
                write_note(note, json.dumps(asdict(part)))
                return
            self.commit([part, *(self._part_of(rank, limit) for rank in range(1, self.world.size))])
        except Exception as error:
            if self.world.rank == 0:
                self.abort()
            elif not report_failure(note, error_summary(error), self.staging / self._file):
                raise AbortedSaveError(
                    f"{error_summary(error)}: the first rank has given up"
                ) from error
            raise

    def _part_of(self, rank: int, limit: float) -> RankPart:
        note, until = self.staging / f"{_NOTE}{rank:05d}.json", time.monotonic() + limit
        while not note.exists():
            if time.monotonic() > until:
                raise CheckpointError(
                    f"rank {rank} has not written its part within {limit:g} s. Look at "
                    "its disk, and at what it printed."
                )
            time.sleep(_PAUSE)
        said = read_note(note)
        note.unlink()
        if "failed" in said:
            raise CheckpointError(f"rank {rank}: {said['failed']}")
        return RankPart(**{**said, "blocks": [BlockLocation(**x) for x in said["blocks"]]})

    @property
    def _file(self) -> str:
        return f"shard-{self.world.rank:05d}-of-{self.world.size:05d}.safetensors"


# The ranks' parts of a sharded checkpoint, and their common folder.


_PLAN_PAUSE = 0.02
_SEEN = 10.0
"""Limit in seconds until a folder made by one rank must be visible to another."""


def plan_sharded(
    tree: dict[str, Any],
    ours: dict[str, Any],
    target: Path,
    about: SaveInfo,
    objects: Mapping[str, bytes],
) -> ShardedSave:
    """Assign blocks to ranks, and make the folder. Collective.

    Distributed tensors (``DTensor``) are written by the ranks that hold them, replicas once; everything else
    by the first rank.

    Args:
        tree: plain.
        ours: notes beside it, plain and without tensors.
        target: the checkpoint.
        about: for the manifest.
        objects: ignored: this form has no pickles.

    Raises:
        CheckpointError: on the other ranks: one of them cannot begin.
        Exception: on that rank: the reason.
    """
    assert not objects
    world, staging = World(), temporary_path(target, SAVING)
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
        begun = world.gather_results(begin, lambda said: save_error(target, said))
        _, folder, save = begun[0]
        world.run_on_all(
            lambda: _wait_until_visible(target.with_name(folder)),
            lambda said: save_error(target, said),
        )
        world.run_on_all(end, lambda said: save_error(target, said))
    except BaseException:
        if world.rank == 0:
            discard(staging)
        raise
    kept = state if world.rank == 0 else None
    return ShardedSave(target, target.with_name(folder), save, about, world, blocks, kept)


def _wait_until_visible(folder: Path) -> None:
    """Wait until this rank sees the first one's folder, which takes a moment over a network."""
    until = time.monotonic() + _SEEN
    while not folder.is_dir():
        if time.monotonic() > until:
            raise CheckpointError(
                f"this rank does not see {without_home(str(folder.parent.absolute()))}, in which rank 0 has "
                "made a folder for the parts of all. A sharded checkpoint needs a file system that all "
                "ranks share, and the same path on all of them; checkpoint='full' needs neither"
            )
        time.sleep(_PLAN_PAUSE)


def _named(tensors: dict[str, torch.Tensor], place: Place, tensor: torch.Tensor) -> str:
    key = unique_name(place, tensors)
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
