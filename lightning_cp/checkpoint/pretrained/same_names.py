"""Names that only the model or only the checkpoint has: which of them are allowed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_cp.checkpoint.pretrained.index import Checkpoint
from lightning_cp.errors import CheckpointError


@dataclass(frozen=True)
class Allowed:
    """Names that one side may lack."""

    missing: Sequence[str] = ()
    """Patterns (``*`` is anything) of parameters that need not be in the files."""
    unexpected: Sequence[str] = ()
    """Patterns of keys that may be left unread."""
    strict: bool = True
    """Nothing else may be."""

    def by_lists(self) -> Allowed:
        """The same with its lists in force, where everything is allowed as well."""
        return replace(self, strict=True)

    def unread(self, key: str) -> bool:
        """True if a key of the files need not be read, nor compared."""
        return not self.strict or _matches(key, self.unexpected)

    def refused_missing(self, names: Iterable[str]) -> list[str]:
        """Those that are not allowed."""
        return [name for name in names if self.strict and not _matches(name, self.missing)]

    def refused_unexpected(self, keys: Iterable[str]) -> list[str]:
        """Those that are not allowed."""
        return [key for key in keys if not self.unread(key)]


def require_names(
    missing: Sequence[str], unexpected: Sequence[str], checkpoint: Checkpoint, prefix: str
) -> None:
    """Refuse names that only one side has, and that are not allowed.

    Raises:
        CheckpointError: naming them.
    """
    if not missing and not unexpected:
        return
    said = []
    if missing:
        said.append(f"it lacks {len(missing)} parameters of the model ({some(missing)})")
    if unexpected:
        said.append(f"it has {len(unexpected)} tensors that the model lacks ({some(unexpected)})")
    at = f" under {prefix!r}" if prefix else ""
    raise CheckpointError(
        f"{checkpoint.shown} is not of this model{at}: {'; '.join(said)}. Nothing was "
        "loaded. Other names are declared with keys=, what may be left out with allow_missing= and "
        "allow_unexpected= (or strict=False); "
        f"prefix= says which part of the model it is of.{checkpoint.advice}"
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """True if one of the patterns is of this name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def some(names: Sequence[str], at_most: int = 5) -> str:
    """The first ones, for a message."""
    return ", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "")
