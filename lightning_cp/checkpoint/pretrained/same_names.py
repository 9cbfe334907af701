"""Names that only the model or only the checkpoint has: which of them are allowed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from lightning_cp.checkpoint.pretrained.index import Checkpoint
from lightning_cp.errors import CheckpointError


def require_names(
    missing: Iterable[str],
    unexpected: Iterable[str],
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
    checkpoint: Checkpoint,
    prefix: str,
) -> None:
    """Refuse names that only one side has, where no pattern allows it.

    Raises:
        CheckpointError: naming them.
    """
    missing = [name for name in missing if not matches(name, allow_missing)]
    unexpected = [key for key in unexpected if not matches(key, allow_unexpected)]
    if not missing and not unexpected:
        return
    said = []
    if missing:
        said.append(f"it lacks {len(missing)} parameters of the model ({some(missing)})")
    if unexpected:
        said.append(f"it has {len(unexpected)} tensors that the model lacks ({some(unexpected)})")
    at = f" under {prefix!r}" if prefix else ""
    raise CheckpointError(
        f"the checkpoint {checkpoint.path.name!r} is not of this model{at}: {'; '.join(said)}. Nothing was "
        "loaded. Other names are declared with keys=, what may be left out with allow_missing= and "
        "allow_unexpected= (or strict=False); "
        "prefix= says which part of the model it is of."
    )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns is of this name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def some(names: Sequence[str], at_most: int = 5) -> str:
    """The first ones, for a message."""
    return ", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "")
