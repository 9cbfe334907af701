"""The full form: one file that plain ``torch.load(weights_only=True)`` reads, its manifest at the end.

``torch.save`` writes a zip archive, and such an archive may end in a comment: that is where the manifest is.
It stays with the file wherever that is moved, and readers that do not know of it skip it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import struct
import zipfile
from pathlib import Path
from typing import Any, cast

import torch

from lightning_cp.checkpoint.manifest import About, FileEntry, Manifest, hash_of, parse
from lightning_cp.checkpoint.objects import SAFE
from lightning_cp.errors import CheckpointError
from lightning_cp.faults.signs import pieces

MAGIC = b"lightning_cp manifest\n"
_ITSELF = "this file"
_END, _LONGEST = 22, 2**16 - 1


def write_file(tree: dict[str, Any], staged: Path, about: About) -> None:
    """Write a new file and have it on the disk.

    Raises:
        OSError: it could not be written.
    """
    with staged.open("xb") as file:
        hashed = Hashed(file)
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


class Hashed:
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
        _require_no_comment(tail, path.name)
        return None
    said = tail[at + len(MAGIC) :].decode(errors="replace")
    manifest = parse(said, f"the manifest at the end of {path.name}")
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
