"""Saving in the full form: one file, which the first rank writes."""

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
from lightning_cp.checkpoint.tensors import assemble
from lightning_cp.checkpoint.tree import Place, map_leaves
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError
from lightning_cp.watchdog.phase import pieces

# The full form: one file that plain ``torch.load(weights_only=True)`` reads, its manifest at the end.
#
# ``torch.save`` writes a zip archive, and such an archive may end in a comment: that is where the manifest
# is. It stays with the file wherever that is moved, and readers that do not know of it skip it.


MAGIC = b"lightning_cp manifest\n"
_ITSELF = "this file"
_END, _LONGEST = 22, 2**16 - 1


def write_file(tree: dict[str, Any], staged: Path, about: SaveInfo) -> None:
    """Write a new file and have it on the disk.

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
    """A file that is hashed as it is written, but for the two bytes that say how long the comment is."""

    def __init__(self, file: Any) -> None:
        self._file, self._digest, self._kept = file, hashlib.sha256(), b""
        self.count, self.error = 0, None

    def write(self, data: Any) -> int:
        """Write all but the last two bytes so far."""
        view = memoryview(data)
        if len(view) < 2:
            view = memoryview(self._kept + bytes(view))
            self._kept = b""
        for ready in (memoryview(self._kept), view[:-2]):
            for piece in pieces(ready):
                self._write(piece)
        self._kept = bytes(view[-2:])
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
        """Done at the end, with the disk's word."""

    def end(self) -> str:
        """The hash of what was written."""
        assert self._kept == b"\0\0"
        return self._digest.hexdigest()


def manifest_of_file(path: Path) -> Manifest | None:
    """The manifest at a file's end; ``None`` if another program has written the file.

    Raises:
        CheckpointError: it is damaged.
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
    """``torch.save`` writes none: one that is not recognised is a damaged manifest."""
    end = tail.rfind(b"PK\5\6")
    if 0 <= end < len(tail) - _END:
        raise CheckpointError(
            f"{name} is damaged: it ends in a comment that is no manifest. Nothing was loaded."
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
    """The content of a file: tensors mapped from it, on the CPU, nothing but plain containers around them.

    Args:
        path: the file.
        weights_only: ``False``: a user trusts the file, so objects in it are made, which runs code of it.

    Raises:
        CheckpointError: it is no complete file of ``torch.save``, or would need code to be run.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path.name} is no complete checkpoint: it is truncated, damaged, or was not written by "
            f"torch.save (it has {path.stat().st_size:,} bytes, and none of the end that such files have). "
            "Nothing was loaded."
        )
    try:
        torch.serialization.add_safe_globals(SAFE)  # not for this time only, see objects.py
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    except OSError:
        raise
    except Exception as error:  # zip, pickle and PyTorch each have their own
        raise CheckpointError(f"{path.name} {_why(error, weights_only)}") from None


def _why(error: Exception, weights_only: bool) -> str:
    """The kind of file of which PyTorch has raised an error, and what to do."""
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
        "is no complete checkpoint: it is truncated, damaged, or was not written by torch.save "
        f"({first}). Nothing was loaded."
    )


# A state that is spread over ranks, whole on the CPU of those that keep it: one tensor after the other.


def gather(tree: Any, *, keeps: bool) -> GatheredTensors:
    """Assemble what is spread in a tree. Collective.

    Args:
        tree: plain, spread tensors at the same places on every rank.
        keeps: this rank wants them; the others take part.
    """
    found: dict[Place, DTensor] = {}
    map_leaves(tree, lambda at, x: found.update({at: x}) if isinstance(x, DTensor) else None)
    gathered = GatheredTensors(keeps=keeps)
    for place, tensor in sorted(found.items(), key=lambda item: repr(item[0])):
        gathered.add(place, assemble(tensor))
    return gathered


class GatheredTensors:
    """A rank's share of tensors that all ranks assemble.

    All of them go on to the last one, also where one does not fit into the memory of its machine: the
    error is kept until then.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._tensors: dict[Place, torch.Tensor] = {}
        self._keeps, self._error = keeps, None

    def add(self, place: Place, tensor: torch.Tensor) -> None:
        """Keep it, on the CPU."""
        if not self._keeps or self._error is not None:
            return
        try:
            self._tensors[place] = tensor.cpu()
        except Exception as error:
            self._tensors.clear()
            self._error = error

    def whole(self, tree: Any) -> Any:
        """The tree, its tensors whole and on the CPU.

        Raises:
            Exception: what kept one of those that were spread from being kept.
        """
        if self._error is not None:
            raise self._error
        return map_leaves(
            tree, lambda at, x: self._tensors[at] if at in self._tensors else _compact(x)
        )


def _compact(x: torch.Tensor) -> torch.Tensor:
    """On the CPU, without the rest of a storage that it is a part of: that would be written too."""
    x = x.detach().cpu()
    return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x


NOTES_KEY = "lightning_cp"
"""The key of the top level under which notes are kept; plain Lightning does not look at it."""
OBJECTS_KEY = "objects"
"""Among the notes: keys whose values have a pickle beside their plain form."""


@dataclass
class FullSave:
    """One save, as one rank sees it: the first one has all of the state, the others nothing.

    Args:
        target: the file.
        about: for the manifest.
        world: all ranks.
        tree: plain, its tensors on the CPU; on the first rank.
        objects: pickles of hyperparameters, by their keys.
        live: storages of the state that was given, by their addresses.
        staged: what was written so far.
        elsewhere: writes and completes it instead, in another place than a file of this machine.
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
        """Take the values as they are now; what was gathered is ours already."""
        copies: dict[tuple[Any, ...], torch.Tensor] = {}

        def copied(place: Place, x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in self.live:
                return x
            memory = (x.data_ptr(), x.shape, x.stride(), x.dtype)
            return copies.setdefault(memory, x.clone()) if x.numel() else x.clone()

        if self.tree is not None:
            self.tree = map_leaves(self.tree, copied)

    def write(self) -> None:
        """Write the file beside its place.

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
        """Give it its name, on the first rank; one of that name is replaced in one step."""
        if self.staged is not None:
            put_in_place(self.staged, self.target)

    def give_up(self) -> None:
        """Remove what was written so far."""
        if self.staged is not None:
            discard(self.staged)

    def finish_alone(self, limit: float) -> None:
        """Write and commit; nothing is sent."""
        try:
            self.write()
            self.commit()
        except Exception:
            self.give_up()
            raise


def plan_full(
    tree: dict[str, Any],
    ours: dict[str, Any],
    target: Path,
    about: SaveInfo,
    objects: Mapping[str, bytes],
) -> FullSave:
    """Bring the state together on the first rank's CPU, one tensor at a time. Collective.

    Args:
        tree: plain, spread tensors at the same places on every rank.
        ours: what is noted beside it, plain.
        target: the file.
        about: for the manifest.
        objects: pickles of hyperparameters, by their keys; on the first rank.

    Raises:
        CheckpointError: on the other ranks: the first one cannot keep a tensor.
        Exception: on the first rank: why it cannot.
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
