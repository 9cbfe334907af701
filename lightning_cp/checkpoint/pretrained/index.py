"""The files of a checkpoint and the tensors in them: plain names inside one directory, nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lightning_cp.checkpoint.durable import found
from lightning_cp.checkpoint.failures import shown
from lightning_cp.checkpoint.in_the_way import is_foreign
from lightning_cp.checkpoint.paths import local_path
from lightning_cp.checkpoint.pretrained.header import (
    HEADER_LIMIT,
    Entry,
    open_regular,
    parse,
    read_header,
    require_name,
)
from lightning_cp.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OF_A_RUN = (
    "A checkpoint of a training run is resumed with ckpt_path=. To begin another run from its weights, load "
    "them into the model (MyModule.load_from_checkpoint(file); of a folder, `python -m "
    "lightning_cp.checkpoint folder file` makes one file) and write them once with export_pretrained(model, "
    "new_path)."
)


@dataclass(frozen=True)
class Checkpoint:
    """The content of a directory, by the names in it."""

    path: Path
    entries: dict[str, Entry]
    alone: str = ""
    """The one file that was given, where others stand beside it."""

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def shown(self) -> str:
        """For messages."""
        return (
            f"the file {self.alone!r} alone" if self.alone else f"the checkpoint {self.path.name!r}"
        )

    @property
    def advice(self) -> str:
        """Advice if it is not of the model."""
        if not self.alone:
            return ""
        return f" Its folder has {INDEX}: give the folder, to load all of its files."


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and check every header of a checkpoint; no tensor is touched.

    Args:
        path: a directory with ``model.safetensors`` or ``model.safetensors.index.json``, or such a file.

    Raises:
        CheckpointError: there is none, it is damaged, not safetensors, or leads out of its directory.
        ConfigError: it is no path.
    """
    path, alone = found(local_path(path)), ""
    if not path.exists():
        raise CheckpointError(
            f"there is no checkpoint at {shown(path)!r}. Give a directory with {SINGLE} or {INDEX}. Names of "
            "the Hugging Face hub are not fetched from here: huggingface_hub.snapshot_download gives a "
            "directory."
        )
    if path.is_dir():
        chosen = _of_directory(path)
    else:
        path, chosen = path.parent, path
        if chosen.name != INDEX and (path / INDEX).is_file():
            alone = chosen.name
    if chosen.suffix in PICKLES:
        _refuse_pickle(chosen)
    files = _indexed(chosen) if chosen.name.endswith(".json") else {chosen.name: None}
    entries: dict[str, Entry] = {}
    for name in sorted(files):
        held = read_header(_inside(path, name))
        for key in files[name] or ():
            if key not in held:
                _refuse(chosen, f"it says that {key!r} is in {name}, which does not hold it")
        for key, entry in held.items():
            if key in entries:
                _refuse(chosen, f"{key!r} is in two files, {entries[key].file.name} and {name}")
            entries[key] = entry
    return Checkpoint(path, entries, alone)


def _of_directory(path: Path) -> Path:
    """The file of a directory to begin with."""
    single, index = path / SINGLE, path / INDEX
    if single.is_file() and index.is_file():
        _refuse(
            path, f"there are {SINGLE} and {INDEX}; give the path of the one that is to be loaded"
        )
    if single.exists() or index.exists():
        return single if single.exists() else index
    if not is_foreign(path.resolve()):
        raise CheckpointError(
            f"{shown(path)} holds no weights in Hugging Face's format. {_OF_A_RUN}"
        )
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    pickles = [x for x in sorted(path.iterdir()) if x.suffix in PICKLES]
    if pickles and not others:
        _refuse_pickle(pickles[0])
    what = f"there is neither {SINGLE} nor {INDEX}"
    if others:
        what = f"there are {len(others)} files such as {others[0].name}, and no {INDEX}"
    return _refuse(path, what)


def _indexed(index: Path) -> dict[str, list[str] | None]:
    """File -> keys, as the index says."""
    try:
        with open_regular(index) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > HEADER_LIMIT:
                _refuse(index, f"it has {size:,} bytes, and {HEADER_LIMIT:,} is the limit")
            text = stream.read(size)  # a limit above it would be allocated
    except OSError as error:
        _refuse(index, f"it cannot be read ({error.strerror})")
    said = parse(index, text, "the index").get("weight_map")
    if not isinstance(said, dict) or not said:
        _refuse(index, "it has no weight_map")
    files: dict[str, list[str] | None] = {}
    for key, name in said.items():
        require_name(index, key)
        if not isinstance(name, str):
            _refuse(index, f"the file of {key!r} is {str(name)[:80]}, not a name")
        if name in ("", ".", "..") or any(mark in name for mark in "/\\\0:"):
            _refuse(index, f"the file of {key!r} is {name[:80]!r}: only plain names are followed")
        if not name.endswith(".safetensors"):
            _refuse(index, f"the file of {key!r} is {name[:80]!r}, which is not a safetensors file")
        keys = files.setdefault(name, [])
        assert keys is not None
        keys.append(key)
    return files


def _inside(directory: Path, name: str) -> Path:
    """A file of the directory; links may stay inside, or lead to the blobs of the hub's own cache."""
    file = directory / name
    if not os.path.lexists(file):
        _refuse(directory, f"{name} is named, but there is no such file")
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError):  # Python 3.12 raises the former for a loop of links
        _refuse(directory, f"{name} is a link to a file that is not there")
    if not any(real.is_relative_to(root) for root in _roots(directory)):
        _refuse(directory, f"{name} is a link that leads out of the directory")
    return file


def _roots(directory: Path) -> list[Path]:
    """The directory; in the hub's cache, ``models--x/snapshots/y`` links to ``models--x/blobs``."""
    real = directory.resolve()
    cached = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    return [real, real.parent.parent / "blobs"] if cached else [real]


def _refuse_pickle(file: Path) -> NoReturn:
    raise CheckpointError(
        f"{file.name} is refused: such files are pickles, which can run any code when they are read. Only "
        "safetensors are loaded from outside. If you trust who made it, convert it once: "
        f"AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path). {_OF_A_RUN}"
    )


def _refuse(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"the checkpoint {path.name!r} is refused: {what}. Nothing was loaded.")
