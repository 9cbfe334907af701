"""Opening of a checkpoint of either form, the unloaded entries of one, and the latest one of a folder.

A checkpoint is verified first; tensors and unloaded entries are read on demand. The most recently completed
one of a folder is found from the checkpoints alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, ItemsView, Iterable, Iterator, ValuesView
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.atomic import BEFORE, display_path, leftovers, locate, machine_id
from lightning_cp.checkpoint.consistency import first_different_path, path_difference
from lightning_cp.checkpoint.full import (
    NOTES_KEY,
    OBJECTS_KEY,
    load_file,
    manifest_of_file,
    verify_file,
)
from lightning_cp.checkpoint.manifest import NAME as MANIFEST
from lightning_cp.checkpoint.manifest import Manifest, is_foreign, read_manifest, verify
from lightning_cp.checkpoint.reshard import StoredTensor, as_stored, empty_like, read_into
from lightning_cp.checkpoint.shards import INDEX, STATE, header_strings, stored_tensor
from lightning_cp.checkpoint.store import is_store
from lightning_cp.checkpoint.tree import Place, decode, map_leaves, restore_types, unique_name
from lightning_cp.comm.consensus import World, error_summary
from lightning_cp.errors import CheckpointError, MissingCheckpointError

_OPENING = "opening a checkpoint"
T = TypeVar("T")
Template = Callable[[Place], torch.Tensor | None]

_UNREAD = object()
"""Marks a value that was not read yet."""

_LEGACY_NAME = "latest"
"""A file of earlier releases, beside the checkpoints: it named the newest one."""
_LONGEST = 4096


@dataclass
class Checkpoint:
    """An opened checkpoint.

    Args:
        path: of the checkpoint.
        manifest: ``None`` if another program wrote the file, so that nothing could be verified.
        tree: the saved state, with ``StoredTensor`` for tensors.
        ours: the saver's notes.
        world: the ranks that have opened it together, and read it together.
    """

    path: Path
    manifest: Manifest | None
    tree: Any
    ours: dict[str, Any]
    world: World

    def read(
        self, template: Template = lambda place: None, keys: Container[Any] | None = None
    ) -> Any:
        """The tree with tensors.

        Args:
            template: returns, for a place such as ``("state_dict", "head.weight")``, a tensor with the
                wanted distribution.
            keys: of the top level, the entries to read; all by default.

        Returns:
            New tensors: ``DTensor`` where the template is one of that shape, whole ones on the CPU elsewhere.

        Raises:
            CheckpointError: on every rank: it cannot be read on some.
        """
        wanted = self.tree if keys is None else {k: x for k, x in self.tree.items() if k in keys}
        return _run_on_all(self.path, self.world, lambda: self._read(wanted, template))

    def for_this_rank(self) -> Checkpoint:
        """The same checkpoint, to be read by this rank alone."""
        return replace(self, world=single_rank_world())

    def _read(self, tree: Any, template: Template) -> Any:
        targets: dict[str, torch.Tensor] = {}
        stored: dict[str, StoredTensor] = {}

        def visit(place: Place, leaf: StoredTensor) -> torch.Tensor:
            wanted = template(place)
            if not isinstance(wanted, DTensor) or tuple(wanted.shape) != leaf.shape:
                return leaf.whole()
            name = unique_name(place, stored)
            stored[name] = leaf
            targets[name] = empty_like(wanted, leaf)
            return targets[name]

        made = map_stored(tree, visit)
        read_into(targets, stored)
        return restore_types(made, self.ours.get("notes", []))


def open_checkpoint(
    path: Path, world: World | None = None, *, weights_only: bool = True
) -> Checkpoint:
    """Verify a checkpoint and read all of it except the tensors' values.

    Args:
        path: a file or a folder.
        world: the ranks that open it together and share the work of hashing; this process alone by
            default.
        weights_only: ``False`` if the user trusts the file: objects in it are unpickled, which runs their
            code.

    Raises:
        MissingCheckpointError: (also a FileNotFoundError) the path does not exist.
        CheckpointError: on every rank: it is incomplete, damaged or not a checkpoint; names the file.
    """
    named, world = Path(path), world or single_rank_world()
    machines = _machines(named, world)
    near = [rank for rank, machine in enumerate(machines) if machine == machines[world.rank]]
    share = slice(near.index(world.rank), None, len(near))
    place, manifest = _run_on_all(named, world, lambda: _verified(locate(named), share))
    manifests = world.gather(manifest.render() if manifest else "")
    if len(set(manifests)) > 1:
        odd = first_different_path(world, named)
        where = path_difference(*odd) if odd else display_path(named)
        raise CheckpointError(
            f"ranks see different checkpoints at {where}. Give all of them the same path, of a file system "
            "that all share, and load it when no other run saves there."
        )
    return _run_on_all(place, world, lambda: _opened(place, manifest, world, weights_only))


def _machines(path: Path, world: World) -> list[str]:
    """The machine of each rank, once all of them have come to open a checkpoint."""
    every: list[Any] = world.gather((_OPENING, machine_id()))
    for rank, said in enumerate(every):
        if not (isinstance(said, tuple) and len(said) == 2 and said[0] == _OPENING):
            raise CheckpointError(
                f"rank {world.rank} loads {display_path(path)}, and rank {rank} loads nothing. Give every "
                "rank "
                "the same ckpt_path, of a file system that all share."
            )
    return [machine for _, machine in every]


def _run_on_all(path: Path, world: World, action: Callable[[], T]) -> T:
    """The result of this rank's ``action``, once that of every rank went well."""
    try:
        return world.run_on_all(
            action,
            lambda said: CheckpointError(
                f"{display_path(path)} was refused by another rank ({said.rstrip('.')})."
            ),
        )
    except MissingCheckpointError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from None


def _opened(path: Path, manifest: Manifest | None, world: World, weights_only: bool) -> Checkpoint:
    tree, ours = _in_folder(path, manifest) if path.is_dir() else _in_file(path, weights_only)
    return Checkpoint(path, manifest, tree, ours, world)


def single_rank_world() -> World:
    """A world of this process."""
    world = World()
    world.size, world.rank = 1, 0
    return world


def _verified(path: Path, share: slice) -> tuple[Path, Manifest | None]:
    """Verify a checkpoint; this rank hashes the files of ``share``, with all ranks of its machine hashing
    all.
    """
    _check_exists(path)
    if path.is_dir():
        return path, _verified_folder(path, share)
    manifest = manifest_of_file(path)
    if manifest is not None and share.start == 0:
        verify_file(path, manifest)
    return path, manifest


def _check_exists(path: Path) -> None:
    if not path.exists():
        near = _names_nearby(path)
        more = f" and {len(near) - 5} more" if len(near) > 5 else ""
        there = f" That folder has: {', '.join(near[:5])}{more}." if near else ""
        if path.is_symlink():
            there = f" It is a link to {path.readlink().name}, which is not there.{there}"
        raise MissingCheckpointError(
            f"Checkpoint file not found: {display_path(path)}.{there} Give the path of one that was saved."
        )


def _names_nearby(path: Path) -> list[str]:
    """Names in its folder that may be checkpoints, the newest first."""
    try:
        files = [x for x in path.parent.iterdir() if not x.name.startswith(".")]
        kinds = {path.suffix, ".ckpt"} - {""}
        known = [x for x in files if x.suffix in kinds or (x / MANIFEST).is_file()]
        return [x.name for x in sorted(known, key=lambda x: x.stat().st_mtime, reverse=True)]
    except OSError:  # missing or unreadable folder
        return []


def _verified_folder(path: Path, share: slice) -> Manifest:
    manifest = read_manifest(path)
    own = sorted(manifest.files)[share]
    try:
        verify(path, manifest, own)
    except CheckpointError as error:
        _raise_if_other_save(path, manifest, own, error)
        raise
    return manifest


def _raise_if_other_save(
    path: Path, manifest: Manifest, names: list[str], error: CheckpointError
) -> None:
    """Raise another error if a shard belongs to another save."""
    for name in names:
        said = header_strings(path / name) if name.startswith("shard-") else {}
        if said.get("save") not in (None, manifest.save):
            raise CheckpointError(
                f"{path.name}/{name} belongs to another save, of step {said.get('step')}: this checkpoint "
                f"is of step {manifest.about.step}. Nothing was loaded."
            ) from error


def checkpoint_from_tree(path: Path, tree: Any, *, weights_only: bool = True) -> Checkpoint:
    """A checkpoint that a plugin has read already, so that its files cannot be verified."""
    return Checkpoint(path, None, *_split_notes(tree, weights_only), single_rank_world())


def _in_file(path: Path, weights_only: bool) -> tuple[Any, dict[str, Any]]:
    return _split_notes(load_file(path, weights_only=weights_only), weights_only)


def _split_notes(tree: Any, weights_only: bool) -> tuple[Any, dict[str, Any]]:
    """A saved tree, and the saver's notes beside it."""
    ours = tree.pop(NOTES_KEY, {}) if isinstance(tree, dict) else {}
    ours = ours if isinstance(ours, dict) else {}
    if not weights_only:  # the notes would restore objects from their plain form
        made = ours.get(OBJECTS_KEY, [])
        ours["notes"] = [note for note in ours.get("notes", []) if note[0][0] not in made]
    return _stored(tree), ours


def _in_folder(path: Path, manifest: Manifest | None) -> tuple[Any, dict[str, Any]]:
    assert manifest is not None
    try:
        index = json.loads((path / INDEX).read_text())["tensors"]
        state = json.loads((path / STATE).read_text())
        stored = {key: stored_tensor(path, key, entry, manifest) for key, entry in index.items()}
        tree = decode(state["tree"], lambda key: stored[key])
        ours = decode(state["ours"], lambda key: stored[key])
    except (KeyError, ValueError, TypeError) as error:
        raise _unreadable(path, error) from None
    return tree, ours


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{display_path(path)} cannot be read ({error_summary(error)}). Nothing was loaded."
    )


def _stored(tree: Any) -> Any:
    """The tree of a file, with ``StoredTensor`` for tensors."""
    return map_leaves(tree, lambda place, x: as_stored(x))


def map_stored(tree: Any, visit: Callable[[Place, StoredTensor], Any]) -> Any:
    """The tree with every ``StoredTensor`` replaced."""
    return map_leaves(tree, visit, leaf=StoredTensor)


class LazyEntries(dict[Any, Any]):
    """Some entries of a checkpoint's top level; this rank reads those with tensors on first use.

    A whole model or optimizer that is not used need not fit into memory. It is a dictionary, as Fabric
    documents for a load, so all methods of ``dict`` that bypass ``__getitem__`` are overridden. Pickles and
    copies by the module ``copy`` are plain dictionaries of values.
    """

    _opened: Checkpoint | None = None

    @classmethod
    def of(cls, opened: Checkpoint, keys: Iterable[Any]) -> Self:
        """Entries of an opened checkpoint.

        Args:
            opened: the checkpoint.
            keys: of its top level.
        """
        made = cls(dict.fromkeys(keys, _UNREAD))
        made._opened = opened.for_this_rank()
        at_once = [key for key in made if not _has_tensors(opened.tree[key])]
        made.update(made._opened.read(keys=at_once))
        return made

    def __getitem__(self, key: Any) -> Any:
        """The value, with whole tensors.

        Raises:
            KeyError: unknown key.
            CheckpointError: it can no longer be read.
        """
        value = super().__getitem__(key)
        if value is _UNREAD:
            assert self._opened is not None
            _check_unchanged(self._opened, key)
            value = self._opened.read(keys=[key])[key]
            self[key] = value
        return value

    def __iter__(self) -> Iterator[Any]:
        """As in any dictionary; without this override ``dict(rest)`` would bypass ``__getitem__``."""
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        """The value, or ``default`` if there is none."""
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The value; if there is none, ``default``, which is stored."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove a key and return its value."""
        if key in self:
            self[key]  # read it first
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        """Remove the last entry and return it."""
        for key in reversed(self):
            return key, self.pop(key)
        raise KeyError("there is nothing left")

    def items(self) -> Any:
        """A view that reads each value when it is reached."""
        return ItemsView(self)

    def values(self) -> Any:
        """A view that reads each value when it is reached."""
        return ValuesView(self)

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return dict(self) != other

    def copy(self) -> Self:
        """Another object with the same entries, which reads separately."""
        made = type(self)()
        made._opened = self._opened
        dict.update(made, dict.items(self))
        return made

    def __or__(self, other: Any) -> Any:
        if not isinstance(other, dict):
            return NotImplemented
        made = self.copy()
        made.update(other)
        return made

    def __ror__(self, other: Any) -> Any:
        return {**other, **self} if isinstance(other, dict) else NotImplemented

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        where = f"{display_path(self._opened.path)}: " if self._opened is not None else ""
        return f"LazyEntries({where}{', '.join(map(str, self))})"


def _has_tensors(tree: Any) -> bool:
    found: list[Any] = []
    map_stored(tree, lambda place, leaf: found.append(place))
    return bool(found)


def _check_unchanged(opened: Checkpoint, key: Any) -> None:
    """Check that a folder was not replaced or deleted; a file stays open since the start."""
    if opened.manifest is None or opened.manifest.form != "sharded":
        return
    is_there = os.path.lexists(opened.path)
    if opened.path.is_dir() and read_manifest(opened.path).save == opened.manifest.save:
        return
    raise CheckpointError(
        f"{display_path(opened.path)} was {'replaced' if is_there else 'removed'} after it was opened, so "
        f"{key!r} "
        "cannot be read any more. Load it again, and name in the state what is needed of it."
    )


def latest_checkpoint(folder: str | PathLike[str]) -> Path | None:
    """The checkpoint of this package that was completed last in a folder; links do not count.

    A ``latest`` file of an earlier release counts until a checkpoint is newer than that file. The result has
    not been verified; reading it does that.

    Raises:
        CheckpointError: the folder is in a store.
    """
    if is_store(folder):
        raise CheckpointError(
            f"{folder} is in a store, whose files do not tell which checkpoint is the newest. Name the "
            "checkpoint by its path."
        )
    folder = Path(folder)
    if not folder.is_dir():
        return None
    times = {path: saved_at(path) for path in _checkpoints(folder)}
    named = _legacy_latest(folder / _LEGACY_NAME)
    if named is not None:
        times[named] = max(times.get(named, 0), (folder / _LEGACY_NAME).stat().st_mtime_ns)
    return max(times, key=lambda path: (times[path], path == named), default=None)


def saved_at(path: Path) -> int:
    """The time in nanoseconds of a checkpoint of either form: that of its file or its manifest."""
    manifest = path / MANIFEST
    return (manifest if manifest.is_file() else path).stat().st_mtime_ns


def set_saved_at(path: Path, time: int) -> None:
    """Set the time that ``saved_at`` returns."""
    for each in (path, path / MANIFEST):
        if each.exists():
            os.utime(each, ns=(time, time))


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Completed checkpoints of a folder, including one that a killed save has renamed."""
    for path in folder.iterdir():
        if not path.name.startswith(".") and not path.is_symlink() and _is_ours(path):
            yield path
    for path, (name, why) in leftovers(folder):
        if why == BEFORE and not os.path.lexists(folder / name):
            yield path


def _is_ours(path: Path) -> bool:
    """True if a save has written it; it may be damaged."""
    if path.is_dir():
        return not is_foreign(path)
    try:
        return path.is_file() and manifest_of_file(path) is not None
    except CheckpointError:
        return True


def _legacy_latest(place: Path) -> Path | None:
    """The checkpoint that a ``latest`` file names, if it exists."""
    try:
        with place.open("rb") as file:
            name = file.read(_LONGEST).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not name or not name.isprintable() or name != Path(name).name:
        return None
    path = locate(place.with_name(name))
    return path if path.exists() else None
