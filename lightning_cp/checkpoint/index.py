"""``index.json`` of a sharded checkpoint: of every tensor dtype, shape, and where its blocks are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from lightning_cp.checkpoint.encode import dtype_named
from lightning_cp.checkpoint.failures import shown
from lightning_cp.checkpoint.manifest import Manifest
from lightning_cp.checkpoint.shard_file import Written, mapped
from lightning_cp.checkpoint.tensors import Chunk, Stored
from lightning_cp.errors import CheckpointError

INDEX = "index.json"
_PLACE = ("offsets", "sizes", "file", "begin")
_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins, and its sizes."""


def index_of(blocks: Sequence[Written]) -> dict[str, Any]:
    """The index of the blocks of all ranks."""
    found: dict[str, list[Written]] = {}
    for block in blocks:
        found.setdefault(block.key, []).append(block)
    tensors = {}
    for key, written in found.items():
        chunks = [{k: v for k, v in asdict(w).items() if k in _PLACE} for w in written]
        tensors[key] = {"dtype": written[0].dtype, "shape": written[0].shape, "chunks": chunks}
    return {"tensors": tensors}


def stored_in(folder: Path, key: str, entry: dict[str, Any], manifest: Manifest) -> Stored:
    """A tensor of a folder, to be read when it is wanted.

    Args:
        folder: the checkpoint.
        key: the tensor's name in the index.
        entry: what the index says of it.
        manifest: names the files that were verified, and their sizes.

    Raises:
        CheckpointError: blocks are in other files, or are not the tensor.
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
    return Stored(dtype, shape, tuple(_chunk(folder, x, dtype) for x in entry["chunks"]))


def _chunk(folder: Path, x: dict[str, Any], dtype: torch.dtype) -> Chunk:
    read = partial(mapped, folder / x["file"], x["begin"], x["sizes"], dtype)
    return Chunk(tuple(x["offsets"]), tuple(x["sizes"]), read)


def _fills(shape: tuple[int, ...], blocks: Sequence[_Box]) -> bool:
    """True if blocks lie in a tensor, and each of its elements is in one of them and in no other."""
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
    """The number of times each corner comes, with its sign: at the end of one dimension ``-``, of two ``+``.

    Sums from the beginning over these are how often each element comes, so two sets of boxes with the same
    corners have each element equally often; and thousands of boxes need not be compared with each other.
    """
    found: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        sides = [((offsets[dim], 1), (offsets[dim] + sizes[dim], -1)) for dim in dims]
        for corner in product(*sides):
            found[tuple(at for at, _ in corner)] += prod(sign for _, sign in corner)
    return {corner: times for corner, times in found.items() if times}


def _wrong(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{shown(folder / INDEX)} says that {what}. Nothing was loaded.")
