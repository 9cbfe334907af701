"""The manifest of a checkpoint: sizes and hashes of its files, and of itself, so that any changed byte is
found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_cp.checkpoint.atomic import display_path
from lightning_cp.errors import CheckpointError
from lightning_cp.watchdog.phase import sign_of_life

NAME = "manifest.json"
VERSION = 1
_FORMAT = "lightning_cp checkpoint"
_CHUNK = 2**22


@dataclass(frozen=True)
class SaveInfo:
    """Facts of a checkpoint, for people and for the loader.

    Args:
        step: number of optimizer steps, if known.
        mesh: axis -> size.
        engine: name of the engine that distributed parameters.
    """

    step: int | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    engine: str = ""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint.

    Args:
        form: ``full`` or ``sharded``.
        save: id of the save; every shard repeats it.
        about: facts of the checkpoint.
        files: name -> size and hash.
    """

    form: str
    save: str
    about: SaveInfo
    files: Mapping[str, FileEntry]

    def render(self) -> str:
        """JSON, with a hash of all other entries."""
        body = {
            "format": _FORMAT,
            "version": VERSION,
            "form": self.form,
            "save": self.save,
            "step": self.about.step,
            "mesh": dict(self.about.mesh),
            "engine": self.about.engine,
            "files": {name: asdict(entry) for name, entry in self.files.items()},
        }
        return _signed(body)


def parse_manifest(text: str, where: str) -> Manifest:
    """Read a manifest.

    Args:
        text: the result of ``render``.
        where: name of the file, for messages.

    Raises:
        CheckpointError: another format or version, or a changed byte.
    """
    try:
        body = json.loads(text)
        if body["format"] != _FORMAT:
            raise CheckpointError(
                f"{where} is not a manifest of a checkpoint of lightning_cp. Give the "
                "path of a checkpoint that a run has saved."
            )
        version = body["version"]
        if version != VERSION:
            raise CheckpointError(
                f"{where} has format version {version!r}; this release of lightning_cp reads version "
                f"{VERSION}. Load it with the release that wrote it."
            )
        signed = _signed({key: body[key] for key in body if key != "sha256"})
        files = {str(name): FileEntry(**entry) for name, entry in body["files"].items()}
        about = SaveInfo(body["step"], body["mesh"], body["engine"])
        manifest = Manifest(body["form"], body["save"], about, files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where} is truncated or damaged: it is not a manifest ({type(error).__name__}). "
            "Nothing was loaded."
        ) from None
    if signed != text:
        raise CheckpointError(
            f"{where} is damaged: its own hash does not fit. Nothing was loaded; take "
            "another checkpoint."
        )
    return manifest


def is_ours(text: str) -> bool:
    """True if a manifest was written by a save, of any version; it may be damaged."""
    try:
        body = json.loads(text)
    except ValueError:
        return f'"{_FORMAT}"' in text
    return isinstance(body, dict) and body.get("format") == _FORMAT


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a sharded checkpoint.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder.name} has no {NAME}: its save did not end, or it is not a checkpoint of lightning_cp. "
            "Nothing was loaded."
        )
    manifest = parse_manifest(path.read_text(errors="replace"), f"{folder.name}/{NAME}")
    for name in manifest.files:
        if name != Path(name).name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{folder.name}/{NAME} names {name!r}, which is outside its folder. "
                "Nothing was loaded; take another checkpoint."
            )
    return manifest


def verify(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Compare files with the manifest, byte by byte.

    Args:
        folder: the folder of the files.
        manifest: their sizes and hashes.
        names: files to compare; all by default.

    Raises:
        CheckpointError: naming the first file that is missing or different.
    """
    for name in manifest.files if names is None else names:
        _verify_file(folder / name, f"{folder.name}/{name}", manifest.files[name])


def _verify_file(path: Path, shown: str, entry: FileEntry) -> None:
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{shown} is missing. Nothing was loaded.")
    size = path.stat().st_size
    if size != entry.bytes:
        raise CheckpointError(
            f"{shown} is damaged: it has {size} bytes, and had {entry.bytes} when it was saved. Nothing "
            "was loaded."
        )
    if sha256_of(path) != entry.sha256:
        raise CheckpointError(
            f"{shown} is damaged: its sha256 is not the manifest's. Nothing was loaded."
        )


def sha256_of(path: Path, end: int | None = None) -> str:
    """The sha256 of a file, or of its first ``end`` bytes."""
    digest = hashlib.sha256()
    left = path.stat().st_size if end is None else end
    with path.open("rb") as file:
        while left and (data := file.read(min(_CHUNK, left))):
            digest.update(data)
            left -= len(data)
            sign_of_life()
    return digest.hexdigest()


def _signed(body: dict[str, Any]) -> str:
    text = json.dumps(body, indent=1, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True)


# Paths that block a checkpoint: a folder is replaced or removed only if it is a checkpoint of ours.


def is_foreign(path: Path) -> bool:
    """True for a folder, not a link to one, that was not written by a save: its content is needed."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return not is_ours((path / NAME).read_text())
    except (FileNotFoundError, ValueError):
        return True


def check_replaceable(path: Path) -> None:
    """Check that a path may be replaced: a folder with other content may not, an empty one may.

    Raises:
        CheckpointError: it may not, or its parent is a file; nothing was changed.
    """
    file = next((x for x in path.parents if x.exists() and not x.is_dir()), None)
    if file is not None:
        raise CheckpointError(
            f"cannot save {display_path(path)}: {display_path(file)} is a file, and a checkpoint is saved "
            "in a folder. "
            "Save somewhere else, or move the file away."
        )
    if is_foreign(path) and any(path.iterdir()):
        raise CheckpointError(
            f"{display_path(path)} is a folder that is not a checkpoint of lightning_cp, so it is not "
            "replaced. Save under another name, or move the folder away."
        )
