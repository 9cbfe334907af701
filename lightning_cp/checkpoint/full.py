"""Saving in the full form: one file, written by the first rank."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.atomic import (
    SAVING,
    discard,
    make_folder,
    put_in_place,
    save_error,
    temporary_path,
)
from lightning_cp.checkpoint.manifest import (
    FileEntry,
    Manifest,
    SaveInfo,
    parse_manifest,
    sha256_of,
)
from lightning_cp.checkpoint.objects import SAFE, WithObjects
from lightning_cp.checkpoint.pinned_buffer import PinnedBuffer
from lightning_cp.checkpoint.reshard import assemble
from lightning_cp.checkpoint.tree import Place, map_leaves
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError
from lightning_cp.watchdog.phase import pieces

# The full form: a file for plain ``torch.load(weights_only=True)``, with its manifest at the end.
#
# ``torch.save`` writes a zip archive, which may end in a comment: the manifest is that comment. It stays with
# the file when that is moved, and other readers skip it.


MAGIC = b"lightning_cp manifest\n"
_ITSELF = "this file"
_END, _LONGEST = 22, 2**16 - 1


def write_file(tree: dict[str, Any], staged: Path, about: SaveInfo) -> None:
    """Write a new file, and flush it to disk.

    Raises:
        OSError: it could not be written.
    """
    with staged.open("xb") as file:
        hashed = HashingFile(file)
        try:
            torch.save(tree, cast(Any, hashed))
        except RuntimeError:
            if hashed.error is not None:  # PyTorch's own message is about offsets
                raise hashed.error from None
            raise
        archive = hashed.end()
        files = {_ITSELF: FileEntry(archive, hashed.count)}
        manifest = Manifest("full", secrets.token_hex(8), about, files).render()
        comment = MAGIC + manifest.encode()
        assert len(comment) <= _LONGEST
        file.write(struct.pack("<H", len(comment)) + comment)
        file.flush()
        os.fsync(file.fileno())


class HashingFile:
    """A file that is hashed while it is written, without the two bytes that hold the comment's length."""

    def __init__(self, file: Any) -> None:
        self._file, self._digest, self._tail = file, hashlib.sha256(), b""
        self.count, self.error = 0, None

    def write(self, data: Any) -> int:
        """Write all data so far except the last two bytes."""
        view = memoryview(data)
        if len(view) < 2:
            view = memoryview(self._tail + bytes(view))
            self._tail = b""
        for ready in (memoryview(self._tail), view[:-2]):
            for piece in pieces(ready):
                self._write(piece)
        self._tail = bytes(view[-2:])
        return len(data)

    def _write(self, piece: memoryview) -> None:
        try:
            self._file.write(piece)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(piece)
        self.count += len(piece)

    def flush(self) -> None:
        """Do nothing: ``write_file`` flushes at the end."""

    def end(self) -> str:
        """Return the hash of the written bytes."""
        assert self._tail == b"\0\0"
        return self._digest.hexdigest()


def manifest_of_file(path: Path) -> Manifest | None:
    """The manifest at a file's end; ``None`` if another program has written the file.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _END - _LONGEST))
        tail = file.read()
    at = tail.rfind(MAGIC)
    if at < 0:
        _check_no_comment(tail, path.name)
        return None
    said = tail[at + len(MAGIC) :].decode(errors="replace")
    manifest = parse_manifest(said, f"the manifest at the end of {path.name}")
    length = int.from_bytes(tail[max(0, at - 2) : at], "little")
    entry = manifest.files.get(_ITSELF)
    if entry is None or length != len(tail) - at or entry.bytes + 2 + length != size:
        raise CheckpointError(
            f"{path.name} is damaged: it has {size} bytes, which is not what its manifest says. Nothing "
            "was loaded."
        )
    return manifest


def _check_no_comment(tail: bytes, name: str) -> None:
    """Check for a comment that is not a manifest: ``torch.save`` writes none, so it is a damaged one."""
    end = tail.rfind(b"PK\5\6")
    if 0 <= end < len(tail) - _END:
        raise CheckpointError(
            f"{name} is damaged: it ends in a comment that is not a manifest. Nothing was loaded."
        )


def verify_file(path: Path, manifest: Manifest) -> None:
    """Compare a file with the manifest at its end.

    Raises:
        CheckpointError: a byte has changed.
    """
    entry = manifest.files[_ITSELF]
    if sha256_of(path, entry.bytes) != entry.sha256:
        raise CheckpointError(
            f"{path.name} is damaged: its sha256 is not its manifest's. Nothing was loaded."
        )


def load_file(path: Path, *, weights_only: bool = True) -> Any:
    """The content of a file: tensors mapped from it, on the CPU, in plain containers.

    Args:
        path: the file.
        weights_only: ``False`` if the user trusts the file: objects in it are unpickled, which runs their
            code.

    Raises:
        CheckpointError: not a complete file of ``torch.save``, or its content would run code.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path.name} is not a complete checkpoint: it is truncated, damaged, or was not written by "
            f"torch.save (it has {path.stat().st_size:,} bytes, and none of the end that such files have). "
            "Nothing was loaded."
        )
    try:
        torch.serialization.add_safe_globals(SAFE)  # permanent; see objects.py
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    except OSError:
        raise
    except Exception as error:  # zip, pickle and PyTorch each raise their own types
        raise CheckpointError(f"{path.name} {_why(error, weights_only)}") from None


def _why(error: Exception, weights_only: bool) -> str:
    """The reason for which PyTorch cannot read a file, and the remedy."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if not weights_only and isinstance(error, (ImportError, AttributeError)):
        return (
            f"holds an object that cannot be made here ({first}). Nothing was loaded. Load it where its "
            "class can be imported, or without weights_only=False."
        )
    if "Unsupported" in str(error) or "weights_only" in str(error).lower():
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        return (
            f"holds more than tensors and plain containers ({named[1] if named else first}), and reading "
            "that would run code from the file, so it is refused. If you trust it, say weights_only=False "
            "where you load it."
        )
    return (
        "is not a complete checkpoint: it is truncated, damaged, or was not written by torch.save "
        f"({first}). Nothing was loaded."
    )


# Assembly of a distributed state on the CPU of the ranks that store it, one tensor after the other.


def gather(tree: Any, *, keeps: bool) -> GatheredTensors:
    """Assemble the distributed tensors of a tree. Collective.

    Args:
        tree: plain, with distributed tensors at the same places on every rank.
        keeps: True on ranks that store them; the others only send.
    """
    found: dict[Place, DTensor] = {}
    map_leaves(tree, lambda at, x: found.update({at: x}) if isinstance(x, DTensor) else None)
    gathered = GatheredTensors(keeps=keeps)
    for place, tensor in sorted(found.items(), key=lambda item: repr(item[0])):
        gathered.add(place, assemble(tensor))
    return gathered


class GatheredTensors:
    """A rank's whole tensors, assembled by all ranks.

    All ranks finish all tensors, also if one does not fit into memory: the error is raised afterwards.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._tensors: dict[Place, torch.Tensor] = {}
        self._buffer = PinnedBuffer()
        self._keeps, self._error = keeps, None

    def add(self, place: Place, tensor: torch.Tensor) -> None:
        """Assemble a tensor and store it on the CPU."""
        if not self._keeps or self._error is not None:
            return
        try:
            self._tensors[place] = self._buffer.copy(tensor)
        except Exception as error:
            self._tensors.clear()
            self._error = error

    def whole(self, tree: Any) -> Any:
        """The tree with whole tensors on the CPU.

        Raises:
            Exception: the error of storing one of the distributed tensors.
        """
        if self._error is not None:
            raise self._error
        return map_leaves(
            tree, lambda at, x: self._tensors[at] if at in self._tensors else self._compact(x)
        )

    def _compact(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor on the CPU without the rest of its storage, which would be written too."""
        x = self._buffer.copy(x)
        return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x


NOTES_KEY = "lightning_cp"
"""Key of the top level for notes; plain Lightning ignores it."""
OBJECTS_KEY = "objects"
"""Key in the notes: keys whose values have a pickle beside their plain form."""


@dataclass
class FullSave:
    """One save on one rank: the first rank has all of the state, the others nothing.

    Args:
        target: the file.
        about: for the manifest.
        world: all ranks.
        tree: plain, with tensors on the CPU; ``None`` except on the first rank.
        objects: pickles of hyperparameters, by key.
        live: addresses of storages of the state that is saved.
        staged: the temporary file, once it exists.
        elsewhere: writes and completes it in another place than a file of this machine.
    """

    target: Path
    about: SaveInfo
    world: World
    tree: dict[str, Any] | None
    objects: Mapping[str, bytes] = field(default_factory=dict)
    live: frozenset[int] = frozenset()
    staged: Path | None = None
    elsewhere: Callable[[dict[str, Any], SaveInfo], None] | None = None

    def copy(self) -> None:
        """Copy the current values, except gathered ones, which are copies already."""
        copies: dict[tuple[Any, ...], torch.Tensor] = {}

        def copied(place: Place, x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in self.live:
                return x
            memory = (x.data_ptr(), x.shape, x.stride(), x.dtype)
            return copies.setdefault(memory, x.clone()) if x.numel() else x.clone()

        if self.tree is not None:
            self.tree = map_leaves(self.tree, copied)

    def write(self) -> None:
        """Write the temporary file.

        Raises:
            OSError: it could not be written.
        """
        if self.tree is None:
            return
        objects = {key: WithObjects(self.tree[key], x) for key, x in self.objects.items()}
        tree = {**self.tree, **objects}
        if self.elsewhere is not None:
            self.elsewhere(tree, self.about)
            return
        make_folder(self.target.parent)
        self.staged = temporary_path(self.target, SAVING)
        write_file(tree, self.staged, self.about)

    def commit(self, parts: object = None) -> None:
        """Rename the file to its name on the first rank; this replaces the former one atomically."""
        if self.staged is not None:
            put_in_place(self.staged, self.target)

    def abort(self) -> None:
        """Remove the temporary file."""
        if self.staged is not None:
            discard(self.staged)

    def finish_locally(self, limit: float) -> None:
        """Write and commit without communication."""
        try:
            self.write()
            self.commit()
        except Exception:
            self.abort()
            raise


def plan_full(
    tree: dict[str, Any],
    ours: dict[str, Any],
    target: Path,
    about: SaveInfo,
    objects: Mapping[str, bytes],
) -> FullSave:
    """Gather the state on the first rank's CPU, one tensor at a time. Collective.

    Args:
        tree: plain, with distributed tensors at the same places on every rank.
        ours: plain notes beside the state.
        target: the file.
        about: for the manifest.
        objects: pickles of hyperparameters, by key; on the first rank.

    Raises:
        CheckpointError: on the other ranks: the first one cannot store a tensor.
        Exception: on the first rank: the reason.
    """
    world = World()
    gathered = gather(tree, keeps=world.rank == 0)
    live: set[int] = set()
    map_leaves(tree, lambda _, x: live.add(_storage_of(x)))
    save = FullSave(target, about, world, None, objects, frozenset(live))

    def complete() -> None:
        if world.rank == 0:
            save.tree = {**gathered.whole(tree), NOTES_KEY: {**ours, OBJECTS_KEY: list(objects)}}

    world.run_on_all(complete, lambda said: save_error(target, said))
    return save


def _storage_of(x: torch.Tensor) -> int:
    held = x.to_local() if isinstance(x, DTensor) else x
    return held.untyped_storage().data_ptr()
