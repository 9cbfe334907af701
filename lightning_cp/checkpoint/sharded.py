"""The sharded form: a folder in which every rank has written its own part, in three steps.

    1. all ranks    plan: which rank writes which block (``torch.distributed.checkpoint``'s planner)
    2. every rank   write: its blocks into ``shard-00003-of-00008.safetensors`` of a folder beside the target
    3. first rank   commit: ``index.json`` (where blocks are), ``state.json`` (all that is no tensor),
                    ``manifest.json``, and only then the name

Steps 2 and 3 need not communicate, so that they can be done in the background: a rank leaves a note in the
folder once its part is on the disk, and the first rank waits for the notes of all.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_cp.checkpoint.durable import (
    discard_shared,
    leave_note,
    put_in_place,
    sync,
    write_durably,
)
from lightning_cp.checkpoint.failures import GivenUpError
from lightning_cp.checkpoint.index import INDEX, index_of
from lightning_cp.checkpoint.manifest import NAME, About, FileEntry, Manifest, hash_of
from lightning_cp.checkpoint.notes import leave_failure, read_note
from lightning_cp.checkpoint.shard_file import Block, Written, write_shard
from lightning_cp.comm.objects import World, told
from lightning_cp.errors import CheckpointError

STATE = "state.json"
_NOTE, _PAUSE = "done-", 0.02


@dataclass
class Part:
    """The part that one rank has written: its file, and where its blocks are in it."""

    file: str = ""
    sha256: str = ""
    bytes: int = 0
    blocks: list[Written] = field(default_factory=list)


@dataclass
class ShardedSave:
    """One save, as one rank sees it.

    Args:
        target: the checkpoint.
        staging: the folder beside it.
        save: which save this is.
        about: for the manifest.
        world: all ranks.
        blocks: what this rank writes.
        state: on the first rank, the tree as JSON holds it.
    """

    target: Path
    staging: Path
    save: str
    about: About
    world: World
    blocks: list[Block]
    state: Any

    def copy(self) -> None:
        """Take the values as they are now; a shard may be the very weights that training goes on with."""
        for at, block in enumerate(self.blocks):
            data = torch.empty(block.data.shape, dtype=block.data.dtype, device="cpu")
            data.copy_(block.data)
            self.blocks[at] = Block(block.key, block.shape, block.offsets, data)

    def write(self) -> Part:
        """Write this rank's blocks; nothing if it has none.

        Raises:
            OSError: they could not be written.
        """
        if not self.blocks:
            return Part()
        said = {"format": "lightning_cp shard", "save": self.save, "step": str(self.about.step)}
        written, digest, size = write_shard(self.staging / self._file, self.blocks, said)
        return Part(self._file, digest, size, written)

    def commit(self, parts: list[Part]) -> None:
        """Complete the checkpoint, on the first rank.

        Raises:
            OSError: it could not be completed; what was there before still is.
        """
        entries = {part.file: FileEntry(part.sha256, part.bytes) for part in parts if part.file}
        index = index_of([block for part in parts for block in part.blocks])
        for name, content in ((INDEX, index), (STATE, self.state)):
            path = self.staging / name
            write_durably(path, json.dumps(content).encode())
            entries[name] = FileEntry(hash_of(path), path.stat().st_size)
        sync(self.staging)
        manifest = Manifest("sharded", self.save, self.about, entries)
        write_durably(self.staging / NAME, manifest.render().encode())
        put_in_place(self.staging, self.target)

    def give_up(self) -> None:
        """Remove what was written so far."""
        if self.world.rank == 0:
            discard_shared(self.staging)

    def finish_alone(self, limit: float) -> None:
        """Write, and on the first rank commit once the others' notes are there; nothing is sent.

        Args:
            limit: seconds that the first rank waits for the others.

        Raises:
            OSError: this rank's part could not be written.
            CheckpointError: another's could not, or did not come.
            GivenUpError: the first rank has failed meanwhile.
        """
        note = self.staging / f"{_NOTE}{self.world.rank:05d}.json"
        try:
            part = self.write()
            if self.world.rank:
                leave_note(note, json.dumps(asdict(part)))
                return
            self.commit([part, *(self._part_of(rank, limit) for rank in range(1, self.world.size))])
        except Exception as error:
            if self.world.rank == 0:
                self.give_up()
            elif not leave_failure(note, told(error), self.staging / self._file):
                raise GivenUpError(f"{told(error)}: the first rank has given up") from error
            raise

    def _part_of(self, rank: int, limit: float) -> Part:
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
        return Part(**{**said, "blocks": [Written(**x) for x in said["blocks"]]})

    @property
    def _file(self) -> str:
        return f"shard-{self.world.rank:05d}-of-{self.world.size:05d}.safetensors"
