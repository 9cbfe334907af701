"""What a load leaves of a checkpoint: it is there, and is read when somebody looks at it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from lightning_cp.checkpoint.failures import shown
from lightning_cp.checkpoint.manifest import read_manifest
from lightning_cp.checkpoint.read import Checkpoint
from lightning_cp.errors import CheckpointError


class Remainder(MutableMapping[Any, Any]):
    """Some entries of a checkpoint's top level, each read on its first use; by this rank alone.

    So nobody holds a whole model or optimizer that nobody has asked for.

    Args:
        opened: the checkpoint.
        keys: of its top level.
    """

    def __init__(self, opened: Checkpoint, keys: Iterable[Any]) -> None:
        self._opened = opened.alone()
        self._read: dict[Any, Any] = {}
        self._keys = dict.fromkeys(keys)

    def __getitem__(self, key: Any) -> Any:
        """The value, with whole tensors.

        Raises:
            KeyError: there is none.
            CheckpointError: it cannot be read any more.
        """
        if key not in self._keys:
            raise KeyError(key)
        if key not in self._read:
            self._require_unchanged(key)
            self._read[key] = self._opened.read(keys=[key])[key]
        return self._read[key]

    def _require_unchanged(self, key: Any) -> None:
        """Refuse a folder that was replaced; a file is held since it was opened."""
        path, opened = self._opened.path, self._opened.manifest
        if path.is_file() or (opened is not None and read_manifest(path).save == opened.save):
            return
        raise CheckpointError(
            f"{shown(path)} was replaced after it was opened, so {key!r} cannot be read any more. Load it "
            "again."
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self._keys[key] = None
        self._read[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._keys[key]
        self._read.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"Remainder({shown(self._opened.path)}: {', '.join(map(str, self))})"
