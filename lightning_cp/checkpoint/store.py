"""Full checkpoints in a store that fsspec reaches (``s3://``, ``gs://``, ``memory://``): complete or absent.

A file is written and hashed on this machine's disk, sent under another name, compared in size, and only then
copied to its own name by the store itself, which shows a copied object whole or not at all. Two things
have no call in a store, and are not guaranteed: that its disks have the last bytes, and that a killed save
leaves nothing.
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
    """True for a URL of another place than this machine's file systems."""
    protocol, url, _ = str(path).partition("://")
    return bool(url) and protocol not in _LOCAL


def put_in_store(
    tree: dict[str, Any], about: SaveInfo, path: str, options: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint into a store; the last call of all replaces the one of that name.

    Args:
        tree: as for ``write_file``.
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
            with suppress(Exception):  # an error of the store must not hide this one
                system.rm_file(beside)


@contextmanager
def local_copy(path: str) -> Iterator[Path]:
    """A store's checkpoint as a file of this machine; tensors mapped from it stay valid afterwards.

    Raises:
        MissingCheckpointError: it does not exist.
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
    """Remove a checkpoint, if it exists."""
    system, place = url_to_fs(path)
    if system.exists(place):
        system.rm_file(place)


SHARDED_ADVICE = (
    "A sharded checkpoint needs a folder that all ranks write to. Save it on a local or mounted file system, "
    "and copy the folder, or use checkpoint='full', which a store holds."
)
