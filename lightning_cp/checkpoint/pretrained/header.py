"""The header of a safetensors file, checked before anything is allocated for it.

The format: 8 bytes with the length of a header, the header as JSON (``name -> dtype, shape, data_offsets``),
then the tensors' bytes, little-endian and in C order, without a gap.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from lightning_cp.errors import CheckpointError

HEADER_LIMIT = 100_000_000
"""Bytes; the limit of the format's own implementation."""

NAME_LIMIT = 1_000
"""Characters of a tensor's name; names are told to other ranks, and shown."""
SIZE_LIMIT = 2**63
"""Of a dimension or an offset: what 64 bits hold."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The byte of the file where it begins."""
    state: tuple[int, ...]
    """Of the file when this was read, see ``state_of``."""

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a file, in the order of its header.

    Raises:
        CheckpointError: a file that is no safetensors file, or not whole; says what is wrong with which
            tensor. Nothing was allocated for any of them.
    """
    try:
        with open_regular(file) as stream:
            size, state = os.fstat(stream.fileno()).st_size, state_of(stream.fileno())
            length = _header_length(file, stream.read(8), size)
            text = stream.read(length)
    except OSError as error:
        _refuse(file, f"it cannot be read ({error.strerror})")
    if len(text) < length:
        _refuse(file, "it is truncated within its header")
    found = parse(file, text)
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        _refuse(file, "its __metadata__ is not a mapping of text to text")
    for name in found:
        require_name(file, name)
    entries = {name: _entry(file, name, said, 8 + length, state) for name, said in found.items()}
    _require_cover(file, entries, 8 + length, size)
    return entries


def state_of(fd: int) -> tuple[int, ...]:
    """Marks of a file that change once it is replaced or written to: its place, length and time."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def require_name(file: Path, name: str) -> None:
    """A tensor's name is text that can be shown.

    Raises:
        CheckpointError: it is too long, or has characters that a terminal might obey.
    """
    if len(name) > NAME_LIMIT:
        _refuse(
            file, f"a tensor's name has {len(name):,} characters, and {NAME_LIMIT:,} is the limit"
        )
    if not name.isprintable():
        _refuse(file, f"{name!r} has characters that cannot be shown")


def open_regular(file: Path) -> BinaryIO:
    """Open for reading what is a regular file: a pipe, say, would be waited for forever.

    Raises:
        CheckpointError: it is no file.
        OSError: it is not there, or may not be read.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):  # noqa: PTH116 - follows links, as opening does
        _refuse(file, "it is no regular file")
    return file.open("rb", buffering=0)


def parse(file: Path, text: bytes, what: str = "its header") -> dict[str, Any]:
    """JSON with an object at the top, in which no name comes twice.

    Args:
        file: for messages.
        text: what it holds.
        what: what that is called.

    Raises:
        CheckpointError: anything else.
    """
    try:
        found = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(file, f"{what} is not valid JSON ({_short(error)})")
    if not isinstance(found, dict):
        _refuse(file, f"{what} is not a JSON object")
    return found


def _short(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} comes twice")
        found[name] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _header_length(file: Path, start: bytes, size: int) -> int:
    if len(start) < 8:
        _refuse(file, f"it is truncated: {size} bytes, where a header's length takes 8")
    length = int.from_bytes(start, "little")
    if length > HEADER_LIMIT:
        _refuse(file, f"its header claims {length:,} bytes, and {HEADER_LIMIT:,} is the limit")
    if length > size - 8:
        _refuse(file, f"it is truncated: its header claims {length:,} bytes, it has {size - 8:,}")
    return length


def _entry(file: Path, name: str, said: Any, data: int, state: tuple[int, ...]) -> Entry:
    if not isinstance(said, dict) or set(said) != {"dtype", "shape", "data_offsets"}:
        _refuse(file, f"of {name!r} it does not say exactly dtype, shape and data_offsets")
    if not isinstance(said["dtype"], str) or said["dtype"] not in DTYPES:
        _refuse(
            file,
            f"{name!r} has dtype {str(said['dtype'])[:80]!r}; those known are {', '.join(DTYPES)}",
        )
    shape = _integers(file, name, "shape", said["shape"])
    offsets = _integers(file, name, "data_offsets", said["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(file, f"{name!r} has data_offsets {list(offsets)}, not a start and an end")
    entry = Entry(name, file, DTYPES[said["dtype"]], shape, data + offsets[0], state)
    if entry.nbytes != offsets[1] - offsets[0]:
        _refuse(
            file,
            f"{name!r} of shape {list(shape)} and dtype {said['dtype']} takes {entry.nbytes:,} bytes, but "
            f"its data_offsets say {offsets[1] - offsets[0]:,}",
        )
    return entry


def _integers(file: Path, name: str, what: str, said: Any) -> tuple[int, ...]:
    if not isinstance(said, list) or not all(type(x) is int and x >= 0 for x in said):
        _refuse(file, f"{name!r} has {what} {str(said)[:80]}, not a list of integers from 0 on")
    if len(said) > 64:
        _refuse(file, f"{name!r} has {len(said)} dimensions, and 64 is the limit")
    if max(said, default=0) >= SIZE_LIMIT:
        _refuse(file, f"{name!r} has {what} of numbers that take more than 63 bits")
    return tuple(said)


def _require_cover(file: Path, entries: Mapping[str, Entry], data: int, size: int) -> None:
    """Tensors lie one after the other to the end of the file, none over another one."""
    at, before = data, "the header"
    for entry in sorted(entries.values(), key=lambda x: (x.start, x.nbytes)):
        if entry.start < at:
            _refuse(file, f"{entry.name!r} overlaps {before}")
        if entry.start > at:
            _refuse(file, f"there is a gap of {entry.start - at:,} bytes before {entry.name!r}")
        at, before = entry.start + entry.nbytes, repr(entry.name)
    if at > size:
        _refuse(file, f"it is truncated: its tensors end at byte {at:,}, the file at {size:,}")
    if at < size:
        _refuse(file, f"{size - at:,} bytes after its last tensor belong to none")


def _refuse(file: Path, what: str) -> NoReturn:
    raise CheckpointError(
        f"{file.name} is refused: {what}. Nothing was loaded. Fetch the file again, or have who made it "
        "write it again."
    )
