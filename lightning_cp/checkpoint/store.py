"""Full checkpoints in a store that fsspec reaches (``s3://``, ``gs://``, ``memory://``): whole or not there.

A file is written and hashed on this machine's disk, sent under another name, compared in size, and only then
copied to its own name by the store itself, which shows a copied object whole or not at all. What a store has
no call for is not promised: that the last bytes are on its disks, and that a killed save leaves nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsspec.core import url_to_fs

from lightning_cp.checkpoint.atomic import SAVING
from lightning_cp.checkpoint.full import write_file
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.errors import CheckpointError, MissingCheckpointError

_LOCAL = ("file", "local")


def is_store(path: str | PathLike[str]) -> bool:
    """True if a path is a URL of another place than this machine's file systems."""
    protocol, url, _ = str(path).partition("://")
    return bool(url) and protocol not in _LOCAL


def put_in_store(
    tree: dict[str, Any], about: SaveInfo, path: str, options: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint into a store; the one of that name is replaced by the last call of all.

    Args:
        tree: as ``write_file`` takes it.
        about: for the manifest.
        path: its URL.
        options: ``storage_options``, for the file system.

    Raises:
        CheckpointError: the store has another number of bytes than were sent.
    """
    system, place = url_to_fs(path, **(options or {}))
    folder, _, name = place.rpartition("/")
    beside = f"{folder}/.{name}.{SAVING}-{secrets.token_hex(8)}"
    with TemporaryDirectory() as own:
        file = Path(own, name)
        write_file(tree, file, about)
        sent = file.stat().st_size
        try:
            system.makedirs(folder, exist_ok=True)
            system.put_file(str(file), beside)
            got = system.size(beside)
            if got != sent:
                raise CheckpointError(
                    f"the store has {got} bytes of {sent} that were sent to it. Save again, or "
                    "elsewhere."
                )
            system.cp_file(beside, place)
        finally:
            with suppress(Exception):  # whatever the store says of it: the error is another one
                system.rm_file(beside)


@contextmanager
def local_copy(path: str) -> Iterator[Path]:
    """A store's checkpoint as a file of this machine; what is mapped from it stays after the end.

    Raises:
        MissingCheckpointError: it is not there.
        CheckpointError: it is a folder.
    """
    system, place = url_to_fs(path)
    if not system.exists(place):
        raise MissingCheckpointError(
            f"Checkpoint file not found: {path}. Give the URL of one that was saved."
        )
    if system.isdir(place):
        raise CheckpointError(f"{path} is a folder. {SHARDED_ADVICE}")
    with TemporaryDirectory() as own:
        file = Path(own, place.rpartition("/")[2])
        system.get_file(place, str(file))
        yield file


def remove_from_store(path: str) -> None:
    """Remove a checkpoint, if it is there."""
    system, place = url_to_fs(path)
    if system.exists(place):
        system.rm_file(place)


SHARDED_ADVICE = (
    "A sharded checkpoint needs a folder that all ranks write to. Save it on a local or mounted file system, "
    "and copy the folder, or use checkpoint='full', which a store holds."
)
