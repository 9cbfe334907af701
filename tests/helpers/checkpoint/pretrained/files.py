"""Safetensors files written by hand, right or wrong in every way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


GOOD: dict[str, Any] = {"a": entry("F32", [2, 2], 0, 16), "b": entry("F32", [2], 16, 24)}
"""Two tensors of 24 bytes."""


def raw(header: bytes, data: bytes = bytes(24), length: int | None = None) -> bytes:
    """A file of these parts; ``length`` is what it claims of its header."""
    claimed = len(header) if length is None else length
    return claimed.to_bytes(8, "little") + header + data


def made_of(header: Any, size: int = 24) -> bytes:
    """A file with this header and ``size`` bytes of data."""
    return raw(json.dumps(header).encode(), bytes(size))


def write_index(folder: Path, weight_map: Any) -> None:
    """An index; the files are the caller's."""
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
