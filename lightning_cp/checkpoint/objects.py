"""Hyperparameters that are objects: kept beside their plain form, and read only on an explicit word.

In the one file of a full checkpoint such hyperparameters are a call, ``whole(plain, pickled)``, by this
module's name. ``torch.load(weights_only=False)`` makes that call, and gives what a file of plain Lightning
would. For ``weights_only=True`` the name is on PyTorch's list of safe ones, and stands there for
``plain_only``: no pickle is opened. Where this package is not installed, the file is refused.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from typing import Any

import torch

from lightning_cp.checkpoint.tree import is_plain


def whole(plain: Any, pickled: bytes) -> Any:
    """The objects; called where a user has said ``weights_only=False``."""
    return torch.load(io.BytesIO(pickled), map_location="cpu", weights_only=False)


def plain_only(plain: Any, pickled: bytes) -> Any:
    """The object as far as it is known without running code; called in place of ``whole`` everywhere else."""
    return plain


SAFE: list[Any] = [(plain_only, f"{whole.__module__}.{whole.__qualname__}")]
"""For ``torch.serialization.add_safe_globals``: what ``weights_only=True`` makes of the name ``whole``."""


class WithObjects:
    """A value of a tree as it is written; no dataclass, as Lightning takes those apart."""

    def __init__(self, plain: Any, pickled: bytes) -> None:
        self.plain, self.pickled = plain, pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return whole, (self.plain, self.pickled)


def pickled_objects(
    tree: Mapping[str, Any], keys: Collection[str]
) -> tuple[dict[str, bytes], list[str]]:
    """Pickles of a tree's entries that are more than plain containers.

    Args:
        tree: what is to be saved.
        keys: of its top level, which entries may have a pickle.

    Returns:
        The pickles by key, and names of what cannot be pickled either.
    """
    made: dict[str, bytes] = {}
    left_out: list[str] = []
    for key in keys:
        value = tree.get(key)
        if is_plain(value):
            continue
        data = _pickled(value)
        if data is None and isinstance(value, dict):
            parts = {name: x for name, x in value.items() if _pickled(x) is not None}
            left_out += [f"{key}.{name}" for name in value if name not in parts]
            data = _pickled(parts)
        if data is None:
            left_out.append(key)
        else:
            made[key] = data
    return made, left_out


def _pickled(value: Any) -> bytes | None:
    """As ``torch.save`` writes it; ``None`` if it cannot be written, for any reason of the object's own."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:
        return None
    return buffer.getvalue()
