"""Places in a save at which a rank can be made to kill itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_cp.checkpoint import atomic as durable
from lightning_cp.checkpoint import full, shards
from lightning_cp.checkpoint import full as full_file

NAME = "last.ckpt"
"""The checkpoint that is saved."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(module: Any, name: str, when: Callable[..., bool] = lambda *args: True) -> None:
    own = getattr(module, name)

    def dies(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            die()
        return own(*args, **kwargs)

    setattr(module, name, dies)


def in_data() -> None:
    """Half of the data is written."""
    _dying(full_file.HashingFile, "write", lambda file, data: file.count > 2**20)
    own = shards.write_shard

    def half(path: Path, *args: Any) -> Any:
        own(path, *args)
        os.truncate(path, path.stat().st_size // 2)
        die()

    shards.write_shard = half


def before_manifest() -> None:
    """All data is written, and nothing says so."""
    _dying(shards, "write_durably", lambda path, data: path.name == "manifest.json")
    _dying(full_file.struct, "pack")


def before_rename() -> None:
    """Everything is written, under another name."""
    _dying(shards, "put_in_place")
    _dying(full, "put_in_place")


def while_replacing() -> None:
    """The old folder is set aside; a file is replaced in one step."""
    _dying(Path, "replace", lambda staged, target: target.name == NAME and staged.is_dir())


def after_rename() -> None:
    """The checkpoint has its name; of a folder, the one before is still set aside."""
    _dying(durable, "_keep_name")


PLACES = {
    place.__name__: place
    for place in (in_data, before_manifest, before_rename, while_replacing, after_rename)
}
