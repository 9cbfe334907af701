"""Hyperparameters that are objects: stored beside their plain form, and read only with
``weights_only=False``.

In the file of a full checkpoint such hyperparameters are a call, ``whole(plain, pickled)``, by this module's
name. ``torch.load(weights_only=False)`` makes that call, and returns what a file of plain Lightning would.
For ``weights_only=True`` the name is on PyTorch's list of safe ones, and refers to ``plain_only``: no pickle
is opened. Where this package is not installed, the file is refused.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from typing import Any

import torch

from lightning_cp.checkpoint.tree import is_plain


def whole(plain: Any, pickled: bytes) -> Any:
    """Unpickle the objects; called only with ``weights_only=False``."""
    return torch.load(io.BytesIO(pickled), map_location="cpu", weights_only=False)


def plain_only(plain: Any, pickled: bytes) -> Any:
    """The plain form, which runs no code; called in place of ``whole`` otherwise."""
    return plain


SAFE: list[Any] = [(plain_only, f"{whole.__module__}.{whole.__qualname__}")]
"""For ``torch.serialization.add_safe_globals``: the function for the name ``whole`` with
``weights_only=True``.
"""


class WithObjects:
    """A value of a tree in its written form; not a dataclass, as Lightning takes those apart."""

    def __init__(self, plain: Any, pickled: bytes) -> None:
        self.plain, self.pickled = plain, pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return whole, (self.plain, self.pickled)


def pickled_objects(
    tree: Mapping[str, Any], keys: Collection[str]
) -> tuple[dict[str, bytes], list[str]]:
    """Pickles of a tree's entries that are more than plain containers.

    Args:
        tree: the state.
        keys: of the top level, entries that may have a pickle.

    Returns:
        The pickles by key, and names of entries that cannot be pickled.
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
    """The value as ``torch.save`` pickles it; ``None`` if that fails for any reason."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:
        return None
    return buffer.getvalue()
