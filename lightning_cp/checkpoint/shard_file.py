"""One rank's file of a sharded checkpoint: safetensors, written and read without that package.

Eight bytes of header length, a JSON header, then the raw values: nothing in it can run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from lightning_cp.checkpoint.atomic import display_path
from lightning_cp.checkpoint.manifest import Manifest
from lightning_cp.checkpoint.pretrained.writer import DTYPE_NAMES, TensorSpec, header_bytes
from lightning_cp.checkpoint.tensors import Chunk, StoredTensor
from lightning_cp.checkpoint.tree import dtype_named
from lightning_cp.errors import CheckpointError
from lightning_cp.watchdog.phase import pieces

_ALIGNED = 64
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Block:
    """A block to be written.

    Args:
        key: the tensor's name.
        shape: of the whole tensor.
        offsets: of the block in the tensor.
        data: the block, on any device.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor


@dataclass(frozen=True)
class BlockLocation:
    """The file and the position of a block."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int


def write_shard(
    path: Path, blocks: Sequence[Block], metadata: Mapping[str, str]
) -> tuple[list[BlockLocation], str, int]:
    """Write blocks into a new file, one at a time, and flush it to disk.

    Args:
        path: the file.
        blocks: its content.
        metadata: strings for the header: the save's id and step.

    Returns:
        The location of each block, the file's sha256, and its size in bytes.
    """
    ordered = sorted(
        blocks, key=lambda block: -block.data.element_size()
    )  # aligned for every dtype
    header = _header(ordered, metadata)
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


def map_block(path: Path, begin: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A block of a file, read when its values are used."""
    count = torch.Size(sizes).numel()
    if count == 0:
        return torch.empty(tuple(sizes), dtype=dtype)
    end = begin + count * dtype.itemsize
    data = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
    return data[begin:].view(dtype).view(tuple(sizes))


def header_strings(path: Path) -> dict[str, str]:
    """The strings of a shard's header; empty if it has none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _LARGEST_HEADER else {}
        return {str(k): str(v) for k, v in header.get("__metadata__", {}).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _header(blocks: Sequence[Block], metadata: Mapping[str, str]) -> bytes:
    """The header; blocks of dtypes that the format does not have are described as bytes."""
    held: dict[str, TensorSpec] = {}
    for block in blocks:
        data, name = block.data, block.key
        if tuple(data.shape) != block.shape:
            name += f"@{','.join(map(str, block.offsets))}"
        known = data.dtype in DTYPE_NAMES
        held[name] = TensorSpec(data.dtype, tuple(data.shape)) if known else _bytes_like(data)
    return header_bytes(held, metadata, _ALIGNED)


def _bytes_like(x: torch.Tensor) -> TensorSpec:
    return TensorSpec(torch.uint8, (x.nbytes,))


def _place(block: Block, file: str, at: int) -> BlockLocation:
    dtype = str(block.data.dtype).removeprefix("torch.")
    return BlockLocation(
        block.key, dtype, block.shape, block.offsets, tuple(block.data.shape), file, at
    )


def _bytes_of(x: torch.Tensor) -> memoryview:
    flat = x.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


# ``index.json`` of a sharded checkpoint: the dtype, shape and block locations of every tensor.


INDEX = "index.json"
_PLACE = ("offsets", "sizes", "file", "begin")
_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and sizes."""


def index_of(blocks: Sequence[BlockLocation]) -> dict[str, Any]:
    """The index of the blocks of all ranks."""
    found: dict[str, list[BlockLocation]] = {}
    for block in blocks:
        found.setdefault(block.key, []).append(block)
    tensors = {}
    for key, written in found.items():
        chunks = [{k: v for k, v in asdict(w).items() if k in _PLACE} for w in written]
        tensors[key] = {"dtype": written[0].dtype, "shape": written[0].shape, "chunks": chunks}
    return {"tensors": tensors}


def stored_tensor(
    folder: Path, key: str, entry: dict[str, Any], manifest: Manifest
) -> StoredTensor:
    """A tensor of a folder, to be read on demand.

    Args:
        folder: the checkpoint.
        key: the tensor's name in the index.
        entry: the tensor's entry in the index.
        manifest: names the verified files, and their sizes.

    Raises:
        CheckpointError: blocks are in other files, or do not make up the tensor.
    """
    shape, dtype = tuple(entry["shape"]), dtype_named(entry["dtype"])
    for x in entry["chunks"]:
        if x["file"] not in manifest.files:
            raise _wrong(folder, f"{key} is in {x['file']!r}, which the manifest does not name")
        end = x["begin"] + prod(x["sizes"]) * dtype.itemsize
        if not 0 <= x["begin"] <= end <= manifest.files[x["file"]].bytes:
            raise _wrong(folder, f"a block of {key} is outside {x['file']}")
    if not _fills(shape, [(tuple(x["offsets"]), tuple(x["sizes"])) for x in entry["chunks"]]):
        raise _wrong(folder, f"the blocks of {key} are not all of its shape {list(shape)}")
    return StoredTensor(dtype, shape, tuple(_chunk(folder, x, dtype) for x in entry["chunks"]))


def _chunk(folder: Path, x: dict[str, Any], dtype: torch.dtype) -> Chunk:
    read = partial(map_block, folder / x["file"], x["begin"], x["sizes"], dtype)
    return Chunk(tuple(x["offsets"]), tuple(x["sizes"]), read)


def _fills(shape: tuple[int, ...], blocks: Sequence[_Box]) -> bool:
    """True if blocks lie within a tensor and cover each element exactly once."""
    for offsets, sizes in blocks:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        for offset, size, whole in zip(offsets, sizes, shape, strict=True):
            if not 0 <= offset <= offset + size <= whole:
                return False
    held = [(offsets, sizes) for offsets, sizes in blocks if prod(sizes)]
    if prod(shape) != sum(prod(sizes) for _, sizes in held):
        return False
    cut = [dim for dim, whole in enumerate(shape) if any(sizes[dim] < whole for _, sizes in held)]
    begin = (0,) * len(shape)
    return _corners(held, cut) == _corners([(begin, shape)] if prod(shape) else [], cut)


def _corners(boxes: Iterable[_Box], dims: Sequence[int]) -> dict[tuple[int, ...], int]:
    """The number of boxes with each corner, with a sign that changes at each end of a dimension.

    Cumulative sums of these count the boxes that cover each element. So two sets of boxes with the same
    corners cover each element equally often, and thousands of boxes need not be compared with each other.
    """
    found: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        sides = [((offsets[dim], 1), (offsets[dim] + sizes[dim], -1)) for dim in dims]
        for corner in product(*sides):
            found[tuple(at for at, _ in corner)] += prod(sign for _, sign in corner)
    return {corner: times for corner, times in found.items() if times}


def _wrong(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{display_path(folder / INDEX)} says that {what}. Nothing was loaded.")
