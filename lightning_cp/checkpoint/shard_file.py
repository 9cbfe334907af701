"""One rank's part of a sharded checkpoint: a safetensors file, written and read without that package.

Eight bytes of header length, a JSON header, then the raw values: nothing in it can run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_cp.checkpoint.pretrained.write import NAMES, Shape, header_bytes
from lightning_cp.faults.signs import pieces

_ALIGNED = 64
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Block:
    """A block to be written.

    Args:
        key: the tensor's name.
        shape: of the whole tensor.
        offsets: of the block in it.
        data: the block, on any device.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor


@dataclass(frozen=True)
class Written:
    """Where a block is."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int


def write_shard(
    path: Path, blocks: Sequence[Block], said: Mapping[str, str]
) -> tuple[list[Written], str, int]:
    """Write blocks into a new file, one at a time, and have it on the disk.

    Args:
        path: the file.
        blocks: what it holds.
        said: strings that the header repeats: which save and step this is.

    Returns:
        Where each block is, the file's sha256, and its size in bytes.
    """
    ordered = sorted(
        blocks, key=lambda block: -block.data.element_size()
    )  # so that all are aligned
    header = _header(ordered, said)
    digest, written, at = hashlib.sha256(), [], len(header)
    with path.open("xb") as file:
        for part in pieces(memoryview(header)):
            file.write(part)
            digest.update(part)
        for block in ordered:
            for part in pieces(_bytes_of(block.data)):
                file.write(part)
                digest.update(part)
            written.append(_place(block, path.name, at))
            at += block.data.nbytes
        file.flush()
        os.fsync(file.fileno())
    return written, digest.hexdigest(), at


def mapped(path: Path, begin: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A block of a file, read when its values are."""
    count = torch.Size(sizes).numel()
    if count == 0:
        return torch.empty(tuple(sizes), dtype=dtype)
    end = begin + count * dtype.itemsize
    data = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
    return data[begin:].view(dtype).view(tuple(sizes))


def said_by(path: Path) -> dict[str, str]:
    """The strings of a shard's header; empty if it has none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _LARGEST_HEADER else {}
        return {str(k): str(v) for k, v in header.get("__metadata__", {}).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _header(blocks: Sequence[Block], said: Mapping[str, str]) -> bytes:
    """Of dtypes that the format does not have, the bytes are written."""
    held: dict[str, Shape] = {}
    for block in blocks:
        data, name = block.data, block.key
        if tuple(data.shape) != block.shape:
            name += f"@{','.join(map(str, block.offsets))}"
        known = data.dtype in NAMES
        held[name] = Shape(data.dtype, tuple(data.shape)) if known else _bytes_like(data)
    return header_bytes(held, said, _ALIGNED)


def _bytes_like(x: torch.Tensor) -> Shape:
    return Shape(torch.uint8, (x.nbytes,))


def _place(block: Block, file: str, at: int) -> Written:
    dtype = str(block.data.dtype).removeprefix("torch.")
    return Written(block.key, dtype, block.shape, block.offsets, tuple(block.data.shape), file, at)


def _bytes_of(x: torch.Tensor) -> memoryview:
    flat = x.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
