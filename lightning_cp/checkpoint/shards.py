"""The sharded form: a folder in which every rank has written its own part, in three steps.

    1. all ranks    plan: which rank writes which block (``torch.distributed.checkpoint``'s planner)
    2. every rank   write: its blocks into ``shard-00003-of-00008.safetensors`` of a folder beside the target
    3. first rank   commit: ``index.json`` (where blocks are), ``state.json`` (everything except tensors),
                    ``manifest.json``, and only then the name

Steps 2 and 3 need not communicate, so they can run in the background: a rank leaves a note in the folder once
its part is on disk, and the first rank waits for the notes of all. A rank's file is safetensors, written and
read without that package: eight bytes of header length, a JSON header, then the raw values. Nothing in it can
run.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, product
from math import prod
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
    display_path,
    make_folder,
    put_in_place,
    save_error,
    sync,
    temporary_path,
    write_durably,
    write_note,
)
from lightning_cp.checkpoint.manifest import NAME, FileEntry, Manifest, SaveInfo, sha256_of
from lightning_cp.checkpoint.pinned_buffer import PinnedBuffer
from lightning_cp.checkpoint.pretrained.files import DTYPE_NAMES, TensorSpec, header_bytes
from lightning_cp.checkpoint.reshard import Chunk, StoredTensor
from lightning_cp.checkpoint.tree import Place, dtype_named, encode, unique_name
from lightning_cp.comm.consensus import World, error_summary
from lightning_cp.errors import CheckpointError, without_home
from lightning_cp.watchdog.phase import pieces

_ALIGNED = 64
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Block:
    """A block to be written.

    Args:
        key: the tensor's name.
        shape: of the whole tensor.
        offsets: of the block in the tensor.
        data: the block, on any device.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor


@dataclass(frozen=True)
class BlockLocation:
    """The file and the position of a block."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int


def write_shard(
    path: Path, blocks: Sequence[Block], metadata: Mapping[str, str]
) -> tuple[list[BlockLocation], str, int]:
    """Write blocks into a new file, one at a time, and flush it to disk.

    Args:
        path: the file.
        blocks: its content.
        metadata: strings for the header: the save's id and step.

    Returns:
        The location of each block, the file's sha256, and its size in bytes.
    """
    ordered = sorted(
        blocks, key=lambda block: -block.data.element_size()
    )  # aligned for every dtype
    header = _header(ordered, metadata)
    digest, written, at = hashlib.sha256(), [], len(header)
    buffer = PinnedBuffer()
    with path.open("xb") as file:
        for part in pieces(memoryview(header)):
            file.write(part)
            digest.update(part)
        for block in ordered:
            for part in chain.from_iterable(map(pieces, buffer.values(block.data))):
                file.write(part)
                digest.update(part)
            written.append(_place(block, path.name, at))
            at += block.data.nbytes
        file.flush()
        os.fsync(file.fileno())
    return written, digest.hexdigest(), at


def map_block(path: Path, begin: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A block of a file, read when its values are used."""
    count = torch.Size(sizes).numel()
    if count == 0:
        return torch.empty(tuple(sizes), dtype=dtype)
    end = begin + count * dtype.itemsize
    data = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
    return data[begin:].view(dtype).view(tuple(sizes))


def header_strings(path: Path) -> dict[str, str]:
    """The strings of a shard's header; empty if it has none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _LARGEST_HEADER else {}
        return {str(k): str(v) for k, v in header.get("__metadata__", {}).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _header(blocks: Sequence[Block], metadata: Mapping[str, str]) -> bytes:
    """The header; blocks of dtypes that the format does not have are described as bytes."""
    held: dict[str, TensorSpec] = {}
    for block in blocks:
        data, name = block.data, block.key
        if tuple(data.shape) != block.shape:
            name += f"@{','.join(map(str, block.offsets))}"
        known = data.dtype in DTYPE_NAMES
        held[name] = TensorSpec(data.dtype, tuple(data.shape)) if known else _bytes_like(data)
    return header_bytes(held, metadata, _ALIGNED)


def _bytes_like(x: torch.Tensor) -> TensorSpec:
    return TensorSpec(torch.uint8, (x.nbytes,))


def _place(block: Block, file: str, at: int) -> BlockLocation:
    dtype = str(block.data.dtype).removeprefix("torch.")
    return BlockLocation(
        block.key, dtype, block.shape, block.offsets, tuple(block.data.shape), file, at
    )


# ``index.json`` of a sharded checkpoint: the dtype, shape and block locations of every tensor.


INDEX = "index.json"
_PLACE = ("offsets", "sizes", "file", "begin")
_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and sizes."""


def index_of(blocks: Sequence[BlockLocation]) -> dict[str, Any]:
    """The index of the blocks of all ranks."""
    found: dict[str, list[BlockLocation]] = {}
    for block in blocks:
        found.setdefault(block.key, []).append(block)
    tensors = {}
    for key, written in found.items():
        chunks = [{k: v for k, v in asdict(w).items() if k in _PLACE} for w in written]
        tensors[key] = {"dtype": written[0].dtype, "shape": written[0].shape, "chunks": chunks}
    return {"tensors": tensors}


def stored_tensor(
    folder: Path, key: str, entry: dict[str, Any], manifest: Manifest
) -> StoredTensor:
    """A tensor of a folder, to be read on demand.

    Args:
        folder: the checkpoint.
        key: the tensor's name in the index.
        entry: the tensor's entry in the index.
        manifest: names the verified files, and their sizes.

    Raises:
        CheckpointError: blocks are in other files, or do not make up the tensor.
    """
    shape, dtype = tuple(entry["shape"]), dtype_named(entry["dtype"])
    for x in entry["chunks"]:
        if x["file"] not in manifest.files:
            raise _wrong(folder, f"{key} is in {x['file']!r}, which the manifest does not name")
        end = x["begin"] + prod(x["sizes"]) * dtype.itemsize
        if not 0 <= x["begin"] <= end <= manifest.files[x["file"]].bytes:
            raise _wrong(folder, f"a block of {key} is outside {x['file']}")
    if not _fills(shape, [(tuple(x["offsets"]), tuple(x["sizes"])) for x in entry["chunks"]]):
        raise _wrong(folder, f"the blocks of {key} are not all of its shape {list(shape)}")
    return StoredTensor(dtype, shape, tuple(_chunk(folder, x, dtype) for x in entry["chunks"]))


def _chunk(folder: Path, x: dict[str, Any], dtype: torch.dtype) -> Chunk:
    read = partial(map_block, folder / x["file"], x["begin"], x["sizes"], dtype)
    return Chunk(tuple(x["offsets"]), tuple(x["sizes"]), read)


def _fills(shape: tuple[int, ...], blocks: Sequence[_Box]) -> bool:
    """True if blocks lie within a tensor and cover each element exactly once."""
    for offsets, sizes in blocks:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        for offset, size, whole in zip(offsets, sizes, shape, strict=True):
            if not 0 <= offset <= offset + size <= whole:
                return False
    held = [(offsets, sizes) for offsets, sizes in blocks if prod(sizes)]
    if prod(shape) != sum(prod(sizes) for _, sizes in held):
        return False
    cut = [dim for dim, whole in enumerate(shape) if any(sizes[dim] < whole for _, sizes in held)]
    begin = (0,) * len(shape)
    return _corners(held, cut) == _corners([(begin, shape)] if prod(shape) else [], cut)


def _corners(boxes: Iterable[_Box], dims: Sequence[int]) -> dict[tuple[int, ...], int]:
    """The number of boxes with each corner, with a sign that changes at each end of a dimension.

    Cumulative sums of these count the boxes that cover each element. So two sets of boxes with the same
    corners cover each element equally often, and thousands of boxes need not be compared with each other.
    """
    found: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        sides = [((offsets[dim], 1), (offsets[dim] + sizes[dim], -1)) for dim in dims]
        for corner in product(*sides):
            found[tuple(at for at, _ in corner)] += prod(sign for _, sign in corner)
    return {corner: times for corner, times in found.items() if times}


def _wrong(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{display_path(folder / INDEX)} says that {what}. Nothing was loaded.")


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
    except OSError:
        try:
            note.touch()  # an empty file needs no room
        except OSError:
            return note.parent.is_dir()
    return True


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
        buffer = PinnedBuffer()
        for at, block in enumerate(self.blocks):
            data = block.data
            if data.device.type == "cpu":
                data = data.clone(memory_format=torch.contiguous_format)
            else:
                data = buffer.copy(data)
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
