"""The full form: one file that plain ``torch.load(weights_only=True)`` reads, its manifest at the end.

``torch.save`` writes a zip archive, and such an archive may end in a comment: that is where the manifest is.
It stays with the file wherever that is moved, and readers that do not know of it skip it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.durable import SAVING, beside, discard, put_in_place
from lightning_cp.checkpoint.failures import failed_save
from lightning_cp.checkpoint.latest import point_to
from lightning_cp.checkpoint.manifest import About, FileEntry, Manifest, hash_of, parse
from lightning_cp.checkpoint.plain import map_leaves
from lightning_cp.checkpoint.tensors import whole
from lightning_cp.comm.objects import World
from lightning_cp.errors import CheckpointError

OURS = "lightning_cp"
"""The key of the top level under which notes are kept; plain Lightning does not look at it."""
_MAGIC = b"lightning_cp manifest\n"
_ITSELF = "this file"
_END, _LONGEST = 22, 2**16 - 1


@dataclass
class FullSave:
    """One save, as one rank sees it: the first one has all of the state, the others nothing.

    Args:
        target: the file.
        about: for the manifest.
        world: all ranks.
        tree: plain, its tensors on the CPU; on the first rank.
    """

    target: Path
    about: About
    world: World
    tree: dict[str, Any] | None
    staged: Path | None = None

    def copy(self) -> None:
        """Take the values as they are now."""
        copies: dict[tuple[Any, ...], torch.Tensor] = {}

        def copied(key: str, x: torch.Tensor) -> torch.Tensor:
            place = (x.data_ptr(), x.shape, x.stride(), x.dtype)
            return copies.setdefault(place, x.clone()) if x.numel() else x.clone()

        if self.tree is not None:
            self.tree = map_leaves(self.tree, copied)

    def write(self) -> None:
        """Write the file beside its place.

        Raises:
            OSError: it could not be written.
        """
        if self.tree is None:
            return
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.staged = beside(self.target, SAVING)
        _write(self.tree, self.staged, self.about)

    def commit(self, parts: object = None) -> None:
        """Give it its name, on the first rank; one of that name is replaced in one step."""
        if self.staged is not None:
            put_in_place(self.staged, self.target)
            point_to(self.target)

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


def plan_full(tree: dict[str, Any], ours: dict[str, Any], target: Path, about: About) -> FullSave:
    """Bring the state together on the first rank's CPU, one tensor at a time. Collective.

    Args:
        tree: plain.
        ours: what is noted beside it, plain.
        target: the file.
        about: for the manifest.

    Raises:
        CheckpointError: ranks have different tensors to bring together.
    """
    world = World()
    spread: dict[str, DTensor] = {}
    map_leaves(tree, lambda key, x: spread.update({key: x}) if isinstance(x, DTensor) else None)
    facts = [(key, tuple(x.shape), str(x.dtype)) for key, x in sorted(spread.items())]
    if spread or world.size > 1:
        _require_same(world.gather(hash_of_facts(facts)), target)
    keep = world.rank == 0
    gathered = {key: whole(spread[key], keep=keep) for key in sorted(spread)}
    if not keep:
        return FullSave(target, about, world, None)
    made = map_leaves(tree, lambda key, x: gathered[key] if key in gathered else _own(x))
    return FullSave(target, about, world, {**made, OURS: ours})


def hash_of_facts(facts: Any) -> str:
    """A short name for what ``repr`` shows."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _require_same(hashes: list[str], target: Path) -> None:
    if len(set(hashes)) > 1:
        odd = next(rank for rank, each in enumerate(hashes) if each != hashes[0])
        raise failed_save(target, f"rank {odd} has other sharded tensors than rank 0")


def _own(x: torch.Tensor) -> torch.Tensor:
    """On the CPU, without the rest of a storage that it is a part of: that would be written too."""
    x = x.detach().cpu()
    return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x


def _write(tree: dict[str, Any], staged: Path, about: About) -> None:
    with staged.open("xb") as file:
        hashed = _Hashed(file)
        try:
            torch.save(tree, cast(Any, hashed))
        except RuntimeError:
            if hashed.error is not None:  # PyTorch's own message is about offsets
                raise hashed.error from None
            raise
        archive = hashed.end()
        files = {_ITSELF: FileEntry(archive, hashed.count)}
        manifest = Manifest("full", secrets.token_hex(8), about, files).render()
        comment = _MAGIC + manifest.encode()
        assert len(comment) <= _LONGEST
        file.write(struct.pack("<H", len(comment)) + comment)
        file.flush()
        os.fsync(file.fileno())


class _Hashed:
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
        for ready in (self._kept, view[:-2]):
            try:
                self._file.write(ready)
            except OSError as error:
                self.error = error
                raise
            self._digest.update(ready)
            self.count += len(ready)
        self._kept = bytes(view[-2:])
        return len(data)

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
    at = tail.rfind(_MAGIC)
    if at < 0:
        _require_no_comment(tail, path.name)
        return None
    manifest = parse(tail[at + len(_MAGIC) :].decode(errors="replace"), path.name)
    length = int.from_bytes(tail[max(0, at - 2) : at], "little")
    entry = manifest.files.get(_ITSELF)
    if entry is None or length != len(tail) - at or entry.bytes + 2 + length != size:
        raise CheckpointError(
            f"{path.name} is damaged: it has {size} bytes, which is not what its manifest says. Nothing "
            "was loaded."
        )
    return manifest


def _require_no_comment(tail: bytes, name: str) -> None:
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
    if hash_of(path, entry.bytes) != entry.sha256:
        raise CheckpointError(
            f"{path.name} is damaged: its sha256 is not its manifest's. Nothing was loaded."
        )


def load_file(path: Path) -> Any:
    """What is in a file: tensors mapped from it, on the CPU, nothing but plain containers around them.

    Raises:
        CheckpointError: it is no complete file of ``torch.save``, or would need code to be run.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # zip, pickle and PyTorch each have their own
        first = str(error).strip().splitlines() or [type(error).__name__]
        if "Unsupported" in str(error) or "weights_only" in str(error).lower():
            raise CheckpointError(
                f"{path.name} holds more than tensors and plain containers, and reading that would run "
                "code from "
                f"the file, so it is refused ({first[0][:200]}). If you trust it, open it in plain "
                "PyTorch and "
                "save what is needed of it."
            ) from None
        raise CheckpointError(
            f"{path.name} is no complete checkpoint: it is truncated, damaged, or was not written by "
            "torch.save "
            f"({first[0][:200]}). Nothing was loaded."
        ) from None
